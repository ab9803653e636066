"""The real `openai` client against the server on a loopback port, and its types as the contract of our answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from loraplex.errors import EngineDeadError
from loraplex.server import ServerConfig
from loraplex.testing import FakeAsyncEngine
from tests.server.live_server import LiveServer
from tests.server.sse import events

USER: Any = [{"role": "user", "content": "hi"}]
REPLY = "<|user|>hi\n<|assistant|>"


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_sdk(live: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="a1", prompt=["hi", "ho"], max_tokens=20, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["[a1] hi", "[a1] ho"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "[a1] hi</s>"


def test_completions_as_a_stream(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.completions.create(model="base", prompt="hi", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "[base] hi"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len("[base] hi") + 1


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="a1", messages=USER, logprobs=True, top_logprobs=2, n=2)
    assert answer.choices[0].message.content == f"[a1] {REPLY}"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[1].index == 1
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content[0].top_logprobs) == 2


def test_chat_as_a_stream(sdk: openai.OpenAI) -> None:
    chunks = list(sdk.chat.completions.create(model="a2", messages=USER, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == f"[a2] {REPLY}"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_async_client(async_sdk: openai.AsyncOpenAI) -> None:
    stream = await async_sdk.chat.completions.create(model="a3", messages=USER, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == f"[a3] {REPLY}"


def test_the_answer_goes_back_into_the_conversation(sdk: openai.OpenAI) -> None:
    """As agents do it: the message as the client dumps it, every field, null or not."""
    message = sdk.chat.completions.create(model="base", messages=USER).choices[0].message
    history = [*USER, message.model_dump(), *USER]
    assert sdk.chat.completions.create(model="base", messages=history).choices[0].message.content


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["base", *(f"a{index}" for index in range(8))]
    assert sdk.models.retrieve("a3").id == "a3"


def test_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.completions.create(model="nope", prompt="hi")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="base", messages=USER, temperature=-1)
    assert "temperature" in str(bad.value)
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model="base", prompt="x" * 1000)
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in str(long.value)
    with pytest.raises(openai.BadRequestError) as format_refused:
        sdk.chat.completions.create(model="base", messages=USER, response_format={"type": "xml"})
    assert format_refused.value.param == "response_format"


def test_an_error_in_mid_stream(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.fail_next(EngineDeadError("the engine ended"), after_tokens=2)
    stream = sdk.completions.create(model="base", prompt="hi", stream=True)
    assert [next(stream).choices[0].text for _ in range(2)] == ["[", "b"]
    with pytest.raises(openai.APIError, match="the engine ended") as failed:
        next(stream)
    assert failed.value.code == "engine_dead"


def test_keys() -> None:
    config = ServerConfig(port=0, api_keys=("right",), access_log=False, log_level="warning", shutdown_grace_s=0.0)
    with LiveServer(FakeAsyncEngine(), config) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as client:
            assert client.models.list().data
        with openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                client.models.list()
            assert refused.value.code == "invalid_api_key"


def test_a_client_that_closes_its_stream(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.hold(after_tokens=2)
    stream = sdk.completions.create(model="a1", prompt="hi", stream=True, max_tokens=100)
    assert [next(stream).choices[0].text for _ in range(2)] == ["[", "a"]
    stream.close()
    while live.engine.num_running:
        time.sleep(0.01)
    assert len(live.engine.aborted) == 1


def test_32_requests_at_once_over_8_adapters_and_the_base(sdk: openai.OpenAI) -> None:
    """The text of each is what it is one at a time, streaming and not."""
    names = ["base", *(f"a{index}" for index in range(8))]

    def ask(index: int) -> str:
        model = names[index % len(names)]
        if index % 2:
            answer = sdk.completions.create(model=model, prompt=f"hello {index}", max_tokens=40)
            return answer.choices[0].text
        chunks = sdk.completions.create(model=model, prompt=f"hello {index}", max_tokens=40, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert together == [ask(index) for index in range(32)]
    assert together == [f"[{names[index % 9]}] hello {index}" for index in range(32)]


# --------------------------------------------------------------------------------------- its types as the contract


def check(kind: type[BaseModel], value: dict[str, Any]) -> None:
    """Strictly valid, and nothing of OpenAI's own fields under another type."""
    kind.model_validate(value, strict=True)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"n": 2, "prompt": ["a", "b"]}, {"echo": True}])
async def test_completions_are_valid(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"model": "base", "prompt": "hi", "max_tokens": 4, **fields}
    check(Completion, (await client.post("/v1/completions", json=body)).json())


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}])
async def test_chat_completions_are_valid(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    body = {"model": "base", "messages": USER, "max_tokens": 4, **fields}
    check(ChatCompletion, (await client.post("/v1/chat/completions", json=body)).json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json={**body, **options})
    for chunk in events(response.content):
        check(ChatCompletionChunk, chunk)


async def test_cards_are_valid(client: httpx.AsyncClient) -> None:
    for card in (await client.get("/v1/models")).json()["data"]:
        check(Model, card)
