"""What is true during a soak, and when: against it every answer and every error is judged.

Workers write down what they are about to change before they do, and what became of it afterwards; in between, both are
possible. Times are seconds of `time.monotonic()`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

NUM_LOGGED = 200
MAX_FINDINGS = 20
KEPT_S = 90.0
"""What was true longer ago than this is not asked for."""

T = TypeVar("T")


class Timeline(Generic[T]):
    """A value that changes, and what it was before."""

    def __init__(self, value: T) -> None:
        self._changes: deque[tuple[float, T]] = deque([(float("-inf"), value)])

    @property
    def now(self) -> T:
        return self._changes[-1][1]

    def set(self, value: T) -> None:
        if value == self.now:
            return
        now_s = time.monotonic()
        self._changes.append((now_s, value))
        while len(self._changes) > 1 and self._changes[1][0] < now_s - KEPT_S:
            self._changes.popleft()

    def since(self, start_s: float) -> list[T]:
        """What it has been from `start_s` until now, oldest first."""
        values: list[T] = []
        for changed_s, value in reversed(self._changes):
            values.append(value)
            if changed_s <= start_s:
                break
        return values[::-1]


Digests = frozenset[str | None]
"""What may be: digests of contents; None is nothing, or nothing that can be loaded."""

NOTHING: Digests = frozenset([None])


@dataclass
class NameRecord:
    """One name. stands: what requests for it may be answered with; source: what its source may hold; aborted: whether
    they may be."""

    stands: Timeline[Digests] = field(default_factory=lambda: Timeline(NOTHING))
    source: Timeline[Digests] = field(default_factory=lambda: Timeline(NOTHING))
    aborted: Timeline[bool] = field(default_factory=lambda: Timeline(False))

    def stood_since(self, start_s: float) -> Digests:
        return frozenset().union(*self.stands.since(start_s))

    def was_elsewhere_since(self, start_s: float, digest: str) -> bool:
        """Whether its source may have held something else than `digest`."""
        return any(values != {digest} for values in self.source.since(start_s))


class Ledger:
    """Names (of operators, and brought by requests), deaths, pins, faults; counts; findings; the latest actions."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.names: dict[str, NameRecord] = {}
        self.brought: dict[str, NameRecord] = {}
        self.is_down = Timeline(False)
        self.num_pinned = Timeline(0)
        self.pinned: set[str] = set()
        self.tainted: dict[str, Timeline[bool]] = defaultdict(lambda: Timeline(False))
        self.fault_errors: Timeline[frozenset[str]] = Timeline(frozenset())
        self.actions: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.num_compared = 0
        self.num_compared_tokens = 0
        self.num_sure_tokens = 0
        self.num_wrong = 0
        self.findings: list[str] = []
        self.latest: deque[str] = deque(maxlen=NUM_LOGGED)

    def add_names(self, names: Iterable[str]) -> None:
        self.names |= {name: NameRecord() for name in names}

    def record(self, name: str) -> NameRecord:
        """Of an operator's name, or of one that requests bring with them."""
        return self.brought[name] if name in self.brought else self.names[name]

    def note(self, text: str) -> None:
        """For the log of a replay."""
        self.latest.append(f"{time.monotonic() - self.began_s:9.3f} {text}")

    def count(self, action: str, outcome: str) -> None:
        self.outcomes[action][outcome] += 1

    def find(self, text: str) -> None:
        """Something that must not be."""
        self.findings.append(f"{time.monotonic() - self.began_s:9.3f} {text}")
        self.note(f"FINDING {text}")

    @property
    def has_enough(self) -> bool:
        return len(self.findings) >= MAX_FINDINGS

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        if is_pinned:
            self.pinned.add(name)
        else:
            with suppress(KeyError):
                self.pinned.remove(name)
        self.num_pinned.set(len(self.pinned))

    def was_down_since(self, start_s: float) -> bool:
        return any(self.is_down.since(start_s))

    def had_pins_since(self, start_s: float) -> bool:
        return any(self.num_pinned.since(start_s))

    def is_excused_by_faults(self, error: Exception, start_s: float) -> bool:
        excused = frozenset().union(*self.fault_errors.since(start_s))
        return any(cls.__name__ in excused for cls in type(error).__mro__)

    def may_be_tainted(self, digest: str, start_s: float) -> bool:
        return digest in self.tainted and any(self.tainted[digest].since(start_s))
