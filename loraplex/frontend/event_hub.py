"""All events of a server in one numbered row: the engine process's and its own, for logs and followers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from loraplex.events import Detail, EngineEvent, EventKind

MAX_NUMBERED_EVENTS = 1000
MAX_SHOWN_CHARS = 200
"""Of one detail in the log."""

logger = logging.getLogger("loraplex.events")

_LEVELS = {
    EventKind.FAULT: logging.WARNING,
    EventKind.LOAD_FAILED: logging.WARNING,
    EventKind.LOAD: logging.DEBUG,
    EventKind.EVICT: logging.DEBUG,
    EventKind.AUDIT: logging.DEBUG,
}
"""Of the log; INFO for the rest. Adapters come and go by the thousand; what is audited has a log of its own."""


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """event_id: 1, 2, ... since the server started."""

    event_id: int
    event: EngineEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What came after an id, oldest first. last_id: of the newest event there is; num_lost: how many came, before or
    between these, and are not kept any longer."""

    last_id: int = 0
    num_lost: int = 0
    events: tuple[NumberedEvent, ...] = ()


class EventHub:
    """`max_kept` events: the latest, of each tenant a share. Any thread may add; any number may follow, each at its own
    pace and without a queue of its own.

    The oldest event of the tenant that has most makes room: no tenant washes away what is kept of others.
    """

    def __init__(self, max_kept: int = MAX_NUMBERED_EVENTS, first_id: int = 0) -> None:
        """first_id: larger than any id of a server before this one, so that returning followers miss nothing."""
        self._events: defaultdict[str, deque[NumberedEvent]] = defaultdict(deque)  # by tenant; none is empty
        self._max_kept, self._num_kept = max_kept, 0
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        self._counts: Counter[str] = Counter()
        self._first_id = self._last_id = first_id
        self._is_closed = False

    @property
    def last_id(self) -> int:
        """Of the newest event; 0 when nothing has happened."""
        return self._last_id

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there were of each kind."""
        with self._lock:
            return dict(self._counts)

    def add(self, event: EngineEvent) -> None:
        with self._lock:
            self._last_id += 1
            self._keep(NumberedEvent(self._last_id, event))
            self._counts[event.kind.value] += 1
            waiting = self._take_waiting()
        _log(event)
        _wake(waiting)

    def _keep(self, event: NumberedEvent) -> None:
        self._events[_tenant_of(event.event)].append(event)
        self._num_kept += 1
        if self._num_kept > self._max_kept:
            most = max(self._events.values(), key=len)
            gone = most.popleft()
            self._num_kept -= 1
            if not most:
                del self._events[_tenant_of(gone.event)]

    def extend(self, events: Iterable[EngineEvent]) -> None:
        for event in events:
            self.add(event)

    def after(self, last_id: int) -> EventBatch:
        """The kept events with larger ids. An id that was not given yet is another server's: then all that are kept."""
        with self._lock:
            newest_id = self._last_id
            last_id = self._first_id if not self._first_id <= last_id <= newest_id else last_id
            kept = chain.from_iterable(self._events.values())
            events = [numbered for numbered in kept if numbered.event_id > last_id]
        events.sort(key=attrgetter("event_id"))
        return EventBatch(newest_id, newest_id - last_id - len(events), tuple(events))

    async def subscribe(self, last_id: int | None = None) -> AsyncGenerator[EventBatch, None]:
        """What happens after `last_id` (None: from now on), as it happens, until the hub is closed."""
        seen = self._last_id if last_id is None else last_id
        while True:
            batch = self.after(seen)
            if batch.events:
                seen = batch.events[-1].event_id
                yield batch
            elif self._is_closed:
                return
            else:
                await self._wait(min(seen, self._last_id))

    def close(self) -> None:
        """Subscriptions end after what is there."""
        with self._lock:
            self._is_closed = True
            waiting = self._take_waiting()
        _wake(waiting)

    async def _wait(self, last_id: int) -> None:
        """Until there is something after `last_id`, or the hub is closed."""
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._is_closed or self._last_id > last_id:
                return
            self._waiting.add(news)
        try:
            await news
        finally:
            with self._lock:
                self._waiting.discard(news)

    def _take_waiting(self) -> set[asyncio.Future[None]]:
        waiting, self._waiting = self._waiting, set()
        return waiting


def _tenant_of(event: EngineEvent) -> str:
    """Of a verb its caller's, else that of the adapter `tenant/name`; "" for the operator's."""
    if event.kind is EventKind.AUDIT:
        return str(event.details.get("tenant", ""))
    return (event.adapter_name or "").rpartition("/")[0].partition("/")[0]


def _log(event: EngineEvent) -> None:
    level = _LEVELS.get(event.kind, logging.INFO)
    if logger.isEnabledFor(level):
        details = ", ".join(f"{name}={_shown(value)}" for name, value in event.details.items())
        logger.log(level, "%s: %.1000s%s", event.kind, event.text, f" ({details})" if details else "")


def _shown(value: Detail) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)[:MAX_SHOWN_CHARS]


def _wake(waiting: Iterable[asyncio.Future[None]]) -> None:
    for news in waiting:
        with contextlib.suppress(RuntimeError):  # its loop has ended, and with it the one who waited
            news.get_loop().call_soon_threadsafe(_resolve, news)


def _resolve(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)
