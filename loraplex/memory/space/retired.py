"""Freed memory waits here until no step that was launched before can still read it.

retire(extents) at a time when steps S are launched and not committed  ->  free at the commit of the last of S
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loraplex.memory.space.arena import Extent
from loraplex.memory.space.pool import LoRAMemoryPool


class RetiredMemory:
    """Extents on their way back to `pool`. Not thread-safe: the manager calls it under its lock.

    Step ids grow by launch; every launched step is committed in the end, also one that failed.
    """

    def __init__(self, pool: LoRAMemoryPool) -> None:
        self._pool = pool
        self._in_flight: set[int] = set()
        self._last_launched = -1
        self._retired: deque[tuple[int, tuple[Extent, ...]]] = deque()  # (last step that may read them, extents)
        self.nbytes = 0

    def launched(self, step_id: int) -> None:
        assert step_id > self._last_launched, f"step {step_id} is launched after step {self._last_launched}"
        self._in_flight.add(step_id)
        self._last_launched = step_id

    def committed(self, step_id: int) -> bool:
        """Returns whether memory became free."""
        self._in_flight.discard(step_id)
        oldest = min(self._in_flight, default=self._last_launched + 1)
        had_bytes = self.nbytes
        while self._retired and self._retired[0][0] < oldest:
            self._free(self._retired.popleft()[1])
        return self.nbytes < had_bytes

    @property
    def is_waiting_for_steps(self) -> bool:
        """Whether a step is in flight: what is retired now comes back later."""
        return bool(self._in_flight)

    def retire(self, extents: Sequence[Extent]) -> None:
        """Free the extents as soon as the steps in flight are done; now, when there are none."""
        self.nbytes += sum(extent.nbytes for extent in extents)
        if self._in_flight:
            self._retired.append((self._last_launched, tuple(extents)))
        else:
            self._free(extents)

    def extents(self) -> list[Extent]:
        return [extent for _, extents in self._retired for extent in extents]

    def _free(self, extents: Sequence[Extent]) -> None:
        self._pool.free_all(extents)
        self.nbytes -= sum(extent.nbytes for extent in extents)

    def check_integrity(self) -> None:
        assert self.nbytes == sum(extent.nbytes for extent in self.extents())
        assert self._in_flight or not self._retired, "memory waits for steps that are committed"
