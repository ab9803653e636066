"""Work that is too long for the event loop: threads in which clients take turns by what their work costs.

A long body takes tens of milliseconds to check and a long text seconds to tokenize. In the event loop every other
request would stop for that long; in an unbounded pool those of one client would stand before all others. Here each
client has a queue, and the next work is what would end first if all clients had equal shares of a thread (fair queueing
by start tags). One client never has all threads at a time. Short work has threads of its own, so that work which cannot
be cut, a long body or a long prompt, does not hold it up. A full queue is answered with 429 or 503.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from loraplex.server.api_error import ApiError
from loraplex.server.auth import client_of
from loraplex.server.streaming import until_disconnect

T = TypeVar("T")

MAX_THREADS = 16
SHORT_BYTES = 64 * 2**10
MAX_WAITING_BYTES_OF_A_CLIENT = 64 * 2**20
MAX_WAITING_BYTES = 256 * 2**20
_LEAST_BYTES = 4096
"""What any work counts at least, so that the number of waiting ones is bounded too."""
_MAX_REMEMBERED = 4096
"""Clients without waiting work whose share is remembered."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    num_bytes: int
    end_tag: int
    done: asyncio.Future[Any]


class OffLoop:
    """Runs functions in threads. `client` is whose work it is: see `auth.client_of`. Belongs to one event loop."""

    def __init__(self, num_threads: int | None = None) -> None:
        num_threads = num_threads or min(MAX_THREADS, max(2, os.cpu_count() or 1))
        self._short = _Lane(num_threads)
        self._long = _Lane(num_threads)

    async def run(self, client: str, work: Callable[[], T], num_bytes: int, *, is_next: bool = False) -> T:
        """The result of `work`, which holds `num_bytes` of the client's. Raises ApiError when too many bytes wait.

        is_next: before what else the client waits for: it frees more memory than that.
        """
        lane = self._short if num_bytes <= SHORT_BYTES else self._long
        return await lane.run(client, work, num_bytes, is_next)

    async def run_for(self, request: Request, work: Callable[[], T], num_bytes: int, *, is_next: bool = False) -> T:
        """As `run`, for a request whose body was read. Raises ClientDisconnect when its client goes away before: then
        `work` that has not begun does not."""
        return await until_disconnect(request, self.run(client_of(request), work, num_bytes, is_next=is_next))


class _Lane:
    """Some threads, and the queues of those that wait for one.

    A tag is a time at which nothing but shares passes: a client's work begins at `now` or when its last one ends, and
    ends its bytes later. `now` is where the last work that was started begins.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="off-loop")
        self._waiting: dict[str, deque[_Job]] = {}
        self._waiting_bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._turns: list[tuple[int, int, str]] = []  # a heap: end of each client's first job, a number, the client
        self._numbers = itertools.count()
        self._now = 0
        self._end_tags: OrderedDict[str, int] = OrderedDict()

    async def run(self, client: str, work: Callable[[], T], num_bytes: int, is_next: bool) -> T:
        num_bytes = max(num_bytes, _LEAST_BYTES)
        self._check_room(client, num_bytes)
        work = partial(copy_context().run, work)  # lines of the log name its request
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        jobs = self._waiting.setdefault(client, deque())
        end_tag = self._end_tag(client, num_bytes)  # of its last job, whichever that is
        if is_next and jobs:
            jobs.appendleft(_Job(work, num_bytes, jobs[0].end_tag, done))
        else:
            jobs.append(_Job(work, num_bytes, end_tag, done))
        self._waiting_bytes[client] += num_bytes
        if len(jobs) == 1:
            self._enter(client)
        self._start_waiting()
        return await done

    def _end_tag(self, client: str, num_bytes: int) -> int:
        end_tag = max(self._now, self._end_tags.pop(client, 0)) + num_bytes
        self._end_tags[client] = end_tag
        if len(self._end_tags) > _MAX_REMEMBERED:
            self._end_tags.popitem(last=False)
        return end_tag

    def _enter(self, client: str) -> None:
        heapq.heappush(self._turns, (self._waiting[client][0].end_tag, next(self._numbers), client))

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
        passed = []  # clients that have all the threads they may
        while self._running.total() < self._num_threads and self._turns:
            turn = heapq.heappop(self._turns)
            if self._running[turn[2]] >= max(1, self._num_threads - 1):
                passed.append(turn)
            else:
                self._start_next_of(turn[2])
        for turn in passed:
            heapq.heappush(self._turns, turn)

    def _start_next_of(self, client: str) -> None:
        jobs = self._waiting[client]
        job = jobs.popleft()
        self._now = max(self._now, job.end_tag - job.num_bytes)
        self._waiting_bytes[client] -= job.num_bytes
        if jobs:
            self._enter(client)
        else:
            del self._waiting[client], self._waiting_bytes[client]
        if not job.done.done():
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
