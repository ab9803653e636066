"""How many connections are open, what their bodies hold, what was refused: bounds that all connections share.

Each refusal is counted by its reason (`loraplex:http_connections_refused`); a reason has at most one log line every
LOG_EVERY_S.
"""

from __future__ import annotations

import enum
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Protocol

from loraplex.errors import TenantLimitError
from loraplex.server.api_error import ApiError
from loraplex.server.auth import KEYLESS, Caller
from loraplex.server.config import ServerConfig
from loraplex.server.pacing import READ_BYTES, TimeSlices, Turns
from loraplex.server.urls import source_of

_log = logging.getLogger("loraplex.server")

LOG_EVERY_S = 10.0
IDLE_AT_LEAST_S = 1.0
"""A connection that had a request of a key may be closed for another one when it has waited this long: its next request
is not on its way."""

SMALL_BODY_BYTES = 64 * 2**10
"""The last eighth of the memory for bodies is kept for bodies up to this size: long ones do not stop all others."""

MAX_WAITING_BYTES = 32 * 2**20
"""Heads and bodies of requests behind unanswered ones on their connections: apart from the bodies of those that run."""


MAX_UNREAD_BYTES = 256 * 2**20
"""Of long answers that are being sent; beyond it one of the client that has most of them is closed."""

MAX_OUTPUT_BYTES = 2**29
"""Of log probabilities, and texts of long tokens, that requests keep until their clients have read them, whole or as a
stream."""

MAX_HANDSHAKES = 256
"""TLS handshakes that have had their turn and have not ended: each holds some 100 KB. Beyond it one of the address that
has most of them is closed."""

MAX_PROXIES = 8
"""On this machine, one behind the other."""

LET_GO = "loraplex.let_go"
"""In a request's scope: takes how many bytes of its body, which the application has, are in memory no longer."""

hold_outputs: ContextVar[Callable[[int], None] | None] = ContextVar("hold_outputs", default=None)
"""Of the request that is answered: takes how many bytes its outputs have in memory now."""

KEYLESS_A_TURN = 4
"""Probes, and what is refused: short."""

MAX_CLOSED_AT_ONCE = 16
"""Idle connections of a tenant, for one new one of it: after its share became smaller there may be thousands."""


class Refusal(enum.StrEnum):
    """Why a connection was refused or closed by the server."""

    CONNECTIONS = "max_connections"
    ROOM = "closed_for_another"
    ADDRESS = "max_connections_per_ip"
    TENANT = "tenant_connections"
    DESCRIPTORS = "descriptors"
    NOT_HTTP = "not_http"
    HEADER_LENGTH = "header_too_long"
    NUM_HEADERS = "too_many_headers"
    HEADER_TIME = "header_timeout"
    PIPELINE = "pipeline"
    BODY_TIME = "body_timeout"
    CHUNKS = "chunks_too_small"
    BODY_MEMORY = "max_inflight_body_bytes"
    SEND_TIME = "send_timeout"
    UNREAD = "unread_answers"


class Closable(Protocol):
    def close_now(self) -> None: ...


class Slot:
    """The place of one accepted connection, until `release`, which may be called again."""

    __slots__ = ("_connections", "_handshake", "source")

    def __init__(self, connections: Connections, source: str) -> None:
        self._connections: Connections | None = connections
        self.source = source
        self._handshake: Closable | None = None

    def begin_handshake(self, handshake: Closable) -> None:
        """It may be closed for another connection until `end_handshake`, or `release`."""
        if self._connections is not None:
            self._handshake = handshake
            self._connections.set_new(handshake, self.source)

    async def handshake_turn(self, is_there: Callable[[], bool]) -> None:
        """Until the handshake may be done, in turns by address. ConnectionAbortedError: its client is gone."""
        if self._connections is not None and self._handshake is not None:
            await self._connections.handshake_turns.next(self.source, is_there)
            self._connections.set_in_handshake(self._handshake, self.source)

    def end_handshake(self) -> None:
        if self._handshake is not None and self._connections is not None:
            self._connections.set_busy(self._handshake)
            self._handshake = None

    def release(self) -> None:
        self.end_handshake()
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.leave(self.source)


class Connections:
    """The bounds and the counts. Everything happens on the event loop's thread.

    A full server closes the connection that has waited longest for the end of a head, for a new one: the head of a
    client that means well comes in one piece, so that neither idle connections nor heads that trickle keep others out.
    Connections that have had no request of a key go first, however young, and of these the oldest of the address that
    has most of them: a flood displaces itself. Last go requests whose body is not there: the oldest of the client that
    has most of them, and more than one.
    """

    def __init__(self, config: ServerConfig, max_open: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_open = max_open
        self._max_per_source = config.max_connections_per_ip
        self._bodies = SharedBytes(config.max_inflight_body_bytes)
        self._clock = clock
        self._num_open = 0
        self._by_source: Counter[str] = Counter()
        self._new = BySource()  # without any request of a key
        self._in_handshake = BySource()
        self._idle: dict[Closable, float] = {}  # without a request of a key since then, longest first
        self._receiving: dict[str, dict[Closable, None]] = {}  # by client, oldest first
        self._receiving_for: dict[Closable, str] = {}
        self._of_tenants = TenantConnections(max_open)
        self._over: dict[Closable, None] = {}  # idle ones that gave up their place and are yet to rest, oldest first
        self._waiting = SharedBytes(MAX_WAITING_BYTES)
        self.answers = HeldAnswers(MAX_UNREAD_BYTES, partial(self._cut, "answers", MAX_UNREAD_BYTES))
        self.outputs = HeldAnswers(MAX_OUTPUT_BYTES, partial(self._cut, "log probabilities", MAX_OUTPUT_BYTES))
        self.turns_of_clients = Turns()
        self.turns_without_key = Turns(KEYLESS_A_TURN, from_both_ends=True)
        self.handshake_turns = Turns(from_both_ends=True)
        self.ends = Turns()
        self.slices = TimeSlices()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._refused: Counter[str] = Counter()
        self._logged: dict[Refusal, tuple[float, int]] = {}  # when, and what the count was then

    async def turn(self, client: str | None, address: tuple[str, int] | None, is_there: Callable[[], bool]) -> None:
        """Until a request may begin. None: it has no key, or needs none. ConnectionAbortedError: its client is gone."""
        if client is None:
            await self.turns_without_key.next(source_of(address[0] if address else ""), is_there)
        else:
            await self.turns_of_clients.next(client, is_there)

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def body_bytes(self) -> int:
        """Received of bodies whose requests run."""
        return self._bodies.num_held

    @property
    def waiting_bytes(self) -> int:
        """Received of requests that wait for the answer to an earlier one of their connection."""
        return self._waiting.num_held

    @property
    def num_closed_for_others(self) -> int:
        return self._refused[Refusal.ROOM]

    @property
    def tenant_counts(self) -> Counter[str]:
        """Connections by the tenant that they belong to; "": the operator's."""
        return self._of_tenants.counts

    @property
    def refused(self) -> Mapping[str, int]:
        """How many, by reason."""
        return self._refused

    # ------------------------------------------------------------------------------------------------------ connections

    def admit(self, address: str) -> Slot | Refusal:
        """The place of a new connection from `address`, or why there is none."""
        source = source_of(address)
        if self._max_per_source is not None and self._by_source.get(source, 0) >= self._max_per_source:
            return Refusal.ADDRESS
        if self._num_open >= self.max_open and not self._close_idlest():
            return Refusal.CONNECTIONS
        self._num_open += 1
        self._by_source[source] += 1
        return Slot(self, source)

    def leave(self, source: str) -> None:
        self._num_open -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]

    def set_new(self, connection: Closable, source: str) -> None:
        """It waits for its first request that is admitted."""
        self._new.add(connection, source)

    def set_in_handshake(self, connection: Closable, source: str) -> None:
        """Its TLS handshake has had its turn."""
        if len(self._in_handshake) >= MAX_HANDSHAKES and (cut := self._in_handshake.first()) is not None:
            self.set_busy(cut)
            cut.close_now()
            self.refuse(Refusal.ROOM, f"{MAX_HANDSHAKES} TLS handshakes have not ended, and a new one took its place")
        self._in_handshake.add(connection, source)

    def set_idle(self, connection: Closable) -> None:
        """It waits for its next request that is admitted."""
        self._idle.pop(connection, None)
        self._idle[connection] = self._clock()
        self._of_tenants.set_idle(connection)

    def set_receiving(self, connection: Closable, client: str) -> None:
        """It waits for the body of a client's request, the only one that it has."""
        self.set_busy(connection)
        self._receiving.setdefault(client, {})[connection] = None
        self._receiving_for[connection] = client

    def set_busy(self, connection: Closable) -> None:
        """It has a request that is admitted, or is closed."""
        self._new.discard(connection)
        self._in_handshake.discard(connection)
        self._idle.pop(connection, None)
        self._over.pop(connection, None)
        self._of_tenants.set_busy(connection)
        client = self._receiving_for.pop(connection, None)
        if client is not None:
            del self._receiving[client][connection]
            if not self._receiving[client]:
                del self._receiving[client]

    def claim(self, connection: Closable, caller: Caller | None) -> TenantLimitError | None:
        """A request's key says whose the connection is; why it may not be, where its tenant has no place for it."""
        if caller is None or caller is KEYLESS:
            return None
        tenant = caller.scope.tenant or ""
        known = caller.scope.table.tenants.get(tenant)
        if self.give_to(connection, tenant, None if known is None else known.limits.connections):
            return None
        text = f"this tenant has {self.tenant_counts[tenant]} connections, and may have no more now: send the request"
        return TenantLimitError(f"{text} again when one of them has no request any longer", limit="connections")

    def give_to(self, connection: Closable, tenant: str, most: int | None) -> bool:
        """Whether the connection is this tenant's now ("": the operator's), which may have `most` of them (None: its
        share). Idle ones of the tenant give up their place for it, the oldest first; they are closed, though not before
        they have rested: the next request of a proxy may be on its way, and another tenant's."""
        self._over.pop(connection, None)  # its next request has come
        for before in tuple(islice(self._over, MAX_CLOSED_AT_ONCE)):
            self._close_rested(before)
        for _ in range(MAX_CLOSED_AT_ONCE):
            if self._of_tenants.take(connection, tenant, most):
                return True
            idle = self._of_tenants.oldest_idle(tenant)
            if idle is None:
                return False
            self._of_tenants.release(idle)
            self._over[idle] = None
            self._close_rested(idle)
        return self._of_tenants.take(connection, tenant, most)

    def disown(self, connection: Closable) -> None:
        """It is no tenant's any longer: it is closed."""
        self._over.pop(connection, None)
        self._of_tenants.forget(connection)

    def _has_rested(self, connection: Closable) -> bool:
        return self._clock() - self._idle[connection] >= IDLE_AT_LEAST_S

    def _close_rested(self, connection: Closable) -> None:
        if self._has_rested(connection):
            self._close(connection, "its tenant has as many connections as it may have, and a new one took its place")

    def _idlest(self) -> Closable | None:
        if (new := self._new.first()) is not None:
            return new
        connection = next(iter(self._idle), None)
        if connection is not None and self._has_rested(connection):
            return connection
        most = max(self._receiving.values(), key=len, default={})
        return next(iter(most)) if len(most) > 1 else None

    def _close_idlest(self) -> bool:
        connection = self._idlest()
        if connection is None:
            return False
        self._close(connection, f"{self._num_open} are open (--max-connections), and a new one took its place")
        return True

    def _close(self, connection: Closable, why: str) -> None:
        self.set_busy(connection)
        connection.close_now()
        self.refuse(Refusal.ROOM, why)

    # ----------------------------------------------------------------------------------------------------------- bodies

    def hold_body(self, client: str, num_bytes: int, num_held: int) -> bool:
        """Count `num_bytes` more of a client's request that holds `num_held`; False where there is no room for them."""
        is_small = num_held + num_bytes <= SMALL_BODY_BYTES
        return self._bodies.hold(client, num_bytes, num_held, 0 if is_small else self._bodies.max_bytes // 8)

    def release_body(self, client: str, num_bytes: int) -> None:
        self._bodies.release(client, num_bytes)

    def hold_waiting(self, client: str, num_bytes: int, num_held: int) -> bool:
        """The same for a request that waits behind another one of its connection."""
        return self._waiting.hold(client, num_bytes, num_held)

    def release_waiting(self, client: str, num_bytes: int) -> None:
        self._waiting.release(client, num_bytes)

    # ---------------------------------------------------------------------------------------------------------- answers

    def begin_outputs(self, connection: Closable, client: str) -> None:
        """What `hold_outputs` takes in this task counts for a connection, until `outputs.release`."""
        hold_outputs.set(partial(self.outputs.hold, connection, client))

    def _cut(self, what: str, max_bytes: int, connection: Closable) -> None:
        self.refuse(Refusal.UNREAD, f"{what} have {max_bytes} bytes, and its client has most of them")
        connection.close_now()

    # --------------------------------------------------------------------------------------------------------- refusals

    def refuse(self, reason: Refusal, text: str, address: str = "") -> None:
        """Count a refusal, and log it unless this reason had a line just now."""
        self._refused[reason] += 1
        count, now = self._refused[reason], self._clock()
        logged_s, logged_count = self._logged.get(reason, (-LOG_EVERY_S, count - 1))
        if now - logged_s < LOG_EVERY_S:
            return
        self._logged[reason] = (now, count)
        more = count - logged_count - 1
        of_client = f" of {address}" if address else ""
        before = f" (and {more} before it)" if more else ""
        _log.warning("a connection%s was refused or closed: %s%s", of_client, text, before)


class BySource:
    """Connections of which some must be closed: `first` is the oldest of the source that has most. A step is O(1)."""

    def __init__(self) -> None:
        self._of_source: dict[str, dict[Closable, None]] = {}  # oldest first
        self._sources: dict[Closable, str] = {}
        self._with_count: dict[int, dict[str, None]] = {}  # sources that have so many, at least one
        self._most = 0

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, connection: Closable, source: str) -> None:
        """A connection that is there stays where it is."""
        if connection not in self._sources:
            self._sources[connection] = source
            of_source = self._of_source.setdefault(source, {})
            of_source[connection] = None
            self._recount(source, len(of_source) - 1, len(of_source))

    def discard(self, connection: Closable) -> None:
        source = self._sources.pop(connection, None)
        if source is not None:
            of_source = self._of_source[source]
            del of_source[connection]
            if not of_source:
                del self._of_source[source]
            self._recount(source, len(of_source) + 1, len(of_source))

    def first(self) -> Closable | None:
        if not self._most:
            return None
        return next(iter(self._of_source[next(iter(self._with_count[self._most]))]))

    def _recount(self, source: str, before: int, count: int) -> None:
        if before:
            del self._with_count[before][source]
            if not self._with_count[before]:
                del self._with_count[before]
        if count:
            self._with_count.setdefault(count, {})[source] = None
        if count > self._most or self._most not in self._with_count:
            self._most = count


class TenantConnections:
    """Connections by the tenant of the latest request of each; "" has the operator's, which nothing bounds.

    Without a limit of its own a tenant has at most as many as it leaves to others, as of the memory for bodies, and one
    always. Connections without a request of a key count for none: a full server closes these first. One that has had
    requests of several tenants is a proxy's: it counts while it has a request. A step is O(1).
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._owners: dict[Closable, str] = {}
        self._only: dict[Closable, str | None] = {}  # the tenant of all its requests; None: of several
        self._idle: dict[str, dict[Closable, None]] = {}  # by tenant, longest first
        self.counts = Counter[str]()

    def take(self, connection: Closable, tenant: str, most: int | None = None) -> bool:
        """Whether it is this tenant's now. Otherwise it is of none."""
        if self._owners.get(connection) == tenant:
            return True
        self.release(connection)
        if tenant and not self._has_place(tenant, most):
            return False
        if self._only.setdefault(connection, tenant) != tenant:
            self._only[connection] = None
        self._owners[connection] = tenant
        self.counts[tenant] += 1
        return True

    def _has_place(self, tenant: str, most: int | None) -> bool:
        num = self.counts[tenant] + 1
        return num <= (max(1, self._max_open - len(self._owners) - 1) if most is None else most)

    def release(self, connection: Closable) -> None:
        self.set_busy(connection)
        tenant = self._owners.pop(connection, None)
        if tenant is not None:
            self.counts[tenant] -= 1
            if not self.counts[tenant]:
                del self.counts[tenant]

    def forget(self, connection: Closable) -> None:
        """It is closed."""
        self.release(connection)
        self._only.pop(connection, None)

    def set_idle(self, connection: Closable) -> None:
        """It waits for its next request."""
        self.set_busy(connection)
        if self._only.get(connection, "") is None:
            self.release(connection)
        elif tenant := self._owners.get(connection):
            self._idle.setdefault(tenant, {})[connection] = None

    def set_busy(self, connection: Closable) -> None:
        tenant = self._owners.get(connection, "")
        idle = self._idle.get(tenant, {})
        if connection in idle:
            del idle[connection]
            if not idle:
                del self._idle[tenant]

    def oldest_idle(self, tenant: str) -> Closable | None:
        return next(iter(self._idle.get(tenant, ())), None)

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is counted is what is there."""
        assert self.counts == Counter(self._owners.values())
        assert self._owners.keys() <= self._only.keys()
        assert all(self._owners.get(each) == tenant for tenant, idle in self._idle.items() for each in idle)


class HeldAnswers:
    """Bytes by connection. While all are more than `max_bytes`, of the client that has most together the connection of
    which nothing was read for longest is cut off: clients that do not read, or ask for much, end no answer of another
    that does. One alone has room. cut: is told a connection that is to be closed."""

    def __init__(self, max_bytes: int, cut: Callable[[Closable], None]) -> None:
        self._max_bytes = max_bytes
        self._cut = cut
        self._held: dict[Closable, tuple[str, int]] = {}  # client and bytes; first what was not read for longest
        self._by_client = Counter[str]()

    def hold(self, connection: Closable, client: str, num_bytes: int) -> None:
        """So many are held now, until `release`."""
        self._set(connection, client, num_bytes)
        while len(self._held) > 1 and self._by_client.total() > self._max_bytes:
            (largest, _), *_ = self._by_client.most_common(1)
            cut = next(each for each, (owner, _) in self._held.items() if owner == largest)
            self.release(cut)
            self._cut(cut)

    def touch(self, connection: Closable) -> None:
        """Its client has read something."""
        if connection in self._held:
            self._held[connection] = self._held.pop(connection)

    def release(self, connection: Closable) -> None:
        client, num_bytes = self._held.pop(connection, ("", 0))
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]

    def _set(self, connection: Closable, client: str, num_bytes: int) -> None:
        self.release(connection)
        self._held[connection] = client, num_bytes
        self._by_client[client] += num_bytes


class SharedBytes:
    """Memory that clients share: beyond one request, a client holds at most as much as it leaves free.

    So one client has at most a half, another one half of what is left, and the next one always finds room (dynamic
    thresholds: Choudhury and Hahne, 1998).
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_held = 0
        self._by_client: Counter[str] = Counter()

    def hold(self, client: str, num_bytes: int, num_own: int, num_kept: int = 0) -> bool:
        """Count `num_bytes` more of a request that holds `num_own`; False without room. num_kept: stay free."""
        num_free = self.max_bytes - self.num_held - num_bytes
        num_of_client = self._by_client[client]
        is_only_request = num_of_client == num_own
        if num_free < num_kept or not (is_only_request or num_of_client + num_bytes <= num_free):
            return False
        self.num_held += num_bytes
        self._by_client[client] += num_bytes
        return True

    def release(self, client: str, num_bytes: int) -> None:
        self.num_held -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


def account_of(caller: Caller | None, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Among whose a request's bytes count; None: its caller has no key, and its body is not kept."""
    if caller is not KEYLESS:
        return None if caller is None else caller.account
    return source_of(forwarded_for(peer, headers) or peer)


def forwarded_for(peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Whose request a proxy on this machine forwards: the last address of X-Forwarded-For that is not this machine's.

    What other machines send is not believed. What is no address ends the search, and so do MAX_PROXIES. A zone, behind
    a %, may be any text, and is left out.
    """
    if not _is_loopback(peer):
        return None
    listed = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
    for text in reversed(listed.rsplit(",", MAX_PROXIES)[-MAX_PROXIES:]):
        try:
            address = ipaddress.ip_address(text.strip())
        except ValueError:
            return None
        if not address.is_loopback:
            return str(ipaddress.ip_address(address.packed))
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def too_many_bodies() -> ApiError:
    text = "the bodies of this client's requests, or of all requests, are too large at this moment; try again later"
    return ApiError(text, status=503, kind="overloaded_error", code="too_many_bodies")
