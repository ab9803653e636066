"""Adapters by need: a request for a name that is not registered loads it from a source that the operator named.

A name is loaded once however many requests wait for it, and into the space of its caller: a tenant's request registers
`tenant/name`, which counts for the tenant's quota and is no other tenant's to see. So many loads run at a time, of all
and of one client. Names that came by need are bounded: beyond it the tenant that has most of them loses the one that it
has used least recently, of those without requests, pin or switch. A name that the hub or a store does not have, and one
that was refused for its content, is known for some seconds and costs nothing meanwhile; of a directory only the latter.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from fastapi import Request

from loraplex.adapters.registry import LoRARegistry
from loraplex.adapters.registry.adapter_name import split_address
from loraplex.adapters.sources.named import ORIGIN, NamedSource, NamedSources
from loraplex.errors import (
    AdapterConflictError,
    AdapterLoadError,
    AdapterNoRoomError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    LoraplexError,
    TenantLimitError,
    error_from_payload,
    shortened,
)
from loraplex.server.auth import caller_of
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.off_loop import client_of
from loraplex.server.streaming import until_disconnect
from loraplex.server.tenants.adapter_quota import AdapterQuota
from loraplex.server.verb_turns import VerbTurns
from loraplex.tenants.records import TenantTable

MAX_LOADS, MAX_LOADS_OF_A_CLIENT = 32, 16
"""At a time: they read files, and may hang with a file system. Verbs have places of their own."""

REFUSED_S, MAX_REFUSED = 10.0, 4096
"""How long, and for how many names, it is known that a load failed."""

JUST_USED_S = 1.0
"""A name that was used within it stays: a request may be about to take it."""

_log = logging.getLogger("loraplex.server")


class AdapterResolver:
    """`load` makes a name of a request resolve, where a source has it. Belongs to one event loop."""

    def __init__(
        self,
        engine: EngineSurface,
        quota: AdapterQuota,
        sources: NamedSources,
        max_names: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources = sources
        self._engine = engine
        self._quota = quota
        self._max_names = max_names
        self._clock = clock
        self._turns = VerbTurns("loads by need", MAX_LOADS, MAX_LOADS_OF_A_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="source")
        self._evicting = threading.Lock()
        self._num_loading = 0
        self._loads: dict[str, asyncio.Future[None]] = {}
        self._refused: OrderedDict[str, tuple[float, Callable[[], LoraplexError] | None]] = OrderedDict()

    async def load(self, request: Request, name: str) -> None:
        """Register what a source has under a name as the caller wrote it; nothing where none has it, or where it is
        registered already, also to something that does not answer.

        Raises what the load raises, and ApiError where too many run. The body of the request must have been read.
        """
        scope = caller_of(request).scope
        written = scope.shown(scope.own(name)) if scope.tenant else name
        registered, tenant = scope.own(written), scope.tenant or ""
        found = self.sources.split(written, tenant)
        if found is None or split_address(written) is not None or scope.table.owner_of(registered) != tenant:
            return
        if self._engine.registry is not None and self._engine.registry.is_registered(registered):
            return
        load = self._loads.get(registered)
        if load is None:
            if self._is_known_refused(registered):
                return
            load = asyncio.ensure_future(self._load(request, registered, written, *found))
            self._loads[registered] = load
            load.add_done_callback(lambda done: self._end(registered, done))
        await until_disconnect(request, _shielded(load))

    def _end(self, registered: str, done: asyncio.Future[None]) -> None:
        del self._loads[registered]
        if not done.cancelled():
            done.exception()  # each request that waited has it; one that left does not

    def _is_known_refused(self, registered: str) -> bool:
        """Whether no source had it just now; raises what its load was refused with just now."""
        until_s, error = self._refused.get(registered, (0.0, None))
        if self._clock() >= until_s:
            self._refused.pop(registered, None)
            return False
        if error is not None:
            raise error()
        return True

    def _note_refused(self, registered: str, error: LoraplexError | None) -> None:
        """error: what to raise meanwhile; None: nothing is there."""
        known_s = REFUSED_S
        again: Callable[[], LoraplexError] | None
        again = None if error is None else partial(error_from_payload, error.to_payload())
        if isinstance(error, TenantLimitError):
            known_s = min(known_s, error.retry_after_s)
            again = partial(TenantLimitError, error.message, error.retry_after_s, error.limit)
        self._refused[registered] = self._clock() + known_s, again
        self._refused.move_to_end(registered)
        if len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    async def _load(self, request: Request, registered: str, written: str, source: NamedSource, adapter: str) -> None:
        async with self._turns.of(client_of(request)):
            path = await asyncio.get_running_loop().run_in_executor(self._threads, source.path_of, adapter)
            if path is None:
                return
            self._num_loading += 1
            try:
                await self._load_with_room(request, registered, path, ORIGIN + source.name)
            except AdapterConflictError:
                if self._engine.registry is None or not self._engine.registry.is_registered(registered):
                    raise  # else a verb was quicker
            except AdapterPathNotFoundError:
                self._note_refused(registered, None)
            except (AdapterLoadError, AdapterTooLargeError) as error:
                for place in (path, shortened(path), source.place):
                    error.args = (error.message.replace(place, written),)
                self._note_refused(registered, error)
                raise
            else:
                _log.info("adapter %.200r was loaded by need from source %s", registered, source.name)
            finally:
                self._num_loading -= 1

    async def _load_with_room(self, request: Request, registered: str, path: str, origin: str) -> None:
        scope = caller_of(request).scope
        prefix = f"{scope.tenant}/" if scope.tenant else ""
        is_opened = False

        def checked(check_size: Callable[[int], None], nbytes: int) -> None:
            """A tenant's own names make room for the bytes of this one, if those of all that may leave are enough."""
            nonlocal is_opened
            is_opened, registry = True, self._engine.registry
            while True:
                try:
                    return check_size(nbytes)
                except TenantLimitError as error:
                    if registry is None:
                        raise
                    with suppress(TenantLimitError):
                        check_size(nbytes - _bytes_of_idle(registry, prefix))
                        self._evict_one(registry, prefix, error)
                        continue
                    raise

        while True:
            await self._engine.on_registry(self._make_room, scope.table)
            try:
                async with self._quota.changing(request, registered, is_load=True) as check_size:
                    await self._engine.on_registry(
                        LoRARegistry.load,
                        registered,
                        path,
                        origin=origin,
                        check_size=None if check_size is None else partial(checked, check_size),
                    )
                return
            except TenantLimitError as error:
                if is_opened:
                    self._note_refused(registered, error)
                if is_opened or error.limit not in ("adapters", "adapter_bytes"):
                    raise
                await self._engine.on_registry(self._evict_one, prefix, error)

    def _make_room(self, registry: LoRARegistry, table: TenantTable) -> None:
        """For the loads that run. Raises AdapterNoRoomError."""
        with self._evicting:
            loaded, most = registry.loaded_from(ORIGIN), registry.max_loaded_loras
            num_over = len(loaded) + self._num_loading - self._max_names
            if most is not None:
                num_over = max(num_over, len(registry.registered()) + self._num_loading - most)
            counts = Counter(table.owner_of(each.name) for each in loaded)
            latest = time.time() - JUST_USED_S
            idle = [each.name for each in loaded if each.is_idle and each.last_used_time < latest]
            while num_over > 0 and idle:
                largest = max((table.owner_of(each) for each in idle), key=lambda owner: counts[owner])
                name = next(each for each in idle if table.owner_of(each) == largest)
                idle.remove(name)
                counts[largest] -= 1
                num_over -= self._unload(registry, name, latest)
        if num_over > 0:
            text = f"{len(loaded)} adapters that came from sources are loaded, and all are in use; try again later"
            raise AdapterNoRoomError(text)

    def _evict_one(self, registry: LoRARegistry, prefix: str, error: TenantLimitError) -> None:
        """Of a tenant at its limit. Raises the error where none of its names may leave now."""
        latest = time.time() - JUST_USED_S
        with self._evicting:
            idle = _idle_names(registry, prefix)
            if any(self._unload(registry, each, latest) for each in idle):
                return
        if idle:
            error.retry_after_s = JUST_USED_S
        raise error

    @staticmethod
    def _unload(registry: LoRARegistry, name: str, latest: float) -> bool:
        """Unless a request or a verb took it since the list was made. Whether it is gone."""
        if not registry.unload_idle(name, ORIGIN, latest):
            return not registry.is_registered(name)
        _log.info("adapter %.200r, which came from a source, was unloaded for another one", name)
        return True


def _idle_names(registry: LoRARegistry, prefix: str) -> list[str]:
    """Of a tenant those that came by need and that nothing uses, the least recently used first."""
    return [each.name for each in registry.loaded_from(ORIGIN) if each.is_idle and each.name.startswith(prefix)]


def _bytes_of_idle(registry: LoRARegistry, prefix: str) -> int:
    """Of the files of all their versions."""
    idle = set(_idle_names(registry, prefix))
    return sum(spec.nbytes for spec in registry.specs() if spec.adapter_name in idle)


async def _shielded(load: asyncio.Future[None]) -> None:
    """A client that leaves ends no load that others wait for."""
    await asyncio.shield(load)
