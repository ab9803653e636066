"""vLLM's and SGLang's names that no part of the product calls, over what it has.

LoRAMapping, BatchLoRADataMapper           a batch by LoRA id, not only by lora_slot
WorkerLoRAManager                          the verbs of a batch over a LoRAModelManager
slice_lora_a_weights, slice_lora_b_weights the share of one tensor-parallel rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, overload

import torch

from loraplex.core import BASE_SLOT, LoRARequest, LoraTarget, Shard
from loraplex.distributed import shard_lora_a, shard_lora_b
from loraplex.engine import batch
from loraplex.errors import InvalidRequestError
from loraplex.layers.lora import BaseLayerWithLoRA
from loraplex.memory.manager import LoRAModelManager

# ------------------------------------------------------------------------------------------------------- a batch by id


class SequenceWithLoRA(Protocol):
    """A sequence of a batch: None or 0 is the base model; `num_tokens` are its rows in this step."""

    @property
    def lora_id(self) -> int | None: ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, eq=False)
class LoRAMapping(batch.LoRAMapping):
    """The engine's mapping with LoRA ids.

    lora_index_mapping: LoRA id -> lora_slot; lora_set: LoRA id -> its sequences, by their place in the batch.
    """

    lora_index_mapping: Mapping[int, int] = field(default_factory=dict)
    lora_set: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def max_lora_id(self) -> int:
        """0 without adapters."""
        return max(self.lora_index_mapping, default=0)

    def get_lora_id_for_index(self, index: int) -> int | None:
        """The LoRA id of one token, None for the base model. Raises InvalidRequestError outside the batch."""
        if not 0 <= index < len(self.index_mapping):
            raise InvalidRequestError(f"token {index} is not in the batch of {len(self.index_mapping)} tokens")
        slot = int(self.index_mapping[index])
        return next((lora_id for lora_id, other in self.lora_index_mapping.items() if other == slot), None)

    def create_batch_indices(self, batch_size: int | None = None) -> torch.Tensor:
        """The lora_slot of each of the first `batch_size` tokens (None: of all), int32; what `bgmv_*` take."""
        if batch_size is not None and not 0 <= batch_size <= len(self.index_mapping):
            raise InvalidRequestError(f"batch_size {batch_size}: the batch has {len(self.index_mapping)} tokens")
        return torch.tensor(self.index_mapping[:batch_size], dtype=torch.int32)


class BatchLoRADataMapper:
    """From sequences to a mapping."""

    @staticmethod
    def map_sequence_to_adapters(
        sequences: Sequence[SequenceWithLoRA], lora_requests: Mapping[int, LoRARequest]
    ) -> LoRAMapping:
        """Slots in the order in which adapters first occur, from 0; base rows have -1 (the field: slot 0).

        lora_requests: by LoRA id. Raises InvalidRequestError for an id that is not in it.
        """
        slots: dict[int, int] = {}
        members: dict[int, set[int]] = {}
        of_sequences = []
        for index, sequence in enumerate(sequences):
            lora_id = sequence.lora_id
            if not lora_id:
                of_sequences.append(BASE_SLOT)
                continue
            if lora_id not in lora_requests:
                raise InvalidRequestError(f"sequence {index} names LoRA {lora_id}, for which there is no LoRARequest")
            of_sequences.append(slots.setdefault(lora_id, len(slots)))
            members.setdefault(lora_id, set()).add(index)
        mapping = batch.LoRAMapping.from_prompts(of_sequences, [each.num_tokens for each in sequences])
        lora_set = {lora_id: frozenset(indices) for lora_id, indices in members.items()}
        return LoRAMapping(mapping.index_mapping, mapping.prompt_mapping, mapping.is_prefill, slots, lora_set)


# ----------------------------------------------------------------------------------------------------- verbs of a batch


class HasAdapterId(Protocol):
    """A LoRARequest, an AdapterSpec, a LoRAModel: anything that names one adapter."""

    @property
    def adapter_id(self) -> int: ...


class WorkerLoRAManager:
    """What a worker says before each of its batches. The engine's own steps hold references and carry their plan as an
    argument.
    """

    def __init__(self, manager: LoRAModelManager) -> None:
        self.manager = manager
        self._mapping: batch.LoRAMapping | None = None

    def activate_adapter(self, adapter_id: int) -> bool:
        """Bring the adapter to the device; whether something changed. Raises as `LoRAModelManager.promote_adapter`."""
        return self.manager.promote_adapter(adapter_id).is_new

    def set_active_adapters(self, requests: Iterable[HasAdapterId], mapping: batch.LoRAMapping | None = None) -> None:
        """Bring all adapters that `requests` name to the device, together, then take over the mapping.

        Raises AdapterNoRoomError when they do not fit together; those that came in stay.
        """
        held: list[int] = []
        try:
            for adapter_id in dict.fromkeys(request.adapter_id for request in requests):
                self.manager.promote_adapter(adapter_id)
                if (
                    self.manager.try_acquire(adapter_id).lora_slot is not None
                ):  # so that the next one does not push it out
                    held.append(adapter_id)
        finally:
            for adapter_id in held:
                self.manager.release(adapter_id)
        if mapping is not None:
            self.set_adapter_mapping(mapping)

    def set_adapter_mapping(self, mapping: batch.LoRAMapping) -> bool:
        """Check a batch's mapping against what is on the device; whether it is another one than before."""
        table = self.manager.table
        num_tokens, num_prompts = len(mapping.index_mapping), len(mapping.prompt_mapping)
        mapping.validate(num_tokens, num_prompts, table.capacity, lambda slot: not table.is_clear(slot))
        has_changed = mapping is not self._mapping
        self._mapping = mapping
        return has_changed

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """The adapter in each lora_slot (the first one of a shared content), None for a free slot."""
        index_to_id: list[int | None] = [None] * self.manager.table.capacity
        for adapter in reversed(self.manager.list_adapters()):
            if adapter.lora_slot is not None:
                index_to_id[adapter.lora_slot] = adapter.adapter_id
        return index_to_id


# -------------------------------------------------------------------------------------------------- tensor parallelism


@overload
def slice_lora_a_weights(layer: BaseLayerWithLoRA, a: torch.Tensor, tp_rank: int) -> torch.Tensor: ...


@overload
def slice_lora_a_weights(
    layer: BaseLayerWithLoRA, a: Sequence[torch.Tensor | None], tp_rank: int
) -> list[torch.Tensor | None]: ...


def slice_lora_a_weights(
    layer: BaseLayerWithLoRA, a: torch.Tensor | Sequence[torch.Tensor | None], tp_rank: int
) -> torch.Tensor | list[torch.Tensor | None]:
    """The part of A [rank, full_in] that tensor-parallel rank `tp_rank` holds; a list, one per slice, gives a list."""
    target = _target_of(layer, tp_rank)
    if isinstance(a, torch.Tensor):
        return shard_lora_a(target, _only_slice(target), a)
    return [None if t is None else shard_lora_a(target, i, t) for i, t in enumerate(_per_slice(target, a))]


@overload
def slice_lora_b_weights(layer: BaseLayerWithLoRA, b: torch.Tensor, tp_rank: int) -> torch.Tensor: ...


@overload
def slice_lora_b_weights(
    layer: BaseLayerWithLoRA, b: Sequence[torch.Tensor | None], tp_rank: int
) -> list[torch.Tensor | None]: ...


def slice_lora_b_weights(
    layer: BaseLayerWithLoRA, b: torch.Tensor | Sequence[torch.Tensor | None], tp_rank: int
) -> torch.Tensor | list[torch.Tensor | None]:
    """The part of B [full_out, rank] that tensor-parallel rank `tp_rank` holds; a list, one per slice, gives a list."""
    target = _target_of(layer, tp_rank)
    if isinstance(b, torch.Tensor):
        return shard_lora_b(target, _only_slice(target), b)
    return [None if t is None else shard_lora_b(target, i, t) for i, t in enumerate(_per_slice(target, b))]


def _target_of(layer: BaseLayerWithLoRA, tp_rank: int) -> LoraTarget:
    return replace(layer.target, shard=Shard(tp_rank, layer.target.shard.size))


def _only_slice(target: LoraTarget) -> int:
    if len(target.slices) != 1:
        raise ValueError(f"{target.name} has {len(target.slices)} slices: give a list, one tensor per slice")
    return 0


def _per_slice(target: LoraTarget, tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    if len(tensors) != len(target.slices):
        raise ValueError(f"{target.name} has {len(target.slices)} slices, got {len(tensors)} tensors")
    return tensors
