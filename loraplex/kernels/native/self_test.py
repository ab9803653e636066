"""Every operator of the library on small random inputs, to compare two instruction sets bit for bit when Loraplex starts.

A case runs operators of one library and gives what they wrote. CASES must name every function of the library; a test counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from loraplex.core import LoraSlice, LoraTarget
from loraplex.kernels.native import glue, lora, sampling
from loraplex.kernels.native.attention import KV_FORMATS, paged_attention, rotary_write_kv
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import linear, pack_linear
from loraplex.kernels.plan import AttentionPlan, LoraPlan, LoraSegment, SliceWeights, SlotTable
from loraplex.kernels.token_ranking import WeightRule

Case = Callable[[NativeLibrary], tuple[torch.Tensor, ...]]


def first_difference(library: NativeLibrary, trusted: NativeLibrary) -> str:
    """The first case in which two libraries do not give the same bits; empty when there is none."""
    for name, case in CASES.items():
        if not all(_same_bits(a, b) for a, b in zip(case(library), case(trusted), strict=True)):
            return name
    return ""


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _draw(*shape: int) -> torch.Tensor:
    """Normal numbers, the same in each call; sizes of cases are no multiples of 16, so that the last lanes are tested too."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _linear(dtype: torch.dtype, library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """More columns than a group of panels, one row and several blocks of rows; two chunks of k."""
    in_features, out_features = 1031, 139
    weight = _draw(out_features, in_features)
    packed = pack_linear(library, weight if dtype == torch.int8 else weight.to(dtype), dtype, 1)
    bias, x = _draw(out_features), _draw(15, in_features)
    outputs = [linear(library, x[:rows], packed, bias, 1) for rows in (1, 3, 15)]
    return (packed.panels, *([] if packed.scale is None else [packed.scale]), *outputs)


def _rms_norm(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    heads = _draw(3, 200)[:, 10:].view(3, 2, 95)
    normed = glue.rms_norm(library, heads, _draw(95), 1e-6, 1)
    return normed, *glue.add_rms_norm(library, _draw(2, 203), _draw(3, 203)[1:].clone(), _draw(203), 1e-5, 1)


def _silu_mul(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    return (glue.silu_mul(library, 30 * _draw(3, 2 * 203), 1),)


def _ranking(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    logits = (8 * _draw(2, 3001)).round() / 2  # with ties
    ids, top = sampling.row_argmax(library, logits, 1)
    return (
        ids,
        top,
        *sampling.ordered_top_k(library, logits, 50, 1),
        sampling.log_sum_exp(library, logits, 1),
        sampling.token_ranks(library, logits, ids // 2, 1),
    )


def _weights(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    logits = 3 * _draw(2, 3001)
    rule = WeightRule(logits.amax(-1, keepdim=True), torch.tensor([[0.7], [1.3]]), 2.0**41)
    weights, total = sampling.token_weights(library, logits, rule, 1)
    nucleus = sampling.keep_nucleus(library, logits, weights.clone(), 0.9 * total, 1)
    uniform = torch.tensor([[0.3], [0.9]], dtype=torch.float64)
    return weights, total, nucleus, sampling.invert_cdf(library, weights, None, uniform, 1)


def _add_lora(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Two adapters of two slices in two dtypes, one of them with a bias, over five rows."""
    in_features, outs, ranks = 67, (35, 41), (5, 12)
    slices = tuple(LoraSlice(f"m.{i}", sum(outs[:i]), n, n) for i, n in enumerate(outs))
    target = LoraTarget("m", 0, in_features, in_features, slices)
    buffer = torch.zeros(1 << 16, dtype=torch.uint8)
    table = SlotTable([target], 2, buffer)
    for slot, dtype in enumerate((torch.float32, torch.bfloat16)):
        weights = [
            SliceWeights(_draw(rank, in_features).to(dtype), _draw(n, rank).to(dtype), _draw(n) if slot else None, 0.5)
            for rank, n in zip(ranks, outs, strict=True)
        ]
        offset = slot << 15
        table.set_block("m", slot, offset, lora.pack(library, weights, buffer[offset : offset + (1 << 15)]))
    plan = LoraPlan.build([LoraSegment(0, 3, 0), LoraSegment(3, 5, 1, 0.3)], 5, 2)
    y = _draw(5, sum(outs))
    lora.add_lora(library, y, _draw(5, in_features), plan, table, 0, slices, 1)
    return buffer, y


def _attention(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """A prompt of 70 tokens, its keys in two blocks of 64 and more; every dtype of the cache."""
    tokens, heads, kv_heads, head_dim, block_size = 70, 4, 2, 32, 16
    outputs = []
    for dtype in KV_FORMATS:
        q, k, v = (
            _draw(tokens, heads, head_dim),
            _draw(tokens, kv_heads, head_dim),
            _draw(tokens + 1, kv_heads, head_dim),
        )
        kv_layer = torch.zeros(5, 2, kv_heads, block_size, head_dim, dtype=dtype)
        angles = _draw(tokens, head_dim)
        plan = AttentionPlan(
            q_indptr=torch.tensor([0, tokens], dtype=torch.int32),
            context_lens=torch.tensor([tokens], dtype=torch.int32),
            block_tables=torch.arange(5, dtype=torch.int32).unsqueeze(0),
            kv_slot_mapping=torch.arange(tokens),
            query_lens=(tokens,),
            context_lens_host=(tokens,),
            block_size=block_size,
        )
        q = rotary_write_kv(library, q, k, v[1:], angles.cos(), angles.sin(), kv_layer, plan.kv_slot_mapping, 1)
        outputs += [q, kv_layer, paged_attention(library, q, kv_layer, plan, head_dim**-0.5, 50, 1)]
    return tuple(outputs)


CASES: Mapping[str, Case] = {
    "linear float32": partial(_linear, torch.float32),
    "linear float16": partial(_linear, torch.float16),
    "linear bfloat16": partial(_linear, torch.bfloat16),
    "linear int8": partial(_linear, torch.int8),
    "add_lora": _add_lora,
    "rotary_write_kv, paged_attention": _attention,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "argmax, top_k, logprobs": _ranking,
    "token weights": _weights,
}
"""What is compared, by the name that is logged when it differs."""
