"""How many adapters, bytes and pins a tenant may have: checked around the verbs that add some. The engine heeds the
limits in memory, and is told them.

Pins, switches and clones of a tenant run one after another, and so do its loads where such limits are on them: two
never take the last place together. Each server counts what its registry has; bytes are those of the weights' files,
and of what was uploaded of all files, of all versions that are kept. An adapter that turns out to be too large when
its files are opened is refused before anything has changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial

from fastapi import Request

from loraplex.adapter_store import MemoryQuota
from loraplex.adapters.registry import CheckAnswer, LoRARegistry, NameQuery
from loraplex.core import AdapterSpec
from loraplex.errors import TenantLimitError
from loraplex.server.auth import KeyRing, caller_of, unknown_key
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.sources.room import NameRoom
from loraplex.server.verb_turns import VerbTurns
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import TenantTable

_log = logging.getLogger(__name__)

RETRY_S = 60.0
"""It is the tenant that makes room: to come again soon would not help."""

MAX_WAITING = 256
"""Changes of a tenant that wait for one of it: some are of clients that have gone."""


class AdapterQuota:
    """room: where names that came by need leave for new ones."""

    def __init__(self, engine: EngineSurface, room: NameRoom, keys: KeyRing) -> None:
        self._engine = engine
        self._room = room
        self._keys = keys
        self._turns = VerbTurns("changes of adapters", None, 1, max_waiting=MAX_WAITING)

    def turn(
        self, request: Request, *, is_load: bool = False, is_held: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Of the tenant alone, around `changing`, and taken before a turn among the verbs of all: what waits for a slow
        change of its tenant has none of those meanwhile. is_held: a pin, switch or clone is to hold a name or its
        files. Raises ApiError, as turns do."""
        tenant = caller_of(request).scope.tenant
        is_counted = is_held or _limits_of(request, is_load, is_pin=False) is not None
        return self._turns.of(tenant) if tenant and is_counted else nullcontext()

    @asynccontextmanager
    async def changing(
        self,
        request: Request,
        name: str,
        *,
        is_load: bool = False,
        is_pin: bool = False,
        is_needed: bool = False,
        switched: str = "",
        cloned: str = "",
    ) -> AsyncIterator[Callable[[int], None] | None]:
        """In the tenant's `turn`, around a verb that loads or pins the adapter registered as `name`, which takes what
        this gives as its `check_size`. is_needed: a request loads it, and what gives raises where others are to leave
        for it: not before it is known to be good. switched: the adapter that it is to answer for; cloned: the one
        that it is to be equal to. Raises TenantLimitError, and AdapterNoRoomError for a request and for what is to stay
        beyond the tenant's share. The caller is looked up again, since its turn may have come late: ApiError 401 for a
        key that opens nothing any longer, but for a load that is of all requests for the name."""
        caller = self._keys.admitted(request.headers)
        if caller is not None:
            request.state.caller = caller
        elif not is_needed:
            raise unknown_key()
        tenant, limits = caller_of(request).scope.tenant, _limits_of(request, is_load, is_pin)
        async with AsyncExitStack() as stack:
            check_size = None
            if tenant and limits is not None:
                check_size = await self._check(f"{tenant}/", limits, name, is_load, is_pin, is_needed)
            if is_pin and tenant:
                await self._engine.on_registry(LoRARegistry.check_pins, tenant, name)
            if (is_pin or switched) and tenant:
                await self._engine.on_registry(self._room.check_held, tenant, name, switched)
            if is_load and tenant and not is_needed:
                await self._engine.on_registry(self._room.check_files, tenant, name, cloned)
            if is_load:
                await stack.enter_async_context(self._room.for_new(name, is_needed=is_needed))
            yield check_size

    def held_check(self, request: Request, name: str) -> CheckAnswer:
        """For a rollback of `name`, in the tenant's `turn`: it may be a switch to what answers then."""
        tenant, registry = caller_of(request).scope.tenant, self._engine.registry

        def check(answering: str) -> None:
            if tenant and registry is not None and answering != name:
                self._room.check_held(registry, tenant, name, answering)

        return check

    async def _check(
        self, prefix: str, limits: Limits, name: str, is_load: bool, is_pin: bool, is_needed: bool
    ) -> Callable[[int], None]:
        before = await self._engine.on_registry(self._bytes_of, prefix)
        error, num_over = None, 1
        if is_load and name not in before and _is_full(limits.adapter_bytes, sum(before.values())):
            error = _too_many(f"{sum(before.values())} bytes of adapters", limits.adapter_bytes, "adapter_bytes")
        if is_load and name not in before and limits.adapters is not None and len(before) >= limits.adapters:
            error = _too_many(f"{len(before)} adapters", limits.adapters, "adapters")
            num_over = len(before) + 1 - limits.adapters
        if error is not None and not is_needed:
            raise error
        if error is not None:
            await self._engine.on_registry(self._room.check_own, prefix, num_over, error)
        if is_pin and limits.pins is not None:
            pinned = await self._engine.on_registry(_pinned_of, prefix) - {name}
            if _is_full(limits.pins, len(pinned)):
                raise _too_many(f"{len(pinned)} pinned adapters", limits.pins, "pins")
        most = limits.adapters if is_needed else None
        return partial(self._check_size, prefix, name, sum(before.values()), limits.adapter_bytes, most)

    def _check_size(
        self, prefix: str, name: str, num_before: int, most: int | None, most_names: int | None, nbytes: int
    ) -> None:
        """In a thread, once the files are opened. What makes it fewer bytes is not refused. most_names: that the tenant
        may have with this one, where that was not checked before."""
        registry = self._engine.registry
        if registry is None:
            return
        after = 0 if most is None else registry.nbytes_with(name, nbytes, prefix, self._size_of)
        if most is not None and after > max(most, num_before):
            raise _too_many(f"with this one {after} bytes of adapters", most, "adapter_bytes")
        others = self._bytes_of(registry, prefix).keys() - {name}
        if _is_full(most_names, len(others)):
            raise _too_many(f"{len(others)} adapters", most_names, "adapters")

    def _bytes_of(self, registry: LoRARegistry, prefix: str) -> dict[str, int]:
        """By name, of all its versions."""
        found: Counter[str] = Counter()
        for spec in registry.specs():
            if spec.adapter_name.startswith(prefix):
                found[spec.adapter_name] += self._size_of(spec)
        return found

    def _size_of(self, spec: AdapterSpec) -> int:
        return max(spec.nbytes, self._engine.updates.uploads.size_of(spec.path))


class MemoryQuotas:
    """Tells an engine what each tenant may have in memory, whenever that changes."""

    def __init__(self, engine: EngineSurface) -> None:
        self._engine = engine
        self._told: dict[str, MemoryQuota] = {}

    def tell(self, table: TenantTable) -> None:
        """From any thread, and without a wait. Adapters of a deleted tenant keep its limits."""
        quotas = {name: tenant.limits.memory for name, tenant in table.tenants.items()}
        quotas = {name: quota for name, quota in quotas.items() if quota != NO_QUOTA}
        if quotas == self._told:
            return
        try:
            self._engine.limit_tenants(quotas)
            self._told = quotas
        except RuntimeError as error:
            _log.debug("the server has ended: %s", error)


NO_QUOTA = MemoryQuota()


def _limits_of(request: Request, is_load: bool, is_pin: bool) -> Limits | None:
    """The caller's, where one of them is on such a verb."""
    scope = caller_of(request).scope
    tenant = scope.table.tenants.get(scope.tenant or "")
    limits = Limits() if tenant is None else tenant.limits
    is_limited = is_load and (limits.adapters is not None or limits.adapter_bytes is not None)
    return limits if is_limited or (is_pin and limits.pins is not None) else None


def _is_full(most: int | None, num: int) -> bool:
    return most is not None and num >= most


def _too_many(what: str, most: int | None, limit: str) -> TenantLimitError:
    text = f"this tenant has {what}, and may have {most}: unload, or unpin, one of them first"
    return TenantLimitError(text, RETRY_S, limit)


def _pinned_of(registry: LoRARegistry, prefix: str) -> set[str]:
    return {info.ref.adapter_name for info in registry.infos(NameQuery(prefix=prefix)) if info.is_pinned}
