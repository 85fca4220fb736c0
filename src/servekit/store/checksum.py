"""The checksum of a file."""

import hashlib
from pathlib import Path

_READ_SIZE = 1 << 20


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
    return digest.hexdigest()
