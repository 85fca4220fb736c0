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
from servekit.server import anthropic, responses
from servekit.server.access_log import AccessLog
from servekit.server.answer import Parsed, answer, parse_plan, parse_translated
from servekit.server.body import ignored_header
from servekit.server.chat import ChatPlan
from servekit.server.completions import CompletionPlan
from servekit.server.cors import Cors
from servekit.server.embeddings import embeddings
from servekit.server.errors import MESSAGES_PATH, handle_disconnect, handle_http_exception, handle_servekit_error
from servekit.server.gate import Gate
from servekit.server.models import check_model
from servekit.server.preflight import preflight
from servekit.server.rerank import rerank, score
from servekit.server.schema import ChatBody, CompletionBody
from servekit.server.state import EngineFacade, ServerState
from servekit.server.tokens import detokenize, tokenize


def create_app(state: ServerState) -> Starlette:
    """The ASGI app over `state`, which its owner fills in and changes while the app runs."""
    routes = Routes(state)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/responses", routes.responses, methods=["POST"]),
            Route(MESSAGES_PATH, routes.messages, methods=["POST"]),
            Route("/v1/preflight", routes.preflight, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
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
        middleware=[
            Middleware(AccessLog, log_prompts=state.log_prompts),
            Middleware(Cors, origins=state.security.origins),
            Middleware(Gate, security=state.security),
        ],
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
        state = self._state
        return await answer(
            request, state, lambda raw, engine: parse_plan(raw, state, ChatBody, lambda body: ChatPlan(body, engine))
        )

    async def completions(self, request: Request) -> Response:
        """Continue raw prompts."""
        state = self._state
        return await answer(
            request,
            state,
            lambda raw, engine: parse_plan(raw, state, CompletionBody, lambda body: CompletionPlan(body, engine)),
        )

    async def responses(self, request: Request) -> Response:
        """A chat in OpenAI's newer shape."""

        def parse(raw: bytes, engine: EngineFacade) -> Parsed:
            def translate(body: responses.ResponsesBody) -> tuple[ChatBody, ChatPlan]:
                plan = responses.ResponsesPlan(body, engine)
                return plan.body, plan

            return parse_translated(raw, self._state, responses.ResponsesBody, responses.REFUSED, translate)

        return await answer(request, self._state, parse)

    async def messages(self, request: Request) -> Response:
        """A chat in Anthropic's shape."""

        def parse(raw: bytes, engine: EngineFacade) -> Parsed:
            def translate(body: anthropic.MessagesBody) -> tuple[ChatBody, ChatPlan]:
                plan = anthropic.MessagesPlan(anthropic.to_chat(body), engine)
                return plan.body, plan

            return parse_translated(raw, self._state, anthropic.MessagesBody, anthropic.REFUSED, translate)

        return await answer(request, self._state, parse)

    async def preflight(self, request: Request) -> Response:
        """What a request would cost, without running it."""
        forecast = await preflight(request, self._state)
        response = _json(forecast.fields)
        if forecast.ignored:
            response.headers["x-servekit-ignored"] = ignored_header(forecast.ignored)
        return response

    async def tokenize(self, request: Request) -> Response:
        """Text as token ids."""
        return await tokenize(request, self._state)

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text."""
        return await detokenize(request, self._state)

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
        status = self._state.health()
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
