"""`servekit pull`: fetch a model into the store."""

import json
from typing import Annotated

import typer


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="demo (SmolLM2-135M-Instruct), demo-embedding (all-MiniLM-L6-v2), or a hub id ORG/NAME.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was pulled as JSON.")] = False,
) -> None:
    """Fetch a model, with its checksums checked; an interrupted pull goes on where it stopped."""
    from servekit.cli.progress import transfer_progress
    from servekit.store.resolve import pull_model

    with transfer_progress() as progress:
        model = pull_model(name, progress)
    if as_json:
        print(json.dumps({"name": model.name, "directory": str(model.directory), "source": model.source}))
    else:
        print(model.directory)
