"""Holds the table of rooms in docs/architecture.md: a file imports only from its own row and the rows above it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import servekit

_SOURCE = Path(servekit.__file__).parent

# From the top: each row may import from the rows above it, and within its own.
_ROWS: list[set[str]] = [
    {"", "errors"},
    {"units"},
    {"config"},
    {"kvcalc"},
    {"store"},
    {"engine.core", "engine.spec"},
    {"engine.output", "engine.device", "engine.native"},
    {"engine.host_batch"},
    {"engine.batch", "engine.kv_cache"},
    {"engine.attention"},
    {"engine.layers"},
    {"engine.models"},
    {
        "engine.adjustments",
        "engine.auto",
        "engine.embed_runner",
        "engine.embed_split",
        "engine.probe",
        "engine.grammar",
        "engine.graphs",
        "engine.last_tokens",
        "engine.memory_profile",
        "engine.native_runner",
        "engine.native_sampler",
        "engine.penalties",
        "engine.runner",
        "engine.sampler",
        "engine.sampling_plan",
        "engine.step",
        "engine.text",
    },
    {"engine.loop", "engine.generation", "engine.embed_work"},
    {
        "engine.engine",
        "engine.embedder",
        "engine.embedding_model",
        "engine.language_model",
        "engine.load",
        "engine.load_embedding",
        "engine.open_embedder",
        "engine.packed_weights",
        "engine.resolve",
        "engine.torch_model",
    },
    {"server"},
    {"bench"},
    {"cli", "__main__"},
]
_WITHOUT_TORCH = {"", "errors", "units", "config", "kvcalc", "store", "engine.core", "engine.spec", "engine.output"} | {
    "engine.native"
}
_HEAVY = {"torch", "transformers"}


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(_SOURCE.rglob("*.py")):
        parts = path.relative_to(_SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _room(module: str) -> str:
    """The entry of the table a module belongs to: the longest that is a prefix of its name."""
    known = [room for row in _ROWS for room in row]
    fitting = [room for room in known if module == room or module.startswith(room + ".")]
    return max(fitting, key=len) if fitting else module


def _row(room: str) -> int:
    return next((i for i, row in enumerate(_ROWS) if room in row), -1)


def _imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


_MODULES = dict(_modules())


@pytest.mark.parametrize("module", [m for m in _MODULES if _MODULES[m].stat().st_size])
def test_imports_only_from_above(module: str) -> None:
    row = _row(_room(module))
    assert row >= 0, f"{module} has no place in the table of rooms"
    for name in _imports(_MODULES[module]):
        imported = name.removeprefix("servekit").removeprefix(".") if name.split(".")[0] == "servekit" else None
        if imported is None or (imported not in _MODULES and _room(imported) == imported):
            continue
        assert _row(_room(imported)) <= row, f"{module} imports {name}, which is a room below"


@pytest.mark.parametrize("module", [m for m in _MODULES if _room(m) in _WITHOUT_TORCH])
def test_host_logic_imports_no_torch(module: str) -> None:
    assert not {name.split(".")[0] for name in _imports(_MODULES[module])} & _HEAVY


def test_only_the_cuda_files_name_cuda() -> None:
    """One seam for each hardware difference."""
    named = {m for m, path in _MODULES.items() if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert named <= {"engine.device.cuda", "engine.device.select", "engine.attention.paged"}


@pytest.mark.parametrize("arguments", [["-c", "import servekit"], ["--help"], ["kv", "--help"], ["serve", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    program = (
        f"import sys; {arguments[1]}"
        if arguments[0] == "-c"
        else (f"import sys; from servekit.cli.main import run; assert run({arguments!r}) == 0")
    )
    check = f"; loaded = sorted({_HEAVY!r} & set(sys.modules)); assert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", program + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
