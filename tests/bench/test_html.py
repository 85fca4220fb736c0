"""The report is one well-formed file that needs nothing else."""

import re
from html.parser import HTMLParser

import pytest

from servekit.bench.html import render_report
from servekit.bench.measure import measure
from servekit.bench.result import Limit, Record, Run, RunFile, Target, Timings
from tests.bench.records import answered, refused

_VOID = {"meta", "br"}


class _Checker(HTMLParser):
    """Keeps the open elements, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def run(rate: float, *, factor: float = 1.0) -> Run:
    timings = Timings(queue_s=0.1, prefill_s=0.2, decode_s=0.4)
    records = [answered(n, at=n / rate, ttft=0.3 * factor, tokens=5, timings=timings) for n in range(20)]
    made = measure([*records, refused(20, at=20 / rate)], rate=rate)
    made.limit = Limit(name="device", evidence=["<busy> & more"])
    made.notes = ["a <note>"]
    return made


def checked(runs: list[Run]) -> tuple[str, _Checker]:
    text = render_report(RunFile(target=Target(url="http://x", model="<m>"), runs=runs))
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    return text, checker


def test_the_report_is_well_formed_and_alone() -> None:
    text, checker = checked([run(1.0), run(2.0), run(4.0, factor=3.0)])

    assert checker.links == []
    assert not {"script", "link", "img", "iframe"} & set(checker.seen)
    assert not re.search(r"url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_text_from_outside_is_escaped() -> None:
    text, _ = checked([run(1.0)])

    assert "&lt;m&gt; under load" in text
    assert "&lt;busy&gt; &amp; more" in text
    assert "a &lt;note&gt;" in text
    assert "<m>" not in text


def test_it_has_the_three_charts() -> None:
    text, checker = checked([run(1.0), run(2.0)])

    assert checker.seen.count("svg") == 1 + 2 * 2
    for label in ("Latency against arrivals a second", "Timeline of the requests", "Distribution of the time between"):
        assert f'aria-label="{label}' in text
    assert 'class="prefill"' in text
    assert 'class="failed"' in text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [refused()],
        [answered(tokens=1)],
        [answered(gap=0.0)],
        [Record(index=0, scheduled_s=0.0, sent_s=0.0, end_s=0.2, status=200)],
    ],
)
def test_a_run_with_little_in_it_still_reads(records: list[Record]) -> None:
    checked([measure(records, rate=1.0)])
    checked([measure(records, concurrency=2)])
    checked([measure(records)])
