"""servekit's embeddings against sentence-transformers: same model, same threads, one run, taking turns.

    python -m benchmarks.embed_vs_sentence_transformers [--dtype auto] [--texts 2000] [--rounds 3] [--json]

Needs the package sentence-transformers and the pulled model demo-embedding. Three things are measured: texts a second
for texts of 8 to 256 tokens mixed, texts a second for texts of 128 tokens (sentence-transformers with batches of 32),
and the median time of one text of 16 and of 128 tokens through HTTP, beside encode() in process. Also printed: the
least cosine between the two. Medians of rounds are compared, so that a busy moment of the machine strikes both.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tests.blackbox.server import Server, running_server

from servekit.store.resolve import find_model

_SENTENCE = "the river runs past seven old houses while a cat sleeps on warm stones and nobody reads the long letters"
_WORDS = _SENTENCE.split()
_SINGLES = 100


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.dtype, arguments.texts, arguments.rounds, arguments.threads)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:36} {value:.5g}" if isinstance(value, float) else f"{name:36} {value}")


def measure(dtype: str, num_texts: int, rounds: int, threads: int) -> dict[str, Any]:
    """Medians, and the ratios servekit / sentence-transformers for rates, the other way round for times."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    peer: Any = SentenceTransformer(str(find_model("demo-embedding").directory), device="cpu")
    rng = np.random.default_rng(3)
    mixed = [text_of(int(n), rng) for n in rng.integers(8, 257, num_texts)]
    even = [text_of(128, rng) for _ in range(num_texts // 4)]
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {threads} threads",
        "torch": torch.__version__,
    }
    flags = ("--dtype", dtype, "--threads", str(threads))
    with running_server("demo-embedding", *flags, env={"OMP_NUM_THREADS": str(threads)}) as server:
        config = server.get("/props")["config"]
        result |= {"dtype": config["dtype"], "tokens_a_step": config["max_num_batched_tokens"]}
        sample = mixed[:100]
        cosines = (np.array(_embed(server, sample)) * np.array(peer.encode(sample))).sum(axis=1)
        result["least_cosine"] = float(cosines.min())
        for name, texts in (("mixed", mixed), ("128_tokens", even)):
            ours, theirs = _turns(
                rounds,
                partial(_embed, server, texts),
                partial(peer.encode, texts, batch_size=32, show_progress_bar=False),
            )
            result[f"{name}_servekit_per_s"] = len(texts) / ours
            result[f"{name}_sentence_transformers_per_s"] = len(texts) / theirs
            result[f"{name}_ratio"] = theirs / ours
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        for num_tokens in (16, 128):
            text = [text_of(num_tokens, rng)]
            ours, theirs = _turns(_SINGLES, partial(embed_one, connection, text[0]), partial(peer.encode, text))
            result[f"single_{num_tokens}_servekit_http_ms"] = 1e3 * ours
            result[f"single_{num_tokens}_sentence_transformers_ms"] = 1e3 * theirs
            result[f"single_{num_tokens}_ratio"] = theirs / ours
    return result


def text_of(num_tokens: int, rng: np.random.Generator) -> str:
    """Words that are one token each, and two special tokens around them."""
    return " ".join(rng.choice(_WORDS, num_tokens - 2))


def _embed(server: Server, texts: Sequence[str]) -> list[list[float]]:
    data = server.http.post("/v1/embeddings", json={"input": list(texts)}, timeout=600).json()["data"]
    return [row["embedding"] for row in data]


def embed_one(connection: http.client.HTTPConnection, text: str) -> list[float]:
    """By the standard library's client: a larger one takes a millisecond of its own."""
    body = json.dumps({"input": text})
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    answer: list[float] = json.loads(connection.getresponse().read())["data"][0]["embedding"]
    return answer


def _turns(rounds: int, ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of both; the first round warms them and does not count."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for taken, run in zip(seconds, (ours, theirs), strict=True):
            began = time.perf_counter()
            run()
            if round_:
                taken.append(time.perf_counter() - began)
        if rounds < _SINGLES and round_:
            print(f"round {round_}: {seconds[0][-1]:.2f} s and {seconds[1][-1]:.2f} s", file=sys.stderr)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


if __name__ == "__main__":
    main()
