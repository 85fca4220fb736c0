"""OpenVINO GenAI under test: its continuous-batching pipeline with paged attention.

python -m benchmarks.cpu_peers.openvino_worker FOLDER THREADS
"""

import sys
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai

from benchmarks.cpu_peers.worker import Run, Stopwatch, Tokens, serve

_BATCHED_TOKENS = 8192  # the largest batch is prefilled in one step
_KV_BLOCKS = 512  # of 32 tokens


class OpenVino:
    """A pipeline without a prefix cache, driven step by step."""

    def __init__(self, folder: str, threads: int) -> None:
        self.version = f"openvino-genai {version('openvino-genai')}"
        limits = openvino_genai.SchedulerConfig()
        limits.max_num_batched_tokens = _BATCHED_TOKENS
        limits.num_kv_blocks = _KV_BLOCKS
        limits.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, limits, "CPU", properties)

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """One step for all prompts, then one for each token of the whole batch."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        watch = Stopwatch()
        handles = [self._pipeline.add_request(index, tensor, config) for index, tensor in enumerate(tensors)]
        steps = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            steps += 1
            watch.tick()
        assert steps == num_tokens, f"{steps} steps for {num_tokens} tokens: the batch was not computed together"
        return watch.stop([handle.read_all()[0].generated_ids for handle in handles])


if __name__ == "__main__":
    serve(lambda: OpenVino(sys.argv[1], int(sys.argv[2])))
