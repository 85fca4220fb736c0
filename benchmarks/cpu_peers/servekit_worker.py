"""servekit's engine under test: its scheduler and model runner, step by step on one thread.

python -m benchmarks.cpu_peers.servekit_worker MODEL THREADS QUANTIZE KV_DTYPE
"""

import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.cpu_peers.worker import Run, Stopwatch, Tokens, serve
from servekit import __version__
from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import Scheduler
from servekit.engine.load import load_engine, open_model
from servekit.store.resolve import find_model

_KV_MEMORY = 512 * 2**20  # holds 32 sequences of 192 tokens in float32
_MAX_MODEL_LEN = 1024


class Servekit:
    """An engine that is not started: this thread is its loop.

    `num_matrix_weights` is what a decoding step multiplies with, the head's `num_head_weights` among them.
    """

    def __init__(self, model: str, threads: int, quantize: Any, kv_dtype: Any = "auto") -> None:
        config = EngineConfig(
            device="cpu",
            threads=threads,
            quantize=quantize,
            kv_dtype=kv_dtype,
            prefix_cache=False,
            max_model_len=_MAX_MODEL_LEN,
            kv_memory=_KV_MEMORY,
        )
        loaded = load_engine(open_model(find_model(model)), config)
        self.version = f"servekit {__version__}, {loaded.config.dtype}"
        self._runner = loaded.runner
        self._limits = loaded.limits
        self.weights_bytes = loaded.weights_bytes
        hidden, vocab = loaded.model_config["hidden_size"], loaded.model_config["vocab_size"]
        self.num_head_weights: int = hidden * vocab
        # A tied embedding is the head; what is left beside matrices are norms, too few to count.
        tied = loaded.model_config.get("tie_word_embeddings", False)
        self.num_matrix_weights: int = loaded.num_parameters - (0 if tied else self.num_head_weights)

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """One step for all prompts, then one for each token of the whole batch."""
        scheduler = Scheduler(
            replace(self._limits, max_num_seqs=len(prompts), max_num_batched_tokens=sum(map(len, prompts)))
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        generated: Tokens = [[] for _ in prompts]
        watch = Stopwatch()
        for index, prompt in enumerate(prompts):
            scheduler.add(Request(str(index), tuple(prompt), sampling, 0.0), 0.0)
        while scheduler.has_work:
            now = time.perf_counter()
            output = scheduler.schedule(now)
            tokens = self._runner.step(output).get()
            for scheduled, token in zip(output.scheduled, tokens, strict=True):
                assert token is not None, "the batch is computed together"
                generated[int(scheduled.seq.request.request_id)].append(token.token_id)
            scheduler.apply(output, tokens, now)
            watch.tick()
        return watch.stop(generated)


if __name__ == "__main__":
    serve(lambda: Servekit(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5]))
