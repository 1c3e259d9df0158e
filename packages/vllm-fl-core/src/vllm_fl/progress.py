"""Progress of the long steps on standard error: a bar or a spinner on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Step:
    """A step in progress."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def update(self, completed: float, total: float | None = None, text: str | None = None) -> None:
        """How far the step is, in the unit of `total` (bytes), and what it does now."""
        changes = {"description": text} if text is not None else {}
        self._progress.update(self._task, completed=completed, total=total, **changes)  # type: ignore[arg-type]


class Reporter:
    """Shows the steps of a command.

    Args:
        stream: where to write; default standard error as it is when the reporter is made.
        silent: show nothing.
        live: draw bars and spinners where the stream is a terminal; False where other output goes there too.
    """

    def __init__(self, stream: TextIO | None = None, *, silent: bool = False, live: bool = True) -> None:
        from rich.console import Console

        self.console = Console(file=stream, quiet=silent) if stream else Console(stderr=True, quiet=silent)
        self._live = live and self.console.is_terminal and not silent

    @contextmanager
    def step(self, text: str) -> Iterator[Step]:
        """Shows that `text` is being done, and how long it has taken; says so when it is done."""
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        start = time.monotonic()
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        if not self._live:
            self.console.print(f"{text} ...", highlight=False)
        with Progress(*columns, console=self.console, transient=True, disable=not self._live) as progress:
            yield Step(progress, progress.add_task(text, total=None))
        self.console.print(f"{text}: done in {time.monotonic() - start:.1f} s", highlight=False)
