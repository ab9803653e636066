"""/v1/tenants, /v1/keys, /v1/shares: what `loraplex tenant` and `loraplex key` do, for keys of the role admin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import JsonSchemaValue

from loraplex.sampling_params import MAX_PRIORITY, MAX_TARGET_MS, MAX_WEIGHT, MIN_WEIGHT
from loraplex.server.access import Access, StrictRoute, may_use, requires
from loraplex.server.adapter_schemas import Name
from loraplex.server.api_error import ApiError
from loraplex.server.audit import name_adapters, name_target
from loraplex.server.auth import KEYLESS, caller_of
from loraplex.server.context import ServerContext
from loraplex.server.openapi import operation
from loraplex.server.request_model import RequestModel, any_of, has
from loraplex.server.responses import ListReply, encode
from loraplex.server.tenants.metering import limits_of
from loraplex.tenants.limits import MAX_LIMIT, Limits
from loraplex.tenants.records import MAX_LABEL_CHARS, Key, Tenant, TenantTable, as_role
from loraplex.tenants.service_level import ServiceLevel

T = TypeVar("T")

Roots = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(max_length=64, strict=False)]
Count = Annotated[int, Field(ge=0, le=int(MAX_LIMIT))]
Most = Annotated[int, Field(ge=1, le=int(MAX_LIMIT))]
TargetMs = Annotated[int, Field(ge=1, le=MAX_TARGET_MS)]


class LimitFields(RequestModel):
    """A limit that is not sent is none."""

    adapters: Count | None = None
    adapter_bytes: Count | None = None
    host_bytes: Count | None = None
    device_bytes: Count | None = None
    pins: Count | None = None
    requests_per_s: Annotated[float, Field(gt=0, le=MAX_LIMIT)] | None = None
    tokens_per_minute: Most | None = None
    concurrency: Most | None = None
    max_context: Most | None = None
    connections: Most | None = None

    @property
    def made(self) -> Limits:
        return Limits(**self.model_dump())


class ServiceFields(RequestModel):
    """How its requests stand among those of others. What is not sent is the default."""

    weight: Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)] | None = None
    max_priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] | None = None
    ttft_target_ms: TargetMs | None = None
    itl_target_ms: TargetMs | None = None

    @property
    def made(self) -> ServiceLevel:
        return ServiceLevel(**self.model_dump())


class CreateTenantRequest(RequestModel):
    """`POST /v1/tenants`. adapter_roots: places inside `--adapter-root` that its keys may load from."""

    name: Name
    adapter_roots: Roots = ()
    quota: LimitFields = LimitFields()
    service: ServiceFields = ServiceFields()


class ChangeTenantRequest(RequestModel):
    """`PUT /v1/tenants/{tenant}`: what is not sent stays; `quota` replaces all limits, `service` all of that."""

    adapter_roots: Roots | None = None
    quota: LimitFields | None = None
    service: ServiceFields | None = None


class CreateKeyRequest(RequestModel):
    """`POST /v1/keys`. role: admin, operator, tenant (the default) or read-only."""

    tenant: Name | None = None
    role: Annotated[str, Field(json_schema_extra={"enum": ["admin", "operator", "tenant", "read-only"]})] = "tenant"
    label: Annotated[str, Field(max_length=MAX_LABEL_CHARS)] = ""

    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(
            {**has(tenant={"type": "string"}), "not": has(role={"enum": ["admin", "operator"]})},
            {**has(role={"enum": ["admin", "operator", "read-only"]}), "not": has(tenant={"type": "string"})},
        ),
    )


class ShareRequest(RequestModel):
    """`PUT /v1/shares`: who may use an adapter beside its owner from now on; none by default."""

    adapter: Name
    tenants: Annotated[tuple[Name, ...], Field(max_length=1000, strict=False)] = ()
    public: bool = False


class KeysQuery(BaseModel):
    """Query of `GET /v1/keys`: those of one tenant."""

    model_config = ConfigDict(extra="forbid")

    tenant: Annotated[str, Field(max_length=256)] | None = None


class TenantCard(msgspec.Struct, frozen=True):
    """quota: the limits that are set; service: what is set of its service level."""

    name: str
    adapter_roots: tuple[str, ...]
    quota: dict[str, float]
    service: dict[str, float]
    created_time: float
    is_deleted: bool
    object: str = "tenant"

    @classmethod
    def of(cls, tenant: Tenant) -> TenantCard:
        quota, service = tenant.limits.given(), tenant.service.given()
        return cls(tenant.name, tenant.adapter_roots, quota, service, tenant.created_time, tenant.is_deleted)


class KeyCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """key: of a new one, and never again."""

    id: str
    tenant: str | None
    role: str
    label: str
    created_time: float
    is_revoked: bool
    key: str | None = None

    @classmethod
    def of(cls, key: Key, secret: str | None = None) -> KeyCard:
        return cls(key.key_id, key.tenant, key.role.value, key.label, key.created_time, key.is_revoked, secret)


class OwnKeyCard(msgspec.Struct, frozen=True):
    """What the key of a request may do. id: null where the server has no keys. quota: the limits of its tenant.

    sees_inside: memory and events; may_change: pin, preload, evict; may_load: load and unload; a tenant's key may do
    both to its own adapters. may_manage: tenants and keys.
    """

    id: str | None
    tenant: str | None
    role: str
    quota: dict[str, float]
    sees_inside: bool
    may_change: bool
    may_load: bool
    may_manage: bool
    object: str = "key"


class ShareCard(msgspec.Struct, frozen=True):
    adapter: str
    tenants: list[str]
    public: bool


class TenantRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._bodies = context.bodies
        self._directory = context.tenants

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tenants"], route_class=StrictRoute)

        def add(
            method: str, path: str, route: Callable[..., Any], reply: Any, body: type[BaseModel] | None = None
        ) -> None:
            extra = operation(*filter(None, [body]), replies=(reply,), errors=(404, 409))
            router.add_api_route(path, route, methods=[method], openapi_extra=extra)

        add("GET", "/v1/tenants", self.list_tenants, ListReply[TenantCard])
        add("POST", "/v1/tenants", self.create_tenant, TenantCard, CreateTenantRequest)
        add("GET", "/v1/tenants/{tenant}", self.show_tenant, TenantCard)
        add("PUT", "/v1/tenants/{tenant}", self.change_tenant, TenantCard, ChangeTenantRequest)
        add("DELETE", "/v1/tenants/{tenant}", self.delete_tenant, TenantCard)
        add("GET", "/v1/key", self.show_own_key, OwnKeyCard)
        add("GET", "/v1/keys", self.list_keys, ListReply[KeyCard])
        add("POST", "/v1/keys", self.create_key, KeyCard, CreateKeyRequest)
        add("DELETE", "/v1/keys/{key_id}", self.revoke_key, KeyCard)
        add("GET", "/v1/shares", self.list_shares, ListReply[ShareCard])
        add("PUT", "/v1/shares", self.share, ShareCard, ShareRequest)
        return router

    @requires(Access.MANAGE)
    async def list_tenants(self) -> Response:
        """Every tenant that is not deleted, by name."""
        tenants = await asyncio.to_thread(self._store.tenants)
        return _json(ListReply([TenantCard.of(each) for each in tenants]))

    @requires(Access.MANAGE)
    async def show_tenant(self, tenant: str) -> Response:
        return _json(TenantCard.of(await asyncio.to_thread(self._store.tenant, tenant)))

    @requires(Access.MANAGE_VERB)
    async def create_tenant(self, request: Request) -> Response:
        """Make a tenant. From the first one on, every request needs a key."""
        body = await self._bodies.read(request, CreateTenantRequest)
        name_target(request, tenant=body.name)
        wanted = body.name, body.adapter_roots, body.quota.made, body.service.made
        return _json(TenantCard.of(await self._change(self._store.create_tenant, *wanted)))

    @requires(Access.MANAGE_VERB)
    async def change_tenant(self, tenant: str, request: Request) -> Response:
        """Give a tenant other roots, limits, or another service level. What it has beyond its limits stays; what comes
        is refused."""
        body = await self._bodies.read(request, ChangeTenantRequest)
        limits, service = (None if each is None else each.made for each in (body.quota, body.service))
        wanted = tenant, body.adapter_roots, limits, service
        return _json(TenantCard.of(await self._change(self._store.change_tenant, *wanted)))

    @requires(Access.MANAGE_VERB)
    async def delete_tenant(self, tenant: str) -> Response:
        """Its keys open nothing any longer. Its adapters stay until an operator unloads them."""
        return _json(TenantCard.of(await self._change(self._store.delete_tenant, tenant)))

    @requires(Access.READ)
    async def show_own_key(self, request: Request) -> Response:
        """The key that the request was sent with: its role, its tenant's limits, and what it may do here."""
        caller = caller_of(request)
        can_load = not self._context.config.disable_dynamic_loading
        card = OwnKeyCard(
            id=None if caller is KEYLESS else caller.fingerprint,
            tenant=caller.scope.tenant or None,
            role=caller.role.value,
            quota=limits_of(caller).given(),
            sees_inside=may_use(caller, Access.ADMIN),
            may_change=may_use(caller, Access.OWN_VERB),
            may_load=may_use(caller, Access.OWN_LOADING) and can_load,
            may_manage=may_use(caller, Access.MANAGE),
        )
        return _json(card)

    @requires(Access.MANAGE)
    async def list_keys(self, query: Annotated[KeysQuery, Query()]) -> Response:
        """Every key, the revoked ones too, without the keys themselves: these are not stored."""
        keys = await asyncio.to_thread(self._store.keys_of, query.tenant)
        return _json(ListReply([KeyCard.of(each) for each in keys]))

    @requires(Access.MANAGE_VERB)
    async def create_key(self, request: Request) -> Response:
        """Make a key. The answer has it, and nothing else ever will."""
        body = await self._bodies.read(request, CreateKeyRequest)
        name_target(request, tenant=body.tenant)
        key, secret = await self._change(self._store.create_key, as_role(body.role), body.tenant, body.label)
        name_target(request, key=key.key_id, tenant=body.tenant)
        return _json(KeyCard.of(key, secret), {"Cache-Control": "no-store"})

    @requires(Access.MANAGE_VERB)
    async def revoke_key(self, key_id: str) -> Response:
        """It opens nothing any longer: here at once, at other servers within a second. Requests that run go on."""
        return _json(KeyCard.of(await self._change(self._store.revoke_key, key_id)))

    @requires(Access.MANAGE)
    async def list_shares(self) -> Response:
        """Public and granted adapters, by name."""
        found: dict[str, list[str]] = {}
        for adapter, tenant in await asyncio.to_thread(self._store.shares):
            found.setdefault(adapter, []).append(tenant)
        return _json(ListReply([_share_card(adapter, tenants) for adapter, tenants in found.items()]))

    @requires(Access.MANAGE_VERB)
    async def share(self, request: Request) -> Response:
        """Say which tenants may use an adapter beside its owner. The adapter may be loaded later."""
        body = await self._bodies.read(request, ShareRequest)
        name_adapters(request, body.adapter)
        wanted = (*body.tenants, *([TenantTable.ALL] if body.public else ()))
        return _json(_share_card(body.adapter, list(await self._change(self._store.share, body.adapter, wanted))))

    @property
    def _store(self) -> Any:
        if self._directory is None:
            text = "this server keeps no tenants: start it with --state-dir DIR or --database-url URL"
            raise ApiError(text, code="no_state")
        return self._directory.store

    async def _change(self, change: Callable[..., T], *args: Any) -> T:
        """It holds at this server when it is answered."""
        assert self._directory is not None
        result = await asyncio.to_thread(change, *args)
        await asyncio.to_thread(self._directory.refresh)
        return result


def _share_card(adapter: str, tenants: list[str]) -> ShareCard:
    return ShareCard(adapter, [each for each in tenants if each != TenantTable.ALL], TenantTable.ALL in tenants)


def _json(reply: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(reply), headers=headers, media_type="application/json")
