"""Calls of one object by many threads, one at a time, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from loraplex.errors import EngineShutdownError

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """`turn` is held by the call that runs; a call inside it by the same thread is part of it."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.is_closed = False


class Called(Protocol):
    _calls: Calls


C = TypeVar("C", bound=Called)


def in_turn(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """A method that waits for the call of another thread; raises EngineShutdownError when its object is closed."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._calls.turn:
            if self._calls.is_closed:
                raise EngineShutdownError(f"this {type(self).__name__} is closed: make a new one")
            return method(self, *args, **kwargs)

    return call
