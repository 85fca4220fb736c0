"""Which of the served models a request may have: by name, and by what it can do."""

from servekit.engine.embedder import Embedder
from servekit.errors import UnsupportedError
from servekit.server.errors import ModelNotFoundError
from servekit.server.state import ServerState

MAX_MODEL_CHARS = 100


def check_model(name: str | None, state: ServerState) -> None:
    """Raise ModelNotFoundError unless `name` is a served model's, letter by letter, or absent."""
    if name is not None and name not in state.model_names:
        shown = name if len(name) <= MAX_MODEL_CHARS else f"{name[:MAX_MODEL_CHARS]}..."
        served = " and ".join(repr(name) for name in state.model_names)
        raise ModelNotFoundError(
            f"the model {shown!r} is not served here", hint=f"this server serves {served}", param="model"
        )


def check_generates(name: str | None, state: ServerState) -> None:
    """Raise UnsupportedError for a model that embeds and cannot write, ModelNotFoundError for one that is not here."""
    check_model(name, state)
    if not state.ready_engine().can_generate or (name is not None and name != state.model_name):
        raise UnsupportedError(
            f"the model {state.embedding_name!r} embeds text and cannot write it",
            hint="its routes are /v1/embeddings, /rerank and /score",
            param="model",
        )


def embedder_for(name: str | None, state: ServerState) -> Embedder:
    """The embedding model. Raises UnsupportedError when there is none or `name` is the model that writes."""
    embedder = state.ready_engine().embedder
    if embedder is None:
        raise UnsupportedError(
            "this server has no embedding model",
            hint="start it with --embedding-model, or serve one on its own",
            param="model",
        )
    check_model(name, state)
    if name is not None and name != state.embedding_name:
        raise UnsupportedError(
            f"the model {name!r} writes text and embeds none",
            hint=f"the embedding model is {state.embedding_name!r}",
            param="model",
        )
    return embedder
