"""How the router learns of its replicas: polls of health and load, now and then of memory, and their events.

    GET /health       each poll: whether it takes requests; the probe of a half-open breaker
    GET /metrics      each poll: running and waiting requests, used KV, the base model's name
    GET /v1/models    with the memory: its other names
    GET /v1/adapters  when first seen, after a doubt, and every LIST_EVERY_S: which adapters there are (the same key)
    GET /version      with it: which process says so
    GET /v1/memory    every MEMORY_EVERY_S: tiers of the adapters used last, room (an admin's key, where there are keys)
    GET /v1/events    one stream: what was evicted, unloaded or switched since (the same)

Every answer is bounded in bytes and in time. Without the key of an admin the router learns from its own requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from loraplex.core import Tier
from loraplex.router.connection import UNREADABLE, Answer, LostError, NotSentError
from loraplex.router.names import Card
from loraplex.router.needs import MAX_NAME_CHARS
from loraplex.router.replica import Load, Replica
from loraplex.router.restoring import restore
from loraplex.router.settings import RouteSettings
from loraplex.routing.known import MAX_KNOWN_ADAPTERS

_log = logging.getLogger("loraplex.router")

MAX_HEALTH_BYTES = 2**16
MAX_METRICS_BYTES = 4 * 2**20
MAX_MEMORY_BYTES = 4 * 2**20
MAX_EVENT_BYTES = 2**18
MEMORY_EVERY_S = 10.0
MEMORY_PATH = "/v1/memory?adapters=true&top=1000&order=last_used"
LIST_EVERY_S, LIST_AGAIN_S = 60.0, 10.0
"""LIST_AGAIN_S: at most so often for a change that was not this router's."""

LIST_PAGE = 1000
LIST_PATH = f"/v1/adapters?limit={LIST_PAGE}&after="
MAX_LIST_BYTES = 16 * 2**20
LIST_TIMEOUT_S = 30.0
MAX_BASE_NAMES = 64
MODELS_PATH = f"/v1/models?limit={MAX_BASE_NAMES}"
"""Base models come first."""

EVENT_KINDS = ("load", "evict", "drop", "unload", "switch", "restart")
EVENTS_PATH = "/v1/events?" + "&".join(f"kind={kind}" for kind in EVENT_KINDS)

_LOADS = re.compile(
    rb"^(vllm:num_requests_running|vllm:num_requests_waiting|vllm:kv_cache_usage_perc|loraplex:adapters|"
    rb"loraplex:adapters_by_need)"
    rb"(?:\{([^\n]*)\})? ([0-9.eE+-]{1,32})$",
    re.MULTILINE,
)
TIERS = frozenset(tier.value for tier in Tier)
_MODEL_NAME = re.compile(rb'model_name="([^"\\\n]{1,256})"')


class _Card(msgspec.Struct, gc=False):
    name: str
    tier: str


class _KV(msgspec.Struct):
    blocks: int = 0


class _TierCard(msgspec.Struct, gc=False):
    tier: str
    pressure: float = 0.0


class _Memory(msgspec.Struct):
    kv: _KV = msgspec.field(default_factory=_KV)
    tiers: list[_TierCard] = []
    top_adapters: list[_Card] | None = None


class _Model(msgspec.Struct, gc=False):
    id: str
    parent: str | None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Cards(msgspec.Struct):
    data: list[Card]
    has_more: bool = False


class _Details(msgspec.Struct, gc=False):
    tier: msgspec.Raw = msgspec.Raw(b"")


class _Event(msgspec.Struct, gc=False):
    kind: str
    adapter: str | None = None
    details: _Details = msgspec.field(default_factory=_Details)


class Others(Protocol):
    """What the fleet says to the watcher of one replica."""

    def shared_with(self, new: Replica) -> Iterable[Card]:
        """What all others have, for one that was not there when the router started."""
        ...

    def agree_on(self, replica: Replica) -> None:
        """A new process is to have what the others have now, where that is another version."""
        ...

    def note_gone(self, names: Iterable[str]) -> None:
        """What was unloaded at a replica; where none has it any more it does not come back with one that is away."""
        ...


class Watcher:
    """Follows one replica until it is cancelled."""

    def __init__(
        self,
        replica: Replica,
        settings: RouteSettings,
        clock: Callable[[], float] = time.monotonic,
        others: Others | None = None,
    ) -> None:
        self._replica = replica
        self._others = others
        self._settings = settings
        self._clock = clock
        self._memory_due_s = -math.inf
        self._may_read_memory = True
        self._list_due_s = -math.inf
        self._list_read_s = -math.inf
        self._restoring: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Polls, and the stream of events beside them."""
        following = asyncio.ensure_future(self._follow())
        try:
            while True:
                await self.poll()
                await asyncio.sleep(self._settings.poll_interval_s)
        finally:
            tasks = [task for task in (following, self._restoring) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def poll(self) -> None:
        """One look, unless the breaker is open."""
        replica, now_s = self._replica, self._clock()
        if not replica.breaker.may_probe(now_s):
            return
        was_closed = replica.breaker.is_closed
        try:
            async with asyncio.timeout(2 * self._settings.connect_timeout_s):
                status, health = await replica.ask("/health", MAX_HEALTH_BYTES)
                is_ready = status == 200
                if is_ready:
                    replica.shares_names = _has_database(health)
        except (NotSentError, LostError, TimeoutError) as error:
            if isinstance(error, NotSentError) and error.is_own:
                return
            self._fail(was_closed, str(error) or "it did not answer a poll in time")
            return
        if not is_ready:
            replica.is_ready = False
            self._fail(was_closed, f"its health is {status}")
            return
        if not was_closed:
            self._memory_due_s, self._may_read_memory = -math.inf, True
        await self._read_load()
        if self._may_read_memory and now_s >= self._memory_due_s:
            self._memory_due_s = now_s + MEMORY_EVERY_S
            await self._read_memory()
        if (
            self._may_read_memory
            and not replica.shares_names
            and (replica.names.is_doubtful or now_s >= self._list_due_s)
        ):
            await self._read_names(now_s)
        replica.breaker.succeed()
        replica.is_ready = replica.was_open = True
        if not was_closed:
            _log.info("replica %s takes requests", replica.name)
        if replica.names.to_do and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.ensure_future(restore(replica))

    def _fail(self, was_closed: bool, reason: str) -> None:
        self._replica.fail()
        if was_closed and not self._replica.breaker.is_closed:
            _log.warning("replica %s takes no requests: %s", self._replica.name, reason)

    async def _read_load(self) -> None:
        """A page that needs a key (--guard-metrics) says nothing of the load; without a page the last one grows old."""
        num_own = self._replica.num_in_flight
        try:
            async with asyncio.timeout(2 * self._settings.connect_timeout_s):
                status, page = await self._replica.ask("/metrics", MAX_METRICS_BYTES)
        except (NotSentError, LostError, TimeoutError):
            return
        lines = _LOADS.findall(page) if status == 200 else []
        found = {name: _number(value) for name, _, value in lines}
        names = [name for _, labels, _ in lines for name in _MODEL_NAME.findall(labels)]
        if len(self._replica.base_names) < MAX_BASE_NAMES:
            self._replica.base_names |= {name.decode(errors="replace") for name in names[:1]}
        self._replica.load = Load(
            self._clock(),
            num_running=int(found.get(b"vllm:num_requests_running", 0.0)),
            num_waiting=int(found.get(b"vllm:num_requests_waiting", 0.0)),
            num_own=num_own,
            kv_used_share=min(1.0, found[b"vllm:kv_cache_usage_perc"])
            if b"vllm:kv_cache_usage_perc" in found
            else None,
        )
        held = self._replica.names.held
        num_by_need = found.get(b"loraplex:adapters_by_need", 0.0)  # they come and go, and are in no list
        if held is not None and found.get(b"loraplex:adapters", len(held) + num_by_need) != len(held) + num_by_need:
            self._read_names_soon()

    def _read_names_soon(self) -> None:
        self._list_due_s = min(self._list_due_s, self._list_read_s + LIST_AGAIN_S)

    async def _read_names(self, now_s: float) -> None:
        """All of them; a list beside which a verb or a start came is read again at the next poll."""
        replica, names = self._replica, self._replica.names
        before = names.version
        self._list_read_s, self._list_due_s = now_s, now_s + LIST_EVERY_S
        with contextlib.suppress(NotSentError, LostError, TimeoutError, *UNREADABLE):
            async with asyncio.timeout(LIST_TIMEOUT_S):
                instance = await replica.instance()
                listed = await self._listed()
                is_whole = listed is not None and bool(instance) and instance == await replica.instance()
            if listed is None or not is_whole or names.version != before:
                return
            for card in self._others.shared_with(replica) if self._others is not None and names.is_new else ():
                if card.name not in listed:
                    names.owe(card.name, card)
            has_restarted, gone = names.learn(instance, listed)
            if self._others is not None:
                self._others.note_gone(gone)
                self._others.agree_on(replica)
            if has_restarted:
                replica.known.forget()
                text = "replica %s was started again: %d adapters, %d are to be loaded or unloaded as before"
                _log.info(text, replica.name, len(listed), len(names.to_do))

    async def _listed(self) -> dict[str, Card] | None:
        """None: it does not say, or there are too many to keep."""
        found: dict[str, Card] = {}
        after, num_seen = "", 0
        while num_seen <= MAX_KNOWN_ADAPTERS:
            status, body = await self._replica.ask(LIST_PATH + quote(after, safe=""), MAX_LIST_BYTES)
            if status != 200:
                return None
            page = msgspec.json.decode(body, type=_Cards)
            kept = (card for card in page.data if len(card.name) <= MAX_NAME_CHARS and not card.is_by_need)
            found |= {card.name: card for card in kept}
            num_seen += len(page.data)
            if not page.has_more or not page.data or page.data[-1].name <= after:
                return found
            after = page.data[-1].name
        return None

    async def _read_memory(self) -> None:
        """What is wrong with it is no reason to send a replica no requests."""
        with contextlib.suppress(NotSentError, LostError, TimeoutError, *UNREADABLE):
            async with asyncio.timeout(2 * self._settings.connect_timeout_s):
                status, page = await self._replica.ask(MEMORY_PATH, MAX_MEMORY_BYTES)
            if status in (401, 403, 404):
                self._may_read_memory = False
                _log.info("replica %s shows its memory to an admin's key alone (%d)", self._replica.name, status)
            if status == 200:
                self._learn(msgspec.json.decode(page, type=_Memory))
            async with asyncio.timeout(2 * self._settings.connect_timeout_s):
                status, page = await self._replica.ask(MODELS_PATH, MAX_MEMORY_BYTES)
            if status == 200:
                models = msgspec.json.decode(page, type=_Models).data
                names = (model.id for model in models if model.parent is None and len(model.id) <= MAX_NAME_CHARS)
                self._replica.base_names = frozenset(itertools.islice(names, MAX_BASE_NAMES))

    def _learn(self, memory: _Memory) -> None:
        replica = self._replica
        replica.num_kv_blocks = memory.kv.blocks or None
        pressures = [each.pressure for each in memory.tiers if each.tier == Tier.DEVICE]
        replica.adapter_room = 1.0 - min(1.0, max(0.0, pressures[0])) if pressures else 1.0
        cards = reversed(memory.top_adapters or ())  # used last: put last
        replica.known.learn_tiers(
            (card.name, Tier(card.tier)) for card in cards if card.tier in TIERS and len(card.name) <= MAX_NAME_CHARS
        )

    # ----------------------------------------------------------------------------------------------------------- events

    async def _follow(self) -> None:
        """The stream of events, opened again when it ends; a pause between, whatever its end was."""
        while True:
            with contextlib.suppress(NotSentError, LostError, *UNREADABLE):
                if self._replica.breaker.is_closed and self._may_read_memory:
                    await self._follow_once()
            await asyncio.sleep(self._settings.poll_interval_s)

    async def _follow_once(self) -> None:
        answer = await self._replica.stream(EVENTS_PATH)
        try:
            if answer.status == 200:
                async for data in _data_of(answer):
                    self._apply(msgspec.json.decode(data, type=_Event))
        finally:
            answer.close()

    def _apply(self, event: _Event) -> None:
        known = self._replica.known
        held = self._replica.names.held
        if event.kind == "switch" or (event.kind == "unload" and (held is None or event.adapter in held)):
            self._read_names_soon()
        if event.kind == "restart":
            known.forget()
        elif event.adapter is not None and len(event.adapter) <= MAX_NAME_CHARS:
            tier = bytes(event.details.tier).strip(b'"').decode(errors="replace")
            known.learn_event(event.kind, event.adapter, tier)


async def _data_of(answer: Answer) -> AsyncIterator[bytes]:
    """The data lines of server-sent events that have an id. Raises LostError for one that does not end."""
    pending = bytearray()
    async for piece in answer.pieces():
        pending += piece
        *events, rest = bytes(pending).split(b"\n\n")
        pending = bytearray(rest)
        if len(pending) > MAX_EVENT_BYTES:
            raise LostError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for event in events:
            lines = event.split(b"\n")
            data = next((line[6:] for line in lines if line.startswith(b"data: ")), None)
            if data is not None and b"event: gap" not in lines:
                yield data


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value < 1e12 else 0.0


def _has_database(health: bytes) -> bool:
    try:
        return "database" in msgspec.json.decode(health, type=dict[str, Any])
    except UNREADABLE:
        return False
