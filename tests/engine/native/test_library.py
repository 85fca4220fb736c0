"""The library is found beside its package, and whatever is wrong with it is said in words."""

import importlib.machinery
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import load_library
from servekit.errors import EngineError
from tests.engine.native.kernels import library, needs_kernels

_SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]


def test_a_folder_without_a_library_is_said_so(tmp_path: Path) -> None:
    assert load_library(tmp_path) == (None, "the CPU kernels were not built when servekit was installed")


def test_a_file_that_is_no_library_is_said_so(tmp_path: Path) -> None:
    (tmp_path / f"_kernels{_SUFFIX}").write_bytes(b"no library")
    found, why = load_library(tmp_path)
    assert found is None
    assert f"_kernels{_SUFFIX} cannot be used" in why


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(("version", "why"), [(None, "it has no sk_abi"), (999, "its interface is 999, not ")])
def test_a_library_of_another_version_is_said_so(tmp_path: Path, version: int | None, why: str) -> None:
    functions = "isa open close packed_bytes pack unpack linear write_kv attend forward encode choose"
    names = [f"sk_{name}" for name in functions.split()]
    text = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    if version is not None:
        text += f"int sk_abi(void) {{ return {version}; }}\n"
    (tmp_path / "other.c").write_text(text, encoding="utf-8")
    target = tmp_path / f"_kernels{_SUFFIX}"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(tmp_path / "other.c")], check=True, timeout=60)
    found, message = load_library(tmp_path)
    assert found is None
    assert why in message


@needs_kernels
def test_the_installed_library_runs_here() -> None:
    found = library()
    assert found.isas[-1] == "generic"
    assert found.c.sk_abi() == structs.ABI


@needs_kernels
def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(EngineError, match="mmx"):
        Kernels(library(), 1, "mmx")


@needs_kernels
def test_closing_twice_is_closing_once() -> None:
    kernels = Kernels(library(), 3)
    kernels.close()
    kernels.close()


def test_the_build_names_every_file_of_the_sources() -> None:
    """So that each is compiled, a change of any compiles again, and all are in a source distribution."""
    root = Path(__file__).parents[3]
    (extension,) = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "ext-modules"
    ]
    folder = Path("src/servekit/engine/native/csrc")
    files = sorted(path.name for path in (root / folder).iterdir() if path.is_file())
    assert extension["sources"] == [str(folder / name) for name in files if name.endswith(".c")]
    assert extension["depends"] == [str(folder / name) for name in files if not name.endswith(".c")]
    assert extension["optional"] is True
