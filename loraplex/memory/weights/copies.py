"""Copies of weights between the host and a device, beside the steps.

Order on a GPU. A copy begins when what the steps' stream had queued at the call is done: memory that a launched step, a
move or a KV block still touches is not overwritten, whatever gave it back. What a step launches after `hold_steps(i)`
begins when piece i is there. Checksums wait for the steps' stream too, on a third one, so that no copy waits behind
them.

A step may use an adapter whose copies are under way, and waits at each layer for its piece:

    promote   copies enqueued, rows of the slot table written: the adapter is on the device, and arriving
    step      before the kernels of layer i: `StepGate.wait_for_layer(i)`, only in steps with an arriving adapter
    landed    a loader's thread has seen the last piece and compared its checksums: it is a resident like any other
    failed    the requests that run on it are told, no other gets it, and it goes when the last of them has ended
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loraplex.errors import LoraplexError
from loraplex.kernels.checksum import checksums


class Arrival:
    """Copies under way, in order: piece i is there before piece i + 1. events: one a piece; none when all are there."""

    def __init__(self, steps: Any = None, events: Sequence[Any] = ()) -> None:
        self._steps = steps
        self._events = events

    def hold_steps(self, index: int) -> None:
        """What this thread launches from now on begins when piece `index` is there. The host does not wait."""
        if self._events:
            self._steps.wait_event(self._events[index])

    def join(self) -> None:
        """Wait until everything is there. Raises RuntimeError or OSError when a copy failed."""
        if self._events:
            self._events[-1].synchronize()


class CopyEngine(Protocol):
    """Thread-safe. `is_asynchronous`: `copy` only enqueues: its sources must stay as they are until `join` returns."""

    is_asynchronous: bool

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        """Piece i of `sources` goes to piece i of `targets`, equal in bytes, from host to device or back.

        Raises RuntimeError or OSError when that cannot be begun; nothing is under way then.
        """
        ...

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Within the device, in order: steps launched before find the old bytes in `target`, later ones the new."""
        ...

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Of device memory that is not written meanwhile; returns when they are known."""
        ...


class SynchronousCopies:
    """For any device but a GPU: done when the call returns."""

    is_asynchronous = False

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return Arrival()

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return checksums(pieces)


class CudaCopies:
    """On a stream of their own, with an event for each piece; no host thread waits. Make it where steps will be
    launched: that thread's current stream is taken for theirs.

    Host pieces should be page-locked: others are right too, but the call waits for them. cuda: the module, for tests.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._steps = cuda.current_stream(device)
        self._copies = cuda.Stream(device)
        self._checks = cuda.Stream(device)
        self._lock = threading.Lock()  # or the pieces of two copies would take turns

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Arrival:
        events = []
        with self._lock, self._cuda.stream(self._copies):
            self._copies.wait_stream(self._steps)
            try:
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                    events.append(self._copies.record_event(self._cuda.Event(blocking=True)))
            except RuntimeError:
                self._copies.synchronize()
                raise
        return Arrival(self._steps, events)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._cuda.stream(self._steps):
            target.copy_(source, non_blocking=True)

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        with self._cuda.stream(self._checks):
            self._checks.wait_stream(self._steps)
            return checksums(pieces)


def copies_for(device: torch.device) -> CopyEngine:
    """How bytes come to `device`."""
    return CudaCopies(device) if device.type == "cuda" else SynchronousCopies()


# ------------------------------------------------------------------------------------------------------------ arrivals


@dataclass(slots=True, eq=False)
class Arriving:
    """What is on its way to one lora_slot. piece_of_layer: the piece that a decoder layer reads, if any.

    error: why it is not to be used, once that is known.
    """

    arrival: Arrival
    piece_of_layer: Mapping[int, int]
    error: LoraplexError | None = None


class StepGate:
    """kernels.plan.LayerGate of one step: the adapters in it that were arriving when it was launched."""

    def __init__(self, arriving: Mapping[int, Arriving]) -> None:
        self._arriving = arriving

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
        """By lora_slot: adapters known not to have arrived whole. What the step computed with them is dropped."""
        return {slot: each.error for slot, each in self._arriving.items() if each.error is not None}
