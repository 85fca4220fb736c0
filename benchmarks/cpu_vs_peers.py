"""servekit against llama.cpp, OpenVINO GenAI, onnxruntime-genai and transformers on this CPU, in one run.

    python -m benchmarks.cpu_vs_peers --peers-dir DIR [--model demo] [--rounds 5] [--threads 2] [--quick] [--json FILE]
    python -m benchmarks.cpu_vs_peers --peers-dir DIR --servers
    python -m benchmarks.cpu_vs_peers --peers-dir DIR --competing

Without a further word: prefill of one prompt, and decoding by batch size, in process. Everyone has the same weights,
the same random prompts and the same threads, chooses greedily and ignores the end token; each system is a process of
its own that is stopped while another is measured, and in each round everyone is measured once at each point. Decode
rates count the tokens after the first of each sequence, over the time between all first tokens and all last ones.

--servers loads `servekit serve` and llama-server through `servekit bench serve` instead; --competing measures what is
left of the decode rate beside one busy process. docs/peers.md says how the peers are installed.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cpu_peers.servers import measure_servers
from benchmarks.cpu_peers.steps import Line, Point, decode_point, prefill_point
from benchmarks.cpu_peers.systems import PeersFolder, all_systems, select
from benchmarks.cpu_peers.table import ratios, render, to_json
from servekit.bench.machine import describe_machine

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
BATCHES = (1, 2, 4, 8, 16, 32)
QUICK_BATCHES = (1, 4, 16)
QUICK_OUTPUT_TOKENS = 16
COMPETING_BATCH = 16
BUSY_S = 3.0
BESIDE = " beside a busy process"


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    # So that `timeout` and the like end the systems too, by leaving their contexts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    folder = PeersFolder.from_arguments(arguments)
    systems = all_systems(folder, arguments.model, arguments.servekit.split(","), arguments.threads)
    systems = select(systems, arguments.systems)
    head: dict[str, Any] = {"machine": describe_machine(), "threads": arguments.threads, "rounds": arguments.rounds}
    # Of all cores, before anything of ours runs: what others do there falls on one system more than on another.
    head["busy_before"] = psutil.cpu_percent(interval=BUSY_S) / 100
    if arguments.servers:
        result, text = measure_servers(folder, systems, arguments)
    else:
        line = Line(systems, arguments.model, folder.root / "logs")
        with line.started():
            result, text = competing(line, arguments) if arguments.competing else steps(line, arguments)
    print(f"{head['machine']['processor']}, {arguments.threads} threads, medians of {arguments.rounds}")
    print(f"cores busy before the start: {head['busy_before']:.0%}\n\n{text}")
    if arguments.json:
        arguments.json.write_text(json.dumps(head | result, indent=1), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line, with --quick turned into numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PeersFolder.add_arguments(parser)
    parser.add_argument(
        "--servekit",
        default="none,int8,int8+q8_0,int4",
        help="values of --quantize to measure; int8+q8_0 with that --kv-dtype, int4:Q4_0 with llama.cpp's file",
    )
    parser.add_argument("--systems", default="", help="only those whose names start so, such as 'servekit,llama.cpp'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=None, help="values for each median [5, with --quick 1]")
    parser.add_argument("--quick", action="store_true", help="fewer points and shorter answers, to see that it works")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--servers", action="store_true", help="servers under load instead")
    part.add_argument("--competing", action="store_true", help="decoding beside a busy process instead")
    parser.add_argument("--json", type=Path, help="write everything there as well")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    return arguments


def steps(line: Line, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Prefill and decode rates."""
    points = [prefill_point(PREFILL_TOKENS), *(_decode(batch, arguments) for batch in _batches(arguments))]
    line.warm_up(points)
    for round_ in range(arguments.rounds):
        line.measure(points, round_)
    names = [point.name for point in points]
    found = ratios(line.outcomes, names)
    result = {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": points[-1].output_tokens,
        "systems": [to_json(outcome, names) for outcome in line.outcomes],
        "ratios": {r.point: {"ours": r.ours, "peer": r.peer, "ratio": r.value} for r in found},
    }
    text = f"tokens/s, and how far the lowest and highest of {arguments.rounds} are from the median\n"
    return result, text + render(line.outcomes, names)


def competing(line: Line, arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The decode rate beside a process that never sleeps, as a share of the undisturbed one."""
    point = _decode(COMPETING_BATCH, arguments)
    line.warm_up([point])
    for round_ in range(arguments.rounds):
        line.measure([point], round_)
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            try:
                line.measure([point], round_, BESIDE)
            finally:
                busy.kill()
    names = [point.name, point.name + BESIDE]
    lines = [f"{'tokens/s, batch of 16':24}{'alone':>10}{'beside a busy process':>26}{'share':>8}"]
    shares = {}
    for outcome in line.outcomes:
        alone, beside = (outcome.spread(name) for name in names)
        if alone is None or beside is None:
            lines.append(f"{outcome.name:24}{outcome.status}")
            continue
        shares[outcome.name] = beside.median / alone.median
        cells = f"{alone.median:10.1f}{beside.median:15.1f} {beside.sides:>10}{shares[outcome.name]:8.0%}"
        lines.append(f"{outcome.name:24}{cells}")
    result = {"systems": [to_json(outcome, names) for outcome in line.outcomes], "shares": shares}
    return result, "\n".join(lines)


def _batches(arguments: argparse.Namespace) -> tuple[int, ...]:
    return QUICK_BATCHES if arguments.quick else BATCHES


def _decode(batch: int, arguments: argparse.Namespace) -> Point:
    return decode_point(batch, PROMPT_TOKENS, QUICK_OUTPUT_TOKENS if arguments.quick else OUTPUT_TOKENS)


if __name__ == "__main__":
    main()
