"""Which systems there are, how each is started, and what is missing when one cannot be.

The folder of the peers has an environment of each, and a folder of models: docs/peers.md says how they are filled.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, get_args

from gguf.constants import LlamaFileType

from servekit.config import KvDTypeChoice, QuantizeChoice
from servekit.store.gguf_metadata import GgufFile
from servekit.store.resolve import find_model

LLAMA_FORMATS = ("Q4_0", "Q4_0-pure", "Q8_0", "F16")
"""What GGUF files are made in, beside the model's own. `Q4_0-pure` has the output head in four bits too."""

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
    """Where the peers are: in `root` an environment each and llama.cpp's build, in `models` what they load.

    `benchmarks.cpu_peers.prepare` fills `models` from one model.
    """

    root: Path
    models: Path

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """From the options that `add_arguments` declares."""
        root = arguments.peers_dir.absolute()
        return cls(root, root / "models" if arguments.models_dir is None else arguments.models_dir.absolute())

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The options that say where the peers are, and which model everyone gets."""
        parser.add_argument("--peers-dir", type=Path, required=True, help="where the peers are installed")
        parser.add_argument("--model", default="demo", help="a pulled name, a GGUF file or a folder with safetensors")
        parser.add_argument("--models-dir", type=Path, help="where the peers' forms of it are [models in --peers-dir]")

    def python(self, environment: str) -> Path:
        """The interpreter of an environment."""
        return self.root / environment / "bin" / "python"

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

    def llama_models(self, model: str) -> dict[str, Path]:
        """The GGUF file of each format that llama.cpp is measured in, the model's own first; none for safetensors."""
        weights = find_model(model).weights
        if weights is None:
            return {}
        made = {name: self.models / f"llama-{name}.gguf" for name in LLAMA_FORMATS}
        own = _own_format(weights)
        return {own: weights} | {name: file for name, file in made.items() if name != own}


def all_systems(folder: PeersFolder, model: str, ours: Sequence[str], threads: int) -> list[System]:
    """Everything that could be measured, servekit first.

    `ours` are read by `our_model`.
    """
    llama = folder.llama_models(model)
    found = [_servekit(model, name, llama, threads) for name in ours]
    if not llama:
        found.append(System("llama.cpp", (), "it reads GGUF files only"))
    for name, file in llama.items():
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


def our_model(model: str, ours: str, llama: Mapping[str, Path]) -> tuple[str, str, str]:
    """The model and the values of --quantize and --kv-dtype that a text such as `int8+q8_0:Q4_0` names.

    `int8` alone leaves the keys and values to servekit; behind a colon stands one of llama.cpp's formats, whose file is
    the model then. A format that has no file is taken as one that is not there.
    """
    choices, _, name = ours.partition(":")
    quantize, _, kv_dtype = choices.partition("+")
    return str(llama.get(name, Path(f"{name}.gguf"))) if name else model, quantize, kv_dtype or "auto"


def _servekit(model: str, ours: str, llama: Mapping[str, Path], threads: int) -> System:
    path, quantize, kv_dtype = our_model(model, ours, llama)
    missing = None
    if quantize not in (offered := get_args(QuantizeChoice)):
        missing = f"this version offers --quantize {', '.join(offered)}"
    elif kv_dtype not in (offered := get_args(KvDTypeChoice)):
        missing = f"this version offers --kv-dtype {', '.join(offered)}"
    elif path != model and not Path(path).exists():
        missing = f"not prepared: no {path}"
    command = (*_module(Path(sys.executable), "servekit"), path, str(threads), quantize, kv_dtype)
    return System(f"servekit {ours}", command, missing, role="ours")


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


def _own_format(weights: Path) -> str:
    """What a GGUF file calls its own format, such as Q4_K_M."""
    with GgufFile(weights) as file:
        number = file.scalar("general.file_type")
    try:
        return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return weights.stem
