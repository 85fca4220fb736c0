"""servekit's embeddings against llama-server's: same model, same threads, both through HTTP, in one run, taking turns.

    python -m benchmarks.embed_vs_llama_server --llama-server BIN --gguf minilm-f16.gguf [--texts 400] [--rounds 3]

BIN is llama.cpp's server (docs/peers.md says how it is built); the GGUF file is the pulled model demo-embedding as
llama.cpp's own convert_hf_to_gguf.py writes it. Measured are texts a second for texts of 8 to 256 tokens mixed and of
128 tokens, the median time of one text of 16 and of 128 tokens, and the least cosine between the two. A server stands
still while the other works.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.cpu_peers.servers import RunningServer, Server
from benchmarks.embed_vs_sentence_transformers import embed_one, text_of

_SINGLES = 100
_TOKENS_A_STEP = 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True, type=Path)
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:36} {value:.5g}")


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Medians, and the ratios servekit / llama-server for rates, the other way round for times."""
    threads, rng = str(arguments.threads), np.random.default_rng(3)
    serve = (sys.executable, "-m", "servekit.cli.main", "serve", "demo-embedding", "--threads", threads)
    # As many tokens a step as ours takes, and room for several of the longest texts in it.
    size = str(_TOKENS_A_STEP)
    sizes = ("--threads", threads, "--batch-size", size, "--ubatch-size", size, "--ctx-size", size)
    llama = (str(arguments.llama_server), "--model", str(arguments.gguf), "--embedding", "--pooling", "mean", *sizes)
    mixed = [text_of(int(n), rng) for n in rng.integers(8, 257, arguments.texts)]
    even = [text_of(128, rng) for _ in range(arguments.texts // 4)]
    result: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        RunningServer(Server("servekit", "servekit", serve), Path(logs) / "servekit.log") as ours,
        RunningServer(Server("llama-server", "llama-server", llama), Path(logs) / "llama-server.log") as theirs,
    ):
        both = (ours, theirs)
        vectors = [np.array(_embed(server, mixed[:100])) for server in both]
        unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in vectors]
        result["least_cosine"] = float((unit[0] * unit[1]).sum(axis=1).min())
        for name, texts in (("mixed", mixed), ("128_tokens", even)):
            seconds = _turns(arguments.rounds, [partial(_embed, server, texts) for server in both])
            result |= {f"{name}_{s.server.side}_per_s": len(texts) / t for s, t in zip(both, seconds, strict=True)}
            result[f"{name}_ratio"] = seconds[1] / seconds[0]
        for num_tokens in (16, 128):
            text = text_of(num_tokens, rng)
            seconds = [_single(server, text) for server in both]
            result |= {f"single_{num_tokens}_{s.server.side}_ms": 1e3 * t for s, t in zip(both, seconds, strict=True)}
            result[f"single_{num_tokens}_ratio"] = seconds[1] / seconds[0]
    return result


def _embed(server: RunningServer, texts: Sequence[str]) -> list[list[float]]:
    body = json.dumps({"input": list(texts), "model": "demo-embedding"}).encode()
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, {"content-type": "application/json"})
    with server.running(), urllib.request.urlopen(request, timeout=600) as response:
        rows: list[dict[str, Any]] = json.load(response)["data"]
    return [row["embedding"] for row in sorted(rows, key=lambda row: row["index"])]


def _single(server: RunningServer, text: str) -> float:
    """Median seconds of one text on a connection that stays open."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    seconds = []
    with server.running():
        for round_ in range(_SINGLES + 10):
            began = time.perf_counter()
            embed_one(connection, text)
            if round_ >= 10:
                seconds.append(time.perf_counter() - began)
    connection.close()
    return statistics.median(seconds)


def _turns(rounds: int, runs: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each; the first round warms them and does not count."""
    seconds: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds + 1):
        for taken, run in zip(seconds, runs, strict=True):
            began = time.perf_counter()
            run()
            if round_:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in seconds]


if __name__ == "__main__":
    main()
