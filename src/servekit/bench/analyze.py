"""Records from what some other tool measured, so that they get the same metrics as our own. It computes none itself."""

from collections.abc import Mapping
from typing import IO, Any, Final

from servekit.bench.analyze_table import as_text, is_run_file, number_in, read_input, rows_of
from servekit.bench.result import Record, decode_run_file
from servekit.errors import InputError

_REQUIRED: Final = ("arrival_s", "ttft_s", "e2e_s", "output_tokens")


def read_measured(path: str, stdin: IO[bytes], *, start: float = 0.0) -> list[Record]:
    """Records from a CSV with a header line, from JSON lines, or from a run file (its first run); `-` reads `stdin`.

    `arrival_s` is shifted by `start`, so that the run begins there; a run file has its own. Raises InputError naming
    line and column.
    """
    name, data = read_input(path, stdin)
    text = as_text(data, name)
    if is_run_file(text):
        if start:
            raise InputError(f"{name} is a run file, whose times count from its own start", param="start")
        runs = decode_run_file(data, name=name).runs
        if not runs:
            raise InputError(f"{name} has no run", param=name)
        return runs[0].records
    rows = [_record(index, number, row, name, start) for index, (number, row) in enumerate(rows_of(text, name))]
    if not rows:
        raise InputError(f"{name} has no requests", param=name)
    return rows


def _record(index: int, number: int, row: Mapping[str, Any], name: str, start: float) -> Record:
    where = f"line {number} of {name}"
    values = {column: number_in(row, column, where) for column in _REQUIRED}
    arrival, ttft, e2e, tokens = (value or 0.0 for value in values.values())
    arrival -= start
    if arrival < 0:
        raise InputError(f"{where}: the arrival lies {-arrival:g} s before --start", param="start")
    if ttft > e2e:
        raise InputError(f"{where}: ttft_s {ttft:g} is more than e2e_s {e2e:g}", param="ttft_s")
    if tokens != int(tokens) or tokens < 1:
        raise InputError(f"{where}: output_tokens must be a whole number, not {tokens:g}", param="output_tokens")
    prompt = number_in(row, "prompt_tokens", where, required=False)
    return Record(
        index=index,
        scheduled_s=arrival,
        sent_s=arrival,
        first_token_s=arrival + ttft,
        end_s=arrival + e2e,
        status=200,
        input_tokens=None if prompt is None else int(prompt),
        output_tokens=int(tokens),
    )
