"""The options that name a server, shared by the bench commands that load one."""

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8080"

Url = Annotated[str, typer.Option(help="The server's address.")]
ModelId = Annotated[str | None, typer.Option(help="The model's id. [the first the server lists]", show_default=False)]
ApiKey = Annotated[
    str | None, typer.Option(envvar="SERVEKIT_API_KEY", help="Sent as a bearer token.", show_envvar=True)
]
