"""A server of two tenants over an engine without weights: their keys, and one key of each other role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from fastapi import FastAPI

from loraplex.adapters.journal.tables import JournalTables
from loraplex.adapters.registry import OpenedAdapter
from loraplex.server import ServerConfig, create_app
from loraplex.server.context import ServerContext
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role, TenantTable
from loraplex.tenants.store import TenantStore
from loraplex.testing import FakeAsyncEngine

ADAPTERS = {
    "acme/sql": "/srv/acme/sql",
    "acme/both": "/srv/acme/both",
    "beta/sql": "/srv/beta/sql",
    "beta/secret": "/srv/beta/secret",
    "beta/lent": "/srv/beta/lent",
    "both": "/srv/both",
    "public": "/srv/public",
    "private": "/srv/private",
}
"""`both` is public, and acme has one of that name; `beta/lent` is granted to acme; `private` is the operator's."""

INFERENCE_KEY, ADMIN_KEY = "inference-key-0123456789", "admin-key-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Tenancy:
    """keys: by role for the server's own, `acme`, `beta`, `acme read-only` for those of tenants."""

    app: FastAPI
    engine: FakeAsyncEngine
    store: TenantStore
    keys: dict[str, str] = field(default_factory=dict)
    key_ids: dict[str, str] = field(default_factory=dict)

    def headers(self, role: str) -> dict[str, str]:
        return bearer(self.keys[role])

    def add_key(self, name: str, role: Role, tenant: str | None = None) -> None:
        key, self.keys[name] = self.store.create_key(role, tenant)
        self.key_ids[name] = key.key_id
        self.refresh()

    def refresh(self) -> None:
        assert self.context.tenants is not None
        self.context.tenants.refresh()

    @property
    def context(self) -> ServerContext:
        context: ServerContext = self.app.state.context
        return context


@contextmanager
def tenancy(
    folder: Path,
    adapters: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    *,
    open_adapter: Callable[[str], OpenedAdapter] | None = None,
    make_engine: type[FakeAsyncEngine] = FakeAsyncEngine,
    **settings: Any,
) -> Iterator[Tenancy]:
    """With tenants acme (of these limits) and beta, whose roots are /srv/acme and /srv/beta."""
    file = folder / "journal.sqlite"
    JournalTables(file, "base").close()
    engine = make_engine(ADAPTERS if adapters is None else adapters, open_adapter=open_adapter)
    engine.state = sa.create_engine(sa.URL.create("sqlite", database=str(file)))
    with closing(TenantStore(sa.create_engine(sa.URL.create("sqlite", database=str(file))))) as store:
        store.create_tenant("acme", ["/srv/acme"], limits)
        store.create_tenant("beta", ["/srv/beta"])
        store.share("both", [TenantTable.ALL])
        store.share("public", [TenantTable.ALL])
        store.share("beta/lent", ["acme"])
        settings = {"adapter_roots": ("/srv",), **settings}
        config = ServerConfig(api_keys=(INFERENCE_KEY,), admin_api_keys=(ADMIN_KEY,), **settings)
        made = Tenancy(create_app(engine, config), engine, store)
        made.keys |= {"inference": INFERENCE_KEY, "flag admin": ADMIN_KEY}
        for role in (Role.ADMIN, Role.OPERATOR, Role.READ_ONLY):
            made.add_key(role.value, role)
        for tenant in ("acme", "beta"):
            made.add_key(tenant, Role.TENANT, tenant)
        made.add_key("acme read-only", Role.READ_ONLY, "acme")
        try:
            yield made
        finally:
            context: ServerContext = made.app.state.context
            assert context.accounts is not None
            assert context.tenants is not None
            context.accounts.book.close()
            context.tenants.close()
            assert engine.registry is not None
            assert engine.registry.num_references == 0
            engine.registry.check_integrity()
