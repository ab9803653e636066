"""Names, versions and references of adapters: the one place that says which weights answer for which name.

    load     the name resolves to the adapter at a path, or nothing at all has changed         (load.py)
    acquire  the version that answers for a name now, counted until `release`; no verb touches it
    unload   the name resolves to nothing at once; its last release drops it from the store    (drain.py)
    reload   a new version under the name, which inherits the pin; the old one drains
    switch   `new` is promoted, then answers for `old` too, which leaves the device             (switch.py)
    move     a kept version of a name is promoted, then answers again; rollback is the move to what answered before

One lock guards the table of names (name_table.py) and is held for dictionary operations only, so requests never wait
for a verb. Slow verbs on one name run one after the other, waiting on a future; `unload` waits for none and calls a
load under way off. Each verb takes effect in one critical section of the table (shared_table.py): `publish`, `remove`,
`redirect`, `move`, or a pin that is noted. With a journal, what it changed is on disk before the verb returns.

After SGLang's LoRARegistry (stable ids, counts, drain before unload), with versions, digests, threads. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from loraplex.adapter_store import AdapterStore, AddOutcome
from loraplex.adapters.registry.adapter_name import (
    check_adapter_name,
    check_lora_int_id,
    normalize_source,
    split_address,
)
from loraplex.adapters.registry.drain import (
    ABORT_GRACE_S,
    Drain,
    Draining,
    Steps,
    begun,
    check_deadline,
    ended,
    start_thread,
)
from loraplex.adapters.registry.following import Following, Locate, OnChange, found_where_it_was
from loraplex.adapters.registry.integrity import check_integrity
from loraplex.adapters.registry.load import AdapterLoader
from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.records import Journal, NameChange, NameRecord, NameUsage, SharedJournal
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.switch import AdapterSwitch
from loraplex.adapters.registry.verbs import (
    NO_TURN,
    CheckAnswer,
    LoadResult,
    LoadStatus,
    LoadTurn,
    LoadWish,
    OpenReceived,
    SwitchResult,
    UnloadResult,
    any_answer,
)
from loraplex.adapters.registry.version import AdapterVersion, ContentDigests, LoRARef, OpenedAdapter, PendingDrain
from loraplex.adapters.registry.views import AdapterInfo, LoadedName, NameQuery, Views
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterConflictError, AdapterNotFoundError, InvalidRequestError
from loraplex.events import Detail, EventKind

DEFAULT_VERSIONS_KEPT = 2


class LoRARegistry:
    """Thread-safe. `acquire`, `release`, `resolve` and the lists of names may run on an event loop; the verbs block.

    store: the engine's side. It holds nothing of an adapter when `add_adapter` raises.
    open_adapter: fetches and validates a source; raises AdapterError.
    run_later: takes what a drain does off the thread that released the last reference, because the store may block and
    `release` runs on an event loop. `submit` of an executor fits, unless verbs run on it too (they may wait for the
    drain); an engine without threads passes a function that calls the job at once. RuntimeError of it: no thread.
    max_versions_kept: of one name, the current one counted; 1 keeps no earlier one.
    max_lora_rank: above which `open_adapter` refuses, for what makes adapters to load.
    journal: where names outlive the process; None: nowhere. on_change is told of switches, moves and unloads, on_unused
    of a directory that no version has any longer.
    locate: of a shared journal, where the files are that another server loaded; fetches them if need be.
    Errors: AdapterNotFoundError for a name that resolves to nothing, AdapterConflictError for a name or number that is
    another's, InvalidRequestError for arguments that cannot be, and what the store and open_adapter raise.
    """

    def __init__(
        self,
        store: AdapterStore,
        open_adapter: Callable[[str], OpenedAdapter],
        max_loaded_loras: int | None = None,
        base_names: Iterable[str] = (),
        *,
        run_later: Callable[[Callable[[], None]], object] = start_thread,
        clock: Callable[[], float] = time.time,
        abort_grace_s: float = ABORT_GRACE_S,
        max_versions_kept: int = DEFAULT_VERSIONS_KEPT,
        max_lora_rank: int | None = None,
        journal: Journal | SharedJournal | None = None,
        on_change: OnChange = lambda kind, name, text, details: None,
        on_unused: Callable[[str], None] = lambda path: None,
        locate: Locate = found_where_it_was,
    ) -> None:
        self.max_lora_rank = max_lora_rank
        self.max_loaded_loras = max_loaded_loras
        self._store = store
        self._base_names = frozenset(base_names)
        self._run_later = run_later
        self._clock = clock
        self._on_change = on_change
        self._table = NameTable(max_loaded_loras, max_versions_kept)
        self._names = SharedTable(self._table, journal)
        self._lock = self._names.lock
        self._drain = Drain(store, self._names, abort_grace_s, on_unused)
        self._switch = AdapterSwitch(store, self._names, self._drain)
        self._loader = AdapterLoader(store, open_adapter, clock, self._names, self._drain, run_later)
        self._views = Views(store, self._names)
        self._following = Following(store, self._names, self._drain, locate, run_later, on_change, self._base_names)
        self._skipped: dict[str, str] = {}
        if journal is not None:
            journal.count(self.take_usage)

    # ------------------------------------------------------------------------------------------------ for every request

    def acquire(self, name: str) -> LoRARef:
        """Take a reference to the version that answers for `name` (or for `name@N`) now. Release it exactly once."""
        with self._lock:
            version = self._table.answering(name)
            self._names.check_known(version, name)
            self._table.use(version, self._clock())
            return version.ref

    def hold(self, name: str) -> LoRARef:
        """A reference as of `acquire`, for what may not become a request: it is not counted as one."""
        with self._lock:
            version = self._table.answering(name)
            self._names.check_known(version, name)
            version.num_references += 1
            return version.ref

    def spec_of(self, ref: LoRARef) -> AdapterSpec:
        """Where the files are of a version that is loaded. They stay as long as the caller holds it."""
        with self._lock:
            version = self._table.find(ref.adapter_id)
        assert version is not None, f"adapter_id {ref.adapter_id} is not loaded: not held?"
        return version.spec

    def acquire_held(self, ref: LoRARef) -> None:
        """One more reference to a version that the caller holds, whatever its name means by now: for a request."""
        with self._lock:
            self._table.use(self._table.in_use(ref.adapter_id), self._clock())

    def is_forced_out(self, adapter_id: int) -> bool:
        """Whether the adapter of a request that has a reference was unloaded by force since.

        To be asked directly before the request is sent to the engine, which aborts only what it was sent before.
        """
        with self._lock:
            return self._table.in_use(adapter_id).is_forced_out

    def release(self, ref: LoRARef) -> None:
        """Return a reference. The last one of an unloaded, replaced or switched version completes its drain."""
        with self._lock:
            drain = self._table.in_use(ref.adapter_id).release()
        self._drain.complete_later(drain, self._run_later)

    def resolve(self, name: str) -> LoRARef:
        """What answers for `name` (or for `name@N`) now, without a reference."""
        with self._lock:
            return self._table.answering(name).ref

    def names(self) -> tuple[str, ...]:
        """Every name that resolves, aliases too."""
        return tuple(self.refs())

    def refs(self) -> dict[str, LoRARef]:
        """Every name that resolves and what answers for it, at one instant."""
        with self._lock:
            current, aliases = self._table.current.copy(), self._table.aliases.copy()
        answers = {name: current.get(aliases.get(name, name)) for name in current}
        return {name: version.ref for name, version in answers.items() if version is not None}

    def find(self, name: str) -> LoRARef | None:
        """What answers for a name now, of this server or not here yet; None: nothing, or it is `name@N`."""
        with self._lock:
            version = self._table.current.get(self._table.aliases.resolve(name))
            return version.ref if version is not None and name in self._table.current else None

    def registered(self) -> tuple[str, ...]:
        """Every name that something is loaded under, also where what it was switched to is not."""
        with self._lock:
            return tuple(self._table.current)

    def is_registered(self, name: str) -> bool:
        """Whether something is loaded under a name, or under that of `name@N`, whatever answers for it."""
        address = split_address(name)
        with self._lock:
            return name in self._table.current or (address is not None and address[0] in self._table.current)

    def target_of(self, name: str) -> str:
        """What a name was switched to, loaded or not; the name itself where it was not."""
        with self._lock:
            return self._table.aliases.resolve(name)

    def address_of(self, adapter_id: int) -> str | None:
        """What a client writes for a version now: `sql`, or `sql@2` if the bare name means another; None: unknown."""
        with self._lock:
            return self._table.address_of(adapter_id)

    def name_of(self, lora_int_id: int) -> str:
        with self._lock:
            return self._table.name_of(lora_int_id)

    def lora_int_ids(self) -> dict[int, str]:
        with self._lock:
            return self._table.lora_int_ids()

    # -------------------------------------------------------------------------------------------------- load and unload

    def load(
        self,
        name: str,
        path: str,
        *,
        lora_int_id: int | None = None,
        load_inplace: bool = False,
        is_pinned: bool = False,
        origin: str = "",
        keeps_equal: bool = False,
        turn: LoadTurn = NO_TURN,
        check_size: Callable[[int], None] | None = None,
        check_answer: CheckAnswer = any_answer,
        open_adapter: Callable[[], OpenedAdapter] | None = None,
        digests: ContentDigests | None = None,
        alias_of: str | None = None,
    ) -> LoadResult:
        """Make `name` resolve to the adapter at `path` (a directory or a hub id). What is not said here: see LoadWish.

        A name that is loaded from `path` already is a no-op that says so (and pins, if asked, what answers for the
        name). One that is loaded from another path, or has another number, is refused; `load_inplace` replaces it by a
        new version (with `keeps_equal` only if path or content differ, so that saying it twice does not push the
        version before out of what is kept). turn: its place among loads that run side by side."""
        check_adapter_name(name, self._base_names)
        check_lora_int_id(name, lora_int_id)
        path = normalize_source(name, path)
        wish = LoadWish(name, path, lora_int_id, load_inplace, is_pinned, origin, keeps_equal, turn, alias_of=alias_of)
        wish = replace(
            wish, check_size=check_size, check_answer=check_answer, open_adapter=open_adapter, digests=digests
        )
        return self._pinned(wish, self._found_as_wished(wish) or self._loader.load(wish))

    def _pinned(self, wish: LoadWish, result: LoadResult) -> LoadResult:
        if wish.is_pinned and result.status is LoadStatus.ALREADY_LOADED:
            self.pin(wish.name, wish.check_answer)
        if wish.alias_of is not None:
            self._tell(EventKind.SWITCH, wish.name, f"was switched to {wish.alias_of!r}", new=wish.alias_of)
        return result

    def _found_as_wished(self, wish: LoadWish) -> LoadResult | None:
        """A request that brings its adapter asks no database for one that is there."""
        with self._lock:
            if self._names.shared is None or (found := self._table.found_as_wished(wish)) is None:
                return None
            self._names.check_known(found, wish.name)
            return LoadResult(LoadStatus.ALREADY_LOADED, found.ref)

    def give_number(self, name: str, lora_int_id: int | None) -> LoadResult:
        """Of what is loaded under `name` itself, if it has none; opens no file. Raises AdapterConflictError."""
        return self._loader.give_number(name, lora_int_id)

    def clone(
        self,
        name: str,
        new_name: str,
        *,
        lora_int_id: int | None = None,
        is_pinned: bool = False,
        check_size: Callable[[int], None] | None = None,
        check_answer: CheckAnswer = any_answer,
        check_source: CheckAnswer = any_answer,
    ) -> LoadResult:
        """Make `new_name` resolve to what answers for `name` (or for `name@N`) now, under an id of its own.

        No file is read while the weights are in memory: names of one digest share them, on every tier, and its KV. From
        then on each is reloaded, pinned and unloaded by itself. A name with this content is a no-op that says so; one
        with another is refused (AdapterConflictError). check_source: is told the adapter that answers for `name`."""
        check_adapter_name(new_name, self._base_names)
        check_lora_int_id(new_name, lora_int_id)
        ref = self.hold(name)
        try:
            check_source(ref.adapter_name)
            spec = self.spec_of(ref)
            content = OpenedAdapter(spec.path, spec.adapter_digest, spec.nbytes, spec.max_rank, ref.text)
            self._check_content(new_name, name, spec.adapter_digest)
            wish = LoadWish(new_name, ref.lora_path, lora_int_id, False, is_pinned, "", False, NO_TURN, content)
            wish = replace(wish, check_size=check_size, check_answer=check_answer)
            result = self._loader.load(wish)
        finally:
            self.release(ref)
        self._check_content(new_name, name, spec.adapter_digest)
        return self._pinned(wish, result)

    def receive(
        self,
        name: str,
        source: str,
        received: OpenReceived,
        *,
        is_pinned: bool = False,
        check_size: Callable[[int], None] | None = None,
        check_answer: CheckAnswer = any_answer,
    ) -> LoadResult:
        """Make `name` resolve to what a client sent: a new version, or the first one. What has the content of the
        version that is loaded is no new version, which the result says. source: stands for it in lists. received: opens
        it; what it raises refuses the load."""
        check_adapter_name(name, self._base_names)
        wish = LoadWish(name, source, None, True, is_pinned, "", True, NO_TURN, None, received, check_size)
        wish = replace(wish, check_answer=check_answer)
        return self._pinned(wish, self._loader.load(wish))

    @property
    def is_shared(self) -> bool:
        """Whether several servers have these names."""
        return self._names.shared is not None

    def _check_content(self, new_name: str, name: str, digest: str) -> None:
        found = self.find(new_name)
        if found is not None and found.adapter_digest != digest:
            text = f"adapter {new_name!r} is loaded already, with another content than {name!r}; choose another name"
            raise AdapterConflictError(text, param="name")

    def source_of(self, name: str) -> str:
        """Where what is loaded under `name` itself came from, as its owner named it."""
        with self._lock:
            return self._table.own(name).ref.lora_path

    def check_new_name(self, name: str) -> None:
        """Raises AdapterConflictError for a name that is loaded, or is the base model's, and InvalidRequestError."""
        check_adapter_name(name, self._base_names)
        if self.find(name) is not None:
            raise AdapterConflictError(f"adapter {name!r} is loaded already; choose another name", param="name")

    def skip(self, name: str, reason: str) -> None:
        """An adapter that was to be there from the start is not, and the server starts without it."""
        with self._lock:
            self._skipped[name] = reason

    @property
    def skipped(self) -> dict[str, str]:
        """Name to reason of those that `skip` was told of and that were not loaded since."""
        with self._lock:
            return {name: reason for name, reason in self._skipped.items() if name not in self._table.current}

    @begun
    def begin_unload(self, name: str, deadline_s: float | None = None, force: bool = False) -> Steps[UnloadResult]:
        """The name resolves to nothing at once. Requests on any version of it finish, then every tier is freed.

        deadline_s: how long this call waits for them; by default it does not wait, and the drain goes on by itself.
        force: those that still run then are aborted. A load of the name that is under way is called off.
        """
        check_deadline(deadline_s)
        drains: tuple[PendingDrain, ...] = ()
        try:
            with self._names.change() as table:
                version = table.remove(name)
                drains = table.pending_drains(name)
        except AdapterNotFoundError:
            self._names.settle()  # it may have been unloaded by a call that was told that this is not on disk
            raise
        finally:
            num_aborted = yield from self._drain.finish(drains, deadline_s, force)
        self._tell(EventKind.UNLOAD, name, "was unloaded", num_aborted=num_aborted)
        num_left = sum(drain.version.num_references for drain in drains)
        ref, is_drained = None if version is None else version.ref, all(drain.done.done() for drain in drains)
        return UnloadResult(name, ref, is_drained, num_left, num_aborted)

    unload = ended(begin_unload)

    def unload_idle(self, name: str, origin: str, used_before: float) -> bool:
        """Unload a name that has an origin which begins so, if that takes nothing from anything now, and nothing used
        it since `used_before`. Whether it did."""
        drains: tuple[PendingDrain, ...] = ()
        try:
            with self._names.change() as table:
                if not self._views.is_idle(name, origin, used_before):
                    return False
                table.remove(name)
                drains = table.pending_drains(name)
        finally:
            Draining(self._drain.finish(drains, None, False)).finish()
        self._tell(EventKind.UNLOAD, name, "was unloaded", num_aborted=0)
        return True

    # ----------------------------------------------------------------------------------------------------------- switch

    @begun
    def begin_switch(
        self,
        old: str,
        new: str,
        new_path: str | None = None,
        deadline_s: float | None = None,
        force: bool = False,
        *,
        lora_int_id: int | None = None,
        load_inplace: bool = False,
        check_size: Callable[[int], None] | None = None,
    ) -> Steps[SwitchResult]:
        """Load `new` if it is unknown, promote it, then let it answer for `old` too, which leaves the device after its
        last request.

        An idle `old` is evicted first when there is no room beside it. From then on `old` is an alias
        (`describe(old).alias_of == new`) that keeps its own version loaded, so that `switch(new, old)` is as quick. An
        `old` that is not loaded is no error and becomes no alias. Unloading the alias frees its name and weights; a
        reload in place makes it answer for itself again. deadline_s and force as in `unload`; lora_int_id,
        load_inplace and check_size as in `load`, when `new_path` is given.
        """
        check_deadline(deadline_s)
        check_adapter_name(old, self._base_names, param="old")
        if old == new:
            raise InvalidRequestError(f"adapter {old!r} cannot be switched to itself; give two names", param="new")
        loaded = None
        if new_path is not None:
            loaded = self.load(new, new_path, lora_int_id=lora_int_id, load_inplace=load_inplace, check_size=check_size)
        result = yield from self._switch.switch(old, new, deadline_s, force)
        if result.is_old_loaded:
            self._tell(EventKind.SWITCH, old, f"was switched to {new!r}", new=new, promote_s=result.promote_s)
        if loaded is None:
            return result
        return replace(result, load_s=loaded.load_s, evicted=(*loaded.evicted, *result.evicted))

    switch = ended(begin_switch)

    def move(
        self,
        name: str,
        version: int | None = None,
        may_answer: Callable[[str], bool] = lambda name: True,
        check_answer: CheckAnswer = any_answer,
    ) -> LoadResult:
        """Let a kept version of `name` answer for it again: rollback, by default to what answered before what does now.

        That may be its own version before a switch, or what it was switched to; what answered until now is remembered
        instead. Passes over what the caller may not let answer. A version inherits the pin. Raises AdapterNotFoundError
        for a version that is not kept, what check_answer raises, and what promoting raises: no other one answers then.
        """
        result = self._switch.move(name, version, may_answer, check_answer)
        ref, number = result.ref, result.ref.adapter_version
        if result.status is LoadStatus.MOVED and ref.adapter_name == name:
            self._tell(EventKind.SWITCH, name, f"was moved to its version {number}", version=number)
        elif result.status is LoadStatus.MOVED:
            self._tell(EventKind.SWITCH, name, f"was switched back to {ref.adapter_name!r}", new=ref.adapter_name)
        return result

    def _tell(self, kind: EventKind, name: str, text: str, **details: Detail) -> None:
        self._on_change(kind, name, f"adapter {name!r} {text}", details)

    # ----------------------------------------------------------------------------- residency of what answers for a name

    def pin(self, name: str, check_answer: CheckAnswer = any_answer) -> bool:
        """Promote, and exempt from eviction until it is unpinned, evicted or unloaded. Whether something changed."""
        with self._verb_on(name, check_answer) as (version, is_current):
            if not is_current:
                text = f"{name!r} is not the version that answers for {version.ref.adapter_name!r}, and only that is"
                raise InvalidRequestError(f"{text} pinned; move the name to it first, or preload it")
            return self._drain.set_pin(version, True)

    def check_pins(self, tenant: str, name: str) -> None:
        """Before a tenant pins `name`, which may not be there yet. Raises AdapterNoRoomError beyond its share."""
        self._store.check_pins(tenant, getattr(self.find(name), "adapter_id", None))

    def unpin(self, name: str, check_answer: CheckAnswer = any_answer) -> bool:
        with self._verb_on(name, check_answer) as (version, is_current):
            return is_current and self._drain.set_pin(version, False)  # else it has no pin

    def evict(self, name: str, check_answer: CheckAnswer = any_answer) -> bool:
        """One tier down, which lifts a pin; the name still resolves. Whether something changed. `name@N` too."""
        with self._verb_on(name, check_answer) as (version, _):
            return self._drain.evict(version)

    @contextmanager
    def _verb_on(self, name: str, check_answer: CheckAnswer) -> Iterator[tuple[AdapterVersion, bool]]:
        """The version that answers for `name` (or for `name@N`), and whether it is current. No other verb runs."""
        with self._names.verb_on(self.resolve(name).adapter_name) as current:
            with self._lock:
                version = current if name in self._table.current else self._table.answering(name)
            check_answer(version.ref.adapter_name)
            yield version, version is current

    def preload(self, name: str, check_answer: CheckAnswer = any_answer) -> AddOutcome:
        """Promote now rather than with the first request; `name@N` too."""
        ref = self.resolve(name)
        check_answer(ref.adapter_name)
        return self._store.promote_adapter(ref.adapter_id)

    # ------------------------------------------------------------------------------------------------------------ views

    def describe(self, name: str) -> AdapterInfo:
        """What is loaded under `name` itself, and the name that answers for it; of `name@N` that version."""
        return self._views.describe(name)

    def list_adapters(self) -> list[AdapterInfo]:
        return list(self._views.infos(NameQuery()))

    def infos(self, query: NameQuery) -> Iterator[AdapterInfo]:
        """Of the names that `query` means, looked up as they are asked for."""
        return self._views.infos(query)

    @property
    def num_references(self) -> int:
        """Of all versions together: zero when no request runs on an adapter."""
        with self._lock:
            return sum(version.num_references for version in self._table.versions())

    def specs(self) -> tuple[AdapterSpec, ...]:
        """What the store holds when no verb runs: current and kept versions, and old ones with requests."""
        with self._lock:
            versions = self._table.versions()  # a copy: requests take the lock
        return tuple(version.spec for version in versions)

    def loaded_from(self, origin: str) -> list[LoadedName]:
        """Names whose current version has an origin that begins so, the least recently used first."""
        return self._views.loaded_from(origin)

    def num_from(self, origin: str) -> int:
        return self._views.num_from(origin)

    def nbytes_with(self, name: str, nbytes: int, prefix: str, size_of: Callable[[AdapterSpec], int]) -> int:
        """Bytes (`size_of`) of all versions of names that begin so, were one of `nbytes` loaded as `name` now."""
        return self._views.nbytes_with(name, nbytes, prefix, size_of)

    def take_usage(self) -> list[NameUsage]:
        """The counters of names that changed since the last call: for the journal."""
        with self._lock:
            return self._table.take_usage()

    def check_integrity(self) -> None:
        """Raises AssertionError when names, numbers, versions and references do not fit together."""
        with self._lock:
            check_integrity(self._table)

    # ---------------------------------------------------------------------------------------------------------- restart

    def resume(self, records: Mapping[str, NameRecord], last_adapter_id: int) -> None:
        """Take over what a journal has, before anything is loaded: the names resolve from now on, and no file is read.

        Weights are loaded by need; those of pinned adapters now, by `run_later`. Raises AdapterConflictError for a name
        that selects the base model, which may have been called otherwise when the journal was written.
        """
        for name in records:
            check_adapter_name(name, self._base_names)
        if self._names.shared is not None:
            self._following.begin([NameChange(name, record) for name, record in records.items()], self._names.shared)
            return
        with self._lock:
            assert not self._table.versions(), "resume comes before everything else"
            for name, record in records.items():
                self._table.restore(name, record)
            self._loader.next_adapter_id = last_adapter_id + 1
        self._loader.attach()

    def restore(self) -> None:
        """Make all that is registered known to a store that started empty again, as `resume` does."""
        self._loader.attach()


class HeldAdapters:
    """The versions of a request that is still being read: one that encodes a prompt with its tokenizer also answers it,
    whatever is reloaded, switched or unloaded between the two.

    `refs` are held until each of `num_prompts` prompts took them, or this is closed; () for the base model.
    registry: None only without refs. text: what reads and writes their requests, once that was made.
    """

    def __init__(
        self, registry: LoRARegistry | None = None, refs: tuple[LoRARef, ...] = (), num_prompts: int = 1
    ) -> None:
        self._registry = registry
        self._num_left = num_prompts
        self.refs = refs
        self.text: object = None

    def take(self) -> tuple[LoRARef, ...]:
        """References of one prompt, as `acquire` gives them: the caller releases them."""
        assert self._num_left > 0, "what is not held may be gone"
        for ref in self.refs:
            assert self._registry is not None
            self._registry.acquire_held(ref)
        if self._num_left == 1:
            self.close()
        else:
            self._num_left -= 1
        return self.refs

    def close(self) -> None:
        num_left, self._num_left = self._num_left, 0
        for ref in self.refs if num_left else ():
            assert self._registry is not None
            self._registry.release(ref)
