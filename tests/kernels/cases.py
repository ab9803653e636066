"""What the kernel tests share: pairwise cases, random adapters in a poisoned arena, add_lora's float64 oracle."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.core import LoraSlice, LoraTarget
from loraplex.kernels.native.attention import kv_layout_gap
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.quantized_weights import kv_head_dim
from loraplex.kernels.slices import SliceWeights

FP32, FP16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
TOLERANCE = {FP32: 1e-5, FP16: 5e-3, BF16: 3e-2}
"""Largest error allowed, relative to the largest value, by the dtype of the result."""

NATIVE = open_library()
"""The kernels of this machine's best instruction set, or why there are none."""

BACKENDS: tuple[KernelBackend, ...] = tuple(
    get_backend(name, torch.device("cpu"))
    for name in ("reference", "torch", *(["native"] if isinstance(NATIVE, NativeLibrary) else []))
)

POISON = 0xFF
"""A byte that makes NaN of every float dtype."""


def pairwise(dimensions: Mapping[str, Sequence[object]], seed: int = 0) -> list[dict[str, object]]:
    """Few cases in which each pair of values of two dimensions occurs (greedy; equal for equal arguments)."""
    names, rng = list(dimensions), random.Random(seed)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(dimensions[a]))
        for j in range(len(dimensions[b]))
    }

    def pairs(case: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    cases = []
    while missing:
        a, i, b, j = min(missing)
        candidates = [{name: rng.randrange(len(dimensions[name])) for name in names} | {a: i, b: j} for _ in range(20)]
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append({name: dimensions[name][best[name]] for name in names})
    return cases


def kv_places(backend: KernelBackend, kv_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a backend has dimension d of the key, and of the value, of token `offset` among a head's numbers:
    [block_size, D] each."""
    block_size, head_dim = kv_layer.shape[3], kv_head_dim(kv_layer)
    offset, d = torch.arange(block_size)[:, None], torch.arange(head_dim)
    if not isinstance(backend, NativeBackend) or kv_layout_gap(kv_layer) is not None:
        return offset * head_dim + d, offset * head_dim + d
    group = offset // 16 * 16 * kv_layer.shape[4]

    def place(step: torch.Tensor, lane: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return group + step * 32 + (2 * lane + which if kv_layer.dtype == BF16 else lane + 16 * which)

    keys = place(d // 2, offset % 16, d % 2)
    return keys, place(offset % 16 // 2 * (head_dim // 16) + d // 16, d % 16, offset % 2)


def kv_scale_places(backend: KernelBackend, kv_layer: torch.Tensor) -> torch.Tensor:
    """Where a backend has the scale of the key, or the value, of token `offset` in a head's bytes: [block_size, 4]."""
    block_size, head_dim = kv_layer.shape[3], kv_head_dim(kv_layer)
    is_native = isinstance(backend, NativeBackend) and kv_layout_gap(kv_layer) is None
    group = 16 if is_native else block_size  # tokens whose scales are side by side
    offset = torch.arange(block_size)[:, None]
    return offset // group * group * kv_layer.shape[4] + group * head_dim + offset % group * 4 + torch.arange(4)


def case_id(case: Mapping[str, object]) -> str:
    return "-".join(str(v).replace("torch.", "").replace(" ", "") for v in case.values())


# ------------------------------------------------------------------------------------------------------ random adapters


def make_target(in_features: int, out_features: Sequence[int], name: str = "model.layers.0.linear") -> LoraTarget:
    offsets = np.cumsum([0, *out_features]).tolist()
    slices = tuple(LoraSlice(f"{name}.{i}", offsets[i], n, n) for i, n in enumerate(out_features))
    return LoraTarget(name, 0, in_features, in_features, slices)


def make_weights(
    target: LoraTarget,
    ranks: Sequence[int | None],
    dtype: torch.dtype,
    has_bias: bool,
    generator: torch.Generator,
    has_gain: bool = False,
) -> tuple[SliceWeights | None, ...]:
    """One adapter. A rank of None: the slice is not there; 0: there is only a bias, or only a gain."""

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    weights: list[SliceWeights | None] = []
    for rank, s in zip(ranks, target.slices, strict=True):
        if rank is None:
            weights.append(None)
            continue
        a, b = (draw(rank, target.in_features), draw(s.out_features, rank)) if rank else (None, None)
        bias = draw(1, s.out_features)[0] if has_bias or not (rank or has_gain) else None
        scaling = float(2 ** torch.randint(-2, 3, (), generator=generator))
        gain = draw_gain(s.out_features, generator) if has_gain else None
        weights.append(SliceWeights(a, b, bias, scaling, gain))
    return tuple(weights)


def draw_gain(size: int, generator: torch.Generator) -> torch.Tensor:
    """Of either sign, large and small."""
    return torch.randn(size, generator=generator) + 1


def make_table(
    target: LoraTarget,
    adapters: Sequence[Sequence[SliceWeights | None]],
    compute_dtype: torch.dtype,
    backend: KernelBackend,
    capacity: int | None = None,
    device: str = "cpu",
) -> SlotTable:
    """A poisoned arena with the adapters packed into it in slot order."""
    sizes = [backend.packed_nbytes(weights, compute_dtype) for weights in adapters]
    buffer = torch.full((sum(sizes) + 256 * len(sizes) + 64,), POISON, dtype=torch.uint8, device=device)
    table = SlotTable([target], capacity or len(adapters), buffer)
    cursor = 64
    for lora_slot, (weights, size) in enumerate(zip(adapters, sizes, strict=True)):
        layouts = backend.pack(weights, compute_dtype, buffer[cursor : cursor + size])
        table.set_block(target.name, lora_slot, cursor, layouts)
        cursor += size + 192
    table.flush()
    return table


def expected_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[LoraSegment],
    adapters: Sequence[Sequence[SliceWeights | None]],
    slices: Sequence[LoraSlice],
) -> torch.Tensor:
    """The formula, token by token in float64."""
    out, inputs = _wide(y).copy(), _wide(x)
    for segment in segments:
        for s, weights in zip(slices, adapters[segment.lora_slot], strict=True):
            if weights is None:
                continue
            gain = np.ones(s.out_features) if weights.gain is None else _wide(weights.gain)
            for t in range(segment.start, segment.end):
                delta = np.zeros(s.out_features)
                if weights.lora_a is not None and weights.lora_b is not None:
                    delta += gain * weights.scaling * (_wide(weights.lora_b) @ (_wide(weights.lora_a) @ inputs[t]))
                if weights.bias is not None:
                    delta += _wide(weights.bias)
                of_slice = slice(s.out_offset, s.out_offset + s.out_features)
                out[t, of_slice] = (1 + segment.weight * (gain - 1)) * out[t, of_slice] + segment.weight * delta
    return torch.from_numpy(out)


def expected_input(
    x: torch.Tensor,
    segments: Sequence[LoraSegment],
    adapters: Sequence[Sequence[SliceWeights | None]],
    slice_index: int = 0,
) -> torch.Tensor:
    """scale_input of one slice, in float64."""
    out = _wide(x).copy()
    for segment in segments:
        weights = adapters[segment.lora_slot][slice_index]
        if weights is not None and weights.input_gain is not None:
            out[segment.start : segment.end] *= 1 + segment.weight * (_wide(weights.input_gain) - 1)
    return torch.from_numpy(out)


def _wide(t: torch.Tensor) -> np.ndarray:
    return t.to(torch.float64).numpy()


# -------------------------------------------------------------------------------------------------------------- batches


def segments_of(slots: Sequence[int]) -> list[LoraSegment]:
    """Runs of equal lora_slot; -1 is in none."""
    segments, start = [], 0
    for slot, run in itertools.groupby(slots):
        end = start + len(list(run))
        if slot >= 0:
            segments.append(LoraSegment(start, end, slot))
        start = end
    return segments


def draw_slots(popularity: str, batch: int, num_adapters: int, rng: np.random.Generator) -> list[int]:
    """lora_slot of each row, in slot order; base rows (-1) among them where the popularity is mixed."""
    slots = {
        "distinct": np.arange(batch) % num_adapters,
        "uniform": rng.integers(-1, num_adapters, batch),
        "skewed": np.minimum(rng.zipf(1.5, batch) - 2, num_adapters - 1),
        "identical": np.full(batch, num_adapters - 1),
        "none": np.full(batch, -1),
    }[popularity]
    return sorted(slots.tolist())


@dataclass(frozen=True)
class Problem:
    """One add_lora: `y` is the middle of a wider, poisoned tensor, and base rows of `x` and `y` are NaN."""

    target: LoraTarget
    adapters: list[tuple[SliceWeights | None, ...]]
    plan: LoraPlan
    x: torch.Tensor
    y: torch.Tensor
    is_base: torch.Tensor

    def padded_y(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(a wider tensor full of NaN but for y, the view of y inside it)"""
        around = torch.full((self.y.shape[0] + 2, self.y.shape[1] + 6), float("nan"), dtype=self.y.dtype)
        inner = around[1:-1, 3:-3]
        inner.copy_(self.y)
        return around, inner


def make_problem(
    target: LoraTarget,
    adapters: list[tuple[SliceWeights | None, ...]],
    segments: Sequence[LoraSegment],
    num_tokens: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Problem:
    out = sum(s.out_features for s in target.slices)
    x = torch.randn(num_tokens, target.in_features, generator=generator).to(dtype)
    y = torch.randn(num_tokens, out, generator=generator).to(dtype)
    is_base = torch.ones(num_tokens, dtype=torch.bool)
    for segment in segments:
        is_base[segment.start : segment.end] = False
    x[is_base] = float("nan")
    y[is_base] = float("nan")
    plan = LoraPlan.build(segments, num_tokens, capacity=max(len(segments), 1) + 3)
    return Problem(target, adapters, plan, x, y, is_base)


def run(problem: Problem, backend: KernelBackend, table: SlotTable) -> torch.Tensor:
    """y after add_lora; asserts that nothing but the segments' rows was written."""
    around, inner = problem.padded_y()
    before = around.clone()
    first_row = table.first_row(problem.target.name)
    backend.add_lora(inner, problem.x, problem.plan, table, first_row, problem.target.slices)
    untouched = torch.ones(around.shape, dtype=torch.bool)
    untouched[1:-1, 3:-3] = problem.is_base[:, None]
    assert same_bits(around[untouched], before[untouched])
    return inner


def run_input(problem: Problem, backend: KernelBackend, table: SlotTable) -> torch.Tensor:
    """x after scale_input; asserts that nothing but the segments' rows was written."""
    around = torch.full((problem.x.shape[0] + 2, problem.x.shape[1] + 6), float("nan"), dtype=problem.x.dtype)
    inner = around[1:-1, 3:-3]
    inner.copy_(problem.x)
    before = around.clone()
    backend.scale_input(inner, problem.plan, table, table.first_row(problem.target.name))
    untouched = torch.ones(around.shape, dtype=torch.bool)
    untouched[1:-1, 3:-3] = problem.is_base[:, None]
    assert same_bits(around[untouched], before[untouched])
    return inner


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Within the tolerance of the dtype, relative to the largest expected value."""
    if expected.numel() == 0:
        assert got.shape == expected.shape
        return
    largest = max(expected.abs().max().item(), 1e-30)
    error = (got.to(torch.float64) - expected.to(torch.float64)).abs().max().item()
    limit = TOLERANCE[dtype or got.dtype]
    assert error <= limit * largest, f"error {error / largest:.2e} of the largest value, allowed {limit:.0e}"
