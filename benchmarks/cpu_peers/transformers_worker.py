"""transformers' generate under test, in float32, with the weights of the model under test.

python -m benchmarks.cpu_peers.transformers_worker MODEL THREADS
"""

import sys
from typing import Any

import torch
import transformers

from benchmarks.cpu_peers.worker import Run, Stopwatch, Tokens, serve
from benchmarks.peers import transformers_model
from servekit.engine.load import open_model
from servekit.store.resolve import find_model


class _Ticking(transformers.StoppingCriteria):
    """Called after every step of the batch; stops nothing."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._watch.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    """A model whose generate gets the whole batch."""

    def __init__(self, model: str, threads: int) -> None:
        self.version = f"transformers {transformers.__version__}"
        torch.set_num_threads(threads)
        self._model = transformers_model(open_model(find_model(model)))

    @torch.inference_mode()
    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """Prompts of one length, so that none is padded."""
        ids = torch.tensor(prompts)
        watch = Stopwatch()
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([_Ticking(watch)]),
        )
        return watch.stop(found[:, ids.shape[1] :].tolist())


if __name__ == "__main__":
    serve(lambda: Transformers(sys.argv[1], int(sys.argv[2])))
