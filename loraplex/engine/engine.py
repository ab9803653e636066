"""The heart: one engine, synchronous. A step is schedule, run, commit.

Nothing here knows of names, files or sockets: requests are token ids, adapters are ids with a digest.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import EngineInfo, FinishReason, Request, TokenOutput
from loraplex.engine.adapter_opener import read_spec
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.model_runner import ModelRunner
from loraplex.engine.sampler import Sampler
from loraplex.engine.schedule_plan import RequestStatus, SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_recorder import StepRecorder
from loraplex.errors import ConfigError, EngineError, EngineOverloadedError, LoraDisabledError
from loraplex.events import EngineEvent, EventLog
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.profiled import profiled
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.arena import Arena, Owner
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.stats import MemoryStats
from loraplex.metrics import EngineStats, MemoryReport, StepTimes
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model, resolve_model
from loraplex.models.packed_cache import PackedCache, default_folder
from loraplex.performance.steps import StepProfile
from loraplex.profiler import STEP_PARTS, Profiler

logger = logging.getLogger(__name__)

MAX_DEFAULT_MODEL_LEN = 8192
CHUNK_BYTES = 1 << 20
Progress = Callable[[str, int, int], None]


class EngineCore:
    """One model with its memory, its queue and its adapters. Not thread-safe but for `adapters`, whose verbs any thread may call.

    `is_stalled` says that the last step had nothing to run although requests wait (for an adapter's load, say).
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: ModelRunner,
        blocks: KVBlockAllocator,
        adapters: LoRAModelManager | None,
        max_waiting_requests: int,
        profiler: Profiler,
        events: EventLog,
    ) -> None:
        self.info = info
        self.is_stalled = False
        self._scheduler = scheduler
        self._runner = runner
        self._blocks = blocks
        self._adapters = adapters
        self._max_waiting_requests = max_waiting_requests
        self._num_steps = 0
        self._profiler = profiler
        self._events = events
        self._recorder: StepRecorder | None = None

    def step(self) -> list[TokenOutput]:
        """Run one step; returns what it added to which request."""
        plan = self._schedule()
        if self.is_stalled:
            return list(plan.failed)
        try:
            tokens = self._run(plan)
        except Exception as error:
            logger.exception("a step failed; its %d requests end", len(plan.sequences))
            failure = EngineError(f"the step of this request failed: {type(error).__name__}: {error}")
            return [*plan.failed, *self._scheduler.fail(plan, failure)]
        return [*plan.failed, *self._commit(plan, tokens)]

    def _schedule(self) -> SchedulePlan:
        if self._recorder is not None:
            self._recorder.begin(self._profiler.seconds)
        with self._profiler.part("schedule"):
            if self._adapters is not None:
                self._adapters.poll()
            plan = self._scheduler.schedule()
        self.is_stalled = not plan.sequences
        self._num_steps += not self.is_stalled
        return plan

    def _run(self, plan: SchedulePlan) -> Mapping[str, SampledToken]:
        with self._memory_in_use(plan.step_id):
            return self._runner.launch(plan).result()

    def _commit(self, plan: SchedulePlan, tokens: Mapping[str, SampledToken]) -> list[TokenOutput]:
        with self._profiler.part("commit"):
            outputs = self._scheduler.commit(plan, tokens)
        if self._recorder is not None:
            self._recorder.end(plan, self._profiler.seconds, STEP_PARTS)
        return outputs

    @contextlib.contextmanager
    def _memory_in_use(self, step_id: int) -> Iterator[None]:
        """While a step runs, the memory of adapters that were evicted meanwhile is not handed on."""
        if self._adapters is None:
            yield
            return
        self._adapters.step_launched(step_id)
        try:
            yield
        finally:
            self._adapters.step_committed(step_id)

    # --------------------------------------------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> list[TokenOutput]:
        """Queue a request. What cannot even wait is answered at once."""
        if self._scheduler.num_waiting >= self._max_waiting_requests:
            error = EngineOverloadedError(f"{self._scheduler.num_waiting} requests wait already; try again later")
            return [TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error.to_payload())]
        self._scheduler.add(request)
        return []

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End requests; unknown ids are passed over."""
        return [output for output in map(self._scheduler.abort, request_ids) if output is not None]

    def abort_adapter(self, adapter_id: int) -> list[TokenOutput]:
        return self._scheduler.abort_adapter(adapter_id)

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    # --------------------------------------------------------------------------------------------------------- adapters

    @property
    def adapters(self) -> LoRAModelManager:
        """The adapters' memory. Raises LoraDisabledError in an engine without LoRA."""
        if self._adapters is None:
            raise LoraDisabledError("LoRA is off in this engine")
        return self._adapters

    # ----------------------------------------------------------------------------------------------------- see and end

    def stats(self) -> EngineStats:
        scheduler, blocks = self._scheduler, self._blocks
        stats = EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_by_cause=scheduler.waiting_by_cause(),
            kv_cache_usage=1 - blocks.num_free_blocks / blocks.num_blocks,
            num_kv_blocks=blocks.num_blocks,
            num_prefix_queried_tokens=blocks.num_queried_tokens,
            num_prefix_hit_tokens=blocks.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_finished=dict(scheduler.num_finished),
            num_admitted=dict(scheduler.num_admitted),
            running_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.RUNNING))),
            waiting_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.WAITING))),
            step_times=self._step_times(),
        )
        return stats if self._adapters is None else _with_memory(stats, self._adapters.stats(), self._adapters.table)

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What happened since the last call, oldest first."""
        return self._events.take()

    def memory_report(self) -> MemoryReport:
        """The memory of adapters and KV cache as it is now."""
        report = MemoryReport() if self._adapters is None else self._adapters.report()
        return replace(
            report,
            kv_block_bytes=self._runner.kv_block_bytes,
            num_kv_blocks=self._blocks.num_blocks,
            num_free_kv_blocks=self._blocks.num_free_blocks,
        )

    def start_profile(self) -> None:
        """Record every step from now on; the kernels one by one where the backend can tell. What was recorded before is forgotten."""
        self._runner.measure_operators(True)
        self._recorder = StepRecorder()

    def stop_profile(self) -> StepProfile:
        """What was recorded; nothing when no profile was started."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return StepProfile()
        self._runner.measure_operators(False)
        return recorder.profile()

    def _step_times(self) -> StepTimes:
        seconds = self._profiler.seconds
        return StepTimes(self._num_steps, {part: seconds.get(part, 0.0) for part in STEP_PARTS})

    def check_integrity(self) -> None:
        """Assert that queues, KV blocks and adapter memory are consistent; when idle, that every reference has returned."""
        self._scheduler.check_integrity()
        self._blocks.check_integrity()
        if self._adapters is not None:
            self._adapters.check_integrity()
        if not self.has_unfinished:
            assert self._blocks.num_free_blocks == self._blocks.num_blocks, "KV blocks did not return"
            running = [r.adapter_id for r in self._adapters.list_adapters() if r.num_running] if self._adapters else []
            assert not running, f"adapters {running} are referenced by no request"

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()


def _with_memory(stats: EngineStats, memory: MemoryStats, table: SlotTable) -> EngineStats:
    return replace(
        stats,
        adapter_loads=memory.counters.loads,
        adapter_load_s=memory.counters.load_s,
        num_adapter_load_failures=memory.counters.num_load_failures,
        num_adapter_promotions=memory.counters.num_promotions,
        num_adapter_hits=memory.counters.num_hits,
        num_adapter_misses=memory.counters.num_misses,
        adapter_evictions=memory.counters.evictions,
        resident_bytes={tier.tier.value: tier.used_bytes for tier in (memory.device, memory.host)},
        capacity_bytes={tier.tier.value: tier.max_bytes for tier in (memory.device, memory.host)},
        pinned_bytes=memory.pinned_bytes,
        num_adapters=memory.num_adapters,
        max_lora=table.capacity,
    )


# ------------------------------------------------------------------------------------------------------------- building


def build_engine(
    config: EngineConfig, progress: Progress | None = None, profiler: Profiler | None = None
) -> EngineCore:
    """Load the model and give it memory. Raises ConfigError or ModelError, naming the setting or the file.

    progress(what, done, total) is called while weights are read. With a profiler, kernels are measured one by one.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    path = resolve_model(config.model, config.revision)
    model_config = ModelConfig.from_dir(path)
    dtype_name = model_config.effective_dtype(config.dtype)
    dtype = getattr(torch, dtype_name)
    backend = _backend(config, device, profiler)
    model = _load_model(config, path, model_config, dtype, backend, device, progress)
    kv_cache_dtype = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    memory = _Memory.plan(config, model_config, model, getattr(torch, kv_cache_dtype), device)
    blocks = KVBlockAllocator(memory.num_blocks, config.block_size, is_prefix_caching=config.enable_prefix_caching)
    events = EventLog()
    adapters = (
        None if config.lora is None else _build_manager(config.lora, model, backend, memory.arena, blocks, events)
    )
    scheduler = Scheduler(
        blocks,
        adapters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=memory.max_model_len,
        aging_steps=1 if config.lora is None else config.lora.aging_steps,
    )
    builder = BatchBuilder(blocks, config.max_num_seqs, device)
    profiler = profiler or Profiler()
    runner = ModelRunner(model, memory.kv, builder, Sampler(model_config.vocab_size, backend), profiler)
    info = EngineInfo(
        model_path=str(path),
        architecture=model_config.model_type,
        dtype=dtype_name,
        backend=backend.name,
        vocab_size=model_config.vocab_size,
        max_model_len=memory.max_model_len,
        num_kv_blocks=memory.num_blocks,
        block_size=config.block_size,
        adapter_memory_bytes=0 if config.lora is None else config.lora.adapter_memory_bytes,
        targets=model.lora_targets() if config.lora is not None else (),
        kv_cache_dtype=kv_cache_dtype,
        backend_description=backend.description,
    )
    return EngineCore(info, scheduler, runner, blocks, adapters, config.max_waiting_requests, profiler, events)


def _backend(config: EngineConfig, device: torch.device, profiler: Profiler | None) -> KernelBackend:
    backend = get_backend(config.lora_backend, device)
    logger.info("kernels: %s", backend.description)
    if config.quantization is not None and config.quantization not in backend.quantizations:
        raise ConfigError(
            f"quantization {config.quantization} is not in the {backend.name} kernels, and these run: {backend.description}; "
            "use native kernels on a CPU, or drop it"
        )
    return backend if profiler is None else profiled(backend, profiler)


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    dtype: torch.dtype,
    backend: KernelBackend,
    device: torch.device,
    progress: Progress | None,
) -> Decoder:
    return load_model(
        path,
        model_config,
        dtype,
        device,
        config.load_format,
        config.seed,
        backend,
        config.lora is not None,
        None if progress is None else lambda done, total: progress("weights", done, total),
        config.quantization,
        _packed_cache(config, path, str(dtype).removeprefix("torch."), backend),
    )


def _packed_cache(config: EngineConfig, path: Path, dtype_name: str, backend: KernelBackend) -> PackedCache | None:
    if backend.packed_format is None or config.load_format != "auto" or config.packed_cache_dir == "none":
        return None
    folder = default_folder() if config.packed_cache_dir is None else Path(config.packed_cache_dir)
    form = [dtype_name, *([config.quantization] if config.quantization else []), backend.packed_format]
    return PackedCache(folder, path, form)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


@dataclass(frozen=True)
class _Memory:
    """The arena with the KV cache's share taken out of it."""

    arena: Arena
    kv: torch.Tensor
    num_blocks: int
    max_model_len: int

    @classmethod
    def plan(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Decoder,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> _Memory:
        """The KV cache takes whole chunks of `kv_cache_memory_bytes`; adapters have the rest."""
        block_bytes = math.prod(model.kv_shape(1, config.block_size)) * kv_dtype.itemsize
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        max_model_len = _max_model_len(config, model_config, num_blocks * config.block_size)
        most = config.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(num_blocks, most)
        blocks_per_chunk = max(1, min(num_blocks, CHUNK_BYTES // block_bytes))
        num_kv_chunks = num_blocks // blocks_per_chunk
        chunk_bytes = blocks_per_chunk * block_bytes
        arena = Arena(num_kv_chunks * chunk_bytes + _adapter_bytes(config.lora, device), chunk_bytes, device)
        chunks = arena.lend(Owner.KV, num_kv_chunks)
        assert chunks is not None
        num_blocks = num_kv_chunks * blocks_per_chunk
        kv = arena.bytes_of(chunks).view(kv_dtype).view(model.kv_shape(num_blocks, config.block_size))
        return cls(arena, kv, num_blocks, min(max_model_len, num_blocks * config.block_size))


def _adapter_bytes(lora: LoRAConfig | None, device: torch.device) -> int:
    """On a CPU host and device are one memory, and the host budget bounds both."""
    if lora is None:
        return 0
    return max(lora.host_memory_bytes, lora.adapter_memory_bytes) if device.type == "cpu" else lora.adapter_memory_bytes


def _max_model_len(config: EngineConfig, model_config: ModelConfig, kv_tokens: int) -> int:
    wanted, allowed = config.max_model_len, model_config.max_model_len
    if wanted is None:
        wanted = min(allowed, MAX_DEFAULT_MODEL_LEN, kv_tokens)
    if wanted > allowed:
        raise ConfigError(f"max_model_len is {wanted}, the model's positions end at {allowed}; lower it")
    if wanted > kv_tokens or wanted < 2:
        raise ConfigError(
            f"one request of max_model_len {config.max_model_len or allowed} tokens does not fit in the KV cache of "
            f"{config.kv_cache_memory_bytes} bytes, which holds {kv_tokens} tokens; raise kv_cache_memory_bytes or lower max_model_len"
        )
    return wanted


def _build_manager(
    lora: LoRAConfig,
    model: Decoder,
    backend: KernelBackend,
    arena: Arena,
    blocks: KVBlockAllocator,
    events: EventLog,
) -> LoRAModelManager:
    """On a CPU the arena is host and device memory in one; another device has host memory of its own, pinned for a GPU."""
    targets = model.lora_targets()
    host_arena = None
    if arena.device.type != "cpu":
        host_arena = Arena(lora.host_memory_bytes, arena.chunk_bytes, "cpu", is_pinned=arena.device.type == "cuda")
    manager = LoRAModelManager(
        lora,
        targets,
        backend,
        model.activation_dtype,
        arena,
        open_weights=lambda spec: read_spec(spec, targets, lora),
        base_bias=model.base_bias,
        host_arena=host_arena,
        on_digest_dropped=blocks.drop_digest,
        events=events,
    )
    model.bind_lora(manager.table, backend)
    return manager
