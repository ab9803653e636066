"""Adapters whose copies to the device are under way: a step may use them, and waits at each layer for its piece.

promote   copies enqueued, rows of the slot table written: the adapter is on the device, and arriving
step      before the kernels of layer i: `StepGate.wait_for_layer(i)`, only in steps with an arriving adapter
landed    a loader's thread has seen the last piece and compared its checksums: it is a resident like any other
failed    who ran on it is told; nobody gets it any more, and it goes when the last of them has ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loraplex.errors import LoraplexError
from loraplex.memory.weights.copies import Arrival


@dataclass(slots=True, eq=False)
class Arriving:
    """What is on its way to one lora_slot. piece_of_layer: the piece that a decoder layer reads; none where it reads nothing.

    error: why it is not to be used, once that is known.
    """

    arrival: Arrival
    piece_of_layer: Mapping[int, int]
    error: LoraplexError | None = None


class StepGate:
    """kernels.plan.LayerGate of one step: the adapters in it that were arriving when it was launched."""

    def __init__(self, arriving: Mapping[int, Arriving]) -> None:
        self._arriving = dict(arriving)

    def wait_for_layer(self, layer: int) -> None:
        """Kernels launched from now on begin when every adapter's weights of this layer are there."""
        for each in self._arriving.values():
            piece = each.piece_of_layer.get(layer)
            if piece is not None:
                each.arrival.hold_steps(piece)

    def wait_for_all(self) -> None:
        """Kernels launched from now on begin when all of these adapters are there."""
        for each in self._arriving.values():
            if each.piece_of_layer:
                each.arrival.hold_steps(max(each.piece_of_layer.values()))

    def errors(self) -> Mapping[int, LoraplexError]:
        """By lora_slot: adapters that are known not to have arrived whole. What the step computed with them is nobody's."""
        return {slot: each.error for slot, each in self._arriving.items() if each.error is not None}
