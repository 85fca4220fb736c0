"""Plan against reality: what a running server says about its pool, beside what the calculator makes of it."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servekit.errors import ConfigError, ModelError, UnavailableError
from servekit.kvcalc.memory import PoolPlan, plan_pool
from servekit.kvcalc.model_shape import read_model_shape

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Comparison:
    """One number of the pool: planned and real."""

    name: str
    planned: int
    real: int

    @property
    def is_equal(self) -> bool:
        """Whether the server has exactly what was planned."""
        return self.planned == self.real


def fetch_props(url: str) -> dict[str, Any]:
    """GET URL/props. Raises UnavailableError when nobody answers, ModelError when the answer is not servekit's."""
    address = url.rstrip("/") if url.rstrip("/").endswith("/props") else f"{url.rstrip('/')}/props"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--check: {url!r} is not an http address", hint="write it like http://127.0.0.1:8080")
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - http and https only
            props = json.loads(answer.read(_MAX_BYTES).decode("utf-8"))
    except urllib.error.HTTPError as error:
        raise UnavailableError(f"{address} answered with status {error.code}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UnavailableError(f"{address} does not answer: {reason}", hint="is the server running?") from error
    except ValueError as error:
        raise ModelError(f"{address} does not answer in JSON: {error}") from error
    if not isinstance(props, dict) or not isinstance(props.get("kv"), dict):
        raise ModelError(f"{address} says nothing about KV memory", hint="--check reads a running servekit")
    return props


def compare(props: Mapping[str, Any], config: Mapping[str, Any] | None, *, kv_memory: int | None) -> list[Comparison]:
    """Every number of the pool, planned from `config` (else from the server's own) and `kv_memory` (else its bytes)."""
    real: Mapping[str, Any] = props["kv"]
    config = config if config is not None else props.get("model_config")
    if not isinstance(config, Mapping):
        raise ModelError("the server does not show its model's configuration", hint="give the CONFIG as an argument")
    names = [name for name in PoolPlan.__slots__ if name != "max_model_len"]
    numbers = {name: real.get(name) for name in (*names, "max_model_len")}
    wrong = next((name for name, value in numbers.items() if not isinstance(value, int)), None)
    if wrong is not None or not isinstance(real.get("dtype"), str):
        raise ModelError(f"the server's /props has no usable kv.{wrong or 'dtype'}")
    planned = plan_pool(
        read_model_shape(config),
        kv_memory=kv_memory if kv_memory is not None else int(real["kv_bytes"]),
        block_size=int(real["block_size"]),
        kv_dtype=real["dtype"],
        max_model_len=int(real["max_model_len"]),
    )
    return [Comparison(name, getattr(planned, name), int(numbers[name] or 0)) for name in numbers]
