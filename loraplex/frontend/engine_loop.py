"""The loop of an engine process: it reads messages, steps while there is work, and sends what came of it.

One thread runs the step loop and owns the socket; it alone says that the loop turns (`Beat`), so a loop that hangs is
silent. Verbs that may wait (load, promote) run on a few worker threads and answer through a queue, so that no verb ever
holds up a step. Every message is answered, also one that cannot be understood.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import zmq

from loraplex.adapter_store import AdapterStore
from loraplex.core import AdapterSpec, FinishReason, TokenOutput
from loraplex.engine.engine import EngineCore
from loraplex.errors import EngineError, LoraplexError
from loraplex.frontend import messages as msg
from loraplex.frontend.store import store_methods
from loraplex.processes.loader_threads import LoaderThreads

logger = logging.getLogger("loraplex.frontend.process")

IDLE_POLL_MS = 1000
LOADING_POLL_MS = 1
CARE_POLL_MS = 10
BEAT_S = 0.5
NUM_LOAD_THREADS = 8
MAX_STUCK_OPENS = 128
"""As many as a server lets run, by verbs and by need."""

NUM_QUICK_VERB_THREADS = 2
QUICK_VERBS = frozenset({"drop_adapter", "evict_adapter", "unpin_adapter"})
"""They wait for no load, and not behind verbs that do."""

IN_THE_LOOP = frozenset({"attach_adapters", "abort_adapter", "check_pins", "list_adapters", "set_quotas"})
"""They wait for nothing, or end requests, which only the loop may."""

OPEN_ADAPTER = signature(AdapterStore.open_adapter)

MAX_MESSAGES_A_STEP = 256
"""Read between two steps: however many come, requests that run go on."""

MAX_BYTES_A_STEP = 2**20
READ_S = 0.01
"""The same for long ones: a prompt of 131,000 ids takes 5 ms to read and to check, and so does a schema of 32 KB."""


class EngineProcess:
    """Reads messages, steps while there is work, sends what came of it."""

    def __init__(self, socket: zmq.Socket[bytes], engine: EngineCore) -> None:
        self._socket = socket
        self._engine = engine
        self._is_running = True
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._loads, self._quick_verbs = LoaderThreads(NUM_LOAD_THREADS), LoaderThreads(NUM_QUICK_VERB_THREADS)
        self._opens = LoaderThreads(NUM_LOAD_THREADS, max_stuck=MAX_STUCK_OPENS)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._ended: list[TokenOutput] = []
        self._sent_s = time.monotonic()
        self._num_read = 1  # StartEngine
        self._num_told = 0
        self._dispatch = msg.TypeBasedDispatcher(self._handlers())

    def _handlers(self) -> dict[type, Callable[[Any], None]]:
        engine = self._engine
        return {
            msg.AddRequests: self._add_requests,
            msg.AbortRequests: lambda m: self._ended.extend(engine.abort(m.request_ids)),
            msg.CallStore: self._call_store,
            msg.GetStats: lambda m: self._now(m, engine.stats),
            msg.StartProfile: lambda m: self._now(m, engine.start_profile),
            msg.StopProfile: lambda m: self._now(m, engine.stop_profile),
            msg.WithdrawRequests: self._withdraw,
            msg.CheckIntegrity: lambda m: self._now(m, engine.check_integrity),
            msg.Shutdown: self._shutdown,
        }

    def run(self) -> None:
        self._send(msg.Ready(self._engine.info))
        try:
            while self._is_running:
                self._read(self._patience_ms())
                self._beat()
                self._send_outputs(self._engine.step())
                self._send_events()
        finally:
            for threads in (self._loads, self._opens, self._quick_verbs):
                threads.close(timeout_s=0)
            self._engine.close()

    def _patience_ms(self) -> int:
        """How long to wait for messages: not at all while tokens flow."""
        if not self._engine.has_unfinished:
            return CARE_POLL_MS if self._engine.is_in_care else IDLE_POLL_MS
        return LOADING_POLL_MS if self._engine.is_stalled else 0

    def _read(self, timeout_ms: int) -> None:
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_read in events:
            os.read(self._wake_read, 4096)
        while not self._replies.empty():
            self._socket.send(self._replies.get())
        if self._socket in events:
            with contextlib.suppress(zmq.Again):
                num_messages, num_bytes, ends_s = 0, 0, time.monotonic() + READ_S
                while self._is_running and num_messages < MAX_MESSAGES_A_STEP and num_bytes < MAX_BYTES_A_STEP:
                    if time.monotonic() > ends_s:
                        return
                    data = self._socket.recv(zmq.NOBLOCK)
                    num_messages, num_bytes = num_messages + 1, num_bytes + len(data)
                    self._num_read += 1
                    self._handle(data)

    def _add_requests(self, message: msg.AddRequests) -> None:
        for request in message.with_prompt():
            try:
                self._ended.extend(self._engine.add_request(request))
            except LoraplexError as error:
                self._fail(request.request_id, error)

    def _withdraw(self, message: msg.WithdrawRequests) -> None:
        self._send_outputs([])  # ends of requests that it names
        self._now(message, lambda: self._engine.withdraw(message.request_ids))

    def _fail(self, request_id: str, error: LoraplexError) -> None:
        self._ended.append(TokenOutput(request_id, finish_reason=FinishReason.ERROR, error=error.to_payload()))

    def _handle(self, data: bytes) -> None:
        """Nothing that one message says may end the engine."""
        try:
            self._dispatch(msg.decode_to_engine(data))
        except LoraplexError as error:
            logger.error("a message could not be handled: %s", error)
            self._refuse(data, error)
        except Exception as error:
            logger.exception("a message could not be handled")
            self._refuse(data, EngineError(f"{type(error).__name__}: {error}"))

    def _refuse(self, data: bytes, error: LoraplexError) -> None:
        """Tell who waits for an answer to a message that he will get none."""
        call_id = msg.call_id_of(data)
        if call_id is not None:
            self._send(msg.reply_error(call_id, error))
        for request_id in msg.request_ids_of(data):
            self._fail(request_id, error)

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        outputs = self._ended + outputs
        self._ended.clear()
        if outputs:
            for message in msg.step_outputs(outputs):
                self._send(message)

    def _send_events(self) -> None:
        events = self._engine.take_events()
        if events:
            self._send(msg.Events(events))

    def _beat(self) -> None:
        if self._num_told < self._num_read or time.monotonic() - self._sent_s >= BEAT_S:
            self._num_told = self._num_read
            self._send(msg.Beat(self._num_read))

    def _send(self, message: Any) -> None:
        self._socket.send(msg.encode(message))
        self._sent_s = time.monotonic()

    def _answer(self, call_id: int, verb: Callable[[], Any]) -> None:
        self._replies.put(msg.encode(_call(call_id, verb)))
        os.write(self._wake_write, b"x")

    def _now(self, message: Any, verb: Callable[[], Any]) -> None:
        self._send(_call(message.call_id, verb))

    def _call_store(self, message: msg.CallStore) -> None:
        verb = partial(store_methods(self._engine, self._ended.extend)[message.method], *message.arguments)
        if message.method in IN_THE_LOOP:
            self._send(_call(message.call_id, verb))
        else:
            threads = self._quick_verbs if message.method in QUICK_VERBS else self._loads
            tenant = self._tenant_of(message.arguments[0])
            if message.method == "open_adapter":  # of files that no request waits for: pins and loads go beside them
                threads, tenant = self._opens, OPEN_ADAPTER.bind(None, *message.arguments).arguments["tenant"]
            threads.submit(partial(self._answer, message.call_id, verb), tenant)

    def _tenant_of(self, argument: AdapterSpec | int | str) -> str:
        """By an adapter or its id."""
        if isinstance(argument, int):
            return self._engine.adapters.tenant_of(argument)
        return argument.tenant if isinstance(argument, AdapterSpec) else ""

    def _shutdown(self, message: msg.Shutdown) -> None:
        self._is_running = False


def _call(call_id: int, verb: Callable[[], Any]) -> msg.Reply:
    """The reply to a verb: its value, or its error; what is not ours is shown with its place."""
    try:
        return msg.reply_value(call_id, verb())
    except LoraplexError as error:
        return msg.reply_error(call_id, error)
    except Exception as error:
        logger.exception("a verb failed")
        return msg.reply_error(call_id, EngineError(f"{type(error).__name__}: {error}"))
