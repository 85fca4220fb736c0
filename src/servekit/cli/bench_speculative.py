"""`servekit bench speculative`: what speculative decoding can gain, from the acceptance rate alone."""

from typing import Annotated

import typer


def speculative(
    alpha: Annotated[float, typer.Option(help="Share of drafted tokens that the target accepts.")],
    k: Annotated[str, typer.Option(help="Tokens drafted for each pass; several as 2,4,8.")] = "4",
    draft_cost: Annotated[
        float | None,
        typer.Option(help="Time of one drafted token in passes of the target, as 0.05.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> int:
    """Expected tokens of a target pass, and the draft cost at which drafting stops to pay."""
    from dataclasses import asdict
    from json import dumps

    from rich import box
    from rich.table import Table

    from servekit.bench.speculative import best, speculate
    from servekit.cli.kv_view import make_console
    from servekit.errors import ConfigError

    parts = [part.strip() for part in k.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--k: {k!r} is not a list of whole numbers", hint="write it like 4 or 2,4,8", param="k")
    found = [speculate(alpha, int(part), draft_cost) for part in parts]
    if json:
        typer.echo(dumps({"version": 1, "speculative": [asdict(one) for one in found]}, indent=2))
        return 0
    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("k", "tokens a pass", "break-even draft cost", *(["speedup"] if draft_cost is not None else [])):
        table.add_column(name, justify="right")
    for one in found:
        row = [str(one.k), f"{one.tokens_per_pass:.2f}", f"{one.break_even_draft_cost:.3f}"]
        table.add_row(*row, *([] if one.speedup is None else [f"{one.speedup:.2f}x"]))
    console.print(table)
    console.print("costs are in passes of the target model, for each drafted token", style="dim")
    if draft_cost is not None and len(found) > 1:
        console.print(f"best at this cost: k = {best(found).k}")
    return 0
