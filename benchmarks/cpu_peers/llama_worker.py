"""llama.cpp under test, through the low-level calls of llama-cpp-python.

    python -m benchmarks.cpu_peers.llama_worker FILE.gguf THREADS

Flash attention, batch sizes and the type of the KV cache are llama.cpp's own choices.
"""

import ctypes
import sys
from importlib.metadata import version
from typing import Any, Self

import llama_cpp
import numpy as np
import numpy.typing as npt

from benchmarks.cpu_peers.worker import Run, Stopwatch, Tokens, serve

IntArray = npt.NDArray[np.int64]

_UBATCH = 512  # llama.cpp's default, so this many tokens touch all of its compute buffers


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user_data: Any) -> None:
    """Keeps llama.cpp's log, a line for each tensor, out of the way; failed calls are reported by this worker."""


class LlamaCpp:
    """A model, and one context that is kept as long as the batch keeps its size."""

    def __init__(self, path: str, threads: int) -> None:
        self.version = f"llama-cpp-python {version('llama-cpp-python')}"
        self._threads = threads
        llama_cpp.llama_log_set(_silent, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape = (0, 0)

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """One call of llama_decode for all prompts, then one for each token of the whole batch."""
        self._prepare(prompts, num_tokens)
        lengths = np.array([len(prompt) for prompt in prompts])
        with _Batch(prompts) as prefill, _Batch([[0]] * len(prompts)) as decode:
            watch = Stopwatch()
            generated = [self._compute(prefill)]
            watch.tick()
            for step in range(num_tokens - 1):
                decode.token[:] = generated[-1]
                decode.position[:] = lengths + step
                generated.append(self._compute(decode))
                watch.tick()
            return watch.stop(np.stack(generated, axis=1).tolist())

    def _prepare(self, prompts: Tokens, num_tokens: int) -> None:
        """An empty context for the batch. A new one is used once before, which is not timed."""
        shape = (len(prompts), max(map(len, prompts)) + num_tokens)
        if self._shape[0] != shape[0] or self._shape[1] < shape[1]:
            self._open(*shape)
            self._shape = shape
            with _Batch([prompts[0][:_UBATCH]]) as warm_up:
                self._compute(warm_up)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def _open(self, num_seqs: int, num_tokens: int) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_seqs
        params.n_ctx = num_seqs * num_tokens
        params.n_batch = params.n_ctx
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot make a context")

    def _compute(self, batch: "_Batch") -> IntArray:
        """The likeliest next token of each sequence, [number of sequences]."""
        code = llama_cpp.llama_decode(self._context, batch.native)
        if code:
            raise SystemExit(f"llama_decode ended with {code}")
        logits = ctypes.cast(llama_cpp.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        chosen: IntArray = np.ctypeslib.as_array(logits, shape=(batch.num_seqs, self._vocab_size)).argmax(axis=1)
        return chosen


class _Batch:
    """llama.cpp's own batch: sequences one after the other, with logits for the last token of each.

    `token` and `position` are views of its memory, [number of tokens].
    """

    def __init__(self, sequences: Tokens) -> None:
        self.num_seqs = len(sequences)
        size = sum(map(len, sequences))
        self.native = llama_cpp.llama_batch_init(size, 0, 1)
        self.native.n_tokens = size
        self.token = np.ctypeslib.as_array(self.native.token, shape=(size,))
        self.position = np.ctypeslib.as_array(self.native.pos, shape=(size,))
        index = 0
        for row, sequence in enumerate(sequences):
            for position, token in enumerate(sequence):
                self.token[index], self.position[index] = token, position
                self.native.n_seq_id[index] = 1
                self.native.seq_id[index][0] = row
                self.native.logits[index] = position == len(sequence) - 1
                index += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_batch_free(self.native)


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
