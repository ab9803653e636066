"""The heart: one engine, synchronous. A step is schedule, launch, commit; with look-ahead the commit is that of the step before.

Nothing here knows of names, files or sockets: requests are token ids, adapters are ids with a digest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from loraplex.adapters.source import AdapterSource
from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, FinishReason, Request, TokenOutput
from loraplex.cpu import chosen_threads
from loraplex.engine.adapter_memory import build_manager
from loraplex.engine.caretaker import Caretaker, make_caretaker
from loraplex.engine.decode_graphs import DecodeGraphs, build_steps
from loraplex.engine.device_memory import device_memory
from loraplex.engine.memory_plan import MemoryPlan, plan_memory
from loraplex.engine.model_runner import ModelRunner
from loraplex.engine.sampler import Sampler
from loraplex.engine.schedule_plan import RequestStatus, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_recorder import StepRecorder
from loraplex.engine.steps_in_flight import StepsInFlight
from loraplex.engine.warm_up import rehearsals, warm_up
from loraplex.errors import ConfigError, EngineOverloadedError, InvalidRequestError, LoraDisabledError
from loraplex.events import EngineEvent, EventLog
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.profiled import profiled
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import KVShare
from loraplex.metrics import EngineStats, MemoryReport, StepTimes
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model
from loraplex.models.packed_cache import PackedCache, default_folder
from loraplex.models.source import resolve_model
from loraplex.performance.steps import StepProfile
from loraplex.private_folder import private_folder
from loraplex.profiler import STEP_PARTS, Profiler

logger = logging.getLogger(__name__)

MAX_VACATED_CHUNKS = 8
"""Of a step: KV chunks that are emptied, by copying, for adapters that wait for memory."""

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
        caretaker: Caretaker,
        look_ahead: bool = False,
    ) -> None:
        self.info = info
        self.is_stalled = False
        self._scheduler = scheduler
        self._runner = runner
        self._blocks = blocks
        self._adapters = adapters
        self._max_waiting_requests = max_waiting_requests
        self._num_steps = 0
        self._checked_prompt: Sequence[int] = ()
        self._profiler = profiler
        self._events = events
        self._caretaker = caretaker
        self._flights = StepsInFlight(scheduler, runner, adapters, caretaker, profiler, look_ahead)

    def step(self) -> list[TokenOutput]:
        """Run one step; returns what it added to which request. With look-ahead: launch one, return what the one before it added."""
        with self._runner.threads():
            return self._step()

    def _step(self) -> list[TokenOutput]:
        had_flights = len(self._flights) > 0
        outputs = self._flights.commit_all() if had_flights and self._is_commit_due() else []
        with self._profiler.part("schedule"):
            outputs += [] if self._flights else self._caretaker.before_step()
            plan = self._schedule()
        self.is_stalled = not plan.sequences and not had_flights
        self._num_steps += bool(plan.sequences)
        return [*outputs, *plan.failed, *self._flights.advance(plan)]

    def settle(self) -> list[TokenOutput]:
        """Wait for the step in flight, if there is one; returns what it added."""
        return self._flights.commit_all()

    def _is_commit_due(self) -> bool:
        """Whether the step in flight has to be committed before the next is scheduled: for care, or the scheduler's sake."""
        try:
            is_quiet_wanted = self._caretaker.is_due or self._blocks.num_chunks_owed > 0
            return is_quiet_wanted or not self._scheduler.has_unfinished or self._scheduler.needs_commit()
        except MemoryError:
            return True

    def _schedule(self) -> SchedulePlan:
        """An empty plan when there was no memory for it: what was admitted until then runs in the next step."""
        if self._flights.recorder is not None:
            self._flights.recorder.begin(self._profiler.seconds)
        try:
            if self._adapters is not None:
                self._adapters.poll()
            if self._blocks.num_chunks_owed and not self._flights:
                self.vacate_kv(min(MAX_VACATED_CHUNKS, self._blocks.num_chunks_owed))
            return self._scheduler.schedule()
        except MemoryError as error:
            self._caretaker.monitor.alarm(f"a step could not be scheduled for lack of memory: {error}")
            return SchedulePlan(-1, ())

    def vacate_kv(self, num_chunks: int) -> int:
        """Move KV blocks together while no step is in flight, until that many chunks went back to the arena; returns how many did."""
        assert not self._flights, "a step in flight reads the blocks"
        return self._blocks.vacate(num_chunks, self._runner.move_kv_blocks)

    # --------------------------------------------------------------------------------------------------------- requests

    def add_request(self, request: Request) -> list[TokenOutput]:
        """Queue a request. What cannot even wait is answered at once.

        Raises InvalidRequestError for one that no front would send: kernels read what it says without another look.
        """
        request.check(self.info.max_model_len)
        if request.prompt_token_ids is not self._checked_prompt:
            request.check_prompt(self.info.vocab_size)
            self._checked_prompt = request.prompt_token_ids
        if request.adapter_id is not None and self._adapters is None:
            raise LoraDisabledError("LoRA is off in this engine")
        if self._scheduler.has(request.request_id):
            raise InvalidRequestError(f"request {request.request_id[:40]!r} is known already")
        if self._scheduler.num_waiting >= self._max_waiting_requests:
            error = EngineOverloadedError(f"{self._scheduler.num_waiting} requests wait already; try again later")
            return [TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error.to_payload())]
        refusal = self._caretaker.refusal(request.adapter_id)
        if refusal is not None:
            return [TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error=refusal.to_payload())]
        self._caretaker.arrived(request)
        self._scheduler.add(request)
        return []

    def abort(self, request_ids: Iterable[str]) -> list[TokenOutput]:
        """End requests; unknown ids are passed over."""
        return [output for output in map(self._scheduler.abort, request_ids) if output is not None]

    def abort_adapter(self, adapter_id: int) -> list[TokenOutput]:
        return self._scheduler.abort_adapter(adapter_id)

    @property
    def is_in_care(self) -> bool:
        """Whether something is being restored, so that `step` should be called soon although no request waits."""
        return self._caretaker.is_at_work

    @property
    def has_unfinished(self) -> bool:
        """Whether there is something left to step for."""
        return self._scheduler.has_unfinished or len(self._flights) > 0

    # --------------------------------------------------------------------------------------------------------- adapters

    @property
    def adapters(self) -> LoRAModelManager:
        """The adapters' memory. Raises LoraDisabledError in an engine without LoRA."""
        if self._adapters is None:
            raise LoraDisabledError("LoRA is off in this engine")
        return self._adapters

    # ----------------------------------------------------------------------------------------------------- see and end

    def stats(self) -> EngineStats:
        scheduler, blocks, graphs = self._scheduler, self._blocks, self._runner.graphs
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_by_cause=scheduler.waiting_by_cause(),
            kv_cache_usage=1 - blocks.num_free_blocks / blocks.num_blocks,
            num_kv_blocks=blocks.num_blocks,
            num_prefix_queried_tokens=blocks.num_queried_tokens,
            num_prefix_hit_tokens=blocks.num_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_pauses=scheduler.num_pauses,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_finished=dict(scheduler.num_finished),
            num_admitted=dict(scheduler.num_admitted),
            running_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.RUNNING))),
            waiting_adapter_ids=tuple(sorted(scheduler.adapters_of(RequestStatus.WAITING))),
            kernel_fallbacks=self._runner.kernel_fallbacks,
            step_times=self._step_times(),
            graph_steps={} if graphs is None else graphs.graph_steps,
            eager_steps={} if graphs is None else graphs.eager_steps,
            cpu=self._runner.cpu_use(),
            memory=MemoryReport() if self._adapters is None else self._adapters.report(),
            max_lora=0 if self._adapters is None else self._adapters.table.capacity,
        )

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Captured decode steps; None where every step runs kernel by kernel."""
        return self._runner.graphs

    def take_events(self) -> tuple[EngineEvent, ...]:
        """What happened since the last call, oldest first."""
        return self._events.take()

    def memory_report(self) -> MemoryReport:
        """The memory of adapters and KV cache as it is now."""
        report, monitor = MemoryReport() if self._adapters is None else self._adapters.report(), self._caretaker.monitor
        return replace(
            report,
            mode=monitor.mode,
            history=tuple(monitor.history),
            workspace_bytes=self._runner.workspace_nbytes,
            counters={**report.counters, "mode_changes": monitor.num_mode_changes},
            kv_block_bytes=self._runner.kv_block_bytes,
            num_kv_blocks=self._blocks.num_blocks,
            num_free_kv_blocks=self._blocks.num_free_blocks,
        )

    def start_profile(self) -> None:
        """Record every step from now on; the kernels one by one where the backend can tell. What was recorded before is forgotten."""
        self._runner.measure_operators(True)
        self._flights.recorder = StepRecorder()
        self._flights.recorder.begin(self._profiler.seconds)

    def stop_profile(self) -> StepProfile:
        """What was recorded; nothing when no profile was started."""
        recorder, self._flights.recorder = self._flights.recorder, None
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
        self._flights.drain()
        if self._adapters is not None:
            self._adapters.close()


# ------------------------------------------------------------------------------------------------------------- building


def build_engine(
    config: EngineConfig, progress: Progress | None = None, profiler: Profiler | None = None
) -> EngineCore:
    """Load the model and give it memory. Raises ConfigError or ModelError, naming the setting or the file.

    progress(what, done, total) is called while weights are read, kernels compiled and graphs captured. With a profiler, kernels are
    measured one by one.
    """
    torch.set_num_threads(chosen_threads(config.num_threads, torch.get_num_threads()))
    device = _device(config.device)
    path = resolve_model(config.model, config.revision)
    model_config = ModelConfig.from_dir(path)
    dtype_name = model_config.effective_dtype(config.dtype)
    dtype = getattr(torch, dtype_name)
    backend = _backend(config, device, profiler)
    model = _load_model(config, path, model_config, dtype, backend, device, progress)
    kv_cache_dtype = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    backend.reserve_workspace(config.max_num_batched_tokens)
    memory = plan_memory(config, model_config, model, getattr(torch, kv_cache_dtype), device, device_memory(device))
    heads, windows = model_config.num_attention_heads, model_config.sliding_windows
    backend.choose_attention(heads, model.activation_dtype, memory.kv, windows)
    blocks = _build_blocks(config, memory)
    events = EventLog()
    source, lora = AdapterSource(config.root_paths), memory.lora
    adapters = None if lora is None else build_manager(lora, source, model, backend, memory.arena, blocks, events)
    scheduler = _scheduler(config, blocks, adapters, memory.max_model_len)
    builder, graphs = build_steps(config, memory, model, backend, blocks, None if adapters is None else adapters.table)
    profiler = profiler or Profiler()
    steps = None if adapters is None else adapters.steps
    sampler = Sampler(model_config.vocab_size, backend)
    runner = ModelRunner(model, memory.kv, builder, sampler, profiler, steps, graphs)
    _make_ready(config, runner, blocks, memory, 0 if adapters is None else adapters.table.capacity, progress)
    caretaker = make_caretaker(config, adapters, scheduler, blocks, runner, events, model_config.vocab_size)
    info = EngineInfo(
        model_path=str(path),
        architecture=model_config.model_type,
        dtype=dtype_name,
        max_model_len=memory.max_model_len,
        num_kv_blocks=memory.num_kv_blocks,
        kv_cache_dtype=kv_cache_dtype,
        adapter_memory_bytes=0 if memory.lora is None else memory.lora.adapter_memory_bytes,
        targets=model.lora_targets() if config.lora is not None else (),
        vocab_size=model_config.vocab_size,
        block_size=config.block_size,
        backend=backend.name,
        backend_description=backend.description,
        device=str(device),
    )
    look_ahead = device.type == "cuda" if config.look_ahead is None else config.look_ahead
    waiting = config.max_waiting_requests
    return EngineCore(
        info, scheduler, runner, blocks, adapters, waiting, profiler, events, caretaker, look_ahead=look_ahead
    )


def _make_ready(
    config: EngineConfig,
    runner: ModelRunner,
    blocks: KVBlockAllocator,
    memory: MemoryPlan,
    num_slots: int,
    progress: Progress | None,
) -> None:
    """What a GPU does at first use. Graphs come last: they hold addresses of scratch memory, the arena and the slot table."""

    def told(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    if memory.arena.device.type != "cpu":
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        steps = rehearsals(num_tokens, num_seqs, memory.max_model_len, num_slots)
        warm_up(runner, blocks, list(steps), told("kernels"))
    if runner.graphs is not None:
        runner.graphs.capture(told("graphs"))


def _scheduler(
    config: EngineConfig, blocks: KVBlockAllocator, adapters: LoRAModelManager | None, max_model_len: int
) -> Scheduler:
    scheduler = Scheduler(
        blocks,
        adapters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        aging_steps=1 if config.lora is None else config.lora.aging_steps,
    )
    if adapters is not None:
        adapters.on_digest_dropped = scheduler.forget_kv
    return scheduler


def _backend(config: EngineConfig, device: torch.device, profiler: Profiler | None) -> KernelBackend:
    lora_dtype = "auto" if config.lora is None else config.lora.lora_dtype
    backend = get_backend(config.lora_backend, device, lora_dtype, config.attention_backend)
    logger.info("kernels: %s", backend.description)
    if config.quantization is not None and config.quantization not in backend.quantizations:
        raise ConfigError(
            f"quantization {config.quantization} is not in the {backend.name} kernels, and these run: {backend.description}; "
            f"they have {', '.join(backend.quantizations) or 'none'} (int8 is on a CPU's native kernels too, fp8 wants a GPU of "
            "compute capability 8.9 or later)"
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
    if folder is None:
        return None
    private_folder(folder, "the folder of packed weights", "give another with --packed-cache-dir")
    form = [dtype_name, *([config.quantization] if config.quantization else []), backend.packed_format]
    return PackedCache(folder, path, form)


def _device(name: str) -> torch.device:
    """With its number: `cuda` is the current one. Raises ConfigError when it cannot be used."""
    try:
        device = torch.empty(1, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels and graphs are launched on this thread's device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers, so nothing can be computed there; use cpu or cuda")
    return device


def _build_blocks(config: EngineConfig, memory: MemoryPlan) -> KVBlockAllocator:
    return KVBlockAllocator(
        memory.num_kv_blocks,
        config.block_size,
        is_prefix_caching=config.enable_prefix_caching,
        chunks=KVShare(memory.arena),
        blocks_per_chunk=memory.blocks_per_chunk,
    )
