"""How far a load test is, on stderr, in one line that costs the load generator next to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from servekit.bench.experiment import Watcher
from servekit.bench.load import Progress as LoadProgress
from servekit.bench.result import Run

_REFRESH_PER_S = 2.0


class Silent:
    """Tells nobody."""

    def on_start(self, label: str, progress: LoadProgress) -> None:
        """A run begins."""

    def on_end(self, run: Run) -> None:
        """A run has ended."""


class _Bar:
    """One line a run: requests answered, in flight and failed, and tokens."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def on_start(self, label: str, progress: LoadProgress) -> None:
        """Replace the line by that of a new run."""
        if self._task is not None:
            self._bars.remove_task(self._task)
        task = self._task = self._bars.add_task(label, total=progress.total, said="")

        def update() -> None:
            said = f"{progress.sent - progress.done} open, {progress.output_tokens:,} tokens"
            if progress.failed:
                said += f", {progress.failed} failed"
            self._bars.update(task, completed=progress.done, total=progress.total, said=said)

        progress.on_change = update

    def on_end(self, run: Run) -> None:
        """The line stays until the next run begins."""


@contextmanager
def shown_progress(*, is_shown: bool) -> Iterator[Watcher]:
    """Gives the watcher that an experiment reports to; a silent one when nobody looks."""
    if not is_shown:
        yield Silent()
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total}"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=_REFRESH_PER_S,
        transient=True,
    )
    with bars:
        yield _Bar(bars)
