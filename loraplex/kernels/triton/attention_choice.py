"""Which kernels run the attention of prompts: Triton's, or FlashAttention 3 where it is installed, right and faster.

It is tried at the start of an engine, on a step of the model's shapes: a build without some feature says so then, its
numbers are held against the Triton kernels', and both are timed.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.errors import ConfigError
from loraplex.kernels.device_copies import upload
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.triton.attention import paged_attention, paged_attention_gap
from loraplex.kernels.triton.flash_attention import flash_attention_gap
from loraplex.kernels.triton.launch import Launcher
from loraplex.kernels.triton.workspace import Workspace

logger = logging.getLogger(__name__)

LEAST_GAIN = 1.1
"""How many times as fast FlashAttention 3 has to be to be taken: so that what a measurement scatters seldom decides."""

TRIAL_TOKENS, TRIAL_TOKENS_INTERPRETED = 2048, 64
ROUNDS, CALLS_PER_ROUND = 7, 8
MOST_DIFFERENCE = 4
"""Of a row's numbers, in roundings of the dtype, relative to the row: each side is off by less than one."""


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Of a model: query heads, the queries' dtype, the KV memory [num_blocks, num_layers, 2, KH, block_size, D],
    windows of its layers, the soft cap of scores, whether heads have sinks."""

    num_heads: int
    dtype: torch.dtype
    kv: torch.Tensor
    sliding_windows: tuple[int | None, ...]
    softcap: float | None = None
    has_sinks: bool = False


def choose_attention(wanted: str, launcher: Launcher, shapes: AttentionShapes) -> bool:
    """Whether FlashAttention 3 runs prompts; `wanted`: the setting attention_backend. A log line says what and why.

    Raises ConfigError where it was asked for and cannot.
    """
    if wanted == "triton":
        return False
    reason, gain = _gap(launcher, shapes), 0.0
    if reason is None:
        reason, gain = _tried(launcher, shapes)
    if reason is not None and wanted == "flash_attn":
        raise ConfigError(f"attention_backend is flash_attn, which cannot run here: {reason}")
    is_chosen = reason is None and (wanted == "flash_attn" or gain >= LEAST_GAIN)
    logger.info(
        "attention of prompts: %s (%s)",
        "FlashAttention 3" if is_chosen else "Triton",
        f"FlashAttention 3: {reason or f'{gain:.2f} times as fast as Triton at start'}",
    )
    if is_chosen and shapes.kv.device.type == "cuda":
        _run_what_is_left(launcher, shapes)
    return is_chosen


def _gap(launcher: Launcher, shapes: AttentionShapes) -> str | None:
    if shapes.softcap is not None:
        return "the model's scores of attention have a soft cap"
    if shapes.has_sinks:
        return "the model's attention has sinks"
    head_dim, kv_layer = shapes.kv.shape[-1], shapes.kv[:, 0]
    q = torch.empty((1, shapes.num_heads, head_dim), dtype=shapes.dtype, device=kv_layer.device)
    gaps = (flash_attention_gap(launcher.target.capability, q, kv_layer, w) for w in set(shapes.sliding_windows))
    return next((gap for gap in (*gaps, paged_attention_gap(q, kv_layer)) if gap is not None), None)


def _tried(launcher: Launcher, shapes: AttentionShapes) -> tuple[str | None, float]:
    """(why it is not to be used, how many times as fast as the Triton kernels it is)"""
    device = shapes.kv.device
    num_tokens = TRIAL_TOKENS if device.type == "cuda" else TRIAL_TOKENS_INTERPRETED
    half = num_tokens // 2
    query_lens, context_lens = (1, half, half), (half // 2, half, num_tokens)
    windows = {None, *(None if w is None else min(w, half) for w in shapes.sliding_windows)}  # contexts are longer
    *_, num_kv_heads, block_size, head_dim = shapes.kv.shape
    plan, workspace = _plan(query_lens, context_lens, block_size, device), Workspace("attention")
    kv = torch.randn((plan.block_tables.numel(), 2, num_kv_heads, block_size, head_dim), device=device).to(shapes.dtype)
    q = torch.randn((sum(query_lens), shapes.num_heads, head_dim), device=device).to(shapes.dtype)

    def run(is_flash: bool) -> torch.Tensor:
        outs = [
            paged_attention(launcher, q, kv, plan, head_dim**-0.5, window, workspace, is_flash=is_flash)
            for window in windows
        ]
        return torch.cat(outs).flatten(1)

    with torch.inference_mode():
        expected = run(False).float()
        try:
            largest = ((run(True) - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        except Exception as error:  # a build without some feature, or of another version: what it raises is its own
            return f"its trial failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}", 0.0
        if not largest <= MOST_DIFFERENCE * torch.finfo(shapes.dtype).eps:
            return f"its trial gave other numbers than Triton's, by {float(largest):.1e} of a row", 0.0
        triton_s, flash_s = seconds_of([lambda: run(False), lambda: run(True)], device)
    return None, triton_s / flash_s


def _run_what_is_left(launcher: Launcher, shapes: AttentionShapes) -> None:
    """So many sequences with few queries behind a prefix that, beside FlashAttention 3, their keys stay undivided.

    The tiles that it leaves are small ones, which the warm-up's steps do not have undivided: Triton would compile them
    when requests come.
    """
    *_, num_kv_heads, block_size, head_dim = shapes.kv.shape
    count = launcher.target.num_sms // num_kv_heads + 1
    plan = _plan((2,) * count, (TRIAL_TOKENS // 2,) * count, block_size, shapes.kv.device)
    plan.block_tables.zero_()
    q = torch.zeros((2 * count, shapes.num_heads, head_dim), dtype=shapes.dtype, device=shapes.kv.device)
    kv = torch.zeros((1, 2, num_kv_heads, block_size, head_dim), dtype=shapes.kv.dtype, device=shapes.kv.device)
    with torch.inference_mode():
        for window in set(shapes.sliding_windows):
            paged_attention(launcher, q, kv, plan, head_dim**-0.5, window, is_flash=True)


def _plan(
    query_lens: Sequence[int], context_lens: Sequence[int], block_size: int, device: torch.device
) -> AttentionPlan:
    """Each sequence has blocks of its own, in order."""
    width = -(-max(context_lens) // block_size)
    tables = np.arange(len(context_lens) * width, dtype=np.int32).reshape(-1, width)
    return AttentionPlan(
        q_indptr=upload(np.cumsum([0, *query_lens]).astype(np.int32), device),
        context_lens=upload(np.array(context_lens, np.int32), device),
        block_tables=upload(tables, device),
        kv_slot_mapping=upload(np.full(sum(query_lens), -1), device),
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
        block_size=block_size,
    )


def seconds_of(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """The median of several rounds for each, in turn; on a GPU between events. They ran before: none compiles."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS if device.type == "cuda" else 1):
        for run, seconds in zip(runs, taken, strict=True):
            seconds.append(_on_gpu(run) if device.type == "cuda" else _on_cpu(run))
    return [statistics.median(seconds) for seconds in taken]


def _on_gpu(run: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(CALLS_PER_ROUND):
        run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3 / CALLS_PER_ROUND


def _on_cpu(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
