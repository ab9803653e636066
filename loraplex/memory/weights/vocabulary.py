"""An adapter's embedding and head, brought to the base's vocabulary: what it has of its own is rows, the rest is
deltas of the base's size.

    rows       of a whole embedding or head those that differ from the base's are kept: a vocabulary of 128,000 would
               cost a gigabyte for each adapter. Where the base's rows cannot be read back (a head in eight bits) all
               are.
    A and B    of LoRA on them end where the base's vocabulary does. What they add to a token beyond it is added to the
               token's own row; behind an adapter's vocabulary that ends earlier they are zero.
    ends       each token beyond the base's vocabulary has a row of its own in both, or the adapter is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import LoraTarget, ShardKind

ROWS_AT_ONCE = 1 << 14
"""Rows of the base's that are in memory a second time while they are compared."""


class UnfitWeightsError(ValueError):
    """The adapter cannot be served on this base; the message is a reason to refuse it."""


class BaseRows(Protocol):
    """What is asked of the base model."""

    def base_rows(self, module_name: str, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Rows [n, hidden] of the embedding or the head, bit for bit the checkpoint's, on the host; None: they cannot
        be read back."""
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """The embedding and the head of a model that publishes them."""

    embedding: str
    head: str
    vocab_size: int

    @classmethod
    def of(cls, targets: Sequence[LoraTarget]) -> Ends | None:
        names = {target.kind: target for target in targets}
        embedding, head = names.get(ShardKind.EMBEDDING), names.get(ShardKind.HEAD)
        if embedding is None or head is None:
            return None
        return cls(embedding.slices[0].module_name, head.slices[0].module_name, embedding.full_in_features)


def fitted(model: LoRAModel, ends: Ends | None, base: BaseRows) -> LoRAModel:
    """The adapter as its blocks are packed; `model` itself where there is nothing to do. Raises UnfitWeightsError."""
    if ends is None:
        return model
    layers = {name: layer for name in (ends.embedding, ends.head) if (layer := model.get_lora(name)) is not None}
    vocab_size = model.vocab_size or ends.vocab_size
    if not layers and vocab_size <= ends.vocab_size:
        return model
    changed = {name: _fitted(layer, ends, vocab_size, base) for name, layer in layers.items()}
    for name in (ends.embedding, ends.head):
        _check_rows(name, changed.get(name), ends.vocab_size, vocab_size)
    if all(changed[name] is layer for name, layer in layers.items()):
        return model
    return replace(model, layers={**model.layers, **changed}, blueprint=None)


def _fitted(layer: LoRALayerWeights, ends: Ends, vocab_size: int, base: BaseRows) -> LoRALayerWeights:
    is_embedding = layer.module_name == ends.embedding
    if layer.magnitude is not None and (is_embedding or layer.weight is not None or vocab_size != ends.vocab_size):
        raise UnfitWeightsError(
            f"{layer.module_name}: DoRA on an embedding, or beside rows of its own, is not supported; train with "
            "use_dora=False there"
        )
    if layer.weight is not None:
        layer = _with_few_rows(layer, vocab_size, ends.vocab_size, base)
    return _with_base_vocabulary(layer, ends.vocab_size, is_embedding=is_embedding)


def _with_few_rows(layer: LoRALayerWeights, vocab_size: int, base_size: int, base: BaseRows) -> LoRALayerWeights:
    """Rows of tokens of the adapter's vocabulary, without those that are the base's."""
    assert layer.weight is not None
    weight, row_ids = layer.weight, layer.row_ids
    if row_ids is None:
        row_ids = torch.arange(len(weight))
    is_kept = row_ids < vocab_size
    for start in range(0, len(row_ids), ROWS_AT_ONCE):
        here = slice(start, start + ROWS_AT_ONCE)
        ids = row_ids[here]
        is_shared = ids < base_size
        rows = base.base_rows(layer.module_name, ids[is_shared]) if is_shared.any() else None
        if rows is not None:
            is_kept[here][is_shared] &= ~_equal_rows(weight[here][is_shared], rows)
    if not is_kept.any():
        return replace(layer, weight=None, row_ids=None)
    if is_kept.all():
        return replace(layer, row_ids=row_ids)
    return replace(layer, weight=weight[is_kept], row_ids=row_ids[is_kept])


def _equal_rows(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(rows.dtype, others.dtype)
    return (rows.to(wide) == others.to(wide)).all(dim=1)


def _with_base_vocabulary(layer: LoRALayerWeights, base_size: int, *, is_embedding: bool) -> LoRALayerWeights:
    a, b = layer.lora_a, layer.lora_b
    if a is None or b is None:
        return layer
    size = a.shape[1] if is_embedding else b.shape[0]
    if size == base_size:
        return layer
    if size < base_size:
        if is_embedding:
            return replace(layer, lora_a=F.pad(a, (0, base_size - size)))
        return replace(layer, lora_b=F.pad(b, (0, 0, 0, base_size - size)))
    weight, row_ids = layer.weight, layer.row_ids
    if weight is None or row_ids is None:
        return replace(layer, lora_a=a[:, :base_size]) if is_embedding else replace(layer, lora_b=b[:base_size])
    beyond = row_ids >= base_size
    ids = row_ids[beyond]
    if len(ids) and int(ids.max()) >= size:
        raise UnfitWeightsError(
            f"{layer.module_name}: its LoRA is of {size} tokens and its rows go to {int(ids.max())}"
        )
    product = a[:, ids].float().T @ b.float().T if is_embedding else b[ids].float() @ a.float()
    weight = weight.clone()
    weight[beyond] = (weight[beyond].float() + layer.scaling * product).to(weight.dtype)
    if is_embedding:
        return replace(layer, lora_a=a[:, :base_size], weight=weight)
    return replace(layer, lora_b=b[:base_size], weight=weight)


def _check_rows(name: str, layer: LoRALayerWeights | None, base_size: int, vocab_size: int) -> None:
    """Every token beyond the base's vocabulary has its row."""
    if vocab_size <= base_size:
        return
    row_ids = None if layer is None else layer.row_ids
    beyond = torch.empty(0, dtype=torch.int64) if row_ids is None else row_ids[row_ids >= base_size]
    if not torch.equal(beyond, torch.arange(base_size, vocab_size)):
        raise UnfitWeightsError(
            f"{name}: the adapter's vocabulary has {vocab_size} tokens, the base's {base_size}, and it has rows of its "
            f"own for {len(beyond)} of the {vocab_size - base_size} tokens added; save it with save_embedding_layers"
        )
