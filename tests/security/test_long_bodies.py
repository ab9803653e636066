"""Long bodies of some clients beside short ones of others: what is refused before any work, and the next turn."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from loraplex.bounds import json_size
from loraplex.bounds.json_size import MAX_LONG_NUMBERS
from loraplex.errors import PromptTooLongError
from loraplex.server import ServerConfig, create_app
from loraplex.server.api_error import ApiError
from loraplex.server.auth import KEYLESS, client_of
from loraplex.server.body import check_num_values
from loraplex.server.off_loop import SHORT_BYTES, OffLoop
from loraplex.server.prompts import LONG_TEXT_CHARS, MAX_CHARS_OF_PROMPTS, PIECE_CHARS, PromptEncoder
from loraplex.server.schemas import ChatCompletionRequest, ChatFields, CompletionRequest, SamplingFields
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from loraplex.testing.fake_engine import FakeModelInfo, FakeText

LONG = 2**24


class Threads:
    """Work that stops in its thread until it is let go; `begun` has the names in their order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def work(self, name: str) -> Callable[[], str]:
        gate = self._gates[name] = threading.Event()

        def run() -> str:
            self.begun.append(name)
            assert gate.wait(30)
            return name

        return run

    def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()

    async def until_begun(self, *names: str) -> None:
        while not set(names) <= set(self.begun):
            await asyncio.sleep(0.001)


async def test_long_work_of_two_clients_does_not_hold_up_the_short_work_of_a_third() -> None:
    threads, off_loop = Threads(), OffLoop(num_threads=2)
    tasks = [asyncio.ensure_future(off_loop.run(each, threads.work(each), LONG)) for each in ("a", "b")]
    await threads.until_begun("a", "b")
    short = asyncio.ensure_future(off_loop.run("c", threads.work("c"), 20_000))
    await threads.until_begun("c")
    threads.end("c")
    assert await short == "c"
    threads.end("a", "b")
    await asyncio.gather(*tasks)


async def test_turns_are_by_what_work_costs() -> None:
    """A client of little long work comes before the next of one that had much, and the first of one that brings
    more."""
    threads, off_loop = Threads(), OffLoop(num_threads=2)
    begin = [("a", "a0", LONG), ("b", "b0", LONG)]
    later = [("a", "a1", LONG), ("c", "c0", 2 * LONG), ("d", "d0", 2 * SHORT_BYTES), ("d", "d1", 2 * SHORT_BYTES)]
    tasks = [asyncio.ensure_future(off_loop.run(who, threads.work(name), size)) for who, name, size in begin]
    await threads.until_begun("a0", "b0")
    tasks += [asyncio.ensure_future(off_loop.run(who, threads.work(name), size)) for who, name, size in later]
    await asyncio.sleep(0)
    threads.end("b0", "d0", "d1")  # one thread becomes free, again and again
    await threads.until_begun("d0", "d1")
    threads.end("a0", "a1", "c0")
    await asyncio.gather(*tasks)
    assert threads.begun[2:4] == ["d0", "d1"]


async def test_the_share_of_a_client_counts_though_it_sends_one_after_the_other() -> None:
    """One that always has a single piece waiting does not pass one whose pieces all wait."""
    threads, off_loop = Threads(), OffLoop(num_threads=2)
    names = [f"{who}{index}" for index in range(6) for who in "ab"]
    works = {name: threads.work(name) for name in (*names, "x")}
    stop = asyncio.ensure_future(off_loop.run("x", works["x"], 1))
    await threads.until_begun("x")  # one thread is left

    async def one_by_one() -> None:
        for index in range(6):
            await off_loop.run("b", works[f"b{index}"], 20_000)

    tasks = [asyncio.ensure_future(off_loop.run("a", works[f"a{index}"], 20_000)) for index in range(6)]
    tasks.append(asyncio.ensure_future(one_by_one()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    threads.end(*names)
    await asyncio.gather(*tasks)
    threads.end("x")
    await stop
    order = threads.begun[1:]
    assert order.index("b2") < order.index("a5")
    assert order.index("a3") < order.index("b5")


class CountingTokenizer(FakeTokenizer):
    """Keeps the lengths of the texts that it was given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens)


class CountingOffLoop(OffLoop):
    def __init__(self) -> None:
        super().__init__(2)
        self.sizes: list[int] = []

    async def run(self, client: str, work: Callable[[], Any], num_bytes: int, *, is_next: bool = False) -> Any:
        self.sizes.append(num_bytes)
        return await super().run(client, work, num_bytes, is_next=is_next)


class Peer(Request):
    """A request of this client, from which nothing comes any more until it goes away."""

    def __init__(self, client: str) -> None:
        scope = {"type": "http", "client": (client, 1), "state": {"caller": KEYLESS}, "headers": []}
        super().__init__(scope, self._until_gone)
        self.gone = asyncio.Event()

    async def _until_gone(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


class Encoder:
    def __init__(self, max_model_len: int) -> None:
        self.tokenizer, self.off_loop = CountingTokenizer(), CountingOffLoop()
        info = FakeModelInfo(max_model_len=max_model_len)
        self.prompts = PromptEncoder(info, self.off_loop, OffLoop(2))

    async def encode(self, *texts: str) -> int:
        side = FakeText(self.tokenizer)
        return len(await self.prompts.from_field(texts, [side] * len(texts), True, 1, Peer("10.0.0.1")))


async def test_a_prompt_that_is_too_long_ends_the_work_on_its_request() -> None:
    encoder = Encoder(max_model_len=8192)
    with pytest.raises(PromptTooLongError, match="65001 in the prompt"):
        await encoder.encode(*["a b1" * 16_250] * 60)
    assert encoder.tokenizer.lengths == [65_000]


async def test_all_prompts_together_are_counted_before_any_work() -> None:
    encoder = Encoder(max_model_len=8192)
    with pytest.raises(ApiError, match="together") as refused:
        await encoder.encode(*["a" * 2**14] * (MAX_CHARS_OF_PROMPTS // 2**14 + 1))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "too_many_characters", "prompt")
    assert encoder.tokenizer.lengths == []


async def test_many_prompts_are_work_in_many_turns() -> None:
    encoder = Encoder(max_model_len=2**16)
    assert await encoder.encode(*["ab" * 10_000] * 30) == 30
    assert len(encoder.off_loop.sizes) == 10
    assert max(encoder.off_loop.sizes) <= PIECE_CHARS <= SHORT_BYTES


async def test_few_prompts_are_one_turn_or_none() -> None:
    encoder = Encoder(max_model_len=2**16)
    assert await encoder.encode(*["ab"] * 100) == 100
    assert encoder.off_loop.sizes == []


async def test_many_tiny_prompts_are_no_work_of_the_event_loop() -> None:
    """A thousand of eight characters were as short as one text of a page, and took three times as long."""
    encoder = Encoder(max_model_len=2**16)
    assert await encoder.encode(*["ab"] * 1000) == 1000
    assert sum(encoder.off_loop.sizes) > LONG_TEXT_CHARS


async def test_one_long_text_is_counted_in_turns() -> None:
    encoder = Encoder(max_model_len=2**14)
    with pytest.raises(PromptTooLongError):
        await encoder.encode("a" * 2**20)
    assert encoder.off_loop.sizes == [PIECE_CHARS]
    assert encoder.tokenizer.lengths == [PIECE_CHARS]


class SlowTemplate(FakeTokenizer):
    """As an adapter's that costs all it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()

    def apply_chat_template(self, *arguments: Any, **named: Any) -> str:
        self.begun.release()
        assert self.may_end.wait(60)
        return "x"


async def test_templates_of_adapters_hold_up_no_long_texts() -> None:
    """Two clients had all threads, and a third one's text of the base model waited for them."""
    encoder, template = Encoder(max_model_len=2**17), SlowTemplate()
    chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    slow = FakeText(template, renders_apart=True)
    peers = [Peer(f"10.0.0.{number}") for number in (1, 1, 2, 2, 3)]
    renders = [asyncio.ensure_future(encoder.prompts.from_chat(chat, slow, peer)) for peer in peers]
    for _ in range(2):
        await asyncio.to_thread(template.begun.acquire)
    async with asyncio.timeout(60):
        for length in (LONG_TEXT_CHARS + 1, SHORT_BYTES + 1):
            assert await encoder.encode("a" * length) == 1
    assert not any(render.done() for render in renders)
    template.may_end.set()
    await asyncio.gather(*renders)


async def test_a_template_whose_client_is_gone_is_not_rendered() -> None:
    """Hundreds of half a second each were, one after the other, and held up the end of the server."""
    encoder, template = Encoder(max_model_len=2**17), SlowTemplate()
    chat = ChatFields.model_validate({"messages": [{"role": "user", "content": "x"}]})
    slow, peers = FakeText(template, renders_apart=True), [Peer("10.0.0.1") for _ in range(4)]
    renders = [asyncio.ensure_future(encoder.prompts.from_chat(chat, slow, peer)) for peer in peers]
    await asyncio.to_thread(template.begun.acquire)
    for peer in peers[:3]:
        peer.gone.set()
    for render in renders[:3]:
        with pytest.raises(ClientDisconnect):
            await render
    template.may_end.set()
    await renders[3]
    assert template.begun.acquire(blocking=False), "of the client that stayed"
    assert not template.begun.acquire(blocking=False)


def test_clients_without_keys_are_networks_of_64_bits() -> None:
    def request(address: str) -> Request:
        return Request({"type": "http", "client": (address, 1), "state": {"caller": KEYLESS}, "headers": []})

    assert client_of(request("2001:db8::1")) == client_of(request("2001:db8::2:3"))
    assert client_of(request("2001:db8::1")) != client_of(request("2001:db8:0:1::1"))
    assert client_of(request("10.0.0.1")) == client_of(request("::ffff:10.0.0.1")) == "10.0.0.1"


# --------------------------------------------------------------------------------------------------- counting in slices


def num_values(text: bytes) -> int:
    """What `check_num_values` counts, a byte at a time."""
    count, is_in_string, index = 1, False, 0
    while index < len(text):
        if text[index : index + 2] in (b"\\\\", b'\\"'):
            index += 1
        elif text[index] == ord('"'):
            is_in_string = not is_in_string
        elif not is_in_string and text[index] in b",:[{":
            count += 1
        index += 1
    return count


@pytest.mark.parametrize("num_slice_bytes", [2, 3, 5, 8])
def test_slices_change_no_count(monkeypatch: pytest.MonkeyPatch, num_slice_bytes: int) -> None:
    monkeypatch.setattr(json_size, "SLICE_BYTES", num_slice_bytes)
    dice = random.Random(num_slice_bytes)
    for _ in range(500):
        text = bytes(dice.choices(b'\\",:[{x', k=dice.randrange(40)))
        count = num_values(text)
        check_num_values(text, max(count, text.count(b'"')))
        if 1 < count <= len(text) and text.count(b'"') <= 2 * (count - 1):
            with pytest.raises(ApiError):
                check_num_values(text, count - 1)


LONG_NUMBERS = [b"1" * 21, b"-0." + b"1" * 20, b"1e5", b"1E+5", b"0.5e-300", b"5e-324"]


@pytest.mark.parametrize("number", LONG_NUMBERS, ids=bytes.decode)
def test_long_numbers_are_counted(number: bytes) -> None:
    def listed(count: int) -> bytes:
        return b'{"a":[' + b",".join([number] * count) + b"]}"

    check_num_values(listed(MAX_LONG_NUMBERS), 10_000)
    with pytest.raises(ApiError, match="more than 1024 numbers of over 20 digits or with exponents") as caught:
        check_num_values(listed(MAX_LONG_NUMBERS + 1), 10_000)
    assert caught.value.code == "too_many_long_numbers"


def test_a_number_counts_by_its_length() -> None:
    check_num_values(b"[" + b"1" * 21 * MAX_LONG_NUMBERS + b"]", 10)
    with pytest.raises(ApiError, match="numbers of over 20 digits"):
        check_num_values(b"[" + b"1" * 21 * (MAX_LONG_NUMBERS + 1) + b"]", 10)


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"a": "1e5 " * 10_000}),
        json.dumps({"a": ['"' + "1" * 40] * 4000}),
        json.dumps([0.1234567890123456] * 4000),
        json.dumps([-12345678901234567] * 4000),
    ],
    ids=["text", "texts with quotes", "floats", "integers"],
)
def test_what_is_no_long_number(body: str) -> None:
    check_num_values(body.encode(), 10_000)


@pytest.mark.parametrize("unit", [b'\\"', b"\\\\", b'\\\\\\"', b"x"])
def test_no_slice_is_longer_than_a_mebibyte(unit: bytes) -> None:
    text = (b'{"prompt":"' + b"[,:{" * 100_000 + unit * (2**22 // len(unit)))[: 2**22] + b'"}'
    parts = list(json_size.slices(text))
    assert b"".join(parts) == text
    assert max(map(len, parts)) <= 2**20
    assert len(parts) < 10


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
async def test_what_a_prompt_was_made_of_does_not_wait_for_the_answer(kind: type[SamplingFields]) -> None:
    """500 chats with 160 KB of empty objects in `tools` were 3 GB for as long as they waited."""
    engine = FakeAsyncEngine()
    engine.hold()
    app = create_app(engine, ServerConfig())
    fields: dict[str, Any] = {"model": "base", "max_tokens": 1, "metadata": {"a": "b"}, "stop": ["x"]}
    path, own = "/v1/completions", {"prompt": "hi"}
    if kind is ChatCompletionRequest:
        messages = [{"role": "user", "content": "hi"}]
        tool = {"type": "function", "function": {"name": "f"}, "a": {}}
        path, own = "/v1/chat/completions", {"messages": messages, "tools": [tool], "tool_choice": "none"}
    earlier = [each for each in gc.get_objects() if type(each) is kind]  # of other tests
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        asking = asyncio.ensure_future(client.post(path, json=fields | own))
        while not engine.num_running:
            await asyncio.sleep(0)
        found = [each for each in gc.get_objects() if type(each) is kind]
        (kept,) = [each for each in found if not any(each is other for other in earlier)]
        assert {name for name in (*own, "metadata", "stop") if getattr(kept, name) is not None} == set()
        engine.resume()
        assert (await asking).status_code == 200
