"""How versions come into the store: a source that is loaded, and what is registered when the store started empty.

load     source -> open (fetch, validate, digest) -> store.add -> pin, if wished or inherited -> publish; or no change
attach   what is registered -> store.attach, which reads nothing -> promote the pinned adapters, one after the other
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.registry.adapter_name import check_lora_int_id
from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.name_table import NameTable
from loraplex.adapters.registry.shared_table import SharedTable
from loraplex.adapters.registry.verbs import LoadResult, LoadStatus, LoadWish, Verb
from loraplex.adapters.registry.version import AdapterVersion, LoRARef, OpenedAdapter, PendingDrain
from loraplex.core import AdapterId, AdapterSpec
from loraplex.errors import AdapterNotFoundError, EngineError, InvalidRequestError, LoraplexError

_log = logging.getLogger(__name__)


class AdapterLoader:
    """Files are read and the store is called under no lock. `next_adapter_id` is never one that was used.

    run_later: where `attach` promotes the pinned adapters, while requests are served already.
    """

    def __init__(
        self,
        store: AdapterStore,
        open_adapter: Callable[[str], OpenedAdapter],
        clock: Callable[[], float],
        names: SharedTable,
        drain: Drain,
        run_later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store = store
        self._open_adapter = open_adapter
        self._clock = clock
        self._names = names
        self._drain = drain
        self._run_later = run_later
        self.next_adapter_id = 1

    def load(self, wish: LoadWish) -> LoadResult:
        """Equal loads at the same time are one load with one outcome, good or bad; a load waits for other verbs.

        A reload does not share the outcome of a load that began before it was asked: the files may have changed since.
        """
        with self._names.alone_on(wish.name):
            return self._load_in_turn(wish)

    def give_number(self, name: str, lora_int_id: int | None) -> LoadResult:
        """As LoRARegistry.give_number. A name that is unloaded meanwhile is not found: nothing is loaded by this."""
        check_lora_int_id(name, lora_int_id)
        with self._names.alone_on(name), self._names.change() as table:
            answering = table.loaded(LoadWish(name, table.own(name).ref.lora_path, lora_int_id))
        assert answering is not None, "what is loaded from this path answers"
        self._names.settle()
        return LoadResult(LoadStatus.ALREADY_LOADED, answering.ref)

    def _load_in_turn(self, wish: LoadWish) -> LoadResult:
        may_share = not wish.load_inplace
        while True:
            with self._names.change() as table:
                version = table.loaded(wish)
                running = table.verbs.get(wish.name)
                if version is None and running is None:
                    verb = table.begin_load(wish)
                    break
            if version is not None:
                self._names.settle()
                return LoadResult(LoadStatus.ALREADY_LOADED, version.ref)
            assert running is not None
            wait((running.done,))
            if may_share and running.has_outcome_of(wish):
                result = running.done.result()
                if result is not None and wish.load_inplace:
                    return result
            may_share = True
        return self._run(wish, verb)

    def _run(self, wish: LoadWish, verb: Verb) -> LoadResult:
        try:
            result = self._load(wish, verb)
        except BaseException as error:
            self._names.call_off(verb)
            verb.done.set_exception(error)
            raise
        verb.done.set_result(result)
        return result

    def _load(self, wish: LoadWish, verb: Verb) -> LoadResult:
        began_s = time.monotonic()
        opened = self._opened(wish)
        if wish.digests is not None:
            wish.digests.check(opened, wish.path)
        shared, taken = self._names.shared, None
        if shared is None:
            wish.turn.wait_for_id()
        else:  # a load that waits keeps its name from other servers, whose lists may have another order
            taken = shared.take_adapter_id()
        drains: tuple[PendingDrain, ...] | None = None
        with self._names.change() as table:
            previous, target = table.current.get(wish.name), _target(table, wish)
            is_kept = wish.keeps_equal and previous is not None and _is_equal(previous, wish, opened)
            if is_kept:
                version = table.keep(verb)
                drains = () if target is None else table.redirect(wish.name, target)
            else:
                version = self._new_version(wish, opened, previous, taken)
        if is_kept:
            self._drain.complete(drains or ())
            return LoadResult(LoadStatus.ALREADY_LOADED, (target or version).ref)
        wish.turn.took_id()
        if wish.check_size is not None:
            wish.check_size(opened.nbytes)
        is_needed = wish.open_adapter is not None
        evicted = () if is_needed else self._store.add_adapter(version.spec).evicted
        try:
            if is_needed:  # its request loads it, whose step begins with the first layers
                self._store.attach_adapters([version.spec])
            self._pin(version, previous)
            if shared is None:
                wish.turn.wait_for_name()
            with self._names.change() as table:
                target = _target(table, wish)
                version.last_used_time = self._clock()
                drains = table.publish(version, verb)
                if target is not None:
                    drains += table.redirect(wish.name, target)
        except BaseException:
            if drains is None:
                if self._names.shared is not None:  # else nothing but an unload keeps a load from its name
                    self._drain.give_pin_back(previous, version)
                self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
            raise
        finally:
            self._drain.complete(drains or ())
        loaded = LoadStatus.LOADED_WITH_EVICTION if evicted else LoadStatus.LOADED
        status = loaded if previous is None else LoadStatus.RELOADED
        number = None if previous is None else previous.number
        return LoadResult(status, (target or version).ref, evicted, time.monotonic() - began_s, number)

    def _opened(self, wish: LoadWish) -> OpenedAdapter:
        if wish.open_adapter is not None:
            return wish.open_adapter()
        if wish.received is None:
            return wish.content or self._open_adapter(wish.path)
        with self._names.lock:
            previous = self._names.table.current.get(wish.name)
            loaded = (None, None) if previous is None else (previous.ref, previous.spec)
        return wish.received(*loaded)

    def _new_version(
        self, wish: LoadWish, opened: OpenedAdapter, previous: AdapterVersion | None, taken: int | None
    ) -> AdapterVersion:
        """taken: the id that a shared journal gave."""
        adapter_id = AdapterId(self.next_adapter_id if taken is None else taken)
        self.next_adapter_id = adapter_id + 1
        number = self._names.table.next_version(wish.name)
        digest, max_rank = opened.adapter_digest, opened.max_rank
        now = self._clock()
        ref = LoRARef(adapter_id, wish.name, number, digest, wish.lora_int_id, max_rank, wish.path, opened.text)
        return AdapterVersion(
            ref=replace(ref, loaded_time=now),
            spec=AdapterSpec(adapter_id, wish.name, number, digest, opened.path, opened.nbytes, max_rank),
            origin=wish.origin,
            is_pinned=wish.is_pinned or (previous is not None and previous.is_pinned),
            loaded_time=now,
            last_used_time=now,
        )

    def _pin(self, version: AdapterVersion, previous: AdapterVersion | None) -> None:
        """Pin a version before it is published."""
        if not version.is_pinned:
            return
        if previous is not None and previous.is_pinned:
            self._drain.pass_pin_on(previous, version)
        else:
            self._store.pin_adapter(version.adapter_id)

    # ------------------------------------------------------------------------------------- a store that started empty

    def attach(self) -> None:
        """Make all that is registered known to a store that started empty.

        Versions that drain are left out: their requests ended with the engine that they ran in.
        """
        table = self._names.table
        with self._names.lock:
            current = list(table.current.values())
            versions = [*current, *(version for kept in table.kept.values() for version in kept)]
        self._store.attach_adapters([version.spec for version in versions])
        with self._names.lock:
            dropped = [version for version in versions if not table.has(version)]
        for version in dropped:  # a verb that began before the engine died may have found nothing to drop
            self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
        pinned = [version.ref.adapter_name for version in current if version.is_pinned]
        if pinned:
            self._run_later(lambda: self._pin_again(pinned))

    def _pin_again(self, names: list[str]) -> None:
        for name in names:
            try:
                self._pin_one_again(name)
            except (AdapterNotFoundError, EngineError) as error:  # unloaded meanwhile; or the engine starts again
                _log.info("adapter %r is not pinned now: %s", name, error)
            except LoraplexError as error:
                _log.error("adapter %r could not be pinned again: %s", name, error)

    def _pin_one_again(self, name: str) -> None:
        """When the adapter cannot be pinned, it is no longer registered as pinned either."""
        is_shared = self._names.shared is not None
        with self._names.own_verb_on(name) if is_shared else self._names.verb_on(name) as version:
            if not version.is_pinned:
                return
            try:
                self._store.pin_adapter(version.adapter_id)
            except EngineError:
                raise
            except LoraplexError:
                if not is_shared:  # other servers may have it pinned
                    self._drain.note_pin(version, False)
                raise


def _is_equal(version: AdapterVersion, wish: LoadWish, opened: OpenedAdapter) -> bool:
    ref = version.ref
    is_same_source = (ref.lora_path, version.spec.path) == (wish.path, opened.path)
    if wish.received is not None:  # what was sent again mends a version whose files are lost
        is_same_source = os.path.isdir(version.spec.path)
    return is_same_source and (ref.adapter_digest, ref.text) == (opened.adapter_digest, opened.text)


def _target(table: NameTable, wish: LoadWish) -> AdapterVersion | None:
    """What is to answer instead of what is loaded. Raises what refuses a switch to it."""
    if wish.alias_of is None:
        return None
    if wish.alias_of == wish.name:
        raise InvalidRequestError(f"adapter {wish.name!r} cannot answer for itself as another", param="alias_of")
    table.aliases.check_room(wish.name, wish.alias_of)
    target = table.own(wish.alias_of)
    target.check_ready()
    return target
