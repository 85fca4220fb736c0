"""The routes, and the app that serves them. It must not know how the engine is loaded or how the socket is bound."""

from dataclasses import asdict

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from servekit.errors import ServekitError
from servekit.server.access_log import AccessLog
from servekit.server.answer import answer
from servekit.server.chat import ChatPlan
from servekit.server.completions import CompletionPlan
from servekit.server.embeddings import embeddings
from servekit.server.errors import handle_disconnect, handle_http_exception, handle_servekit_error
from servekit.server.models import check_model
from servekit.server.rerank import rerank, score
from servekit.server.schema import ChatBody, CompletionBody
from servekit.server.state import ServerState


def create_app(state: ServerState) -> Starlette:
    """The ASGI app over `state`, which its owner fills in and changes while the app runs."""
    routes = Routes(state)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/embeddings", routes.embeddings, methods=["POST"]),
            Route("/rerank", routes.rerank, methods=["POST"]),
            Route("/v1/rerank", routes.rerank, methods=["POST"]),
            Route("/score", routes.score, methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", routes.model, methods=["GET"]),
            Route("/health", routes.health, methods=["GET"]),
            Route("/props", routes.props, methods=["GET"]),
            Route("/slots", routes.slots, methods=["GET"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
        ],
        middleware=[Middleware(AccessLog)],
        exception_handlers={
            ServekitError: handle_servekit_error,
            HTTPException: handle_http_exception,
            ClientDisconnect: handle_disconnect,
        },
    )
    # A redirect would be made from the Host header, which is the client's word.
    app.router.redirect_slashes = False
    return app


class Routes:
    """One method a route."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await answer(request, self._state, ChatBody, ChatPlan)

    async def completions(self, request: Request) -> Response:
        """Continue raw prompts."""
        return await answer(request, self._state, CompletionBody, CompletionPlan)

    async def embeddings(self, request: Request) -> Response:
        """Texts to vectors."""
        return await embeddings(request, self._state)

    async def rerank(self, request: Request) -> Response:
        """Documents in the order of how well they answer a query."""
        return await rerank(request, self._state)

    async def score(self, request: Request) -> Response:
        """One score for each pair of texts."""
        return await score(request, self._state)

    async def models(self, request: Request) -> Response:
        """The list of served models: the one that writes, the one that embeds, or both."""
        return _json({"object": "list", "data": [self._model_fields(name) for name in self._names()]})

    async def model(self, request: Request) -> Response:
        """A served model, if the path names it."""
        self._state.ready_engine()
        check_model(request.path_params["model_id"], self._state)
        return _json(self._model_fields(request.path_params["model_id"]))

    async def health(self, request: Request) -> Response:
        """200 when requests are taken, 503 with one word otherwise."""
        status = self._state.status
        return _json({"status": status}, 200 if status == "ok" else 503)

    async def props(self, request: Request) -> Response:
        """What the server resolved its configuration to, and how full it is now."""
        engine = self._state.ready_engine()
        props: dict[str, object] = {**self._state.props, "state": asdict(engine.stats())}
        if engine.embedder is not None:
            totals = {**asdict(engine.embed_stats()), "tokenise_seconds": engine.embedder.encode_seconds}
            props["embedding_state"] = totals
        return _json(props)

    async def slots(self, request: Request) -> Response:
        """One row for each sequence that runs now."""
        return _json([asdict(row) for row in await self._state.ready_engine().slots()])

    async def metrics(self, request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus."""
        engine = self._state.ready_engine()
        encode_seconds = 0.0 if engine.embedder is None else engine.embedder.encode_seconds
        text = self._state.metrics.render(engine.stats(), engine.embed_stats(), encode_seconds)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _names(self) -> tuple[str, ...]:
        self._state.ready_engine()
        return self._state.model_names

    def _model_fields(self, name: str) -> dict[str, object]:
        engine = self._state.ready_engine()
        embeds = engine.embedder is not None and name == self._state.embedding_name
        return {
            "id": name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "servekit",
            "max_model_len": engine.embedder.max_tokens if engine.embedder and embeds else engine.max_model_len,
        }


def _json(fields: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")
