"""Which engine `servekit serve` runs: one that writes, perhaps with an embedding model beside it, or one that embeds.

What needs torch is imported where it is needed.
"""

import socket
import time
from functools import partial

from servekit.cli.banner import announce, announce_embedding
from servekit.config import EngineConfig, ServeConfig
from servekit.engine.load import load_engine, open_model
from servekit.engine.open_embedder import is_embedding_model, open_embedder
from servekit.errors import ConfigError
from servekit.server.process import ServerProcess
from servekit.server.security import Security
from servekit.server.socket import url_of
from servekit.store.resolve import LocalModel


def serve_models(
    sock: socket.socket,
    files: LocalModel,
    embedding_files: LocalModel | None,
    engine_config: EngineConfig,
    serve_config: ServeConfig,
    security: Security,
    began: float,
) -> None:
    """Check the files, then serve until a signal. `began` is in seconds of time.monotonic()."""
    url = url_of(sock)

    def seconds() -> float:
        return time.monotonic() - began

    if is_embedding_model(files):
        if embedding_files is not None:
            raise ConfigError(
                f"{files.name} embeds text itself, so there is nothing for --embedding-model to stand beside",
                hint="name one of the two",
                param="embedding_model",
            )
        from servekit.engine.load_embedding import load_embedding_engine

        opened = open_embedder(files)
        ServerProcess(
            sock,
            files.name,
            lambda progress: load_embedding_engine(opened, engine_config),
            serve_config,
            security,
            lambda loaded: announce_embedding(loaded, url, seconds()),
        ).run()
        return
    model = open_model(files)
    embedder = None if embedding_files is None else open_embedder(embedding_files)
    ServerProcess(
        sock,
        files.name,
        partial(load_engine, model, engine_config, embedder=embedder),
        serve_config,
        security,
        lambda loaded: announce(loaded, model.warnings, url, seconds()),
    ).run()
