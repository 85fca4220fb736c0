"""Request bodies, greedy unless told otherwise, and what is read out of the answers to them."""

from collections.abc import Iterable, Mapping
from typing import Any


def user(content: Any) -> dict[str, Any]:
    """A user's turn."""
    return {"role": "user", "content": content}


def chat(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat body; without messages, one short turn."""
    return {"messages": list(messages) or [user("the cat")], "temperature": 0, **fields}


def completion(prompt: Any = "the cat", **fields: Any) -> dict[str, Any]:
    """A completion body."""
    return {"prompt": prompt, "temperature": 0, **fields}


def endless(**fields: Any) -> dict[str, Any]:
    """A chat body whose answer is as long as the context allows."""
    return chat(ignore_eos=True, **fields)


def chat_text(answer: Mapping[str, Any], index: int = 0) -> str:
    """The text of one choice of a chat answer."""
    text: str = answer["choices"][index]["message"]["content"]
    return text


def completion_text(answer: Mapping[str, Any], index: int = 0) -> str:
    """The text of one choice of a completion."""
    text: str = answer["choices"][index]["text"]
    return text


def piece(event: Mapping[str, Any], index: int = 0) -> str:
    """What one event of a stream adds to the text of one choice, on either route."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in event["choices"]
        if choice["index"] == index
    )


def streamed_text(events: Iterable[Mapping[str, Any]], index: int = 0) -> str:
    """The whole text of one choice of a stream."""
    return "".join(piece(event, index) for event in events)


def finish(events: Iterable[Mapping[str, Any]], index: int = 0) -> Mapping[str, Any]:
    """The one choice object that ends choice `index`, which must be the last of that index."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] is not None
    last: Mapping[str, Any] = choices[-1]
    return last
