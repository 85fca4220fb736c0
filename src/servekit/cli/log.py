"""Logging of a server process: plain lines on stderr, readable by people and by line-based tools."""

import logging
import sys


def setup_logging(level: str) -> None:
    """Send every logger of ours to stderr at `level`; uvicorn speaks only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("servekit").setLevel(level.upper())
