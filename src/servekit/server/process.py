"""The life of the server process: bind, check the model, answer 503, load, serve, drain, exit.

The socket is bound before anything slow happens, so a taken port is known at once; it is listened on only when the
model's files have passed their checks, so a broken model never answers.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import uvicorn

from servekit.config import ServeConfig
from servekit.engine.engine import Engine
from servekit.errors import EngineError, ServekitError
from servekit.server.app import create_app
from servekit.server.protocol import protocol_with
from servekit.server.security import Security
from servekit.server.state import ServerState

log = logging.getLogger("servekit.server")

_EXIT_MARGIN = 1
"""Seconds beyond the grace time in which error frames are written and connections closed."""
_POLL_INTERVAL = 0.1

Progress = Callable[[int, int], None]
"""Called with layers done and layers in all."""


class Loaded(Protocol):
    """An engine that has been loaded and not started, and what `GET /props` shows of it."""

    @property
    def engine(self) -> Engine: ...

    def props(self) -> dict[str, Any]: ...


LoadedT = TypeVar("LoadedT", bound=Loaded)


class ServerProcess(Generic[LoadedT]):
    """Serves one engine on one socket until a signal ends it.

    `load` makes the engine, reporting its progress; `announce` is told when it is ready.
    """

    def __init__(
        self,
        sock: socket.socket,
        model_name: str,
        load: Callable[[Progress], LoadedT],
        serve_config: ServeConfig,
        security: Security,
        announce: Callable[[LoadedT], None],
    ) -> None:
        self._sock = sock
        self._load = load
        self._serve_config = serve_config
        self._announce = announce
        self._state = ServerState(
            model_name=serve_config.served_model_name or model_name,
            body_limit=serve_config.max_body,
            ping_interval=serve_config.sse_ping_interval,
            read_timeout=serve_config.read_timeout,
            request_timeout=serve_config.request_timeout,
            refuse_unknown=serve_config.unknown_params == "refuse",
            log_prompts=serve_config.log_prompts,
            security=security,
        )
        self._loaded: LoadedT | None = None
        self._failure: ServekitError | None = None
        self._cancelled = threading.Event()

    def run(self) -> None:
        """Serve. Returns after a signal has drained the server; raises what kept it from serving."""
        factory = asyncio.new_event_loop
        if sys.platform != "win32":
            import uvloop

            factory = uvloop.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._serve())
        if self._failure is not None:
            raise self._failure

    async def _serve(self) -> None:
        config = uvicorn.Config(
            create_app(self._state),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            http=protocol_with(self._serve_config.read_timeout, self._serve_config.write_timeout),
            # The grace is over when uvicorn begins to count: `_watch` has waited for the answers.
            timeout_graceful_shutdown=_EXIT_MARGIN,
        )
        server = _SignalledServer(config, on_signal=lambda: self._drain(server))
        work = asyncio.create_task(self._load_and_watch(server))
        await server.serve(sockets=[self._sock])
        self._cancelled.set()
        await work
        if self._loaded is not None:
            await self._loaded.engine.close()

    def _drain(self, server: "_SignalledServer") -> None:
        """The first signal: refuse new requests. With nothing loaded yet there is nothing to wait for."""
        self._state.draining = True
        if self._loaded is None:
            server.should_exit = True

    async def _load_and_watch(self, server: "_SignalledServer") -> None:
        try:
            loaded = await asyncio.to_thread(self._load, self._check_cancelled)
        except _LoadingCancelled:
            return
        except ServekitError as error:
            self._failure = error
        except Exception as error:
            log.exception("loading failed")
            self._failure = EngineError(f"the model could not be loaded: {type(error).__name__}: {error}")
        else:
            self._loaded = loaded
            loaded.engine.start()
            self._state.props = loaded.props()
            self._state.engine = loaded.engine
            self._announce(loaded)
            await self._watch(loaded, server)
        if self._failure is not None:
            self._state.load_error = self._failure.message
        server.should_exit = True

    def _check_cancelled(self, layers_done: int, layers: int) -> None:
        """Between two layers, on the loading thread: nobody waits for the rest any more."""
        if self._cancelled.is_set():
            raise _LoadingCancelled

    async def _watch(self, loaded: LoadedT, server: "_SignalledServer") -> None:
        """Return when the engine has died, or when a signal came and the running answers have had their grace."""
        while loaded.engine.is_alive and not self._state.draining:
            await asyncio.sleep(_POLL_INTERVAL)
        if self._state.draining:
            await loaded.engine.close(self._serve_config.grace)
            await self._hang_up(server)
        else:
            self._failure = EngineError("the engine has stopped", hint="the log above says why")

    async def _hang_up(self, server: uvicorn.Server) -> None:
        """Give clients a moment to read their last event, then close on those that do not read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_MARGIN):
                while server.server_state.tasks:
                    await asyncio.sleep(_POLL_INTERVAL)
        for connection in list(server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


class _LoadingCancelled(Exception):
    """A signal came while the model was loading."""


class _SignalledServer(uvicorn.Server):
    """uvicorn, but the first signal only tells `on_signal`, and the second ends the process on the spot."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._signalled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM."""
        if self._signalled:
            os._exit(128 + sig)
        self._signalled = True
        log.info("%s: finishing what runs; again to exit at once", signal.Signals(sig).name)
        self._on_signal()
