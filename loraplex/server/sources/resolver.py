"""Adapters by need: a request for a name that is not registered loads it from a source that the operator named.

A name is loaded once however many requests wait for it, in the turn of the first client that has a place, and into the
space of its caller: a tenant's request registers `tenant/name`, which counts for the tenant's quota and is no other
tenant's to see. So many loads run at a time, of all and of one client. Names that came by need are bounded (room.py). A
name that the hub or a store does not have, and one that was refused for its content, is known for some seconds and
costs nothing meanwhile; of a directory only the latter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fastapi import Request

from loraplex.adapters.registry.adapter_name import split_address
from loraplex.adapters.sources.by_need import NeededAdapter
from loraplex.adapters.sources.named import NamedSource, NamedSources
from loraplex.errors import (
    AdapterConflictError,
    AdapterLoadError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    LoraplexError,
    TenantLimitError,
    error_from_payload,
)
from loraplex.server.auth import caller_of, client_of
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.sources.room import NameRoom, bytes_of_idle
from loraplex.server.streaming import until_disconnect
from loraplex.server.tenants.adapter_quota import AdapterQuota
from loraplex.server.verb_turns import VerbTurns

MAX_LOADS, MAX_LOADS_OF_A_CLIENT = 32, 16
"""At a time: they read files, and may hang with a file system. Verbs have places of their own."""

REFUSED_S, MAX_REFUSED, MAX_REFUSED_WITH_ERRORS = 10.0, 4096, 256
"""How long, and for how many names, it is known that a load failed; an error may have 64 KiB."""

_log = logging.getLogger("loraplex.server")


class AdapterResolver:
    """`load` makes a name of a request resolve, where a source has it. Belongs to one event loop."""

    def __init__(
        self,
        engine: EngineSurface,
        quota: AdapterQuota,
        sources: NamedSources,
        room: NameRoom,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources = sources
        self._engine = engine
        self._quota = quota
        self._room = room
        self._clock = clock
        self._turns = VerbTurns("loads by need", MAX_LOADS, MAX_LOADS_OF_A_CLIENT)
        self._threads = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="source")
        self._loads: dict[str, asyncio.Future[None]] = {}  # those that have a place
        self._waiting: dict[str, dict[str, asyncio.Future[None]]] = {}  # those that wait for one, by name and client
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
        client = client_of(request)
        while self._engine.registry is None or not self._engine.registry.is_registered(registered):
            load = self._loads.get(registered) or self._waiting.get(registered, {}).get(client)
            if load is None:
                if self._is_known_refused(registered):
                    return
                load = asyncio.ensure_future(self._load(request, registered, written, *found))
                self._waiting.setdefault(registered, {})[client] = load
                load.add_done_callback(partial(self._end, registered, client))
            await until_disconnect(request, _ended(load))
            if not load.cancelled():  # else another client had a place first
                return load.result()

    def _begin(self, registered: str, client: str) -> None:
        """This client has a place: what others wait for ends, and their requests share its load."""
        waiting = self._waiting.pop(registered)
        self._loads[registered] = waiting.pop(client)
        for load in waiting.values():
            load.cancel()

    def _end(self, registered: str, client: str, done: asyncio.Future[None]) -> None:
        if self._loads.get(registered) is done:
            del self._loads[registered]
        elif (waiting := self._waiting.get(registered, {})).get(client) is done:
            del waiting[client]
            if not waiting:
                del self._waiting[registered]
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
        now_s = self._clock()
        self._refused[registered] = now_s + known_s, again
        self._refused.move_to_end(registered)
        while len(self._refused) > MAX_REFUSED or next(iter(self._refused.values()))[0] <= now_s:
            self._refused.popitem(last=False)
        with_errors = [name for name, (_, each) in self._refused.items() if each is not None]
        for name in with_errors[:-MAX_REFUSED_WITH_ERRORS]:
            del self._refused[name]

    async def _load(self, request: Request, registered: str, written: str, source: NamedSource, adapter: str) -> None:
        client = client_of(request)
        async with self._quota.turn(request, is_load=True), self._turns.of(client):
            self._begin(registered, client)
            path = await asyncio.get_running_loop().run_in_executor(self._threads, source.path_of, adapter)
            if path is None:
                return
            inside = (Path(source.place),) if source.is_directory else None  # now that it is to be opened, still
            needed = NeededAdapter(registered, path, written, source.name, inside)
            try:
                await self._load_with_room(request, needed)
            except AdapterConflictError:
                if self._engine.registry is None or not self._engine.registry.is_registered(registered):
                    raise  # else a verb was quicker
            except AdapterPathNotFoundError:
                self._note_refused(registered, None)
            except (AdapterLoadError, AdapterTooLargeError) as error:
                self._note_refused(registered, error)
                raise
            else:
                _log.info("adapter %.200r was loaded by need from source %s", registered, source.name)

    async def _load_with_room(self, request: Request, needed: NeededAdapter) -> None:
        """A tenant's own names make room for a new one of it, and for its bytes."""
        scope, by_need, registry = caller_of(request).scope, self._engine.by_need, self._engine.registry
        assert registry is not None, "there is nothing to load where LoRA is off"
        prefix = f"{scope.tenant}/" if scope.tenant else ""
        evict = partial(self._room.evict, registry)
        is_opened = False

        def checked(check_size: Callable[[int], None] | None, nbytes: int) -> None:
            """The adapter is good: others leave for it one after another, if all that may leave are enough."""
            nonlocal is_opened
            is_opened = True
            while check_size is not None:
                try:
                    check_size(nbytes)
                    break
                except TenantLimitError as error:
                    self._check_would_fit(check_size, nbytes - bytes_of_idle(registry, prefix), error)
                    self._room.evict_own(registry, prefix, error)
            self._room.make_for_needed(registry, needed.name)

        def check_least(check_size: Callable[[int], None], nbytes: int) -> None:
            nonlocal is_opened
            is_opened = True  # as far as its size goes
            try:
                check_size(nbytes)
            except TenantLimitError as error:
                self._check_would_fit(check_size, nbytes - bytes_of_idle(registry, prefix), error)

        try:
            loading = self._quota.changing(request, needed.name, is_load=True, is_needed=True)
            async with loading as check_size:
                least = None if check_size is None else partial(check_least, check_size)
                await self._engine.on_registry(by_need.load, needed, evict, partial(checked, check_size), least)
        except TenantLimitError as error:
            if is_opened and error.limit == "adapter_bytes":
                self._note_refused(needed.name, error)
            raise

    def _check_would_fit(self, check_size: Callable[[int], None], nbytes: int, error: TenantLimitError) -> None:
        """Raises the error where no leaving would make the bytes fit."""
        try:
            check_size(nbytes)
        except TenantLimitError as still:
            if still.limit != "adapters":
                raise error from None


async def _ended(load: asyncio.Future[None]) -> None:
    """A client that leaves ends no load that others wait for."""
    await asyncio.wait((load,))
