"""`x-servekit-explain: cache`: why the prefix cache held as much of a prompt as it did, as a header of the answer."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from servekit.engine.core.prefix_history import PrefixExplanation
from servekit.engine.core.request import Request
from servekit.errors import InputError
from servekit.server.gate import key_holder
from servekit.server.state import EngineFacade, TokenNames

MAX_EXPLAINED = 8
"""Prompts of one request that are explained: a header has its limits."""


async def explain_header(
    http: HttpRequest, engine: EngineFacade, requests: Sequence[Request], choices_per_prompt: int
) -> str | None:
    """A JSON list with an entry for each prompt, looked up before it is computed; None where nobody asked.

    Raises InputError for anything but `cache` in the header, and what `EngineFacade.explain_cache` raises.
    """
    asked = http.headers.get("x-servekit-explain")
    if asked is None:
        return None
    if asked.strip().lower() != "cache":
        raise InputError("x-servekit-explain can only be `cache`", param="x-servekit-explain")
    visible = key_holder(http.scope)
    firsts = requests[: MAX_EXPLAINED * choices_per_prompt : choices_per_prompt]
    rows = [_row(await engine.explain_cache(request, visible), engine.tokenizer) for request in firsts]
    return json.dumps(rows, separators=(",", ":"))


def _row(found: PrefixExplanation, names: TokenNames) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cached_tokens": found.num_cached_tokens,
        "shared_tokens": found.num_shared_tokens,
        "end": found.end.value,
    }
    for name, token_id in (("given", found.given_token), ("known", found.known_token)):
        row[name] = None if token_id is None else {"id": token_id, "text": names.token_text(token_id)}
    return row
