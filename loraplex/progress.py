"""The start of a server: on a terminal a bar for each thing that is loaded, elsewhere lines of the log."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

VERBS = {"kernels": "compiling", "graphs": "capturing"}
LOGGED_STEPS = 4

_log = logging.getLogger("loraplex.start")


class StartProgress:
    """`update("weights", done, total)` draws or moves a bar of that name: weights, kernels, graphs, adapters.

    Without a terminal it logs when a thing begins, and then each quarter of it.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
        )
        self._has_terminal = sys.stderr.isatty()
        self._progress = Progress(*columns, console=console, disable=not self._has_terminal)
        self._bars: dict[str, TaskID] = {}
        self._steps: dict[str, int] = {}  # the quarters that were logged

    def __enter__(self) -> Self:
        self._progress.start()
        if not self._has_terminal:
            _log.info("starting the engine")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, what: str, done: int, total: int) -> None:
        text = f"{VERBS.get(what, 'loading')} {what}"
        if what not in self._bars:
            self._bars[what] = self._progress.add_task(text, total=total)
        self._progress.update(self._bars[what], completed=done)
        if not self._has_terminal:
            step = LOGGED_STEPS * done // max(total, 1)
            if step > self._steps.get(what, -1):
                self._steps[what] = step
                _log.info("%s: %d %%", text, 100 * done // max(total, 1))
