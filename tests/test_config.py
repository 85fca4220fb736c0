"""Where a setting comes from, and what is said about one that cannot be used."""

from pathlib import Path
from typing import Any

import pytest

from servekit.config import EngineConfig, ServeConfig, resolve_config
from servekit.errors import ConfigError


def test_defaults() -> None:
    assert resolve_config({}, {}) == (EngineConfig(), ServeConfig())


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nparallel = 1\nthreads = 1\nkv-memory = "1GiB"\n', encoding="utf-8")
    engine, serve = resolve_config({"port": 3}, {"SERVEKIT_PORT": "2", "SERVEKIT_PARALLEL": "2", "OTHER": "x"}, file)
    assert (serve.port, engine.parallel, engine.threads, engine.kv_memory) == (3, 2, 1, 2**30)


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SERVEKIT_PREFIX_CACHE", "off", "prefix_cache", False),
        ("SERVEKIT_PREFIX_CACHE", "1", "prefix_cache", True),
        ("SERVEKIT_STATIC_WAIT", "2", "static_wait", 2.0),
        ("SERVEKIT_KV_MEMORY", "1.5 MiB", "kv_memory", 3 * 2**19),
        ("SERVEKIT_KV_MEMORY", "3GB", "kv_memory", 3 * 10**9),
        ("SERVEKIT_MAX_MODEL_LEN", "4096", "max_model_len", 4096),
        ("SERVEKIT_DTYPE", "bfloat16", "dtype", "bfloat16"),
        ("SERVEKIT_MODEL", "8080", "model", "8080"),
    ],
)
def test_environment_values_get_their_fields_type(variable: str, text: str, name: str, value: Any) -> None:
    found = getattr(resolve_config({}, {variable: text})[0], name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "float16"}, "--dtype: 'float16' is not one of auto, float32, bfloat16"),
        ({"quantize": "int3"}, "--quantize: 'int3' is not one of auto, none, int8, int4, fp8"),
        ({"parallel": 0}, "--parallel must be at least 1, not 0"),
        ({"kv_memory": "lots"}, "--kv-memory: 'lots' is not a size"),
        ({"port": 70000}, "--port must be from 0 to 65535, not 70000"),
        ({"grace": -1.0}, "--grace must not be negative, not -1.0"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 can be reached from other machines"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens is 8, but 16 sequences run at once"),
    ],
)
def test_a_bad_flag_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(flags, {})
    assert message in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["many", "", "1.5", "true"])
def test_a_bad_environment_value_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="SERVEKIT_THREADS"):
        resolve_config({}, {"SERVEKIT_THREADS": text})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 8080", "unknown key 'prot'"),
        ("port = true", "port: True is not int"),
        ("port = ", "not valid TOML"),
        ('dtype = "int3"', "'int3' is not one of"),
    ],
)
def test_a_bad_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        resolve_config({}, {}, file)
    assert message in caught.value.message
    assert "serve.toml" in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*none\.toml: No such file"):
        resolve_config({}, {}, tmp_path / "none.toml")


def test_other_hosts_need_a_word_of_consent() -> None:
    assert resolve_config({"host": "0.0.0.0", "allow_unauthenticated": True}, {})[1].host == "0.0.0.0"
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert resolve_config({"host": host}, {})[1].host == host
