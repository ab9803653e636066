"""FlashAttention 3 in place of the prefill kernel: which sequences it runs, and how. A fake computes its formula."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from loraplex.kernels.triton import attention
from loraplex.kernels.triton.flash_attention import MODULE, flash_attention_absence, flash_attention_gap
from loraplex.kernels.triton.launch import H100
from tests.kernels.cases import BF16, FP16, FP32, assert_close, case_id, pairwise, same_bits
from tests.kernels.test_attention import LAYER
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention
from tests.kernels.triton.test_attention import CountingLauncher, Rig

HOPPER = (9, 0)
BATCHES: dict[str, tuple[list[int], list[int]]] = {
    "whole": ([7, 20], [7, 20]),
    "chunked": ([5, 9], [21, 48]),
    "mixed": ([1, 9, 1, 1, 12], [30, 12, 64, 1, 12]),
    "few_behind_much": ([1, 5, 40], [700, 1100, 40]),
}
DIMENSIONS: dict[str, list[Any]] = {
    "batch": list(BATCHES),
    "head_dim": [16, 64, 96],
    "heads": [(2, 2), (6, 2), (7, 1)],
    "block_size": [8, 16, 48],
    "window": [None, 1, 16, 33],
}
CASES = pairwise(DIMENSIONS)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttention:
    return FakeFlashAttention().install(monkeypatch)


def run(rig: Rig, launcher: CountingLauncher, window: int | None = None) -> torch.Tensor:
    layer = rig.kv[:, LAYER]
    assert flash_attention_gap(HOPPER, rig.q, layer, window) is None
    return attention.paged_attention(launcher, rig.q, layer, rig.plan, rig.scale, window, is_flash=True)


def names(launcher: CountingLauncher) -> list[str]:
    return [name.removesuffix("_attention_kernel") for name, _ in launcher.launched]


# ---------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_float64_loop(case: dict[str, Any], flash: FakeFlashAttention) -> None:
    rig = Rig(*BATCHES[case["batch"]], case["heads"], case["head_dim"], case["block_size"], FP16)
    before = rig.kv.clone()
    got = run(rig, CountingLauncher(), case["window"])
    assert len(flash.calls) == 1
    assert_close(got, rig.expected(case["window"]), FP16)
    assert got.is_contiguous()
    assert same_bits(rig.kv, before)


def test_prompts_are_its_own_and_decodes_the_kernels(flash: FakeFlashAttention) -> None:
    """Also in later layers, for which nothing is uploaded again."""
    rig, launcher = Rig([1, 40, 1, 9], [30, 40, 7, 20], dtype=FP16), CountingLauncher()
    for window in (None, 6, None):
        assert_close(run(rig, launcher, window), rig.expected(window), FP16)
    assert names(launcher) == ["decode"] * 3
    assert [call["window"] for call in flash.calls] == [(-1, -1), (5, 0), (-1, -1)]
    assert flash.calls[0]["lens"].tolist() == [0, 40, 0, 20]
    assert flash.calls[0]["max_seqlen_q"] == 40
    assert flash.calls[2]["lens"] is flash.calls[0]["lens"]


def test_a_step_of_decodes_never_asks_it(flash: FakeFlashAttention) -> None:
    rig, launcher = Rig([1, 1], [30, 300], dtype=FP16), CountingLauncher()
    captured = replace(rig.plan, query_lens=(), context_lens_host=(), scratch={})
    layer = rig.kv[:, LAYER]
    got = attention.paged_attention(launcher, rig.q, layer, captured, rig.scale, None, is_flash=True)
    assert_close(got, rig.expected(), FP16)
    assert flash.calls == []


def test_few_queries_behind_a_long_prefix_stay_with_the_kernel_that_splits(flash: FakeFlashAttention) -> None:
    rig, launcher = Rig([5, 1, 1100], [1100, 20, 1100], heads=(2, 1), dtype=FP16), CountingLauncher()
    assert_close(run(rig, launcher), rig.expected(), FP16)
    assert names(launcher) == ["prefill", "combine", "decode"]
    assert flash.calls[0]["lens"].tolist() == [0, 0, 1100]


def test_a_step_without_a_prompt_for_it(flash: FakeFlashAttention) -> None:
    rig, launcher = Rig([5, 1], [1100, 20], heads=(2, 1), dtype=FP16), CountingLauncher()
    assert_close(run(rig, launcher), rig.expected(), FP16)
    assert names(launcher) == ["prefill", "combine", "decode"]
    assert flash.calls == []


@pytest.mark.usefixtures("flash")
def test_who_runs_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """Lengths from one query behind much to whole prompts, and a window that leaves nothing to split."""
    lengths = [(q, c) for q in (1, 2, 16, 100, 200, 5000) for c in (q, q + 100, q + 1000, q + 30000)]
    for window, heads in ((None, 8), (500, 8), (None, 1)):
        rule = attention._FlashRule(16, heads, window, CountingLauncher())
        taken = {pair for pair in lengths if rule.takes(*pair)}
        assert all((q, q) in taken for q, _ in lengths if q > 1)
        assert not any(q == 1 for q, _ in taken)
        assert ((2, 30002) in taken) is (window is not None)
        assert (5000, 35000) in taken


def test_without_it_nothing_changes(flash: FakeFlashAttention) -> None:
    rig, launcher = Rig([1, 40], [30, 40], dtype=FP16), CountingLauncher()
    assert_close(rig.run(launcher=launcher), rig.expected(), FP16)
    assert names(launcher) == ["prefill", "decode"]
    assert flash.calls == []


# ------------------------------------------------------------------------------------------------------------ the check


def gap(
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    skew: int = 0,
) -> str | None:
    q = torch.zeros(3, heads[0] + 1, head_dim + skew, dtype=dtype)[:, 1:, :head_dim]
    kv_layer = torch.zeros(4, 2, 2, heads[1], block_size, head_dim, dtype=kv_dtype or dtype)[:, LAYER]
    return flash_attention_gap(HOPPER, q, kv_layer, window)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"dtype": FP16, "window": 4096}, None),
        ({"head_dim": 256, "block_size": 56}, None),
        ({"head_dim": 192, "window": 10}, None),
        ({"dtype": FP32}, "float32"),
        ({"kv_dtype": FP16}, "the cache is torch.float16"),
        ({"head_dim": 264}, "heads of 264"),
        ({"head_dim": 36}, "heads of 36"),
        ({"block_size": 64}, "blocks of 64"),
        ({"head_dim": 256, "window": 10}, "sliding window"),
        ({"skew": 4}, "16 bytes"),
    ],
    ids=str,
)
def test_what_it_covers(options: dict[str, Any], reason: str | None) -> None:
    found = gap(**options)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.usefixtures("flash")
def test_queries_that_are_not_dense_are_not_covered() -> None:
    q = torch.zeros(3, 64, 4, dtype=BF16).transpose(1, 2)
    kv_layer = torch.zeros(4, 2, 2, 16, 64, dtype=BF16)
    assert "16 bytes" in (flash_attention_gap(HOPPER, q, kv_layer, None) or "")


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("capability", "is_there"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)]
)
def test_gpus(capability: tuple[int, int], is_there: bool) -> None:
    found = flash_attention_absence(capability)
    assert found is None if is_there else found is not None and f"{capability[0]}.{capability[1]}" in found


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert flash_attention_absence(HOPPER) == "it is not installed"
    assert gap() == "it is not installed"


def test_what_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for line, reason in (
        ("import flash_attn_3_that_is_not_there", "flash_attn_3_that_is_not_there"),
        ("raise ImportError('undefined symbol: at')", "undefined symbol"),
    ):
        (tmp_path / f"{MODULE}.py").write_text(f"{line}  # {reason}\n")
        found = flash_attention_absence(HOPPER)
        assert found is not None
        assert found.startswith("it cannot be imported")
        assert reason in found
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    assert "flash_attn_with_kvcache" in (flash_attention_absence(HOPPER) or "")


def test_the_interpreters_gpu_is_a_hopper() -> None:
    assert H100.capability == HOPPER
