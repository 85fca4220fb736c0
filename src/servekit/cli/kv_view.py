"""Plans as people read them: the answer first, a bar of the memory, then the arithmetic. It must not compute."""

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servekit.kvcalc.caches import Growth
from servekit.kvcalc.capacity import Limit
from servekit.kvcalc.explain import Step
from servekit.kvcalc.plan import Plan
from servekit.units import format_bytes

if TYPE_CHECKING:
    from servekit.cli.kv_check import Comparison

_LIMITS = {
    Limit.KV_MEMORY: "limited by KV memory",
    Limit.WEIGHTS: "the weights alone do not fit",
    Limit.UNKNOWN_WEIGHTS: "the size of the weights is unknown",
    Limit.NOTHING_KEPT: "no request keeps anything in memory",
}
_UNITS = {
    Growth.TOKENS: "per token",
    Growth.INDEXER: "per token",
    Growth.WINDOW: "per request, at most",
    Growth.STATE: "per request",
    Growth.SOURCE: "per source token",
}
# Each part has a mark of its own, so that the bar reads without colour; the second is for terminals without Unicode.
_BAR = (
    ("weights", "cyan", "█", "#"),
    ("reserve", "yellow", "▒", "x"),
    ("KV", "green", "▓", "="),
    ("free", "dim", "░", "."),
)
_MAX_WIDTH = 100


def make_console() -> Console:
    """Standard output; colour only on a terminal and without NO_COLOR, at most 100 columns wide."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, _MAX_WIDTH)
    return console


def show(console: Console, plan: Plan, others: Iterable[Plan] = ()) -> None:
    """One model: answer, memory, arithmetic, remarks."""
    console.print(Text(headline(plan), style="bold"))
    console.print(_subtitle(plan), style="dim")
    console.print()
    if plan.budget.kv is not None:
        _show_memory(console, plan)
    _show_request(console, plan)
    for other in others:
        per_token = f"{_exact(other.terms.bytes_per_token)} per token"
        console.print(f"in {other.kv_dtype.name}: {per_token}, {_amount(other)}")
    _show_remarks(console, plan)


def headline(plan: Plan) -> str:
    """The answer in one line."""
    asked, fit = plan.load.num_requests, plan.capacity.requests
    if asked is not None and fit is not None:
        does = "fit" if fit >= asked else "do not fit"
        noun = "request" if asked == 1 else "requests"
        return f"{asked:,} {noun} of {_size(plan)} {does} ({fit:,} would); {_LIMITS[plan.capacity.limit]}"
    verb = "" if plan.capacity.requests is None else " fits" if plan.capacity.requests == 1 else " fit"
    return f"{_amount(plan)}{verb}; {_LIMITS[plan.capacity.limit]}"


def show_steps(console: Console, plan: Plan) -> None:
    """The arithmetic step by step, as on paper."""
    console.print("Step by step", style="bold")
    steps = Table.grid(padding=(0, 1))
    steps.add_column(justify="right", no_wrap=True)
    steps.add_column(overflow="fold")
    for number, line in enumerate(_lines(plan), start=1):
        steps.add_row(f"{number}.", line)
    console.print(steps)


def show_table(console: Console, plan: Plan, dtypes: list[str], rows: list[tuple[int, list[int | None]]]) -> None:
    """Requests that fit, by context length and KV dtype."""
    table = _table(f"Requests that fit: {plan.model.name}")
    table.add_column("tokens", justify="right")
    for dtype in dtypes:
        table.add_column(dtype, justify="right")
    for tokens, counts in rows:
        table.add_row(f"{tokens:,}", *("-" if count is None else f"{count:,}" for count in counts))
    console.print(table)


def show_comparison(console: Console, plans: list[Plan]) -> None:
    """Several models side by side, one row each."""
    first = plans[0]
    table = _table(f"Side by side, requests of {first.num_tokens:,} tokens")
    table.add_column("model", overflow="fold", min_width=16)
    for name in ("weights", "per token", "fixed, at most", "a request", "fit"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        weights, fit = plan.model.weights.num_bytes, plan.capacity.requests
        growth = plan.terms.bytes_per_token + plan.terms.indexer_bytes_per_token
        table.add_row(
            plan.model.name,
            "?" if weights is None else format_bytes(weights),
            format_bytes(int(growth)),
            format_bytes(plan.terms.window_bytes + plan.terms.state_bytes),
            format_bytes(plan.request_bytes),
            "?" if fit is None else f"{fit:,}",
        )
    console.print(table)
    console.print(f"{_memory_words(first)}; fixed is windows and states", style="dim")


def show_check(console: Console, url: str, rows: "list[Comparison]") -> None:
    """Plan against reality: one row a number of the pool."""
    table = _table(f"Plan against {url}")
    table.add_column("pool")
    table.add_column("planned", justify="right")
    table.add_column("server", justify="right")
    table.add_column("")
    for row in rows:
        answer = Text("equal", style="green") if row.is_equal else Text("DIFFERS", style="bold red")
        table.add_row(row.name, f"{row.planned:,}", f"{row.real:,}", answer)
    console.print(table)


def _amount(plan: Plan) -> str:
    count = plan.capacity.requests
    if count is None:
        return f"a request of {_size(plan)} takes {format_bytes(plan.request_bytes)}"
    return f"{count:,} request{'' if count == 1 else 's'} of {_size(plan)}"


def _size(plan: Plan) -> str:
    source = f" (and {plan.source_tokens:,} source tokens)" if plan.source_tokens else ""
    return f"{plan.num_tokens:,} tokens{source}"


def _subtitle(plan: Plan) -> str:
    devices = f" on {plan.load.num_devices} devices" if plan.load.num_devices > 1 else ""
    draft = f" with draft {plan.draft.name}" if plan.draft else ""
    return f"{plan.model.name}{draft}{devices}, KV in {plan.kv_dtype.name}, {_memory_words(plan)}"


def _memory_words(plan: Plan) -> str:
    size = format_bytes(plan.budget.memory)
    if plan.load.kv_memory is not None:
        return f"{size} for keys and values alone"
    each = " each" if plan.load.num_devices > 1 else ""
    return f"{size}{each}" if plan.load.memory.name == "given" else f"{size}{each} ({plan.load.memory.name})"


def _show_memory(console: Console, plan: Plan) -> None:
    budget = plan.budget
    kv = max(budget.kv or 0, 0)
    used = min(kv, (plan.capacity.requests or 0) * plan.device_request_bytes)
    sizes = {"weights": budget.weights or 0, "reserve": budget.reserve, "KV": used, "free": kv - used}
    total = max(budget.memory, sum(sizes.values()))
    bar, width = Text(), console.width
    edges = _edges([sizes[name] for name, *_ in _BAR], total, width)
    for (_, style, mark, plain), cells in zip(_BAR, edges, strict=True):
        bar.append((mark if _is_unicode(console) else plain) * cells, style=style)
    console.print(bar)
    legend = Text()
    for name, style, mark, plain in _BAR:
        legend.append((mark if _is_unicode(console) else plain) + " ", style=style)
        legend.append(f"{name} {format_bytes(sizes[name])}  ")
    console.print(legend)
    if budget.kv is not None and budget.kv <= 0:
        console.print(f"{format_bytes(-budget.kv)} too little for weights and reserve", style="red")
    console.print()


def _edges(sizes: list[int], total: int, width: int) -> list[int]:
    """Cells for each part, summing to the width, so that every part ends where its running sum does."""
    ends = [round(sum(sizes[: index + 1]) * width / total) for index in range(len(sizes))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _show_request(console: Console, plan: Plan) -> None:
    table = _table("What one request keeps")
    table.add_column("layers", overflow="fold")
    table.add_column("arithmetic", overflow="fold", ratio=1)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for step in plan.steps:
        table.add_row(step.name, step.formula, _exact(step.num_bytes), _UNITS[step.growth])
    if not plan.steps:
        table.add_row("none", "no layer keeps anything between steps", "0 B", "per request")
    size = f"{plan.num_tokens:,} tokens"
    table.add_row(Text("request", style="bold"), size, _exact(plan.request_bytes), format_bytes(plan.request_bytes))
    if plan.load.num_requests is not None:
        total = plan.request_bytes * plan.load.num_requests
        table.add_row("", f"x {plan.load.num_requests:,} requests", _exact(total), format_bytes(total))
    console.print(table)
    console.print()


def _show_remarks(console: Console, plan: Plan) -> None:
    weights, shape = plan.model.weights, plan.model.shape
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row("weights", _weights_words(plan))
    if plan.draft is not None and plan.draft.weights.num_bytes is not None:
        table.add_row("draft", f"{plan.draft.name}: {format_bytes(plan.draft.weights.num_bytes)} of weights")
    elif plan.draft is not None:
        table.add_row("draft", f"{plan.draft.name}: {plan.draft.weights.source}")
    if shape.max_model_len is not None:
        table.add_row("context", f"{shape.max_model_len:,} tokens at most")
    if plan.load.num_devices > 1:
        one = f"{_exact(plan.device_terms.bytes_per_token)} per token on each of {plan.load.num_devices} devices"
        table.add_row("devices", one)
    if plan.mtp_bytes_per_token:
        table.add_row("MTP", f"{_exact(plan.mtp_bytes_per_token)} per token more, if its extra layers are used")
    if plan.pool is not None:
        table.add_row("engine", _pool_words(plan))
    if plan.needed is not None:
        answer = {True: "it fits", False: "it does not fit", None: "whether it fits cannot be said"}[plan.needed.fits]
        words = f"{plan.needed.concurrency:g} requests at once, each for {plan.needed.seconds:g} s: {answer}"
        table.add_row("arrivals", words)
    for bound in plan.bounds:
        rate = f"at most {bound.tokens_per_second:,.1f} tokens/s"
        read = format_bytes(bound.weight_bytes + bound.kv_bytes)
        table.add_row(f"batch {bound.batch:,}", f"{rate}: a step reads {read} and takes {bound.seconds * 1e3:,.2f} ms")
    for warning in plan.warnings:
        table.add_row("note", warning)
    for note in shape.notes:
        table.add_row("note", note)
    for assumption in shape.assumed:
        table.add_row(Text("assumed", style="yellow"), assumption)
    if weights.source.startswith("estimated"):
        table.add_row("note", "weights are an estimate: this family's small parts or its vision tower are not known")
    console.print(table)


def _weights_words(plan: Plan) -> str:
    weights = plan.model.weights
    if weights.num_bytes is None:
        return weights.source
    words = [format_bytes(weights.num_bytes)]
    if weights.num_parameters is not None:
        words.append(f"{weights.num_parameters:,} parameters")
    active, total = weights.active_parameters, weights.num_parameters
    if active is not None and total is not None and active < total and weights.counted and weights.counted.experts:
        words.append(f"{active:,} active")
    if weights.dtype is not None:
        words.append(weights.dtype)
    return ", ".join(words) + f" ({weights.source})"


def _pool_words(plan: Plan) -> str:
    pool = plan.pool
    assert pool is not None
    words = f"{pool.num_blocks:,} blocks of {pool.block_size} tokens, {pool.block_bytes:,} B each"
    if plan.terms.window_bytes:
        words += "; its pool keeps sliding layers in full"
    return words


def _lines(plan: Plan) -> Iterable[str]:
    for step in plan.steps:
        yield f"{step.name}: {step.formula} = {_exact(step.num_bytes)} {_UNITS[step.growth]}"
    yield f"one request of {plan.num_tokens:,} tokens: {_request_formula(plan)} = {_exact(plan.request_bytes)}"
    budget = plan.budget
    if plan.device_request_bytes != plan.request_bytes:
        yield f"on one device, draft included: {_exact(plan.device_request_bytes)}"
    if plan.load.kv_memory is None and budget.weights is not None and budget.kv is not None:
        parts = f"{budget.memory:,} - {budget.reserve:,} reserve - {budget.weights:,} weights"
        yield f"memory for KV: {parts} = {budget.kv:,} B"
    if plan.capacity.requests is not None and budget.kv is not None and plan.capacity.limit is Limit.KV_MEMORY:
        yield f"requests: {budget.kv:,} / {plan.device_request_bytes:,}, rounded down = {plan.capacity.requests:,}"
    if plan.needed is not None and plan.load.arrivals is not None:
        arrivals, output = plan.load.arrivals, plan.load.output_tokens or 0
        seconds = f"{arrivals.ttft:g} + ({output:,} - 1) x {arrivals.tpot:g}"
        yield f"a request stays {seconds} = {plan.needed.seconds:g} s"
        yield f"requests at once: {arrivals.rate:g} a second x {plan.needed.seconds:g} s = {plan.needed.concurrency:g}"


def _request_formula(plan: Plan) -> str:
    return " + ".join(_request_part(step, plan) for step in plan.steps) or "nothing"


def _request_part(step: Step, plan: Plan) -> str:
    if step.growth is Growth.STATE:
        return f"{step.num_bytes.numerator:,}"
    block = plan.load.block_size or 1
    tokens = plan.source_tokens if step.growth is Growth.SOURCE else plan.num_tokens
    kept = min(tokens, step.window or tokens)
    kept = -(-kept // block) * block
    return f"{kept:,} x {_plain(step.num_bytes / (step.window or 1))}"


def _exact(count: Fraction | int) -> str:
    return f"{_plain(Fraction(count))} B"


def _plain(count: Fraction) -> str:
    return f"{count.numerator:,}" if count.denominator == 1 else f"{float(count):,.2f}"


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=True, pad_edge=False
    )


def _is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
