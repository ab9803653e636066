"""Forms of outputs, tool calls and thoughts over HTTP: what reaches the engine, and what is made of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from loraplex import StructuredOutputsParams
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine
from loraplex.text.tools.answer import AnswerDelta, AnswerParser
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer
from tests.server.sse import events

URL = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
SUB: Any = {"type": "function", "function": {"name": "sub"}}
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS = f'Well.\n{ADD_CALL}\n<tool_call>{{"name": "sub"}}</tool_call>'


async def chat(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "base", "messages": HI, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def chunks(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"model": "base", "messages": HI, "stream": True, **fields})
    return [chunk["choices"][0] for chunk in events(response.content)]


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}},
            {"json": PARAMETERS},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        (
            {"structured_outputs": {"json": PARAMETERS, "disable_any_whitespace": True}},
            {"json": PARAMETERS, "disable_any_whitespace": True},
        ),
        ({"guided_json": json.dumps(PARAMETERS)}, {"json": PARAMETERS}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, {"json": PARAMETERS}),
        ({"tools": [ADD], "tool_choice": "required"}, {"calls": {"add": PARAMETERS}}),
        (
            {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
            {"calls": {"add": PARAMETERS}, "is_one_call": True},
        ),
    ],
)
async def test_the_form_that_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    await chat(client, **fields)
    assert engine.requests[-1].params.structured_outputs == StructuredOutputsParams(**form)


async def test_grammars_of_clients_are_taken_where_the_operator_says_so(engine: FakeAsyncEngine) -> None:
    """A short one can end a process or take seconds of a step."""
    body = {"model": "base", "messages": HI, "guided_grammar": 'root ::= "a"'}
    async with client_of(create_app(engine)) as client:
        refused = await client.post(URL, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_grammar")
        assert "--allow-grammars" in refused.json()["error"]["message"]
        assert not engine.requests
    async with client_of(create_app(engine, ServerConfig(allow_grammars=True))) as client:
        assert (await client.post(URL, json=body)).status_code == 200
        assert engine.requests[-1].params.structured_outputs == StructuredOutputsParams(grammar=body["guided_grammar"])


async def test_one_form_at_a_time(client: httpx.AsyncClient) -> None:
    both = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    response = await client.post(URL, json={"model": "base", "messages": HI, **both})
    assert "response_format and guided_regex" in response.json()["error"]["message"]


async def test_calls(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    choice = (await chat(client, tools=[ADD, SUB]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Well."
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert second["function"] == {"name": "sub", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert first["type"] == second["type"] == "function"
    one = (await chat(client, tools=[ADD, SUB], parallel_tool_calls=False))["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in one] == ["add"]
    again = [*HI, message, {"role": "tool", "tool_call_id": first["id"], "content": "2"}]
    await chat(client, messages=again, tools=[SUB], max_tokens=1)


async def test_calls_as_a_stream(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    choices = await chunks(client, tools=[ADD, SUB])
    deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    heads = [delta for delta in deltas if "id" in delta]
    assert [(head["index"], head["function"]["name"], head["type"]) for head in heads] == [
        (0, "add", "function"),
        (1, "sub", "function"),
    ]
    assert all("name" not in delta["function"] and "type" not in delta for delta in deltas if delta not in heads)
    arguments = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == index) for index in range(2)]
    assert arguments == ['{"a": 1}', "{}"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Well."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


async def test_calls_that_are_not_asked_for_are_text(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}):
        choice = (await chat(client, **fields))["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
        assert choice["finish_reason"] == "stop"


async def test_a_cut_call_says_length(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    choice = (await chat(client, tools=[ADD], max_tokens=55))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_required_and_named(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = '[{"name": "add", "parameters": {"a": 7}}]'
    message = (await chat(client, tools=[ADD], tool_choice="required"))["choices"][0]["message"]
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == (None, '{"a": 7}')
    engine.reply = '{"a": 8}'
    named = {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    message = (await chat(client, **named))["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 8}'}


async def test_parsers_that_need_special_tokens_get_them(engine: FakeAsyncEngine) -> None:
    engine.reply = '[TOOL_CALLS] [{"name": "add", "arguments": {}}]'
    async with client_of(create_app(engine, ServerConfig(tool_call_parser="mistral"))) as client:
        answer = await chat(client, tools=[ADD])
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert not engine.requests[-1].params.skip_special_tokens


async def test_thoughts(engine: FakeAsyncEngine) -> None:
    engine.reply = "<think>\nHm.\n</think>\n\n" + CALLS
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        message = (await chat(client, tools=[ADD, SUB]))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Well.")
        assert len(message["tool_calls"]) == 2
        choices = await chunks(client)
        assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == "Hm."
        assert "".join(choice["delta"].get("content", "") for choice in choices) == CALLS
        engine.reply = "Hm.</think>Yes"
        open_prompt = [{"role": "assistant", "content": "<think>"}]
        message = (await chat(client, messages=open_prompt, continue_final_message=True))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


async def test_thoughts_stay_in_the_content(engine: FakeAsyncEngine) -> None:
    """SGLang's `separate_reasoning`."""
    engine.reply = "<think>Hm.</think>Yes"
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        message = (await chat(client, separate_reasoning=False))["choices"][0]["message"]
        assert message["content"] == "<think>Hm.</think>Yes"
        assert "reasoning_content" not in message
        message = (await chat(client, separate_reasoning=True))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


@pytest.mark.parametrize(("reply", "content"), [("<think>One two.</think>Yes", "Yes"), ("<think>One two.", "")])
async def test_thoughts_come_in_one_piece(engine: FakeAsyncEngine, reply: str, content: str) -> None:
    """SGLang's `stream_reasoning`, also where the answer ends in the middle of them."""
    engine.reply = reply
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        pieces = []
        for is_streamed in (True, False):
            deltas = [each["delta"] for each in await chunks(client, tools=None, stream_reasoning=is_streamed)]
            pieces.append([each["reasoning_content"] for each in deltas if "reasoning_content" in each])
            assert "".join(each.get("content", "") for each in deltas) == content
        assert len(pieces[0]) > 1
        assert pieces[1] == ["One two."] == ["".join(pieces[0])]


class Piece(str):
    """Of thoughts."""

    __slots__ = ()

    def __radd__(self, held: str) -> str:
        raise AssertionError("all thoughts so far are copied for a piece of them")


async def test_thoughts_that_wait_are_put_together_once(
    engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = AnswerParser.feed

    def in_pieces(self: AnswerParser, text: str, is_last: bool) -> AnswerDelta:
        said = feed(self, text, is_last)
        return replace(said, reasoning=Piece(said.reasoning))

    monkeypatch.setattr(AnswerParser, "feed", in_pieces)
    engine.reply = "<think>One two.</think>Yes"
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        deltas = [each["delta"] for each in await chunks(client, tools=None, stream_reasoning=False)]
    assert [each["reasoning_content"] for each in deltas if "reasoning_content" in each] == ["One two."]


# ------------------------------------------------------------------------------------------------- the openai client


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class Sum(BaseModel):
    a: int


def test_the_sdk_parses_a_model(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.reply = '{"a": 7}'
    answer = sdk.chat.completions.parse(model="base", messages=HI, response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(a=7)
    form = live.engine.requests[-1].params.structured_outputs
    assert form is not None
    assert json.loads(str(form.json))["required"] == ["a"]


def test_the_sdk_streams_calls(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.reply = CALLS
    with sdk.chat.completions.stream(model="base", messages=HI, tools=[ADD, SUB]) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 1}'), ("sub", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"
