"""How a layer and its adapters are cut for tensor parallelism: pure slicing, derived from what the layer publishes.

One rule serves base weights, A, B and biases: a dimension of `full` entries, of which a shard holds `here`, is cut in
`full / here` parts; shard.size / parts neighbouring ranks hold the same part (k and v heads when there are fewer than
ranks).

    column, qkv   A replicated, B and bias cut like the output        y_i = x (B_i A)^T          parts side by side = y
    row           A cut like the input, B replicated                  y_i = x_i (B A_i)^T        sum over ranks = y
                  bias only on rank 0, or the sum would count it `size` times
    replicated    nothing is cut

A gain on the outputs multiplies each summand, so it is cut like B, on every rank; one on the inputs like A's columns.

Source of the derivation from the base layer: torchtitan, components/lora.py.
"""

from __future__ import annotations

import torch

from loraplex.core import LoraTarget, Shard, ShardKind


def _part(full: int, here: int, shard: Shard) -> tuple[int, int]:
    """[start, end) of this shard's `here` of `full` entries. ValueError when they cannot be dealt out evenly."""
    parts = full // here if here else 0
    if parts * here != full or parts == 0 or shard.size % parts:
        raise ValueError(f"{full} entries cannot be cut into parts of {here} for {shard.size} shards")
    start = shard.rank // (shard.size // parts) * here
    return start, start + here


def shard_rows(full: torch.Tensor, num_rows: int, shard: Shard) -> torch.Tensor:
    """This shard's `num_rows` rows of `full` [rows, ...], as a view. num_rows == rows is a replica: `full` itself."""
    if num_rows == full.size(0):
        return full
    start, end = _part(full.shape[0], num_rows, shard)
    return full[start:end]


def shard_columns(full: torch.Tensor, num_columns: int, shard: Shard) -> torch.Tensor:
    """This shard's `num_columns` columns of `full` [rows, columns], as a view; all of them: `full` itself."""
    if num_columns == full.size(1):
        return full
    start, end = _part(full.shape[1], num_columns, shard)
    return full[:, start:end]


def shard_lora_a(target: LoraTarget, slice_index: int, a: torch.Tensor) -> torch.Tensor:
    """This shard's A [rank, in_features] of the checkpoint's A [rank, full_in_features]. ValueError has both shapes."""
    _expect(target, slice_index, "lora_a", a.size(1), target.full_in_features)
    return shard_columns(a, target.in_features, target.shard)


def shard_lora_b(target: LoraTarget, slice_index: int, b: torch.Tensor) -> torch.Tensor:
    """This shard's B [out_features, rank] of the checkpoint's B [full_out_features, rank]."""
    _expect(target, slice_index, "lora_b", b.size(0), target.slices[slice_index].full_out_features)
    return shard_rows(b, target.slices[slice_index].out_features, target.shard)


def shard_bias(target: LoraTarget, slice_index: int, bias: torch.Tensor) -> torch.Tensor | None:
    """This shard's additive bias [out_features]; None on ranks of a row-parallel layer that must not add it."""
    _expect(target, slice_index, "bias", bias.size(0), target.slices[slice_index].full_out_features)
    if target.kind is ShardKind.ROW and target.shard.rank > 0:
        return None
    return shard_rows(bias, target.slices[slice_index].out_features, target.shard)


def shard_gain(target: LoraTarget, slice_index: int, gain: torch.Tensor) -> torch.Tensor:
    """This shard's gain [out_features] of the checkpoint's [full_out_features]."""
    _expect(target, slice_index, "the gain", gain.size(0), target.slices[slice_index].full_out_features)
    return shard_rows(gain, target.slices[slice_index].out_features, target.shard)


def shard_input_gain(target: LoraTarget, slice_index: int, input_gain: torch.Tensor) -> torch.Tensor:
    """This shard's input gain [in_features] of the checkpoint's [full_in_features]."""
    _expect(target, slice_index, "the input gain", input_gain.size(0), target.full_in_features)
    return shard_rows(input_gain, target.in_features, target.shard)


def shard_weight(target: LoraTarget, slice_index: int, weight: torch.Tensor) -> torch.Tensor:
    """This shard's part of an adapter's own weight: [out, in] of a linear, rows [n, hidden] of an embedding or a head,
    [size] of a norm."""
    s = target.slices[slice_index]
    if target.kind is ShardKind.NORM:
        _expect(target, slice_index, "the weight", weight.size(0), s.full_out_features)
        return weight
    if not target.is_linear:
        hidden_size = s.full_out_features if target.kind is ShardKind.EMBEDDING else target.full_in_features
        _expect(target, slice_index, "the weight", weight.size(1), hidden_size)
        return weight
    _expect(target, slice_index, "the weight", weight.size(0), s.full_out_features)
    _expect(target, slice_index, "the weight", weight.size(1), target.full_in_features)
    return shard_columns(shard_rows(weight, s.out_features, target.shard), target.in_features, target.shard)


def _expect(target: LoraTarget, slice_index: int, what: str, got: int, full: int) -> None:
    if got != full:
        module = target.slices[slice_index].module_name
        raise ValueError(f"{what} of {module} has {got} features where the base model has {full}")
