"""Which systems there are, how each is started, and what is missing when one cannot be.

The folder of the peers has an environment and the models of each: docs/peers.md says how it is filled.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from servekit.config import QuantizeChoice
from servekit.store.resolve import find_model

LLAMA_FORMATS = ("Q4_0", "Q4_0-pure", "Q4_1", "Q8_0", "F16")
"""`Q4_0-pure` has the output head in four bits too; Q4_1 is the model's own file."""

WEIGHT_FORMATS = ("int4", "int8")
"""What OpenVINO's and onnxruntime's models are made in."""

Role = Literal["ours", "peer", "reference"]
"""The ratio is that of the best of ours to the best peer. A reference shows where plain torch stands, no rival."""


@dataclass(frozen=True, slots=True)
class System:
    """A system under test. `missing` says why it cannot run, None when it can."""

    name: str
    command: tuple[str, ...]
    missing: str | None
    role: Role = "peer"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeersFolder:
    """Where the peers are: an environment each, `models` for all, and llama.cpp's build."""

    root: Path

    def python(self, environment: str) -> Path:
        """The interpreter of an environment."""
        return self.root / environment / "bin" / "python"

    @property
    def models(self) -> Path:
        """What `benchmarks.cpu_peers.prepare` writes."""
        return self.root / "models"

    @property
    def llama_build(self) -> Path:
        """llama.cpp's programs and libraries, when it was built beside its Python package."""
        return self.root / "llama" / "build" / "bin"

    @property
    def llama_server(self) -> Path:
        """llama.cpp's server."""
        return self.llama_build / "llama-server"

    def llama_environment(self) -> dict[str, str]:
        """Lets the Python package find libraries that were built beside it; its own are used without."""
        if (self.llama_build / "libllama.so").is_file():
            return {"LLAMA_CPP_LIB_PATH": str(self.llama_build)}
        return {}

    def llama_model(self, name: str, model: str) -> Path:
        """The GGUF file in a format of LLAMA_FORMATS; the model's own where that is the format."""
        weights = find_model(model).weights
        if weights is not None and f".{name}." in weights.name:
            return weights
        return self.models / f"llama-{name}.gguf"


def all_systems(folder: PeersFolder, model: str, quantize: Sequence[str], threads: int) -> list[System]:
    """Everything that could be measured, servekit in each of the `quantize` formats first."""
    found = [_servekit(model, name, threads) for name in quantize]
    for name in LLAMA_FORMATS:
        file = folder.llama_model(name, model)
        found.append(_peer(folder, "llama", f"llama.cpp {name}", file, threads, folder.llama_environment()))
    for package in ("openvino", "onnxruntime"):
        found += [
            _peer(folder, package, f"{package} {name}", folder.models / f"{package}-{name}", threads)
            for name in WEIGHT_FORMATS
        ]
    return [*found, _transformers(model, threads)]


def select(systems: Sequence[System], names: str) -> list[System]:
    """Those whose name starts with one of the comma-separated `names`; all for an empty text."""
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    return [system for system in systems if not wanted or system.name.startswith(wanted)]


def _servekit(model: str, quantize: str, threads: int) -> System:
    offered = get_args(QuantizeChoice)
    missing = None if quantize in offered else f"this version offers --quantize {', '.join(offered)}"
    command = (*_module(Path(sys.executable), "servekit"), model, str(threads), quantize)
    return System(f"servekit {quantize}", command, missing, role="ours")


def _transformers(model: str, threads: int) -> System:
    missing = None if importlib.util.find_spec("transformers") else "not installed"
    command = (*_module(Path(sys.executable), "transformers"), model, str(threads))
    return System("transformers fp32", command, missing, role="reference")


def _peer(
    folder: PeersFolder,
    package: str,
    name: str,
    model: Path,
    threads: int,
    environment: dict[str, str] | None = None,
) -> System:
    python = folder.python(package)
    missing = None
    if not python.exists():
        missing = f"not installed: no {python}"
    elif not model.exists():
        missing = f"not prepared: no {model}"
    return System(name, (*_module(python, package), str(model), str(threads)), missing, environment=environment or {})


def _module(python: Path, package: str) -> tuple[str, ...]:
    return str(python), "-m", f"benchmarks.cpu_peers.{package}_worker"
