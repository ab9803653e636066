"""Memory that launches share and that outlives them, at addresses that captured graphs go on using."""

from __future__ import annotations

import torch

from loraplex.kernels.triton.launch import next_power_of_2


class Workspace:
    """What lies between two launches, or between the programs of one, on one device. It grows outside of captures only.

    A buffer that became too small is kept until `release`: a graph captured before goes on using it. Integers are
    counters, which every launch leaves at zero.
    """

    def __init__(self, owner: str) -> None:
        """`owner`: whose it is, for errors."""
        self._owner = owner
        self.buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """At least `count` elements; all zero when new, afterwards as they were left."""
        found = self.buffers.get((name, dtype))
        if found is None or found.numel() < count:
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, (
                f"the {self._owner} workspace {name} is too small in a capture: run the same step once before"
            )
            if found is not None:
                self._outgrown.append(found)
            found = torch.zeros(next_power_of_2(count), dtype=dtype, device=device)
            self.buffers[name, dtype] = found
        return found

    @torch.inference_mode()  # in which steps made the buffers
    def reset(self) -> None:
        """Counters are zero again, those of captured graphs too: a launch that was aborted has left them anyhow. On an
        idle device only."""
        for buffer in (*self.buffers.values(), *self._outgrown):
            if not buffer.is_floating_point():
                buffer.zero_()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.buffers.values(), *self._outgrown))

    def release(self) -> int:
        """Give all of it back; returns the bytes. Graphs captured before must not be replayed any more."""
        nbytes = self.nbytes
        self.buffers.clear()
        self._outgrown.clear()
        return nbytes
