"""Loading: a source becomes a version that a name resolves to, or nothing at all has changed.

source -> open (fetch, validate, digest) -> store.add -> pin, if wished or inherited -> publish
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress

from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.effects import Effects
from loraplex.adapters.registry.outcome import LoadResult, LoadStatus
from loraplex.adapters.registry.verb import LoadWish, Verb
from loraplex.adapters.registry.version import AdapterVersion, LoRARef, OpenedAdapter, Parting
from loraplex.core import AdapterId, AdapterSpec, AdapterStore
from loraplex.errors import JournalError


class AdapterLoader:
    """Files are read and the store is called under no lock. `next_adapter_id` is never one that was used."""

    def __init__(
        self,
        store: AdapterStore,
        open_adapter: Callable[[str], OpenedAdapter],
        clock: Callable[[], float],
        effects: Effects,
        drain: Drain,
    ) -> None:
        self._store = store
        self._open_adapter = open_adapter
        self._clock = clock
        self._effects = effects
        self._drain = drain
        self.next_adapter_id = 1

    def load(self, wish: LoadWish) -> LoadResult:
        """Equal loads at the same time are one load with one outcome, good or bad; other verbs on the name are waited for.

        A reload does not share the outcome of a load that began before it was asked: the files may have changed since.
        """
        may_share = not wish.load_inplace
        while True:
            with self._effects.change() as table:
                version = table.loaded(wish)
                if version is not None:
                    return LoadResult(LoadStatus.ALREADY_LOADED, version.ref)
                running = table.verbs.get(wish.name)
                if running is None:
                    verb = table.begin_load(wish)
                    break
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
            with suppress(JournalError), self._effects.change() as table:
                table.call_off(verb)
            verb.done.set_exception(error)
            raise
        verb.done.set_result(result)
        return result

    def _load(self, wish: LoadWish, verb: Verb) -> LoadResult:
        began_s = time.monotonic()
        opened = self._open_adapter(wish.path)
        with self._effects.change() as table:
            previous = table.current.get(wish.name)
            if wish.keeps_equal and previous is not None and _is_equal(previous, wish, opened):
                return LoadResult(LoadStatus.ALREADY_LOADED, table.keep(verb).ref)
            version = self._new_version(wish, opened, previous)
        evicted = self._store.add_adapter(version.spec).evicted
        partings: tuple[Parting, ...] | None = None
        try:
            self._pin(version, previous)
            with self._effects.change() as table:
                partings = table.publish(version, verb)
        except BaseException:
            if partings is None:
                self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
            raise
        finally:
            for parting in partings or ():
                self._drain.part(parting)
        loaded = LoadStatus.LOADED_WITH_EVICTION if evicted else LoadStatus.LOADED
        status = loaded if previous is None else LoadStatus.RELOADED
        number = None if previous is None else previous.number
        return LoadResult(status, version.ref, evicted, time.monotonic() - began_s, number)

    def _new_version(self, wish: LoadWish, opened: OpenedAdapter, previous: AdapterVersion | None) -> AdapterVersion:
        adapter_id = AdapterId(self.next_adapter_id)
        self.next_adapter_id += 1
        number = self._effects.table.next_version(wish.name)
        digest, max_rank = opened.adapter_digest, opened.max_rank
        now = self._clock()
        return AdapterVersion(
            ref=LoRARef(adapter_id, wish.name, number, digest, wish.lora_int_id, max_rank, wish.path),
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


def _is_equal(version: AdapterVersion, wish: LoadWish, opened: OpenedAdapter) -> bool:
    ref = version.ref
    is_same_source = (ref.lora_path, version.spec.path) == (wish.path, opened.path)
    return is_same_source and ref.adapter_digest == opened.adapter_digest
