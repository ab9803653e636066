"""Cases of every operator of a step, at the shapes of the fixtures: built for any backend, through its interface alone.

What a decode step reads from memory, it reads here from memory too: weights, adapters and keys are there in as many
copies as take COLD_BYTES together, and calls go through them in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.fixture import SIZES
from benchmarks.limits import WEIGHT_BYTES, Peaks, linear_s
from benchmarks.timing import Call, in_turn
from loraplex.core import LoraSlice, LoraTarget
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.quantized_weights import kv_head_dim, kv_width
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.torch_ops import TorchBackend

COLD_BYTES = 128 * 2**20
MAX_COPIES = 64
BLOCK_SIZE = 16
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One operator at one shape. build(backend) makes its inputs and gives the call, or None: the backend has none.

    operators: the backend's methods that run. floor_s: what the machine needs at least; None: it all lies in the
    caches.
    """

    op: str
    name: str
    operators: tuple[str, ...]
    build: Callable[[KernelBackend], Call | None]
    floor_s: Callable[[Peaks], float] | None = None


def is_own(backend: KernelBackend, case: Case) -> bool:
    """Whether the backend has kernels of its own for the case, not stock torch's."""
    return any(getattr(type(backend), name, None) is not getattr(TorchBackend, name, None) for name in case.operators)


def is_torch(backend: KernelBackend) -> bool:
    return type(backend) is TorchBackend


def copies_for(num_bytes: float) -> int:
    """How many copies make a working set that no cache holds, as far as it is worth the memory."""
    return max(1, min(MAX_COPIES, math.ceil(COLD_BYTES / max(1.0, num_bytes))))


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) / max(1, shape[-1]) ** 0.5).to(dtype)


# -------------------------------------------------------------------------------------------------------------- linears


def linears_of(size: str) -> dict[str, tuple[int, int]]:
    """(out, in) by name, fused as the model has them."""
    dims = SIZES[size]
    hidden, inner, heads = dims["hidden_size"], dims["intermediate_size"], dims["num_attention_heads"]
    kv = hidden // heads * dims["num_key_value_heads"]
    return {
        "qkv": (hidden + 2 * kv, hidden),
        "o": (hidden, hidden),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (dims["vocab_size"], hidden),
    }


def linear_case(size: str, module: str, storage: str, rows: int) -> Case:
    """x W^T, the weight stored as `storage`. Stock torch has none for int8 and int4."""
    shape = linears_of(size)[module]
    num_bytes = WEIGHT_BYTES[storage] * shape[0] * shape[1]

    def build(backend: KernelBackend) -> Call | None:
        quantization = storage if storage.startswith("int") else None
        if quantization is not None and quantization not in backend.quantizations:
            return None
        dtype = torch.float32 if quantization is not None else getattr(torch, storage)
        weight = _draw(*shape, dtype=dtype)
        # A backend that keeps the weight as it is needs a copy each.
        prepared = [backend.prepare_linear(weight.clone(), quantization) for _ in range(copies_for(num_bytes))]
        x = _draw(rows, shape[1], dtype=backend.activation_dtype(dtype))
        return in_turn([lambda w=one: backend.linear(x, w) for one in prepared])

    return Case(
        "linear", f"{size} {module} {storage} T={rows}", ("linear",), build,
        lambda peaks: linear_s(rows, shape, storage, peaks),
    )  # fmt: skip


def stock_linear(size: str, module: str, rows: int) -> Call:
    """F.linear in float32 on the checkpoint's own layout: what everybody has."""
    shape = linears_of(size)[module]
    weight = _draw(*shape)
    weights = [weight.clone() for _ in range(copies_for(4 * shape[0] * shape[1]))]
    x = _draw(rows, shape[1])
    return in_turn([lambda w=one: F.linear(x, w) for one in weights])


def read_of(num_bytes: int) -> Call:
    """Reading so many bytes from memory, with stock torch."""
    parts = [torch.ones(num_bytes // 4) for _ in range(copies_for(num_bytes))]
    return in_turn([lambda p=part: p.sum() for part in parts])


# ----------------------------------------------------------------------------------------------------------------- LoRA


def layer_targets(size: str, layer: int) -> list[LoraTarget]:
    """The four fused linears of one layer, with their slices."""
    dims = SIZES[size]
    hidden, inner, heads = dims["hidden_size"], dims["intermediate_size"], dims["num_attention_heads"]
    kv = hidden // heads * dims["num_key_value_heads"]
    fused = {
        "qkv": (hidden, [hidden, kv, kv]),
        "o": (hidden, [hidden]),
        "gate_up": (hidden, [inner, inner]),
        "down": (inner, [hidden]),
    }
    return [_target(f"layers.{layer}.{name}", layer, num_in, outs) for name, (num_in, outs) in fused.items()]


def _target(name: str, layer: int, num_in: int, outs: Sequence[int]) -> LoraTarget:
    offsets = np.cumsum([0, *outs]).tolist()
    slices = tuple(LoraSlice(f"{name}.{i}", offsets[i], out, out) for i, out in enumerate(outs))
    return LoraTarget(name, layer, num_in, num_in, slices)


def lora_parameters(size: str, ranks: Sequence[int]) -> int:
    """Parameters of adapters of these ranks in one layer."""
    return sum(
        rank * (target.in_features + one.out_features)
        for rank in ranks
        for target in layer_targets(size, 0)
        for one in target.slices
    )


def lora_case(size: str, rows: int, ranks: Sequence[int], dtype: str, label: str, gains: str = "none") -> Case:
    """All LoRA of one layer: as many adapters as `ranks`, each with an equal share of the rows.

    gains: none, outputs (as a DoRA has), all (and inputs of o and down). Of rank 0: nothing but gains (an IA3).
    """
    parameters, width = lora_parameters(size, ranks), WEIGHT_BYTES[dtype]
    num_bytes = parameters * width + 4 * len(ranks) * gain_parameters(size, gains)

    def build(backend: KernelBackend) -> Call:
        layers = [layer_targets(size, layer) for layer in range(copies_for(num_bytes))]
        table = _slot_table(backend, layers, ranks, getattr(torch, dtype), gains)
        share = rows // len(ranks)
        segments = [LoraSegment(share * i, share * (i + 1), i) for i in range(len(ranks))]
        plan = LoraPlan.build(segments, rows, len(ranks))
        x = {target.name: _draw(rows, target.in_features) for target in layers[0]}
        y = {target.name: torch.zeros(rows, sum(s.out_features for s in target.slices)) for target in layers[0]}
        inputs = [(x[target.name], y[target.name]) for target in layers[0]]

        def one_layer(targets: Sequence[LoraTarget]) -> None:
            for target, (given, result) in zip(targets, inputs, strict=True):
                if gains == "all" and len(target.slices) == 1:
                    backend.scale_input(given, plan, table, table.first_row(target.name))
                backend.add_lora(result, given, plan, table, table.first_row(target.name), target.slices)

        return in_turn([lambda t=targets: one_layer(t) for targets in layers])

    def floor_s(peaks: Peaks) -> float:
        return max(num_bytes / peaks.bandwidth, 2 * rows / len(ranks) * parameters / peaks.fp32)

    return Case("lora", f"{size} layer T={rows} {label} {dtype}", ("add_lora",), build, floor_s)


def gain_parameters(size: str, gains: str) -> int:
    """Of an adapter in one layer."""
    targets = layer_targets(size, 0)
    outputs = sum(one.out_features for target in targets for one in target.slices)
    inputs = sum(target.in_features for target in targets if len(target.slices) == 1)
    return {"none": 0, "outputs": outputs, "all": outputs + inputs}[gains]


def _slot_table(
    backend: KernelBackend, layers: Sequence[Sequence[LoraTarget]], ranks: Sequence[int], dtype: torch.dtype, gains: str
) -> SlotTable:
    """Every layer has the same weights at addresses of its own. Gains are 1: calls leave their inputs as they are."""
    drawn = {
        (slot, target.name.partition(".")[2].partition(".")[2]): tuple(
            SliceWeights(
                _draw(rank, target.in_features, dtype=dtype) if rank else None,
                _draw(one.out_features, rank, dtype=dtype) if rank else None,
                None,
                1.0,
                None if gains == "none" else torch.ones(one.out_features),
                torch.ones(target.in_features) if gains == "all" and len(target.slices) == 1 else None,
            )
            for one in target.slices
        )
        for slot, rank in enumerate(ranks)
        for target in layers[0]
    }
    sizes = {key: backend.packed_nbytes(slices, torch.float32) for key, slices in drawn.items()}
    buffer = torch.zeros(len(layers) * sum(sizes.values()) + 64, dtype=torch.uint8)
    table = SlotTable([target for targets in layers for target in targets], len(ranks), buffer)
    cursor = -buffer.data_ptr() % 64
    for targets in layers:
        for target in targets:
            for slot in range(len(ranks)):
                key = (slot, target.name.partition(".")[2].partition(".")[2])
                layouts = backend.pack(drawn[key], torch.float32, buffer[cursor : cursor + sizes[key]])
                table.set_block(target.name, slot, cursor, layouts)
                cursor += sizes[key]
    return table


# ------------------------------------------------------------------------------------------------------------ attention


def attention_case(size: str, contexts: Sequence[int], query_len: int, kv_dtype: str) -> Case:
    """One sequence per entry of `contexts`, `query_len` queries each: 1 is decode, the context's length a prefill."""
    dims = SIZES[size]
    heads, kv_heads = dims["num_attention_heads"], dims["num_key_value_heads"]
    head_dim = dims["hidden_size"] // heads
    dtype = getattr(torch, kv_dtype)
    width = kv_width(head_dim, dtype)
    num_bytes = WEIGHT_BYTES[kv_dtype] * 2 * kv_heads * width * sum(contexts)
    seen = sum(context * query_len - query_len * (query_len - 1) // 2 for context in contexts)  # keys of all queries

    def build(backend: KernelBackend) -> Call | None:
        plan = _attention_plan(contexts, query_len)
        num_blocks = 1 + int(plan.block_tables.max())
        kv = torch.zeros(num_blocks, copies_for(num_bytes), 2, kv_heads, BLOCK_SIZE, width, dtype=dtype)
        # Stock torch computes in the dtype of its cache, where that is of floats; kernels of a backend's own widen it.
        compute = dtype if dtype.is_floating_point and not is_own(backend, case) else torch.float32
        _fill(backend, kv[:, 0], num_blocks * BLOCK_SIZE, heads, compute)
        kv[:, 1:] = kv[:, :1]
        q = _draw(query_len * len(contexts), heads, head_dim, dtype=compute)
        scale = head_dim**-0.5
        return in_turn(
            [lambda k=kv[:, i]: backend.paged_attention(q, k, plan, scale, None) for i in range(kv.shape[1])]
        )

    def floor_s(peaks: Peaks) -> float:
        return max(num_bytes / peaks.bandwidth, 4 * heads * head_dim * seen / peaks.fp32)

    kind = f"decode {len(contexts)} x {contexts[0]}" if query_len == 1 else f"prefill {len(contexts)} x {query_len}"
    case = Case("attention", f"{size} {kind} {kv_dtype} KV", ("paged_attention",), build, floor_s)
    return case


def _attention_plan(contexts: Sequence[int], query_len: int) -> AttentionPlan:
    """Blocks of a sequence lie anywhere, as after an hour of serving."""
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    slots: list[int] = []
    for i, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[i, :count] = torch.tensor(blocks, dtype=torch.int32)
        new = range(context - query_len, context)
        slots += [blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in new]
    return AttentionPlan(
        q_indptr=torch.arange(0, query_len * len(contexts) + 1, query_len, dtype=torch.int32),
        context_lens=torch.tensor(list(contexts), dtype=torch.int32),
        block_tables=tables,
        kv_slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens=(query_len,) * len(contexts),
        context_lens_host=tuple(contexts),
        block_size=BLOCK_SIZE,
    )


def _fill(backend: KernelBackend, kv_layer: torch.Tensor, num_tokens: int, heads: int, dtype: torch.dtype) -> None:
    """Keys and values for every place, through the backend: how they lie in a block is its own affair."""
    kv_heads, head_dim = kv_layer.shape[2], kv_head_dim(kv_layer)
    k, slots = _draw(num_tokens, kv_heads, head_dim, dtype=dtype), torch.arange(num_tokens)
    write = _write_call(backend, _draw(num_tokens, heads, head_dim, dtype=dtype), k, kv_layer, slots)
    write()


def _write_call(
    backend: Any, q: torch.Tensor, k: torch.Tensor, kv_layer: torch.Tensor, slots: torch.Tensor
) -> Callable[[], object]:
    """Rotary positions and the write of keys and values: one operator where the backend has it, else two."""
    head_dim = k.shape[2]
    angles = torch.outer(torch.arange(len(k)), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    if hasattr(backend, "rotary_write_kv"):
        return lambda: backend.rotary_write_kv(q, k, k, cos, sin, kv_layer, slots)

    def separate() -> torch.Tensor:
        rotated, keys = backend.rotary(q, k, cos, sin)
        backend.write_kv(keys.to(kv_layer.dtype), k.to(kv_layer.dtype), kv_layer, slots)
        return rotated

    return separate


def rotary_case(size: str, rows: int, kv_dtype: str) -> Case:
    dims = SIZES[size]
    heads, kv_heads = dims["num_attention_heads"], dims["num_key_value_heads"]
    head_dim = dims["hidden_size"] // heads

    def build(backend: KernelBackend) -> Call:
        num_blocks = -(-rows // BLOCK_SIZE)
        kv = torch.zeros(num_blocks, 1, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=getattr(torch, kv_dtype))
        slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))[:rows]
        return _write_call(backend, _draw(rows, heads, head_dim), _draw(rows, kv_heads, head_dim), kv[:, 0], slots)

    return Case(
        "glue", f"{size} rotary + KV write T={rows} {kv_dtype} KV", ("rotary", "write_kv", "rotary_write_kv"), build
    )


# -------------------------------------------------------------------------------------------------- the rest of a layer


def rms_norm_case(size: str, rows: int) -> Case:
    hidden = SIZES[size]["hidden_size"]

    def build(backend: KernelBackend) -> Call:
        x, weight = _draw(rows, hidden), torch.ones(hidden)
        return lambda: backend.rms_norm(x, weight, EPS)

    return Case("glue", f"{size} rms_norm T={rows}", ("rms_norm",), build)


def add_rms_norm_case(size: str, rows: int) -> Case:
    hidden = SIZES[size]["hidden_size"]

    def build(backend: KernelBackend) -> Call:
        # The sum may be written to either input: it grows by one of them in each call, slowly enough to stay finite.
        x, residual, weight = _draw(rows, hidden), _draw(rows, hidden), torch.ones(hidden)
        return lambda: backend.add_rms_norm(x, residual, weight, EPS)

    return Case("glue", f"{size} add_rms_norm T={rows}", ("add_rms_norm",), build)


def silu_mul_case(size: str, rows: int) -> Case:
    inner = SIZES[size]["intermediate_size"]

    def build(backend: KernelBackend) -> Call:
        gate_up = _draw(rows, 2 * inner)
        return lambda: backend.silu_mul(gate_up)

    return Case("glue", f"{size} silu_mul T={rows}", ("silu_mul",), build)


def greedy_case(size: str, rows: int) -> Case:
    """The greedy token of every row: the backend's `row_argmax` where it has one, else torch.max."""
    vocab_size = SIZES[size]["vocab_size"]

    def build(backend: Any) -> Call:
        drawn = _draw(rows, vocab_size)
        logits = [drawn.clone() for _ in range(copies_for(4 * rows * vocab_size))]
        argmax = getattr(backend, "row_argmax", None) or (lambda x: torch.max(x, -1))
        return in_turn([lambda x=one: argmax(x) for one in logits])

    return Case(
        "sampling", f"greedy {rows} x {vocab_size}", ("row_argmax",), build,
        lambda peaks: 4 * rows * vocab_size / peaks.bandwidth,
    )  # fmt: skip
