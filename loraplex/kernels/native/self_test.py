"""Every operator on small random inputs, to compare two instruction sets bit for bit when Loraplex starts.

A case runs operators of one library and gives what they wrote. CASES must name every function of the library; a test
counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from loraplex.core import LoraSlice, LoraTarget, Shard
from loraplex.kernels.experts import ClampedGate, ExpertLinear, Experts
from loraplex.kernels.native import experts, glue, lora, sampling
from loraplex.kernels.native.attention import KV_FORMATS, paged_attention, rotary_write_kv
from loraplex.kernels.native.board import PART_BYTES, RankBoard, board_nbytes
from loraplex.kernels.native.checksum import checksums
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import keep_linear, linear, pack_linear, round_int4, row_norms
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.quantized_weights import GroupWeight, Int8GroupWeight, kv_width
from loraplex.kernels.slices import DTYPE_CODES, SliceWeights
from loraplex.kernels.step_batch import AttentionPlan, StepBatch
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
    """Normal numbers, the same in each call; sizes are no multiples of 16, so that the last lanes are tested too."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _linear(dtype: torch.dtype, library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """More columns than a group of panels, one row and several blocks of rows, few and many; two chunks of k."""
    in_features, out_features = 1031, 139
    weight = _draw(out_features, in_features)
    packed = pack_linear(library, weight if dtype == torch.int8 else weight.to(dtype), dtype, 1)
    bias, x = _draw(out_features), _draw(33, in_features)
    outputs = [linear(library, x[:rows], packed, bias, 1) for rows in (1, 3, 15, 33)]
    outputs.append(row_norms(library, packed, 5, 90, _draw(7, in_features), _draw(85, 7), 0.5))
    return (packed.panels, *([] if packed.scale is None else [packed.scale]), *outputs)


def _group_linear(num_bits: int, activation_bits: int, library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """As _linear, of a weight in groups with zero points, and of one that is rounded here."""
    in_features, out_features = 1031, 139
    rounded = round_int4(library, _draw(out_features, in_features), 64, activation_bits, 1)
    if num_bits == 4:
        zero = (_draw(*rounded.scale.shape).abs() * 5).clamp(0, 16).to(torch.uint8)
        weights: tuple[GroupWeight, ...] = (rounded, replace(rounded, zero=zero, scale=rounded.scale * 1.0001))
    else:
        weights = (Int8GroupWeight(rounded.q.to(torch.int8) * 8 - 64, rounded.scale, None, 64),)
    outputs: list[torch.Tensor] = [rounded.q, rounded.scale]
    for weight in weights:
        packed = keep_linear(library, weight, 1)
        assert packed is not None
        x = _draw(33, in_features)
        outputs += [packed.panels, *(linear(library, x[:rows], packed, _draw(out_features), 1) for rows in (1, 3, 33))]
        outputs.append(row_norms(library, packed, 5, 90, _draw(7, in_features), _draw(85, 7), 0.5))
    return tuple(outputs)


def _rms_norm(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    heads = _draw(3, 200)[:, 10:].view(3, 2, 95)
    normed = glue.rms_norm(library, heads, _draw(95), 1e-6, 1)
    summed = [
        tensor
        for scale in (1.0, 0.3)
        for tensor in glue.add_rms_norm(library, _draw(2, 203), _draw(3, 203)[1:].clone(), _draw(203), 1e-5, scale, 1)
    ]
    return normed, *summed, glue.add_scaled(library, _draw(2, 203), _draw(3, 203)[1:].clone(), 0.3, 1)


def _layer_norm(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    weight = _draw(203)
    return tuple(glue.layer_norm(library, _draw(3, 203), weight, bias, 1e-5, 1) for bias in (None, weight.flip(0)))


def _silu_mul(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    return (glue.silu_mul(library, 30 * _draw(3, 2 * 203), 1),)


def _gelu(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    x = 3 * _draw(3, 2 * 203)
    return tuple(glue.gelu(library, x, is_tanh, has_up, 1) for is_tanh in (False, True) for has_up in (False, True))


def _experts(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Three experts, of which a row has two; then a part with a factor of its own; then with a clamped gate;
    then with factors of inputs."""
    linears = [
        ExpertLinear(pack_linear(library, _draw(out, width), torch.float32, 1), None, (), -1)
        for _ in range(3)
        for out, width in ((2 * 21, 35), (35, 21))
    ]
    layer, x = Experts(tuple(linears[0::2]), tuple(linears[1::2]), 2, normalizes=True), _draw(5, 35)
    y = experts.experts(library, x, _draw(5, 3), layer, None, 1)
    gated = experts.add_gated(library, y.clone(), x, _draw(5, 1), 1)
    clamped, scaled = replace(layer, clamp=ClampedGate(0.5, 1.7)), replace(layer, scales_inputs=True)
    others = [experts.experts(library, x, _draw(5, 3), each, None, 1) for each in (clamped, scaled)]
    return y, gated, *others


def _ranking(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    logits = (8 * _draw(2, 3001)).round() / 2  # with ties
    ids, top = sampling.row_argmax(library, logits, 1)
    masked, bitmask = logits.clone(), torch.arange(90, dtype=torch.int32)[None] * 0x01234567  # it ends before the rows
    sampling.mask_logits(library, masked, torch.tensor([1]), bitmask, 1)
    return (
        masked,
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


def _slot_table(library: NativeLibrary, in_features: int, outs: tuple[int, ...], ranks: tuple[int, ...]) -> SlotTable:
    """Two adapters of one target, in two dtypes, one of them with a bias and a gain."""
    slices = tuple(LoraSlice(f"m.{i}", sum(outs[:i]), n, n) for i, n in enumerate(outs))
    half = 1 << 17
    table = SlotTable(
        [LoraTarget("m", 0, in_features, in_features, slices)], 2, torch.zeros(2 * half, dtype=torch.uint8)
    )
    for slot, dtype in enumerate((torch.float32, torch.bfloat16)):
        weights = [
            SliceWeights(a, b, None, 0.5) if slot == 0 else SliceWeights(a, b, _draw(n), 0.5, _draw(n + 1)[1:])
            for rank, n in zip(ranks, outs, strict=True)
            for a, b in [(_draw(rank, in_features).to(dtype), _draw(n, rank).to(dtype))]
        ]
        block = table.buffer[slot * half : (slot + 1) * half]
        table.set_block("m", slot, slot * half, lora.pack(library, weights, block))
    return table


def _add_lora(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Two adapters over five rows."""
    table = _slot_table(library, 67, (35, 41), (5, 12))
    plan = LoraPlan.build([LoraSegment(0, 3, 0), LoraSegment(3, 5, 1, 0.3)], 5, 2)
    y = _draw(5, 76)
    lora.add_lora(library, y, _draw(5, 67), plan, table, 0, table.targets[0].slices, 1)
    return table.buffer, y


def _scale_input(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """One adapter over rows of which some are in two segments, with weights that leave a part of what was there."""
    table = SlotTable([LoraTarget("m", 0, 67, 9, (LoraSlice("m", 0, 9, 9),))], 1, torch.zeros(512, dtype=torch.uint8))
    weights = (SliceWeights(None, None, None, 1.0, input_gain=_draw(67)),)
    table.set_block("m", 0, 0, lora.pack(library, weights, table.buffer))
    x, plan = _draw(5, 67), LoraPlan.build([LoraSegment(0, 4, 0, 0.3), LoraSegment(2, 5, 0)], 5, 2)
    lora.scale_input(library, x, plan, table, 0, 1)
    return table.buffer, x


def _add_rows(dtype: torch.dtype, library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Two weights over one row and over more rows than a tile has."""
    weights = _draw(2, 37, 67).to(dtype)
    table = SlotTable([LoraTarget("m", 0, 67, 67, (LoraSlice("m", 0, 37, 37),))], 2, torch.empty(1, dtype=torch.uint8))
    table.a_addr[0] = weights.data_ptr() + weights.stride(0) * weights.itemsize * torch.arange(2)
    table.rank[0], table.scale[0], table.dtype[0] = 37, 0.7, DTYPE_CODES[dtype]
    plan = LoraPlan.build([LoraSegment(0, 1, 0), LoraSegment(1, 40, 1, 0.3)], 40, 2)
    y = _draw(40, 37)
    lora.add_rows(library, y, _draw(40, 67), plan, table, 1)
    return (y,)


def _one_prompt(tokens: int, block_size: int) -> AttentionPlan:
    return AttentionPlan(
        q_indptr=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(-(-tokens // block_size), dtype=torch.int32).unsqueeze(0),
        kv_slot_mapping=torch.arange(tokens),
        query_lens=(tokens,),
        context_lens_host=(tokens,),
        block_size=block_size,
    )


def _attention(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """A prompt of 70 tokens, its keys in two blocks of 64 and more; every dtype of the cache; with a soft cap, sinks
    and positions of neighbours in a part of a head, too."""
    tokens, heads, kv_heads, head_dim, block_size = 70, 4, 2, 32, 16
    outputs = []
    for dtype, softcap in (*((dtype, None) for dtype in KV_FORMATS), (torch.float32, 2.0)):
        q, k, v = (
            _draw(tokens, heads, head_dim),
            _draw(tokens, kv_heads, head_dim),
            _draw(tokens + 1, kv_heads, head_dim),
        )
        kv_layer = torch.zeros(5, 2, kv_heads, block_size, kv_width(head_dim, dtype), dtype=dtype)
        angles = _draw(tokens, head_dim if softcap is None else 20)
        rope, is_interleaved = (angles.cos(), angles.sin()), softcap is not None
        plan = _one_prompt(tokens, block_size)
        q = rotary_write_kv(library, q, k, v[1:], *rope, kv_layer, plan.kv_slot_mapping, 1, is_interleaved)
        rule = head_dim**-0.5, 50, 1, softcap, None if softcap is None else _draw(heads)
        outputs += [q, kv_layer, paged_attention(library, q, kv_layer, plan, *rule)]
    return tuple(outputs)


def _checksums(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Nothing, less than a row, rows, and rows with a rest."""
    pieces = [_draw(nbytes // 4).view(torch.uint8) for nbytes in (0, 192, 8192, 3 * 4096 + 64)]
    return (torch.tensor(checksums(library, pieces), dtype=torch.uint64).view(torch.uint8),)


def _program(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """A layer of every operator but scale_input and those of some families: adapters larger than their linear over one
    row, several and many."""
    from loraplex.kernels.native.backend import NativeBackend  # which imports the library, and it this file

    hidden, heads, kv_heads, head_dim, block_size = 131, 2, 1, 16, 16
    outs = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    backend = NativeBackend(library, 1)
    table = _slot_table(library, hidden, outs, (60, 30, 20))
    qkv, down = (
        backend.prepare_linear(_draw(*shape)) for shape in ((sum(outs), hidden), (hidden, heads * head_dim // 2))
    )

    def layer(
        x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], kv: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        y = backend.rms_norm(x, norm, 1e-6)
        fused = backend.linear(y, qkv)
        assert batch.lora is not None
        backend.add_lora(fused, y, batch.lora, table, 0, table.targets[0].slices)
        q, k, v = fused.view(len(y), -1, head_dim).split_with_sizes([n // head_dim for n in outs], dim=1)
        q = backend.rotary_write_kv(q, k, v, *rope, kv[:, 0], batch.attention.kv_slot_mapping)
        out = backend.paged_attention(q, kv[:, 0], batch.attention, 0.25, None).flatten(1)
        z = backend.linear(backend.silu_mul(out), down)
        return backend.add_rms_norm(z, x, norm, 1e-6)[0]

    norm, run = _draw(hidden), backend.captured(layer)
    kv = torch.zeros(3, 1, 2, kv_heads, block_size, head_dim)
    outputs = []
    for rows in (1, 15, 40):
        angles = _draw(rows, head_dim)
        batch = StepBatch(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.arange(rows),
            attention=_one_prompt(rows, block_size),
            lora=LoraPlan.build([LoraSegment(0, -(-rows // 2), 0), LoraSegment(rows // 2, rows, 1)], rows, 2),
            logits_indices=torch.zeros(0, dtype=torch.int64),
        )
        outputs.append(run(_draw(rows, hidden), (angles.cos(), angles.sin()), kv, batch))
    return (*outputs, kv)


def _ranks(library: NativeLibrary) -> tuple[torch.Tensor, ...]:
    """Two ranks of one process, with more than they say to each other at once."""
    memory, parts = torch.zeros(board_nbytes(2), dtype=torch.uint8), _draw(2, 3, PART_BYTES // 8)
    boards = [RankBoard(library, Shard(rank, 2), memory, ()) for rank in range(2)]

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        joined, part = boards[rank].side_by_side(parts[rank]), parts[rank][:, :40]
        normed = glue.rms_norm_ranks(library, part, part[0].contiguous(), 1e-5, boards[rank], 1)
        return joined, boards[rank].sum(parts[rank].clone()), normed

    with ThreadPoolExecutor(1) as others:
        other = others.submit(run, 1)
        return *run(0), *other.result()[1:]


CASES: Mapping[str, Case] = {
    "linear float32": partial(_linear, torch.float32),
    "linear float16": partial(_linear, torch.float16),
    "linear bfloat16": partial(_linear, torch.bfloat16),
    "linear int8": partial(_linear, torch.int8),
    "linear int4, activations in 16 bits": partial(_group_linear, 4, 16),
    "linear int4, activations in 8 bits": partial(_group_linear, 4, 8),
    "linear int8 in groups": partial(_group_linear, 8, 16),
    "add_lora": _add_lora,
    "scale_input": _scale_input,
    "add_rows float32": partial(_add_rows, torch.float32),
    "add_rows float16": partial(_add_rows, torch.float16),
    "add_rows bfloat16": partial(_add_rows, torch.bfloat16),
    "rotary_write_kv, paged_attention": _attention,
    "program": _program,
    "ranks": _ranks,
    "rms_norm, add_scaled": _rms_norm,
    "layer_norm": _layer_norm,
    "silu_mul": _silu_mul,
    "gelu": _gelu,
    "experts": _experts,
    "argmax, top_k, logprobs": _ranking,
    "token weights": _weights,
    "checksums": _checksums,
}
"""What is compared, by the name that is logged when it differs."""
