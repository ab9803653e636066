"""Native attention: a query's result has the same bits whatever is around it, and nothing past a context ever shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.native import library
from loraplex.kernels.native.attention import kv_layout_gap
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.quantized_weights import kv_width
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.step_batch import AttentionPlan
from tests.kernels.cases import BF16, FP16, FP32, INT8, NATIVE, POISON, assert_close, case_id, pairwise, same_bits
from tests.kernels.test_attention import BATCHES, LAYER, check, draw, fill, make_plan, poisoned_kv

if not isinstance(NATIVE, library.NativeLibrary):
    pytest.skip(NATIVE.reason, allow_module_level=True)


def backends_of_this_machine() -> dict[str, NativeBackend]:
    best = NATIVE.functions.loraplex_best_isa().decode()
    return {isa: NativeBackend(library.load(isa), 1) for isa in library.ISAS[library.ISAS.index(best) :]}


BY_ISA = backends_of_this_machine()
each_isa = pytest.mark.parametrize("backend", BY_ISA.values(), ids=BY_ISA)
each_kv_dtype = pytest.mark.parametrize("kv_dtype", [FP32, FP16, BF16, INT8], ids=str)

DIMENSIONS: dict[str, list[Any]] = {
    "batch": list(BATCHES),
    "heads": [(1, 1), (9, 3), (7, 7), (8, 1), (14, 2), (71, 1)],
    "head_dim": [16, 32, 48, 64, 80, 96, 112, 128, 256],
    "block_size": [16, 32, 48, 64, 128],
    "window": [None, 1, 7, 63, 64, 65, 200],
    "dtype": [FP32],
    "kv_dtype": [FP32, FP16, BF16, INT8],
    "isa": list(BY_ISA),
}
CASES = pairwise(DIMENSIONS)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any]) -> None:
    check(**{k: v for k, v in case.items() if k != "isa"}, backends=[BY_ISA[case["isa"]]])


def test_cases_are_few() -> None:
    assert len(CASES) <= 400


# ------------------------------------------------------------------------------------------------------- one sequence


@dataclass(frozen=True)
class Sequence_:
    """Queries, keys and values of one sequence, position by position."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def draw(cls, length: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int = 0) -> Sequence_:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((length, num_heads, head_dim), *[(length, num_kv_heads, head_dim)] * 2)
        return cls(*(draw(generator, FP32, *shape) * 2 for shape in shapes))


def attend(
    backend: KernelBackend,
    sequences: Sequence[Sequence_],
    ranges: Sequence[tuple[int, int]],
    *,
    window: int | None = None,
    kv_dtype: torch.dtype = FP32,
    block_size: int = 16,
    seed: int = 0,
    poison: int = POISON,
    sinks: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Positions [start, end) of each sequence in one step, over a cache of their own, all else `poison`."""
    plan, num_blocks = make_plan([end - start for start, end in ranges], [end for _, end in ranges], block_size, seed)
    _, num_kv_heads, head_dim = sequences[0].keys.shape
    kv = poisoned_kv(num_blocks, num_kv_heads, block_size, head_dim, kv_dtype)
    kv.view(torch.uint8).fill_(poison)
    fill(backend, kv, plan, [(s.keys[:end], s.values[:end]) for s, (_, end) in zip(sequences, ranges, strict=True)])
    q = torch.cat([s.q[start:end] for s, (start, end) in zip(sequences, ranges, strict=True)])
    out = backend.paged_attention(q, kv[:, LAYER], plan, head_dim**-0.5, window, None, sinks)
    return list(out.split([end - start for start, end in ranges]))


def cuts(length: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    borders = sorted({0, length, *rng.integers(1, length, rng.integers(1, 9)).tolist()})
    return list(itertools.pairwise(borders))


@each_isa
@each_kv_dtype
@pytest.mark.parametrize("window", [None, 1, 40, 64, 150])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((14, 2), 64), ((4, 4), 80), ((5, 1), 16)])
def test_a_prompt_whole_in_chunks_and_token_by_token(
    backend: NativeBackend, kv_dtype: torch.dtype, window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    length = 203
    sequence = Sequence_.draw(length, *heads, head_dim)
    (whole,) = attend(backend, [sequence], [(0, length)], window=window, kv_dtype=kv_dtype)
    rng = np.random.default_rng(0)
    for chunks in [*(cuts(length, rng) for _ in range(4)), [(p, p + 1) for p in range(0, length, 7)]]:
        for start, end in chunks:
            (part,) = attend(backend, [sequence], [(start, end)], window=window, kv_dtype=kv_dtype, seed=end)
            assert torch.equal(part, whole[start:end])


@each_isa
@pytest.mark.parametrize("kv_dtype", [FP32, INT8], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_prompt_with_sinks_whole_in_chunks_and_token_by_token(
    backend: NativeBackend, kv_dtype: torch.dtype, window: int | None
) -> None:
    length, sinks = 150, torch.linspace(-3, 10, 9)
    sequence = Sequence_.draw(length, 9, 3, 64)
    (whole,) = attend(backend, [sequence], [(0, length)], window=window, kv_dtype=kv_dtype, sinks=sinks)
    for chunks in [cuts(length, np.random.default_rng(0)), [(p, p + 1) for p in range(0, length, 7)]]:
        for start, end in chunks:
            (part,) = attend(
                backend, [sequence], [(start, end)], window=window, kv_dtype=kv_dtype, seed=end, sinks=sinks
            )
            assert torch.equal(part, whole[start:end])


@each_isa
@each_kv_dtype
def test_neighbours_and_blocks_change_no_bit(backend: NativeBackend, kv_dtype: torch.dtype) -> None:
    sequences = [Sequence_.draw(length, 9, 3, 64, seed) for seed, length in enumerate([300, 64, 1, 129, 65, 33])]
    ranges = [(299, 300), (0, 64), (0, 1), (100, 129), (64, 65), (3, 33)]
    alone = [attend(backend, [s], [r], kv_dtype=kv_dtype)[0] for s, r in zip(sequences, ranges, strict=True)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 0, 0, 0, 1]):
        for block_size in (16, 32, 64, 80):
            together = attend(
                backend,
                [sequences[i] for i in order],
                [ranges[i] for i in order],
                kv_dtype=kv_dtype,
                block_size=block_size,
                seed=block_size,
            )
            assert all(torch.equal(got, alone[i]) for got, i in zip(together, order, strict=True))


@each_isa
@pytest.mark.parametrize("kv_dtype", [FP32, INT8], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("ranges", [[(400, 401)] * 16, [(0, 401)], [(0, 100), (300, 301), (50, 350)]], ids=str)
def test_threads_change_no_bit(
    backend: NativeBackend, kv_dtype: torch.dtype, threads: int, ranges: list[tuple[int, int]]
) -> None:
    sequences = [Sequence_.draw(401, 9, 3, 64, seed) for seed in range(len(ranges))]
    many = NativeBackend(backend.library, threads)
    ones, others = (attend(each, sequences, ranges, kv_dtype=kv_dtype) for each in (backend, many))
    assert all(map(torch.equal, ones, others))


@pytest.mark.skipif(not {"avx512", "avx2"} <= set(BY_ISA), reason="this machine has not both AVX2 and AVX-512")
@each_kv_dtype
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 256])
@pytest.mark.parametrize("window", [None, 70])
def test_instruction_sets_give_the_same_bits(kv_dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    sequences = [Sequence_.draw(150, 14, 2, head_dim, seed) for seed in range(3)]
    ranges = [(0, 150), (149, 150), (37, 100)]
    wide, narrow = (
        attend(BY_ISA[isa], sequences, ranges, kv_dtype=kv_dtype, window=window) for isa in ("avx512", "avx2")
    )
    assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))


@each_isa
def test_python_threads_do_not_disturb_one_another(backend: NativeBackend) -> None:
    sequences = [Sequence_.draw(250, 9, 3, 64, seed) for seed in range(4)]
    ranges = [(0, 250), (249, 250), (100, 180), (3, 9)]
    expected = [attend(backend, [s], [r])[0] for s, r in zip(sequences, ranges, strict=True)]

    def again(i: int) -> bool:
        many = NativeBackend(backend.library, 1 + i % 3)
        return torch.equal(attend(many, [sequences[i % 4]], [ranges[i % 4]])[0], expected[i % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(again, range(40)))


# ------------------------------------------------------------------------------------------------- what must not show


@each_isa
@each_kv_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_bytes_past_a_context_never_show(backend: NativeBackend, kv_dtype: torch.dtype, window: int | None) -> None:
    """NaN, infinity and huge numbers behind every length of context give the bits of zeros."""
    for length in [*range(1, 20), 31, 33, 63, 64, 65, 127]:
        sequence = Sequence_.draw(length, 6, 2, 32)
        for ranges in [(length - 1, length)], [(0, length)]:
            clean, *others = (
                attend(backend, [sequence], ranges, kv_dtype=kv_dtype, window=window, poison=byte)[0]
                for byte in (0, POISON, 0x7F, 0xFE, 0x7C)
            )
            assert clean.isfinite().all()
            assert all(torch.equal(other, clean) for other in others)


@each_isa
def test_keys_before_a_window_never_show(backend: NativeBackend) -> None:
    sequence = Sequence_.draw(200, 6, 2, 32)
    (clean,) = attend(backend, [sequence], [(199, 200)], window=50)
    sequence.keys[:150] = 1e30
    sequence.values[:150] = -1e30
    assert torch.equal(attend(backend, [sequence], [(199, 200)], window=50)[0], clean)


@each_isa
def test_a_nan_of_ones_own_shows_and_stays_with_its_query(backend: NativeBackend) -> None:
    sequence = Sequence_.draw(70, 4, 2, 32)
    sequence.q[40, 1] = float("nan")
    (got,) = attend(backend, [sequence], [(0, 70)])
    is_nan = got.isnan().all(-1)
    assert is_nan[40, 1]
    assert is_nan.sum() == 1
    assert got[~is_nan].isfinite().all()


@each_isa
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e4])
def test_extreme_scores(backend: NativeBackend, scale: float) -> None:
    """All keys alike, and one key alone: what a softmax gives without losing its sum."""
    sequence = Sequence_.draw(100, 2, 1, 32)
    sequence.q.mul_(scale)
    (got,) = attend(backend, [sequence], [(0, 100)])
    (expected,) = attend(ReferenceBackend(), [sequence], [(0, 100)])
    assert_close(got, expected)


# --------------------------------------------------------------------------------------------------- rotary positions


def rotary_case(num_tokens: int, head_dim: int, kv_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(fused qkv of 6 and 2 heads, cos, sin, a poisoned cache, slots)"""
    generator = torch.Generator().manual_seed(num_tokens)
    qkv = draw(generator, FP32, num_tokens, 10, head_dim)
    angles = draw(generator, FP32, num_tokens, head_dim) * 3
    kv = poisoned_kv(-(-num_tokens // 16) + 2, 2, 16, head_dim, kv_dtype)
    slots = torch.randperm(kv.shape[0] * 16, generator=generator)[:num_tokens]
    return qkv, angles.cos(), angles.sin(), kv, slots


def rotate(backend: KernelBackend, case: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    qkv, cos, sin, kv, slots = case
    q, k, v = qkv.clone().split_with_sizes([6, 2, 2], dim=1)
    kv = kv.clone()
    return backend.rotary_write_kv(q, k, v, cos, sin, kv[:, LAYER], slots), kv


@each_kv_dtype
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 256])
@pytest.mark.parametrize("num_tokens", [1, 5, 600])
def test_rotary_write_kv_has_the_same_bits_everywhere(kv_dtype: torch.dtype, head_dim: int, num_tokens: int) -> None:
    """For each instruction set with a fused multiply-add, any number of threads, and each token alone."""
    case = rotary_case(num_tokens, head_dim, kv_dtype)
    for backend in BY_ISA.values():
        q, kv = rotate(backend, case)
        assert all(map(same_bits, rotate(NativeBackend(backend.library, 3), case), (q, kv)))
        for t in range(0, num_tokens, 97):
            alone, _ = rotate(backend, (*(x[t : t + 1] for x in case[:3]), case[3], case[4][t : t + 1]))
            assert torch.equal(alone[0], q[t])
        if backend.library.isa != "portable":
            assert all(map(same_bits, rotate(BY_ISA["avx2"], case), (q, kv)))


@each_isa
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 256])
def test_rotary_against_the_reference(backend: NativeBackend, head_dim: int) -> None:
    case = rotary_case(40, head_dim, FP32)
    assert_close(rotate(backend, case)[0], rotate(ReferenceBackend(), case)[0])


# ------------------------------------------------------------------------------------------------- what is not native


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "is_native"),
    [
        *((16, 64, FP32, True), (48, 256, BF16, True), (8, 64, FP32, False), (16, 24, FP16, False)),
        *((16, 272, FP32, False), (16, 256, INT8, True), (16, 24, INT8, False), (16, 272, INT8, False)),
    ],
)
def test_which_layouts_are_native(block_size: int, head_dim: int, dtype: torch.dtype, is_native: bool) -> None:
    kv = torch.zeros(2, 3, 2, 1, block_size, kv_width(head_dim, dtype), dtype=dtype)
    assert (kv_layout_gap(kv[:, LAYER]) is None) is is_native


def test_large_heads_fall_back_to_torch() -> None:
    sequence = Sequence_.draw(30, 2, 1, 272)
    backend = NativeBackend(BY_ISA["portable"].library, 1)
    (got,) = attend(backend, [sequence], [(0, 30)], kv_dtype=BF16)
    assert {(each.op, each.backend, each.calls) for each in backend.fallbacks()} == {
        ("rotary_write_kv", "native", 1),
        ("paged_attention", "native", 1),
    }
    assert backend.fallbacks()[0].reason == "heads of 272, no multiple of 16 up to 256"
    sequence = Sequence_(sequence.q, sequence.keys.to(BF16), sequence.values.to(BF16))
    (expected,) = attend(ReferenceBackend(), [sequence], [(0, 30)], kv_dtype=BF16)
    assert_close(got, expected)


def test_one_step_serves_layers_of_different_windows_and_shapes() -> None:
    """What is kept in the plan's scratch is not mixed up between layers."""
    backend = next(iter(BY_ISA.values()))
    plan, num_blocks = make_plan([1, 3, 1], [40, 20, 7], 16, seed=1)
    for heads, kv_heads, head_dim in ((4, 2, 16), (4, 2, 32), (8, 2, 16), (4, 2, 16)):
        generator = torch.Generator().manual_seed(heads)
        context = [
            (draw(generator, FP32, n, kv_heads, head_dim), draw(generator, FP32, n, kv_heads, head_dim))
            for n in plan.context_lens_host
        ]
        q = draw(generator, FP32, 5, heads, head_dim)
        outputs = []
        for other in (backend, ReferenceBackend()):
            kv = poisoned_kv(num_blocks, kv_heads, 16, head_dim, FP32)
            fill(other, kv, plan, context)
            outputs.append([other.paged_attention(q, kv[:, LAYER], plan, 0.25, window) for window in (None, 6)])
        for got, expected in zip(*outputs, strict=True):
            assert_close(got, expected)


def test_a_plan_is_rebuilt_from_its_fields_alone() -> None:
    """Equal plans give equal bits: nothing of a step is kept but in its own scratch."""
    sequence = Sequence_.draw(50, 4, 2, 32)
    backend = next(iter(BY_ISA.values()))
    plan, num_blocks = make_plan([50], [50], 16, seed=0)
    kv = poisoned_kv(num_blocks, 2, 16, 32, FP32)
    fill(backend, kv, plan, [(sequence.keys, sequence.values)])
    copies = [
        AttentionPlan(
            plan.q_indptr.clone(),
            plan.context_lens.clone(),
            plan.block_tables.clone(),
            plan.kv_slot_mapping,
            plan.query_lens,
            plan.context_lens_host,
            plan.block_size,
        )
        for _ in range(3)
    ]
    first, *others = (backend.paged_attention(sequence.q, kv[:, LAYER], p, 1 / math.sqrt(32), None) for p in copies)
    assert all(torch.equal(first, other) for other in others)
