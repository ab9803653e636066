"""Which adapter dominates: the one that fills step after step alone. A pure function of the steps; no torch.

    share(c)    of the last `window` steps those that went through content c alone
    dominant    from share >= enter on, until share < keep
    its time    of those steps; a pause between two counts as MAX_STEP_S at most

A copy is worth its making when the time that it saves is longer than the time that it takes. Traffic that has lasted
for t is expected to last for t more, and a merged step saves a GAIN of itself: hence t >= seconds of making / GAIN.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

GAIN = 0.05
"""Of a decode step, what one adapter of rank 16 on all linears costs (docs/performance.md)."""

MIN_GAIN = 0.01
"""A copy for less, of an adapter of few linears, is not made."""

MAX_STEP_S = 2.0
"""A longer time between two steps is a pause, in which no traffic dominates."""


@dataclass(frozen=True, slots=True)
class DominanceRule:
    """Shares of the last `window` steps. leave: at which the copy of a content that was dominant is let go.

    bytes_per_s: of merged weights that a thread makes, rests apart."""

    window: int = 256
    enter: float = 0.9
    keep: float = 0.5
    leave: float = 0.1
    bytes_per_s: float = 250e6

    def needed_s(self, nbytes: int) -> float:
        """The time that traffic has to last before a copy of so many bytes is made for it.

        Of adapters that change a part of the linears alone, the gain and the bytes are less by the same share.
        """
        return nbytes / self.bytes_per_s / GAIN


class Dominance:
    """What the steps so far say. A content is a digest; "" stands for steps of the base and of several adapters."""

    def __init__(self, rule: DominanceRule) -> None:
        self._rule = rule
        self._steps: deque[str] = deque()
        self._counts: Counter[str] = Counter()
        self._last_s: float | None = None
        self.dominant = ""
        self.dominant_s = 0.0

    def saw(self, content: str, now_s: float) -> None:
        """A step ran through `content` alone, or through none alone."""
        if self._is_window_full:
            oldest = self._steps.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._steps.append(content)
        self._counts[content] += 1
        step_s = 0.0 if self._last_s is None else min(now_s - self._last_s, MAX_STEP_S)
        self._last_s = now_s
        if self.dominant and self.share(self.dominant) >= self._rule.keep:
            self.dominant_s += step_s
        else:
            is_new = content and self._is_window_full and self.share(content) >= self._rule.enter
            self.dominant, self.dominant_s = content if is_new else "", 0.0

    def share(self, content: str) -> float:
        """Of the last steps; those that are not there yet count as steps of others."""
        return self._counts[content] / self._rule.window

    def has_left(self, content: str) -> bool:
        """Whether the content is far from dominant."""
        return self._is_window_full and self.share(content) <= self._rule.leave

    @property
    def _is_window_full(self) -> bool:
        return len(self._steps) == self._rule.window
