"""Triton's paged_attention in the interpreter: a float64 loop over a KV cache whose every other byte is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.triton import attention
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import A100, H100, GpuTarget, TritonLauncher
from loraplex.kernels.triton.workspace import Workspace
from tests.kernels.cases import FP16, FP32, assert_close, case_id, pairwise, same_bits
from tests.kernels.test_attention import LAYER, draw, expected_attention, fill, make_plan, poisoned_kv

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend()

BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1], [1, 40, 17]),
    "split": ([1, 1], [300, 9]),
    "prefill": ([7, 20], [7, 20]),
    "chunked": ([5, 9], [21, 48]),
    "mixed": ([1, 9, 1], [30, 12, 64]),
}
DIMENSIONS: dict[str, list[Any]] = {
    "batch": list(BATCHES),
    "head_dim": [16, 32, 64, 80, 96, 128, 256],
    "heads": [(2, 2), (6, 2), (7, 1), (8, 1)],
    "block_size": [8, 16, 24, 128],
    "window": [None, 1, 16, 33, 280],
    "dtype": [FP32, FP16],
    "kv_dtype": [FP32, FP16],
}
CASES = pairwise(DIMENSIONS)


class CountingLauncher(TritonLauncher):
    """Remembers the names and grids of what it ran; `target` may be another GPU's."""

    def __init__(self, target: GpuTarget = H100) -> None:
        super().__init__(CPU)
        self.target = target
        self.launched: list[tuple[str, tuple[int, ...]]] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.launched.append((kernel.__name__, grid))
        super().launch(kernel, grid, *args, **options)


class Rig:
    """A batch with random queries, keys and values; `kv` holds the keys and values, and NaN in every other place."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = FP32,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.plan, num_blocks = make_plan(query_lens, context_lens, block_size, seed)
        num_heads, num_kv_heads = heads
        shapes = [(n, num_kv_heads, head_dim) for n in context_lens]
        self.context = [(draw(generator, dtype, *s), draw(generator, dtype, *s)) for s in shapes]
        # q as attention gets it: a slice of a fused projection
        self.q = draw(generator, dtype, sum(query_lens), num_heads + 2, head_dim)[:, 1:-1]
        self.kv = poisoned_kv(num_blocks, num_kv_heads, block_size, head_dim, kv_dtype or dtype)
        fill(REFERENCE, self.kv, self.plan, self.context)
        self.scale = head_dim**-0.5

    def expected(self, window: int | None = None) -> torch.Tensor:
        stored = [(keys.to(self.kv.dtype), values.to(self.kv.dtype)) for keys, values in self.context]
        return expected_attention(self.q, self.plan, stored, self.scale, window)

    def run(
        self,
        window: int | None = None,
        plan: AttentionPlan | None = None,
        q: torch.Tensor | None = None,
        launcher: TritonLauncher | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        q, plan, launcher = self.q if q is None else q, plan or self.plan, launcher or TritonLauncher(CPU)
        return attention.paged_attention(launcher, q, self.kv[:, LAYER], plan, self.scale, window, workspace)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any]) -> None:
    check(**case)


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("heads", DIMENSIONS["heads"], ids=str)
@pytest.mark.parametrize("head_dim", DIMENSIONS["head_dim"])
def test_full_product(batch: str, heads: tuple[int, int], head_dim: int) -> None:
    for block_size in DIMENSIONS["block_size"]:
        for window in DIMENSIONS["window"]:
            for dtype in DIMENSIONS["dtype"]:
                for kv_dtype in DIMENSIONS["kv_dtype"]:
                    check(batch, head_dim, heads, block_size, window, dtype, kv_dtype)


def check(
    batch: str,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    rig = Rig(*BATCHES[batch], heads, head_dim, block_size, dtype, kv_dtype)
    before = rig.kv.clone()
    got = rig.run(window)
    assert got.shape == rig.q.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_close(got, rig.expected(window), dtype)
    assert same_bits(rig.kv, before)


def test_cases_are_few() -> None:
    assert len(CASES) <= 60


# --------------------------------------------------------------------------------------------------------------- decode


def test_decode_is_one_launch_that_reads_nothing_of_the_host() -> None:
    """As a captured step: every length comes from the device, and the grid from shapes."""
    rig, launcher = Rig([1, 1, 1], [20, 300, 64]), CountingLauncher()
    captured = replace(rig.plan, query_lens=(), context_lens_host=(), scratch={})
    assert_close(rig.run(plan=captured, launcher=launcher), rig.expected())
    width = rig.plan.block_tables.shape[1] * 16
    assert launcher.launched == [("decode_attention_kernel", (2, 3, -(-width // 256)))]


def test_padding_rows_get_zeros() -> None:
    """Rows behind the batch: context 0, table row 0, and queries that may be NaN."""
    rig = Rig([1, 1], [20, 33])
    expected = rig.expected()
    q = torch.cat([rig.q, torch.full_like(rig.q, float("nan"))])
    for width in (rig.plan.block_tables.shape[1], 40):  # one part or several
        tables = torch.zeros(4, width, dtype=torch.int32)
        tables[:2, : rig.plan.block_tables.shape[1]] = rig.plan.block_tables
        padded = replace(
            rig.plan,
            q_indptr=torch.arange(5, dtype=torch.int32),
            context_lens=torch.tensor([20, 33, 0, 0], dtype=torch.int32),
            block_tables=tables,
            scratch={},
        )
        for window in (None, 1000):
            got = rig.run(window, plan=padded, q=q)
            assert_close(got[:2], expected)
            assert torch.equal(got[2:], torch.zeros_like(got[2:]))


@pytest.mark.parametrize("window", [None, 270])
def test_decode_has_the_same_bits_in_every_batch(window: int | None) -> None:
    """Alone, among neighbours of other lengths, with wider tables, and in a step that prefills others too."""
    rig = Rig([1, 1, 6, 1], [530, 3, 40, 300], head_dim=32)
    got = rig.run(window)
    assert_close(got, rig.expected(window))
    rows = {0: 0, 1: 1, 3: 8}
    for sequence, row in rows.items():
        width = -(-rig.plan.context_lens_host[sequence] // 16)
        alone = replace(
            rig.plan,
            q_indptr=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=rig.plan.context_lens[sequence : sequence + 1],
            block_tables=rig.plan.block_tables[sequence : sequence + 1, :width],
            scratch={},
        )
        assert same_bits(rig.run(window, plan=alone, q=rig.q[row : row + 1]), got[row : row + 1])


def test_many_heads_on_one_kv_head() -> None:
    rig = Rig([1, 1], [300, 40], heads=(20, 1))
    assert_close(rig.run(), rig.expected())
    prefill = Rig([3, 9], [30, 9], heads=(20, 1))
    assert_close(prefill.run(), prefill.expected())


def test_long_contexts_have_longer_parts_not_more() -> None:
    rig, launcher = Rig([1, 1], [8500, 700], heads=(2, 1)), CountingLauncher()
    assert_close(rig.run(launcher=launcher), rig.expected())
    assert launcher.launched == [("decode_attention_kernel", (1, 2, 32))]


def test_a_program_takes_several_parts_where_sequences_are_many() -> None:
    """The same bits as with a program for each part; counters are at zero again."""
    rig, workspace = Rig([1, 1, 1, 1], [1500, 300, 9, 0], heads=(8, 4)), Workspace("attention")
    launcher = CountingLauncher()
    whole = rig.run(launcher=launcher)
    assert launcher.launched == [("decode_attention_kernel", (4, 4, 6))]
    for num_sms, programs in ((1, 2), (3, 3), (4, 4)):
        launcher = CountingLauncher(replace(H100, num_sms=num_sms))
        assert same_bits(rig.run(launcher=launcher, workspace=workspace), whole)
        assert launcher.launched == [("decode_attention_kernel", (4, 4, programs))]
    assert not workspace.buffers["arrivals", torch.int32].any()


def test_decode_repeats_itself_and_leaves_its_counters_at_zero() -> None:
    rig, workspace = Rig([1, 1], [600, 300]), Workspace("attention")
    first = rig.run(workspace=workspace)
    for _ in range(2):
        assert same_bits(rig.run(workspace=workspace), first)
    assert not workspace.buffers["arrivals", torch.int32].any()


def test_counters_that_an_aborted_launch_left_are_reset() -> None:
    rig, backend = Rig([1, 1], [600, 300]), TritonBackend(CPU)
    workspace = backend.attention_workspace
    first = rig.run(workspace=workspace)
    workspace.buffers["sums", FP32].fill_(float("nan"))
    workspace.buffers["arrivals", torch.int32].fill_(1)  # who comes before the last believes to be it
    assert not same_bits(rig.run(workspace=workspace), first)
    backend.reset_workspace()
    assert same_bits(rig.run(workspace=workspace), first)


# -------------------------------------------------------------------------------------------------------------- prefill


def test_a_mixed_step_is_two_launches() -> None:
    rig, launcher = Rig([1, 40, 1, 9], [30, 40, 7, 20]), CountingLauncher()
    for window in (None, 6, None):  # layers share the plan
        assert_close(rig.run(window, launcher=launcher), rig.expected(window))
    names = [name for name, _ in launcher.launched]
    assert names == ["prefill_attention_kernel", "decode_attention_kernel"] * 3


@pytest.mark.parametrize("target", [H100, A100, GpuTarget((8, 6), 84, 101_376)], ids=lambda t: str(t.capability))
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_every_tiling(target: GpuTarget, dtype: torch.dtype) -> None:
    """With one multiprocessor, few rows are many: the large tiles."""
    rig = Rig([70, 3], [75, 200], heads=(6, 1), head_dim=32, dtype=dtype)
    for num_sms in (target.num_sms, 1):
        launcher = CountingLauncher(replace(target, num_sms=num_sms))
        assert_close(rig.run(50, launcher=launcher), rig.expected(50))


@pytest.mark.parametrize("window", [None, 700])
def test_few_queries_behind_a_long_prefix_are_split(window: int | None) -> None:
    """Parts that some rows, or all, see nothing of; the workspace holds NaN before."""
    rig, launcher = Rig([5, 1, 15], [1400, 20, 300], heads=(3, 1)), CountingLauncher()
    workspace = Workspace("attention")
    for name in ("sums", "softmax"):
        workspace.take(name, 1 << 15, FP32, CPU).fill_(float("nan"))
    assert_close(rig.run(window, launcher=launcher, workspace=workspace), rig.expected(window))
    prefill, combine, (last, _) = launcher.launched
    assert prefill == ("prefill_attention_kernel", (1, 3, 2))
    assert combine == ("combine_attention_kernel", (30, 1, 3))
    assert last == "decode_attention_kernel"


def test_a_short_window_is_not_split() -> None:
    rig, launcher = Rig([5], [1400], heads=(3, 1)), CountingLauncher()
    assert_close(rig.run(40, launcher=launcher), rig.expected(40))
    assert launcher.launched == [("prefill_attention_kernel", (1, 1, 1))]


def test_chunked_prefill_equals_whole() -> None:
    whole = Rig([37], [37], head_dim=32)
    expected = whole.run()
    for chunks in ([16, 16, 5], [1, 30, 6]):
        outputs, end = [], 0
        for chunk in chunks:
            start, end = end, end + chunk
            plan = replace(
                whole.plan,
                q_indptr=torch.tensor([0, chunk], dtype=torch.int32),
                context_lens=torch.tensor([end], dtype=torch.int32),
                query_lens=(chunk,),
                context_lens_host=(end,),
                scratch={},
            )
            outputs.append(whole.run(plan=plan, q=whole.q[start:end]))
        assert_close(torch.cat(outputs), expected)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2000)), min_size=1, max_size=20),
    queries=st.integers(1, 128),
)
def test_tiles_hold_each_query_once_the_longest_first(sequences: list[tuple[int, int]], queries: int) -> None:
    query_lens = np.array([query_len for query_len, _ in sequences])
    context_lens = query_lens + np.array([cached for _, cached in sequences])
    tiles = attention._tiles(query_lens, context_lens, queries)
    held = sorted(
        (sequence, query)
        for sequence, first in tiles.tolist()
        for query in range(first, min(first + queries, query_lens[sequence]))
    )
    assert held == [(i, q) for i, query_len in enumerate(query_lens) for q in range(query_len)]
    num_keys = [context_lens[s] - query_lens[s] + first for s, first in tiles.tolist()]
    assert num_keys == sorted(num_keys, reverse=True)


@pytest.mark.parametrize("lengths", [([1, 1], [600, 20]), ([20, 3, 1], [20, 100, 9])])
def test_soft_caps(lengths: tuple[list[int], list[int]]) -> None:
    rig, backend = Rig(*lengths), TritonBackend(CPU)
    stored = [(keys.to(rig.kv.dtype), values.to(rig.kv.dtype)) for keys, values in rig.context]
    for softcap, window in ((0.5, None), (20.0, 30)):
        got = backend.paged_attention(rig.q, rig.kv[:, LAYER], rig.plan, rig.scale, window, softcap)
        assert_close(got, expected_attention(rig.q, rig.plan, stored, rig.scale, window, softcap))
    assert not backend.fallbacks()


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [(([1, 1], [600, 20]), (4, 2)), (([20, 3, 1], [20, 100, 9]), (6, 2)), (([2], [1500]), (4, 4))],
)
def test_sinks(lengths: tuple[list[int], list[int]], heads: tuple[int, int]) -> None:
    """One is in the first part of a context alone, also where that is split, and where a window leaves parts out."""
    rig, backend = Rig(*lengths, heads), TritonBackend(CPU)
    stored = [(keys.to(rig.kv.dtype), values.to(rig.kv.dtype)) for keys, values in rig.context]
    sinks = torch.linspace(-2, 9, heads[0])
    for window, softcap in ((None, None), (30, None), (900, None), (None, 2.0)):
        got = backend.paged_attention(rig.q, rig.kv[:, LAYER], rig.plan, rig.scale, window, softcap, sinks)
        assert_close(got, expected_attention(rig.q, rig.plan, stored, rig.scale, window, softcap, sinks))
    assert not backend.fallbacks()


# -------------------------------------------------------------------------------------------------------------- backend


def test_backend_keeps_a_workspace_and_counts_what_it_does_not_cover() -> None:
    rig, backend = Rig([1], [600]), TritonBackend(CPU)
    got = backend.paged_attention(rig.q, rig.kv[:, LAYER], rig.plan, rig.scale, None)
    assert_close(got, rig.expected())
    assert backend.workspace_nbytes > 0
    assert backend.release_workspace() > 0
    assert backend.workspace_nbytes == 0
    assert not backend.fallbacks()
    wide = Rig([1], [5], head_dim=264)
    got = backend.paged_attention(wide.q, wide.kv[:, LAYER], wide.plan, wide.scale, None)
    assert_close(got, wide.expected())
    (found,) = backend.fallbacks()
    assert (found.label, found.calls) == ("paged_attention: heads of 264, more than 256", 1)
