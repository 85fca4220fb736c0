"""The compiled kernels: where they are, or why there are none. They are optional, and everything else works without.

`pip install` compiles csrc/ into a shared library beside this file where it finds a C compiler. It is no Python module:
nothing of Python's ABI is in it, and ctypes calls it.
"""

import ctypes
import importlib.machinery
from pathlib import Path

from servekit.engine.native import structs

HOW_TO_GET_THEM = "install a C compiler (gcc or clang), then servekit again from its sources"

_INT = ctypes.c_int
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_SIGNATURES = {
    "sk_abi": (_INT, []),
    "sk_isa": (ctypes.c_char_p, [_INT]),
    "sk_open": (_POINTER, [ctypes.c_char_p, _INT]),
    "sk_close": (None, [_POINTER]),
    "sk_packed_bytes": (_SIZE, [_INT, _INT, _INT]),
    "sk_pack": (_INT, [_INT, _INT, _POINTER, _SIZE, _INT, _INT, _POINTER]),
    "sk_unpack": (None, [ctypes.POINTER(structs.Matrix), _POINTER, _INT, _POINTER]),
    "sk_linear": (_INT, [_POINTER, ctypes.POINTER(structs.Matrix), _POINTER, _INT, _POINTER]),
    "sk_write_kv": (
        None,
        [
            _POINTER,
            ctypes.POINTER(structs.Attention),
            ctypes.POINTER(structs.Step),
            _POINTER,
            _INT,
            _POINTER,
        ],
    ),
    "sk_attend": (
        _INT,
        [
            _POINTER,
            ctypes.POINTER(structs.Attention),
            ctypes.POINTER(structs.Step),
            _POINTER,
            _POINTER,
            _INT,
            _POINTER,
        ],
    ),
    "sk_forward": (
        _INT,
        [_POINTER, ctypes.POINTER(structs.Decoder), ctypes.POINTER(structs.Step), _POINTER, _POINTER],
    ),
    "sk_encode": (_INT, [_POINTER, ctypes.POINTER(structs.Encoder), ctypes.POINTER(structs.Step), _POINTER]),
    "sk_choose": (_INT, [_POINTER, _POINTER, _INT, _INT, ctypes.POINTER(structs.Choice), _POINTER]),
}


class Library:
    """The functions of csrc/servekit.h, with their types declared. Raises OSError for a file that is none."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.c = ctypes.CDLL(str(file))
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self.c, name)
            except AttributeError as error:
                raise OSError(f"it has no {name}") from error
            function.restype, function.argtypes = result, arguments
        if (abi := self.c.sk_abi()) != structs.ABI:
            raise OSError(f"its interface is {abi}, not {structs.ABI}")

    @property
    def isas(self) -> tuple[str, ...]:
        """The instruction sets that it has kernels for and this CPU runs, best first."""
        names: list[bytes] = []
        while name := self.c.sk_isa(len(names)):
            names.append(name)
        return tuple(name.decode() for name in names)


def load_library(folder: Path | None = None) -> tuple[Library | None, str]:
    """The library of this installation and where it is; or None, and why, in words for people."""
    folder = folder or Path(__file__).parent
    file = next((file for file in map(folder.joinpath, _file_names()) if file.is_file()), None)
    if file is None:
        return None, "the CPU kernels were not built when servekit was installed"
    try:
        return Library(file), str(file)
    except OSError as error:
        return None, f"the CPU kernels in {file.name} cannot be used: {error}"


def _file_names() -> list[str]:
    return [f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]


def main() -> None:
    """Say which kernels this installation has: the one line that an installation shows."""
    library, where = load_library()
    kernels = f"kernels for {', '.join(library.isas)}" if library else f"no kernels: {where}; {HOW_TO_GET_THEM}"
    print(f"servekit on a CPU: {kernels}")


if __name__ == "__main__":
    main()
