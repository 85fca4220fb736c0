"""A model's packed weights: read from disk where they were packed before, else packed from its files and kept."""

import hashlib
import logging
from typing import Any

from servekit.engine.models.pack_decoder import pack_decoder
from servekit.engine.models.weights import Progress, WeightSource
from servekit.engine.native import structs
from servekit.engine.native.library import Library
from servekit.engine.native.packed_file import LAYOUT, DamagedFileError, read_packed, write_packed
from servekit.engine.native.quantiser import Bits, Quantiser
from servekit.engine.native.weights import PackedWeights
from servekit.engine.spec.decoder import DecoderSpec
from servekit.store.derived import packed_folder
from servekit.store.resolve import LocalModel

log = logging.getLogger("servekit.engine")


def packed_weights(
    files: LocalModel,
    spec: DecoderSpec,
    source: WeightSource,
    library: Library,
    bits: Bits,
    threads: int,
    progress: Progress | None = None,
) -> PackedWeights:
    """The weights of a decoder in `bits`. A kept file that is damaged or foreign is made again, and that is said.

    Where the file cannot be kept, on a full disk or in a folder that is not ours, they stay in memory.
    """
    path = packed_folder(files.directory) / f"packed-{bits}-{files.weights.stem if files.weights else 'model'}.bin"
    identity = _identity(files, spec, bits)
    try:
        return read_packed(path, identity, threads)
    except FileNotFoundError:
        pass
    except (DamagedFileError, OSError) as error:
        log.warning("%s is packed again: %s", path, error)
    weights = pack_decoder(spec, source, Quantiser(library, bits), threads=threads, progress=progress)
    try:
        write_packed(path, identity, weights)
        return read_packed(path, identity, threads)
    except (DamagedFileError, OSError) as error:
        log.warning("the packed weights are not kept for the next start: %s", error)
        return weights


def _identity(files: LocalModel, spec: DecoderSpec, bits: Bits) -> dict[str, Any]:
    """What the packed weights depend on: the files as they lie there, how they are read, and how they are packed."""
    found = [files.weights] if files.weights is not None else sorted(files.directory.glob("*.safetensors"))
    return {
        "layout": LAYOUT,
        "interface": structs.ABI,
        "bits": bits,
        "spec": hashlib.sha256(repr(spec).encode()).hexdigest(),
        "files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in found],
    }
