"""Fetch one URL into one file, resumable and checked. It must not know what the file is for.

Bytes go to `NAME.partial`. Whatever interrupts the transfer leaves that file, and the next call continues it with an
HTTP range request (RFC 9110, section 14). Only a file with the expected SHA-256 gets the final name.
"""

import os
import re
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import IO

from servekit.errors import ModelError
from servekit.store.checksum import sha256_of
from servekit.store.progress import Progress

_READ_SIZE = 1 << 18
_TIMEOUT_S = 60.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


def download(url: str, target: Path, *, sha256: str, what: str, progress: Progress) -> None:
    """Fetch `url` (https, http or file) to `target`; `sha256` is in hexadecimal.

    Raises ModelError when the transfer fails (the `.partial` file stays, to be continued) or when the content is not
    what was promised (the `.partial` file goes).
    """
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _transfer(url, partial, what, progress)
    except (OSError, HTTPException) as error:
        raise ModelError(
            f"the download of {what} stopped: {error}",
            hint="run the same command again: it continues where it stopped",
        ) from error
    found = sha256_of(partial)
    if found != sha256:
        partial.unlink()
        raise ModelError(
            f"the download of {what} has SHA-256 {found}, but {sha256} was promised; the file was removed",
            hint="run the same command again; if it happens again, do not trust the index or proxy in between",
        )
    os.replace(partial, target)


def _transfer(url: str, partial: Path, what: str, progress: Progress) -> None:
    done = partial.stat().st_size if partial.exists() else 0
    try:
        response = _open(url, done)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # The partial file already reaches the end of the resource, or belongs to another one: the checksum tells.
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{done}":
            return
        response, done = _open(url, 0), 0
    with response:
        start, total = _extent(response, done)
        with open(partial, "ab" if start else "wb") as file:
            progress(what, start, total)
            while block := response.read(_READ_SIZE):
                file.write(block)
                start += len(block)
                progress(what, start, total)
    if total is not None and start < total:
        raise OSError(f"the connection closed after {start} of {total} bytes")


def _open(url: str, start: int) -> IO[bytes]:
    if not url.startswith(("https://", "http://", "file://")):
        raise OSError(f"{url.split(':', 1)[0]!r} is not a kind of address that can be fetched")
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  (the scheme was checked above)
    response: IO[bytes] = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=_tls())  # noqa: S310
    return response


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    # pip and requests read these; a machine behind an inspecting proxy often sets nothing else.
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):
        bundle = os.environ.get(variable)
        if bundle and Path(bundle).is_file():
            context.load_verify_locations(cafile=bundle)
    return context


def _extent(response: IO[bytes], wanted_start: int) -> tuple[int, int | None]:
    """Where the response begins in the resource and how large that is; a server may ignore the range."""
    headers = getattr(response, "headers", {})
    if wanted_start and (match := _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))):
        start, total = int(match[1]), int(match[2])
        if start != wanted_start:
            raise OSError(f"asked for bytes from {wanted_start}, but the server sent them from {start}")
        return start, total
    length = headers.get("Content-Length")
    return 0, int(length) if length else None
