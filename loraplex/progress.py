"""A progress bar for the start of a server: on a terminal a bar, elsewhere nothing."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

VERBS = {"kernels": "compiling", "graphs": "capturing"}


class StartProgress:
    """`update("weights", done, total)` draws or moves a bar of that name: weights, kernels, graphs, adapters."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not sys.stderr.isatty())
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, what: str, done: int, total: int) -> None:
        if what not in self._bars:
            verb = VERBS.get(what, "loading")
            self._bars[what] = self._progress.add_task(f"{verb} {what}", total=total)
        self._progress.update(self._bars[what], completed=done)
