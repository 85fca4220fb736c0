"""A progress bar on stderr for what is fetched."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from servekit.store.progress import Progress as TransferProgress


@contextmanager
def transfer_progress() -> Iterator[TransferProgress]:
    """Gives the callback that a pull reports to; each thing fetched gets a bar with its first report."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int | None) -> None:
        if not tasks:
            # Not before there is something to show: the hub's own client draws its bars itself.
            bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
