"""GET /v1/memory: where the adapters and the KV cache are, how tight it is, and how it was."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from loraplex.adapters.registry import AdapterInfo, LoRARegistry, NameQuery
from loraplex.metrics import MemoryReport, MemorySample, RunnerReport, TierReport
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.adapter_schemas import AdapterCard
from loraplex.server.context import ServerContext
from loraplex.server.openapi import operation
from loraplex.server.responses import encode


class MemoryQuery(BaseModel):
    """Query of `GET /v1/memory`: with `adapters`, also the first `top` of them by `order`, the most first."""

    model_config = ConfigDict(extra="forbid")

    adapters: bool = False
    top: Annotated[int, Field(ge=1, le=1000)] = 20
    order: Literal["bytes", "last_used"] = "bytes"


class TierCard(msgspec.Struct, frozen=True):
    """`pressure`: the share of `max_bytes` that cannot be freed now, 0 to 1. `adapters`: contents, each once."""

    tier: str
    used_bytes: int
    max_bytes: int
    adapters: int
    pressure: float

    @classmethod
    def of(cls, tier: TierReport) -> TierCard:
        return cls(tier.tier, tier.used_bytes, tier.max_bytes, tier.num_adapters, tier.pressure)


class ChunkCard(msgspec.Struct, frozen=True):
    """`chunks` neighbours of one owner: `kv`, `adapters`, `free` or `fenced`."""

    owner: str
    chunks: int


class KVCard(msgspec.Struct, frozen=True):
    block_bytes: int
    blocks: int
    free_blocks: int
    used_bytes: int
    max_bytes: int


class QuarantineCard(msgspec.Struct, frozen=True):
    """`adapter` is null when the name is gone."""

    adapter_id: int
    adapter: str | None
    reason: str


class MergedCard(msgspec.Struct, frozen=True):
    """An adapter of the content that is merged into a copy of weights. `adapter` is null when the name is gone."""

    adapter_id: int
    adapter: str | None


class SampleCard(msgspec.Struct, frozen=True):
    """By tier, and `kv` and `system` where known."""

    time: float
    mode: str
    pressure: Mapping[str, float]
    used_bytes: Mapping[str, int]
    fragmentation: float

    @classmethod
    def of(cls, sample: MemorySample) -> SampleCard:
        return cls(sample.time_s, sample.mode.value, sample.pressure, sample.used_bytes, sample.fragmentation)


class RunnerCard(msgspec.Struct, frozen=True):
    """One of several runners. `message`: why it takes no requests. What follows is null while it does not answer."""

    runner: str
    device: str
    message: str
    running: int | None = None
    waiting: int | None = None
    mode: str | None = None
    tiers: list[TierCard] | None = None
    kv: KVCard | None = None

    @classmethod
    def of(cls, report: RunnerReport) -> RunnerCard:
        if (stats := report.stats) is None:
            return cls(report.name, report.device, report.message)
        return cls(
            report.name,
            report.device,
            report.message,
            stats.num_running,
            stats.num_waiting,
            stats.memory.mode.value,
            [TierCard.of(tier) for tier in stats.memory.tiers],
            _kv(stats.memory),
        )


class MemoryReply(msgspec.Struct, frozen=True):
    """Where there are several runners, `runners` has each, and the rest is of all together.

    Sizes are bytes, times Unix seconds, shares 0 to 1; `chunks` by address, `history` oldest first. found: requests of
    adapters since the engine started, by the tier that had them.
    """

    mode: str
    tiers: list[TierCard]
    pinned_bytes: int
    in_use_bytes: int
    retiring_bytes: int
    workspace_bytes: int
    adapters: int
    loading: int
    fragmentation: float
    chunk_bytes: int
    chunks: list[ChunkCard]
    chunks_by_owner: Mapping[str, int]
    kv: KVCard
    quarantined: list[QuarantineCard]
    counters: Mapping[str, float]
    history: list[SampleCard]
    merged: list[MergedCard]
    found: Mapping[str, int] = {}
    top_adapters: list[AdapterCard] | None = None
    object: str = "memory"
    runners: list[RunnerCard] | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(
        cls,
        report: MemoryReport,
        names: Mapping[int, str],
        adapters: Sequence[AdapterInfo] | None = None,
        runners: Sequence[RunnerReport] = (),
    ) -> MemoryReply:
        return cls(
            mode=report.mode.value,
            tiers=[TierCard.of(tier) for tier in report.tiers],
            pinned_bytes=report.pinned_bytes,
            in_use_bytes=report.in_use_bytes,
            retiring_bytes=report.retiring_bytes,
            workspace_bytes=report.workspace_bytes,
            adapters=report.num_adapters,
            loading=report.num_loading,
            fragmentation=report.fragmentation,
            chunk_bytes=report.chunk_bytes,
            chunks=[ChunkCard(run.owner, run.num_chunks) for run in report.chunks],
            chunks_by_owner=report.chunks_by_owner,
            kv=_kv(report),
            quarantined=[QuarantineCard(each, names.get(each), why) for each, why in report.quarantined.items()],
            counters=report.counters,
            history=[SampleCard.of(sample) for sample in report.history],
            merged=[MergedCard(each, names.get(each)) for each in report.merged],
            found=report.found,
            top_adapters=None if adapters is None else [AdapterCard.of(info) for info in adapters],
            runners=[RunnerCard.of(each) for each in runners] if runners else msgspec.UNSET,
        )


class MemoryRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["memory"], route_class=StrictRoute)
        router.add_api_route(
            "/v1/memory", self.memory, methods=["GET"], openapi_extra=operation(replies=(MemoryReply,), errors=(504,))
        )
        return router

    @requires(Access.ADMIN)
    async def memory(self, request: Request, query: Annotated[MemoryQuery, Query()]) -> Response:
        """Tiers, chunks and their owners, pressure, mode, history."""
        report = (await self._engine.stats()).memory
        registry = self._engine.registry
        adapters: list[AdapterInfo] | None = [] if query.adapters else None
        if query.adapters and registry is not None:
            adapters = await self._context.views.run_for(request, partial(_top_adapters, registry, query), 0)
        refs = {} if registry is None else registry.refs()
        names: dict[int, str] = {ref.adapter_id: ref.adapter_name for ref in refs.values()}
        runners = await self._engine.runner_reports() if self._engine.num_runners > 1 else ()
        return Response(encode(MemoryReply.of(report, names, adapters, runners)), media_type="application/json")


def _top_adapters(registry: LoRARegistry, query: MemoryQuery) -> list[AdapterInfo]:
    def key(info: AdapterInfo) -> tuple[float, str]:
        return (-info.nbytes if query.order == "bytes" else -info.last_used_time, info.ref.adapter_name)

    return heapq.nsmallest(query.top, registry.infos(NameQuery()), key)


def _kv(report: MemoryReport) -> KVCard:
    used = report.num_kv_blocks - report.num_free_kv_blocks
    return KVCard(
        report.kv_block_bytes,
        report.num_kv_blocks,
        report.num_free_kv_blocks,
        used * report.kv_block_bytes,
        report.num_kv_blocks * report.kv_block_bytes,
    )
