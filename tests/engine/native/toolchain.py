"""Compiles the C sources with the system's compilers, apart from the extension that is installed."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[3] / "src" / "servekit" / "engine" / "native" / "csrc"

# A compiler that runs into its limit has met something quadratic, or a machine that does nothing else.
COMPILE_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C compiler, its flags, and the emulator that runs what it makes (None: this CPU)."""

    compiler: str
    flags: tuple[str, ...]
    emulator: str | None = None

    def build(self, sources: list[Path], directory: Path) -> Path:
        """Compile each file and link them to a program in `directory`; fails the test with the compiler's words."""
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}", *self.flags]

        def compile_one(source: Path) -> str:
            target = directory / f"{source.parent.name}-{source.stem}.o"
            self._run([*flags, "-c", str(source), "-o", str(target)])
            return str(target)

        # Compilers are processes, so threads that wait for them are enough.
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources))
        program = directory / "program"
        self._run([*flags, *objects, "-lm", "-o", str(program)])
        return program

    def run(self, program: Path, *arguments: object, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run a program that was built here. TimeoutExpired after `seconds`."""
        command = [*([self.emulator] if self.emulator else []), str(program), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)

    def _run(self, arguments: list[str]) -> None:
        done = subprocess.run(
            [self.compiler, *arguments], capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr


def sanitised(directory: Path, *sanitisers: str) -> Toolchain:
    """The system's compiler with these sanitizers; skips the test where it is missing or has none of them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine")
    toolchain = Toolchain(compiler, ("-Og", "-g1", f"-fsanitize={','.join(sanitisers)}", "-fno-sanitize-recover=all"))
    probe = directory / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    command = [compiler, *toolchain.flags, str(probe), "-o", str(directory / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler} cannot link -fsanitize={','.join(sanitisers)}")
    if toolchain.run(directory / "probe", seconds=60).returncode != 0:
        pytest.skip(f"programs with -fsanitize={','.join(sanitisers)} do not run on this machine")
    return toolchain


def aarch64() -> Toolchain:
    """A cross compiler and an emulator for NEON; skips the test where either is missing."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    return Toolchain(compiler, ("-O1", "-march=armv8.2-a+dotprod", "-static"), emulator)
