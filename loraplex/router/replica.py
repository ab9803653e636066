"""One replica as the router knows it: its connections, its load, what it has in memory, whether it is well."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from loraplex.router.connection import UNREADABLE, Answer, Headers, Line, LostError, NotSentError
from loraplex.router.names import Names
from loraplex.router.settings import RouteSettings
from loraplex.routing import KnownMemory, Needs, Snapshot
from loraplex.routing.breaker import Breaker
from loraplex.server.verb_turns import VerbTurns

VERB_TIMEOUT_S = 300.0
VERSION_PATH = "/version"
MAX_VERSION_BYTES = 2**16


class _Version(msgspec.Struct):
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """What a poll found. num_own: requests that this router had there then."""

    seen_s: float
    num_running: int = 0
    num_waiting: int = 0
    num_own: int = 0
    kv_used_share: float | None = None


class Replica:
    """Belongs to one event loop. `key`: of the polls; a client's requests have its own."""

    def __init__(
        self, name: str, url: str, settings: RouteSettings, key: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.url = name, url
        self.breaker = Breaker()
        self.is_ready = False
        self.was_open = False  # since the router's start
        self.shares_names: bool | None = None  # with other servers, in a database; None: it has not said so yet
        self.load = Load(clock())
        self.num_kv_blocks: int | None = None
        self.adapter_room = 1.0
        self.base_names: frozenset[str] = frozenset()
        self.known = KnownMemory()
        self.names = Names()
        self.verb_turns = VerbTurns("verbs", 1, 1, VERB_TIMEOUT_S)
        self._num_by_tenant: Counter[str] = Counter()
        self._settings = settings
        self._key = key
        self._clock = clock
        self.num_in_flight = 0
        self._line = Line(f"replica {name}", url, settings.connect_timeout_s)

    def close(self) -> None:
        self._line.close()

    # ---------------------------------------------------------------------------------------------------------- sending

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes, silence_s: float | None = None
    ) -> Answer:
        """The answer as soon as it begins; it must be closed. Raises NotSentError, LostError.

        Neither cookies nor redirects nor proxies of the environment are looked at: what is sent is what is given.
        """
        longest_s = self._settings.answer_timeout_s if silence_s is None else silence_s
        return await self._line.send(method, target, headers, body, longest_s)

    async def ask(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        """A poll: status and body. Raises NotSentError, LostError (also for a longer body)."""
        answer = await self.send("GET", path.encode(), self.own_headers, b"", self._settings.connect_timeout_s)
        return answer.status, await answer.read(max_bytes)

    async def instance(self) -> str:
        """Which process it is; "" where it does not say. Raises NotSentError, LostError, and UNREADABLE's."""
        status, page = await self.ask(VERSION_PATH, MAX_VERSION_BYTES)
        return msgspec.json.decode(page, type=_Version).instance if status == 200 else ""

    async def has_denied(self, name: str, listed: str) -> bool:
        """Whether 404 for a name is the word of the process `listed`, which has it: the client may not see it.

        Another process raises a doubt. It is asked for names that are not there, too: how long a 404 takes does not
        say which ones there are.
        """
        if not listed:
            return False
        with contextlib.suppress(NotSentError, LostError, *UNREADABLE):
            if await self.instance() == listed:
                return self.names.instance == listed and self.names.has(name)
        self.names.is_doubtful = True
        return False

    async def stream(self, path: str) -> Answer:
        """The answer to a poll that goes on. It must be closed."""
        return await self.send("GET", path.encode(), self.own_headers, b"")

    @property
    def own_headers(self) -> Headers:
        """Of what the router asks and does by itself."""
        return [(b"authorization", f"Bearer {self._key}".encode("latin-1"))] if self._key else []

    # --------------------------------------------------------------------------------------------------------- learning

    @contextlib.contextmanager
    def holding(self, needs: Needs) -> Iterator[None]:
        """A request is there while the block runs."""
        self.num_in_flight += 1
        if needs.tenant is not None:
            self._num_by_tenant[needs.tenant] += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if needs.tenant is not None:
                self._num_by_tenant[needs.tenant] -= 1
                if not self._num_by_tenant[needs.tenant]:
                    del self._num_by_tenant[needs.tenant]

    def fail(self) -> None:
        was_closed = self.breaker.is_closed
        self.breaker.fail(self._clock())
        self.names.is_doubtful = True
        if was_closed and not self.breaker.is_closed:
            self.known.forget()

    def snapshot(self) -> Snapshot:
        """Requests of others are those of the last poll; the router's own are counted now."""
        load = self.load
        num_all = max(0, load.num_running + load.num_waiting - load.num_own) + self.num_in_flight
        num_waiting = min(load.num_waiting, num_all)
        num_free = None
        if self.num_kv_blocks is not None and load.kv_used_share is not None:
            num_free = int(self.num_kv_blocks * (1.0 - load.kv_used_share))
        return Snapshot(
            name=self.name,
            seen_s=load.seen_s,
            num_waiting=num_waiting,
            num_running=num_all - num_waiting,
            max_requests=self._settings.replica_requests,
            num_free_kv_blocks=num_free,
            tiers=self.known.tiers,
            prefix_digests=self.known.prefixes.keys(),
            num_by_tenant=self._num_by_tenant,
            adapter_room=self.adapter_room,
            is_healthy=self.breaker.is_closed and self.is_ready,
        )
