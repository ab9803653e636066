"""The ends of a model and its norms, with what adapters change there: the embedding, the head, norms of their own.

    embedding   y[t] = E[t], or the adapter's own row of t;  y[t] += weight * scale * (A^T[t] B^T)
    head        logits = h W^T, or h of the adapter's own rows;  then `add_lora`
                columns up to the largest vocabulary of the step's adapters; beyond a row's own they are -inf
    norm        the adapter's own weight in place of the base's, for its rows

Rows in no segment are the base's, bit for bit. The embedding and the head are outside of captured steps, so that they
run one call a segment; a step with norms of its own is run without its capture (models/decoder.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.core import LoraTarget
from loraplex.distributed import ONE_RANK, RankGroup
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import LayerOps
from loraplex.layers.common import RMSNorm
from loraplex.layers.linear import ParallelLMHead, VocabParallelEmbedding
from loraplex.layers.own_weights import OwnParts, own_segments


class _EndWithLoRA:
    """What the three have in common. Before `set_lora_info` each is its base layer."""

    def __init__(self, target: LoraTarget) -> None:
        self.target = target
        self._bound: tuple[SlotTable, LayerOps, int] | None = None

    def set_lora_info(self, table: SlotTable, backend: LayerOps) -> None:
        """Read adapters from `table` with the kernels of `backend` from now on. KeyError: it lacks this target."""
        self._bound = table, backend, table.first_row(self.target.name)


class VocabParallelEmbeddingWithLoRA(_EndWithLoRA):
    """The embedding, LoRA on it, and rows of adapters' own: of tokens that the base does not have, too."""

    def __init__(self, base_layer: VocabParallelEmbedding) -> None:
        super().__init__(base_layer.target)
        self.base_layer = base_layer

    def forward(self, token_ids: Tensor, plan: LoraPlan | None = None) -> Tensor:
        """token_ids int64 [T] -> [T, hidden]. Tokens beyond the base's vocabulary are in segments of adapters alone
        that have rows for them."""
        if plan is None or self._bound is None or not self._bound[0].embedding_slots:
            return self.base_layer.forward(token_ids)
        table, ops, first_row = self._bound
        found = tuple(own_segments(plan, table, ops, first_row, table.embedding_slots))
        if not found:
            return self.base_layer.forward(token_ids)
        target = self.target
        y = self.base_layer.forward(token_ids.clamp(max=target.full_in_features - 1))
        local_ids = token_ids - target.shard.rank * target.in_features
        for segment, parts in found:
            here = slice(segment.start, segment.end)
            self._apply(y[here], local_ids[here], segment, parts, ops)
        return y

    def _apply(self, y: Tensor, token_ids: Tensor, segment: LoraSegment, parts: OwnParts, ops: LayerOps) -> None:
        """token_ids: as this rank numbers them; what is not of its part of the vocabulary stays as it is."""
        if parts.weight is not None:
            where, is_own = _places(parts, token_ids)
            y.copy_(torch.where(is_own[:, None], parts.weight[where].to(y.dtype), y))
        if parts.lora_a is not None:
            known = token_ids.clamp(0, self.target.in_features - 1)
            delta = ops.linear(parts.lora_a[known].to(y.dtype), parts.lora_b)
            delta.mul_(segment.weight * parts.scale).masked_fill_((token_ids != known)[:, None], 0)
            y.add_(delta)


def _places(parts: OwnParts, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(the row of each token, whether it has one)"""
    if parts.row_ids is None:
        return token_ids.clamp(max=parts.num_rows - 1), token_ids < parts.num_rows
    where = torch.searchsorted(parts.row_ids, token_ids).clamp_(max=parts.num_rows - 1)
    return where, parts.row_ids[where] == token_ids


class LogitsProcessorWithLoRA(_EndWithLoRA):
    """The head, LoRA on it, rows of adapters' own, and where their vocabularies end."""

    def __init__(
        self,
        base_layer: ParallelLMHead,
        ranks: RankGroup = ONE_RANK,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Logits are multiplied by `scale`; under a soft cap c each logit s is c tanh(s / c) then."""
        super().__init__(base_layer.target)
        self.base_layer = base_layer
        self._ranks = ranks
        self._scale, self._softcap = scale, softcap
        self._num_here = self.target.slices[0].out_features

    @property
    def vocab_size(self) -> int:
        """Of the base, of all ranks."""
        return self.target.slices[0].full_out_features

    def forward(self, hidden: Tensor, plan: LoraPlan | None = None) -> Tensor:
        """hidden [n, hidden] -> float32 [n, V], V the largest vocabulary of a row's adapter, the base's at least.

        The plan is over these rows, which are those of logits and not of tokens. Of several ranks the first one gets
        the logits.
        """
        if plan is None or self._bound is None:
            return self._ranks.side_by_side(self._shaped(self.base_layer.forward(hidden)))
        table = self._bound[0]
        sizes = [table.vocab_sizes.get(segment.lora_slot, self.vocab_size) for segment in plan.segments]
        num_added = max(0, *(size - self.vocab_size for size in sizes))
        logits = self._joined(self._own_logits(hidden, plan, num_added), num_added)
        for segment, size in zip(plan.segments, sizes, strict=True):
            logits[segment.start : segment.end, size:] = -torch.inf
        return logits

    def _own_logits(self, hidden: Tensor, plan: LoraPlan, num_added: int) -> Tensor:
        """This rank's, float32, and `num_added` columns behind them."""
        assert self._bound is not None
        table, ops, first_row = self._bound
        logits = self.base_layer.product(hidden)
        added: list[tuple[LoraSegment, Tensor]] = []
        for segment, parts in own_segments(plan, table, ops, first_row, table.head_slots):
            if parts.weight is None:  # all of its rows are other ranks'
                continue
            here = slice(segment.start, segment.end)
            own = ops.linear(hidden[here], parts.weight)[:, : parts.num_rows]
            ids = slice(parts.num_shared) if parts.row_ids is None else parts.row_ids[: parts.num_shared]
            logits[here, ids] = own[:, : parts.num_shared]
            added.append((segment, own[:, parts.num_shared :]))
        ops.add_lora(logits, hidden, plan, table, first_row, self.target.slices)
        shaped = [(segment, self._shaped(own.float())) for segment, own in added]
        return self._widened(self._shaped(logits.float()), shaped, num_added)

    def _shaped(self, logits: Tensor) -> Tensor:
        """float32, in place."""
        if self._scale != 1.0:
            logits.mul_(self._scale)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def _widened(self, logits: Tensor, added: list[tuple[LoraSegment, Tensor]], num_added: int) -> Tensor:
        """With columns for tokens that adapters added: -inf where a row's adapter has none, or another rank has it."""
        if num_added == 0:
            return logits
        wide = logits.new_full((len(logits), self._num_here + num_added), -torch.inf)
        wide[:, : self._num_here] = logits
        for segment, own in added:
            wide[segment.start : segment.end, self._num_here : self._num_here + own.shape[1]] = own
        return wide

    def _joined(self, part: Tensor, num_added: int) -> Tensor:
        """All ranks' parts, on the first one; columns behind the base's vocabulary are the last one's."""
        logits, shard = self._ranks.side_by_side(part), self.target.shard
        if num_added == 0 or shard.size == 1 or shard.rank > 0:
            return logits
        parts = logits.view(len(logits), shard.size, -1)
        return torch.cat([parts[..., : self._num_here].flatten(1), parts[:, -1, self._num_here :]], dim=1)


class RMSNormWithLoRA(_EndWithLoRA):
    """A norm, and those of adapters with their own."""

    def __init__(self, base_layer: RMSNorm) -> None:
        super().__init__(base_layer.target)
        self.base_layer = base_layer

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        y = self.base_layer.forward(x)
        self._apply(y, x, plan)
        return y

    def forward_add(
        self, x: Tensor, residual: Tensor, plan: LoraPlan | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        y, total = self.base_layer.forward_add(x, residual, scale=scale)
        self._apply(y, total, plan)
        return y, total

    def _apply(self, y: Tensor, x: Tensor, plan: LoraPlan | None) -> None:
        if plan is None or self._bound is None:
            return
        table, ops, first_row = self._bound
        if not table.own_layers:
            return
        for segment, parts in own_segments(plan, table, ops, first_row, table.own_layers):
            here = slice(segment.start, segment.end)
            y[here] = self.base_layer.forward_with(parts.weight, x[here])
