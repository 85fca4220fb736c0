"""How true are the load generator's numbers? It loads a server whose delays are known and compares.

The server runs in a process of its own and notes on the same monotonic clock when each request came and each chunk was
written. Answers have a role-only first chunk, comments, empty deltas, chunks of several tokens and characters cut in
two. `python -m benchmarks.bench_accuracy` prints errors in milliseconds; it exits with 1 when TTFT or a gap is off by
more than 2 ms at the 99th percentile.
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise

from tests.bench.fake_server import DONE, ROLE, Answer, FakeServer, Seen, Step, chat_event, usage_event

from servekit.bench.arrivals import arrival_times, limited
from servekit.bench.audit import audit
from servekit.bench.client import Client, Planned
from servekit.bench.connection import Address
from servekit.bench.load import Trace, open_loop, run_on_loop
from servekit.bench.measure import measure
from servekit.bench.stats import percentile
from servekit.bench.times import chunk_gaps, time_to_first_token

_TTFT_S, _GAP_S, _CHUNKS, _TOKENS_PER_CHUNK = 0.08, 0.02, 10, 4
_LIMIT_MS = 2.0


def make_steps() -> tuple[list[Step], list[int]]:
    """The steps of an answer, and the positions of those that complete a chunk with text.

    Every fourth chunk arrives in two pieces, cut within a character; its time is that of the second piece.
    """
    steps = [Step(0.0, ROLE), Step(_TTFT_S / 4, b": ping\n\n"), Step(_TTFT_S / 2, chat_event(""))]
    shown = []
    text = chat_event(" আমি ভাত খাই")
    cut = text.index("ভ".encode()) + 1
    for number in range(_CHUNKS):
        at = _TTFT_S + number * _GAP_S
        if number % 4 == 3:
            steps.append(Step(at - _GAP_S / 2, text[:cut]))
            steps.append(Step(at, text[cut:]))
        else:
            steps.append(Step(at, text))
        shown.append(len(steps) - 1)
    end = steps[-1].at_s
    steps.append(Step(end, chat_event(finish_reason="length") + usage_event(20, _CHUNKS * _TOKENS_PER_CHUNK) + DONE))
    return steps, shown


def script(number: int, seen: Seen) -> Answer:
    """The same answer to everything."""
    return Answer(make_steps()[0])


def serve() -> None:
    """The server process: prints its port, and at the end of its standard input what it has seen."""
    with FakeServer(script) as server:
        print(server.port, flush=True)
        sys.stdin.readline()
    print(json.dumps([[seen.body["number"], seen.received, seen.written] for seen in server.seen]), flush=True)


async def load(url: str, rate: float, duration: float) -> Trace:
    """An open loop of Poisson arrivals."""
    client = Client(Address.parse(url))
    times = limited(arrival_times("poisson", rate, seed=0), requests=None, duration=duration)
    plan = [
        Planned(index, "/v1/chat/completions", json.dumps({"number": index}).encode(), scheduled_s=at, asked_tokens=40)
        for index, at in enumerate(times)
    ]
    try:
        return await open_loop(client, plan)
    finally:
        client.close()


def main() -> int:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--duration", type=float, default=20.0)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    command = [sys.executable, "-m", "benchmarks.bench_accuracy", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        trace = run_on_loop(load(f"http://127.0.0.1:{port}", options.rate, options.duration))
        process.stdin.write("\n")
        process.stdin.flush()
        truth = {number: (received, written) for number, received, written in json.loads(process.stdout.readline())}
    return report(trace, truth)


def report(trace: Trace, truth: dict[int, tuple[float, list[float]]]) -> int:
    """Errors are what the generator says minus what the server did."""
    _, positions = make_steps()
    ttft_errors, gap_errors = [], []
    for record in trace.records:
        received, written = truth[record.index]
        shown = [written[position] for position in positions]
        ttft = time_to_first_token(record, from_send=True)
        assert ttft is not None
        ttft_errors.append((ttft - (shown[0] - received)) * 1e3)
        gaps = [later - earlier for earlier, later in pairwise(shown)]
        gap_errors += [(said - was) * 1e3 for said, was in zip(chunk_gaps(record), gaps, strict=True)]
    run = measure(trace.records)
    found, reasons = audit(trace, arrival="poisson", is_open=True, max_in_flight=None)
    print(f"{len(trace.records)} requests, {run.requests.failed} failed; {found.cpu_share:.1%} of a core")
    late = _ms(found.lateness_p99_s)
    print(f"offered {found.offered_rate:.2f}/s, sent {found.achieved_rate:.2f}/s, late by {late} (p99)")
    print(f"dispersion {found.dispersion:.2f}, lag-1 correlation {found.lag1:+.3f}, audit: {reasons or 'passed'}")
    worst = 0.0
    for name, errors in (("TTFT", ttft_errors), ("chunk gap", gap_errors)):
        sizes = [abs(error) for error in errors]
        p99 = percentile(sizes, 0.99)
        worst = max(worst, p99)
        median = percentile(errors, 0.5)
        print(f"{name}: error p50 {median:+.3f} ms, |error| p99 {p99:.3f} ms, max {max(sizes):.3f} ms")
    assert run.latency.tpot_s is not None
    planned = (_CHUNKS - 1) * _GAP_S / (_CHUNKS * _TOKENS_PER_CHUNK - 1)
    print(f"TPOT p50 {_ms(run.latency.tpot_s.p50)}, by the script {_ms(planned)}")
    return 1 if worst > _LIMIT_MS or reasons or run.requests.failed else 0


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f} ms"


if __name__ == "__main__":
    sys.exit(main())
