"""The C kernels by themselves: random shapes under sanitizers, NEON under an emulator, the thread pool under load."""

import os
from pathlib import Path

from tests.engine.native.toolchain import HERE, SOURCES, Toolchain, aarch64, sanitised

# SERVEKIT_FUZZ_CASES asks for more; a failing case prints its number, and runs alone as `fuzz 1 SEED NUMBER`.
CASES = int(os.environ.get("SERVEKIT_FUZZ_CASES", "32"))
SEED = 1


def fuzz(toolchain: Toolchain, directory: Path, cases: int) -> str:
    """Build the driver with all kernels, run it, and return what it printed."""
    sources = [*sorted(SOURCES.glob("*.c")), *sorted((HERE / "fuzz").glob("*.c"))]
    done = toolchain.run(toolchain.build(sources, directory), cases, SEED, seconds=60 + 4 * cases)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_keep_to_their_memory_and_to_the_references(tmp_path: Path) -> None:
    """Address and undefined-behaviour sanitizers, every instruction set of this CPU, buffers at the ends of pages."""
    printed = fuzz(sanitised(tmp_path, "address", "undefined"), tmp_path, CASES)
    assert printed.startswith(f"{CASES} cases passed:")
    assert "generic" in printed


def test_neon_kernels_agree_with_the_references(tmp_path: Path) -> None:
    """The same cases for aarch64, emulated."""
    assert "neon" in fuzz(aarch64(), tmp_path, CASES)


def test_pool_orders_its_phases(tmp_path: Path) -> None:
    """No chunk is left out or runs twice, and the thread sanitizer sees no race."""
    toolchain = sanitised(tmp_path, "thread")
    program = toolchain.build([SOURCES / "pool.c", HERE / "pool" / "stress.c"], tmp_path)
    done = toolchain.run(program, 1000, seconds=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "1000 phases passed\n"
