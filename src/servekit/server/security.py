"""Who may talk to this server: keys, Host names and origins of web pages. It must not know routes or bodies.

A web page in somebody's browser can send requests to 127.0.0.1. The Host list keeps one out that has pointed its own
name here (DNS rebinding), the origin list keeps all others from reading answers, and the JSON content type makes a
browser ask before it sends anything.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servekit.config import ServeConfig, is_loopback
from servekit.errors import ConfigError
from servekit.server.errors import HostNotAllowedError, HostNotClearError, UnauthorizedError

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Security:
    """The rules of one server. Keys are kept as SHA-256 digests, and no method repeats one.

    `own_hosts` None lets every Host pass; else they pass without a port or with `port`. `more_hosts` pass with any.
    """

    key_digests: tuple[bytes, ...] = field(default=(), repr=False)
    own_hosts: frozenset[str] | None = None
    more_hosts: frozenset[str] = frozenset()
    port: int | None = None
    origins: frozenset[str] = frozenset()

    def check_host(self, given: Sequence[bytes]) -> None:
        """Check the values of all Host headers. RFC 9112, section 3.2, wants exactly one.

        Raises HostNotClearError for none or several, HostNotAllowedError for a name that is not this server's.
        """
        if len(given) != 1 or not given[0]:
            raise HostNotClearError("a request needs exactly one Host header")
        if self.own_hosts is None:
            return
        name, port = _split_port(given[0].decode("latin-1").lower())
        if name in self.more_hosts or (name in self.own_hosts and port in ("", str(self.port))):
            return
        raise HostNotAllowedError(
            "the Host header does not name this server", hint="use 127.0.0.1, or start the server with --allowed-host"
        )

    def check_key(self, authorization: Sequence[bytes], api_key: Sequence[bytes]) -> str:
        """Check the values of the `Authorization` and `x-api-key` headers: one of them holds one key.

        Gives a name for the holder of the key, the same each time, or "" where there are not several to tell apart.
        Raises UnauthorizedError. Every key is compared, so the time says nothing about which one was nearly right.
        """
        if not self.key_digests:
            return ""
        given = [_bearer(value) for value in authorization] + list(api_key)
        digest = hashlib.sha256(given[0] if len(given) == 1 else b"").digest()
        matches = [hmac.compare_digest(digest, known) for known in self.key_digests]
        if not any(matches):
            raise UnauthorizedError("this server needs a valid API key", hint="send it as `Authorization: Bearer KEY`")
        return digest.hex() if len(self.key_digests) > 1 else ""


def security_of(config: ServeConfig, port: int) -> Security:
    """The rules for a server on `port`. Raises ConfigError for a key file that cannot be used."""
    keys = _list(config.api_key or "") + _keys_in(config.api_key_file)
    for key in keys:
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError("an API key must be printable ASCII without spaces", param="api_key")
    if not keys and (config.api_key is not None or config.api_key_file is not None):
        raise ConfigError("no API key was given", hint="leave the option out to serve without one", param="api_key")
    more_hosts = frozenset(host.lower() for host in _list(config.allowed_host or ""))
    own_hosts = None
    if is_loopback(config.host) or more_hosts:
        own_hosts = frozenset({*LOOPBACK_NAMES, _bracketed(config.host.lower())})
    return Security(
        key_digests=tuple(hashlib.sha256(key.encode()).digest() for key in dict.fromkeys(keys)),
        own_hosts=own_hosts,
        more_hosts=more_hosts,
        port=port,
        origins=frozenset(_list(config.cors_origin or "")),
    )


def warning_of(config: ServeConfig, security: Security) -> str | None:
    """What an operator must be told: that others can use the model without a key."""
    if is_loopback(config.host) or security.key_digests:
        return None
    return f"{config.host} can be reached from other machines, and no API key is asked for"


def _keys_in(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the API keys in {file}: {why}", param="api_key_file") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _split_port(host: str) -> tuple[str, str]:
    """The name and the port; a trailing dot of the name means the same name."""
    name, colon, port = host.rpartition(":")
    if not colon or port.endswith("]"):
        name, port = host, ""
    return name.removesuffix("."), port


def _bearer(value: bytes) -> bytes:
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
