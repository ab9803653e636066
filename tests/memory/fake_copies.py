"""A copy engine whose copies are done when a test, or a step that waits for them, says so. Until then targets hold
poison."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from loraplex.kernels.checksum import checksums
from loraplex.memory.space.arena import POISON


class FakeArrival:
    """Copies of one promote. `num_done` pieces are there; after `fail` no more come. `on_hold`: called at a step's
    wait."""

    def __init__(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        self.sources, self.targets = list(sources), list(targets)
        self.num_done = 0
        self.error: Exception | None = None
        self.on_hold: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._before = [source.clone() for source in sources]
        for target in targets:
            target.fill_(POISON)

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.sources)

    def run(self, num_pieces: int | None = None) -> None:
        """The next pieces arrive; all of them by default."""
        with self._lock:
            end = len(self.sources) if num_pieces is None else min(len(self.sources), self.num_done + num_pieces)
            for index in range(self.num_done, end if self.error is None else self.num_done):
                assert self.sources[index].equal(self._before[index]), "the host's copy changed while it was read"
                assert bool((self.targets[index] == POISON).all()), "something wrote where a copy goes"
                self.targets[index].copy_(self.sources[index])
                self.num_done = index + 1

    def fail(self, error: Exception) -> None:
        self.error = error

    def hold_steps(self, index: int) -> None:
        """The kernels of this test run at once, so the copies they wait for do too."""
        self.on_hold()
        self.run(index + 1 - self.num_done)

    def join(self) -> None:
        self.run()
        if self.error is not None:
            raise self.error


class FakeCopies:
    """Asynchronous, one memory as host and device. `arrivals`: of every copy that was begun, oldest first."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.arrivals: list[FakeArrival] = []
        self.error: Exception | None = None  # that no copy can be begun

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> FakeArrival:
        if self.error is not None:
            raise self.error
        self.arrivals.append(FakeArrival(sources, targets))
        return self.arrivals[-1]

    @property
    def under_way(self) -> list[FakeArrival]:
        return [arrival for arrival in self.arrivals if not arrival.is_done and arrival.error is None]

    def run(self, num_pieces: int = 1) -> None:
        """The next pieces of the oldest copy that is under way arrive."""
        for arrival in self.under_way[:1]:
            arrival.run(num_pieces)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._check_untouched([source, target])
        target.copy_(source)

    def checksums(self, pieces: Sequence[torch.Tensor]) -> tuple[int, ...]:
        self._check_untouched(pieces)
        return checksums(pieces)

    def _check_untouched(self, pieces: Sequence[torch.Tensor]) -> None:
        coming = {target.data_ptr() for arrival in self.under_way for target in arrival.targets[arrival.num_done :]}
        assert coming.isdisjoint(piece.data_ptr() for piece in pieces), "read before it arrived"
