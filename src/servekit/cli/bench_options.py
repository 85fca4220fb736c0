"""Options of `servekit bench serve` as people write them, checked against each other. Nothing is given and ignored."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import typer

from servekit.bench.arrivals import ARRIVALS, read_trace
from servekit.bench.bodies import ENDPOINTS, GENERATING
from servekit.bench.experiment import Settings
from servekit.bench.slo import parse_duration, parse_slo
from servekit.bench.workload import parse_outputs, read_prompts
from servekit.errors import ConfigError

DEFAULT_MIN_ATTAINMENT = 0.9

_DEFAULT_DURATION_S = 30.0
_BESIDE_COMPARE = ("compare", "max_regression", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options by name, as they were given."""

    url: str
    model: str | None
    api_key: str | None
    rate: str | None
    concurrency: str | None
    arrival: str
    burstiness: float | None
    trace: str | None
    requests: int | None
    duration: str | None
    repeats: int
    warmup: int
    max_in_flight: int | None
    seed: int
    endpoint: str
    prompts: str
    outputs: str
    temperature: float
    body: str | None
    no_cache: bool
    timeout: str
    tokenizer: str | None
    slo: str | None
    min_attainment: float | None
    find_knee: bool
    max_regression: str | None

    def echo(self) -> dict[str, Any]:
        """What was asked for, for the run file: everything but the key."""
        return {name: value for name, value in asdict(self).items() if name not in ("api_key", "max_regression")}

    def settings(self) -> Settings:
        """The settings of the experiment. Raises ConfigError naming the option that is wrong."""
        self._check_words()
        self._check_pairs()
        requests, duration = self.requests, None
        if self.duration is not None:
            duration = parse_duration(self.duration, name="--duration")
        elif requests is None and self.arrival != "trace":
            duration = _DEFAULT_DURATION_S
        return Settings(
            prompts=read_prompts(self.prompts),
            outputs=tuple(parse_outputs(self.outputs)),
            endpoint=self.endpoint,
            arrival=self.arrival,
            burstiness=_positive(self.burstiness if self.burstiness is not None else 1.0, "--burstiness"),
            trace=tuple(read_trace(self.trace)) if self.trace is not None else (),
            requests=requests,
            duration=duration,
            seed=self.seed,
            warmup=self.warmup,
            slo=parse_slo(self.slo) if self.slo is not None else {},
            no_cache=self.no_cache,
            max_in_flight=self.max_in_flight,
            temperature=self.temperature,
            extra=_parse_body(self.body),
        )

    def points(self) -> list[tuple[float | None, int | None]]:
        """The (rate, concurrency) pairs to run; a trace without a rate is one point without either."""
        if self.concurrency is not None:
            return [(None, count) for count in _parse_counts(self.concurrency)]
        if self.rate is None and self.arrival == "trace":
            return [(None, None)]
        return [(rate, None) for rate in _parse_rates(self.rate or "1")]

    @property
    def needed_attainment(self) -> float:
        """The share of requests that has to keep the SLO."""
        return DEFAULT_MIN_ATTAINMENT if self.min_attainment is None else self.min_attainment

    def _check_words(self) -> None:
        if self.arrival not in ARRIVALS:
            raise _unknown("--arrival", self.arrival, ARRIVALS)
        if self.endpoint not in ENDPOINTS:
            raise _unknown("--endpoint", self.endpoint, ENDPOINTS)
        if self.min_attainment is not None and not 0 < self.min_attainment <= 1:
            raise ConfigError(
                f"--min-attainment: {self.min_attainment:g} is not a share above 0", param="min-attainment"
            )

    def _check_pairs(self) -> None:
        wrong = {
            "--rate and --concurrency exclude each other: one is an open loop, the other a closed one": (
                self.rate is not None and self.concurrency is not None
            ),
            "--arrival belongs to an open loop, not to --concurrency": (
                self.concurrency is not None and (self.arrival != "poisson" or self.trace is not None)
            ),
            "--max-in-flight belongs to an open loop; --concurrency is a bound of its own": (
                self.concurrency is not None and self.max_in_flight is not None
            ),
            "--burstiness belongs to --arrival gamma": self.burstiness is not None and self.arrival != "gamma",
            "--arrival trace needs --trace FILE, and --trace needs --arrival trace": (
                (self.arrival == "trace") != (self.trace is not None)
            ),
            "--min-attainment needs --slo": self.min_attainment is not None and self.slo is None,
            "--find-knee needs --slo": self.find_knee and self.slo is None,
            "--find-knee searches a rate: leave out --concurrency": self.find_knee and self.concurrency is not None,
            "--find-knee starts at one --rate": self.find_knee and len(self.points()) > 1,
            "--find-knee runs every rate once: leave out --repeats": self.find_knee and self.repeats > 1,
            "--max-regression needs --compare": self.max_regression is not None,
            "--slo ttft and tpot need an endpoint that makes tokens": (
                self.endpoint not in GENERATING and self.slo is not None and ("ttft" in self.slo or "tpot" in self.slo)
            ),
        }
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(message, hint="see `servekit bench serve --help`")


def refuse_beside_compare(context: typer.Context) -> None:
    """Raise ConfigError when an option of a load is given with --compare, which sends none."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _BESIDE_COMPARE and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--compare reads two files and sends nothing: leave out {option}", param=name)


def parse_share(text: str, *, name: str) -> float:
    """`5%` or `0.05`. Raises ConfigError naming the option."""
    number, factor = (text.strip()[:-1], 0.01) if text.strip().endswith("%") else (text, 1.0)
    try:
        share = float(number) * factor
    except ValueError:
        share = math.nan
    if not math.isfinite(share) or share < 0:
        raise ConfigError(f"{name}: {text!r} is not a share", hint="write it like 5% or 0.05", param=name)
    return share


def _parse_rates(text: str) -> list[float]:
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not math.isfinite(rate) or rate <= 0:
            raise ConfigError(f"--rate: {part.strip()!r} is not a rate", hint="write it like 1,2,4", param="rate")
        rates.append(rate)
    return rates


def _parse_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--concurrency: {text!r} is not a list of counts", hint="write it like 1,4,16", param="concurrency"
        )
    return [int(part) for part in parts]


def _parse_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--body is not a JSON object: {error}", hint="""write '{"top_p": 0.9}'""") from error


def _positive(value: float, name: str) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} must be more than 0, not {value:g}", param=name)
    return value


def _unknown(name: str, value: str, known: Any) -> ConfigError:
    return ConfigError(f"{name}: {value!r} is not known", hint=f"known is {', '.join(known)}", param=name.strip("-"))
