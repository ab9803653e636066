"""The start of a server: on a terminal a bar for each thing that is loaded, elsewhere lines of the log."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

VERBS = {"kernels": "compiling", "graphs": "capturing"}
IN_BYTES = ("weights",)
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
            TextColumn("{task.fields[amount]}"),
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
            self._bars[what] = self._progress.add_task(text, total=total, amount="")
        self._progress.update(self._bars[what], completed=done, amount=_amount(what, done, total))
        if not self._has_terminal:
            step = LOGGED_STEPS * done // max(total, 1)
            if step > self._steps.get(what, -1):
                self._steps[what] = step
                _log.info("%s: %d %% (%s)", text, 100 * done // max(total, 1), _amount(what, done, total))


def _amount(what: str, done: int, total: int) -> str:
    return f"{decimal(done)} of {decimal(total)}" if what in IN_BYTES else f"{done} of {total}"
