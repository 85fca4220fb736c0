"""The ctypes structures are those of servekit.h: the compiler is asked for every size and every place."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from servekit.engine.native import structs

_CSRC = Path(structs.__file__).parent / "csrc"
_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_STRUCTS: dict[str, type[ctypes.Structure]] = {
    "sk_matrix": structs.Matrix,
    "sk_attention": structs.Attention,
    "sk_batch": structs.Step,
    "sk_layer": structs.Layer,
    "sk_decoder": structs.Decoder,
    "sk_encoder_layer": structs.EncoderLayer,
    "sk_encoder": structs.Encoder,
    "sk_choice": structs.Choice,
}
_CONSTANTS = {
    "SK_ABI": structs.ABI,
    "SK_PANEL": structs.PANEL,
    "SK_GROUP": structs.GROUP,
    "SK_Q4": structs.Q4,
    "SK_Q8": structs.Q8,
    "SK_BF16": structs.BF16,
    "SK_KV_F32": structs.KV_F32,
    "SK_KV_BF16": structs.KV_BF16,
    "SK_KV_Q8_0": structs.KV_Q8_0,
    "SK_KV_TILE": structs.KV_TILE,
    **{f"SK_SRC_{name}": number for name, number in structs.SOURCES.items()},
    **{f"SK_{name.upper()}": number for name, number in structs.ACTIVATIONS.items()},
}


def _expected() -> list[tuple[str, int]]:
    """C expressions and what they must be."""
    found = list(_CONSTANTS.items())
    for name, structure in _STRUCTS.items():
        found.append((f"sizeof({name})", ctypes.sizeof(structure)))
        for field in structure._fields_:
            place = getattr(structure, field[0])
            found.append((f"offsetof({name}, {field[0]})", place.offset))
            found.append((f"sizeof((({name} *)0)->{field[0]})", place.size))
    return found


@pytest.mark.skipif(_COMPILER is None, reason="there is no C compiler")
def test_sizes_places_and_constants(tmp_path: Path) -> None:
    expected = _expected()
    prints = "\n".join(f'  printf("%ld\\n", (long)({expression}));' for expression, _ in expected)
    source = tmp_path / "main.c"
    source.write_text(f'#include <stdio.h>\n#include "servekit.h"\nint main(void) {{\n{prints}\n}}\n', encoding="utf-8")
    program = tmp_path / "main"
    assert _COMPILER is not None
    subprocess.run([_COMPILER, "-I", str(_CSRC), "-o", str(program), str(source)], check=True, timeout=60)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60)
    found = dict(zip((expression for expression, _ in expected), map(int, done.stdout.split()), strict=True))
    assert found == dict(expected)
