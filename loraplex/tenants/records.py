"""Tenants, keys and grants as one immutable table, and the one rule of who may see an adapter.

An adapter named `acme/sql` belongs to tenant acme; every other name is the operator's. A tenant sees its own adapters,
the public ones and those that are granted to it. For everybody else's there is no difference to a name that does not
exist. A tenant writes its own names without `acme/` (with it, too); its own hide others of the same spelling, also
while nothing answers for them.
"""

from __future__ import annotations

import enum
import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loraplex.adapters.registry.adapter_name import split_address
from loraplex.adapters.registry.views import NameQuery
from loraplex.errors import (
    AdapterBeyondQuotaError,
    AdapterDiskFullError,
    AdapterMemoryError,
    AdapterNoRoomError,
    AdapterQuotaError,
    EngineOverloadedError,
    InvalidRequestError,
    JournalError,
    LoraplexError,
    shown,
    without_keys,
)
from loraplex.tenants.limits import Limits
from loraplex.tenants.service_level import ServiceLevel

KEY_PREFIX = "lp-"
MAX_TENANTS, MAX_KEYS_OF_A_TENANT, MAX_SHARES, MAX_LABEL_CHARS = 10_000, 1000, 100_000, 200
TENANT_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_TENANT = re.compile(TENANT_NAME, re.ASCII)


class Role(enum.StrEnum):
    """`admin`: everything. `operator`: everything but tenants and keys. `tenant`: requests, and verbs on the tenant's
    own adapters. `read-only`: lists alone; without a tenant also memory, events and metrics. `inference`: requests and
    lists alone, the role of `--api-key` beside `--admin-api-key`."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"
    READ_ONLY = "read-only"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Tenant:
    """adapter_roots: where its keys may load adapters from, each inside `--adapter-root`; (): nowhere. A deleted tenant
    keeps its name: what is left of it never becomes another one's."""

    name: str
    created_time: float
    adapter_roots: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    service: ServiceLevel = field(default_factory=ServiceLevel)
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """key_id: the first eight digits of the key's SHA-256, its name in logs. tenant: None for the operator's keys."""

    key_id: str
    tenant: str | None
    role: Role
    label: str
    created_time: float
    is_revoked: bool = False


def new_secret() -> str:
    """A key: 32 random bytes. It is shown once and stored as its SHA-256."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def check_tenant_name(name: str) -> None:
    """Raises InvalidRequestError."""
    if not _TENANT.fullmatch(name):
        raise InvalidRequestError(
            f"tenant {shown(name)}: a name has 1 to 63 of a-z, 0-9, '.', '_', '-', and begins with a letter or digit",
            param="name",
        )


def check_label(label: str) -> None:
    """Of a key: lists print it, so it has no line ends and no codes of a terminal. Raises InvalidRequestError."""
    if len(label) > MAX_LABEL_CHARS or not label.isprintable() or without_keys(label) != label:
        text = f"label {shown(label)}: at most {MAX_LABEL_CHARS} printable characters, and no key"
        raise InvalidRequestError(text, param="label")


def check_root(root: str) -> None:
    """Of a tenant: a directory from the root of the file system on, as each server that reads it may have been started
    elsewhere, or a place of the hub or a store. Raises InvalidRequestError."""
    if not root.startswith(("/", "hf://", "s3://")) or not root.isprintable():
        text = (
            f"{shown(root)} is no place inside an --adapter-root: give a path from / on, hf://ORG or s3://BUCKET/PREFIX"
        )
        raise InvalidRequestError(text, param="adapter_roots")


def as_role(name: str | None) -> Role:
    """None: `tenant`. Raises InvalidRequestError."""
    try:
        return Role.TENANT if name is None else Role(name)
    except ValueError:
        text = f"role {shown(name)} is not known; give admin, operator, tenant or read-only"
        raise InvalidRequestError(text, param="role") from None


def check_role(role: Role, tenant: str | None) -> None:
    """Raises InvalidRequestError for a role that needs a tenant and has none, or has one and may not."""
    if role is Role.INFERENCE:
        raise InvalidRequestError("role 'inference' is that of --api-key; give admin, operator, tenant or read-only")
    if role is Role.TENANT and tenant is None:
        raise InvalidRequestError("a key of role 'tenant' belongs to a tenant; name one", param="tenant")
    if role in (Role.ADMIN, Role.OPERATOR) and tenant is not None:
        text = f"a key of role {role.value!r} is the server's, not tenant {shown(tenant)}'s; leave the tenant out"
        raise InvalidRequestError(text, param="tenant")


@dataclass(frozen=True, slots=True)
class TenantTable:
    """All that is known at one revision. revision 0: no tenant and no key was ever made, and nothing changes.

    tenants: by name, the deleted ones too; keys: by digest, those that open something; shares: a public or granted
    adapter to the tenants that may use it, `ALL` for a public one.
    """

    revision: int = 0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[bytes, Key] = field(default_factory=dict)
    shares: Mapping[str, frozenset[str]] = field(default_factory=dict)

    ALL = "*"

    @property
    def is_configured(self) -> bool:
        return self.revision > 0

    def owner_of(self, adapter_name: str) -> str:
        """The tenant that an adapter, or a version `name@2`, belongs to; "": it is the operator's."""
        prefix, slash, _ = adapter_name.partition("/")
        return prefix if slash and prefix in self.tenants else ""

    def may_see(self, tenant: str, adapter_name: str) -> bool:
        """THE rule. tenant "": the operator's keys without an operator's rights."""
        if self.owner_of(adapter_name) == tenant:
            return True
        address = split_address(adapter_name)
        shared = self.shares.get(adapter_name if address is None else address[0], frozenset())
        return tenant in shared or self.ALL in shared


@dataclass(frozen=True, slots=True)
class Scope:
    """What one caller means by names of adapters, and how it reads them. tenant None: all names, as registered."""

    table: TenantTable = field(default_factory=TenantTable)
    tenant: str | None = None

    def find(self, name: str, is_answered: Callable[[str], bool], is_registered: Callable[[str], bool]) -> str | None:
        """The registered name: its own if it has one, else a public or granted one. None: none answers that it may see.

        An own name that was switched to what is unloaded, or a version that is not kept, is never another's adapter.
        """
        meant = self.find_own(name, is_registered) or name
        return meant if self.may_see(meant) and is_answered(meant) else None

    def find_own(self, name: str, is_registered: Callable[[str], bool]) -> str | None:
        """The tenant's own adapter of that name, or of `name@2`, whether it answers now or not."""
        owned = (self._prefix + name, self.own(name)) if self.tenant else ()
        return next(filter(is_registered, owned), None)

    def own(self, name: str) -> str:
        """Under which an adapter of the caller is registered."""
        if not self.tenant:
            return name
        return f"{self.tenant}/{name.removeprefix(self._prefix)}"

    def may_see(self, registered: str) -> bool:
        return self.tenant is None or self.table.may_see(self.tenant, registered)

    def may_change(self, registered: str) -> bool:
        return self.tenant is None or (self.tenant != "" and self.table.owner_of(registered) == self.tenant)

    def shown(self, registered: str) -> str:
        """As the caller writes a name that it may see."""
        return registered.removeprefix(self._prefix) if self.tenant else registered

    def shown_or_not(self, registered: str) -> str:
        """`shown`, for a name that it may have no right to: what an operator had switched a name of its own to."""
        return self.shown(registered) if self.may_see(registered) else "(another adapter)"

    def visible(self, names: Iterable[str]) -> tuple[str, ...]:
        """As the caller reads them; the others are left out."""
        return tuple(self.shown(name) for name in names if self.may_see(name))

    def query(self, query: NameQuery) -> NameQuery:
        return query if self.tenant is None else ScopedQuery(**_fields_of(query), scope=self)

    def cleaned(self, error: LoraplexError, hidden: Collection[str] = ()) -> str:
        """What of an error's message a tenant may read: nothing of how full the server is, which is what others do.

        hidden: adapters that answer for names of its own and that it may not see. Names that it sent itself are never
        looked up: an error about one that exists must read as one about another that does not. A message has names as
        `repr` writes them, and is not split at quotes: it may have others.
        """
        if isinstance(error, EngineOverloadedError):
            return "the server is busy; try again later"
        if isinstance(error, JournalError):
            return "the database of this server cannot be used now; try again later"
        if isinstance(error, AdapterDiskFullError):
            return "the server has no room for these files now: unload an adapter that you uploaded, or try again later"
        is_of_others = isinstance(error, AdapterBeyondQuotaError | AdapterQuotaError) and error.tenant != self.tenant
        if is_of_others and isinstance(error, AdapterBeyondQuotaError):
            return "this adapter needs more memory than its owner may have: ask its owner"
        if is_of_others or type(error) in (AdapterMemoryError, AdapterNoRoomError):
            return "there is no room for this adapter now: unpin or unload one of yours, or try again later"

        message = error.message
        if hidden:
            names = "|".join(re.escape(repr(name)[1:-1]) for name in hidden)
            message = re.sub(rf"(['\"])(?:{names})(?:@[0-9]+)?\1", "'(another adapter)'", message)
        return re.sub(rf"(['\"]){re.escape(self._prefix)}", r"\1", message) if self.tenant else message

    @property
    def _prefix(self) -> str:
        return f"{self.tenant}/"


EVERYTHING = Scope()


@dataclass(frozen=True, slots=True)
class ScopedQuery(NameQuery):
    """A query in a caller's spelling. A name that one of its own hides is left out: it could not be asked for."""

    scope: Scope = field(default_factory=Scope)

    def of(self, names: Iterable[str]) -> Iterator[str]:
        """Registered names, in the order of what the caller reads."""
        by_shown: dict[str, str] = {}
        for name in names:
            if self.scope.may_see(name):
                shown_name = self.scope.shown(name)
                if shown_name not in by_shown or shown_name != name:
                    by_shown[shown_name] = name
        return (by_shown[each] for each in NameQuery.of(self, by_shown))


def _fields_of(query: NameQuery) -> dict[str, Any]:
    return {name: getattr(query, name) for name in ("prefix", "contains", "after", "is_sorted")}
