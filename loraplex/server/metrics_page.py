"""GET /metrics: a snapshot of the engine and the server's histograms in Prometheus' text format.

vLLM's names where it has one, so that dashboards and the Kubernetes gateway's inference extension work; own ones under
`loraplex:`. Counters are the engine's: one that starts again begins at zero, which Prometheus understands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from loraplex.adapters.registry import LoRARef
from loraplex.cpu import CpuUse
from loraplex.metrics import EngineStats, MemoryMode, MemoryReport, RunnerReport
from loraplex.server.connections import Connections
from loraplex.server.latency import LABELS, LatencyHistograms
from loraplex.server.telemetry.series import REST, RequestSeries
from loraplex.tenants.usage import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTED = {
    "requests": ("requests", "Prompts that were admitted"),
    "errors": ("request_errors", "Prompts that ended in an error"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found"),
    "cached_tokens": ("cached_tokens", "Prompt tokens found"),
    "generated_tokens": ("generation_tokens", "Tokens drawn"),
    "waiting_s": ("waiting_seconds", "Seconds until the first token"),
}
"""Fields of `Counts`: the end of a series' name, and what it counts."""

MAX_ASKED = 20
"""Adapters in one question for their series: it needs no key, and each is a dozen lines."""

MAX_NAMES = 100
"""Of adapters in one label: a label of thousands would be a new long series at each scrape."""


class MetricsPage:
    """`histograms` is what requests are recorded in."""

    def __init__(
        self,
        model_name: str,
        connections: Connections | None = None,
        engine: str = "0",
        series: RequestSeries | None = None,
    ) -> None:
        self._connections = connections
        self._series = series
        self._labels = (model_name, engine)
        self._registry = CollectorRegistry()
        self.histograms = LatencyHistograms(self._registry, model_name, engine)

    def render(
        self,
        stats: EngineStats | None,
        refs: Mapping[str, LoRARef],
        num_events: Mapping[str, int] | None = None,
        num_skipped: int = 0,
        num_by_need: int = 0,
        reports: Sequence[RunnerReport] = (),
    ) -> bytes:
        """The page. `stats` is None when the engine does not answer; `refs` are the adapters by name; `reports` are the
        runners where there are several."""
        families = self.families(stats, refs, num_events, num_skipped, num_by_need, reports)
        page: bytes = generate_latest(_Page(families))
        return page

    def families(
        self,
        stats: EngineStats | None,
        refs: Mapping[str, LoRARef],
        num_events: Mapping[str, int] | None = None,
        num_skipped: int = 0,
        num_by_need: int = 0,
        reports: Sequence[RunnerReport] = (),
    ) -> list[Metric]:
        """What the page has, in its order."""
        text = "What happened to adapters and memory, by kind (GET /v1/events)."
        events = self._counters("loraplex:events", text, "kind", num_events or {})
        series = [] if self._series is None else self._series_families(self._series)
        own = [*self._registry.collect(), *self._families(stats, refs, num_skipped, num_by_need)]
        return [*own, *series, events, *self._runner_families(reports)]

    def render_adapters(self, names: Sequence[str]) -> bytes:
        """The series of these adapters alone, whatever else is shown; none of one that no request went through."""
        assert self._series is not None
        counts = self._series.adapters
        found = {name: known for name in names if (known := counts.of(name)) is not None}
        page: bytes = generate_latest(_Page([*self._counts("adapter", found), self._open_prompts(found)]))
        return page

    def _series_families(self, series: RequestSeries) -> Iterator[Metric]:
        adapters, tenants = series.adapters, series.tenants
        yield from self._counts("adapter", shown := adapters.shown(), adapters.rest)
        yield self._open_prompts(shown)
        yield from self._counts("tenant", tenants.shown(), tenants.rest)

    def _open_prompts(self, adapters: Iterable[str]) -> Metric:
        assert self._series is not None
        counts = self._series.num_open()
        text = "Prompts that wait or run, by adapter."
        return self._gauges(
            "loraplex:adapter_requests_open", text, "adapter", {each: counts[each] for each in adapters}
        )

    def _counts(self, label: str, shown: Mapping[str, Counts], rest: Counts | None = None) -> Iterator[Metric]:
        """A family for each of COUNTED. rest: of all others; left out while it is empty."""
        listed = dict(shown) if rest is None or rest.is_empty else {**shown, REST: rest}
        for counted, (name, text) in COUNTED.items():
            values = {each: getattr(counts, counted) for each, counts in listed.items()}
            yield self._counters(f"loraplex:{label}_{name}", f"{text}, by {label}.", label, values)

    def _families(
        self, stats: EngineStats | None, refs: Mapping[str, LoRARef], num_skipped: int, num_by_need: int
    ) -> Iterator[Metric]:
        yield self._gauge("loraplex:engine_up", "1 while the engine answers.", float(stats is not None))
        yield self._gauge("loraplex:adapters", "Names of adapters that resolve.", len(refs))
        text = "Those of them that requests loaded from an --adapter-source."
        yield self._gauge("loraplex:adapters_by_need", text, num_by_need)
        text = "Adapters of the command line that the server started without and that were not loaded since."
        yield self._gauge("loraplex:adapters_skipped", text, num_skipped)
        if self._connections is not None:
            yield from self._connection_families(self._connections)
        if stats is not None:
            yield from self._request_families(stats)
            yield from self._adapter_families(stats.memory)
            yield self._lora_info(stats, refs)
            yield from self._merged_families(stats.memory, refs)
            yield from self._memory_families(stats.memory)

    def _runner_families(self, reports: Sequence[RunnerReport]) -> Iterator[Metric]:
        """The others are of all runners together."""
        if not reports:
            return
        up = {each.name: float(each.is_serving) for each in reports}
        yield self._gauges("loraplex:runner_up", "1 while a runner takes requests.", "runner", up)
        released = {each.name: float(each.is_released) for each in reports}
        text = "1 while a runner is ended since the load does not need it."
        yield self._gauges("loraplex:runner_released", text, "runner", released)
        moved = {each.name: each.num_moved for each in reports}
        text = "Requests that moved from it to another runner."
        yield self._counters("loraplex:runner_requests_moved", text, "runner", moved)
        known = {each.name: each.stats for each in reports if each.stats is not None}
        running = {name: stats.num_running for name, stats in known.items()}
        yield self._gauges("loraplex:runner_requests_running", "Requests in its batch.", "runner", running)
        waiting = {name: stats.num_waiting for name, stats in known.items()}
        yield self._gauges("loraplex:runner_requests_waiting", "Requests that wait there.", "runner", waiting)
        used = {name: stats.memory.kv_cache_usage for name, stats in known.items()}
        yield self._gauges("loraplex:runner_kv_cache_usage", "Used share of its KV cache, 0 to 1.", "runner", used)
        drawn = {name: stats.num_generated_tokens for name, stats in known.items()}
        yield self._counters("loraplex:runner_generation_tokens", "Tokens that it drew.", "runner", drawn)

    def _connection_families(self, connections: Connections) -> Iterator[Metric]:
        yield self._gauge("loraplex:http_connections", "Open connections.", connections.num_open)
        yield self._gauge("loraplex:http_max_connections", "Connections that may be open.", connections.max_open)
        text = "Connections that the server refused or closed, by reason."
        yield self._counters("loraplex:http_connections_refused", text, "reason", connections.refused)
        text = "Bytes of the bodies of requests that are not over."
        yield self._gauge("loraplex:http_body_bytes", text, connections.body_bytes)

    def _request_families(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", stats.memory.kv_cache_usage
        )
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.num_prefix_queried_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.num_prefix_hit_tokens)
        yield self._counter(
            "vllm:num_preemptions", "Requests that were preempted and are computed again.", stats.num_preemptions
        )
        text = "Requests that made room for another adapter and kept their KV."
        yield self._counter("loraplex:num_pauses", text, stats.num_pauses)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens computed or found.", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens drawn.", stats.num_generated_tokens)
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.", stats.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens of those drafts.", stats.num_draft_tokens)
        text = "Tokens of drafts that were drawn as drafted, and went to requests."
        yield self._counter("vllm:spec_decode_num_accepted_tokens", text, stats.num_accepted_tokens)
        text = "Finished requests, by why they ended."
        yield self._counters("vllm:request_success", text, "finished_reason", stats.num_finished)
        text = "Waiting requests, by what they wait for."
        yield self._gauges("loraplex:requests_waiting_by_cause", text, "cause", stats.waiting_by_cause)
        text = "Requests that began to run, by what of their adapter they had waited for."
        yield self._counters("loraplex:requests_admitted", text, "waited_for", stats.num_admitted)
        text = "First and later tokens of tenants with a target for them, by whether they came in time."
        yield self._counters("loraplex:target_tokens", text, "outcome", stats.target_outcomes)
        times = stats.step_times
        yield self._counter("loraplex:steps", "Steps of the engine.", times.num_steps)
        yield self._counters("loraplex:step_seconds", "Seconds in steps, by part.", "part", times.seconds)
        text = "Calls that stock torch ran because no kernel covered them, by operator and reason."
        yield self._counters("loraplex:kernel_fallbacks", text, "operator", stats.kernel_fallbacks)
        text = "Decode steps that were replayed as CUDA graphs, with adapters and without."
        yield self._counters("loraplex:graph_steps", text, "kind", stats.graph_steps)
        text = "Steps that ran kernel by kernel beside CUDA graphs, by reason."
        yield self._counters("loraplex:eager_steps", text, "reason", stats.eager_steps)
        yield from self._cpu_families(stats.cpu)

    def _cpu_families(self, cpu: CpuUse) -> Iterator[Metric]:
        yield self._counter("loraplex:cpu_seconds", "Processor time of the threads that compute.", cpu.cpu_s)
        text = "Seconds that threads of the engine were ready to compute while others had the cores."
        yield self._counter("loraplex:cpu_wait_seconds", text, cpu.wait_s)
        text = "Seconds of threads that were left out because their cores were taken."
        yield self._counter("loraplex:cpu_left_out_seconds", text, cpu.left_out_s)
        text = "Times that a thread of the engine lost its core before it was done."
        yield self._counter("loraplex:cpu_preemptions", text, cpu.num_preemptions)
        yield self._gauge("loraplex:threads", "Threads that the kernels may use.", cpu.num_threads)
        yield self._gauge("loraplex:active_threads", "Threads that the last kernel used.", cpu.num_active)

    def _adapter_families(self, memory: MemoryReport) -> Iterator[Metric]:
        def counter(name: str, text: str, counted: str) -> Metric:
            return self._counter(name, text, memory.counters.get(counted, 0))

        text = "Adapters loaded to host memory, by what asked for them."
        yield self._counters("loraplex:adapter_loads", text, "cause", memory.loads)
        yield counter("loraplex:adapter_load_seconds", "Seconds spent loading adapters.", "load_seconds")
        yield counter("loraplex:adapter_load_failures", "Loads that failed.", "load_failures")
        yield counter("loraplex:adapter_promotions", "Host to device.", "promotions")
        yield counter("loraplex:adapter_hits", "Requests that found their adapter resident.", "hits")
        yield counter("loraplex:adapter_misses", "Requests that did not.", "misses")
        yield self._counters("loraplex:adapter_evictions", "Evictions, by tier and reason.", "cause", memory.evictions)
        room = {tier.tier: tier.max_bytes for tier in memory.tiers}
        yield self._gauges("loraplex:adapter_resident_bytes", "Bytes of adapters.", "tier", memory.resident_bytes)
        yield self._gauges("loraplex:adapter_capacity_bytes", "Room for adapters.", "tier", room)
        yield self._gauge("loraplex:adapter_pinned_bytes", "Bytes that are not evicted.", memory.pinned_bytes)

    def _memory_families(self, memory: MemoryReport) -> Iterator[Metric]:
        text = "Share of a tier's budget that cannot be freed now, 0 to 1."
        pressure = {tier.tier: tier.pressure for tier in memory.tiers}
        yield self._gauges("loraplex:memory_pressure", text, "tier", pressure)
        modes = {mode.value: float(mode is memory.mode) for mode in MemoryMode}
        yield self._gauges("loraplex:memory_mode", "1 for the mode that the memory is in.", "mode", modes)
        text = "Share of the adapters' chunks that perfect packing would give back, 0 to 1."
        yield self._gauge("loraplex:memory_fragmentation", text, memory.fragmentation)
        text = "Chunks of the arena, by owner."
        yield self._gauges("loraplex:memory_chunks", text, "owner", memory.chunks_by_owner)
        text = "Adapters that are not served because they gave odd results."
        yield self._gauge("loraplex:adapters_quarantined", text, len(memory.quarantined))

    def _lora_info(self, stats: EngineStats, refs: Mapping[str, LoRARef]) -> Metric:
        """vLLM's form: the adapters are in the labels (at most MAX_NAMES, and how many more), the value is the time."""
        names: dict[int, str] = {ref.adapter_id: ref.adapter_name for ref in refs.values()}
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of running and waiting requests.", labels=labels
        )
        listed = [
            _listed(sorted(names[each] for each in ids if each in names))
            for ids in (stats.running_adapter_ids, stats.waiting_adapter_ids)
        ]
        family.add_metric([str(stats.max_lora), *listed], time.time())
        return family

    def _merged_families(self, memory: MemoryReport, refs: Mapping[str, LoRARef]) -> Iterator[Metric]:
        merged = sorted(ref.adapter_name for ref in refs.values() if ref.adapter_id in memory.merged)
        text = "1 for the adapter that is merged into a copy of weights, under each of its names."
        yield self._gauges("loraplex:adapter_merged", text, "adapter", dict.fromkeys(merged[:MAX_NAMES], 1.0))
        text = "Copies of weights with an adapter merged that were made while the engine runs."
        yield self._counter("loraplex:adapter_merges", text, memory.count("merges"))
        text = "Steps that ran with the merged weights."
        yield self._counter("loraplex:merged_steps", text, memory.count("merged_steps"))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, text, {(): value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, text, {(): value})

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._family(GaugeMetricFamily, name, text, {(key,): value for key, value in values.items()}, label)

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._family(CounterMetricFamily, name, text, {(key,): value for key, value in values.items()}, label)

    def _family(
        self, kind: Callable[..., Metric], name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        family = kind(name, text, labels=(*LABELS, *labels))
        for own, value in values.items():
            family.add_metric((*self._labels, *own), value)
        return family


def _listed(names: Sequence[str]) -> str:
    more = [f"...+{len(names) - MAX_NAMES}"] if len(names) > MAX_NAMES else []
    return ",".join([*names[:MAX_NAMES], *more])


class _Page:
    """What `generate_latest` wants: something that can be collected."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
