"""Names, versions and references of adapters: the one place that says which weights answer for which name.

    load     the name resolves to the adapter at a path, or nothing at all has changed         (load.py)
    acquire  the version that answers for a name now, counted until `release`; no verb touches it
    unload   the name resolves to nothing at once; its last release drops it from the store    (drain.py)
    reload   a new version under the name, which inherits the pin; the old one drains
    switch   `new` is promoted, then answers for `old` too, which leaves the device             (switch.py)

One lock guards the table of names (name_table.py) and is held for dictionary operations only, so requests never wait for a verb.
Slow verbs on one name run one after the other, waiting on a future; `unload` waits for none and calls a load under way off. Each
verb takes effect in one critical section of the table: `publish`, `remove` or `redirect`.

After SGLang's LoRARegistry (stable ids, counts, drain before unload), with versions, content digests and threads. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from loraplex.adapters.registry.adapter_name import check_adapter_name, check_lora_int_id, normalize_source
from loraplex.adapters.registry.drain import Drain, check_deadline
from loraplex.adapters.registry.load import AdapterLoader
from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.outcome import AdapterInfo, LoadResult, LoadStatus, SwitchResult, UnloadResult
from loraplex.adapters.registry.switch import AdapterSwitch
from loraplex.adapters.registry.turns import Turns
from loraplex.adapters.registry.verb import LoadWish
from loraplex.adapters.registry.version import AdapterVersion, LoRARef, OpenedAdapter
from loraplex.core import AdapterResidency, AdapterSpec, AdapterStore, AddOutcome, Tier
from loraplex.errors import AdapterUnavailableError, InvalidRequestError, LoraplexError

ABORT_GRACE_S = 5.0


def start_thread(job: Callable[[], None]) -> None:
    """Run `job` beside the caller. Farewells are rare (one per unload, reload or switch), so no thread is kept for them."""
    threading.Thread(target=job, name="loraplex-farewell", daemon=True).start()


class LoRARegistry:
    """Thread-safe. `acquire`, `release`, `resolve` and the lists of names may be called on an event loop; the verbs block.

    store: the engine's side. It holds nothing of an adapter when `add_adapter` raises.
    open_adapter: fetches and validates a source; raises AdapterError.
    run_later: takes a farewell off the thread that released the last reference, because the store may block and `release` runs on an
    event loop. `submit` of an executor fits, unless verbs run on it too (they may wait for the farewell); an engine without threads
    passes a function that calls the job at once. It must not raise.
    Errors: AdapterNotFoundError for a name that resolves to nothing, AdapterConflictError for a name or number that is another's,
    InvalidRequestError for arguments that cannot be, and what the store and open_adapter raise.
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
    ) -> None:
        self._store = store
        self._base_names = frozenset(base_names)
        self._run_later = run_later
        self._clock = clock
        self._lock = threading.Lock()
        self._table = NameTable(max_loaded_loras)
        self._drain = Drain(store, self._lock, self._table, abort_grace_s)
        self._turns = Turns(self._lock, self._table)
        self._switch = AdapterSwitch(store, self._lock, self._table, self._drain, self._turns)
        self._loader = AdapterLoader(store, open_adapter, clock, self._lock, self._table, self._drain)

    # ---------------------------------------------------------------------------------------------------- for every request

    def acquire(self, name: str) -> LoRARef:
        """Take a reference to the version that answers for `name` now. Release it exactly once."""
        with self._lock:
            version = self._table.answering(name)
            if version.error is not None:
                raise AdapterUnavailableError(
                    f"adapter {name!r} was lost when the engine started again ({version.error}); load it again"
                )
            version.num_references += 1
            version.last_used_time = self._clock()
            return version.ref

    def release(self, ref: LoRARef) -> None:
        """Return a reference. The last one of an unloaded, replaced or switched version sets its farewell going."""
        with self._lock:
            version = self._table.in_use(ref.adapter_id)
            version.num_references -= 1
            parting = None if version.num_references else version.parting
        if parting is not None:
            self._run_later(partial(self._drain.part, parting))

    def resolve(self, name: str) -> LoRARef:
        """What answers for `name` now, without a reference."""
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

    def name_of(self, lora_int_id: int) -> str:
        with self._lock:
            return self._table.name_of(lora_int_id)

    def lora_int_ids(self) -> dict[int, str]:
        with self._lock:
            return self._table.lora_int_ids()

    # ------------------------------------------------------------------------------------------------------ load and unload

    def load(
        self,
        name: str,
        path: str,
        *,
        lora_int_id: int | None = None,
        load_inplace: bool = False,
        is_pinned: bool = False,
        origin: str = "",
    ) -> LoadResult:
        """Make `name` resolve to the adapter at `path` (a directory or a hub id).

        A name that is loaded from `path` already is a no-op that says so (and pins, if asked, what answers for the name). One that is
        loaded from another path, or has another number, is refused; `load_inplace` replaces it by a new version.
        """
        check_adapter_name(name, self._base_names)
        check_lora_int_id(name, lora_int_id)
        path = normalize_source(name, path)
        result = self._loader.load(LoadWish(name, path, lora_int_id, load_inplace, is_pinned, origin))
        if is_pinned and result.status is LoadStatus.ALREADY_LOADED:
            self.pin(name)
        return result

    def unload(self, name: str, *, deadline_s: float | None = None, force: bool = False) -> UnloadResult:
        """The name resolves to nothing at once. Requests that run on any version of it finish, then every tier is freed.

        deadline_s: how long this call waits for them; by default it does not wait, and the drain goes on by itself.
        force: those that still run then are aborted. A load of the name that is under way is called off.
        """
        check_deadline(deadline_s)
        with self._lock:
            version = self._table.remove(name)
            partings = self._table.partings(name)
        num_aborted = self._drain.finish(partings, deadline_s, force)
        return UnloadResult(
            adapter_name=name,
            ref=None if version is None else version.ref,
            is_drained=all(parting.done.done() for parting in partings),
            num_references=sum(parting.version.num_references for parting in partings),
            num_aborted=num_aborted,
        )

    # ---------------------------------------------------------------------------------------------------------------- switch

    def switch(
        self, old: str, new: str, *, new_path: str | None = None, deadline_s: float | None = None, force: bool = False
    ) -> SwitchResult:
        """Load `new` if it is unknown, promote it, then let it answer for `old` too; `old` leaves the device after its last request.

        An idle `old` makes room first when there is none beside it. From then on `old` is an alias (`describe(old).alias_of == new`)
        that keeps its own version loaded, so that `switch(new, old)` is as quick. An `old` that is not loaded is no error and becomes no
        alias. Unloading the alias frees its name and weights; a reload in place makes it answer for itself again. deadline_s and force
        as in `unload`.
        """
        check_deadline(deadline_s)
        check_adapter_name(old, self._base_names)
        if old == new:
            raise InvalidRequestError(f"adapter {old!r} cannot be switched to itself; give two names")
        loaded = None if new_path is None else self.load(new, new_path)
        result = self._switch.switch(old, new, deadline_s, force)
        if loaded is None:
            return result
        return replace(result, load_s=loaded.load_s, evicted=(*loaded.evicted, *result.evicted))

    # --------------------------------------------------------------------------------- residency of what answers for a name

    def pin(self, name: str) -> bool:
        """Promote, and exempt from eviction until it is unpinned, evicted or unloaded. Whether something changed."""
        with self._turns.verb_on(self.resolve(name).adapter_name) as version:
            has_changed = self._store.pin_adapter(version.adapter_id)
            version.is_pinned = True
            return has_changed

    def unpin(self, name: str) -> bool:
        with self._turns.verb_on(self.resolve(name).adapter_name) as version:
            has_changed = self._store.unpin_adapter(version.adapter_id)
            version.is_pinned = False
            return has_changed

    def evict(self, name: str) -> bool:
        """One tier down, which lifts a pin; the name still resolves. Whether something changed."""
        with self._turns.verb_on(self.resolve(name).adapter_name) as version:
            return self._drain.evict(version)

    def preload(self, name: str) -> AddOutcome:
        """Promote now rather than with the first request."""
        return self._store.promote_adapter(self.resolve(name).adapter_id)

    # ----------------------------------------------------------------------------------------------------------------- views

    def describe(self, name: str) -> AdapterInfo:
        """What is loaded under `name` itself, and who answers for it."""
        with self._lock:
            version = self._table.own(name)
        return self._describe([version])[0]

    def list_adapters(self) -> list[AdapterInfo]:
        with self._lock:
            versions = list(self._table.current.values())
        return self._describe(versions)

    def _describe(self, versions: Sequence[AdapterVersion]) -> list[AdapterInfo]:
        residency = {each.adapter_id: each for each in self._store.list_adapters()}
        with self._lock:
            alias_of, aliases = dict(self._table.aliases), self._table.aliases_of()
            num_draining = {name: len(old) for name, old in self._table.draining.items()}
        infos = []
        for version in versions:
            name, where = version.ref.adapter_name, residency.get(version.adapter_id)
            infos.append(_info(version, where, alias_of.get(name), aliases.get(name, ()), num_draining.get(name, 0)))
        return infos

    @property
    def num_references(self) -> int:
        """Of all versions together: zero when no request runs on an adapter."""
        with self._lock:
            versions = self._table.versions()
        return sum(version.num_references for version in versions)

    def specs(self) -> tuple[AdapterSpec, ...]:
        """What the store holds when no verb runs: current versions, and old ones that requests still run on."""
        with self._lock:
            versions = self._table.versions()
        return tuple(version.spec for version in versions)

    def check_integrity(self) -> None:
        """Raises AssertionError when names, numbers, versions and references do not fit together."""
        with self._lock:
            self._table.check_integrity()

    # --------------------------------------------------------------------------------------------------------------- restart

    def restore(self) -> dict[str, LoraplexError]:
        """Add every current version to a store that started empty again, with its pin; returns what failed, by name.

        Requests for a name whose version could not be added are refused with the reason, until it is loaded again.
        """
        with self._lock:
            versions = list(self._table.current.values())
        failed = {version.ref.adapter_name: self._restore(version) for version in versions}
        return {name: error for name, error in failed.items() if error is not None}

    def _restore(self, version: AdapterVersion) -> LoraplexError | None:
        version.error = None
        try:
            self._store.add_adapter(version.spec)
        except LoraplexError as error:
            version.error = error
            return error
        with self._lock:
            is_gone = not self._table.has(version)
        if is_gone:  # a verb that began before the engine died has retired it, and may have found nothing to drop
            self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
            return None
        try:
            if version.is_pinned:
                self._store.pin_adapter(version.adapter_id)
        except LoraplexError as error:
            version.is_pinned = False
            return error
        return None


def _info(
    version: AdapterVersion,
    where: AdapterResidency | None,
    alias_of: str | None,
    aliases: tuple[str, ...],
    num_draining: int,
) -> AdapterInfo:
    """`where` is None for a version that the store has not, or no longer."""
    error = version.error if version.error is not None else where.error if where is not None else None
    return AdapterInfo(
        ref=version.ref,
        origin=version.origin,
        alias_of=alias_of,
        aliases=aliases,
        tier=Tier.SOURCE if where is None else where.tier,
        nbytes=version.spec.nbytes if where is None else where.nbytes,
        lora_slot=None if where is None else where.lora_slot,
        is_pinned=version.is_pinned,
        is_loading=where is not None and where.is_loading,
        num_references=version.num_references,
        num_draining=num_draining,
        loaded_time=version.loaded_time,
        last_used_time=version.last_used_time,
        error=None if error is None else str(error),
    )
