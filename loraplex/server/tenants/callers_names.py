"""Names in the adapter routes, as a caller writes them, and those that they are registered under.

An operator's names are the registered ones. A tenant does to its own adapters what an operator does to all; what it may
use but not change is 403, and everything else is as if it did not exist.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from fastapi import Request

from loraplex.adapters.registry import CheckAnswer, check_clients_name
from loraplex.adapters.registry.adapter_name import check_adapter_name
from loraplex.adapters.source import narrowed_to
from loraplex.errors import AdapterNotFoundError, InvalidRequestError, TenantForbiddenError, shown
from loraplex.server.auth import caller_of
from loraplex.server.config import local_roots
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.model_names import ModelNames


class CallersNames:
    def __init__(self, names: ModelNames, engine: EngineSurface) -> None:
        self._names = names
        self._engine = engine

    def new(self, request: Request, name: str, param: str = "name") -> str:
        """Of what is to be loaded. Raises InvalidRequestError for a slash, AdapterConflictError for the base's name."""
        scope = caller_of(request).scope
        if scope.tenant is None:
            is_known = self._engine.registry is not None and self._engine.registry.find(name) is not None
            if not (is_known or (scope.table.owner_of(name) and name.count("/") == 1)):  # for a tenant
                check_clients_name(name, param=param)
            return name
        own = scope.own(name)
        self._names.hide_targets(request, own)
        if not name:
            return name  # the registry has words for that
        short = scope.shown(own)
        check_clients_name(short, param=param)
        check_adapter_name(short, self._names.served, param=param)
        return own

    def find(self, request: Request, name: str) -> str | None:
        """None: nothing that the caller may see has it. For an operator the name itself.

        A name of its own is found whatever answers for it: it may be unloaded, or switched back.
        """
        scope, registry = caller_of(request).scope, self._engine.registry
        if scope.tenant is None:
            return name
        if registry is None:
            return None
        found = scope.find_own(name, registry.is_registered) or self._names.find(name, scope)
        self._names.hide_targets(request, found)
        return found

    def visible(self, request: Request, name: str) -> str:
        """Raises AdapterNotFoundError."""
        found = self.find(request, name)
        if found is None:
            raise AdapterNotFoundError(f"adapter {shown(name)} is not loaded; load it first")
        return found

    def own(self, request: Request, name: str, param: str = "name") -> str:
        """Of what is to be changed. Raises AdapterNotFoundError, TenantForbiddenError."""
        found = self.visible(request, name)
        self.check_own(request, found)
        return found

    def answering(self, request: Request, name: str) -> str:
        """As `own`, of a verb on what answers for the name now: an operator may have switched it to another's."""
        found = self.own(request, name)
        if caller_of(request).scope.tenant is not None and self._engine.registry is not None:
            self.answer_check(request, found)(self._engine.registry.resolve(found).adapter_name)
        return found

    def answer_check(self, request: Request, name: str) -> CheckAnswer:
        """For a verb that changes what answers for `name`, whichever that is when it runs."""
        return lambda answering: self.check_own(request, answering, name)

    def check_own(self, request: Request, registered: str, name: str = "") -> None:
        """Raises TenantForbiddenError. name: what the error says, if not what is registered."""
        scope = caller_of(request).scope
        if not scope.may_change(registered):
            text = (
                f"adapter {shown(scope.shown(name or registered))} is shared with this tenant, which may use it alone"
            )
            raise TenantForbiddenError(text, param="name")


def check_number(request: Request, lora_int_id: int | None) -> None:
    """Raises InvalidRequestError for a number of a tenant: one that is taken would tell of another's adapter."""
    if lora_int_id is not None and caller_of(request).scope.tenant is not None:
        raise InvalidRequestError("numbers are the operator's: leave lora_int_id out", param="lora_int_id")


def in_roots(request: Request, *places: str) -> AbstractContextManager[None]:
    """Around what fetches and opens: a tenant's lies in its roots, or these places, when it is opened, too. Touches no
    disk itself."""
    is_tenants = caller_of(request).scope.tenant is not None
    return narrowed_to(partial(local_roots, (*roots_of(request), *places)) if is_tenants else None)


def roots_of(request: Request) -> tuple[str, ...]:
    """Where the caller's tenant may load from."""
    scope = caller_of(request).scope
    tenant = scope.table.tenants.get(scope.tenant or "")
    return () if tenant is None else tenant.adapter_roots
