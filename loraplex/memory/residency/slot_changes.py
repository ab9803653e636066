"""What is written to the slot table, for ranks whose own tables have to say the same.

An extent holds the packed blocks of all ranks: `size` parts of equal bytes, one rank behind the other. So a block of
rank r is r parts behind that of rank 0.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.core import Shard
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.slices import SliceLayout


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The block of one target: rank 0's at byte `offset`, each next one's `extent_bytes / size` behind it."""

    target_name: str
    offset: int
    extent_bytes: int
    layouts: tuple[SliceLayout | None, ...]


@dataclass(frozen=True, slots=True)
class SlotChange:
    """The slot is cleared, if `is_new`, and gets these blocks."""

    lora_slot: int
    is_new: bool
    blocks: Sequence[BlockPlace] = ()
    rope_factor: float | None = None
    vocab_size: int | None = None

    def apply(self, table: SlotTable, shard: Shard) -> None:
        if self.is_new:
            table.clear_slot(self.lora_slot)
        for block in self.blocks:
            offset = block.offset + shard.rank * (block.extent_bytes // shard.size)
            table.set_block(block.target_name, self.lora_slot, offset, block.layouts)
        if self.rope_factor is not None:
            table.rope_factors[self.lora_slot] = self.rope_factor
        if self.vocab_size is not None:
            table.set_vocab_size(self.lora_slot, self.vocab_size)


class SlotChanges:
    """In order, since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._changes: list[SlotChange] = []
        self._lock = threading.Lock()

    def add(self, change: SlotChange) -> None:
        """What a new content of a slot makes void is dropped, so the list does not grow without a step."""
        with self._lock:
            if change.is_new:
                self._changes = [each for each in self._changes if each.lora_slot != change.lora_slot]
            self._changes.append(change)

    def take(self) -> Sequence[SlotChange]:
        with self._lock:
            taken, self._changes = self._changes, []
        return taken
