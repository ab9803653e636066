"""Log probabilities in both of OpenAI's forms, for outputs and for prompts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from loraplex.core import Logprob, RequestOutput
from loraplex.server import completions, responses
from loraplex.server.logprobs import (
    LOWEST_LOGPROB,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from loraplex.server.openai_api import MANY_LOGPROBS
from loraplex.server.responses import encode
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of
from tests.server.sse import events
from tests.server.test_completions import complete, stream

T = TypeVar("T")
TOKENIZER = FakeTokenizer()
PIECES = TOKENIZER.encode("é", add_special_tokens=False)


async def test_completion_form(client: httpx.AsyncClient) -> None:
    logprobs = (await complete(client, prompt="hi", max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["[", "b", "a"],
        "token_logprobs": [-0.25] * 3,
        "top_logprobs": [{"[": -0.25, "\\": -0.75}, {"b": -0.25, "c": -0.75}, {"a": -0.25, "b": -0.75}],
        "text_offset": [0, 1, 2],
    }


async def test_zero_logprobs_are_those_of_the_tokens_themselves(client: httpx.AsyncClient) -> None:
    logprobs = (await complete(client, prompt="hi", max_tokens=1, logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"[": -0.25}]
    assert (await complete(client, prompt="hi", max_tokens=1))["choices"][0]["logprobs"] is None


async def test_chunks_add_up_to_the_whole(client: httpx.AsyncClient) -> None:
    fields = {"prompt": ["hi", "ho"], "max_tokens": 3, "logprobs": 1, "echo": True}
    whole = (await complete(client, **fields))["choices"]
    chunks = [choice for chunk in await stream(client, **fields) for choice in chunk["choices"]]
    for index, choice in enumerate(whole):
        for name, values in choice["logprobs"].items():
            assert [v for chunk in chunks if chunk["index"] == index for v in chunk["logprobs"][name]] == values


async def test_echo_as_lm_eval_reads_it(client: httpx.AsyncClient) -> None:
    """lm_eval sums token_logprobs[context:-1] and compares each with the largest of top_logprobs."""
    prompts = [TOKENIZER.encode("ab"), TOKENIZER.encode("abc")]
    fields = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    answer = await complete(client, prompt=prompts, max_tokens=1, **fields)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        scored = zip(logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True)
        assert all(logprob == max(top.values()) for logprob, top in scored)
    alone = await complete(client, prompt=prompts, max_tokens=0, **fields)
    for prompt, choice in zip(prompts, alone["choices"], strict=True):
        assert {len(values) for values in choice["logprobs"].values()} == {len(prompt)}


async def test_prompt_logprobs_in_vllms_form(client: httpx.AsyncClient) -> None:
    choice = (await complete(client, prompt="hi", prompt_logprobs=0))["choices"][0]
    h, i = TOKENIZER.encode("hi", add_special_tokens=False)
    expected = {"logprob": -0.25, "rank": 1}
    assert choice["prompt_logprobs"] == [
        None,
        {str(h): {**expected, "decoded_token": "h"}},
        {str(i): {**expected, "decoded_token": "i"}},
    ]
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_tokens_as_ids(client: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = (await complete(client, prompt="hi", **fields))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{FakeTokenizer.FIRST_BYTE + ord('[')}"]


async def test_chat_form(client: httpx.AsyncClient) -> None:
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    content = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"]
    tops = [{"token": "[", "logprob": -0.25, "bytes": [91]}, {"token": "\\", "logprob": -0.75, "bytes": [92]}]
    assert content[0] == {**tops[0], "top_logprobs": tops}
    response = await client.post("/v1/chat/completions", json={**body, "stream": True})
    choices = [choice for chunk in events(response.content) for choice in chunk["choices"]]
    streamed = [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]]
    assert streamed == content
    plain = (await client.post("/v1/chat/completions", json={**body, "top_logprobs": None})).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def as_client(logprobs: T) -> T:
    """As it reads them from the answer."""
    return msgspec.json.decode(encode(logprobs), type=type(logprobs))


def test_a_long_answer_is_written_a_position_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, the lock of the interpreter was held for 40 ms: what is left does not grow with the candidates."""
    sizes: list[int] = []
    num_positions = 100
    write = responses.encode
    monkeypatch.setattr(responses, "encode", lambda value: sizes.append(1) or write(value))
    candidates = {token: Logprob(-1.0, 1) for token in range(20)}
    ids, scored = [3] * num_positions, [candidates] * num_positions
    texts = TokenTexts(TOKENIZER)
    chat, completion = chat_logprobs(ids, scored, 20, texts), completion_logprobs(ids, scored, texts, 0)
    written = [*chat.content, *completion.top_logprobs, *prompt_logprobs(scored)]
    assert {type(each) for each in written} == {msgspec.Raw}
    assert len(sizes) == 3 * num_positions


@pytest.mark.parametrize(
    ("num_tokens", "num_logprobs", "longest", "is_long"),
    [(MANY_LOGPROBS // 2 + 1, 1, 5, True), (3, 1, 5, False), (20, 1, 815, True), (26, 19, 5, True), (24, 19, 5, False)],
)
async def test_what_a_slow_reader_missed_is_written_in_a_thread(
    app: FastAPI,
    engine: FakeAsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    num_logprobs: int,
    longest: int,
    is_long: bool,
) -> None:
    """A stream that was not read for a while: all of its log probabilities come with one output. Candidates that were
    not drawn may be long added tokens."""
    monkeypatch.setattr(FakeTokenizer, "longest_added_token", longest)
    threads: list[int] = []
    make = completions.completion_logprobs
    monkeypatch.setattr(
        completions, "completion_logprobs", lambda *values: threads.append(threading.get_ident()) or make(*values)
    )
    generate = engine.generate

    async def slowly_read(*values: Any, **fields: Any) -> AsyncIterator[RequestOutput]:
        outputs = [output async for output in generate(*values, **fields)]
        yield outputs[0]
        yield outputs[-1]

    monkeypatch.setattr(engine, "generate", slowly_read)
    async with client_of(app) as client:
        await stream(client, prompt="hi", max_tokens=num_tokens + 1, logprobs=num_logprobs, ignore_eos=True)
    on_loop = [each == threading.get_ident() for each in threads]
    assert on_loop == [True, not is_long]


def test_pieces_of_characters_have_their_own_bytes() -> None:
    first, second = PIECES
    candidates = {first: Logprob(-0.1, 1), second: Logprob(-2.0, 2)}
    content = as_client(chat_logprobs([first, second], [candidates, candidates], 2, TokenTexts(TOKENIZER))).content
    assert bytes(content[0].bytes + content[1].bytes).decode() == "é"
    assert content[0].token == content[1].token == "\ufffd"


def test_the_likelier_of_two_tokens_with_one_text_is_kept() -> None:
    """Clients look for the largest value: it must be there, whatever the order of the candidates."""
    first, second = PIECES
    for candidates in (
        {first: Logprob(-3.0, 2), second: Logprob(-0.5, 1)},
        {second: Logprob(-0.5, 1), first: Logprob(-3.0, 2)},
    ):
        logprobs = as_client(completion_logprobs([first], [candidates], TokenTexts(TOKENIZER), 0))
        assert logprobs.top_logprobs == [{"\ufffd": -0.5}]
        assert logprobs.token_logprobs == [-3.0]


def test_the_token_is_no_top_logprob_unless_it_is_one_of_the_likeliest() -> None:
    candidates = {70: Logprob(-9.0, 40), 71: Logprob(-0.1, 1)}
    content = as_client(chat_logprobs([70], [candidates], 1, TokenTexts(TOKENIZER))).content
    assert content[0].logprob == -9.0
    assert [top.logprob for top in content[0].top_logprobs] == [-0.1]
    none = as_client(chat_logprobs([70], [candidates], 0, TokenTexts(TOKENIZER)))
    assert none.content[0].top_logprobs == []


@pytest.mark.parametrize("value", [float("-inf"), -1e30])
def test_json_has_no_infinity(value: float) -> None:
    logprobs = completion_logprobs([70], [{70: Logprob(value, 9)}], TokenTexts(TOKENIZER), 5)
    assert logprobs.token_logprobs == [LOWEST_LOGPROB]
    assert logprobs.text_offset == [5]


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"prompt": ["hi"] * 8, "n": 128, "max_tokens": 200, "logprobs": 20, "echo": True}, True),
        ({"prompt": "hi", "n": 16, "logprobs": 20, "max_tokens": 1024}, True),
        ({"prompt": "hi", "n": 8, "logprobs": 20, "max_tokens": 16}, False),
        ({"prompt": "hi", "logprobs": 20, "max_tokens": 100}, False),
    ],
)
async def test_few_bytes_cannot_ask_for_millions_of_log_probabilities(
    client: httpx.AsyncClient, fields: dict[str, object], is_refused: bool
) -> None:
    response = await client.post("/v1/completions", json={"model": "base", **fields})
    if not is_refused:
        assert response.status_code == 200
        return
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 128, "logprobs": True, "top_logprobs": 20}
    assert (await client.post("/v1/chat/completions", json={"model": "base", **chat})).status_code == 400


async def test_what_every_choice_says_of_its_prompt_is_bounded_with_n(client: httpx.AsyncClient) -> None:
    """A choice repeats its prompt's log probabilities: 2**18 of them, checked for one, became 2**25 with n=128."""
    body = {"model": "base", "prompt": ["x" * 100] * 8, "max_tokens": 1, "n": 128}
    for fields in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "max_tokens": 1}):
        reply = await client.post("/v1/completions", json={**body, **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_long_answers_of_one_client_are_written_one_at_a_time(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """Threads that compute share the interpreter with the event loop: many would keep it waiting."""
    lock = threading.Lock()
    at_once: list[int] = [0]
    most: list[int] = [0]

    def counted(*arguments: Any) -> Any:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.01)
        with lock:
            at_once[0] -= 1
        return completion_logprobs(*arguments)

    monkeypatch.setattr(completions, "completion_logprobs", counted)
    fields = {"prompt": "x" * (MANY_LOGPROBS // 2 + 1), "max_tokens": 1, "logprobs": 1, "echo": True}
    ask = stream if is_stream else complete
    await asyncio.gather(*(ask(client, **fields) for _ in range(6)))
    assert most == [1]


@pytest.mark.parametrize("fields", [{"logprobs": 5}, {"prompt_logprobs": 5}, {"logprobs": 5, "echo": True}])
async def test_bytes_of_log_probabilities_are_bounded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Tokens of an adapter may be long. What is sent as it is made needs no bound."""
    fields = {"prompt": "a prompt", "max_tokens": 8, "n": 4, **fields}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "n": 4, "logprobs": True}
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 600)
    for path, body in (("/v1/completions", fields), ("/v1/chat/completions", chat)):
        refused = await client.post(path, json={"model": "base", **body})
        assert refused.status_code == 400
        assert "log probabilities of this answer take more than 600 bytes" in refused.json()["error"]["message"]
    assert "prompt_logprobs" in fields or await stream(client, **fields)
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 60_000)
    assert (await complete(client, **fields))["choices"]
