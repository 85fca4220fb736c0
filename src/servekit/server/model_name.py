"""Which names mean the served model. A name is only ever compared; it never becomes a path."""

from servekit.server.errors import ModelNotFoundError
from servekit.server.state import ServerState

MAX_MODEL_CHARS = 100


def check_model(name: str | None, state: ServerState) -> None:
    """Raise ModelNotFoundError unless `name` is the served model's, letter by letter, or absent."""
    if name is not None and name != state.model_name:
        shown = name if len(name) <= MAX_MODEL_CHARS else f"{name[:MAX_MODEL_CHARS]}..."
        raise ModelNotFoundError(
            f"the model {shown!r} is not served here", hint=f"this server serves {state.model_name!r}", param="model"
        )
