"""Ctrl-C: the program ends at once with exit code 130, except where a command says that it does something else.

A KeyboardInterrupt may be raised in the middle of an import, and packages that try one thing after the other swallow it
there, or report it as an import that failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGINT


def end_at_once() -> None:
    """From now on. Not where Ctrl-C is ignored already (nohup), or another handler is set."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # what was printed; the signal may have come in the middle of it
        sys.stdout.flush()
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Here Ctrl-C is a KeyboardInterrupt again. Import before what is needed here."""
    is_ours = signal.getsignal(signal.SIGINT) is _end
    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, _end)
