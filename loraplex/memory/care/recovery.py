"""Contents whose results were wrong: in doubt and served, or not served until a diagnosis says that they are well.

    odd result -> in doubt, diagnosed where it lies --(answers rightly)--> no doubt, and no other look for a second
                                  `--(wrong)--> quarantined
    quarantined, read again, diagnosed at once --(answers rightly)--> served again
                  ^                        `--(still wrong)--> quarantined for 5, 10, 20, 40, 80 s, then until it is loaded anew

A doubt ends no request: what one prompt makes of an adapter says little about the others, and may be done on purpose.

Kept by content digest: two names with one content are ill together. Pure bookkeeping; the engine runs the diagnosis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loraplex.errors import AdapterFaultError

BACKOFF_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds before each further try to restore a content."""

DOUBT_INTERVAL_S = 1.0
"""Between two looks at a content that is in doubt: what a client that causes them can cost the others."""

DIAGNOSIS_S = 1.0
"""What a client is told to wait while a diagnosis runs."""


@dataclass(slots=True)
class Case:
    """One content that is ill. retry_at_s: when its next diagnosis is due; None while one runs, and when tries have run out."""

    digest: str
    reason: str
    num_tries: int = 0
    retry_at_s: float | None = 0.0
    is_running: bool = False

    @property
    def is_given_up(self) -> bool:
        return self.num_tries > len(BACKOFF_S) and not self.is_running


class Recovery:
    """The open cases. Not thread-safe: the manager calls it under its lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cases: dict[str, Case] = {}
        self._doubts: dict[str, float] = {}  # digest -> when to look
        self._last_looks: dict[str, float] = {}  # of the last interval

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def doubt(self, digest: str) -> None:
        """A result was odd: look at the content soon, and serve it meanwhile."""
        if digest not in self._cases:
            self._doubts.setdefault(digest, self._last_looks.get(digest, -math.inf) + DOUBT_INTERVAL_S)

    def due_doubts(self) -> list[str]:
        """Contents to look at now; `looked` says that it was done."""
        now_s = self._clock()
        return [digest for digest, due_s in self._doubts.items() if due_s <= now_s]

    def looked(self, digest: str) -> None:
        now_s = self._clock()
        self._doubts.pop(digest, None)
        recent = {each: at_s for each, at_s in self._last_looks.items() if now_s - at_s < DOUBT_INTERVAL_S}
        self._last_looks = recent | {digest: now_s}

    def open(self, digest: str, reason: str) -> bool:
        """Quarantine a content; False when it is already."""
        self._doubts.pop(digest, None)
        if digest in self._cases:
            return False
        self._cases[digest] = Case(digest, reason, retry_at_s=self._clock())
        return True

    def close(self, digest: str) -> Case | None:
        """It is well again, or gone; None when there was no case."""
        return self._cases.pop(digest, None)

    @property
    def is_due(self) -> bool:
        """Whether the diagnosis of a case or of a doubt is due."""
        is_case_due = bool(self._cases) and self._next_due() is not None
        return is_case_due or (bool(self._doubts) and bool(self.due_doubts()))

    def due(self) -> Case | None:
        """A case whose diagnosis is due; from now on it counts as running, until `close` or `failed`."""
        case = self._next_due()
        if case is not None:
            case.retry_at_s, case.is_running = None, True
            case.num_tries += 1
        return case

    def _next_due(self) -> Case | None:
        now_s = self._clock()
        due = (each for each in self._cases.values() if each.retry_at_s is not None and each.retry_at_s <= now_s)
        return next(due, None)

    def postpone(self, digest: str) -> None:
        """The diagnosis could not begin: it is due again soon, and was no try."""
        case = self._cases.get(digest)
        if case is None:
            return
        case.num_tries -= 1
        case.retry_at_s, case.is_running = self._clock() + DIAGNOSIS_S, False

    def forgive(self, digest: str) -> None:
        """Somebody loads it again: a content that was given up has another chance."""
        case = self._cases.get(digest)
        if case is not None and case.is_given_up:
            del self._cases[digest]

    def failed(self, digest: str, reason: str) -> None:
        """The diagnosis failed: the next one is later, or never."""
        case = self._cases.get(digest)
        if case is None:
            return
        case.reason, case.is_running = reason, False
        case.retry_at_s = None if case.is_given_up else self._clock() + BACKOFF_S[case.num_tries - 1]

    def state_of(self, digest: str) -> str | None:
        """In words, for the API; None for a content that is well."""
        case = self._cases.get(digest)
        if case is None:
            return None
        if case.is_given_up:
            return f"quarantined until it is loaded again: {case.reason}"
        return f"quarantined, try {case.num_tries + 1} of {1 + len(BACKOFF_S)} to restore it is pending: {case.reason}"

    def refusal(self, digest: str, adapter_name: str) -> AdapterFaultError | None:
        """What a request for an ill content is told."""
        case = self._cases.get(digest)
        if case is None:
            return None
        if case.is_given_up:
            advice, wait_s = "it stays quarantined; load it again", BACKOFF_S[-1]
        else:
            wait_s = DIAGNOSIS_S if case.retry_at_s is None else max(DIAGNOSIS_S, case.retry_at_s - self._clock())
            advice = f"it is being restored; try again in {wait_s:.0f} s"
        return AdapterFaultError(f"adapter {adapter_name!r} is quarantined ({case.reason}); {advice}", wait_s)
