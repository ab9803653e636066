"""What a twin has instead of a device and a disk: a clock, loads and copies that take calibrated seconds, and steps
that compute nothing."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

from loraplex.core import LoraSlice, LoraTarget, Request, Tier
from loraplex.cpu import CpuUse
from loraplex.engine.schedule_plan import SampledToken, SchedulePlan
from loraplex.memory.residency.records import LoadJob
from loraplex.memory.weights.copies import Arrival, StepGate
from loraplex.memory.weights.loading import JobRun, LoadedWeights, Reserve
from loraplex.memory.weights.packing import PackedBlock, PackedLayout
from loraplex.metrics import KernelSpeedup
from loraplex.twin.calibration import Calibration, ReadTime
from loraplex.twin.step_model import Disturbances, StepModel, StepWork

TOKEN_ID = 2
TARGET = LoraTarget("model.layers.0.twin", 0, 16, 16, (LoraSlice("model.layers.0.twin", 0, 16, 16),))
"""What all adapters are on, in the slot table. It has their last extent, so that a step waits for all of a copy."""


class VirtualClock:
    """Seconds that pass when something takes them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def reach(self, at_s: float) -> None:
        self.now_s = max(self.now_s, at_s)

    @contextmanager
    def at(self, at_s: float) -> Iterator[None]:
        """Within the block it is then."""
        before, self.now_s = self.now_s, at_s
        try:
            yield
        finally:
            self.now_s = before


class VirtualLoader:
    """loading.Loader: `num_threads` jobs at once, in order. A job runs when its seconds are over.

    seconds_of: what a load or copy takes; other jobs take no time. is_working: whether one of its jobs runs.
    """

    def __init__(self, clock: VirtualClock, num_threads: int, seconds_of: Callable[[LoadJob], float]) -> None:
        self._clock = clock
        self._seconds_of = seconds_of
        self._free_s = [0.0] * num_threads
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.is_working = False

    def submit(self, job: Callable[[], None], tenant: str = "") -> None:
        seconds = self._seconds_of(job.job) if isinstance(job, JobRun) else 0.0
        began_s = max(self._clock.now_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, began_s + seconds)
        heapq.heappush(self._under_way, (began_s + seconds, next(self._order), job))

    @property
    def next_s(self) -> float | None:
        """When the next job is done."""
        return self._under_way[0][0] if self._under_way else None

    def run_until(self, at_s: float) -> None:
        """End all jobs that are done by then, each at its time."""
        while self._under_way and self._under_way[0][0] <= at_s:
            ended_s, _, job = heapq.heappop(self._under_way)
            self.is_working = True
            with self._clock.at(ended_s):
                job()
            self.is_working = False

    def close(self) -> None:
        self._under_way.clear()


class VirtualReader:
    """loading.Reader without bytes: what an adapter's rank takes, from the disk tier if it was read before.

    The disk tier keeps what was read last. A read that a verb does itself takes its seconds at once.
    """

    def __init__(self, calibration: Calibration, clock: VirtualClock, disk_bytes: int) -> None:
        self._calibration = calibration
        self._clock = clock
        self._disk_bytes = disk_bytes
        self._on_disk: OrderedDict[str, int] = OrderedDict()
        self._used_bytes = 0
        self._layouts: dict[int, PackedLayout] = {}
        self.loader: VirtualLoader

    def seconds_of(self, job: LoadJob) -> float:
        """A copy's are known to its arrival."""
        if job.arriving is not None:
            arrival = job.arriving.arrival
            assert isinstance(arrival, VirtualArrival)
            return max(0.0, arrival.there_s - self._clock.now_s)
        is_on_disk = job.weights.digest in self._on_disk
        times: ReadTime = self._calibration.disk if is_on_disk else self._calibration.source
        return times.seconds(self._layout_of(job).nbytes)

    def read(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        layout, digest = self._layout_of(job), job.weights.digest
        origin = (Tier.DISK if digest in self._on_disk else Tier.SOURCE).value
        if not self.loader.is_working:
            self._clock.now_s += self.seconds_of(job)
        if reserve(layout.sizes) is None:
            return LoadedWeights(layout, (), origin, is_placed=False)
        self._keep(digest, layout.nbytes)
        return LoadedWeights(layout, (), origin)

    def _keep(self, digest: str, nbytes: int) -> None:
        self._used_bytes += nbytes - self._on_disk.pop(digest, 0)
        self._on_disk[digest] = nbytes
        while self._used_bytes > self._disk_bytes:
            self._used_bytes -= self._on_disk.popitem(last=False)[1]

    def _layout_of(self, job: LoadJob) -> PackedLayout:
        rank = job.sources[-1].spec.max_rank
        if rank not in self._layouts:
            sizes = self._calibration.sizes_of(rank)
            self._layouts[rank] = PackedLayout(sizes, (PackedBlock(TARGET.name, len(sizes) - 1, 0, (None,)),))
        return self._layouts[rank]


class VirtualArrival(Arrival):
    """A copy that is there at `there_s`; steps that read it end no earlier."""

    def __init__(self, copies: VirtualCopies, there_s: float) -> None:
        super().__init__()
        self._copies = copies
        self.there_s = there_s

    def hold_steps(self, index: int) -> None:
        self._copies.held_until_s = max(self._copies.held_until_s, self.there_s)


class VirtualCopies:
    """copies.CopyEngine: one copy after the other over one link. held_until_s: until when steps wait for copies."""

    is_asynchronous = True

    def __init__(self, clock: VirtualClock, time: ReadTime) -> None:
        self._clock = clock
        self._time = time
        self._free_s = 0.0
        self.held_until_s = 0.0

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        nbytes = sum(source.nbytes for source in sources)
        self._free_s = max(self._clock.now_s, self._free_s) + self._time.seconds(nbytes)
        return VirtualArrival(self, self._free_s)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        pass

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return ()


class VirtualStep:
    """engine.LaunchedStep: its result is there at `ends_s`."""

    def __init__(self, plan: SchedulePlan, clock: VirtualClock, ends_s: float) -> None:
        self._plan = plan
        self._clock = clock
        self._ends_s = ends_s

    def result(self) -> Mapping[str, SampledToken]:
        self._clock.reach(self._ends_s)
        token = SampledToken(TOKEN_ID)
        return {each.state.request.request_id: token for each in self._plan.sequences if each.is_sampled}


class VirtualRunner:
    """engine.StepRunner and maintenance.TendedRunner: a step takes what the model of steps says, one after the other.

    rank_of: of each adapter id. prepare: of the adapters' memory. copies: None where host and device are one memory.
    busy_s, num_steps: so far.
    """

    device = torch.device("cpu")
    graphs = None
    merger = None
    workspace_nbytes = 0
    kernel_fallbacks: Mapping[str, int] = {}

    def __init__(
        self,
        model: StepModel,
        disturbances: Disturbances,
        clock: VirtualClock,
        rank_of: Mapping[int, int],
        prepare: Callable[[Iterable[int]], StepGate | None],
        copies: VirtualCopies | None,
        kv_block_bytes: int,
    ) -> None:
        self._model = model
        self._disturbances = disturbances
        self._clock = clock
        self._rank_of = rank_of
        self._prepare = prepare
        self._copies = copies
        self._free_s = 0.0
        self.kv_block_bytes = kv_block_bytes
        self.busy_s = 0.0
        self.num_steps = 0

    def launch(self, plan: SchedulePlan) -> VirtualStep:
        work = StepWork.of(plan, self._rank_of)
        seconds = 1e-3 * self._model.ms(work) * self._disturbances.next(work.num_tokens)
        began_s = max(self._clock.now_s, self._free_s)
        ends_s = began_s + seconds
        if self._copies is not None:
            slots = {each.state.lora_slot for each in plan.sequences} - {None}
            gate = self._prepare([slot for slot in slots if slot is not None])
            if gate is not None:
                gate.wait_for_all()
                ends_s = max(ends_s, self._copies.held_until_s)
        self._free_s = ends_s
        self.busy_s += ends_s - began_s
        self.num_steps += 1
        return VirtualStep(plan, self._clock, ends_s)

    def threads(self) -> nullcontext[None]:
        return nullcontext()

    def check_ranks(self) -> None:
        pass

    def recover(self) -> None:
        pass

    def release_workspace(self) -> int:
        return 0

    def answer(self, request: Request, lora_slot: int) -> tuple[int, ...] | None:
        return None  # there are no logits

    def move_kv_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def measure_operators(self, is_on: bool) -> None:
        pass

    def measure_kernels(self, dtype_name: str) -> tuple[KernelSpeedup, ...]:
        return ()

    def cpu_use(self) -> CpuUse:
        return CpuUse()

    def close(self) -> None:
        pass
