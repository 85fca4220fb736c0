"""`servekit models`: list and remove what was pulled."""

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(help="List the pulled models, or remove one.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the pulled models."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from servekit.store.manifest import list_models
    from servekit.units import format_bytes

    manifests = list_models()
    if as_json:
        print(json.dumps([{**asdict(manifest), "size": manifest.size} for manifest in manifests], ensure_ascii=False))
        return
    if not manifests:
        print("no model is pulled; `servekit pull demo` fetches one", file=sys.stderr)
    rows = [
        (manifest.name, format_bytes(manifest.size), manifest.licence or "?", manifest.source, manifest.pulled_at)
        for manifest in manifests
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("rm")
def remove(
    name: Annotated[str, typer.Argument(help="A name that `servekit models` lists.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was removed as JSON.")] = False,
) -> None:
    """Remove a pulled model."""
    from servekit.store.manifest import remove_model
    from servekit.units import format_bytes

    freed = remove_model(name)
    if as_json:
        print(json.dumps({"name": name, "freed_bytes": freed}))
    else:
        print(f"removed {name}, {format_bytes(freed)}", file=sys.stderr)
