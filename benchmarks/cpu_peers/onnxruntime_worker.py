"""onnxruntime-genai under test: its Generator over a static batch.

python -m benchmarks.cpu_peers.onnxruntime_worker FOLDER THREADS
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnxruntime_genai

from benchmarks.cpu_peers.worker import Run, Stopwatch, Tokens, serve


class OnnxRuntime:
    """A model, with a generator for each run."""

    def __init__(self, folder: str, threads: int) -> None:
        self.version = f"onnxruntime-genai {version('onnxruntime-genai')}"
        config = onnxruntime_genai.Config(folder)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        settings = json.loads((Path(folder) / "genai_config.json").read_text(encoding="utf-8"))
        # A cache must hold at least a window of those layers that have one.
        self._least_length: int = settings["model"]["decoder"].get("sliding_window", {}).get("window_size", 0)

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """Prompts of one length; a least length that is the longest one keeps the end token away."""
        length = max(len(prompts[0]) + num_tokens, self._least_length)
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=length, min_length=length)
        generator = onnxruntime_genai.Generator(self._model, params)
        ids = np.array(prompts, dtype=np.int32)
        watch = Stopwatch()
        generator.append_tokens(ids)
        for _ in range(num_tokens):
            generator.generate_next_token()
            watch.tick()
        return watch.stop([generator.get_sequence(row)[len(prompts[0]) :] for row in range(len(prompts))])


if __name__ == "__main__":
    serve(lambda: OnnxRuntime(sys.argv[1], int(sys.argv[2])))
