"""Long work in threads: clients take turns, none has all threads, and only so much waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from loraplex.server import ServerConfig, body, create_app
from loraplex.server.api_error import ApiError
from loraplex.server.off_loop import MAX_WAITING_BYTES_OF_A_CLIENT, SHORT_BYTES, OffLoop
from loraplex.server.pacing import Turns
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

LONG = SHORT_BYTES + 1


class Bench:
    """Work that says when it began and ends when it is told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self._may_end.acquire(timeout=30)
            return name

        return run

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0.001)

    def end(self, count: int = 1) -> None:
        self._may_end.release(count)


async def test_clients_take_turns_and_none_has_all_threads() -> None:
    bench, off_loop = Bench(), OffLoop(num_threads=2)
    tasks = [asyncio.ensure_future(off_loop.run("a", bench.work(f"a{index}"), 10)) for index in range(4)]
    await bench.until_begun(1)
    assert bench.begun == ["a0"]
    tasks += [asyncio.ensure_future(off_loop.run("b", bench.work(f"b{index}"), 10)) for index in range(2)]
    await bench.until_begun(2)
    assert bench.begun == ["a0", "b0"]
    bench.end(6)
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0", "b1"]


async def test_only_so_many_bytes_of_a_client_wait() -> None:
    bench, off_loop = Bench(), OffLoop(num_threads=2)
    first = asyncio.ensure_future(off_loop.run("a", bench.work("a0"), LONG))
    await bench.until_begun(1)
    waiting = asyncio.ensure_future(off_loop.run("a", bench.work("a1"), MAX_WAITING_BYTES_OF_A_CLIENT))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="send fewer at a time") as refused:
        await off_loop.run("a", bench.work("a2"), LONG)
    assert (refused.value.status, refused.value.code) == (429, "too_many_long_requests")
    other = asyncio.ensure_future(off_loop.run("b", bench.work("b0"), MAX_WAITING_BYTES_OF_A_CLIENT))
    bench.end(3)
    assert await asyncio.gather(first, waiting, other) == ["a0", "a1", "b0"]
    bench.end()
    assert await off_loop.run("a", bench.work("a3"), 10) == "a3"


async def test_a_cancelled_caller_leaves_the_queue() -> None:
    bench, off_loop = Bench(), OffLoop(num_threads=2)
    first = asyncio.ensure_future(off_loop.run("a", bench.work("a0"), 10))
    await bench.until_begun(1)
    gone = asyncio.ensure_future(off_loop.run("a", bench.work("a1"), 10))
    last = asyncio.ensure_future(off_loop.run("a", bench.work("a2"), 10))
    await asyncio.sleep(0)
    gone.cancel()
    bench.end(2)
    assert await asyncio.gather(first, last) == ["a0", "a2"]
    assert bench.begun == ["a0", "a2"]


async def test_what_frees_memory_comes_next_of_its_client_and_not_before_others() -> None:
    bench, off_loop = Bench(), OffLoop(num_threads=1)
    tasks = [asyncio.ensure_future(off_loop.run("a", bench.work(f"a{index}"), 10)) for index in range(3)]
    tasks.append(asyncio.ensure_future(off_loop.run("b", bench.work("b"), 10)))
    await bench.until_begun(1)
    tasks.append(asyncio.ensure_future(off_loop.run("a", bench.work("render"), 10, is_next=True)))
    await asyncio.sleep(0)
    bench.end(len(tasks))
    await asyncio.gather(*tasks)
    assert [name for name in bench.begun if name != "b"] == ["a0", "render", "a1", "a2"]
    assert bench.begun.index("b") <= 2


async def test_errors_are_the_callers() -> None:
    off_loop = OffLoop(num_threads=2)
    with pytest.raises(ZeroDivisionError):
        await off_loop.run("a", lambda: 1 // 0, 10)
    assert await off_loop.run("a", lambda: 7, 10) == 7


async def test_what_many_requests_do_at_once_leaves_turns_for_others() -> None:
    turns, order = Turns(), list[str]()

    async def request(name: str) -> None:
        await turns.next()
        order.append(name)

    async def other() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            order.append("other")

    tasks = [asyncio.ensure_future(request(str(index))) for index in range(20)]
    tasks[5].cancel()
    await asyncio.gather(other(), *tasks, return_exceptions=True)
    assert [name for name in order if name != "other"] == [str(index) for index in range(20) if index != 5]
    assert all(order[index : index + 3].count("other") for index in range(10))
    await asyncio.wait_for(turns.next(), 30)


async def test_many_requests_at_once_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the event loop some time; one that costs none is answered after a few of them."""
    begun: list[int] = []
    check = body.check_num_values
    monkeypatch.setattr(body, "check_num_values", lambda *values: begun.append(1) or check(*values))
    async with client_of(create_app(FakeAsyncEngine(), ServerConfig())) as client:
        asked = [
            asyncio.ensure_future(client.post("/v1/completions", json={"model": "base", "prompt": "x"}))
            for _ in range(200)
        ]
        while not begun:
            await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        assert len(begun) < 100
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
    assert len(begun) == 200
