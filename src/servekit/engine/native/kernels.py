"""Kernels: a thread pool of the library with the instruction set that it computes in, opened once and closed once."""

import ctypes

from servekit.engine.native import structs
from servekit.engine.native.library import Library
from servekit.errors import EngineError

BFLOAT16_ISAS = frozenset({"avx512bf16"})
"""Those that multiply bfloat16 in one instruction; the others would be slower at it than torch."""


class Kernels:
    """The computing half of csrc/servekit.h. One thread may call it at a time.

    Arrays are passed as addresses, from whatever library owns them; the caller keeps them alive and in the shapes that
    servekit.h states. `isa` None takes the best that this CPU runs. Raises EngineError when threads cannot be had.
    """

    def __init__(self, library: Library, threads: int, isa: str | None = None) -> None:
        self.library = library
        self.threads = threads
        self.isa = isa or library.isas[0]
        self._context: int | None = library.c.sk_open(self.isa.encode(), threads)
        if not self._context:
            raise EngineError(f"the CPU kernels ({self.isa}) could not start {threads} threads")

    def close(self) -> None:
        """End the threads. Nothing may be computed afterwards; closing again does nothing."""
        if self._context:
            self.library.c.sk_close(self._context)
            self._context = None

    def linear(self, matrix: structs.Matrix, x: int, num_rows: int, out: int) -> None:
        """x [rows, k] -> out [rows, n], both float32."""
        self._check(self.library.c.sk_linear(self._open, ctypes.byref(matrix), x, num_rows, out))

    def write_kv(self, attention: structs.Attention, step: structs.Step, kv: int, kv_dtype: int, cache: int) -> None:
        """kv [T, 2, kv_heads, head_dim] float32, keys already rotated -> the step's slots of a layer's cache."""
        self.library.c.sk_write_kv(self._open, ctypes.byref(attention), ctypes.byref(step), kv, kv_dtype, cache)

    def attend(
        self, attention: structs.Attention, step: structs.Step, q: int, kv: int, kv_dtype: int, out: int
    ) -> None:
        """q [T, heads, head_dim], already rotated -> out of the same shape; `kv` is a layer's cache, or the step's."""
        self._check(
            self.library.c.sk_attend(self._open, ctypes.byref(attention), ctypes.byref(step), q, kv, kv_dtype, out)
        )

    def forward(self, decoder: structs.Decoder, step: structs.Step, x: int, out: int) -> None:
        """x [T, hidden], which is overwritten -> out [T, hidden]: the hidden states after all layers, normalised."""
        self._check(self.library.c.sk_forward(self._open, ctypes.byref(decoder), ctypes.byref(step), x, out))

    def encode(self, encoder: structs.Encoder, step: structs.Step, x: int) -> None:
        """x [T, hidden], the summed embeddings before their norm, becomes the hidden states."""
        self._check(self.library.c.sk_encode(self._open, ctypes.byref(encoder), ctypes.byref(step), x))

    def choose(self, scores: int, num_rows: int, n: int, choices: "ctypes.Array[structs.Choice]", out: int) -> None:
        """scores [rows, n] float32 -> out [rows] int64: a token for each row, by that row's choice."""
        self._check(self.library.c.sk_choose(self._open, scores, num_rows, n, choices, out))

    def unpack(self, matrix: structs.Matrix, rows: int, num_rows: int, out: int) -> None:
        """The weights of the channels `rows` (int64) -> out [rows, k] float32."""
        self.library.c.sk_unpack(ctypes.byref(matrix), rows, num_rows, out)

    @property
    def _open(self) -> int:
        assert self._context, "the kernels are closed"
        return self._context

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise EngineError("the CPU kernels ran out of memory")
