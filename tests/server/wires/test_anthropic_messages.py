"""/v1/messages: what its fields make of a prompt, its answers, whole and as a stream, and its errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from loraplex import StructuredOutputsParams
from loraplex.errors import EngineDeadError
from loraplex.server import ServerConfig, create_app
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer
from tests.server.wires.typed_events import typed_events

URL = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
REPLY = "<|user|>hi\n<|assistant|>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"name": "add", "description": "sums", "input_schema": PARAMETERS}
SUB: Any = {"type": "custom", "name": "sub", "input_schema": {"type": "object"}}
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c"}
ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALLS = f'Well.\n{ADD_CALL}\n<tool_call>{{"name": "sub"}}</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "base", "max_tokens": 200, "messages": HI, **fields}


async def respond(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json=body(**fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=body(stream=True, **fields))
    assert response.headers["content-type"].startswith("text/event-stream")
    return typed_events(response.content)


async def prompt_of(client: httpx.AsyncClient, engine: FakeAsyncEngine, **fields: Any) -> str:
    await respond(client, **fields)
    return FakeTokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await respond(client, model="sql", system="be brief")
    assert answer.pop("id").startswith("msg_")
    text = "[sql] <|system|>be brief\n" + REPLY
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "sql",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("<|system|>be brief\n" + REPLY),
            "output_tokens": len(text) + 1,
            "cache_read_input_tokens": 0,
        },
    }


async def test_blocks_as_the_template_sees_them(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+", **cached}, {"type": "text", "text": "1"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "So:", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "sub", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": []},
    ]
    system = [{"type": "text", "text": "be", **cached}, {"type": "text", "text": "brief"}]
    lines = (await prompt_of(client, engine, messages=messages, system=system, max_tokens=5)).split("\n")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": {}}},
    ]
    assert lines == [
        "<|system|>be",
        "brief",
        "<|user|>1+",
        "1",
        "<|assistant|>" + json.dumps({"reasoning_content": "Hm.", "tool_calls": calls}) + "So:",
        '<|tool|>{"tool_call_id": "c1"}2',
        '<|tool|>{"tool_call_id": "c2"}Error: no',
        "<|user|>go on",
        "<|assistant|>2",
        "<|user|>",
        "<|assistant|>",
    ]


async def test_an_answer_that_the_client_has_begun(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    assert await prompt_of(client, engine, messages=begun) == "<|user|>hi\n<|assistant|>The best answer is ("


async def test_what_it_shares_with_the_chat_route(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    shared = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "cache_salt": "x", "max_tokens": 9}
    shared["ignore_eos"] = True
    await respond(client, **shared, tools=[ADD], tool_choice={"type": "none"}, stop_sequences=["zz"])
    function = {"name": "add", "parameters": PARAMETERS, "description": "sums"}
    fields = {**shared, "tools": [{"type": "function", "function": function}], "tool_choice": "none", "stop": ["zz"]}
    assert (await client.post("/v1/chat/completions", json={**body(), **fields})).status_code == 200
    one, other = engine.requests[-2:]
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.params == other.params
    assert one.cache_salt == other.cache_salt


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}}, {"json": PARAMETERS}),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, {"json": PARAMETERS}),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, {"calls": {"add": PARAMETERS}}),
        (
            {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"calls": {"add": PARAMETERS}, "is_one_call": True},
        ),
    ],
)
async def test_forms(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    await respond(client, **fields)
    assert engine.requests[-1].params.structured_outputs == StructuredOutputsParams(**form)


@pytest.mark.parametrize(("kind", "is_on"), [("disabled", False), ("adaptive", True)])
async def test_thinking_is_the_templates(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, kind: str, is_on: bool
) -> None:
    same = body(chat_template_kwargs={"lang": "sq", "enable_thinking": is_on})
    await respond(client, thinking={"type": kind}, chat_template_kwargs={"lang": "sq"})
    assert (await client.post("/v1/chat/completions", json=same)).status_code == 200
    assert engine.requests[-2].prompt_token_ids == engine.requests[-1].prompt_token_ids


async def test_a_stream(client: httpx.AsyncClient) -> None:
    events = await events_of(client, model="sql")
    text = f"[sql] {REPLY}"
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * len(text),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun, delta = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["model"]) == ([], None, "sql")
    assert begun["usage"]["input_tokens"] == len(REPLY)
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == text
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(text) + 1


async def test_calls(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    answer = await respond(client, tools=[ADD, SUB])
    text, first, second = answer["content"]
    assert (answer["stop_reason"], text) == ("tool_use", {"type": "text", "text": "Well."})
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "add", {"a": 1})
    assert (second["name"], second["input"]) == ("sub", {})
    assert first["id"] != second["id"]
    one = await respond(client, tools=[ADD, SUB], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in one["content"]] == ["text", "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": first["id"]}]}
    again = [*HI, {"role": "assistant", "content": answer["content"]}, result]
    await respond(client, messages=again, tools=[SUB], max_tokens=1)


async def test_calls_as_a_stream(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    events = await events_of(client, tools=[ADD, SUB])
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    assert [event["content_block"]["type"] for event in starts] == ["text", "tool_use", "tool_use"]
    assert [event["content_block"]["name"] for event in starts[1:]] == ["add", "sub"]
    pieces = [event for event in events if event["type"] == "content_block_delta"]
    said = ["".join(event["delta"].get("partial_json", "") for event in pieces if event["index"] == i) for i in (1, 2)]
    assert said == ['{"a": 1}', "{}"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_no_tool_could_take_is_a_text(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = ADD_CALL
    answer = await respond(client, tools=[ADD], max_tokens=48)
    assert answer["stop_reason"] == "max_tokens"
    (block,) = answer["content"]
    assert block["type"] == "text"
    assert block["text"].startswith("add({")
    engine.reply = '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>'
    answer = await respond(client, tools=[ADD])
    assert (answer["stop_reason"], answer["content"]) == ("end_turn", [{"type": "text", "text": "add([1])"}])


async def test_why_an_answer_ends(client: httpx.AsyncClient) -> None:
    cut = await respond(client, max_tokens=3)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    stopped = await respond(client, stop_sequences=["hi"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "hi")
    assert (await events_of(client, stop_sequences=["hi"]))[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "hi",
    }


async def test_thoughts(engine: FakeAsyncEngine) -> None:
    engine.reply = "<think>\nHm.\n</think>\n\nYes"
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        content = (await respond(client))["content"]
        assert content == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes"}]
        pieces = [event["delta"] for event in await events_of(client) if event["type"] == "content_block_delta"]
        assert "".join(piece.get("thinking", "") for piece in pieces) == "Hm."
        assert "".join(piece.get("text", "") for piece in pieces) == "Yes"


async def test_tokens_are_counted(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    fields = {"messages": HI, "system": "be brief", "tools": [SUB]}
    counted = await client.post(f"{URL}/count_tokens", json={"model": "base", **fields})
    assert not engine.requests
    refused = await client.post(f"{URL}/count_tokens", json=body())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert counted.json() == {"input_tokens": (await respond(client, **fields))["usage"]["input_tokens"]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", 10_000),
    ("messages", None),
    ("messages", []),
    ("messages", [{"role": "tool", "content": "x"}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": [IMAGE]}]),
    ("messages", [{"role": "user", "content": [{"type": "document"}]}]),
    ("messages", [{"role": "user", "content": [USE]}]),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]),
    ("messages", [{"role": "user", "content": "x"}] * 2049),
    ("messages", [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}] * 1024}] * 3),
    ("messages", [{"role": "user", "content": "x" * 600}]),
    ("mcp_servers", [{"type": "url"}]),
    ("container", "c"),
    ("temperature", -1),
    ("stop_sequences", ["x"] * 99),
    ("thinking", {"type": "enabled", "budget_tokens": 1024}),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"type": "bash_20250124", "name": "bash"}]),
    ("tools", [{"name": "a b", "input_schema": {}}]),
    ("tools", [ADD, ADD]),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool"}),
    ("output_config", {"format": {"type": "json_schema", "schema": {"type": "string", "format": "odd"}}}),
    ("service_tier", "flex"),
    ("stop", ["x"]),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
async def test_refused(client: httpx.AsyncClient, engine: FakeAsyncEngine, name: str, value: Any) -> None:
    response = await client.post(URL, json=body(**{name: value}))
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["param"] == name
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "ann"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}},
        {"mcp_servers": [], "container": None, "speed": "standard", "output_config": {"effort": None}},
        {"tools": [{**ADD, "cache_control": {"type": "ephemeral"}, "strict": True, "defer_loading": False}]},
        {"lora_path": "sql"},
        {"merged_adapters": {"ids": ["sql", "chat"], "weights": [0.5, 0.5]}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
    ],
)
async def test_fine(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await client.post(URL, json=body(**fields))).status_code == 200


async def test_hints_are_refused_by_a_strict_server(engine: FakeAsyncEngine) -> None:
    async with client_of(create_app(engine, ServerConfig(strict_fields=True))) as client:
        response = await client.post(URL, json=body(metadata={"user_id": "ann"}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{**ADD, **CACHED}]},
        {"system": [{"type": "text", "text": "a", **CACHED}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **CACHED}]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "a", **CACHED}]}]}]},
    ],
)
async def test_a_strict_server_refuses_hints_of_parts(engine: FakeAsyncEngine, fields: dict[str, Any]) -> None:
    async with client_of(create_app(engine, ServerConfig(strict_fields=True))) as client:
        response = await client.post(URL, json=body(**fields))
        odd = await client.post(URL, json=body(system=[[], 1], messages=[{"content": {"content": [1]}}, "x"]))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_control")
    assert odd.status_code == 400


async def test_the_query_of_what_is_new(client: httpx.AsyncClient) -> None:
    assert (await client.post(f"{URL}?beta=true", json=body())).status_code == 200
    refused = await client.post(f"{URL}?alpha=true", json=body())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "alpha")


# --------------------------------------------------------------------------------------------- the anthropic client


KEY = "right-key-0123456789"


@pytest.fixture
def keyed() -> Iterator[LiveServer]:
    config = ServerConfig(port=0, api_keys=(KEY,), access_log=False, log_level="warning", shutdown_grace_s=0.0)
    with LiveServer(FakeAsyncEngine({f"a{index}": f"/adapters/a{index}" for index in range(3)}), config) as server:
        yield server


@pytest.fixture
def sdk(keyed: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=keyed.url, api_key=KEY, max_retries=0) as client:
        yield client


class Sum(BaseModel):
    a: int


def test_the_sdk(sdk: anthropic.Anthropic, keyed: LiveServer) -> None:
    answer = sdk.messages.create(model="a1", max_tokens=100, messages=HI)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == f"[a1] {REPLY}"
    again: Any = [*HI, {"role": "assistant", "content": answer.content}, *HI]
    assert sdk.messages.create(model="a2", max_tokens=9, messages=again).model == "a2"
    assert sdk.messages.count_tokens(model="a1", messages=HI).input_tokens == len(REPLY)
    assert sdk.beta.messages.create(model="a1", max_tokens=9, messages=HI, betas=["x-2026-01-01"]).model == "a1"
    with anthropic.Anthropic(base_url=keyed.url, auth_token=KEY, max_retries=0) as bearer:
        assert bearer.messages.create(model="a1", max_tokens=9, messages=HI).model == "a1"


def test_the_sdk_streams(sdk: anthropic.Anthropic, keyed: LiveServer) -> None:
    with sdk.messages.stream(model="a1", max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == f"[a1] {REPLY}"
    keyed.engine.reply = CALLS
    with sdk.messages.stream(model="a1", max_tokens=200, messages=HI, tools=[ADD, SUB]) as stream:
        final = stream.get_final_message()
    calls = [(block.name, block.input) for block in final.content if block.type == "tool_use"]
    assert (final.stop_reason, calls) == ("tool_use", [("add", {"a": 1}), ("sub", {})])


def test_the_sdk_parses_a_model(sdk: anthropic.Anthropic, keyed: LiveServer) -> None:
    keyed.engine.reply = '{"a": 7}'
    parsed = sdk.messages.parse(model="base", max_tokens=50, messages=HI, output_format=Sum)
    assert parsed.parsed_output == Sum(a=7)
    form = keyed.engine.requests[-1].params.structured_outputs
    assert form is not None
    assert json.loads(str(form.json))["required"] == ["a"]


def test_errors(sdk: anthropic.Anthropic, keyed: LiveServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(model="nope", max_tokens=9, messages=HI)
    assert unknown.value.request_id
    told: Any = unknown.value.body
    assert told["request_id"] == unknown.value.request_id
    assert (told["error"]["type"], told["error"]["code"]) == ("not_found_error", "model_not_found")
    with (
        anthropic.Anthropic(base_url=keyed.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="a1", max_tokens=9, messages=HI)
    keyed.engine.fail_next(EngineDeadError("the engine ended"), after_tokens=2)
    with pytest.raises(anthropic.APIStatusError, match="the engine ended") as broken:
        list(sdk.messages.create(model="a1", max_tokens=9, messages=HI, stream=True))
    body: Any = broken.value.body
    assert body["error"]["type"] == "overloaded_error"


def test_a_client_that_closes_its_stream(sdk: anthropic.Anthropic, keyed: LiveServer) -> None:
    keyed.engine.hold(after_tokens=2)
    stream = sdk.messages.create(model="a1", max_tokens=100, messages=HI, stream=True)
    assert next(iter(stream)).type == "message_start"
    stream.close()
    while keyed.engine.num_running:
        time.sleep(0.01)
    assert len(keyed.engine.aborted) == 1
