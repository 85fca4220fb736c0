"""The models of this folder, and what must hold after every test: the process lives, answers and holds no block."""

from collections.abc import Iterator

import pytest

from tests.blackbox.server import Server
from tests.blackbox.tiny import TinyChat, make_chatty, make_strict


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> TinyChat:
    """The tiny model that takes any conversation."""
    return make_chatty(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> TinyChat:
    """The tiny model whose template refuses much."""
    return make_strict(tmp_path_factory.mktemp("models") / "strict")


@pytest.fixture
def server(process: Server) -> Iterator[Server]:
    """The module's `process`, which must be as good after the test as before it."""
    yield process
    process.check_serving()
