"""What a server was asked to do: frozen values, and the one order in which they are found.

A flag wins over the environment (`SERVEKIT_` and the flag's name), the environment over the config file, the file over
the default. This module knows nothing of models or machines; `engine/auto.py` turns the remaining `None`s into values.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from servekit.errors import ConfigError
from servekit.units import parse_bytes

ENV_PREFIX = "SERVEKIT_"

DTypeChoice = Literal["auto", "float32", "bfloat16"]
KvDTypeChoice = Literal["auto", "float32", "bfloat16", "q8_0"]
QuantizeChoice = Literal["auto", "none", "int8", "int4", "fp8"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
Scheduling = Literal["continuous", "dynamic", "static"]
AttentionChoice = Literal["auto", "native", "flash", "varlen", "triton", "sdpa", "reference"]

Bytes = int
"""An int that may be written with a unit, such as 4GiB."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine may be told. None means "decide at start and say why" (see engine/auto.py)."""

    model: str = "demo"
    dtype: DTypeChoice = "auto"
    kv_dtype: KvDTypeChoice = "auto"
    quantize: QuantizeChoice = "auto"
    device: DeviceChoice = "auto"
    attention: AttentionChoice = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    kv_memory: Bytes | None = None
    memory_utilization: float | None = None
    block_size: int | None = None
    parallel: int = 16
    max_num_batched_tokens: int | None = None
    scheduling: Scheduling = "continuous"
    static_wait: float = 0.5
    prefix_cache: bool = True
    queue_limit: int = 512
    enforce_eager: bool = False
    graph_warmup: bool = False
    embedding_model: str | None = None
    matryoshka: bool = False

    def __post_init__(self) -> None:
        for name in ("threads", "max_model_len", "kv_memory", "block_size", "parallel", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name, f"must be at least 1, not {value}")
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise _bad("memory_utilization", f"must be over 0 and at most 1, not {self.memory_utilization}")
        if self.memory_utilization is not None and self.kv_memory is not None:
            raise _bad(
                "memory_utilization", "is a share of what is free, and --kv-memory says how much: give one of them"
            )
        if self.graph_warmup and self.enforce_eager:
            raise _bad("graph_warmup", "captures graphs, and --enforce-eager forbids them: give one of them")
        if self.queue_limit < 0:
            raise _bad("queue_limit", f"must not be negative, not {self.queue_limit}")
        if self.static_wait < 0:
            raise _bad("static_wait", f"must not be negative, not {self.static_wait}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.parallel:
            raise _bad(
                "max_num_batched_tokens",
                f"is {self.max_num_batched_tokens}, but {self.parallel} sequences run at once and each decode step "
                "needs one token of it",
                hint="raise --max-num-batched-tokens or lower --parallel",
            )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything the HTTP side may be told. Times are in seconds; keys, hosts and origins are separated by commas."""

    host: str = "127.0.0.1"
    port: int = 8080
    served_model_name: str | None = None
    grace: float = 5.0
    max_body: Bytes = 8 * 2**20
    sse_ping_interval: float = 15.0
    read_timeout: float = 30.0
    write_timeout: float = 30.0
    request_timeout: float | None = None
    unknown_params: Literal["refuse", "warn"] = "warn"
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allow_unauthenticated: bool = False
    allowed_host: str | None = None
    cors_origin: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise _bad("port", f"must be from 0 to 65535, not {self.port}")
        if self.grace < 0:
            raise _bad("grace", f"must not be negative, not {self.grace}")
        for name in ("sse_ping_interval", "read_timeout", "write_timeout", "request_timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise _bad(name, f"must be over 0, not {value}")
        if self.max_body < 1024:
            raise _bad("max_body", f"must be at least 1KiB, not {self.max_body}")
        for origin in (self.cors_origin or "").split(","):
            if "*" in origin or origin.rstrip().endswith("/"):
                raise _bad(
                    "cors_origin", f"{origin.strip()} is not an exact origin", hint="such as https://app.example"
                )
        has_key = self.api_key is not None or self.api_key_file is not None
        if not is_loopback(self.host) and not has_key and not self.allow_unauthenticated:
            raise _bad(
                "host",
                f"{self.host} can be reached from other machines, and nothing would ask them for a key",
                hint="keep 127.0.0.1, set --api-key, or add --allow-unauthenticated if the network is yours alone",
            )


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def resolve_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
) -> tuple[EngineConfig, ServeConfig]:
    """Merge flags (those given), environment and config file into the two configs.

    The file is TOML with the flags' names (`max_model_len = 4096`). Raises ConfigError naming the source and the key.
    """
    known = {**get_type_hints(EngineConfig), **get_type_hints(ServeConfig)}
    merged: dict[str, Any] = {}
    if file is not None:
        for key, value in _read_toml(file).items():
            name = key.replace("-", "_")
            if name not in known:
                raise ConfigError(f"{file}: unknown key {key!r}", hint=f"known keys: {', '.join(sorted(known))}")
            merged[name] = _parse(name, value, known[name], f"{file}: {key}")
    for name, kind in known.items():
        variable = ENV_PREFIX + name.upper()
        if variable in environ:
            merged[name] = _parse(name, environ[variable], kind, variable)
    for name, value in flags.items():
        merged[name] = _parse(name, value, known[name], _flag(name))
    engine = EngineConfig(**{f.name: merged[f.name] for f in fields(EngineConfig) if f.name in merged})
    serve = ServeConfig(**{f.name: merged[f.name] for f in fields(ServeConfig) if f.name in merged})
    return engine, serve


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None


_SIZES = frozenset({"kv_memory", "max_body"})
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def _parse(name: str, value: Any, kind: Any, source: str) -> Any:
    """One value of any source as its field's type; text is accepted for all, since the environment has no other."""
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
    if choices:
        if value in choices:
            return value
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(choices)}", param=name)
    options = set(get_args(kind)) or {kind}
    if isinstance(value, str):
        if name in _SIZES:
            return parse_bytes(value, name=source)
        if bool in options and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
        if str in options:
            return value
        for number in (int, float):
            if number in options:
                try:
                    return number(value)
                except ValueError:
                    break
    elif isinstance(value, bool):
        if bool in options:
            return value
    elif isinstance(value, int) and float in options:
        return float(value)
    elif type(value) in options:
        return value
    wanted = "a size" if name in _SIZES else " or ".join(sorted(o.__name__ for o in options if o is not type(None)))
    raise ConfigError(f"{source}: {value!r} is not {wanted}", param=name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bad(name: str, what: str, *, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{_flag(name)} {what}", hint=hint, param=name)
