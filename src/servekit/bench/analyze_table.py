"""Tables of requests that some other tool wrote: CSV with a header line, or JSON lines.

Owns the columns' names and units; all times are in seconds. It must not know what the numbers mean together.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from servekit.errors import InputError

# Every column with the names it goes by.
_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "arrival_s": ("arrival_s", "arrival"),
    "ttft_s": ("ttft_s", "ttft"),
    "e2e_s": ("e2e_s", "e2e"),
    "output_tokens": ("output_tokens", "tokens"),
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
}


def read_input(path: str, stdin: IO[bytes]) -> tuple[str, bytes]:
    """A name for messages, and the bytes of the file or, for `-`, of `stdin`. Raises InputError."""
    if path == "-":
        return "standard input", stdin.read()
    try:
        return path, Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", param=path) from error


def as_text(data: bytes, name: str) -> str:
    """UTF-8, with or without a byte-order mark. Raises InputError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: {error}", param=name) from error


def is_run_file(text: str) -> bool:
    """Whether the text is a run file: one object on its first line that has the contract's key."""
    first = text.lstrip()[:4096]
    return first.startswith("{") and '"servekit_bench"' in first


def rows_of(text: str, name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line number and fields of every row of a CSV or of JSON lines. Raises InputError."""
    if text.lstrip().startswith("{"):
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InputError(f"line {number} of {name} is not JSON: {error}", param=name) from error
            if not isinstance(row, dict):
                raise InputError(f"line {number} of {name} is not an object", param=name)
            yield number, row
        return
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    for row in reader:
        yield reader.line_num, {str(key).strip(): value for key, value in row.items()}


def number_in(row: Mapping[str, Any], column: str, where: str, *, required: bool = True) -> float | None:
    """A finite number of 0 or more under one of the column's names. Raises InputError naming it."""
    names = _COLUMNS[column]
    found = next((name for name in names if row.get(name) not in (None, "")), None)
    if found is None:
        if not required:
            return None
        raise InputError(
            f"{where} has no {column}", hint=f"known columns: {', '.join(_COLUMNS)}; times in seconds", param=column
        )
    try:
        value = float(row[found])
    except (TypeError, ValueError):
        value = math.nan
    if isinstance(row[found], bool) or not math.isfinite(value) or value < 0:
        raise InputError(f"{where}: {found} must be a number of 0 or more, not {row[found]!r}", param=column)
    return value
