"""How near servekit comes to what this machine can do: bytes read a second, and int8 multiply-adds a second.

    python -m benchmarks.cpu_ceiling [--model demo] [--threads N] [--quantize int4] [--rounds 5] [--json]

The ceilings come from cpu_ceiling.c, which is compiled with the system's `cc`. Decoding one sequence is held against
the first, since it reads every weight once a token; a prompt and a batch of 32 against the second. Only matrix products
count as multiply-adds, while the time is that of the whole step, attention and choosing included.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.servekit_worker import Servekit
from servekit.engine.device.cpu import CpuDevice

_PROMPT, _OUTPUT = 128, 32
_PREFILL = 512
_BATCH = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a model as `servekit serve` takes it")
    parser.add_argument("--threads", type=int, default=CpuDevice().default_threads())
    parser.add_argument("--quantize", default="int4")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.threads, arguments.quantize, arguments.kv_dtype, arguments.rounds)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:36} {value:.3g}" if isinstance(value, float) else f"{name:36} {value}")


def measure(model: str, threads: int, quantize: str, kv_dtype: str, rounds: int) -> dict[str, Any]:
    """Medians of the ceilings and of servekit, taken in turn, and their shares."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ceiling"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O3", "-std=gnu11", "-pthread", str(source), "-o", str(program)], check=True)
        engine = Servekit(model, threads, quantize, kv_dtype)
        taken = []
        for round_ in range(rounds + 1):
            row = (*_ceilings(program, threads), *_rates(engine))
            if round_:  # the first warms caches
                taken.append(row)
            print(f"round {round_}: {', '.join(f'{value:.1f}' for value in row)}", file=sys.stderr)
    read, peak, decode, batch, prefill = (statistics.median(column) for column in zip(*taken, strict=True))
    weights, macs, head_macs = engine.weights_bytes, engine.num_matrix_weights, engine.num_head_weights
    decode_gb = decode * weights / 1e9
    batch_macs = batch * macs / 1e9
    prefill_macs = (prefill * (macs - head_macs) + prefill / _PREFILL * head_macs) / 1e9
    return {
        "threads": threads,
        "quantize": quantize,
        "kv_dtype": kv_dtype,
        "read_gb_per_s": read,
        "int8_gmac_per_s": peak,
        "decode_tokens_per_s": decode,
        "decode_share_of_read": decode_gb / read,
        f"batch_{_BATCH}_tokens_per_s": batch,
        f"batch_{_BATCH}_share_of_int8": batch_macs / peak,
        "prefill_tokens_per_s": prefill,
        "prefill_share_of_int8": prefill_macs / peak,
    }


def _ceilings(program: Path, threads: int) -> tuple[float, float]:
    """GB/s read, and billions of int8 multiply-adds a second."""
    printed = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True).stdout.split()
    return float(printed[0]), float(printed[1])


def _rates(engine: Servekit) -> tuple[float, float, float]:
    """Tokens a second: decoding one sequence, decoding a batch, reading a prompt."""
    return _decode(engine, 1), _decode(engine, _BATCH), _PREFILL / engine.run(_prompts(1, _PREFILL), 1).first_s


def _decode(engine: Servekit, num_seqs: int) -> float:
    run = engine.run(_prompts(num_seqs, _PROMPT), _OUTPUT)
    return num_seqs * (_OUTPUT - 1) / (run.last_s - run.first_s)


def _prompts(num_seqs: int, length: int) -> list[list[int]]:
    return [[(7919 * seq + 104729 * place) % 40_000 + 100 for place in range(length)] for seq in range(num_seqs)]


if __name__ == "__main__":
    main()
