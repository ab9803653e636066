"""How much faster each operator of the running backend is than its fallback, stock torch, on the shapes of a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from loraplex.core import LoraSlice, LoraTarget
from loraplex.kernels.fallbacks import NATIVE_OPERATORS, TRITON_OPERATORS
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.token_ranking import WeightRule
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import KernelSpeedup

OPERATORS = {"native": NATIVE_OPERATORS, "triton": TRITON_OPERATORS}
"""What has kernels, by the name of the backend."""

OF_EXPERTS = ("experts", "add_gated")
"""They are not measured here: their time is that of the linears in them (benchmarks/experts.py)."""

MOST_WEIGHTS = 1 << 22
"""Numbers in the linear that is measured: a larger one of the model is cut to fewer outputs."""

MOST_SAMPLES = 100
CALLS_PER_WAIT = {"cuda": 10}
"""Calls of one sample: on a GPU several, so that they are launched while the first one runs."""


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """A decode step of `num_rows` sequences with `context_len` tokens each, over `num_adapters` adapters of one rank.

    dtype: of the model's weights.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    num_rows: int = 16
    num_adapters: int = 8
    rank: int = 16
    context_len: int = 128
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class _Case:
    """One call of an operator, and on what."""

    shape: str
    call: Callable[[], object]


def measure_speedups(
    backend: KernelBackend, shapes: KernelShapes, max_s: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> tuple[KernelSpeedup, ...]:
    """One entry for each operator that has a kernel in `backend`; none for what stock torch runs at these shapes.

    Takes about `max_s` beside one call of each operator. Between steps only, on the thread that launches them:
    operators share memory.
    """
    operators = tuple(op for op in OPERATORS.get(backend.name, ()) if op not in OF_EXPERTS)
    if not operators:
        return ()
    stock = TorchBackend()
    kernels, fallbacks = _cases(backend, shapes), _cases(stock, shapes)
    budget_s, num_calls = max_s / len(operators) / 2, CALLS_PER_WAIT.get(shapes.device.type, 1)
    found = []
    for op in operators:
        fallen = sum(each.calls for each in backend.fallbacks())
        kernel_s = _seconds(kernels[op].call, shapes.device, num_calls, budget_s, clock)
        if sum(each.calls for each in backend.fallbacks()) == fallen:
            fallback_s = _seconds(fallbacks[op].call, shapes.device, num_calls, budget_s, clock)
            found.append(KernelSpeedup(op, backend.name, stock.name, kernels[op].shape, kernel_s, fallback_s))
    return tuple(found)


def _seconds(
    call: Callable[[], object], device: torch.device, num_calls: int, budget_s: float, clock: Callable[[], float]
) -> float:
    """Median time of a call; the first one, which may compile or allocate, is not counted."""
    call()
    _wait(device)
    samples: list[float] = []
    end_s = clock() + budget_s
    while not samples or (len(samples) < MOST_SAMPLES and clock() < end_s):
        began_s = clock()
        for _ in range(num_calls):
            call()
        _wait(device)
        samples.append((clock() - began_s) / num_calls)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------------------- the inputs


class _Inputs:
    """Random numbers, the same for each backend."""

    def __init__(self, backend: KernelBackend, shapes: KernelShapes) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = shapes.device
        self.dtype = backend.activation_dtype(shapes.dtype)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, dtype or self.dtype)


def _cases(ops: KernelBackend, shapes: KernelShapes) -> Mapping[str, _Case]:
    inputs = _Inputs(ops, shapes)
    return {
        **_linear_cases(ops, shapes, inputs),
        **_elementwise_cases(ops, shapes, inputs),
        **_attention_cases(ops, shapes, inputs),
        **_sampling_cases(ops, shapes, inputs),
    }


def _linear_cases(ops: KernelBackend, shapes: KernelShapes, inputs: _Inputs) -> dict[str, _Case]:
    hidden, rows, rank = shapes.hidden_size, shapes.num_rows, shapes.rank
    out = max(1, min(shapes.intermediate_size, MOST_WEIGHTS // hidden))
    weight = ops.prepare_linear(inputs.draw(out, hidden, dtype=shapes.dtype))
    x, y = inputs.draw(rows, hidden), inputs.draw(rows, out)
    target = LoraTarget("linear", 0, hidden, hidden, (LoraSlice("linear", 0, out, out),))
    adapters = [
        (
            SliceWeights(
                *(inputs.draw(rank, hidden, dtype=shapes.dtype), inputs.draw(out, rank, dtype=shapes.dtype), None, 1.0),
                input_gain=torch.ones(hidden, device=shapes.device),  # x stays what it is
            ),
        )
        for _ in range(min(shapes.num_adapters, rows))
    ]
    size = max(ops.packed_nbytes(adapter, inputs.dtype) for adapter in adapters)
    buffer = torch.zeros(size * len(adapters), dtype=torch.uint8, device=shapes.device)
    table = SlotTable((target,), len(adapters), buffer)
    for slot, adapter in enumerate(adapters):
        block = slice(slot * size, (slot + 1) * size)
        table.set_block(target.name, slot, block.start, ops.pack(adapter, inputs.dtype, buffer[block]))
    table.flush()
    bounds = [rows * slot // len(adapters) for slot in range(len(adapters) + 1)]
    segments = [LoraSegment(bounds[slot], bounds[slot + 1], slot) for slot in range(len(adapters))]
    plan = LoraPlan.build(segments, rows, len(segments), shapes.device, is_decode=True)
    return {
        "linear": _Case(f"{rows} rows, {hidden} to {out}", lambda: ops.linear(x, weight)),
        "add_lora": _Case(
            f"{rows} rows, {len(adapters)} adapters of rank {rank}, {hidden} to {out}",
            lambda: ops.add_lora(y, x, plan, table, 0, target.slices),
        ),
        "scale_input": _Case(
            f"{rows} x {hidden}, {len(adapters)} adapters", lambda: ops.scale_input(x, plan, table, 0)
        ),
    }


def _elementwise_cases(ops: KernelBackend, shapes: KernelShapes, inputs: _Inputs) -> dict[str, _Case]:
    rows, hidden, inner = shapes.num_rows, shapes.hidden_size, shapes.intermediate_size
    x, residual, weight = inputs.draw(rows, hidden), inputs.draw(rows, hidden), inputs.draw(hidden)
    gate_up = inputs.draw(rows, 2 * inner)
    return {
        "rms_norm": _Case(f"{rows} x {hidden}", lambda: ops.rms_norm(x, weight, 1e-6)),
        "add_rms_norm": _Case(
            f"{rows} x {hidden}", lambda: ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
        ),
        "add_scaled": _Case(f"{rows} x {hidden}", lambda: ops.add_scaled(x, residual.clone(), 0.5)),
        "layer_norm": _Case(f"{rows} x {hidden}", lambda: ops.layer_norm(x, weight, None, 1e-6)),
        "silu_mul": _Case(f"{rows} x {inner}", lambda: ops.silu_mul(gate_up)),
        "gelu": _Case(f"{rows} x {inner}", lambda: ops.gelu(gate_up, is_tanh=True, has_up=True)),
    }


def _attention_cases(ops: KernelBackend, shapes: KernelShapes, inputs: _Inputs) -> dict[str, _Case]:
    rows, dim, block_size, device = shapes.num_rows, shapes.head_dim, shapes.block_size, shapes.device
    width = -(-shapes.context_len // block_size)
    kv = inputs.draw(rows * width, 1, 2, shapes.num_kv_heads, block_size, dim, dtype=shapes.dtype)[:, 0]
    tables = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    last = shapes.context_len - 1
    plan = AttentionPlan(
        q_indptr=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), shapes.context_len, dtype=torch.int32, device=device),
        block_tables=tables,
        kv_slot_mapping=tables[:, last // block_size].long() * block_size + last % block_size,
        query_lens=(1,) * rows,
        context_lens_host=(shapes.context_len,) * rows,
        block_size=block_size,
    )
    q = inputs.draw(rows, shapes.num_heads, dim)
    k, v = (inputs.draw(rows, shapes.num_kv_heads, dim) for _ in range(2))
    angles = inputs.draw(rows, dim)
    cos, sin = angles.cos(), angles.sin()
    heads = f"{rows} tokens, {shapes.num_heads} heads and {shapes.num_kv_heads} of keys, of {dim}"
    return {
        "rotary_write_kv": _Case(
            heads, lambda: ops.rotary_write_kv(q.clone(), k.clone(), v, cos, sin, kv, plan.kv_slot_mapping)
        ),
        "paged_attention": _Case(
            f"{heads}, context {shapes.context_len}", lambda: ops.paged_attention(q, kv, plan, dim**-0.5, None)
        ),
    }


def _sampling_cases(ops: KernelBackend, shapes: KernelShapes, inputs: _Inputs) -> dict[str, _Case]:
    rows, vocab_size = shapes.num_rows, shapes.vocab_size
    logits = inputs.draw(rows, vocab_size, dtype=torch.float32)
    rule = WeightRule(logits.amax(-1, keepdim=True), torch.ones_like(logits[:, :1]), 2.0**20)
    weights, total = ops.token_weights(logits, rule)
    uniform, token_ids, k = torch.full_like(total, 0.5), logits.argmin(-1), min(20, vocab_size)
    shape = f"{rows} x {vocab_size}"
    all_rows, bitmask = torch.arange(rows), torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)
    bitmask = bitmask.to(logits.device)
    return {
        "mask_logits": _Case(shape, lambda: ops.mask_logits(logits, all_rows, bitmask)),
        "row_argmax": _Case(shape, lambda: ops.row_argmax(logits)),
        "ordered_top_k": _Case(f"{shape}, k = {k}", lambda: ops.ordered_top_k(logits, k)),
        "token_weights": _Case(shape, lambda: ops.token_weights(logits, rule)),
        "invert_cdf": _Case(shape, lambda: ops.invert_cdf(weights.clone(), None, uniform)),
        "keep_nucleus": _Case(shape, lambda: ops.keep_nucleus(logits, weights.clone(), 0.9 * total, rule)),
        "log_sum_exp": _Case(shape, lambda: ops.log_sum_exp(logits)),
        "token_ranks": _Case(shape, lambda: ops.token_ranks(logits, token_ids)),
    }
