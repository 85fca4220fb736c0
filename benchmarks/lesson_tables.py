"""The tables of a lesson on LLM serving, A to E, measured on this machine with the demo model. About five minutes.

    python -m benchmarks.lesson_tables [--requests 24] [--rate 1] [--outputs 16,32,64] [--json]

A  decoding by batch size, in process          D  load tests of the server: three policies, one and four slots
B  prefill by prompt length, in process        E  machine-seconds for a million tokens, from D
C  the load of D simulated, with step times fitted to the continuous run with four slots

Every server is a process of its own and every load the same 24 requests at the same times, through `servekit bench`.
It ends with 1 when continuous batching does not beat static batching on TTFT p95.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from servekit.bench.fit import fit_step_times, limits_from, requests_of
from servekit.bench.result import Run, RunFile, decode_run_file
from servekit.bench.sim import scheduler_config, simulate
from servekit.bench.sim_report import run_of

SERVEKIT = (sys.executable, "-m", "servekit.cli.main")
POLICIES = ("static", "dynamic", "continuous")
SLOTS = (1, 4)
OFFLINE = ("--output-tokens", "32", "--prefill", "128,512,1024", "--repeats", "2")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="24", help="of each load test")
    parser.add_argument("--rate", default="1", help="arrivals a second")
    parser.add_argument("--outputs", default="16,32,64", help="tokens of an answer, in turn")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    offline = json.loads(_servekit("bench", "offline", "demo", *OFFLINE, "--json"))
    loads = {}
    for slots in SLOTS:
        for policy in POLICIES:
            print(f"load test: {policy}, {slots} slots", file=sys.stderr)
            loads[policy, slots] = _load(policy, slots, arguments)
    simulated = _simulate(loads)
    costs = {key: _cost(run_file) for key, run_file in loads.items()}
    if arguments.json:
        print(json.dumps(_fields(offline, loads, simulated, costs)))
    else:
        _show(offline, loads, simulated, costs)
    static, continuous = (_ttft_p95(loads[policy, 4].runs[0]) for policy in ("static", "continuous"))
    print(f"TTFT p95 with four slots: static {static:.2f} s, continuous {continuous:.2f} s", file=sys.stderr)
    return 0 if continuous < static else 1


Key = tuple[str, int]


def _servekit(*args: str, stdin: bytes | None = None) -> bytes:
    """Run a command; its standard output. Exit code 3 (a busy machine failed the audit) is shown and accepted."""
    done = subprocess.run([*SERVEKIT, *args], input=stdin, stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(f"servekit {' '.join(args)} ended with {done.returncode}")
    return done.stdout


def _load(policy: str, slots: int, arguments: argparse.Namespace) -> RunFile:
    with _server(policy, slots) as url:
        args = ["--url", url, "--rate", arguments.rate, "--requests", arguments.requests]
        args += ["--outputs", arguments.outputs, "--slo", "ttft=2s,tpot=100ms", "--no-cache", "--json", "--quiet"]
        return decode_run_file(_servekit("bench", "serve", *args), name=f"{policy} {slots}")


@contextmanager
def _server(policy: str, slots: int) -> Iterator[str]:
    args = ["serve", "demo", "--port", "0", "--scheduling", policy, "--parallel", str(slots), "--max-model-len", "2048"]
    with subprocess.Popen([*SERVEKIT, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit("the server did not start")
            yield url
        finally:
            process.terminate()
            process.wait()


def _simulate(loads: dict[Key, RunFile]) -> dict[Key, Run]:
    """Every load test again without a model, with the step times of one of them."""
    source = loads["continuous", 4]
    limits = limits_from(source.target)
    times = fit_step_times(source.runs, limits).times
    found = {}
    for (policy, slots), run_file in loads.items():
        requests = requests_of(run_file.runs[0])
        config = scheduler_config(
            requests, slots=slots, policy=policy, max_num_batched_tokens=limits.max_num_batched_tokens
        )
        found[policy, slots] = run_of(simulate(requests, config, times), policy, rate=run_file.runs[0].rate)
    return found


def _cost(run_file: RunFile) -> dict[str, Any]:
    """`servekit cost` of one load test, through the pipe; a run that failed its audit is priced all the same."""
    import msgspec

    runs = [msgspec.structs.replace(run, valid=True) for run in run_file.runs]
    data = msgspec.json.encode(msgspec.structs.replace(run_file, runs=runs))
    found: dict[str, Any] = json.loads(_servekit("cost", "--from", "-", "--slo", "ttft=100s", "--json", stdin=data))
    return found


def _ttft_p95(run: Run) -> float:
    assert run.latency.ttft_s is not None
    return run.latency.ttft_s.p95


def _fields(
    offline: dict[str, Any], loads: dict[Key, RunFile], simulated: dict[Key, Run], costs: dict[Key, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "A": offline["decode"],
        "B": offline["prefill"],
        "C": [_row(key, run) for key, run in simulated.items()],
        "D": [_row(key, run_file.runs[0]) for key, run_file in loads.items()],
        "E": [
            {"policy": policy, "slots": slots, **costs[policy, slots]["machine_seconds_per_million"]}
            for policy, slots in costs
        ],
    }


def _row(key: Key, run: Run) -> dict[str, Any]:
    latency, little = run.latency, run.little
    assert latency.ttft_s is not None
    assert latency.e2e_s is not None
    assert little is not None
    return {
        "policy": key[0],
        "slots": key[1],
        "valid": run.valid,
        "tok_per_s": run.throughput.output_tokens_per_s,
        "ttft_p50": latency.ttft_s.p50,
        "ttft_p95": latency.ttft_s.p95,
        "tpot_p50_ms": None if latency.tpot_s is None else latency.tpot_s.p50 * 1e3,
        "e2e_p50": latency.e2e_s.p50,
        "e2e_p95": latency.e2e_s.p95,
        "lambda": little.arrivals_per_s,
        "W": little.mean_s,
        "L": little.expected,
        "time_average": little.time_average,
        "limit": run.limit.name if run.limit else None,
    }


def _show(
    offline: dict[str, Any], loads: dict[Key, RunFile], simulated: dict[Key, Run], costs: dict[Key, dict[str, Any]]
) -> None:
    print("A  decoding by batch size")
    names: tuple[str, ...] = ("batch", "ttft_s", "tpot_s", "tokens_per_s", "per_request_tokens_per_s", "kv_bytes")
    _table(names, [[point[name] for name in names] for point in offline["decode"]])
    print("B  prefill by prompt length")
    names = ("prompt_tokens", "seconds", "tokens_per_s")
    _table(names, [[point[name] for name in names] for point in offline["prefill"]])
    print("C  simulated, with step times fitted to the continuous run with four slots")
    _runs([_row(key, run) for key, run in simulated.items()])
    print("D  measured")
    _runs([_row(key, run_file.runs[0]) for key, run_file in loads.items()])
    print("E  machine-seconds for a million tokens")
    rows = []
    for (policy, slots), found in costs.items():
        kinds = found["machine_seconds_per_million"]
        rows.append([policy, slots, *(kinds[name] and kinds[name]["seconds"] for name in ("output", "total", "good"))])
    _table(("policy", "slots", "output", "total", "good"), rows)


def _runs(rows: Sequence[dict[str, Any]]) -> None:
    names = ("policy", "slots", "tok_per_s", "ttft_p50", "ttft_p95", "tpot_p50_ms", "e2e_p95", "lambda", "W", "L")
    _table((*names, "time_average"), [[row[name] for name in (*names, "time_average")] for row in rows])
    for row in rows:
        if not row["valid"]:
            print(f"{row['policy']}, {row['slots']} slots: the load generator's audit failed; the machine was busy")


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    cells = [[f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(name), *(len(row[column]) for row in cells)) for column, name in enumerate(names)]
    for row in (names, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


if __name__ == "__main__":
    sys.exit(main())
