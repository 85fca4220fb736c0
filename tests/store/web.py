"""A small HTTP server for one resource, with ranges, faults and a record of what was asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Resource:
    """What is served: `cut` closes the connection after that many bytes, `ranges` says whether ranges are honoured."""

    content: bytes
    cut: int | None = None
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)


@contextmanager
def serve(resource: Resource) -> Iterator[str]:
    """Serve `resource` at the URL that this gives."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            resource.asked.append(wanted)
            size, start = len(resource.content), 0
            if wanted and resource.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= size:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{size}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            body = resource.content[start:]
            self.wfile.write(body if resource.cut is None else body[: resource.cut])

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/model.whl"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
