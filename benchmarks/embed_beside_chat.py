"""What 2,000 texts do to a chat that is being streamed: the longest gap between two tokens, alone and beside them.

    python -m benchmarks.embed_beside_chat [--texts 2000] [--threads N] [--json]

Needs the pulled models demo and demo-embedding. The longest gap may be one decode step and one embedding chunk, as
long as both take when each runs by itself: the longest decode step of the chat alone, and the longest chunk of the same
texts without the chat. The texts must progress while the chat runs.
"""

import argparse
import json
import os
import threading
import time
from typing import Any

import numpy as np
from tests.blackbox.server import CHAT, Server, running_server

from benchmarks.embed_vs_sentence_transformers import text_of

_TOKENS = 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.texts, arguments.threads)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:36} {value}" for name, value in result.items()))


def measure(num_texts: int, threads: int) -> dict[str, Any]:
    """Milliseconds, and how many texts were embedded while the chat ran."""
    rng = np.random.default_rng(5)
    texts = [text_of(int(n), rng) for n in rng.integers(8, 257, num_texts)]
    flags = ("--embedding-model", "demo-embedding", "--threads", str(threads), "--max-body", "32MiB")
    with running_server("demo", *flags, env={"OMP_NUM_THREADS": str(threads)}) as server:
        gaps_of_chat(server)  # the first answer warms the kernels
        alone = gaps_of_chat(server)
        chunk = longest_chunk(server, texts[:200])
        embedder = threading.Thread(target=_embed, args=(server, texts))
        embedder.start()
        while not server.get("/props")["embedding_state"]["waiting"] and embedder.is_alive():
            time.sleep(0.01)
        before = server.get("/props")["embedding_state"]["sequences"]
        beside = gaps_of_chat(server)
        progress = server.get("/props")["embedding_state"]["sequences"] - before
        embedder.join()
    allowed = max(alone) + chunk
    return {
        "decode_ms_p50_alone": 1e3 * float(np.median(alone)),
        "decode_ms_worst_alone": 1e3 * max(alone),
        "chunk_ms_worst": 1e3 * chunk,
        "gap_ms_p50_beside": 1e3 * float(np.median(beside)),
        "gap_ms_worst_beside": 1e3 * max(beside),
        "gap_allowed_ms": 1e3 * allowed,
        "worst_to_allowed": max(beside) / allowed,
        "texts_embedded_meanwhile": progress,
    }


def gaps_of_chat(server: Server) -> list[float]:
    """Seconds between the tokens of one streamed answer."""
    body = {
        "messages": [{"role": "user", "content": "Tell me about rivers."}],
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,  # an event for each token, also where its text is held back
    }
    with server.wire() as wire:
        wire.post(CHAT, body)
        wire.head()
        arrivals = [time.perf_counter() for piece in wire.chunks() if b'"content":[{' in piece]
    return np.diff(arrivals).tolist()


def longest_chunk(server: Server, texts: list[str]) -> float:
    """Seconds of the longest step, sampled text by text: the longest texts fill a step by themselves."""
    longest = 0.0
    for first in range(0, len(texts), 10):
        timings = _embed(server, sorted(texts, key=len)[first : first + 10])["timings"]
        longest = max(longest, timings["device_ms"] / 1e3 / max(1, timings["steps"]))
    return longest


def _embed(server: Server, texts: list[str]) -> Any:
    steps = server.get("/props")["embedding_state"]["steps"]
    answer = server.http.post("/v1/embeddings", json={"model": "demo-embedding", "input": texts}, timeout=900).json()
    answer["timings"]["steps"] = server.get("/props")["embedding_state"]["steps"] - steps
    return answer


if __name__ == "__main__":
    main()
