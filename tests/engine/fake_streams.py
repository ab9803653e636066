"""Streams, events and graphs of a GPU that is not there, its host's page-locked memory, and where the host waited.

What is launched is not seen. So a stream is taken to be busy with something new whenever it is looked at, and it is
known to be done as far as the host has waited for it, no further: what it waited for on other streams is not followed.
That can show a wait where a real host would have none, never the reverse.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Wait:
    """what: the call that waited. callers: the package's functions around it, as `Class.function`, the innermost
    first."""

    what: str
    callers: tuple[str, ...]

    @property
    def place(self) -> str:
        """Who called it: a function of the package, or a test."""
        return self.callers[0] if self.callers else "a test"

    def __repr__(self) -> str:
        return f"{self.what} in " + (" < ".join(self.callers) or self.place)


class Host:
    """The host's side of the device. `waits`: all that it waited for, in order; a test clears it at its next phase."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.pinned = PinnedMemory()
        self.is_capturing = False
        self._streams: list[Stream] = []
        self.current = self.new_stream()

    def waits_in(self, function: str) -> list[Wait]:
        """Those below a function of the package, as `Class.function`."""
        return [wait for wait in self.waits if function in wait.callers]

    def waits_elsewhere(self, *functions: str) -> list[Wait]:
        """Those below none of these functions."""
        return [wait for wait in self.waits if not set(functions) & set(wait.callers)]

    def waited(self, what: str) -> None:
        """Note a wait. It is an error in a capture, as CUDA has it."""
        self.waits.append(Wait(what, _callers()))
        if self.is_capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def wait_for_current(self, what: str) -> None:
        """What blocking copies do, and who looks at a value."""
        self.waited(what)
        self.current.set_done()

    def synchronize(self, what: str = "synchronize") -> None:
        """Of the whole device."""
        self.waited(what)
        for stream in self._streams:
            stream.set_done()

    def new_stream(self, *_arguments: Any, **_options: Any) -> Stream:
        self._streams.append(Stream(self))
        return self._streams[-1]

    def new_event(self, *_arguments: Any, **_options: Any) -> Event:
        return Event(self)

    def new_graph(self) -> Graph:
        return Graph(self)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """torch.cuda.stream"""
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous


def _callers() -> tuple[str, ...]:
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] == "loraplex":
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return tuple(found)


class Stream:
    """torch.cuda.Stream; its work has numbers, 1, 2, ..."""

    device_index = 0

    def __init__(self, host: Host) -> None:
        self._host = host
        self._num_queued = self._num_done = 0

    def queue(self) -> int:
        """The number of the last work so far."""
        self._num_queued += 1
        return self._num_queued

    def is_done(self, number: int) -> bool:
        return number <= self._num_done

    def set_done(self, number: int | None = None) -> None:
        """The host knows that work is done, with all before it; None: all."""
        self._num_done = max(self._num_done, self.queue() if number is None else number)

    def synchronize(self) -> None:
        self._host.waited("Stream.synchronize")
        self.set_done()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._host)
        event.record(self)
        return event

    def wait_stream(self, _other: Stream) -> None:
        """The device does; the host goes on."""

    def wait_event(self, _event: Event) -> None:
        """So here."""


class Event:
    """torch.cuda.Event"""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._host.current
        self._recorded = stream, stream.queue()

    def query(self) -> bool:
        """To ask is not to wait. The device is quick: True."""
        return True

    def synchronize(self) -> None:
        """A wait, unless nothing was recorded or the host knows already that it is done."""
        if self._recorded is None:
            return
        stream, number = self._recorded
        if not stream.is_done(number):
            self._host.waited("Event.synchronize")
            stream.set_done(number)

    def elapsed_time(self, _end: Event) -> float:
        """Milliseconds."""
        return 1.0


class Graph:
    """torch.cuda.CUDAGraph. Between begin and end of a capture nothing may wait."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def capture_begin(self, **_options: Any) -> None:
        assert not self._host.is_capturing
        self._host.is_capturing = True

    def capture_end(self) -> None:
        assert self._host.is_capturing
        self._host.is_capturing = False

    def replay(self) -> None:
        assert not self._host.is_capturing


class PinnedMemory:
    """Host memory that copies reach without the host. It stays: no other memory comes to lie there."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._starts: list[int] = []

    def add(self, tensor: Tensor) -> None:
        start = tensor.untyped_storage().data_ptr()
        if start and start not in self._tensors:
            self._tensors[start] = tensor
            bisect.insort(self._starts, start)

    def remove(self, tensor: Tensor) -> None:
        start = tensor.untyped_storage().data_ptr()
        del self._tensors[start]
        self._starts.remove(start)

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in it: views do, copies do not."""
        index = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        if index < 0:
            return False
        start = self._starts[index]
        return tensor.data_ptr() < start + self._tensors[start].untyped_storage().nbytes()
