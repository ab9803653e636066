"""What other servers did, as a shared journal tells it: versions come into the store, then names mean them.

A version whose files are at this server already is known to the store before its name means it. One whose files have to
be fetched is waited for a little; then the name means it all the same, and its requests are refused until it is there.
What a name no longer has drains as after a verb of this server.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.registry.adapter_name import check_adapter_name
from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.records import NameChange, NameRecord, SharedJournal, VersionRecord
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.version import AdapterVersion
from loraplex.errors import AdapterNotFoundError, AdapterUnavailableError, LoraplexError
from loraplex.events import Detail, EventKind
from loraplex.processes.loader_threads import LoaderThreads

_log = logging.getLogger(__name__)

NUM_FETCHERS = 4
"""Of a tenant, and as many again for those that take long."""

RETRY_S, MAX_DOUBLINGS = 5.0, 3
"""After an engine that was starting again, or a fetch that failed: after each further one of these twice as long."""

LOOK_PATIENCE_S = 0.1
"""For whether files are here, while verbs of all servers wait."""

NOT_YET = "adapter %r of another server cannot be served yet: %s"

Locate = Callable[[VersionRecord, bool], str | None]
"""Where the files of a version are at this server; None: they have to be fetched, and may not be now (False). Raises
LoraplexError."""

OnChange = Callable[[EventKind, str, str, Mapping[str, Detail]], None]
"""Called in the verb's thread, under no lock, with the kind, the adapter's name, one sentence, and details."""


def found_where_it_was(record: VersionRecord, may_fetch: bool) -> str:
    """Servers of one machine, or with a shared file system."""
    return record.path


class Following:
    """`apply` is called by one thread at a time, and never while a section of a verb runs at this server."""

    def __init__(
        self,
        store: AdapterStore,
        names: SharedTable,
        drain: Drain,
        locate: Locate,
        run_later: Callable[[Callable[[], None]], object],
        on_change: OnChange,
        base_names: Collection[str],
    ) -> None:
        self._store = store
        self._names = names
        self._drain = drain
        self._locate = locate
        self._run_later = run_later
        self._on_change = on_change
        self._base_names = base_names
        self._fetchers: LoaderThreads  # from `begin` on
        self._lookers: LoaderThreads
        self._found: dict[int, Future[str | None]] = {}  # where files are that were looked for before
        self._coming: set[int] = set()  # not in the table yet
        self._fetching: set[int] = set()
        # by how often its time was doubled, and by id
        self._failed: defaultdict[int, dict[int, tuple[AdapterVersion, VersionRecord]]] = defaultdict(dict)

    def begin(self, changes: Sequence[NameChange], shared: SharedJournal) -> None:
        """Take over what the servers have, and follow them from now on. Threads are started here: later the system may
        have none, and `apply` must not fail."""
        self._fetchers = LoaderThreads(NUM_FETCHERS, max_stuck=NUM_FETCHERS)
        self._lookers = LoaderThreads(NUM_FETCHERS)
        self.apply(changes, is_first=True)
        shared.follow(self.apply, self.expect)

    def expect(self, changes: Sequence[NameChange], patience_s: float) -> None:
        """Before `apply`, while verbs go on: have the files looked for, and fetched; wait so long at most."""
        with self._names.lock:
            fresh = {
                each.adapter_id: (change.name, each)
                for change in changes
                for each in (() if change.record is None else self._kept(change.record))
                if self._names.table.find(each.adapter_id) is None
            }
        found = {number: Future[str | None]() for number in fresh}
        self._found = found.copy()
        for number, (name, record) in fresh.items():
            self._lookers.submit(partial(self._look, name, record, found[number], False, True), _tenant_of(name))
        wait(found.values(), patience_s)

    def _look(
        self, name: str, record: VersionRecord, found: Future[str | None], may_fetch: bool, then_fetch: bool
    ) -> None:
        try:
            path = self._locate(record, may_fetch)
        except Exception as error:
            found.set_exception(error)
            return
        if path is None and then_fetch:
            self._fetchers.submit(partial(self._look, name, record, found, True, False), _tenant_of(name))
        else:
            found.set_result(path)

    def apply(self, changes: Sequence[NameChange], *, is_first: bool = False) -> Collection[str]:
        """Make these names what another server made them. The names whose ids are others' here. is_first: nothing else
        waits, and each file is looked for, however long it takes."""
        changes = [change for change in changes if self._may_have(change)]
        taken = {change.name for change in changes if self._is_taken(change)}
        changes = [NameChange(each.name, None) if each.name in taken else each for each in changes]
        fresh = self._bring(changes, is_first)
        self._lift_pins(changes)
        table = self._names.table
        with self._names.lock:
            before = {change.name: table.current.get(change.name) for change in changes}
            aliases = {change.name: table.aliases.get(change.name) for change in changes}
            for name, record in sorted(((each.name, each.record) for each in changes), key=lambda each: bool(each[1])):
                records = () if record is None else self._kept(record)
                table.follow(name, record, [self._version(name, each, record, fresh) for each in records])
            left = [each for number, each in fresh.items() if not each[0].is_ready and number not in self._fetching]
            self._coming.difference_update(fresh)
        due = [each.name for each in changes if before[each.name] is not None or _is_pinned(each)]
        if due:
            settle = partial(self._settle, due, frozenset(fresh))
            self._start(partial(self._run_later, settle), settle)
        self._fetch_later(left)
        for change in changes:
            self._tell(change, before[change.name], aliases[change.name])
        return taken

    def _start(self, start: Callable[[], object], job: Callable[[], None]) -> None:
        """`start` gives a job a thread of its own. Where the system has none, the job waits for one that fetches."""
        try:
            start()
        except RuntimeError as error:
            _log.warning("no thread for what follows a change of another server: %s", error)
            self._fetchers.submit(job)

    def _may_have(self, change: NameChange) -> bool:
        """A server whose base model has another name in the API may have given this one's to an adapter."""
        try:
            if change.record is not None:
                check_adapter_name(change.name, self._base_names)
        except LoraplexError as error:
            _log.error("adapter %r of another server is not served here: %s", change.name, error)
            return False
        return True

    def _is_taken(self, change: NameChange) -> bool:
        """Requests of an adapter may still run whose id a restored journal gave again: nothing else may mean it."""
        with self._names.lock:
            for record in () if change.record is None else self._kept(change.record):
                found = self._names.table.find(record.adapter_id)
                if found is not None and (found.ref.adapter_name, found.ref.adapter_digest) != (
                    change.name,
                    record.digest,
                ):
                    _log.error("adapter %r of another server has an id that is in use here; load it again", change.name)
                    return True
        return False

    def _kept(self, record: NameRecord) -> tuple[VersionRecord, ...]:
        return record.versions[: self._names.table.max_versions_kept]

    def _version(
        self,
        name: str,
        record: VersionRecord,
        owner: NameRecord | None,
        fresh: dict[int, tuple[AdapterVersion, VersionRecord]],
    ) -> AdapterVersion:
        """The one that is here, or a new one that the store does not know yet. Under the lock."""
        found = self._names.table.find(record.adapter_id)
        assert owner is not None
        if found is None and record.adapter_id not in fresh:
            made = AdapterVersion.from_record(name, record, owner)
            made.is_ready = False
            fresh[record.adapter_id] = made, record
        return found or fresh[record.adapter_id][0]

    # ---------------------------------------------------------------------------------------------- into the store

    def _bring(self, changes: Sequence[NameChange], is_first: bool) -> dict[int, tuple[AdapterVersion, VersionRecord]]:
        """New versions by id. Those that are ready by now say so."""
        fresh: dict[int, tuple[AdapterVersion, VersionRecord]] = {}
        with self._names.lock:
            for change in changes:
                for each in () if change.record is None else self._kept(change.record):
                    self._version(change.name, each, change.record, fresh)
        self._coming.update(fresh)
        looks = {number: self._found.pop(number, None) for number in fresh}
        asked = {number: self._looked_for(*fresh[number], is_first) for number, look in looks.items() if look is None}
        wait(asked.values(), LOOK_PATIENCE_S)
        here = []
        for version, record in fresh.values():
            found = looks[record.adapter_id] or asked[record.adapter_id]
            if not found.done():
                self._fetching.add(version.adapter_id)
                found.add_done_callback(partial(self._come, version, record, 0))
                continue
            try:
                path = found.result()
            except Exception as error:
                _log.warning(NOT_YET, version.ref.adapter_name, error)
                continue
            if path is None:
                self._fetch(version, record)
            else:
                version.spec = replace(version.spec, path=path)
                here.append(version)
        self._attach(here)
        return fresh

    def _looked_for(self, version: AdapterVersion, record: VersionRecord, is_first: bool) -> Future[str | None]:
        """Its result is None for what has to be fetched."""
        found, name = Future[str | None](), version.ref.adapter_name
        look = partial(self._look, name, record, found, False, False)
        if is_first:
            look()
        else:
            self._lookers.submit(look, _tenant_of(name))
        return found

    def _attach(self, versions: Sequence[AdapterVersion]) -> None:
        if not versions:
            return
        try:
            self._store.attach_adapters([version.spec for version in versions])
        except LoraplexError as error:
            _log.info("%d adapters of other servers are not known to the engine yet: %s", len(versions), error)
            return
        for version in versions:
            version.is_ready = True

    def _fetch(self, version: AdapterVersion, record: VersionRecord, num_doublings: int = 0) -> None:
        self._fetching.add(version.adapter_id)
        self._fetchers.submit(partial(self._come, version, record, num_doublings), _tenant_of(version.ref.adapter_name))

    def _come(
        self,
        version: AdapterVersion,
        record: VersionRecord,
        num_doublings: int,
        found: Future[str | None] | None = None,
    ) -> None:
        if found is not None and found.exception() is None and found.result() is None:
            self._fetch(version, record)
            return
        name, table = version.ref.adapter_name, self._names.table
        try:
            path = self._locate(record, True) if found is None else found.result()
            version.spec = replace(version.spec, path=str(path))
            num_doublings = 0  # an engine that starts again is waited for, no source
            self._store.attach_adapters([version.spec])
        except Exception as error:
            _log.warning(NOT_YET, name, error)
            self._fetch_later([(version, record)], num_doublings)
            return
        finally:
            self._fetching.discard(version.adapter_id)
        with self._names.lock:
            version.is_ready = True
            is_gone = version.adapter_id not in self._coming and not table.has(version)
            is_pinned = version.is_pinned and table.current.get(name) is version
        if is_gone:
            self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
        elif is_pinned:
            with suppress(AdapterNotFoundError):
                self._settle_pins(name)

    def _fetch_later(self, left: Iterable[tuple[AdapterVersion, VersionRecord]], num_doublings: int = 0) -> None:
        """One timer for all that failed as often: a store that is away leaves a thousand of them."""
        with self._names.lock:
            failed = self._failed[num_doublings]
            was_idle = not failed
            failed.update({each[0].adapter_id: each for each in left})
            is_due = was_idle and bool(failed)
        if is_due:
            timer = threading.Timer(RETRY_S * 2**num_doublings, self._fetch_again, (num_doublings,))
            timer.daemon = True
            self._start(timer.start, timer.run)

    def _fetch_again(self, num_doublings: int) -> None:
        with self._names.lock:
            failed = self._failed.pop(num_doublings).values()
            left = [each for each in failed if self._names.table.has(each[0]) and not each[0].is_ready]
        for version, record in left:
            self._fetch(version, record, min(num_doublings + 1, MAX_DOUBLINGS))

    # ------------------------------------------------------------------------------------------------- what follows

    def _lift_pins(self, changes: Sequence[NameChange]) -> None:
        """First in the store: a verb that finds no pin in the table may evict."""
        with self._names.lock:
            pinned = [
                each for change in changes for each in self._names.table.versions_of(change.name) if each.is_pinned
            ]
        still = {change.record.versions[0].adapter_id for change in changes if change.record and _is_pinned(change)}
        for version in pinned:
            if version.adapter_id not in still and version.is_ready:
                self._drain.try_quietly(self._store.unpin_adapter, version.adapter_id)

    def _settle(self, names: Sequence[str], fresh: Collection[int]) -> None:
        """Pins as they are registered, and drains of what is idle. fresh: versions that had no pin here."""
        table = self._names.table
        for name in names:
            with suppress(AdapterNotFoundError, AdapterUnavailableError):
                self._settle_pins(name, fresh)
            with self._names.lock:
                versions = {*table.versions_of(name), *table.draining.get(name, ())}
                drains = [each.pending_drain for each in versions if each.pending_drain is not None]
            self._drain.complete(drains)

    def _settle_pins(self, name: str, fresh: Collection[int] = ()) -> None:
        """What is registered may have changed since; verbs of this server wait."""
        table = self._names.table
        with self._names.own_verb_on(name) as current:
            with self._names.lock:
                kept = list(table.kept.get(name, ()))
                is_pinned = current.is_pinned
            for version in (*kept, *(() if is_pinned else (current,))):
                if version.is_ready and version.adapter_id not in fresh:
                    self._drain.try_quietly(self._store.unpin_adapter, version.adapter_id)
            if is_pinned:
                self._pin(current)

    def _pin(self, version: AdapterVersion) -> None:
        name = version.ref.adapter_name
        try:
            self._store.pin_adapter(version.adapter_id)
        except LoraplexError as error:
            _log.error("adapter %r, pinned at another server, cannot be pinned: %s", name, error)
            return
        with self._names.lock:
            is_pinned = version.is_pinned
        if not is_pinned:  # a switch came between
            self._drain.try_quietly(self._store.unpin_adapter, version.adapter_id)

    def _tell(self, change: NameChange, before: AdapterVersion | None, alias_before: str | None) -> None:
        name, record = change.name, change.record
        if record is None and before is not None:
            self._on_change(EventKind.UNLOAD, name, f"adapter {name!r} was unloaded at another server", {})
        elif record is not None and record.alias_of not in (None, alias_before):
            text = f"adapter {name!r} was switched to {record.alias_of!r} at another server"
            self._on_change(EventKind.SWITCH, name, text, {"new": str(record.alias_of)})


def _tenant_of(name: str) -> str:
    """Or another part before a slash."""
    return name.partition("/")[0] if "/" in name else ""


def _is_pinned(change: NameChange) -> bool:
    return change.record is not None and change.record.versions[0].is_pinned
