"""A manager over tiny layers and fake sources, and what tests need to look inside: fast, every thread under control."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel, Projections
from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.config import LoRAConfig
from loraplex.core import AdapterSpec, LoraSlice, LoraTarget, ShardKind
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import Arena
from tests.memory.fake_copies import FakeCopies

NUM_LAYERS = 2
HIDDEN = 16
CHUNK_BYTES = 1024
CPU = torch.device("cpu")


def make_targets(num_layers: int = NUM_LAYERS) -> tuple[LoraTarget, ...]:
    """Per layer a fused qkv (16, 8, 8 outputs; q has a base bias) and a down projection."""
    targets = []
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        widths = (("q_proj", 0, 16), ("k_proj", 16, 8), ("v_proj", 24, 8))
        qkv = tuple(LoraSlice(f"{name}.self_attn.{m}", at, n, n, has_bias=m == "q_proj") for m, at, n in widths)
        targets.append(LoraTarget(f"{name}.self_attn.qkv_proj", layer, HIDDEN, HIDDEN, qkv, ShardKind.QKV))
        down = (LoraSlice(f"{name}.mlp.down_proj", 0, HIDDEN, HIDDEN),)
        targets.append(LoraTarget(f"{name}.mlp.down_proj", layer, 24, 24, down, ShardKind.ROW))
    return tuple(targets)


TARGETS = make_targets()
BASE_BIAS = {s.module_name: torch.linspace(-1, 1, s.out_features) for t in TARGETS for s in t.slices if s.has_bias}
BASE_WEIGHTS = {
    s.module_name: torch.randn(s.out_features, t.in_features, generator=torch.Generator().manual_seed(t.layer))
    for t in TARGETS
    for s in t.slices
}


@dataclass(frozen=True)
class FakeBase:
    """packing.BaseWeights over dicts by module name, by the formula."""

    biases: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    weights_name: str = "fake"

    def base_bias(self, module_name: str) -> torch.Tensor | None:
        return self.biases.get(module_name)

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        return (self.weights[module_name] + scaling * lora_b.float() @ lora_a.float()).norm(dim=1)

    def base_rows(self, module_name: str, token_ids: torch.Tensor) -> torch.Tensor | None:
        weight = self.weights.get(module_name)
        return None if weight is None else weight[token_ids]


BASE = FakeBase(BASE_BIAS, BASE_WEIGHTS)


def make_model(
    digest: str, rank: int = 4, adapter_id: int = 0, modules: Sequence[str] = ("q_proj", "v_proj", "down_proj")
) -> LoRAModel:
    """Random weights that depend on the digest alone. With q_proj comes a lora_bias, with down_proj a replaced bias."""
    generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()) % 2**40)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layers = {}
    for target in TARGETS:
        for s in target.slices:
            module = s.module_name.rsplit(".", 1)[-1]
            if module in modules:
                lora_bias = random(s.out_features) if module == "q_proj" else None
                bias = random(s.out_features) if module == "down_proj" else None
                a, b = random(rank, target.in_features), random(s.out_features, rank)
                layers[s.module_name] = LoRALayerWeights(s.module_name, rank, 8.0, a, b, lora_bias, bias, 8.0 / rank)
    return LoRAModel(digest, rank, layers, adapter_id)


def make_shared(digest: str, pair: str = "pair", rank: int = 12) -> LoRAModel:
    """Scales that depend on the digest alone, on all linears, over projections that depend on `pair`."""
    generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()) % 2**40)
    of_pair = torch.Generator().manual_seed(int.from_bytes(pair.encode()) % 2**40)
    projections = Projections.of(torch.randn(rank, 30, generator=of_pair), torch.randn(20, rank, generator=of_pair))
    layers = {}
    for s in (s for target in TARGETS for s in target.slices):
        scales = {
            "rank_scale": torch.randn(rank, generator=generator),
            "out_scale": torch.randn(s.out_features, generator=generator),
        }
        layers[s.module_name] = LoRALayerWeights(s.module_name, rank, 1.0, None, None, **scales)
    return LoRAModel(digest, rank, layers, projections=projections)


def expected_delta(model: LoRAModel, target: LoraTarget, x: torch.Tensor) -> torch.Tensor:
    """What the adapter adds to the output of `target`: float64, by the formula."""
    y = torch.zeros(x.shape[0], sum(s.out_features for s in target.slices), dtype=torch.float64)
    for s in target.slices:
        layer = model.get_lora(s.module_name)
        if layer is None:
            continue
        out = torch.zeros(x.shape[0], s.out_features, dtype=torch.float64)
        if layer.lora_a is not None and layer.lora_b is not None:
            out = layer.scaling * (x.double() @ layer.lora_a.double().T) @ layer.lora_b.double().T
        if model.projections is not None and layer.rank_scale is not None and layer.out_scale is not None:
            inner = x.double() @ model.projections.lora_a[:, : target.in_features].double().T * layer.rank_scale
            out = inner @ model.projections.lora_b[: s.out_features].double().T * layer.out_scale
        if layer.lora_bias is not None:
            out = out + layer.scaling * layer.lora_bias.double()
        if layer.bias is not None:
            base = BASE_BIAS.get(s.module_name)
            out = out + layer.bias.double() - (0 if base is None else base.double())
        y[:, s.out_offset : s.out_offset + s.out_features] = out
    return y


class FakeSource:
    """Adapter files in a dict. `opens` counts reads by path; a path can fail, change, vanish, or wait at a gate."""

    def __init__(self) -> None:
        self.models: dict[str, LoRAModel] = {}
        self.errors: dict[str, Exception] = {}
        self.opens: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = {}
        self.entered = threading.Semaphore(0)

    def put(self, path: str, model: LoRAModel) -> None:
        self.models[path] = model

    def open(self, spec: AdapterSpec) -> LoRAModel:
        self.opens[spec.path] += 1
        self.entered.release()
        if spec.path in self.gates:
            assert self.gates[spec.path].wait(10), "the gate was never opened"
        if spec.path in self.errors:
            raise self.errors[spec.path]
        return self.models[spec.path]


class GatedLoader:
    """A loader of one thread that works only while it is let: `run_one`, `run_all`, or inside `opened()`."""

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_open = 0
        self._is_closed = False
        self._is_working = False
        self._thread: threading.Thread | None = None

    @property
    def num_queued(self) -> int:
        return len(self._jobs)

    def submit(self, job: Callable[[], None], tenant: str = "") -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def run_one(self) -> bool:
        """Run the oldest job in this thread."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
        if job is not None:
            job()
        return job is not None

    def run_all(self) -> None:
        while self.run_one():
            pass

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Jobs run in a thread, for verbs that wait for them; all of them have run at the end."""
        with self._changed:
            self._num_open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                while self._jobs or self._is_working:
                    self._changed.wait()
                self._num_open -= 1

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and not (self._jobs and self._num_open):
                    self._changed.wait()
                if self._is_closed:
                    return
                job = self._jobs.popleft()
                self._is_working = True
            job()
            with self._changed:
                self._is_working = False
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Rig:
    """A manager with room for a number of equal adapters of rank 4; adapter i has digest `d{i}` and path `/p{i}`."""

    num_device: int = 2
    num_host: int = 3
    policy: str = "lru"
    is_bound_by_count: bool = False
    is_separate: bool = False
    copies: FakeCopies | None = None  # for a device with memory of its own; None: copies are done at once
    is_gated: bool = True
    backend: str = "reference"
    host_compression: str = "none"
    slack_bytes: int = 0  # memory beyond the budget, so that pieces never run out first
    source: FakeSource = field(default_factory=FakeSource)
    clock: FakeClock = field(default_factory=FakeClock)
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.packed_nbytes(make_model("size"))
        loose = 1 << 20
        config = LoRAConfig(
            adapter_memory_bytes=loose if self.is_bound_by_count else self.num_device * size,
            host_memory_bytes=loose if self.is_bound_by_count else self.num_host * size,
            max_loras=self.num_device if self.is_bound_by_count else None,
            max_cpu_loras=self.num_host if self.is_bound_by_count else None,
            eviction_policy=self.policy,
            host_compression=self.host_compression,
        )
        self.is_separate |= self.copies is not None
        spare = CHUNK_BYTES + self.slack_bytes
        arena_bytes = config.adapter_memory_bytes if self.is_separate else config.host_memory_bytes
        self.arena = Arena(arena_bytes + spare, CHUNK_BYTES, CPU)
        host_arena = Arena(config.host_memory_bytes + spare, CHUNK_BYTES, CPU) if self.is_separate else None
        self.config = config
        self.loader = GatedLoader() if self.is_gated else None
        self.manager = LoRAModelManager(
            config,
            TARGETS,
            get_backend(self.backend, CPU),
            torch.float32,
            self.arena,
            self.source.open,
            BASE,
            self.clock,
            host_arena=host_arena,
            copies=self.copies,
            loader=self.loader,
            on_digest_dropped=self.dropped.append,
        )
        store = self.manager._residency
        store.tiers.host.pool.poison()
        if store.tiers.device.pool is not None:
            store.tiers.device.pool.poison()

    @staticmethod
    def packed_nbytes(model: LoRAModel) -> int:
        from loraplex.memory.weights.packing import Packer

        packer = Packer(TARGETS, get_backend("reference", CPU), torch.float32, BASE)
        return packer.lay_out(model).nbytes

    def spec(self, adapter_id: int, digest: str = "", rank: int = 4) -> AdapterSpec:
        """Adapter `adapter_id` with a source that holds its content."""
        digest, path = digest or f"d{adapter_id}", f"/p{adapter_id}"
        if path not in self.source.models:
            self.source.put(path, make_model(digest, rank))
        return AdapterSpec(adapter_id, f"a{adapter_id}", 1, digest, path, 1, rank)

    def add(self, *adapter_ids: int) -> None:
        for adapter_id in adapter_ids:
            self.manager.add_adapter(self.spec(adapter_id))

    def activate(self, adapter_id: int) -> bool:
        """With the loader at work, since a verb waits for it."""
        if self.loader is None:
            return self.manager.activate_adapter(adapter_id)
        with self.loader.opened():
            return self.manager.activate_adapter(adapter_id)

    def pin(self, adapter_id: int) -> bool:
        if self.loader is None:
            return self.manager.pin_adapter(adapter_id)
        with self.loader.opened():
            return self.manager.pin_adapter(adapter_id)

    def acquire(self, adapter_id: int) -> int:
        """A reference, waiting as a scheduler does: pass after pass, the loader in between."""
        for _ in range(4):
            self.manager.poll()
            result = self.manager.try_acquire(adapter_id)
            if result.lora_slot is not None:
                return result.lora_slot
            assert self.loader is not None
            self.loader.run_all()
        raise AssertionError(f"adapter {adapter_id} does not come: {result}")

    def slots(self) -> list[int | None]:
        """`lora_index_to_id` of as many slots as the device has room for."""
        index_to_id = WorkerLoRAManager(self.manager).lora_index_to_id
        assert not any(index_to_id[self.num_device :])
        return index_to_id[: self.num_device]

    def tier_of(self, adapter_id: int) -> str:
        return next(r.tier.value for r in self.manager.list_adapters() if r.adapter_id == adapter_id)

    def check_output(self, lora_slot: int, model: LoRAModel) -> None:
        """The kernels see exactly `model` in `lora_slot`: no other byte. They wait for layers that arrive."""
        backend, gate = get_backend(self.backend, CPU), self.manager.prepare_step([lora_slot])
        for target in TARGETS:
            if gate is not None:
                gate.wait_for_layer(target.layer)
            x = torch.linspace(-1, 1, 3 * target.in_features).reshape(3, target.in_features)
            y = torch.zeros(3, sum(s.out_features for s in target.slices))
            plan = LoraPlan.build([LoraSegment(0, 3, lora_slot)], 3, 4)
            table = self.manager.table
            backend.add_lora(y, x, plan, table, table.first_row(target.name), target.slices)
            torch.testing.assert_close(y.double(), expected_delta(model, target, x), rtol=1e-5, atol=1e-5)

    def check_empty(self) -> None:
        """Everything has returned: no bytes, no slots, no references."""
        self.manager.check_integrity()
        stats = self.manager.report()
        assert (stats.tier("device").used_bytes, stats.tier("host").used_bytes, stats.retiring_bytes) == (0, 0, 0)
        assert (stats.num_adapters, stats.num_loading, stats.pinned_bytes, stats.in_use_bytes) == (0, 0, 0, 0)
        assert self.arena.num_free_chunks == self.arena.num_chunks
        assert not any(WorkerLoRAManager(self.manager).lora_index_to_id)
