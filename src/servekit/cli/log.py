"""Logging of a server process: one line a record on stderr, for people or, as JSON, for what reads logs."""

import json
import logging
import sys


def setup_logging(level: str, log_format: str) -> None:
    """Send every logger of ours to stderr at `level`; uvicorn speaks only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("servekit").setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """An object a line. A record's `fields`, if it has any, stand in it by name instead of the message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        head = {"time": round(record.created, 3), "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "exception": self.formatException(record.exc_info)}
        return json.dumps({**head, **fields}, ensure_ascii=False, default=str)
