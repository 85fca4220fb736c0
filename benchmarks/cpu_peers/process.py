"""A process that stands still while others are measured: stopped by the kernel, so that no idle thread of it spins."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.cpu_peers.systems import System
from benchmarks.cpu_peers.worker import Run, Tokens

_ROOT = Path(__file__).parents[2]
_EXIT_S = 20.0


class WorkerFailed(Exception):
    """A system under test ended, or answered what is no answer. Says where its standard error is."""


class Process:
    """A child process that runs only between `resume` and `pause`. Leaving it as a context ends the child."""

    def __init__(self, command: tuple[str, ...], log: Path, environment: dict[str, str], **streams: Any) -> None:
        self.log = log
        self._errors = log.open("wb")
        self.child = subprocess.Popen(
            command, stderr=self._errors, cwd=_ROOT, env={**os.environ, **environment}, text=True, **streams
        )

    def resume(self) -> None:
        """Go on."""
        self._send(signal.SIGCONT)

    def pause(self) -> None:
        """Stand still, with all threads."""
        self._send(signal.SIGSTOP)

    def peak_bytes(self) -> int | None:
        """The most memory that was resident so far; None where the system does not say."""
        try:
            lines = Path(f"/proc/{self.child.pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        found = next((line.split() for line in lines if line.startswith("VmHWM:")), None)
        return None if found is None else int(found[1]) * 1024

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run for as long as the context lasts."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._close_input()
        self.child.terminate()
        try:
            self.child.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()
        self._errors.close()

    def _close_input(self) -> None:
        if self.child.stdin is not None:
            with suppress(BrokenPipeError):  # it ended with something unread: its exit is told elsewhere
                self.child.stdin.close()

    def _send(self, number: int) -> None:
        if self.child.poll() is None:
            self.child.send_signal(number)


class Worker(Process):
    """A system of `systems.py`, loaded and standing still. Raises WorkerFailed when it does not load."""

    def __init__(self, system: System, log: Path) -> None:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(system.command, log, system.environment, **streams)
        self.system = system
        try:
            ready = self._answer()
        except BaseException:
            self.__exit__()
            raise
        self.version: str = ready["version"]
        self.load_s: float = ready["load_s"]
        self.pause()

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """One batch, while everyone else stands still. Raises WorkerFailed when the worker ends instead."""
        assert self.child.stdin is not None
        with self.running():
            try:
                print(json.dumps({"prompts": prompts, "num_tokens": num_tokens}), file=self.child.stdin, flush=True)
            except BrokenPipeError:
                raise self._failure() from None
            run = Run(**self._answer())
        lengths = {len(row) for row in run.tokens}
        if len(run.tokens) != len(prompts) or lengths != {num_tokens}:
            raise WorkerFailed(f"{self.system.name} made {sorted(lengths)} tokens instead of {num_tokens}")
        return run

    def _answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise self._failure()
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure(self) -> WorkerFailed:
        return WorkerFailed(f"{self.system.name} ended; see {self.log}")
