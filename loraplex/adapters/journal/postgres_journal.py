"""The journal that several servers write: `registry.SharedJournal` in PostgreSQL.

    turn      BEGIN, take the row of the sequence number, read what came before, change, write, COMMIT and notify;
              then wait until every server that is there has it
    watch     a session that listens; every POLL_S it also asks for the number, so a lost notice costs as much, and
              says that this server is there, and how far it is
    apply     what was read, in the order of the turns, unless a turn of this server has it already
    alone_on  an advisory lock of the session that writes: it ends with the session, whatever ends that

A server that has not heard the database for `patience_s` refuses what its names mean: another server may have changed
it, and no turn waits for it any longer. While the database refuses connections it does so to all servers, no turn ends,
and requests go on; so they do only where the refusals began within `patience_s` of the last answer. Verbs need the
database, always. A turn whose COMMIT had no answer may have taken place: its names are refused until they are read
again. Counters of requests add up in the database; a crash may lose the latest.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, cast

import sqlalchemy as sa

from loraplex.adapters.journal import postgres_tables as tables
from loraplex.adapters.journal.damage import summary
from loraplex.adapters.journal.database import Database, reason_of
from loraplex.adapters.journal.postgres_tables import CHANNEL, News
from loraplex.adapters.registry.records import (
    Apply,
    DatabaseHealth,
    DatabaseState,
    Expect,
    NameChange,
    NameUsage,
    SharedJournal,
    Write,
)
from loraplex.config import DEFAULT_DATABASE_PATIENCE_S
from loraplex.errors import (
    AdapterBusyError,
    AdapterUnavailableError,
    ConfigError,
    DatabaseUnavailableError,
    JournalError,
)
from loraplex.processes.fair_turns import FairTurns

_log = logging.getLogger(__name__)

MAX_TURNS, MAX_TURNS_OF_A_CLIENT = 16, 4
"""Verbs of this server that want the session, or wait for other servers and ask about them with it."""

POLL_S = 0.2
MAX_NOTICES = 1000
"""Of a session that listens, before it is replaced."""

MARGIN_S = 0.25
"""By which a turn waits longer for a server than that serves without an answer."""

DOWN_GAP_S = 3.0
"""A database does not start, take a turn and stop between two refusals that are nearer to each other."""

ACK_POLL_S = (0.01, 0.05)
COUNT_INTERVAL_S = 5.0
FETCH_PATIENCE_S = 0.5
"""For files that another server has and this one has not."""

FIRST_LOOK_S = 2.0
STATEMENT_S, WATCHDOG_S = 10.0, 1.0
"""A session that has had no answer for so long is cut: its caller would wait as long as a database stands still."""

VERB_WAIT_S, VERB_POLL_S = 300.0, (0.05, 0.5)
"""For a slow verb on the same name at another server: how long, and how often it is looked for, at first and later."""


class PostgresJournal(SharedJournal):
    """`names` and `last_adapter_id` are what was there when it was opened.

    patience_s: how long names are served without word of the database. Raises ConfigError when the database cannot be
    reached, is another model's or another version's, or is damaged.
    """

    def __init__(
        self,
        url: str,
        base_model: str,
        patience_s: float = DEFAULT_DATABASE_PATIENCE_S,
        count_interval_s: float = COUNT_INTERVAL_S,
    ) -> None:
        self._patience_s = patience_s
        self._server = uuid.uuid4().hex
        self._count_interval_s = count_interval_s
        self._database = Database(url)
        self._mutex = threading.Lock()  # the session that writes, and what the registry has applied
        self._turns = FairTurns(MAX_TURNS, MAX_TURNS_OF_A_CLIENT)
        self._writer: sa.Connection | None = None
        self._reader: sa.Connection | None = None
        self._asked_s: float | None = None
        self._session, self._is_in_turn = 0, False
        self._used_s: float | None = None  # since when the session that writes is
        self._asking, self._names_asked = threading.Condition(), set[str]()
        self._confirmed = 0.0  # the last turn that all servers had
        self._held = threading.local()
        self._facts = threading.Lock()  # the fields below; nothing waits under it
        self._learned: dict[str, float] = {}
        self._unsure: set[str] = set()
        self._damaged: dict[str, str] = {}
        self._news: deque[tuple[News, frozenset[str]]] = deque()
        self._has_news, self._has_looked, self._is_closed = (threading.Event() for _ in range(3))
        self._refused_s, self._is_away = -1e9, False
        self._connected_s = math.inf  # of the session that listens
        self._apply: Apply | None = None
        self._expect: Expect = lambda changes, patience_s: None
        self._take_usage: Callable[[], Sequence[NameUsage]] = tuple
        news = self._open(base_model)
        self.names = {change.name: change.record for change in news.changes if change.record is not None}
        self._known = set(self.names)
        self._counted = {name: record.usage.num_requests for name, record in self.names.items()}
        self._applied = self._seen = news.sequence
        self.last_adapter_id = max(
            (version.adapter_id for record in self.names.values() for version in record.versions), default=0
        )
        self._last_id = self.last_adapter_id
        self._beat_at: datetime | None = None
        self._num_restores = self._num_restores_read = 0
        self._beating = threading.Lock()  # of the sessions: what one wrote is there before the next looks
        self._heard_s = time.monotonic()
        self._threads = [
            threading.Thread(target=target, name=f"loraplex-registry-{name}", daemon=True)
            for name, target in (("cut", self._cut_what_hangs), ("watch", self._watch), ("apply", self._apply_news))
        ]

    def _open(self, base_model: str) -> News:
        try:
            with closing(self._database.connect()) as connection:
                tables.make_tables(connection, base_model, self._database.place)
                with _at_one_moment(connection):
                    news = tables.read_all(connection)
        except sa.exc.SQLAlchemyError as error:
            raise ConfigError(f"database {self._database.place} cannot be used: {reason_of(error)}") from None
        except _driver_error() as error:
            raise ConfigError(f"database {self._database.place} cannot be reached: {reason_of(error)}") from None
        tables.refuse_damage(news, self._database.place)
        return news

    def open_state(self) -> sa.Engine:
        """Further sessions with the database, for tables of others than the registry."""
        return self._database.pooled()

    # ------------------------------------------------------------------------------------------------------- the reader

    def follow(self, apply: Apply, expect: Expect) -> None:
        self._apply, self._expect = apply, expect
        cutting, *reading = self._threads
        cutting.start()
        with self._mutex, self._session_of_writer() as connection:
            tables.join_servers(connection, self._server, self._applied)
        for thread in reading:
            thread.start()
        self._has_looked.wait(FIRST_LOOK_S)  # what changed while the engine started is learned now

    def check_known(self, *names: str) -> None:
        now_s = time.monotonic()
        age_s = now_s - self._heard_s
        if age_s > self._patience_s and now_s - self._refused_s > self._patience_s:
            raise AdapterUnavailableError(
                f"adapter {names[0]!r} may have been changed at another server: the registry's database has not "
                f"answered for {age_s:.1f} s; try again"
            )
        for name in names if self._learned or self._unsure or self._damaged else ():
            if name in self._damaged:
                raise AdapterUnavailableError(f"adapter {name!r} is damaged in the registry's database; load it again")
            if name in self._unsure or now_s - self._learned.get(name, now_s) > self._patience_s:
                text = "has been changed, and this server does not have the change yet; try again"
                raise AdapterUnavailableError(f"adapter {name!r} {text}")

    def health(self) -> DatabaseHealth:
        now_s = time.monotonic()
        away_s = now_s - self._heard_s
        if away_s <= self._patience_s:
            return DatabaseHealth(DatabaseState.CONNECTED, 0.0)
        is_down = now_s - self._refused_s <= self._patience_s
        return DatabaseHealth(DatabaseState.DOWN if is_down else DatabaseState.SILENT, away_s)

    def _watch(self) -> None:
        has_ended_well = False
        while not self._is_closed.is_set():
            goes_on, has_ended_well = has_ended_well, False
            try:
                with closing(self._database.connect()) as connection:
                    self._reader = connection
                    if not goes_on:
                        self._connected_s = time.monotonic()
                    self._listen(connection)
                has_ended_well = True
            except (sa.exc.SQLAlchemyError, _driver_error(), OSError) as error:
                self._note_refusal(error)
                if not self._is_away:
                    _log.error("database %s is away: %s", self._database.place, reason_of(error))
                self._is_away = True
            except Exception:
                _log.exception("what other servers changed could not be read")
            self._is_closed.wait(POLL_S)

    def _note_refusal(self, error: BaseException) -> None:
        """Only where nothing can have been missed before it."""
        now_s = time.monotonic()
        is_continued = now_s - self._heard_s <= self._patience_s or now_s - self._refused_s <= DOWN_GAP_S
        if is_continued and self._database.is_down(error):
            self._refused_s = time.monotonic()

    def _listen(self, connection: sa.Connection) -> None:
        """Until MAX_NOTICES have come: every role of the database may notify, and a session never gives back the memory
        in which it keeps what it has not read."""
        num_notices = 0
        connection.exec_driver_sql(f"LISTEN {CHANNEL}")
        connection.exec_driver_sql("SET synchronous_commit = off")  # that this server is there need not outlive a crash
        session = _driver_of(connection)
        while not self._is_closed.is_set():
            began_s = self._asked_s = time.monotonic()
            # before the question: a turn of this server may end meanwhile
            at_least, known_id = float(max(self._seen, self._applied)), self._last_id
            beat = self._beat(connection, self._seen, self._applied)
            num_restores = self._num_restores
            if num_restores > self._num_restores_read:
                at_least = math.inf  # turns that came after a restore may have the numbers of those before it
            if not _is_at_least(beat.last_adapter_id, known_id):
                _log.warning("database %s has an older last adapter_id: it is raised", self._database.place)
                tables.raise_last_adapter_id(connection, beat.last_adapter_id, known_id)
            if beat.sequence < at_least or beat.sequence > self._seen or self._unsure:
                self._learn(connection, at_least)
            # not before: a session may end in between, and the row is new by now
            self._num_restores_read = num_restores
            self._heard_s, self._asked_s = began_s, None
            if self._is_away:
                _log.warning("database %s is back", self._database.place)
            self._is_away = False
            self._has_looked.set()
            num_notices += sum(1 for _ in session.notifies(timeout=POLL_S, stop_after=1))
            if num_notices > MAX_NOTICES:
                return

    def _beat(self, connection: sa.Connection, seen: int, applied: int) -> tables.Beat:
        """This server is there. The first session that says so after a restore finds a row that is older than it was:
        the next one finds what this one wrote. In a turn the new row is not there before its COMMIT."""
        is_alone = self._beating.acquire(timeout=WATCHDOG_S)  # not where a session hangs, which this thread may cut
        try:
            beat = tables.beat(connection, self._server, seen, applied)
            if is_alone and self._beat_at is not None and (beat.before is None or beat.before < self._beat_at):
                self._num_restores += 1
            if is_alone and not (self._is_in_turn and connection is self._writer):
                self._beat_at = beat.now
        finally:
            if is_alone:
                self._beating.release()
        return beat

    def _learn(self, connection: sa.Connection, at_least: float) -> None:
        with self._facts:
            unsure = frozenset(self._unsure)
        with _at_one_moment(connection):
            news = tables.read_news(connection, self._seen, self._known, unsure, at_least)
        now_s = time.monotonic()
        with self._facts:
            for change in news.changes:
                self._learned.setdefault(change.name, now_s)
                self._damaged.pop(change.name, None)
            for damage in news.damages:
                self._damaged[str(damage.name)] = damage.what
        if news.damages:
            _log.error("database %s is damaged: %s", self._database.place, summary(news.damages))
        self._seen = news.sequence
        self._news.append((news, unsure))
        self._has_news.set()

    def _apply_news(self) -> None:
        counted_s = time.monotonic()
        while not self._is_closed.is_set():
            self._has_news.wait(WATCHDOG_S)
            self._has_news.clear()
            num_news = self._expect_news()
            with self._mutex:
                if self._apply_learned(num_news):
                    with suppress(JournalError), self._session_of_writer() as connection:
                        self._beat(connection, self._seen, self._applied)
                if time.monotonic() - counted_s >= self._count_interval_s:
                    self._write_counters()
                    counted_s = time.monotonic()

    def _cut_what_hangs(self) -> None:
        while not self._is_closed.wait(WATCHDOG_S):
            for began_s, connection in ((self._asked_s, self._reader), (self._used_s, self._writer)):
                if began_s is not None and time.monotonic() - began_s > STATEMENT_S:
                    _cut(connection)

    def _expect_news(self) -> int:
        """Without the mutex, since files may be slow to come. How many news."""
        news = tuple(self._news)
        try:
            if news:
                self._expect([change for each, _ in news for change in each.changes], FETCH_PATIENCE_S)
        except Exception:
            _log.exception("files of other servers' adapters could not be looked for")
        return len(news)

    def _apply_learned(self, most: float = math.inf) -> bool:
        """With the mutex. A turn of this server may have overtaken what was read. Whether there was something."""
        num_applied = 0
        while self._news and num_applied < most:
            num_applied += 1
            news, unsure = self._news.popleft()
            is_new = news.sequence > self._applied or news.is_restored
            changes = [each for each in news.changes if is_new or each.name in unsure & self._unsure]
            self._apply_now(changes)
            self._applied = news.sequence if is_new else self._applied
            self._confirmed = min(self._confirmed, self._applied)
            with self._facts:
                self._unsure -= unsure
                for change in news.changes:
                    self._learned.pop(change.name, None)
        return num_applied > 0

    def _apply_now(self, changes: Sequence[NameChange]) -> None:
        if not changes:
            return
        assert self._apply is not None, "a registry follows before anything is changed"
        for name, record in ((change.name, change.record) for change in changes):
            if record is None:
                self._known.discard(name)
                self._counted.pop(name, None)
            else:
                self._known.add(name)
                self._counted.setdefault(name, record.usage.num_requests)
                self._last_id = max(self._last_id, *(each.adapter_id for each in record.versions))
        try:
            refused = self._apply(changes)
        except Exception:  # a bug: the names stay refused, and the others are followed
            _log.exception("%d changes of other servers could not be applied", len(changes))
            refused = [change.name for change in changes]
        with self._facts:
            self._damaged.update(dict.fromkeys(refused, "it could not be applied"))

    # ------------------------------------------------------------------------------------------------------- the writer

    @contextmanager
    def turn(self) -> Iterator[Write]:
        with self._turns.own():
            yield from self._turn()

    def _turn(self) -> Iterator[Write]:
        self._refuse_when_away()
        with self._mutex:
            self._apply_learned()
            with self._session_of_writer() as connection:
                self._check_still_held()
                connection.exec_driver_sql("BEGIN")
                sequence = tables.sequence_of(connection, is_locked=True)
                if sequence != self._applied or self._unsure:
                    news = tables.read_news(connection, self._applied, self._known, self._unsure, self._applied)
                    self._apply_now(news.changes)
                    self._applied = sequence
                    self._confirmed = min(self._confirmed, sequence)
                    with self._facts:
                        self._unsure -= {change.name for change in news.changes}
            self._is_in_turn = True
            try:
                yield partial(self._write_turn, sequence + 1)
            finally:
                self._end_turn()
            has_written = self._applied == sequence + 1
        if has_written:
            self._wait_for_servers(sequence + 1)

    def _wait_for_servers(self, sequence: int) -> None:
        """Until all that are there have a turn, or refuse its names: then it may be acknowledged."""
        began_s, pause_s, seen_s = time.monotonic(), ACK_POLL_S[0], math.inf
        lease_s = self._patience_s + MARGIN_S
        while self._confirmed < sequence:
            with self._mutex:
                if self._confirmed >= sequence:  # all that wait ask one question
                    return
                # a database that was away let no server say that it is there
                trusts_leases = time.monotonic() - self._connected_s > lease_s
                with self._session_of_writer() as connection:
                    found = tables.least_of_others(connection, self._server, lease_s if trusts_leases else None)
                self._confirmed, num_seen = max(self._confirmed, min(found[0], self._applied)), found[1]
            now_s = time.monotonic()
            seen_s = min(seen_s, now_s) if num_seen >= sequence else math.inf
            if now_s - seen_s > lease_s:
                return
            if self._confirmed < sequence and now_s - began_s > 3 * lease_s:
                text = "it is done, and another server may not know it yet: look at the adapter there"
                raise DatabaseUnavailableError(text)
            time.sleep(0.0 if self._confirmed >= sequence else pause_s)
            pause_s = min(2 * pause_s, ACK_POLL_S[1])

    def _write_turn(self, sequence: int, changes: Sequence[NameChange]) -> None:
        names = {change.name for change in changes}
        try:
            with self._session_of_writer(is_begun=True) as connection:
                tables.write_turn(connection, changes, sequence)
                self._beat(connection, sequence, sequence)
                connection.exec_driver_sql("COMMIT")
        except BaseException:
            with self._facts:
                self._unsure |= names
            raise
        self._is_in_turn = False
        self._applied = sequence
        for change in changes:
            if change.record is None:
                self._known.discard(change.name)
                self._counted.pop(change.name, None)
            else:
                self._known.add(change.name)
                self._counted.setdefault(change.name, change.record.usage.num_requests)
        with self._facts:
            for name in names:
                self._damaged.pop(name, None)

    def _end_turn(self) -> None:
        """Give the row back of a turn that wrote nothing."""
        if self._is_in_turn and self._writer is not None:
            with suppress(JournalError), self._session_of_writer(is_begun=True) as connection:
                connection.exec_driver_sql("ROLLBACK")

    def take_adapter_id(self) -> int:
        self._refuse_when_away()
        with self._mutex, self._session_of_writer() as connection:
            self._last_id = tables.take_adapter_id(connection, self._last_id)
            return self._last_id

    @contextmanager
    def alone_on(self, name: str) -> Iterator[None]:
        session, before = self._lock_verb(name), getattr(self._held, "session", None)
        self._held.session = session
        try:
            yield
        finally:
            self._held.session = before
            with self._mutex:
                if self._session == session and self._writer is not None:
                    with suppress(JournalError), self._session_of_writer() as connection:
                        tables.unlock_verb(connection, name)

    def _lock_verb(self, name: str) -> int:
        """The session that holds it. One verb asks for all of this server that wait for the name."""
        deadline_s, pause_s = time.monotonic() + VERB_WAIT_S, VERB_POLL_S[0]
        with self._asking:
            is_first = self._asking.wait_for(lambda: name not in self._names_asked, VERB_WAIT_S)
            if is_first:
                self._names_asked.add(name)
        try:
            while is_first and time.monotonic() < deadline_s:
                self._refuse_when_away()
                with self._mutex, self._session_of_writer() as connection:
                    if tables.lock_verb(connection, name):
                        return self._session
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, VERB_POLL_S[1])
        finally:
            with self._asking:
                if is_first:
                    self._names_asked.remove(name)
                    self._asking.notify_all()
        text = f"another server has had a verb on it under way for {VERB_WAIT_S:g} s; try again later"
        raise AdapterBusyError(f"adapter {name!r}: {text}")

    def _check_still_held(self) -> None:
        """A verb whose session ended may no longer be the only one on its name."""
        held = getattr(self._held, "session", None)
        if held not in (None, self._session):
            raise DatabaseUnavailableError(
                "the session with the registry's database ended while the verb ran: nothing was changed; try again"
            )

    def _refuse_when_away(self) -> None:
        if self._is_closed.is_set():
            raise DatabaseUnavailableError("the registry is closed: the server is shutting down")
        away_s = time.monotonic() - self._heard_s
        if away_s > self._patience_s:
            raise DatabaseUnavailableError(
                f"the registry's database has not answered for {away_s:.1f} s: nothing was changed; try again later"
            )

    @contextmanager
    def _session_of_writer(self, is_begun: bool = False) -> Iterator[sa.Connection]:
        """With the mutex. is_begun: only the session that has the turn will do. An error of the database ends it."""
        self._used_s = time.monotonic()
        try:
            if self._writer is not None and not is_begun and _has_ended(self._writer):
                self._drop_writer()
            if self._writer is None:
                if is_begun:
                    raise DatabaseUnavailableError("the session with the registry's database has ended; try again")
                self._writer = self._database.connect()
                self._session += 1
            yield self._writer
        except (sa.exc.SQLAlchemyError, _driver_error(), UnicodeError) as error:
            self._drop_writer()
            _log.warning("database %s: a verb failed: %s", self._database.place, reason_of(error))
            if isinstance(error, sa.exc.DataError | UnicodeError):
                raise JournalError(f"the registry's database cannot keep it: {reason_of(error)}") from None
            raise DatabaseUnavailableError(
                f"the registry's database did not take it ({reason_of(error)}); look at the adapter, and try again"
            ) from None
        finally:
            self._used_s = None

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):
                writer.invalidate()
            with suppress(Exception):
                writer.close()

    # --------------------------------------------------------------------------------------------------------- counters

    def count(self, take_usage: Callable[[], Sequence[NameUsage]]) -> None:
        self._take_usage = take_usage

    def _write_counters(self) -> None:
        """With the mutex. They are not worth an error; what could not be written is written with the next."""
        if time.monotonic() - self._heard_s > self._patience_s:
            return
        used = self._take_usage()
        further = [(each, each.num_requests - self._counted.get(each.name, 0)) for each in used]
        counted = [(each.name, more, each.last_used_time) for each, more in further if more > 0]
        if counted:
            with suppress(JournalError), self._session_of_writer() as connection:
                tables.write_counts(connection, counted)
                self._counted.update({each.name: each.num_requests for each in used})

    def close(self) -> None:
        """Write the counters, and let the database go. Called again, it does nothing."""
        if self._is_closed.is_set():
            return
        with self._mutex:
            self._write_counters()
            if time.monotonic() - self._heard_s <= self._patience_s:
                with suppress(JournalError), self._session_of_writer() as connection:
                    tables.leave_servers(connection, self._server)
            self._is_closed.set()
        self._has_news.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2 * self._patience_s)  # one may wait for a database that does not answer
        with self._mutex:
            self._drop_writer()


@contextmanager
def _at_one_moment(connection: sa.Connection) -> Iterator[None]:
    connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    yield
    connection.exec_driver_sql("COMMIT")


def _is_at_least(written: str, known_id: int) -> bool:
    return written.isascii() and written.isdigit() and len(written) < 19 and int(written) >= known_id


def _cut(connection: sa.Connection | None) -> None:
    """From another thread: what waits there for an answer gets an error."""
    with suppress(Exception):
        if connection is not None:
            with socket.socket(fileno=os.dup(_driver_of(connection).fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)


def _has_ended(connection: sa.Connection) -> bool:
    """Of a session that asks nothing: then its other end has something to say only when it ends."""
    try:
        return bool(select.select([_driver_of(connection).fileno()], [], [], 0)[0])
    except Exception:
        return True


def _driver_of(connection: sa.Connection) -> Any:
    """psycopg's connection."""
    return connection.connection.driver_connection


def _driver_error() -> type[Exception]:
    import psycopg

    return cast("type[Exception]", psycopg.Error)
