"""Work that is too long for the event loop: a few threads, in which clients take turns.

A long body takes tens of milliseconds to check and a long text seconds to tokenize. In the event loop every other
request would stop for that long; in an unbounded pool those of one client would stand before all others. Here each
client has a queue, the threads take from the queues in rotation, and one client never has all threads at a time. A full
queue is answered with 429 or 503.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from loraplex.server.api_error import ApiError
from loraplex.server.auth import KEYLESS, caller_of

T = TypeVar("T")

MAX_THREADS = 16
MAX_WAITING_BYTES_OF_A_CLIENT = 64 * 2**20
MAX_WAITING_BYTES = 256 * 2**20
_LEAST_BYTES = 4096
"""What any work counts at least, so that the number of waiting ones is bounded too."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    num_bytes: int
    done: asyncio.Future[Any]


class OffLoop:
    """Runs functions in threads. `client` is whose work it is: see `client_of`. Belongs to one event loop."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(MAX_THREADS, max(2, os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="off-loop")
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._waiting_bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    async def run(self, client: str, work: Callable[[], T], num_bytes: int) -> T:
        """The result of `work`, which holds `num_bytes` of the client's. Raises ApiError when too many bytes wait."""
        num_bytes = max(num_bytes, _LEAST_BYTES)
        self._check_room(client, num_bytes)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(_Job(work, num_bytes, done))
        self._waiting_bytes[client] += num_bytes
        self._start_waiting()
        return await done

    def _check_room(self, client: str, num_bytes: int) -> None:
        """What comes to an empty queue always has room."""
        num_own, num_all = self._waiting_bytes[client], self._waiting_bytes.total()
        if num_own and num_own + num_bytes > MAX_WAITING_BYTES_OF_A_CLIENT:
            raise ApiError(
                f"{num_own} bytes of long requests of this client wait to be read: send fewer at a time",
                status=429,
                kind="rate_limit_error",
                code="too_many_long_requests",
            )
        if num_own and num_all + num_bytes > MAX_WAITING_BYTES:
            raise ApiError(
                f"{num_all} bytes of long requests wait to be read: send this one again",
                status=503,
                kind="unavailable_error",
                code="too_many_long_requests",
            )

    def _start_waiting(self) -> None:
        while self._running.total() < self._num_threads:
            client = next((each for each in self._waiting if self._may_run(each)), None)
            if client is None:
                return
            job = self._next_of(client)
            if not job.done.done():
                self._start(client, job)

    def _may_run(self, client: str) -> bool:
        return self._running[client] < max(1, self._num_threads - 1)

    def _next_of(self, client: str) -> _Job:
        """The client's first job; the client goes to the end of the rotation."""
        jobs = self._waiting.pop(client)
        job = jobs.popleft()
        self._waiting_bytes[client] -= job.num_bytes
        if jobs:
            self._waiting[client] = jobs
        else:
            del self._waiting_bytes[client]
        return job

    def _start(self, client: str, job: _Job) -> None:
        self._running[client] += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
        running.add_done_callback(lambda result: self._end(client, job, result))

    def _end(self, client: str, job: _Job, result: asyncio.Future[Any]) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        error = None if result.cancelled() else result.exception()
        if not job.done.done():
            if error is not None:
                job.done.set_exception(error)
            else:
                job.done.set_result(result.result())
        self._start_waiting()


def client_of(request: Request) -> str:
    """Whose turn a request takes: its key's where the server has keys, else its address's."""
    caller = caller_of(request)
    if caller is not KEYLESS:
        return caller.fingerprint
    return "" if request.client is None else request.client.host
