"""Grammars are compiled for clients in turn, and not far ahead of the steps that use them.

A compiled grammar may take 60 MB, and a waiting request keeps its own. So a client has few that wait for their first
mask; its next one is compiled when one of these is used, or its request has ended. Requests with equal forms share one.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

NUM_COMPILE_THREADS = 2
MAX_OF_A_CLIENT = NUM_COMPILE_THREADS - 1
"""At a time: some forms take seconds. Requests without a client ("") may be of any number of them."""

MAX_AHEAD = 32
"""Grammars that wait for their first mask, of all clients but one more, in equal parts. A client may have one always,
while there are fewer than twice as many in all."""

NUM_LOOKS = 4
"""At clients that have too many, in one search for a next one."""


class Ahead:
    """A compiled grammar that waits for a step. It is one as long as a request holds it that has no mask yet."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class _Work:
    is_there: Callable[[], bool]
    make: Callable[[], Any]


class CompileTurns:
    """Any thread may call it."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, OrderedDict[Future[Any], _Work]] = {}
        self._ahead: dict[Hashable, WeakSet[Ahead]] = {}
        self._compiling: Counter[Hashable] = Counter()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="grammar")
        self._pending: set[Future[Any]] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add(self, client: Hashable, is_there: Callable[[], bool], make: Callable[[], Any]) -> Future[Any]:
        """What `make` makes for a client, in its turn. is_there: whether that needs no other grammar than there is."""
        future: Future[Any] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        with self._lock:
            self._queues.setdefault(client, OrderedDict())[future] = _Work(is_there, make)
        future.add_done_callback(partial(self._take_out, client))
        self._begin_next()
        return future

    def _take_out(self, client: Hashable, future: Future[Any]) -> None:
        """What is cancelled leaves at once with all that it holds: those before it may wait for long."""
        if not future.cancelled():
            return
        with self._lock:
            queue = self._queues.get(client, OrderedDict())
            queue.pop(future, None)
            if not queue:
                self._queues.pop(client, None)

    def note(self, client: Hashable, ahead: Ahead) -> None:
        with self._lock:
            self._ahead.setdefault(client, WeakSet()).add(ahead)

    def poll(self) -> None:
        """Begin what had to wait, where steps have used what was ahead."""
        if self._queues:
            self._begin_next()

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._pending)

    def wait(self, timeout_s: float) -> None:
        """Until one more is compiled, at most so long."""
        wait(set(self._pending), timeout_s, FIRST_COMPLETED)

    def _begin_next(self, *ended: Hashable) -> None:
        """One of each client's in turn, as many at a time as there are threads. ended: whose is compiled."""
        with self._lock:
            self._compiling -= Counter(ended)
            num_looks = 0
            while self._queues and self._compiling.total() < NUM_COMPILE_THREADS and num_looks < NUM_LOOKS:
                client = next(iter(self._queues))
                queue = self._queues.pop(client)
                future, work = next(iter(queue.items()))
                if future.cancelled() or self._may_begin(client, work):
                    del queue[future]
                    if future.set_running_or_notify_cancel():
                        self._compiling[client] += 1
                        self._threads.submit(self._run, client, future, work.make)
                else:
                    num_looks += 1
                if queue:
                    self._queues[client] = queue  # behind all others

    def _may_begin(self, client: Hashable, work: _Work) -> bool:
        if client and self._compiling[client] >= MAX_OF_A_CLIENT:
            return False
        for each in [each for each, of_it in self._ahead.items() if not of_it]:
            del self._ahead[each]
        num = {each: len(of_it) for each, of_it in self._ahead.items()}
        share = max(1, MAX_AHEAD // (len({*num, *self._queues, client}) + 1))
        return (num.get(client, 0) < share and sum(num.values()) < 2 * MAX_AHEAD) or work.is_there()

    def _run(self, client: Hashable, future: Future[Any], make: Callable[[], Any]) -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._begin_next(client)


def forget_one(kept: OrderedDict[tuple[Hashable, bytes], Any], most: int) -> None:
    """The oldest entry of the client that has most, where there are more than `most`. Keys begin with the client."""
    if len(kept) > most:
        num_of = Counter(client for client, _ in kept)
        num_most = max(num_of.values())
        del kept[next(key for key in kept if num_of[key[0]] == num_most)]
