"""The listening address: bound early, so that a taken port is known before a model is looked at. No torch here."""

import errno
import os
import socket

from servekit.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening TCP socket. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}", param="host") from None
    sock = socket.socket(family, kind, proto)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        in_use = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise ConfigError(f"address {host}:{port} {in_use}", hint="choose another with --port", param="port") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """`http://host:port` as a person would type it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
