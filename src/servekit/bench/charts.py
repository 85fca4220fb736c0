"""Small charts as SVG text. Colours are classes: one style sheet serves light and dark. It must not know runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points (x, y), with an interval each where it is known. `css` is its colour's class, `mark` its shape."""

    name: str
    css: str
    mark: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float] | None] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a row: from `start` to `end` in the colour of `css`."""

    start: float
    end: float
    css: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a timeline, with the text of its tooltip."""

    segments: Sequence[Segment]
    title: str


@dataclass(frozen=True, slots=True)
class _Frame:
    """The drawing area inside the margins, and the scales that map into it."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float

    def x(self, share: float) -> float:
        return self.left + share * (self.width - self.left - self.right)

    def y(self, share: float) -> float:
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


Words = Callable[[float], str]
_Scale = Callable[[float], float]


def line_chart(
    series: Sequence[Series],
    *,
    x_name: str,
    x_words: Words,
    y_words: Words,
    tick_words: Words,
    label: str,
    width: int = 1120,
) -> str:
    """Lines over a common x; y is logarithmic."""
    frame = _Frame(width, 360, 74, 190, 16, 48)
    xs = sorted({x for line in series for x, _ in line.points})
    lows = [low for line in series for low in _lows(line)]
    highs = [high for line in series for high in _highs(line)]
    low, high = _log_bounds(min(lows), max(highs))

    def x_at(x: float) -> float:
        return frame.x(0.5 if len(xs) == 1 else 0.02 + 0.96 * (x - xs[0]) / (xs[-1] - xs[0]))

    def y_at(y: float) -> float:
        return frame.y((math.log(max(y, low)) - math.log(low)) / (math.log(high) - math.log(low)))

    parts = [_grid_line(frame, y_at(tick), tick_words(tick)) for tick in _log_ticks(low, high)]
    shown = -math.inf
    for x in xs:
        if x_at(x) - shown >= 44:
            parts.append(_text(x_at(x), frame.height - 26, x_words(x), "tick", "middle"))
            shown = x_at(x)
    parts.append(_text((frame.x(0) + frame.x(1)) / 2, frame.height - 6, x_name, "axis", "middle"))
    parts += [_line(line, x_at, y_at, x_words, y_words) for line in series]
    ends = _spread([y_at(line.points[-1][1]) for line in series], 17)
    for line, end in zip(series, ends, strict=True):
        parts.append(f'<g class="{line.css}">{_mark(frame.x(1) + 14, end, line.mark)}</g>')
        parts.append(_text(frame.x(1) + 24, end + 4, line.name, "legend", "start"))
    return _svg(frame, parts, label)


def timeline(rows: Sequence[Row], *, end: float, words: Words, label: str, width: int = 1120) -> str:
    """A row for each thing that took time, from 0 to `end`."""
    height = 14.0 if len(rows) <= 40 else 8.0 if len(rows) <= 100 else 5.0
    frame = _Frame(width, 42 + height * len(rows), 8, 24, 6, 36)
    parts = []
    for tick in _linear_ticks(end):
        x = frame.x(tick / end)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{frame.top}" x2="{x:.1f}" y2="{frame.height - 30:.1f}"/>')
        parts.append(_text(x, frame.height - 14, words(tick), "tick", "middle" if tick else "start"))
    for number, row in enumerate(rows):
        y = frame.top + number * height
        bars = "".join(
            f'<rect class="{part.css}" x="{frame.x(part.start / end):.1f}" y="{y + 1:.1f}" '
            f'width="{max(frame.x(part.end / end) - frame.x(part.start / end), 0.8):.1f}" height="{height - 2:.1f}"/>'
            for part in row.segments
            if part.end > part.start
        )
        parts.append(f"<g><title>{escape(row.title)}</title>{bars}</g>")
    return _svg(frame, parts, label)


def histogram(
    values: Sequence[float],
    marks: Sequence[tuple[str, float]],
    *,
    words: Words,
    tick_words: Words,
    label: str,
    width: int = 1120,
) -> str:
    """How often which value came, on a logarithmic scale, with lines at the `marks` (name, value)."""
    frame = _Frame(width, 260, 56, 24, 34, 44)
    positive = [value for value in values if value > 0]
    low, high = _log_bounds(min(positive), max(positive), margin=1.02)
    num_bins = 60
    counts = [0] * num_bins
    scale = num_bins / (math.log(high) - math.log(low))
    for value in positive:
        counts[min(num_bins - 1, int((math.log(value) - math.log(low)) * scale))] += 1
    most = max(counts)

    def x_at(value: float) -> float:
        return frame.x((math.log(value) - math.log(low)) / (math.log(high) - math.log(low)))

    shares = (0.0, 0.5, 1.0)
    parts = [_grid_line(frame, frame.y(share), f"{most * share / len(positive):.0%}") for share in shares]
    step = (frame.x(1) - frame.x(0)) / num_bins
    for position, count in enumerate(counts):
        if count:
            y = frame.y(count / most)
            title = f"{words(low * math.exp(position / scale))} and more: {count} of {len(positive)}"
            parts.append(
                f'<rect class="decode" x="{frame.x(0) + position * step + 0.5:.1f}" y="{y:.1f}" '
                f'width="{step - 1:.1f}" height="{frame.y(0) - y:.1f}"><title>{escape(title)}</title></rect>'
            )
    ticks = _log_ticks(low, high)
    parts += [_text(x_at(tick), frame.height - 26, tick_words(tick), "tick", "middle") for tick in ticks]
    right_end = -math.inf
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if not low <= value <= high:
            continue
        x, text = x_at(value), f"{name} {words(value)}"
        row = 12 if x - 4 > right_end else 26
        right_end = x + 7 * len(text) if row == 12 else right_end
        anchor = "end" if x > frame.x(0.88) else "start"
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{row - 8}" x2="{x:.1f}" y2="{frame.y(0):.1f}"/>')
        parts.append(_text(x + (-5 if anchor == "end" else 5), row, text, "legend", anchor))
    return _svg(frame, parts, label)


def _svg(frame: _Frame, parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{escape(label, quote=True)}"'
    return f'<svg {size} xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _line(line: Series, x_at: _Scale, y_at: _Scale, x_words: Words, y_words: Words) -> str:
    path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line.points)
    parts = [f'<polyline class="line" points="{path}"/>'] if len(line.points) > 1 else []
    for position, (x, y) in enumerate(line.points):
        interval = line.intervals[position] if position < len(line.intervals) else None
        title = f"{line.name} at {x_words(x)}: {y_words(y)}"
        if interval is not None:
            low, high = y_at(interval[0]), y_at(interval[1])
            parts.append(
                f'<line class="whisker" x1="{x_at(x):.1f}" y1="{low:.1f}" x2="{x_at(x):.1f}" y2="{high:.1f}"/>'
            )
            title += f" ({y_words(interval[0])} to {y_words(interval[1])})"
        parts.append(f"<g>{_mark(x_at(x), y_at(y), line.mark)}<title>{escape(title)}</title></g>")
    return f'<g class="{line.css}">{"".join(parts)}</g>'


def _mark(x: float, y: float, shape: str) -> str:
    """A shape for each line, so that lines can be told apart without colour."""
    if shape == "square":
        return f'<rect class="dot" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"/>'
    if shape == "triangle":
        return f'<path class="dot" d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z"/>'
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def _grid_line(frame: _Frame, y: float, text: str) -> str:
    line = f'<line class="grid" x1="{frame.left:g}" y1="{y:.1f}" x2="{frame.x(1):.1f}" y2="{y:.1f}"/>'
    return line + _text(frame.left - 8, y + 4, text, "tick", "end")


def _text(x: float, y: float, text: str, css: str, anchor: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _lows(line: Series) -> list[float]:
    return [y for _, y in line.points] + [interval[0] for interval in line.intervals if interval is not None]


def _highs(line: Series) -> list[float]:
    return [y for _, y in line.points] + [interval[1] for interval in line.intervals if interval is not None]


def _log_bounds(low: float, high: float, margin: float = 1.15) -> tuple[float, float]:
    """Bounds around positive values, at least a factor of two apart."""
    low, high = max(low, 1e-6) / margin, max(high, 1e-6) * margin
    if high / low < 2:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(2), middle * math.sqrt(2)
    return low, high


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 in every decade, or only 1 when that would be too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    return [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]


def _linear_ticks(end: float) -> list[float]:
    """About ten round numbers from 0 to `end`."""
    rough = end / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * number for number in range(int(end / step) + 1)]


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """The same places, moved down as far as needed to keep `gap` between them."""
    order = sorted(range(len(places)), key=lambda position: places[position])
    moved = list(places)
    for before, after in pairwise(order):
        moved[after] = max(moved[after], moved[before] + gap)
    return moved
