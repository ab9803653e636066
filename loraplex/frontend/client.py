"""An engine process seen from the server: started, spoken to by messages, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil
import zmq
import zmq.asyncio

from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, TokenOutput
from loraplex.errors import ConfigError, EngineDeadError, EngineTimeoutError, error_from_payload
from loraplex.events import EngineEvent
from loraplex.frontend import messages as msg
from loraplex.frontend.heartbeat import Heartbeat, ProcessWork
from loraplex.processes.engine_child import EngineChild
from loraplex.processes.environment import OUTSIDE_SIGNALS

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]

ENGINE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 10.0
"""How long a call that only reads is waited for. An engine answers between two steps."""

RECEIVE_S = 0.02
"""How long messages of an engine are read before others have their turn."""

MAX_UNREAD, MAX_SILENCE_S = 256, 1.0
"""Requests that are sent, or ended, before the process has read them. One takes 40 us of it."""


class EngineClient:
    """One engine process. Every call is answered, with EngineDeadError when the process ends before it could.

    `on_outputs` gets the tokens of each step; `on_death` is called once, with the reason, when the process exits
    unexpectedly, or is killed because its loop was silent for `timeout_s`. `child`: made already; the client ends it.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[tuple[TokenOutput, ...]], None],
        on_death: Callable[[EngineDeadError], None],
        on_progress: ProgressCallback | None = None,
        on_events: Callable[[tuple[EngineEvent, ...]], None] | None = None,
        child: EngineChild | None = None,
        timeout_s: float = ENGINE_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._child = child or EngineChild()
        self._timeout_s = timeout_s
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_progress = on_progress
        self._on_events = on_events
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._bind()
        self._calls: dict[int, asyncio.Future[msg.Reply]] = {}
        self._call_ids = itertools.count(1)
        self._num_sent = self._num_read = 0
        self._when_read: deque[tuple[int, Callable[[], None]]] = deque()
        self._unread: deque[tuple[int, int]] = deque()  # number of the message, requests in it
        self._num_unread = 0
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._heartbeat: Heartbeat | None = None
        self._is_stopping = False
        self.was_killed = False
        self._last_words = ""
        self.death: EngineDeadError | None = None
        self._dispatch = msg.TypeBasedDispatcher(
            {
                msg.Ready: self._on_ready,
                msg.Progress: self._on_start_progress,
                msg.StepOutputs: lambda m: self._on_outputs(m.outputs),
                msg.Events: self._on_engine_events,
                msg.Beat: self._on_beat,
                msg.Reply: self._on_reply,
                msg.Fatal: self._on_fatal,
            }
        )

    def _bind(self) -> None:
        try:
            self._socket.bind(self._child.address)
        except zmq.ZMQError as error:
            folder = self._child.folder
            self._child.end()
            self._context.destroy(linger=0)
            reason = f"its path has {len(str(folder))} characters" if error.errno == errno.ENAMETOOLONG else error
            raise ConfigError(
                f"no socket for the engine in {folder}: {reason}; set TMPDIR to a folder with a short path"
            ) from error

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        return self._child.is_made and self.death is None and not self._is_stopping

    @property
    def can_start(self) -> bool:
        """Whether a process was made, lives, and is not stopped."""
        if not self.is_alive:
            return False
        try:
            return bool(psutil.Process(self._child.pid).status() != psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    async def start(self, is_watched: bool = False) -> EngineInfo:
        """Start the engine in the process, which is made unless it was; wait until its model is ready.

        is_watched: a start that is silent for `timeout_s` is a hang. A first one may wait for a download.
        Raises the error that kept it from starting.
        """
        self.send(msg.StartEngine(self._config))  # first of all: others may call while the process imports
        self.make_process()
        if is_watched:
            self._watch_heartbeat()
        info = await self._ready
        self._watch_heartbeat()
        return info

    def make_process(self) -> None:
        """The process imports what an engine needs, and waits for `start`. A second time it does nothing."""
        self._child.make()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    def _watch_heartbeat(self) -> None:
        if self._heartbeat is None and self._child.pid is not None and self.death is None:
            self._heartbeat = Heartbeat(self._timeout_s, ProcessWork(self._child.pid))
            self._tasks.append(asyncio.create_task(self._count_silence(self._heartbeat)))

    def send(self, message: Any) -> None:
        """Send without waiting. Raises EngineDeadError after the process's end, UnknownMessageError: not to be sent."""
        if self.death is not None or self._is_stopping:
            raise EngineDeadError(str(self.death or "the engine is shutting down"))
        # The socket has no high-water mark: a send completes at once and the future can be dropped.
        self._socket.send(msg.encode(message))
        self._num_sent += 1
        if isinstance(message, msg.AddRequests | msg.AbortRequests):
            requests = message.requests if isinstance(message, msg.AddRequests) else message.request_ids
            self._unread.append((self._num_sent, len(requests)))
            self._num_unread += len(requests)

    @property
    def is_behind(self) -> bool:
        """Whether it has much to read. One that is silent may hang, or be in a long step: what is sent waits there."""
        return self._num_unread > MAX_UNREAD and self.silence_s < MAX_SILENCE_S and self.is_alive

    def when_read(self, react: Callable[[], None]) -> None:
        """Call it when the process has read all that was sent until now, or has ended."""
        if self._num_read < self._num_sent and self.is_alive:
            self._when_read.append((self._num_sent, react))
        else:
            react()

    def _on_beat(self, message: msg.Beat) -> None:
        self._num_read = message.num_read
        while self._unread and self._unread[0][0] <= self._num_read:
            self._num_unread -= self._unread.popleft()[1]
        self._react_until(self._num_read)

    def _react_until(self, num_read: float) -> None:
        while self._when_read and self._when_read[0][0] <= num_read:
            self._when_read.popleft()[1]()

    async def call(self, message_type: type, *values: Any) -> Any:
        """Send a call and wait for its value; raises the error that the engine answers with.

        EngineTimeoutError: a call that only reads was not answered for READ_TIMEOUT_S, or nothing was for so long
        before it.
        """
        message = message_type(next(self._call_ids), *values)
        is_read = msg.is_read(message)
        if is_read and self.silence_s >= READ_TIMEOUT_S:
            raise _timeout(f"has been silent for {self.silence_s:.0f} s")
        future: asyncio.Future[msg.Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        try:
            self.send(message)
            async with asyncio.timeout(READ_TIMEOUT_S if is_read else None):
                reply = await future
        except TimeoutError:
            raise _timeout(f"did not answer within {READ_TIMEOUT_S:.0f} s") from None
        else:
            return msg.read_reply(reply, msg.result_type(message))
        finally:
            self._calls.pop(message.call_id, None)

    @property
    def silence_s(self) -> float:
        """How long nothing was heard of the engine's loop."""
        return 0.0 if self._heartbeat is None else self._heartbeat.silence_s

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process: ask, then kill after `grace_s`; at once if it still loads its model.

        Called off in the middle, nothing stays either: not the process, nor the socket's folder.
        """
        try:
            await self._end_process(grace_s)
        finally:
            for task in self._tasks:
                task.cancel()
            self._socket.close(linger=0)
            self._context.term()
            self._child.end()

    async def _end_process(self, grace_s: float) -> None:
        if self._child.is_made and not self._child.is_over:
            if self._has_started and self.death is None and not self._is_stopping:
                self.send(msg.Shutdown())
            self._is_stopping = True
            try:
                await asyncio.wait_for(self._child.wait(), grace_s if self._has_started else 0)
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_calls(EngineDeadError("the engine is shutting down"))

    @property
    def _has_started(self) -> bool:
        ready = self._ready
        return ready.done() and not ready.cancelled() and ready.exception() is None

    async def _receive(self) -> None:
        """What is there is read in one turn of the event loop, RECEIVE_S at most: several outputs of a request are then
        one event of its stream. One message a turn would fall behind where the events of a turn take longer than a
        step, as those of two engines do, and nothing would hold the engine back."""
        while True:
            data = await self._socket.recv()
            if self._heartbeat is not None:
                self._heartbeat.heard()
            ends_s = time.monotonic() + RECEIVE_S
            self._take(data)
            while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN and time.monotonic() < ends_s:
                self._take(await self._socket.recv())
            await asyncio.sleep(0)  # others have their turn before what came meanwhile

    async def _count_silence(self, heartbeat: Heartbeat) -> None:
        hangs = False
        while not hangs:
            await asyncio.sleep(heartbeat.tick_s)
            hangs = heartbeat.tick()
        self._child.kill()
        silence = f"nothing was heard of it for {heartbeat.silence_s:.0f} s (--engine-timeout-s)"
        if not self._is_stopping:
            self._die(EngineDeadError(f"the engine process no longer responds: {silence}"))

    def _take(self, data: bytes) -> None:
        """Nothing that one message does may keep the next ones from being read."""
        try:
            self._dispatch(msg.decode_from_engine(data))
        except Exception:
            logger.exception("a message of the engine process could not be handled")

    async def _watch(self) -> None:
        code = await self._child.wait()
        if self._is_stopping:
            return
        self.was_killed = self.death is None and -code in OUTSIDE_SIGNALS
        # What it said before it ended is still in the socket.
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(await self._socket.recv(zmq.NOBLOCK))
        self._die(EngineDeadError(f"the engine process exited unexpectedly ({_exit_text(code)}){self._last_words}"))

    def _die(self, error: EngineDeadError) -> None:
        if self.death is not None:
            return
        self.death = error
        self._fail_calls(error)
        if self._has_started:
            self._on_death(error)
        elif not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # a spare that ends has no caller to take it

    def _fail_calls(self, error: EngineDeadError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))
        self._react_until(math.inf)

    def _on_ready(self, message: msg.Ready) -> None:
        if not self._ready.done():
            self._ready.set_result(message.info)

    def _on_start_progress(self, message: msg.Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(message.what, message.done, message.total)

    def _on_engine_events(self, message: msg.Events) -> None:
        if self._on_events is not None:
            self._on_events(message.events)

    def _on_reply(self, message: msg.Reply) -> None:
        future = self._calls.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(message)

    def _on_fatal(self, message: msg.Fatal) -> None:
        """At the start the error is the caller's; later it is the reason of the death that follows."""
        error = error_from_payload(message.error)
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        self._last_words = f": {error}"
        logger.error("the engine process cannot go on: %s", error)


def _timeout(what: str) -> EngineTimeoutError:
    return EngineTimeoutError(f"the engine {what}: a step of it takes long, or it hangs; try again later")


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
