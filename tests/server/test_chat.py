"""/v1/chat/completions: messages, the template, tools, streaming."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from loraplex.text.tools import pythonic
from tests.server.conftest import client_of
from tests.server.sse import content_of, events

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "object"}}}}


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "base", "messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "base", "messages": HI, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def prompt_of(client: httpx.AsyncClient, engine: FakeAsyncEngine, **fields: Any) -> str:
    await chat(client, **fields)
    return FakeTokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await chat(client, model="sql")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "sql"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "[sql] <|user|>hi\n<|assistant|>", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"model": "base", "messages": HI, "stream": True, "n": 2})
    chunks = events(response.content)
    assert content_of(chunks, 0) == "[base] <|user|>hi\n<|assistant|>"
    assert content_of(chunks, 1) == "[base] <|user|>hi\n<|assistant|> #1"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_usage_chunk(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "messages": HI, "stream": True, "max_completion_tokens": 2}
    response = await client.post(URL, json={**body, "stream_options": {"include_usage": True}})
    *others, last = events(response.content)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in others)


async def test_without_a_limit_the_model_ends_the_answer(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await chat(client)
    await chat(client, max_tokens=9)
    await chat(client, max_completion_tokens=8)
    await chat(client, max_tokens=7, max_completion_tokens=7)
    assert [request.params.max_tokens for request in engine.requests] == [None, 9, 8, 7]


async def test_content_parts_are_joined_by_line_ends(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = await prompt_of(client, engine, messages=[{"role": "user", "content": parts}])
    assert prompt == "<|user|>one\ntwo\n<|assistant|>"


async def test_messages_as_the_template_sees_them(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "1+1", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    lines = (await prompt_of(client, engine, messages=messages)).split("\n")
    parsed = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    assert lines == [
        "<|system|>be brief",
        '<|user|>{"name": "ann"}1+1',
        "<|assistant|>" + json.dumps({"tool_calls": [parsed]}),
        '<|tool|>{"tool_call_id": "c1"}2',
        "<|assistant|>",
    ]


async def test_what_the_template_is_given(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    fields = {
        "tools": [TOOL],
        "tool_choice": "none",
        "documents": [{"title": "t"}],
        "chat_template_kwargs": {"enable_thinking": False, "lang": "sq"},
    }
    first, *_ = (await prompt_of(client, engine, **fields)).split("\n")
    assert json.loads(first) == {"tools": [TOOL], "documents": [{"title": "t"}], "lang": "sq"}


async def test_endings_of_the_prompt(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure, "}]
    assert (await prompt_of(client, engine, add_generation_prompt=False)) == "<|user|>hi\n"
    for extra in ({}, {"add_generation_prompt": False}):
        prompt = await prompt_of(client, engine, messages=messages, continue_final_message=True, **extra)
        assert prompt == "<|user|>hi\n<|assistant|>Sure, "
    error = await refused(client, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


async def test_special_tokens_come_from_the_template_alone(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    assert not (await prompt_of(client, engine)).startswith("<s>")
    assert (await prompt_of(client, engine, add_special_tokens=True)).startswith("<s>")


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    answer = await chat(client, return_token_ids=True, max_tokens=1)
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["token_ids"] == [FakeTokenizer.FIRST_BYTE + ord("[")]
    body = {"model": "base", "messages": HI, "stream": True, "return_token_ids": True, "max_tokens": 1}
    opening, token = events((await client.post(URL, json=body)).content)
    assert opening["prompt_token_ids"] == answer["prompt_token_ids"]
    assert token["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert "prompt_token_ids" not in token


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}, "hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "", "audio": {"id": "1"}}]}, "audio"),
        ({"messages": [{"role": "user", "content": "hi", "mood": "fine"}]}, "mood"),
        ({"messages": [{"role": "a", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    assert (await refused(client, **fields))["param"] == param


async def test_what_the_template_refuses_is_400(client: httpx.AsyncClient) -> None:
    error = await refused(client, messages=[{"role": "refuse", "content": "x"}])
    assert "no such role" in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", 5])
async def test_parts_other_than_texts_are_refused_by_their_type(client: httpx.AsyncClient, kind: object) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, "image_url": {"url": "data:,"}}]
    error = await refused(client, messages=[{"role": "user", "content": parts}])
    assert (error["code"], error["param"]) == ("unsupported_field", "messages")
    assert json.dumps(kind) in error["message"]
    assert "text" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "system"},
        {"role": "tool", "tool_call_id": "c1"},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": []},
        {"role": "user", "tool_calls": [CALL]},
    ],
)
async def test_a_message_without_content_is_refused(client: httpx.AsyncClient, message: dict[str, Any]) -> None:
    error = await refused(client, messages=[message])
    assert error["param"] == "messages"
    assert "content" in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
)
async def test_messages_that_say_nothing_may(client: httpx.AsyncClient, message: dict[str, Any]) -> None:
    answer = await chat(client, messages=[*HI, message])
    assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(("num_streams", "n"), [(4, 1), (1, 8)])
async def test_calls_that_end_together_are_not_parsed_together(
    engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch, num_streams: int, n: int
) -> None:
    """In one turn of the event loop: a long one takes 0.02 s, and 25 of them, of a token each, half a second."""
    engine.reply = f"[add(a=[{'1,' * 190}])]"
    engine.hold(after_tokens=len(engine.reply) - 3)
    parsed_in, call_of, num_turns = list[Any](), pythonic._call_of, 0

    def noted(text: str) -> tuple[str, str] | None:
        own_thread = threading.get_ident()
        parsed_in.append(num_turns if own_thread == loop_thread else f"thread {own_thread}")
        return call_of(text)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(pythonic, "_call_of", noted)
    loop_thread, counting = threading.get_ident(), asyncio.ensure_future(count_turns())
    fields = {"model": "base", "messages": HI, "tools": [TOOL], "stream": True, "n": n}
    app = create_app(engine, ServerConfig(tool_call_parser="pythonic"))
    async with client_of(app) as client, asyncio.timeout(10):
        streams = [asyncio.ensure_future(client.post(URL, json=fields)) for _ in range(num_streams)]
        while engine._num_steps < num_streams * (len(engine.reply) - 3):
            await asyncio.sleep(0.001)
        engine.resume()
        answers = await asyncio.gather(*streams)
    counting.cancel()
    assert all(each.content.count(b'"name":"add"') == n for each in answers)
    assert len(parsed_in) == num_streams * n
    in_loop = [each for each in parsed_in if isinstance(each, int)]
    assert len(set(in_loop)) == len(in_loop)
