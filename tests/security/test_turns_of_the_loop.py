"""What ends or is written for many prompts or clients at the same moment has many turns of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.registry import AdapterText, HeldAdapters
from loraplex.config import EngineConfig
from loraplex.core import SamplingParams
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.server import ServerConfig, completions, create_app, openai_api, streaming
from loraplex.server.generation import Deadline, InFlight
from loraplex.server.model_names import ModelNames
from loraplex.server.openai_api import SOME_LOGPROBS
from loraplex.server.pacing import LOOKS_A_TURN, TimeSlices, Turns
from loraplex.server.schemas import CompletionRequest
from loraplex.server.streaming import EventStream, merge
from loraplex.testing import FakeAsyncEngine, FakeText, FakeTokenizer
from loraplex.testing.fake_engine import FakeModelInfo
from loraplex.text.request_text import RequestText
from tests.server.asgi_call import AsgiCall
from tests.server.raw_connection import Connection


class TurnCounter:
    """Counts the turns of the event loop, and what happens in each."""

    def __init__(self) -> None:
        self.happened: Counter[int] = Counter()
        self.turn = 0
        self._is_over = False
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self.turn += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._next)

    def count(self) -> None:
        self.happened[self.turn] += 1

    def close(self) -> None:
        self._is_over = True


@pytest.fixture
async def turns() -> AsyncGenerator[TurnCounter, None]:
    counter = TurnCounter()
    yield counter
    counter.close()


@pytest.fixture
def app() -> FastAPI:
    return create_app(FakeAsyncEngine(), ServerConfig())


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


async def endless(turns: TurnCounter) -> AsyncGenerator[int, None]:
    """One item; then it is open until it is closed, which is counted."""
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        turns.count()


async def test_a_thousand_prompts_are_closed_some_at_a_time(turns: TurnCounter) -> None:
    merged = merge([endless(turns) for _ in range(1000)])
    assert (await anext(merged))[1] == 0
    await merged.aclose()
    assert turns.happened.total() == 1000
    assert max(turns.happened.values()) <= streaming.MAX_CANCELLED


async def test_cancellations_in_each_turn_leave_no_prompt_open(turns: TurnCounter) -> None:
    async def read() -> None:
        merged = merge([endless(turns) for _ in range(200)])
        try:
            async for _ in merged:
                pass
        finally:
            await merged.aclose()

    task = asyncio.ensure_future(read())
    for _ in range(300):
        await asyncio.sleep(0)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert turns.happened.total() == 200
    assert max(turns.happened.values()) <= streaming.MAX_CANCELLED


async def test_a_client_that_goes_ends_its_prompts_some_at_a_time(turns: TurnCounter) -> None:
    """The task group of a stream cancels it again in each turn of the event loop, until it has ended."""
    merged = merge([endless(turns) for _ in range(200)])

    async def events() -> AsyncGenerator[bytes, None]:
        async for _ in merged:
            yield b"data: 1\n\n"

    call = AsgiCall(EventStream(events(), merged), "/", {})
    assert await call.start() == 200
    for _ in range(200):
        await call.next_chunk()
    call.disconnect()
    await call.task
    assert turns.happened.total() == 200
    assert max(turns.happened.values()) <= streaming.MAX_CANCELLED


def test_a_loop_that_closes_leaves_no_prompt_open() -> None:
    async def main() -> TurnCounter:
        counter = TurnCounter()
        merged = merge([endless(counter) for _ in range(200)])
        await anext(merged)
        closing = asyncio.ensure_future(merged.aclose())
        while not counter.happened:
            await asyncio.sleep(0)
        assert not closing.done()
        counter.close()
        return counter

    assert asyncio.run(main()).happened.total() == 200


async def test_prompts_that_expire_together_are_aborted_one_by_one(turns: TurnCounter) -> None:
    aborted: set[str] = set()

    class Engine(FakeAsyncEngine):
        async def abort(self, request_id: str) -> None:
            aborted.add(request_id)
            turns.count()

    in_flight = InFlight(Engine(), 2000)
    deadline = Deadline.of(time.monotonic(), 0.01, None)
    with contextlib.ExitStack() as stack:
        for index in range(1000):
            stack.enter_context(in_flight.track(str(index), 1, deadline))
        while len(aborted) < 1000:
            await asyncio.sleep(0)
    assert set(turns.happened.values()) == {1}


async def test_answers_that_end_together_are_written_one_by_one(
    app: FastAPI, turns: TurnCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = completions.completion_logprobs

    def counted(*values: Any) -> Any:
        turns.count()
        return make(*values)

    monkeypatch.setattr(completions, "completion_logprobs", counted)
    fields = {"model": "base", "prompt": "hi", "max_tokens": SOME_LOGPROBS + 1, "logprobs": 2, "ignore_eos": True}
    async with client_of(app) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}
    assert set(turns.happened.values()) == {1}
    assert turns.happened.total() == 30


@pytest.mark.parametrize("num_tokens", [600, openai_api.LONG_ANSWER + 1])
async def test_streams_that_begin_together_write_their_prompts_one_by_one(
    turns: TurnCounter, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Each in a turn of its own, a long one in a thread."""
    threads: list[int] = []
    choice = completions.CompletionRenderer._choice

    def counted(self: Any, prompt_index: int, output: Any, *rest: Any) -> Any:
        if output.prompt_token_ids not in (written := self.__dict__.setdefault("written", [])):
            written.append(output.prompt_token_ids)  # the first chunk has the prompt
            threads.append(threading.get_ident())
            turns.count()
        return choice(self, prompt_index, output, *rest)

    monkeypatch.setattr(completions.CompletionRenderer, "_choice", counted)
    app = create_app(FakeAsyncEngine(model_info=FakeModelInfo(max_model_len=8192)), ServerConfig())
    fields = {"model": "base", "prompt": [5] * num_tokens, "max_tokens": 1, "echo": True, "stream": True}
    async with client_of(app) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert turns.happened.total() == len(threads) == 20
    if num_tokens > openai_api.LONG_ANSWER:
        assert threading.get_ident() not in threads
    else:
        assert set(turns.happened.values()) == {1}


async def test_prompts_of_all_requests_begin_one_by_one(turns: TurnCounter) -> None:
    """One of 128 completions takes 8 ms to begin."""

    class Engine(FakeAsyncEngine):
        async def generate(self, *values: Any, **named: Any) -> AsyncGenerator[Any, None]:  # type: ignore[override]
            turns.count()
            async for output in super().generate(*values, **named):
                yield output

    app = create_app(Engine(), ServerConfig())
    fields = {"model": "base", "prompt": ["hi"] * 5, "n": 3, "max_tokens": 1}
    async with client_of(app) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=fields) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert turns.happened.total() == 50
    assert set(turns.happened.values()) == {1}


async def test_choices_do_not_repeat_a_long_prompt(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream says the prompt's tokens in the first chunk of each choice; a whole answer says them once."""
    monkeypatch.setattr(openai_api, "MAX_REPEATED_TOKENS", 1000)
    fields: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 1}
    many = fields | {"n": 3, "return_token_ids": True}
    async with client_of(app) as client:
        refused = await client.post("/v1/chat/completions", json=many | {"stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_ids")
        for kept in (many, fields | {"n": 3, "stream": True}, many | {"n": 2, "stream": True}):
            assert (await client.post("/v1/chat/completions", json=kept)).status_code == 200


async def test_requests_whose_clients_go_at_once_end_one_by_one(turns: TurnCounter) -> None:
    async def until_gone(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        turns.count()

    made = [Connection() for _ in range(200)]
    for connection in made:
        type(connection.protocol).server_connections = made[0].connections
        connection.protocol.app = until_gone
        connection.feed(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while any(connection.protocol.cycle.message_event.is_set() for connection in made):
        await asyncio.sleep(0)
    for connection in made:
        connection.protocol.connection_lost(None)
    await asyncio.gather(*(connection.settle() for connection in made))
    assert turns.happened.total() == 200
    assert set(turns.happened.values()) == {1}


@pytest.mark.parametrize("source", ["the flood's", "its own"])
async def test_a_probe_is_answered_before_a_flood_that_was_there(source: str) -> None:
    open_turns, order = Turns(4, from_both_ends=True), list[int]()

    async def ask(number: int, source: str) -> None:
        await open_turns.next(source, lambda: True)
        order.append(number)

    flood = [asyncio.ensure_future(ask(number, "the flood's")) for number in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.ensure_future(ask(-1, source))
    assert len(order) <= 16
    await asyncio.gather(*flood)
    assert sorted(order) == [-1, *range(100)]


@pytest.mark.parametrize("source", ["the flood's", "its own"])
async def test_a_flood_that_goes_on_starves_no_probe(source: str) -> None:
    """The latest was always first: four new requests in each turn, without a key, kept a probe waiting for ever."""
    open_turns, order = Turns(4, from_both_ends=True), list[int]()

    async def ask(number: int, source: str) -> None:
        await open_turns.next(source, lambda: True)
        order.append(number)

    flood = [asyncio.ensure_future(ask(number, "the flood's")) for number in range(20)]
    await asyncio.sleep(0)
    probe = asyncio.ensure_future(ask(-1, source))
    for turn in range(100):
        flood += [asyncio.ensure_future(ask(100 * turn + number, "the flood's")) for number in range(6)]
        await asyncio.sleep(0)
    assert probe.done()
    await asyncio.gather(*flood)


async def test_work_begins_in_turns_by_source(turns: TurnCounter) -> None:
    """Of a flood, the latest and the oldest are taken in turns; a source with one waits for one of each other."""
    by_source, order = Turns(from_both_ends=True), list[str]()

    async def ask(source: str, number: int) -> None:
        await by_source.next(source, lambda: True)
        order.append(f"{source}{number}")
        turns.count()

    flood = [asyncio.ensure_future(ask(source, number)) for number in range(40) for source in "ab"]
    await asyncio.sleep(0)
    cut = asyncio.ensure_future(ask("d", 0))
    alone = asyncio.ensure_future(ask("c", 0))
    await asyncio.sleep(0)
    cut.cancel()
    flood[0].cancel()
    await alone
    assert order == ["a39", "b39", "a1", "c0"]  # a39 had begun, a0 was cut
    await asyncio.gather(*flood, cut, return_exceptions=True)
    both_ends = [number for pair in zip(range(39, 20, -1), range(1, 20), strict=True) for number in pair] + [20]
    assert [each for each in order if each[0] == "a"] == [f"a{number}" for number in both_ends]
    assert len(order) == 80
    assert set(turns.happened.values()) == {1}


async def test_what_begins_in_order_is_of_clients_in_rotation() -> None:
    """Bodies and prompts of all clients were in one queue: what one sent at once, each other one waited for."""
    turns, order = Turns(), list[str]()

    async def ask(source: str, number: int) -> None:
        await turns.next(source)
        order.append(f"{source}{number}")

    flood = [asyncio.ensure_future(ask("a", number)) for number in range(50)]
    await asyncio.sleep(0)
    few = [asyncio.ensure_future(ask("b", number)) for number in range(2)]
    await asyncio.gather(*flood, *few)
    assert order[:6] == ["a0", "a1", "b0", "a2", "b1", "a3"]
    assert [each for each in order if each[0] == "a"] == [f"a{number}" for number in range(50)]


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_the_last_to_come_of_each_source_waits_for_one_of_each_other(sources: list[str]) -> None:
    order = list[str]()

    async def ask(by_source: Turns, source: str) -> None:
        await by_source.next(source, lambda: True)
        order.append(source)

    async def ask_all() -> None:
        by_source = Turns(from_both_ends=True)
        await asyncio.gather(*(ask(by_source, source) for source in sources))

    asyncio.run(ask_all())
    assert Counter(order) == Counter(sources)
    assert set(order[: len(set(sources))]) == set(sources)


async def test_work_whose_client_is_gone_takes_no_turn(turns: TurnCounter) -> None:
    by_source, order, looked = Turns(from_both_ends=True), list[str](), Counter[int]()

    def is_gone() -> bool:
        looked[turns.turn] += 1
        return False

    flood = [asyncio.ensure_future(by_source.next("a", is_gone)) for _ in range(3 * LOOKS_A_TURN)]
    await asyncio.sleep(0)
    await by_source.next("b", lambda: True)
    order.append("b")
    assert len(looked) == 1
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert all(isinstance(each, ConnectionAbortedError) for each in results)
    assert looked.total() == len(flood)
    assert max(looked.values()) <= LOOKS_A_TURN
    assert len(looked) <= 4


async def test_short_work_is_done_from_both_ends(turns: TurnCounter) -> None:
    slices, done = TimeSlices(1e-9), list[int]()  # one piece of work in each turn

    def work(number: int) -> None:
        done.append(number)
        turns.count()

    for number in range(5):
        slices.run(partial(work, number), is_short=True)
    while len(done) < 5:
        await asyncio.sleep(0)
    assert done == [0, 4, 1, 3, 2]
    assert set(turns.happened.values()) == {1}


async def test_work_of_one_address_waits_for_none_of_a_flood() -> None:
    """Two thousand connections of another address that came at once held a probe's few bytes for four seconds."""
    slices, done = TimeSlices(1e-9), list[str]()
    for number in range(100):
        slices.run(partial(done.append, "flood"), number % 2 == 0, "10.0.0.1")
    slices.run(partial(done.append, "probe"), True, "127.0.0.1")
    while "probe" not in done:
        await asyncio.sleep(0)
    assert len(done) <= 3
    while len(done) < 101:
        await asyncio.sleep(0)


async def test_short_work_that_goes_on_starves_neither_older_nor_long_work() -> None:
    slices, done = TimeSlices(1e-9), list[str]()
    for name in ("old", "older", "oldest"):
        slices.run(partial(done.append, name), is_short=True)
    slices.run(partial(done.append, "long"), is_short=False)
    for turn in range(30):
        slices.run(partial(done.append, f"new {turn}"), is_short=True)
        slices.run(partial(done.append, f"newer {turn}"), is_short=True)
        await asyncio.sleep(0)
    assert {"old", "older", "oldest", "long"} <= set(done)


@pytest.mark.parametrize("has_own_defaults", [False, True])
async def test_sampling_parameters_for_many_adapters_are_made_one_a_turn(
    turns: TurnCounter, monkeypatch: pytest.MonkeyPatch, has_own_defaults: bool
) -> None:
    """And once for adapters with the same defaults: a thousand names with many biases held the loop for 900 ms."""
    names = [f"a{number}" for number in range(100)]
    engine = FakeAsyncEngine({name: f"/{name}" for name in names})
    shared = {"top_k": 7}
    for name in names:
        defaults = dict(shared) if has_own_defaults else shared
        engine.texts[name] = FakeText(FakeTokenizer(), FakeTokenizer.vocab_size, defaults, name, True)
    make = CompletionRequest.to_sampling_params

    def counted(body: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
        turns.count()
        return make(body, defaults)

    monkeypatch.setattr(CompletionRequest, "to_sampling_params", counted)
    async with client_of(create_app(engine, ServerConfig())) as client:
        body = {"model": "base", "prompt": names, "lora_path": names, "max_tokens": 1}
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert turns.happened.total() == (100 if has_own_defaults else 1)
    assert max(turns.happened.values()) == 1


async def test_names_of_many_prompts_are_looked_up_some_at_a_time(
    turns: TurnCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number}" for number in range(5 * openai_api.NAMES_A_TURN)]
    find = ModelNames.choice_of

    def counted(self: ModelNames, *asked: Any) -> Any:
        turns.count()
        return find(self, *asked)

    monkeypatch.setattr(ModelNames, "choice_of", counted)
    async with client_of(create_app(FakeAsyncEngine({name: f"/{name}" for name in names}), ServerConfig())) as client:
        body = {"model": "base", "prompt": names, "lora_path": names, "max_tokens": 1}
        reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert turns.happened.total() == len(names)
    assert max(turns.happened.values()) == openai_api.NAMES_A_TURN


async def test_a_text_that_is_no_longer_kept_is_not_made_in_the_event_loop() -> None:
    """300 adapters of one request with tokens of their own were more than are kept: stalls of half a second."""
    engine = cast(Any, AsyncEngine(EngineConfig(model="/m"), None, None))
    made: list[threading.Thread] = []
    texts = SimpleNamespace(known=lambda text: None)
    engine._front = SimpleNamespace(text_of=lambda ref: made.append(threading.current_thread()), texts=texts)
    ref = SimpleNamespace(text=AdapterText.of({"vocab_size": 9}))
    held = HeldAdapters()
    held.text = RequestText(None, 9, ())
    assert await engine._text_for((ref,), held) is held.text
    assert not made
    await engine._text_for((ref,), None)
    assert made != [threading.current_thread()]


async def test_what_read_a_prompt_is_handed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = FakeAsyncEngine({"sql": "/sql"}), []
    generate = engine.generate

    def watched(*values: Any, held: HeldAdapters, **options: Any) -> Any:
        seen.append(held.text)
        return generate(*values, held=held, **options)

    monkeypatch.setattr(engine, "generate", watched)
    async with client_of(create_app(engine, ServerConfig())) as client:
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": "hi", "max_tokens": 1})
    assert answer.status_code == 200
    assert seen == [engine.text_of(None)]
