"""What happened to adapters and memory, in order: for logs, for `GET /v1/events`, for tests.

Events cross from the engine's process to the server's. They name adapters, never keys or prompts.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_KEPT_EVENTS = 1024

Detail = str | int | float | bool


class EventKind(enum.StrEnum):
    """`load`: source or disk to host; `evict`: a tier left; `drop`: all tiers left; `unload`: a name resolves to
    nothing; `switch`: requests go to another adapter or version; `fault` and `recovery`: of weights, memory or logits;
    `mode`: normal to low memory or back; `compaction`: chunks given back; `merge`: a dominant adapter is merged into a
    copy of weights, no longer, or not for a reason; `restart`: a new engine process serves; `release`: a runner that
    the load does not need was ended; `resume`: it serves again; `move`: requests went on in another runner; `audit`: a
    client called a verb of the server."""

    LOAD = "load"
    LOAD_FAILED = "load_failed"
    EVICT = "evict"
    DROP = "drop"
    UNLOAD = "unload"
    SWITCH = "switch"
    FAULT = "fault"
    RECOVERY = "recovery"
    MODE = "mode"
    COMPACTION = "compaction"
    MERGE = "merge"
    RESTART = "restart"
    RELEASE = "release"
    RESUME = "resume"
    MOVE = "move"
    AUDIT = "audit"


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """time_s: Unix time. text: one sentence. details: numbers and words by name (bytes, seconds, tiers, causes)."""

    kind: EventKind
    time_s: float
    text: str
    adapter_id: int | None = None
    adapter_name: str | None = None
    details: Mapping[str, Detail] = field(default_factory=dict)


class EventLog:
    """The latest events that are not taken yet. Thread-safe; when they are not taken, the oldest are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[EngineEvent] = deque(maxlen=MAX_KEPT_EVENTS)
        self._lock = threading.Lock()

    def add(
        self,
        kind: EventKind,
        text: str,
        *,
        adapter_id: int | None = None,
        adapter_name: str | None = None,
        **details: Detail,
    ) -> None:
        event = EngineEvent(kind, self._clock(), text, adapter_id, adapter_name, details)
        with self._lock:
            self._events.append(event)

    def take(self) -> tuple[EngineEvent, ...]:
        """All events since the last call, oldest first."""
        if not self._events:
            return ()
        with self._lock:
            events = tuple(self._events)
            self._events.clear()
        return events
