"""How much happens in one turn of the event loop: what is read, what is parsed, what begins and what ends.

What thousands of connections bring at the same moment is taken in many turns, so that others are served between them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import ioctl
from termios import TIOCOUTQ

from uvicorn.protocols.http.flow_control import FlowControl

READ_BYTES = 2**14
"""Of one connection at a time. The event loop's own reads have 256 KiB, of each connection in each turn."""

PARSED_BYTES = 4096
"""At a time, of one connection."""

SHORT_READ_BYTES = 1024
"""A request of this size does not wait for others that are parsed in many pieces."""

SLICE_S = 0.002
"""Of a turn of the event loop: for parsing what came on all connections."""


LOOK_AGAIN_S = 0.002
"""After a look that found no work may begin."""

LOOKS_A_TURN = 32
"""At clients that wait for a turn and may be gone."""


@dataclass(slots=True)
class _OfSource:
    """waiting: what asks whether a client is there, oldest first."""

    takes_oldest: bool
    waiting: dict[asyncio.Future[None], Callable[[], bool]] = field(default_factory=dict)

    def take(self, from_both_ends: bool) -> tuple[asyncio.Future[None], Callable[[], bool]]:
        turn = next(iter(self.waiting if self.takes_oldest else reversed(self.waiting)))
        self.takes_oldest = not (from_both_ends and self.takes_oldest)
        return turn, self.waiting.pop(turn)


class Turns:
    """For work of some milliseconds in the event loop: so many in each of its turns, by source in rotation.

    Else a hundred requests that come at once would run one after the other before the loop sees anything else. A source
    is a client with a key, or an address: one with one piece of work waits for at most one of each other. Of a source
    what came first is first; from_both_ends: the latest and the oldest in turns, where a flood should delay neither
    what comes after it, nor, going on, what came before. Work whose client is gone takes no turn; LOOKS_A_TURN clients
    are looked at between two others. is_open: while it says no, none begins.
    """

    def __init__(
        self, num_a_turn: int = 1, *, from_both_ends: bool = False, is_open: Callable[[], bool] = lambda: True
    ) -> None:
        self._num_a_turn = num_a_turn
        self._from_both_ends = from_both_ends
        self._is_open = is_open
        self._sources: dict[str, _OfSource] = {}  # the next one first
        self._is_due = False

    async def next(self, source: str = "", is_there: Callable[[], bool] = lambda: True) -> None:
        """ConnectionAbortedError: `is_there`, asked when the turn comes, has said that the client is gone."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._sources.setdefault(source, _OfSource(not self._from_both_ends)).waiting[turn] = is_there
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._begin, loop)
        try:
            await turn
        finally:
            self._forget(source, turn)  # it was cancelled

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._sources and not self._is_open():
            loop.call_later(LOOK_AGAIN_S, self._begin, loop)
            return
        num_looks, num_begun = 0, 0
        while self._sources and num_looks < LOOKS_A_TURN and num_begun < self._num_a_turn:
            source, of_source = next(iter(self._sources.items()))
            turn, is_there = of_source.take(self._from_both_ends)
            del self._sources[source]
            if of_source.waiting:
                self._sources[source] = of_source
            if turn.done():
                continue
            num_looks += 1
            if is_there():
                num_begun += 1
                turn.set_result(None)
            else:
                turn.set_exception(ConnectionAbortedError())
        self._is_due = bool(self._sources)
        if self._is_due:
            loop.call_soon(self._begin, loop)

    def _forget(self, source: str, turn: asyncio.Future[None]) -> None:
        of_source = self._sources.get(source)
        if of_source is not None and of_source.waiting.pop(turn, None) is not None and not of_source.waiting:
            del self._sources[source]


@dataclass(slots=True)
class _Work:
    """Of one address."""

    short: deque[Callable[[], None]] = field(default_factory=deque)
    long: deque[Callable[[], None]] = field(default_factory=deque)
    num_taken: int = 0

    def take(self) -> Callable[[], None]:
        self.num_taken += 1
        place = self.num_taken % 3
        if self.long and (place == 0 or not self.short):
            return self.long.popleft()
        return self.short.popleft() if place == 2 else self.short.pop()


class TimeSlices:
    """For work that cannot wait for a turn of its own: so much time in each turn of the event loop, the rest later.

    By address in rotation; of one, in rotation, the latest short work, the oldest, and of long work the oldest. So a
    flood delays nothing of other addresses, and of its own neither what comes after it, nor, going on, what was there.
    """

    def __init__(self, seconds: float = SLICE_S) -> None:
        self.seconds = seconds
        self._spent_s = 0.0
        self._is_turn_due = self._is_working = False
        self._sources: dict[str, _Work] = {}  # the next one first

    def run(self, work: Callable[[], None], is_short: bool, source: str = "") -> None:
        """Now, or in a later turn. `work` may ask for more of it."""
        of_source = self._sources.setdefault(source, _Work())
        (of_source.short if is_short else of_source.long).append(work)
        if not self._is_working:
            self._work()

    def _work(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._is_working = True
        try:
            while self._sources and self._spent_s < self.seconds:
                began_s = time.perf_counter()
                self._take()()
                self._spent_s += time.perf_counter() - began_s
        finally:
            self._is_working = False

    def _take(self) -> Callable[[], None]:
        source = next(iter(self._sources))
        of_source = self._sources.pop(source)
        work = of_source.take()
        if of_source.short or of_source.long:
            self._sources[source] = of_source
        return work

    def _begin_turn(self) -> None:
        self._spent_s, self._is_turn_due = 0.0, False
        if self._sources:
            self._work()


class SmallReads(asyncio.BufferedProtocol):
    """A connection that is read in pieces. `read_buffer`: of all connections of an event loop, since what was read is
    taken before the next read.
    """

    read_buffer: memoryview

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.read_buffer[:nbytes]))

    @abstractmethod
    def data_received(self, data: bytes) -> None: ...


class PacedFlow(FlowControl):
    """Reading stops for either of two reasons: a body that the application has not taken (uvicorn's), and `is_behind`,
    what came and is not parsed yet."""

    is_behind = False

    def set_behind(self, is_behind: bool) -> None:
        if is_behind != self.is_behind:
            self.is_behind = is_behind
            self._obey()

    def pause_reading(self) -> None:
        self.read_paused = True
        self._obey()

    def resume_reading(self) -> None:
        self.read_paused = False
        self._obey()

    def _obey(self) -> None:
        if self._transport.is_closing():
            return
        if self.is_behind or self.read_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """What the client has not acknowledged: here, and in the system's buffer, which takes and gives in leaps."""
    sock = transport.get_extra_info("socket")
    with suppress(OSError, ValueError):
        in_system = 0 if sock is None else int.from_bytes(ioctl(sock.fileno(), TIOCOUTQ, bytes(4)), sys.byteorder)
        return transport.get_write_buffer_size() + in_system
    return 0  # it is closed
