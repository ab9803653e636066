"""What keys have used, by day and adapter: added up in memory, written once a second by one thread.

A running request does not count: it leaves its newest output in its `Tab`, and the thread looks at all open tabs. So a
server that is killed loses what came after the last write, a second's worth. What could not be written is kept and
written with what comes next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from loraplex.core import RequestOutput
from loraplex.errors import LoraplexError

WRITE_INTERVAL_S = 1.0
CLOSE_PATIENCE_S = 10.0
"""For the last write, where the database says nothing; what it did not take is lost."""

TABS_AT_ONCE = 128
KEPT_DAYS = 400
OF_MIXES = "//mix"
"""No adapter can be called so. The names in a mix are the client's choice, and may be any number of mixes."""

OF_REST = "//rest"
MAX_ADAPTERS_A_DAY = 2**14
"""Of a tenant, with rows of their own: it may give its adapters new names all day. The others are counted together."""

_log = logging.getLogger(__name__)


class UsageKey(NamedTuple):
    """day: 2026-11-23, in UTC. adapter: as registered; "" for the base model. tenant: "" for the operator's keys."""

    day: str
    key_id: str
    adapter: str
    tenant: str


@dataclass(slots=True)
class Counts:
    """requests: prompts that had a first output or ended, but for those that the engine refused; errors: of them those
    that ended in one; waiting_s: until the first output of each."""

    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    waiting_s: float = 0.0

    def add(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def less(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def is_empty(self) -> bool:
        return self == Counts()


@dataclass(eq=False, slots=True)
class Tab:
    """One prompt of a request, from its admission to its end. `output` is the newest that came.

    is_prompt_alone: no new token is asked for, and the one that the engine draws is not counted. is_refused: the engine
    did not take it.
    """

    key_id: str
    tenant: str
    adapter: str
    num_prompt_tokens: int
    began_s: float
    is_prompt_alone: bool = False
    first_s: float | None = None
    output: RequestOutput | None = None
    has_failed: bool = False
    is_refused: bool = False
    is_over: bool = False
    counted: Counts = field(default_factory=Counts)

    def see(self, output: RequestOutput) -> None:
        if self.output is None:
            self.first_s = time.monotonic()
        self.output = output

    def now(self) -> Counts:
        """All that it has cost."""
        output = self.output
        now = Counts()
        if (output is not None or self.is_over) and not self.is_refused:
            now.requests, now.errors = 1, int(self.has_failed)
        if output is not None:
            now.prompt_tokens = self.num_prompt_tokens
            now.cached_tokens = output.num_cached_tokens or 0
            if not self.is_prompt_alone:
                now.generated_tokens = sum(len(each.token_ids) for each in output.outputs)
        if self.first_s is not None:
            now.waiting_s = self.first_s - self.began_s
        return now

    def due(self) -> Counts:
        """What was not counted yet."""
        now, before = self.now(), self.counted
        self.counted = now
        return now.less(before)


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Days are included; None: no bound. tenant, key_id: of one alone; adapters: of any of these, (): of all."""

    first_day: str | None = None
    last_day: str | None = None
    tenant: str | None = None
    key_id: str | None = None
    adapters: tuple[str, ...] = ()


class UsageTable(Protocol):
    """`TenantStore`, as far as it is about usage. Its methods raise JournalError."""

    def add_usage(self, used: Mapping[UsageKey, Counts]) -> None: ...

    def forget_usage(self, before_day: str) -> None: ...

    def usage(self, query: UsageQuery, limit: int, after: Sequence[str] = ()) -> list[dict[str, Any]]: ...


class UsageBook:
    """Thread-safe. `on_tokens` is told how many tokens a tenant has drawn since it was told last."""

    def __init__(
        self,
        store: UsageTable,
        on_tokens: Callable[[str, int], None] = lambda tenant, num_tokens: None,
        clock: Callable[[], float] = time.time,
        interval_s: float = WRITE_INTERVAL_S,
    ) -> None:
        self._store = store
        self._on_tokens = on_tokens
        self._clock = clock
        self._interval_s = interval_s
        self._open: set[Tab] = set()
        self._unwritten: dict[UsageKey, Counts] = {}
        self._being_written: dict[UsageKey, Counts] = {}
        self._today = ""
        self._adapters: defaultdict[str, set[int]] = defaultdict(set)  # hashes of names, by tenant
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._is_closed = threading.Event()
        self._writer = threading.Thread(target=self._write, name="loraplex-usage", daemon=True)
        self._writer.start()

    def open(self, tab: Tab) -> None:
        with self._lock:
            self._open.add(tab)

    def end(self, tab: Tab) -> None:
        """Count what is left of it. A second time it does nothing."""
        with self._lock:
            if tab in self._open:
                self._open.discard(tab)
                tab.is_over = True
                self._count([tab])

    def flush(self) -> None:
        """Write all that was used until now. Raises JournalError; then it is written later."""
        with self._writing:
            self._count_open()
            with self._lock:
                batch, self._unwritten = self._unwritten, {}
                self._being_written = batch
            try:
                if batch:
                    self._store.add_usage(batch)
            except BaseException:
                with self._lock:
                    for key, counts in batch.items():
                        self._unwritten.setdefault(key, Counts()).add(counts)
                raise
            finally:
                self._being_written = {}

    def rows(self, query: UsageQuery, limit: int, after: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What is written; as `UsageTable.usage`."""
        return self._store.usage(query, limit, after)

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Write what is left, or log how much the database did not take in that time."""
        self._is_closed.set()
        self._writer.join(patience_s)
        with self._lock:
            lost = [*self._unwritten.values(), *self._being_written.values()]
        if lost:
            _log.error(
                "%d tokens of %d requests are in no row of usage: the database does not answer",
                sum(each.prompt_tokens + each.generated_tokens for each in lost),
                sum(each.requests for each in lost),
            )

    @property
    def is_writing(self) -> bool:
        """Whether the thread lives."""
        return self._writer.is_alive()

    def _count_open(self) -> None:
        """Some at a time: an event loop may wait for the lock."""
        with self._lock:
            tabs = list(self._open)
        for start in range(0, len(tabs), TABS_AT_ONCE):
            with self._lock:
                self._count(tab for tab in tabs[start : start + TABS_AT_ONCE] if tab in self._open)

    def _count(self, tabs: Iterable[Tab]) -> None:
        day = f"{datetime.fromtimestamp(self._clock(), UTC):%Y-%m-%d}"
        if day != self._today:
            self._today, self._adapters = day, defaultdict(set)
        for tab in tabs:
            due = tab.due()
            if not due.is_empty:
                key = UsageKey(day, tab.key_id, self._row_of(tab), tab.tenant)
                self._unwritten.setdefault(key, Counts()).add(due)
                self._on_tokens(tab.tenant, due.generated_tokens)

    def _row_of(self, tab: Tab) -> str:
        known, name = self._adapters[tab.tenant], hash(tab.adapter)
        if not tab.tenant or name in known:
            return tab.adapter
        if len(known) >= MAX_ADAPTERS_A_DAY:
            return OF_REST
        known.add(name)
        return tab.adapter

    def _write(self) -> None:
        is_away = is_last = False
        forgotten_day = ""
        while not is_last:
            is_last = self._is_closed.wait(self._interval_s)
            try:
                self.flush()
                oldest = f"{datetime.fromtimestamp(self._clock(), UTC) - timedelta(KEPT_DAYS):%Y-%m-%d}"
                if oldest != forgotten_day:
                    self._store.forget_usage(oldest)
                    forgotten_day = oldest
                is_away = False
            except Exception as error:  # the thread goes on, whatever it was
                if not is_away:
                    _log.error(
                        "%s; what is used is written when it can be",
                        error,
                        exc_info=not isinstance(error, LoraplexError),
                    )
                is_away = True


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """RFC 4180. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    lines = [",".join(columns), *(",".join(_cell(row[name]) for name in columns) for row in rows)]
    return "\r\n".join([*lines, ""])


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    if isinstance(value, str) and text.startswith(("=", "+", "-", "@", "\t")):
        text = f"'{text}"
    return f'"{text.replace(chr(34), chr(34) * 2)}"' if any(each in text for each in ',"\r\n') else text
