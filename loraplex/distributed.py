"""How a layer and its adapters are cut for tensor parallelism, and what ranks say to each other within a step.

The cut is pure slicing, derived from what the layer publishes.

One rule serves base weights, A, B and biases: a dimension of `full` entries, of which a shard holds `here`, is cut in
`full / here` parts; shard.size / parts neighbouring ranks hold the same part (k and v heads when there are fewer than
ranks).

    column, qkv   A replicated, B and bias cut like the output        y_i = x (B_i A)^T          parts side by side = y
    row           A cut like the input, B replicated                  y_i = x_i (B A_i)^T        sum over ranks = y
                  bias only on rank 0, or the sum would count it `size` times
    replicated    nothing is cut
    norm          nothing is cut but of a norm whose width is cut: its weight, like the heads that it is over

A module of the checkpoint may be several linears under one another (`LoraSlice.parts`: q, k and v, or gate and up).
Then each of them is cut by the rule, and a shard's outputs are its parts of all of them under one another.

Where a target is fully sharded, no rank has all of A or of B, and ranks exchange something between the two products:

    column, qkv   A cut by its rows too, the rank          h_i = x A_i^T     h = parts side by side,  y_i = h B_i^T
    row           B cut by its outputs too                 h_i = x_i A_i^T   h = sum over ranks,      y_i[own] = h B_i^T

A rank that they do not divide is filled up with zeros. Block-diagonal LoRA (arXiv 2510.23346) exchanges nothing: block
j of B reads part j of h alone, and block j of A makes it of part j of x. So a shard has the parts that its outputs, or
inputs, have to do with.

A gain on the outputs multiplies each summand, so it is cut like B, on every rank; one on the inputs like A's columns.

The ends of the model are cut by the vocabulary, of which each rank has `here` tokens in order:

    embedding     A cut like the input, B replicated                  y_i[t] = 0 but for the rank of t;  sum = y
    head          A replicated, B cut like the output                 parts side by side = logits
    rows          of an adapter's own: on the rank of their token, by its number there. Tokens beyond the base's
                  vocabulary are on the last rank, behind its own

Source of the derivation from the base layer: torchtitan, components/lora.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""A rank that is silent for so long within a step is lost."""

NO_TOKEN = 1 << 62
"""Of a row of zeros that fills up a shard's rows: ranks have equally many."""


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


def own_rows(s: LoraSlice, shard: Shard) -> tuple[slice, ...]:
    """Which of a slice's rows in the checkpoint are this shard's: one stretch, or one of each linear in it."""
    stretches, first = [], 0
    for full, here in s.parts or ((s.full_out_features, s.out_features),):
        start, end = (0, full) if here == full else _part(full, here, shard)
        stretches.append(slice(first + start, first + end))
        first += full
    return tuple(stretches)


def shard_outputs(full: torch.Tensor, s: LoraSlice, shard: Shard) -> torch.Tensor:
    """This shard's rows of `full` [full_out_features, ...] of one slice: a view, or of several linears a copy."""
    if s.out_features == s.full_out_features:
        return full
    stretches = [full[rows] for rows in own_rows(s, shard)]
    return stretches[0] if len(stretches) == 1 else torch.cat(stretches)


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
    return shard_outputs(b, target.slices[slice_index], target.shard)


def shard_lora(
    target: LoraTarget, slice_index: int, a: torch.Tensor, b: torch.Tensor, a_blocks: int = 1, b_blocks: int = 1
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """This shard's A and B, and whether ranks exchange something between the products. blocks: of the diagonal, of
    which the rest is zeros; 1: it is whole."""
    own_a, own_b = shard_lora_a(target, slice_index, a), shard_lora_b(target, slice_index, b)
    is_row, shard, rank = target.kind is ShardKind.ROW, target.shard, a.size(0)
    own = _own_ranks(target, slice_index, rank, a_blocks if is_row else b_blocks)
    if own is not None:
        return own_a[slice(*own)], own_b[:, slice(*own)], False
    if not target.is_fully_sharded or shard.size == 1 or not target.is_linear:
        return own_a, own_b, False
    if is_row:
        return own_a, shard_rows(own_b, own_b.size(0) // shard.size, shard), True
    missing = -rank % shard.size
    if missing:
        own_a, own_b = F.pad(own_a, (0, 0, 0, missing)), F.pad(own_b, (0, missing))
    return shard_rows(own_a, own_a.size(0) // shard.size, shard), own_b, True


def _own_ranks(target: LoraTarget, slice_index: int, rank: int, num_blocks: int) -> tuple[int, int] | None:
    """Which of the rank the shard's outputs, or inputs, have to do with. None: with more than its blocks, or with
    parts of several linears."""
    s = target.slices[slice_index]
    is_row = target.kind is ShardKind.ROW
    full, here = (target.full_in_features, target.in_features) if is_row else (s.full_out_features, s.out_features)
    if num_blocks == 1 or here == full or s.parts:
        return None
    width = full // num_blocks
    start, end = _part(full, here, target.shard)
    if start % width or end % width:
        return None
    return start // width * (rank // num_blocks), end // width * (rank // num_blocks)


def shard_bias(target: LoraTarget, slice_index: int, bias: torch.Tensor) -> torch.Tensor | None:
    """This shard's additive bias [out_features]; None on ranks of a row-parallel layer that must not add it."""
    _expect(target, slice_index, "bias", bias.size(0), target.slices[slice_index].full_out_features)
    if target.kind is ShardKind.ROW and target.shard.rank > 0:
        return None
    return shard_outputs(bias, target.slices[slice_index], target.shard)


def shard_gain(target: LoraTarget, slice_index: int, gain: torch.Tensor) -> torch.Tensor:
    """This shard's gain [out_features] of the checkpoint's [full_out_features]."""
    _expect(target, slice_index, "the gain", gain.size(0), target.slices[slice_index].full_out_features)
    return shard_outputs(gain, target.slices[slice_index], target.shard)


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
        return shard_outputs(weight, s, target.shard)
    if not target.is_linear:
        hidden_size = s.full_out_features if target.kind is ShardKind.EMBEDDING else target.full_in_features
        _expect(target, slice_index, "the weight", weight.size(1), hidden_size)
        return weight
    _expect(target, slice_index, "the weight", weight.size(0), s.full_out_features)
    _expect(target, slice_index, "the weight", weight.size(1), target.full_in_features)
    return shard_columns(shard_outputs(weight, s, target.shard), target.in_features, target.shard)


def shard_token_rows(
    target: LoraTarget, weight: torch.Tensor, row_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This shard's rows of an embedding or a head, and the numbers of their tokens there, ascending.

    weight [n, hidden], row_ids int64 [n] of the whole vocabulary, ascending. All shards have as many rows as the one
    with the most; behind its own a shard has rows of zeros, of NO_TOKEN.
    """
    shard = target.shard
    if shard.size == 1:
        return weight, row_ids
    num_here = target.in_features if target.kind is ShardKind.EMBEDDING else target.slices[0].out_features
    rank_of = (row_ids // num_here).clamp(max=shard.size - 1)
    is_here = rank_of == shard.rank
    missing = int(torch.bincount(rank_of, minlength=shard.size).max()) - int(is_here.sum())
    local_ids = row_ids[is_here] - shard.rank * num_here
    return F.pad(weight[is_here], (0, 0, 0, missing)), F.pad(local_ids, (0, missing), value=NO_TOKEN)


def _expect(target: LoraTarget, slice_index: int, what: str, got: int, full: int) -> None:
    if got != full:
        module = target.slices[slice_index].module_name
        raise ValueError(f"{what} of {module} has {got} features where the base model has {full}")


# ------------------------------------------------------------------------------------------------------------ the ranks


class Collectives(Protocol):
    """What ranks add up and put together. A rank that has ended or is silent is a RuntimeError of the others' call."""

    @property
    def is_captured(self) -> bool:
        """Whether a captured step has them: as operators of the backend."""
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, added in the order of ranks: so bits depend on their number, and on nothing
        else of a batch. `part` may be overwritten."""
        ...

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' `part` [n, width] in the order of ranks, [n, size * width], on rank 0. Others get anything."""
        ...


class RankGroup:
    """The ranks of one model, as its layers see them. collectives: None for a model that has one rank.
    is_fully_sharded: whether adapters are, in layers of such ranks.

    `step`, `expect_logits` and `logits` are for the rank that leads (loraplex/ranks/leader.py): the others follow.
    """

    def __init__(self, shard: Shard, collectives: Collectives | None = None, is_fully_sharded: bool = False) -> None:
        assert (collectives is None) == (shard.size == 1)
        self.shard = shard
        self.collectives = collectives
        self.is_fully_sharded = is_fully_sharded

    @property
    def is_captured(self) -> bool:
        """Whether captured steps have the sums."""
        return self.collectives is None or self.collectives.is_captured

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.collectives is None else self.collectives.sum(part)

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.collectives is None else self.collectives.side_by_side(part)

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """The layers of a step run within the block."""
        yield

    def expect_logits(self, rows: torch.Tensor, segments: Sequence[Any]) -> None:
        """The next step is followed by the logits of these rows of it, and by nothing else. segments: of these rows."""

    @contextmanager
    def logits(self, hidden: torch.Tensor, segments: Sequence[Any]) -> Iterator[None]:
        """The head runs within the block."""
        yield

    def check(self) -> None:
        """Raises DeviceLostError when a rank has ended."""

    def close(self) -> None:
        """End the ranks that this one leads."""


ONE_RANK = RankGroup(Shard())
