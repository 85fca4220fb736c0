"""Starts things on time. A thread sleeps until each due time and wakes the event loop.

Timers of event loops count whole milliseconds and wait for what runs before them; a sleeping thread is late by some
hundredths of a millisecond. It must not know what is started.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence


class Pacer:
    """Calls `start(position)` on the event loop at `zero + times[position]` seconds of `time.perf_counter`."""

    def __init__(self, times: Sequence[float], zero: float, start: Callable[[int], None]) -> None:
        self._times = times
        self._zero = zero
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)

    def __enter__(self) -> "Pacer":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for position, due in enumerate(self._times):
            wait = self._zero + due - time.perf_counter()
            if wait > 0.05:
                # A long sleep can be stopped; the rest of it is slept precisely.
                if self._stop.wait(wait - 0.02):
                    return
                wait = self._zero + due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            if self._stop.is_set():
                return
            self._loop.call_soon_threadsafe(self._start, position)
