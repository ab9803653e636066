"""An engine process seen from the server: started, spoken to by messages, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from loraplex import logs
from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, TokenOutput
from loraplex.engine import messages as msg
from loraplex.environment import child_environment
from loraplex.errors import EngineDeadError, error_from_payload
from loraplex.events import EngineEvent

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]

ENGINE_MODULE = "loraplex.engine.process"


class EngineClient:
    """One engine process. Every call is answered, with EngineDeadError when the process ends before it could.

    `on_outputs` gets the tokens of each step; `on_death` is called once, with the reason, when the process ends unasked. `module` is
    what the process runs (`python -m module ADDRESS`).
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[tuple[TokenOutput, ...]], None],
        on_death: Callable[[EngineDeadError], None],
        on_progress: ProgressCallback | None = None,
        on_events: Callable[[tuple[EngineEvent, ...]], None] | None = None,
        module: str = ENGINE_MODULE,
    ) -> None:
        self._config = config
        self._module = module
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_progress = on_progress
        self._on_events = on_events
        self._folder = Path(tempfile.mkdtemp(prefix="loraplex-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._process: asyncio.subprocess.Process | None = None
        self._calls: dict[int, asyncio.Future[msg.Reply]] = {}
        self._call_ids = itertools.count(1)
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._last_words = ""
        self.death: EngineDeadError | None = None
        self._dispatch = msg.TypeBasedDispatcher(
            {
                msg.Ready: self._on_ready,
                msg.Progress: self._on_start_progress,
                msg.StepOutputs: lambda m: self._on_outputs(m.outputs),
                msg.Events: self._on_engine_events,
                msg.Reply: self._on_reply,
                msg.Fatal: self._on_fatal,
            }
        )

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self.death is None and not self._is_stopping

    async def start(self) -> EngineInfo:
        """Start the process and wait until its model is ready. Raises the error that kept it from starting."""
        address = f"ipc://{self._folder / 'engine'}"
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self.send(msg.StartEngine(self._config))  # first of all: others may call while the process is being made
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the working directory must not stand in for a module: the engine imports what this process would
            "-m",
            self._module,
            address,
            *logs.arguments(),
            env={**child_environment(), "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=asyncio.subprocess.PIPE,  # its end tells the engine that this process is gone
            start_new_session=True,  # Ctrl-C in a terminal is for the server, which ends the engine in order
        )
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return await self._ready

    def send(self, message: Any) -> None:
        """Send without waiting. Raises EngineDeadError when the process has ended, UnknownMessageError for what cannot be sent."""
        if self.death is not None or self._is_stopping:
            raise EngineDeadError(str(self.death or "the engine is shutting down"))
        # The socket has no high-water mark: a send completes at once and the future can be dropped.
        self._socket.send(msg.encode(message))

    async def call(self, message_type: type, *values: Any) -> Any:
        """Send a call and wait for its value; raises the error that the engine answers with."""
        call_id = next(self._call_ids)
        future: asyncio.Future[msg.Reply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self.send(message_type(call_id, *values))
            return msg.read_reply(await future, msg.RESULT_TYPES[message_type])
        finally:
            self._calls.pop(call_id, None)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the process: ask, then kill after `grace_s`. One that still loads its model does not listen and is killed at once.

        Called off in the middle, nothing stays either: not the process, nor the socket's folder.
        """
        try:
            await self._end_process(grace_s)
        finally:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            for task in self._tasks:
                task.cancel()
            self._socket.close(linger=0)
            self._context.term()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self, grace_s: float) -> None:
        if self._process is not None and self._process.returncode is None:
            if self._has_started and self.death is None and not self._is_stopping:
                self.send(msg.Shutdown())
            self._is_stopping = True
            try:
                await asyncio.wait_for(self._process.wait(), grace_s if self._has_started else 0)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
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
        while True:
            self._take(await self._socket.recv())
            await asyncio.sleep(
                0
            )  # a message that is there already is read without a pause: others have their turn first

    def _take(self, data: bytes) -> None:
        """Nothing that one message does may keep the next ones from being read."""
        try:
            self._dispatch(msg.decode_from_engine(data))
        except Exception:
            logger.exception("a message of the engine process could not be handled")

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        if self._is_stopping:
            return
        # What it said before it ended is still in the socket.
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(await self._socket.recv(zmq.NOBLOCK))
        self._die(EngineDeadError(f"the engine process ended unasked ({_exit_text(code)}){self._last_words}"))

    def _die(self, error: EngineDeadError) -> None:
        if self.death is not None:
            return
        self.death = error
        self._fail_calls(error)
        if self._has_started:
            self._on_death(error)
        elif not self._ready.done():
            self._ready.set_exception(error)

    def _fail_calls(self, error: EngineDeadError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(str(error)))

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


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
