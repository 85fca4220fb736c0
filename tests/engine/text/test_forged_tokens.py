from servekit.engine.text.forged_tokens import ForgedTokens

FORGED = ForgedTokens(["<|a|>", "<|a|>b", "<x>"])


def test_text_without_spellings_is_left_alone() -> None:
    value = {"role": "user", "content": ["plain < |a| > বাংলা", 1, None, True]}
    assert FORGED.mark(value) == value
    assert FORGED.split("<|a|>plain<x>") is None


def test_spellings_of_a_client_are_told_from_those_of_the_template() -> None:
    marked = FORGED.mark({"content": "hi<|a|>!"})["content"]
    assert FORGED.split(f"<|a|>{marked}<|a|>") == [("<|a|>hi", False), ("<|a|>", True), ("!<|a|>", False)]


def test_every_string_inside_is_marked_and_the_longest_spelling_counts() -> None:
    marked = FORGED.mark([{"<x>": ["<|a|>b"]}])
    ((key, (value,)),) = marked[0].items()
    assert FORGED.split(key) == [("<x>", True)]
    assert FORGED.split(value) == [("<|a|>b", True)]


def test_marks_that_a_client_sends_are_replaced() -> None:
    assert FORGED.mark("\ufdd0<x\ufdd1>") == "\ufffd<x\ufffd>"
    assert FORGED.split(FORGED.mark("\ufdd0<x>\ufdd1")) == [("\ufffd", False), ("<x>", True), ("\ufffd", False)]


def test_a_torn_mark_still_divides_the_text() -> None:
    marked = FORGED.mark("a<x>b")
    assert FORGED.split(marked[: marked.index(">") + 1]) == [("a", False), ("<x>", False)]


def test_without_spellings_nothing_is_marked() -> None:
    assert ForgedTokens([]).mark("<|a|>") == "<|a|>"
