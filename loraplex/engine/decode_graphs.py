"""Decode steps as CUDA graphs: one launch instead of some hundreds.

At start, for each of some batch sizes, a step of that many rows is captured twice: with adapters, and without any LoRA
kernel; and once more with adapters and wider block tables, where adapters may have a longer context than the base. A
step is padded to the next size and replayed. A graph reads the tensors of its shape in the step's buffers
(engine/step_buffers.py), the KV memory and the slot table, all at fixed addresses, and writes logits to one tensor that
all graphs share. So adapters that come, go and move, and KV blocks that change hands, are no reason to capture again.
Two things are: kernels are made for ranks up to some bound (StepCapture.rank_capacity), and for gains once the slot
table has had one. A step with an adapter of a larger rank, and each step after the first gain, has its graph captured
again.

Everything else runs kernel by kernel, and is counted by reason:

    prefill        some sequence has several tokens, or is not sampled
    batch_size     more sequences, or tiles of mixes, than the largest graph has rows
    adapters       adapters are there that the backend's captured kernels do not cover
    own_weights    an adapter of the step changes the embedding or the head, has weights of its own, or gains on an
                   input that several linears read
    not_captured   there is no graph: its capture failed

A profile of steps changes none of this: backends that can be captured time no operators.

What graphs hold stays until the engine ends. Low-memory mode does not take it: the arena is memory of its own, which
scratch memory given back would not make larger, and a replay would write to it.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loraplex.config import EngineConfig
from loraplex.core import MAX_MIX_ADAPTERS, BlockAllocator
from loraplex.engine.batch import BatchBuilder, BuiltStep, goes_through_base, has_mixes, route_of
from loraplex.engine.diagnosis import PROMPT_TOKENS
from loraplex.engine.graph_sizes import graph_sizes
from loraplex.engine.memory_plan import MemoryPlan
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.engine.step_buffers import StepShape, make_step_buffers
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.protocols import KernelBackend, StepCapture
from loraplex.kernels.step_batch import StepBatch
from loraplex.kernels.tiles import SMALL_ROWS
from loraplex.memory.weights.loading import is_device_lost
from loraplex.models.decoder import Decoder

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""(graphs captured, graphs in all)"""


def graph_device_for(config: EngineConfig, backend: KernelBackend, device: torch.device) -> GraphDevice | None:
    """None where steps always run kernel by kernel: no CUDA, enforce_eager, or kernels that read the host."""
    if device.type != "cuda" or config.enforce_eager:
        return None
    if not backend.is_capturable:
        logger.info("no CUDA graphs: %s kernels cannot be captured", backend.name)
        return None
    return CudaGraphDevice(device)


def build_steps(
    config: EngineConfig,
    memory: MemoryPlan,
    model: Decoder,
    backend: KernelBackend,
    blocks: BlockAllocator,
    table: SlotTable | None,
) -> tuple[BatchBuilder, DecodeGraphs | None]:
    """What turns a plan into tensors on the model's device, and the graphs over those tensors, not captured yet."""
    device = memory.kv.device
    graph_device = graph_device_for(config, backend, device)
    table_width, long_width = (-(-each // config.block_size) for each in (memory.max_model_len, memory.longest_len))
    num_tokens = max(config.max_num_batched_tokens, PROMPT_TOKENS)  # a diagnosis is no smaller
    largest = StepShape(num_tokens, config.max_num_seqs, long_width, num_tokens)
    # the scheduler bounds the segments by the seats, but a mix alone may have more
    lora_plan = LoraPlan(max(config.max_num_seqs, MAX_MIX_ADAPTERS), device, num_tokens, MAX_MIX_ADAPTERS)
    buffers = make_step_buffers(device, largest, lora_plan, graph_device is not None)
    is_stretched = config.lora is not None and config.lora.long_lora_scaling_factors
    rope_factor = model.config.rope.factor if is_stretched else None
    builder = BatchBuilder(blocks, buffers, lora_plan, table_width, table, long_width, rope_factor)
    if graph_device is None:
        return builder, None
    return builder, DecodeGraphs(graph_device, backend, model, memory.kv, builder, table, graph_sizes(config))


class _Key(NamedTuple):
    """is_long: of steps in which a context is longer than any of the base model's."""

    size: int
    has_adapters: bool
    is_long: bool = False


class _Captured(NamedTuple):
    """A graph, the step that it was captured of, the largest rank and the gains (of outputs, of inputs) that it
    covers."""

    graph: CapturedGraph
    batch: StepBatch
    rank_capacity: int
    gains: tuple[bool, bool]


class DecodeGraphs:
    """The graphs of one model and one KV memory. `table` is None in an engine without LoRA, and empty in one with it.

    graph_steps: replayed steps, `base` and `lora`; eager_steps: the others, by reason.
    """

    def __init__(
        self,
        device: GraphDevice,
        backend: StepCapture,
        model: Decoder,
        kv: Tensor,
        builder: BatchBuilder,
        table: SlotTable | None,
        sizes: tuple[int, ...],
    ) -> None:
        self._device = device
        self._backend = backend
        self._model = model
        self._kv = kv
        self._builder = builder
        self._table = table
        self._sizes = sizes
        self._logits = torch.empty(0, dtype=torch.float32)
        self._graphs: dict[_Key, _Captured] = {}
        self._compared: Counter[str] | None = None
        self._graph_steps: Counter[str] = Counter()
        self._eager_steps: Counter[str] = Counter()

    @property
    def graph_steps(self) -> Mapping[str, int]:
        return dict(self._graph_steps)

    @property
    def eager_steps(self) -> Mapping[str, int]:
        return dict(self._eager_steps)

    @property
    def num_graphs(self) -> int:
        """0 when the capture failed."""
        return len(self._graphs)

    # ------------------------------------------------------------------------------------------------------- capture

    @torch.inference_mode()
    def capture(self, on_progress: OnProgress | None = None) -> None:
        """Capture all graphs, once and before the first step. When one fails, there are none: a warning says why."""
        kinds = [(False, False)] if self._table is None else [(True, False), (False, False)]
        if self._table is not None and self._builder.has_long_widths:
            kinds.insert(0, (True, True))
        keys = [_Key(size, *kind) for size in reversed(self._sizes) for kind in kinds]
        began_s = time.monotonic()
        gc.collect()
        for num_done, key in enumerate(keys, 1):
            if not self._try_capture(key):
                self._graphs.clear()
                self._device.release()
                return
            if on_progress is not None:
                on_progress(num_done, len(keys))
        logger.info("captured %d CUDA graphs in %.1f s", len(keys), time.monotonic() - began_s)

    def _try_capture(self, key: _Key) -> bool:
        """False, and no such graph, when it cannot be captured. An older one, which may be running, stays until
        then."""
        gains = self._gains(key)  # an adapter that comes during the capture is in no step before the next
        try:
            if not len(self._logits):
                shape = self._sizes[-1], self._model.config.vocab_size
                self._logits = torch.zeros(shape, dtype=torch.float32, device=self._kv.device)
            batch = self._builder.blank(*key)
            with _no_collection(), self._backend.capturing():
                graph = self._device.capture(lambda: self._run(batch))
        except Exception as error:
            self._graphs.pop(key, None)
            if is_device_lost(error):
                raise
            logger.warning(
                "no CUDA graph for %d rows, their steps run kernel by kernel: %s: %s",
                key.size,
                type(error).__name__,
                error,
            )
            return False
        capacity = self._backend.rank_capacity(self._table) if key.has_adapters and self._table is not None else 0
        self._graphs[key] = _Captured(graph, batch, capacity, gains)
        return True

    def _gains(self, key: _Key) -> tuple[bool, bool]:
        """Whether the table ever had gains of outputs, and of inputs."""
        if self._table is None or not key.has_adapters:
            return False, False
        return self._table.has_gains, self._table.has_input_gains

    def _run(self, batch: StepBatch) -> None:
        """What is captured: token ids to logits of every row."""
        logits = self._model.compute_logits(self._model.forward(batch, self._kv))
        self._logits[: len(logits)].copy_(logits)

    # -------------------------------------------------------------------------------------------------------- replay

    def padded_size(self, plan: SchedulePlan) -> int | None:
        """The rows that a plan's step is to be padded to for its graph; None, counted, when it has none."""
        slots = {
            slot
            for sequence in plan.sequences
            if (slot := sequence.state.lora_slot) is not None and not goes_through_base(sequence)
        }
        num_rows = len(plan.sequences)
        if slots and has_mixes(plan.sequences):
            slots = slots.union(*(sequence.state.mix_slots for sequence in plan.sequences))
            num_rows = max(num_rows, _num_tiles(plan))
        reason = self._reason_against(plan, num_rows, slots)
        if reason is None:
            size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
            if self._is_there(_Key(size, bool(slots), self._builder.is_long(plan)), slots):
                return size
            reason = "not_captured"
        self._eager_steps[reason] += 1
        return None

    def _reason_against(self, plan: SchedulePlan, num_rows: int, slots: set[int]) -> str | None:
        if not all(sequence.num_tokens == 1 and sequence.is_sampled for sequence in plan.sequences):
            return "prefill"
        if num_rows > self._sizes[-1]:
            return "batch_size"
        if slots and (self._table is None or not self._backend.may_replay(self._table)):
            return "adapters"
        table = self._table
        if table is not None and not self._builder.pads_rope_factors and slots & table.rope_factors.keys():
            return "adapters"
        if table is not None:
            own = table.own_layers | table.shared_input_slots | table.embedding_slots | table.head_slots
            return "own_weights" if slots & own else None
        return None

    def _is_there(self, key: _Key, slots: set[int]) -> bool:
        """Whether there is such a graph, for the ranks and gains in these slots; it is captured again when its own are
        less."""
        captured = self._graphs.get(key)
        if captured is None:
            return False
        rank = 0 if self._table is None or not slots else self._table.largest_rank(sorted(slots))
        if rank <= captured.rank_capacity and captured.gains == self._gains(key):
            return True
        logger.info("capturing the CUDA graph for %d rows again, for rank %d and what gains there are", key.size, rank)
        return self._try_capture(key) and rank <= self._graphs[key].rank_capacity

    def replay(self, step: BuiltStep) -> Tensor:
        """Logits float32 [sampled sequences, vocab] of the step that was built last, with its `padded_size`; good until
        the next replay."""
        key = _key_of(step)
        if self._compared is not None:
            self._compare(key)
        self._graphs[key].graph.replay()
        self._graph_steps["lora" if key.has_adapters else "base"] += 1
        return self._logits[: len(step.sampled)]

    # -------------------------------------------------------------------------------------------------------- checks

    @contextmanager
    def compared(self) -> Iterator[Counter[str]]:
        """Within it every replayed step runs kernel by kernel too, as it was captured: the counts of `equal` and
        `different` logits."""
        self._compared = Counter()
        try:
            yield self._compared
        finally:
            self._compared = None

    def _compare(self, key: _Key) -> None:
        """Bit for bit, over all rows, padding too. The KV cache is written twice with the same."""
        assert self._compared is not None
        logits = self._logits[: key.size]
        self._run(self._graphs[key].batch)
        eager = logits.clone()
        logits.fill_(torch.nan)
        self._graphs[key].graph.replay()
        is_equal = torch.equal(eager.view(torch.int32), logits.view(torch.int32))
        self._compared["equal" if is_equal else "different"] += 1


def _num_tiles(plan: SchedulePlan) -> int:
    """Of a decode step with mixes. A graph's kernels go over as many as it has rows."""
    rows_of = Counter(route_of(sequence.state) for sequence in plan.sequences)
    return sum(len(route) * -(-num_rows // SMALL_ROWS) for route, num_rows in rows_of.items())


def _key_of(step: BuiltStep) -> _Key:
    assert step.padded_size is not None, "the step was not built for a graph"
    return _Key(step.padded_size, step.batch.lora is not None, step.is_long)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector may free tensors at any time, which a capture cannot have."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CapturedGraph(Protocol):
    """What was launched in a capture, with the addresses and sizes that it had."""

    def replay(self) -> None:
        """Launch it all again, on the current stream."""
        ...


class GraphDevice(Protocol):
    """Captures functions over tensors at fixed addresses. Scratch tensors of all its graphs share one memory pool."""

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        """`run` is called twice: to warm up, and to be captured. Raises its errors; a failed capture leaves nothing."""
        ...

    def release(self) -> None:
        """Give back the memory of graphs that are no longer held, and what the device's allocator keeps for later."""
        ...


class CudaGraphDevice:
    """torch.cuda.CUDAGraph on one device.

    Captured on a stream of its own, which the warm-up runs on too: cuBLAS keeps its workspace by stream, and the first
    call makes it. Other threads may use the device meanwhile (capture_error_mode thread_local). Capture the largest
    graph first: the others find room in what its pool has already.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> CapturedGraph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                abandon_capture(graph, self._stream.device_index, self._pool)
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def abandon_capture(graph: torch.cuda.CUDAGraph, device_index: int, pool: tuple[int, int]) -> None:
    """End a capture in which something went wrong.

    CUDA may have ended it already, and capture_end then raises before it tells torch's allocator and random generator.
    The generator has no way out of a capture but its end, so it gets a new state.
    """
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError):  # it was told
        torch._C._cuda_endAllocateToPool(device_index, pool)
    fresh = torch.Generator(f"cuda:{device_index}").manual_seed(torch.cuda.initial_seed())
    torch.cuda.default_generators[device_index].graphsafe_set_state(fresh.graphsafe_get_state())
