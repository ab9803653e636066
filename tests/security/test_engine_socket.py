"""What comes through the engine's socket: nothing that one message says ends the engine, or a request of another."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from loraplex.core import Request, SamplingParams, TokenOutput
from loraplex.demo.tasks import adapter_path
from loraplex.errors import AdapterFaultError, AdapterValidationError, LoraplexError, error_from_payload
from loraplex.frontend import messages as msg
from loraplex.frontend.client import EngineClient
from loraplex.frontend.engine_loop import MAX_MESSAGES_A_STEP, NUM_LOAD_THREADS, EngineProcess
from tests.engine.driver import Driver
from tests.frontend.processes import demo_config, within

GOOD = Request("good", (3, 4, 5, 6), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), 12, 0)


class Wire:
    """An engine's side of a socket, stepped by hand, and the server's end of it."""

    def __init__(self, driver: Driver) -> None:
        self._context = zmq.Context()
        server, engine = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for socket in (server, engine):
            socket.set_hwm(0)
        server.bind("inproc://engine")
        engine.connect("inproc://engine")
        self.server, self._engine, self.process = server, driver.engine, EngineProcess(engine, driver.engine)
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, LoraplexError] = {}
        self.replies: dict[int, msg.Reply] = {}

    def send(self, message: Any) -> None:
        self.server.send(message if isinstance(message, bytes) else msg.encode(message))

    def step(self) -> None:
        """As the engine's loop does it."""
        self.process._read(0)
        self.process._send_outputs(self._engine.step())
        while self.server.poll(0):
            message = msg.decode_from_engine(self.server.recv())
            if isinstance(message, msg.Reply):
                self.replies[message.call_id] = message
            for output in message.outputs if isinstance(message, msg.StepOutputs) else ():
                self._take(output)

    def _take(self, output: TokenOutput) -> None:
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.error is not None:
            self.errors[output.request_id] = error_from_payload(output.error)

    def finish(self) -> None:
        self.step()
        while self._engine.has_unfinished:
            self.step()
        self.step()

    def close(self) -> None:
        for threads in (self.process._loads, self.process._quick_verbs):
            threads.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    config = demo_config()
    driver = Driver(Path(config.model), config.lora, num_threads=1, kv_cache_memory_bytes=1 << 26)
    driver.registry.load("sort", str(adapter_path("sort")))
    wire = Wire(driver)
    yield wire
    driver.check_idle()
    wire.close()
    driver.close()


@pytest.fixture(scope="module")
def quiet(wire: Wire) -> list[int]:
    wire.send(msg.AddRequests.of([GOOD]))
    wire.finish()
    return wire.tokens.pop("good")


def bad(**fields: Any) -> bytes:
    """A request that no front would send."""
    fields = {"request_id": "bad", **fields}
    return msg.encode(msg.AddRequests.of([replace(GOOD, **fields)]))


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def store_call(method: str, *arguments: Any) -> bytes:
    return raw(type="CallStore", call_id=7, method=method, arguments=arguments)


def hostile() -> dict[str, bytes]:
    params = {**msgspec.to_builtins(GOOD.sampling_params), "repetition_penalty": 1e-300}
    request = {**msgspec.to_builtins(GOOD), "request_id": "bad"}
    return {
        "no message": b"\xc1" * 50,
        "nothing": b"",
        "cut off": bad()[:-3],
        "deep": b"\x91" * 100_000 + b"\xc0",
        "a huge array that is not there": b"\xdd\xff\xff\xff\xff",
        "an unknown type": raw(type="Exec", call_id=7, command="id"),
        "a type of the other direction": raw(type="Fatal", error={"error": "EngineError", "message": "x"}),
        "a call of another type": store_call("pin_adapter", "one"),
        "an adapter that is not known": store_call("evict_adapter", 2**62),
        "a number beyond 64 bits": store_call("abort_adapter", 2**64 - 1),
        "a method that is not the store's": store_call("close"),
        "a method by a path": store_call("_store.close"),
        "arguments too many": store_call("pin_adapter", 1, 2),
        "arguments that are no list": raw(
            type="CallStore", call_id=7, method="pin_adapter", arguments={"adapter_id": 1}
        ),
        "parameters out of range": raw(
            type="AddRequests", prompt=bytes(8), requests=[{**request, "sampling_params": params}]
        ),
        "half a token": raw(type="AddRequests", prompt=bytes(7), requests=[request]),
        "a second start": raw(type="StartEngine", config={"model": "other"}),
        "tokens beyond the vocabulary": bad(prompt_token_ids=(3, 2**31 - 1)),
        "negative tokens": bad(prompt_token_ids=(-1, 5)),
        "no tokens": bad(prompt_token_ids=()),
        "more tokens than the model has room for": bad(prompt_token_ids=(3,) * 100_000),
        "no tokens wanted": bad(max_tokens=0),
        "a seed beyond 64 bits": bad(seed=2**64 - 1),
        "an unknown adapter": bad(adapter_id=10**9, adapter_digest="d"),
        "an end of what never was": msg.encode(msg.AbortRequests(("unknown",) * 1000)),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_messages(wire: Wire, quiet: list[int], name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """They are answered or passed over, and a request beside them says what it says without them."""
    data = hostile()[name]
    wire.replies.clear()
    wire.send(msg.AddRequests.of([GOOD]))
    wire.step()
    for _ in range(3):
        wire.send(data)
        wire.step()
    wire.finish()
    assert wire.tokens.pop("good") == quiet
    if b"call_id" in data and b"Fatal" not in data:
        while 7 not in wire.replies:  # a verb's thread answers
            wire.step()
    if b"AddRequests" in data and name != "cut off":
        assert wire.errors.pop("bad").http_status in (400, 404)
    wire.tokens.pop("bad", None)
    assert len(capfd.readouterr().err) < 10_000


def test_a_name_that_is_in_use_is_refused_and_ends_nothing_in_the_engine(wire: Wire, quiet: list[int]) -> None:
    for _ in range(2):
        wire.send(msg.AddRequests.of([GOOD]))
    wire.finish()
    assert wire.tokens.pop("good") == quiet
    assert "known already" in str(wire.errors.pop("good"))


def test_a_handler_that_fails_is_answered(wire: Wire, quiet: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("not foreseen")

    handlers = {**wire.process._dispatch._handlers, msg.CallStore: fail}
    monkeypatch.setattr(wire.process._dispatch, "_handlers", handlers)
    wire.send(msg.AddRequests.of([GOOD]))
    wire.send(msg.CallStore(9, "abort_adapter", (1,)))
    wire.finish()
    assert wire.tokens.pop("good") == quiet
    assert "not foreseen" in str(wire.replies[9].error)


def test_messages_that_are_too_long_are_neither_sent_nor_read(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bad(prompt_token_ids=(3,) * 500)
    monkeypatch.setattr(msg, "MAX_MESSAGE_BYTES", 400)
    with pytest.raises(LoraplexError, match=r"AddRequests of .* bytes is longer than 400"):
        bad(prompt_token_ids=(3,) * 500)
    wire.send(data)
    wire.send(msg.GetStats(11))
    wire.step()
    assert (msg.request_ids_of(data), msg.call_id_of(data)) == ([], None), "nor is it read for the sake of an answer"
    monkeypatch.undo()
    wire.finish()
    assert "bad" not in wire.tokens


def test_a_flood_of_messages_holds_up_no_step(wire: Wire, quiet: list[int]) -> None:
    wire.send(msg.AddRequests.of([GOOD]))
    wire.step()
    for call_id in range(4 * MAX_MESSAGES_A_STEP):
        wire.send(msg.AbortRequests((f"unknown-{call_id}",)))
    before = len(wire.tokens["good"])
    wire.step()
    assert len(wire.tokens["good"]) == before + 1
    wire.finish()
    assert wire.tokens.pop("good") == quiet


def test_an_error_with_half_a_character_reaches_its_caller() -> None:
    """A file's name may hold any bytes: an answer that cannot be sent would leave its caller waiting."""
    for error in (AdapterFaultError("no \udcff"), AdapterValidationError("no \udcff", ("bad \udc80",))):
        reply = msg.decode_from_engine(msg.encode(msg.reply_error(3, error)))
        with pytest.raises(type(error), match=r"no \\udcff"):
            msg.read_reply(reply, None)


@pytest.mark.parametrize("umask", [0o000])
async def test_the_socket_is_its_users_alone_and_gone_when_both_are_there(tmp_path: Path, umask: int) -> None:
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    old = os.umask(umask)
    try:
        client = EngineClient(demo_config(), lambda outputs: None, lambda error: None)
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        start = asyncio.ensure_future(client.start())
        await within(start)
        assert not folder.exists(), "there is no way in for anybody else"
        await within(client.stop())
    finally:
        os.umask(old)
        tempfile.tempdir = before


def test_long_messages_do_not_hold_up_a_step(wire: Wire) -> None:
    """Each of n completions brings its prompt: 128 of 131,000 ids were read between two steps, for a second."""
    for index in range(16):
        wire.send(bad(request_id=f"long-{index}", prompt_token_ids=(100,) * 2**18))
    wire.process._read(0)
    assert wire.process._socket.poll(0), "all were read at once"
    for _ in range(16):
        wire.step()
    assert all(f"long-{index}" in wire.errors for index in range(16))


def test_a_prompt_is_checked_once_and_shared_by_its_completions(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at 131,000 ids for each of 128 took a third of a second, and a list for each 130 MB."""
    checked: list[str] = []
    check = Request.check_prompt
    monkeypatch.setattr(
        Request, "check_prompt", lambda self, size: (checked.append(self.request_id), check(self, size))
    )
    requests = [replace(GOOD, request_id=f"{index}", seed=index) for index in range(8)]
    wire.send(msg.AddRequests.of(requests))
    wire.process._read(0)
    assert checked == ["0"]
    assert len({id(state.token_ids) for state in wire._engine._scheduler._states.values()}) == 1
    wire.finish()
    assert len({tuple(wire.tokens.pop(each.request_id)) for each in requests}) == 1


def test_one_bad_completion_ends_no_other(wire: Wire, quiet: list[int]) -> None:
    wire.send(msg.AddRequests.of([replace(GOOD, request_id="bad", max_tokens=0), GOOD]))
    wire.finish()
    assert wire.errors.pop("bad").http_status == 400
    assert wire.tokens.pop("good") == quiet
    wire.tokens.pop("bad")


def test_verbs_that_wait_for_a_load_hold_up_none_that_do_not(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight loads from a file system that hangs, and no adapter could be evicted or dropped."""
    release = threading.Event()
    monkeypatch.setattr(wire.process._engine.adapters, "promote_adapter", lambda adapter_id: release.wait(60))
    for call_id in range(NUM_LOAD_THREADS):
        wire.send(msg.CallStore(1000 + call_id, "promote_adapter", (1,)))
    try:
        for call_id, method in enumerate(("unpin_adapter", "drop_adapter", "evict_adapter"), start=2001):
            wire.send(msg.CallStore(call_id, method, (999,)))
        while not {2001, 2002, 2003} <= set(wire.replies):
            wire.process._poller.poll(1000)
            wire.step()
        assert 1000 not in wire.replies
    finally:
        release.set()
    while 1000 + NUM_LOAD_THREADS - 1 not in wire.replies:
        wire.process._poller.poll(1000)
        wire.step()
