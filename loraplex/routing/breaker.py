"""A circuit breaker: a replica that fails gets no requests for a while, and then a probe decides.

CLOSED      -- num_failures in a row --> OPEN
OPEN        -- its pause is over     --> HALF_OPEN   (one probe at a time)
HALF_OPEN   -- the probe succeeds    --> CLOSED
HALF_OPEN   -- the probe fails       --> OPEN        (twice the pause, up to max_pause_s)
"""

from __future__ import annotations

import enum


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Times are the caller's. It begins half open: a replica gets requests when a probe has found it."""

    def __init__(self, num_failures: int = 3, pause_s: float = 0.5, max_pause_s: float = 8.0) -> None:
        self.state = BreakerState.HALF_OPEN
        self._max_failures = num_failures
        self._first_pause_s, self._max_pause_s = pause_s, max_pause_s
        self._num_failures = 0
        self._pause_s = pause_s
        self._until_s = 0.0

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def may_probe(self, now_s: float) -> bool:
        """Whether to ask the replica how it is; an open breaker is half open from then on."""
        if self.state is BreakerState.OPEN and now_s >= self._until_s:
            self.state = BreakerState.HALF_OPEN
        return self.state is not BreakerState.OPEN

    def succeed(self) -> None:
        """A probe was answered well. An answer to a request that began before it opened closes nothing."""
        self.state = BreakerState.CLOSED
        self._num_failures, self._pause_s = 0, self._first_pause_s

    def fail(self, now_s: float) -> None:
        """A probe or a connection failed."""
        self._num_failures += 1
        if self.state is BreakerState.CLOSED and self._num_failures < self._max_failures:
            return
        if self.state is not BreakerState.OPEN:
            self._until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
        self.state = BreakerState.OPEN
