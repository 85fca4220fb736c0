"""The run file: what a load test writes and what `cost`, `--compare`, `analyze` and `sim --fit` read.

The JSON is a contract: `servekit_bench` is its version, new fields may be added, and a reader ignores fields that it
does not know. Every time is in seconds; in a record it counts from the run's start. What was not measured is null,
never zero. This module must not know how anything is measured.
"""

from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct, field

from servekit.errors import InputError

VERSION = 1


class Summary(Struct, frozen=True, kw_only=True):
    """A distribution of `count` values in few numbers; `ci95` has [low, high] by name (p50 ... p99, mean)."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    ci95: dict[str, tuple[float, float]] = {}


class Timings(Struct, frozen=True, kw_only=True):
    """What the server says about one request: seconds waiting, in the prompt, and making tokens."""

    queue_s: float
    prefill_s: float
    decode_s: float
    preemptions: int = 0


class Record(Struct, kw_only=True):
    """One request. Token counts come from the server's usage unless `estimated`.

    `chunks` has (seconds, tokens so far) for every chunk that showed new text; an answer that is not streamed has none
    and no first token. `status` is the HTTP status, None when there was none. A failure says why in `error`.
    """

    index: int
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    status: int | None = None
    error: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    asked_tokens: int | None = None
    estimated: bool = False
    finish_reason: str | None = None
    chunks: list[tuple[float, int]] = []
    timings: Timings | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer came whole."""
        return self.error is None and self.end_s is not None


class Requests(Struct, kw_only=True):
    """How many there were. `by_status` counts HTTP statuses; `no answer` stands for none at all."""

    sent: int = 0
    ok: int = 0
    failed: int = 0
    by_status: dict[str, int] = {}
    errors: dict[str, int] = {}


class Throughput(Struct, kw_only=True):
    """Per second, over the whole run or over a window of it."""

    output_tokens_per_s: float = 0.0
    input_tokens_per_s: float | None = None
    requests_per_s: float = 0.0


class Tokens(Struct, kw_only=True):
    """Sums over the answers that came whole; None where the server did not say.

    `estimated` answers had no usage. `wrong_length` answers are not as long as asked.
    """

    input: int | None = None
    output: int | None = None
    cached: int | None = None
    estimated: int = 0
    wrong_length: int = 0


class Latency(Struct, kw_only=True):
    """From the scheduled arrival, and from the send where the name says so. None where nothing was measured.

    `itl_s` is the time of each further token, `chunk_gap_s` the time between chunks however many tokens they carry.
    """

    ttft_s: Summary | None = None
    ttft_from_send_s: Summary | None = None
    tpot_s: Summary | None = None
    itl_s: Summary | None = None
    chunk_gap_s: Summary | None = None
    e2e_s: Summary | None = None
    e2e_from_send_s: Summary | None = None


class Goodput(Struct, kw_only=True):
    """How many of the requests sent met every bound of `slo` (seconds by metric); failures meet none."""

    slo: dict[str, float]
    good_requests: int
    attainment: float
    attainment_ci95: tuple[float, float]
    by_metric: dict[str, float]
    good_requests_per_s: float
    good_output_tokens: int
    good_output_tokens_per_s: float


class Little(Struct, kw_only=True):
    """Little's law two ways: L = lambda x W beside the measured time average of requests in the system."""

    arrivals_per_s: float = field(name="lambda")
    mean_s: float = field(name="W")
    expected: float = field(name="L")
    time_average: float
    verdict: str


class Window(Struct, kw_only=True):
    """The part without the filling and the draining. `steady` is False when requests piled up within it."""

    start_s: float
    end_s: float
    throughput: Throughput
    mean_in_flight: float
    steady: bool


class Audit(Struct, kw_only=True):
    """What the load generator says of itself. Rates are requests a second, shares 0 to 1."""

    offered_rate: float | None = None
    achieved_rate: float | None = None
    lateness_p99_s: float | None = None
    late_sends: int = 0
    dispersion: float | None = None
    lag1: float | None = None
    loop_lag_p99_s: float | None = None
    cpu_share: float | None = None
    reused_connections: int = 0


class Limit(Struct, kw_only=True):
    """What kept the server from being faster, and how that can be seen; `also` names what was close behind."""

    name: str
    evidence: list[str] = []
    also: list[str] = []


class Run(Struct, kw_only=True):
    """One rate (open loop) or one concurrency (closed loop), once. `duration_s` ends with the last answer.

    `server` has what changed in the server's own counters during the run, such as model_seconds.
    """

    rate: float | None = None
    concurrency: int | None = None
    arrival: str = "poisson"
    repeat: int = 0
    valid: bool = True
    invalid_reasons: list[str] = []
    duration_s: float
    requests: Requests = field(default_factory=Requests)
    throughput: Throughput = field(default_factory=Throughput)
    tokens: Tokens = field(default_factory=Tokens)
    latency: Latency = field(default_factory=Latency)
    goodput: Goodput | None = None
    little: Little | None = None
    window: Window | None = None
    audit: Audit | None = None
    limit: Limit | None = None
    server: dict[str, float] = {}
    notes: list[str] = []
    records: list[Record] = []


class Target(Struct, kw_only=True):
    """Whom the load went to. `kind` is servekit, vllm, llama.cpp or unknown; `props` what it says of itself."""

    url: str
    model: str | None = None
    kind: str = "unknown"
    props: dict[str, Any] | None = None


class Knee(Struct, kw_only=True):
    """The highest rate that met the SLO, and the lowest that did not. None where no rate did."""

    rate: float | None
    missed_rate: float | None
    min_attainment: float


class RunFile(Struct, kw_only=True):
    """Everything one command measured. `command` says which command, `load` how it was asked for."""

    servekit_bench: int = VERSION
    command: str = "bench serve"
    created: str = ""
    machine: dict[str, Any] = {}
    target: Target
    seed: int | None = None
    load: dict[str, Any] = {}
    runs: list[Run]
    knee: Knee | None = None


def encode_run_file(run_file: RunFile) -> bytes:
    """The JSON, on one line that ends with a newline."""
    return msgspec.json.encode(run_file) + b"\n"


def decode_run_file(data: bytes, *, name: str) -> RunFile:
    """Read the JSON. Raises InputError that says what is wrong with the file `name`."""
    try:
        run_file = msgspec.json.decode(data, type=RunFile)
    except msgspec.DecodeError as error:
        raise InputError(
            f"{name} is not a run file: {error}", hint="`servekit bench serve --json` writes one", param=name
        ) from error
    if run_file.servekit_bench != VERSION:
        raise InputError(
            f"{name} is a run file of version {run_file.servekit_bench}, but this program reads version {VERSION}",
            param=name,
        )
    return run_file


def read_run_file(path: str, stdin: IO[bytes]) -> RunFile:
    """The run file at `path`; `-` reads `stdin`. Raises InputError."""
    if path == "-":
        return decode_run_file(stdin.read(), name="standard input")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", param=path) from error
    return decode_run_file(data, name=path)
