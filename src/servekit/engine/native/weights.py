"""PackedWeights: everything that a native decoder is made of, by name. It must not know where it came from."""

from dataclasses import dataclass, field

from servekit.engine.native.matrix import FloatArray, PackedMatrix


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`matrices` are packed, `vectors` float32 and aligned to 64 bytes.

    `errors` has the relative error of each matrix that was rounded when it was packed, by its name.
    """

    matrices: dict[str, PackedMatrix]
    vectors: dict[str, FloatArray]
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What the matrices occupy; the vectors are too small to count."""
        return sum(matrix.nbytes for matrix in self.matrices.values())

    def worst(self) -> tuple[str, float]:
        """The matrix that lost most by rounding, and its relative error; ("", 0.0) when none was rounded."""
        return max(self.errors.items(), key=lambda item: item[1], default=("", 0.0))
