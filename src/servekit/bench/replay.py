"""A recorded arrival trace, lengths only and no text, and what a simulator or a server is asked to do with it."""

from dataclasses import dataclass, replace
from typing import IO

from servekit.bench.analyze_table import as_text, is_run_file, number_in, read_input, rows_of
from servekit.bench.result import decode_run_file
from servekit.bench.sim import SimRequest
from servekit.errors import InputError


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, the first at 0 seconds."""

    requests: tuple[SimRequest, ...]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s

    @property
    def rate(self) -> float | None:
        """Arrivals a second, None for a single moment."""
        return (len(self.requests) - 1) / self.duration_s if self.duration_s > 0 else None

    def at_speed(self, speed: float) -> "Trace":
        """The same requests `speed` times as close together."""
        return Trace(tuple(replace(request, arrival_s=request.arrival_s / speed) for request in self.requests))


def read_trace(path: str, stdin: IO[bytes]) -> Trace:
    """CSV or JSON lines with `arrival_s`, `prompt_tokens` and `output_tokens`, or a run file; `-` reads `stdin`.

    Of a run file the first run's requests are taken, those without an answer with the length they asked for. Raises
    InputError.
    """
    name, data = read_input(path, stdin)
    text = as_text(data, name)
    requests = _from_run_file(data, name) if is_run_file(text) else _from_rows(text, name)
    if not requests:
        raise InputError(f"{name} has no requests", param="trace")
    requests.sort(key=lambda request: request.arrival_s)
    first = requests[0].arrival_s
    return Trace(tuple(replace(request, arrival_s=request.arrival_s - first) for request in requests))


def _from_rows(text: str, name: str) -> list[SimRequest]:
    requests = []
    for number, row in rows_of(text, name):
        where = f"line {number} of {name}"
        arrival = number_in(row, "arrival_s", where) or 0.0
        prompt = int(number_in(row, "prompt_tokens", where) or 0)
        output = int(number_in(row, "output_tokens", where) or 0)
        if prompt < 1 or output < 1:
            raise InputError(f"{where}: a request needs at least one prompt and one output token", param="trace")
        requests.append(SimRequest(arrival, prompt, output))
    return requests


def _from_run_file(data: bytes, name: str) -> list[SimRequest]:
    runs = decode_run_file(data, name=name).runs
    known = [
        (record.scheduled_s, record.input_tokens, record.output_tokens or record.asked_tokens)
        for record in (runs[0].records if runs else [])
    ]
    return [SimRequest(at, prompt, output) for at, prompt, output in known if prompt and output]
