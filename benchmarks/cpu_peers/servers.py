"""`servekit serve` and llama-server under the same loads of `servekit bench serve`, at the same number of slots.

Each side first shows its fastest weight format in one closed loop. Then, in turns: closed loops with as many clients
as slots for the capacity, and open loops at 80 % of llama-server's capacity for the latencies. Prompts are of 100
words, as chats where the model has a template for them, answers of 32 to 128 tokens, all streamed, none from a prefix
cache. A server stands still while the other works.
"""

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.process import Process, WorkerFailed
from benchmarks.cpu_peers.server_table import ServerOutcome, add, render_servers, to_json
from benchmarks.cpu_peers.systems import PeersFolder, System, our_model
from servekit.bench.result import Run, decode_run_file
from servekit.engine.spec.json_files import read_json
from servekit.engine.text.tokenizer import Tokenizer
from servekit.kvcalc.memory import kv_block_bytes
from servekit.kvcalc.model_shape import read_model_shape
from servekit.store.resolve import find_model

SLOTS = (4, 16)
SLOT_TOKENS = 2048
LOAD_SHARE = 0.8
LOAD = ("--prompts", "random:100", "--outputs", "32,48,64,80,96,112,128", "--no-cache", "--json", "--quiet")
START_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that could be started with some slots. `side` is servekit or llama-server."""

    side: str
    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many requests a load has, for each slot, and at least."""

    choosing: int
    closed: int
    opened: int
    least: int

    def of(self, per_slot: int, slots: int) -> int:
        """Requests of one load."""
        return max(self.least, per_slot * slots)


FULL = Sizes(choosing=2, closed=4, opened=4, least=32)
QUICK = Sizes(choosing=1, closed=1, opened=1, least=4)


class RunningServer(Process):
    """A server that answers on a port of its own, standing still between loads. Raises WorkerFailed at the start."""

    def __init__(self, server: Server, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = server
        self.url = f"http://127.0.0.1:{port}"
        super().__init__((*server.command, "--port", str(port)), log, {}, stdout=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        self.pause()

    def load(self, *options: str) -> Run:
        """One load of `servekit bench serve`. A run that failed its audit says so itself and is returned too."""
        command = [sys.executable, "-m", "servekit.cli.main", "bench", "serve", "--url", self.url, *options]
        with self.running():
            done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if done.returncode not in (0, 3):
            raise WorkerFailed(f"{self.server.name}: the load ended with {done.returncode}; see {self.log}")
        return decode_run_file(done.stdout, name=self.server.name).runs[0]

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.child.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)  # not there yet, or still loading
        raise WorkerFailed(f"{self.server.name} did not start; see {self.log}")


def load_options(model: str) -> tuple[str, ...]:
    """Options of `servekit bench serve` for every load: chats, or plain completions of a model without a template."""
    chats = Tokenizer.from_directory(find_model(model).directory).has_chat_template
    return (*LOAD, "--endpoint", "chat" if chats else "completions")


def measure_servers(
    folder: PeersFolder, systems: Sequence[System], arguments: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """All of it, for each number of slots. The result for JSON, and the tables."""
    missing = {system.name: system.missing for system in systems if system.role == "ours" and system.missing}
    if not folder.llama_server.is_file():
        missing["llama-server"] = f"not installed: no {folder.llama_server}"
    result: dict[str, Any] = {"missing": missing, "load": load_options(arguments.model), "slots": {}}
    tables = []
    for slots in SLOTS:
        outcomes = _Rounds(folder, systems, slots, arguments).measure()
        result["slots"][slots] = [to_json(outcome) for outcome in outcomes]
        tables.append(render_servers(outcomes, slots))
    notes = [f"{name}: {why}" for name, why in missing.items()]
    return result, "\n\n".join([*tables, "\n".join(notes)]).rstrip()


class _Rounds:
    """Both sides at one number of slots."""

    def __init__(
        self, folder: PeersFolder, systems: Sequence[System], slots: int, arguments: argparse.Namespace
    ) -> None:
        self._logs = folder.root / "logs"
        self._slots = slots
        self._rounds: int = arguments.rounds
        self._sizes = QUICK if arguments.quick else FULL
        self._load = load_options(arguments.model)
        self._servers = _servers(folder, systems, slots, arguments)

    def measure(self) -> list[ServerOutcome]:
        """One outcome for each format tried; the best of each side has more than its first capacity."""
        outcomes = [ServerOutcome(server.side, server.name) for server in self._servers]
        for server, outcome in zip(self._servers, outcomes, strict=True):
            self._choose(server, outcome)
        best = [found for side in ("servekit", "llama-server") if (found := _best(outcomes, side))]
        with ExitStack() as stack:
            running = [(self._start(stack, outcome), outcome) for outcome in best]
            for round_ in range(self._rounds):
                for process, outcome in running if round_ % 2 else running[::-1]:
                    self._closed(process, outcome, round_)
            rival = next((outcome for outcome in best if outcome.side == "llama-server"), None)
            if rival is not None:
                rate = LOAD_SHARE * rival.capacity
                for round_ in range(self._rounds):
                    for process, outcome in running if round_ % 2 else running[::-1]:
                        self._opened(process, outcome, round_, rate)
            for process, outcome in running:
                outcome.peak_bytes = process.peak_bytes()
        return outcomes

    def _choose(self, server: Server, outcome: ServerOutcome) -> None:
        """One closed loop, which shows the speed of the format and the memory of a server that has worked."""
        try:
            with RunningServer(server, self._log(server.name)) as running:
                number = self._sizes.of(self._sizes.choosing, self._slots)
                run = running.load(*self._load, "--concurrency", str(self._slots), "--requests", str(number))
                outcome.trial, outcome.peak_bytes = add({}, "closed", run)["requests_per_s"][0], running.peak_bytes()
        except WorkerFailed as error:
            outcome.status = str(error)
        _say(f"{self._slots} slots, {server.name}: {outcome.status or f'{outcome.trial:.2f} requests/s'}")

    def _start(self, stack: ExitStack, outcome: ServerOutcome) -> RunningServer:
        server = next(server for server in self._servers if server.name == outcome.name)
        outcome.chosen = True
        return stack.enter_context(RunningServer(server, self._log(server.name)))

    def _closed(self, server: RunningServer, outcome: ServerOutcome, round_: int) -> None:
        number = self._sizes.of(self._sizes.closed, self._slots)
        run = server.load(
            *self._load, "--concurrency", str(self._slots), "--requests", str(number), "--seed", str(round_)
        )
        add(outcome.values, "closed", run)
        outcome.invalid += not run.valid
        _say(f"{self._slots} slots, round {round_ + 1}, {outcome.name}: {outcome.capacity:.2f} requests/s")

    def _opened(self, server: RunningServer, outcome: ServerOutcome, round_: int, rate: float) -> None:
        number = self._sizes.of(self._sizes.opened, self._slots)
        run = server.load(*self._load, "--rate", f"{rate:.4f}", "--requests", str(number), "--seed", str(round_))
        add(outcome.values, "open", run)
        outcome.invalid += not run.valid
        _say(f"{self._slots} slots, round {round_ + 1}, {outcome.name}: open loop at {rate:.2f} requests/s")

    def _log(self, name: str) -> Path:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"server-{self._slots}-{name.replace(' ', '-')}.log"


def _servers(folder: PeersFolder, systems: Sequence[System], slots: int, arguments: argparse.Namespace) -> list[Server]:
    """One for each of our formats and of llama.cpp's among `systems` that can run."""
    found = []
    names = {system.name for system in systems if not system.missing}
    llama = folder.llama_models(arguments.model)
    for name in arguments.servekit.split(","):
        if f"servekit {name}" in names:
            model, quantize, kv_dtype = our_model(arguments.model, name, llama)
            command = _servekit_command(model, slots, arguments.threads, quantize, kv_dtype)
            found.append(Server("servekit", f"servekit {name}", command))
    for name, file in llama.items():
        if f"llama.cpp {name}" in names and folder.llama_server.is_file():
            found.append(Server("llama-server", f"llama-server {name}", _llama_command(folder, file, slots, arguments)))
    return found


def _servekit_command(model: str, slots: int, threads: int, quantize: str, kv_dtype: str) -> tuple[str, ...]:
    shape = read_model_shape(read_json(find_model(model).directory / "config.json"))
    # As many tokens as llama-server gets; a pool in bfloat16 holds twice as many and touches only what it uses.
    kv_memory = slots * SLOT_TOKENS * kv_block_bytes(shape, block_size=1, kv_dtype="float32")
    command = [sys.executable, "-m", "servekit.cli.main", "serve", model, "--device", "cpu"]
    command += ["--parallel", str(slots), "--max-model-len", str(SLOT_TOKENS), "--kv-memory", str(kv_memory)]
    return (*command, "--threads", str(threads), "--quantize", quantize, "--kv-dtype", kv_dtype)


def _llama_command(folder: PeersFolder, file: Path, slots: int, arguments: argparse.Namespace) -> tuple[str, ...]:
    command = [str(folder.llama_server), "--model", str(file), "--host", "127.0.0.1", "--no-ui"]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * SLOT_TOKENS), "--threads", str(arguments.threads)]
    # No prompt comes twice, so its store of old prompts would only cost it memory and time.
    return (*command, "--cache-ram", "0")


def _best(outcomes: Sequence[ServerOutcome], side: str) -> ServerOutcome | None:
    tried = [outcome for outcome in outcomes if outcome.side == side and outcome.trial is not None]
    return max(tried, key=lambda outcome: outcome.trial or 0.0, default=None)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
