"""What the adapters' memory does for a step before its kernels are launched."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.memory.residency.store import WeightStore
from loraplex.memory.weights.copies import StepGate


class StepPreparation:
    """Called by the thread that launches steps, where it launches them."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def prepare(self, lora_slots: Iterable[int]) -> StepGate | None:
        """Make the slot table right on the device; the gate of those of these adapters that are arriving, None when all are there.

        lora_slots: of the step's rows, held by its requests.
        """
        slots = list(lora_slots)
        if slots and self._store.device.table.has_changes:
            with self._store.lock:
                self._store.device.table.flush()
        known = self._store.arriving
        arriving = {slot: each for slot in slots if (each := known.get(slot)) is not None} if known else {}
        return StepGate(arriving) if arriving else None
