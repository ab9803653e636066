"""/v1/responses: what its fields make of a prompt, and its answers, whole and as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from pydantic import BaseModel, ValidationError

from loraplex import StructuredOutputsParams
from loraplex.errors import EngineDeadError, EngineOverloadedError
from loraplex.server import ServerConfig, create_app, responses
from loraplex.server.wires import openai_responses_input
from loraplex.server.wires.openai_responses_input import MAX_SAID_BACK_BYTES, ResponsesRequest
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of
from tests.server.live_server import LiveServer
from tests.server.wires.typed_events import typed_events

URL = "/v1/responses"
REPLY = "<|user|>hi\n<|assistant|>"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Any = {"type": "function", "name": "add", "description": "sums", "parameters": PARAMETERS, "strict": True}
SUB: Any = {"type": "function", "name": "sub"}
CALLS = (
    'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "sub"}</tool_call>'
)
SCHEMA = {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}
LOGPROBS = ["message.output_text.logprobs"]


async def respond(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "base", "input": "hi", **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"model": "base", "input": "hi", "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = typed_events(response.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def prompt_of(client: httpx.AsyncClient, engine: FakeAsyncEngine, **fields: Any) -> str:
    await respond(client, **fields)
    return FakeTokenizer().decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await respond(client, model="sql", instructions="be brief", max_output_tokens=400, metadata={"a": "b"})
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "sql")
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    text = "[sql] <|system|>be brief\n" + REPLY
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert answer["usage"] == {
        "input_tokens": len("<|system|>be brief\n" + REPLY),
        "output_tokens": len(text) + 1,
        "total_tokens": len("<|system|>be brief\n" + REPLY) + len(text) + 1,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    said = {"instructions": "be brief", "max_output_tokens": 400, "metadata": {"a": "b"}, "tools": [], "store": False}
    assert {name: answer[name] for name in said} == said
    assert (answer["tool_choice"], answer["text"]) == ("auto", {"format": {"type": "text"}})
    OpenAIResponse.model_validate(answer | {"usage": None})


async def test_items_as_the_template_sees_them(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "1+1", "id": "msg_1", "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "2"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm?"}], "encrypted_content": None},
        {"role": "user", "content": "ok"},
    ]
    lines = (await prompt_of(client, engine, input=items, instructions="be brief")).split("\n")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": {}}},
    ]
    assert lines == [
        "<|system|>be brief",
        "<|system|>a",
        "b",
        "<|user|>1+1",
        "<|assistant|>" + json.dumps({"reasoning_content": "Hm.", "tool_calls": calls}) + "So:",
        '<|tool|>{"tool_call_id": "c1"}2',
        '<|tool|>{"tool_call_id": "c2"}3',
        "<|assistant|>2",
        "<|assistant|>" + json.dumps({"reasoning_content": "Hm?"}),
        "<|user|>ok",
        "<|assistant|>",
    ]


async def test_what_it_shares_with_the_chat_route(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    shared = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.1}
    kwargs = {"chat_template_kwargs": {"lang": "sq"}, "cache_salt": "x", "ignore_eos": True}  # guidellm sends the last
    await respond(client, **shared, **kwargs, tools=[ADD], tool_choice="none", max_output_tokens=9, user="ann")
    function = {"name": "add", "description": "sums", "parameters": PARAMETERS, "strict": True}
    chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}
    fields = {**chat, **shared, **kwargs, "tools": [{"type": "function", "function": function}], "tool_choice": "none"}
    assert (await client.post("/v1/chat/completions", json=fields)).status_code == 200
    one, other = engine.requests[-2:]
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.params == other.params
    assert one.cache_salt == other.cache_salt


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        ({"text": {"format": SCHEMA, "verbosity": "medium"}}, {"json": PARAMETERS}),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, {"json": PARAMETERS}),
        ({"tools": [ADD], "tool_choice": "required"}, {"calls": {"add": PARAMETERS}}),
        (
            {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
            {"calls": {"add": PARAMETERS}, "is_one_call": True},
        ),
    ],
)
async def test_forms(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, fields: dict[str, Any], form: dict[str, Any]
) -> None:
    await respond(client, **fields)
    assert engine.requests[-1].params.structured_outputs == StructuredOutputsParams(**form)


async def test_a_stream(client: httpx.AsyncClient) -> None:
    events = await events_of(client, model="sql")
    kinds = [event["type"] for event in events]
    text = f"[sql] {REPLY}"
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(text),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == text
    begun, item, last = events[0]["response"], events[-2]["item"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert last["output"] == [item]
    assert item["content"][0]["text"] == events[-4]["text"] == events[-3]["part"]["text"] == text
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert last["usage"]["output_tokens"] == len(text) + 1


async def test_calls(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    answer = await respond(client, tools=[ADD, SUB])
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "Well."
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "add", '{"a": 1}')
    assert (second["name"], second["arguments"]) == ("sub", "{}")
    assert first["call_id"] != second["call_id"]
    assert answer["tools"][0] == ADD
    again = [*answer["output"], {"type": "function_call_output", "call_id": first["call_id"], "output": "2"}]
    await respond(client, input=again, tools=[SUB], max_output_tokens=1)


async def test_calls_as_a_stream(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = CALLS
    events = await events_of(client, tools=[ADD, SUB])
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    assert events[-1]["response"]["output"] == items
    for index, item in enumerate(items):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"]
        assert own[-1]["item"] == item
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in own) == said
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in done] == [("add", '{"a": 1}'), ("sub", "{}")]


def test_a_list_of_wrong_log_probabilities_is_one_error() -> None:
    """Each would be some microseconds in which nothing else runs."""
    part = {"type": "output_text", "text": "x", "logprobs": [1] * 9}
    with pytest.raises(ValidationError) as refused:
        ResponsesRequest.model_validate({"model": "base", "input": [{"role": "assistant", "content": [part]}]})
    assert refused.value.error_count() == 1


async def test_half_a_surrogate_pair_in_a_call_stays_an_escape(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    engine.reply = r'<tool_call>{"name": "f\ud83d", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>'
    said = (r"f\ud83d", r'{"a": "\ud83d"}')
    [call] = (await respond(client, tools=[SUB]))["output"]
    assert (call["name"], call["arguments"]) == said
    last = (await events_of(client, tools=[SUB]))[-1]
    assert last["type"] == "response.completed"
    assert [(each["name"], each["arguments"]) for each in last["response"]["output"]] == [said]


async def test_thoughts(engine: FakeAsyncEngine) -> None:
    engine.reply = "<think>\nHm.\n</think>\n\nYes"
    async with client_of(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        answer = await respond(client)
        thoughts, message = answer["output"]
        assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert (thoughts["type"], thoughts["summary"]) == ("reasoning", [])
        assert message["content"][0]["text"] == "Yes"
        assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm.")}
        events = await events_of(client)
        deltas = [event for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(event["delta"] for event in deltas) == "Hm."
        assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]
        await respond(
            client, input=[{"role": "user", "content": "1"}, *answer["output"], {"role": "user", "content": ""}]
        )
        refused = await client.post(URL, json={"model": "base", "input": "hi", "include": LOGPROBS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "include")


async def test_an_answer_that_is_cut(client: httpx.AsyncClient) -> None:
    whole = await respond(client, max_output_tokens=3)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete"
    last = (await events_of(client, max_output_tokens=3))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_answer_that_says_nothing(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = ""
    answer = await respond(client)
    assert [part["text"] for item in answer["output"] for part in item["content"]] == [""]


async def test_log_probabilities(client: httpx.AsyncClient) -> None:
    answer = await respond(client, include=LOGPROBS, top_logprobs=2)
    content = answer["output"][0]["content"][0]
    assert "".join(each["token"] for each in content["logprobs"]) == content["text"] + "</s>"
    assert {len(each["top_logprobs"]) for each in content["logprobs"]} == {2}
    events = await events_of(client, include=LOGPROBS, top_logprobs=2)
    deltas = [each for event in events for each in event.get("logprobs", ()) if event["type"].endswith(".delta")]
    assert "".join(each["token"] for each in deltas) == content["text"]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == content["logprobs"]


async def test_log_probabilities_that_the_last_events_say_again_have_less_room(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 400)
    answer = await client.post(URL, json={"model": "base", "input": "hi", "include": LOGPROBS, "top_logprobs": 2})
    assert answer.status_code == 400
    assert "take more than 100 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineDeadError("gone"), "server_error"), (EngineOverloadedError("full"), "rate_limit_exceeded")],
)
async def test_an_error_in_mid_stream(
    client: httpx.AsyncClient, engine: FakeAsyncEngine, error: Exception, code: str
) -> None:
    engine.fail_next(error, after_tokens=2)
    last = (await events_of(client))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": str(error)}
    assert (last["response"]["status"], last["response"]["output"][0]["content"][0]["text"]) == ("failed", "[b")


async def test_long_fields_are_not_said_back(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.reply = "ok"
    tool = {**SUB, "description": "x" * MAX_SAID_BACK_BYTES}
    body = ResponsesRequest.model_validate({"model": "base", "input": "", "instructions": "x" * 2**17, "tools": [tool]})
    assert [bytes(body.said_back[name]) for name in ("instructions", "tools")] == [b"null", b"[]"]


def test_whether_a_field_is_said_back_is_told_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """32,000 empty lists in a tool's parameters took 100 ms to write, only to be left out."""
    written: list[Any] = []
    monkeypatch.setattr(openai_responses_input, "_sent", written.append)
    tool = {**SUB, "parameters": {"a": [[] for _ in range(MAX_SAID_BACK_BYTES)]}}
    body = {"model": "base", "input": "", "tools": [tool], "tool_choice": "none"}
    said = ResponsesRequest.model_validate(body).said_back
    assert bytes(said["tools"]) == b"[]"
    assert not written


IMAGE = {"type": "input_image", "image_url": "data:,"}
REFUSED: list[tuple[str, Any]] = [
    ("background", True),
    ("conversation", "conv_1"),
    ("include", ["file_search_call.results"]),
    ("include", LOGPROBS * 3),
    ("input", []),
    ("input", 7),
    ("input", [7]),
    ("input", [{"type": "item_reference", "id": "msg_1"}]),
    ("input", [{"type": "computer_call_output"}]),
    ("input", [{"role": "user", "content": [IMAGE]}]),
    ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]),
    ("input", [{"role": "tool", "content": "x"}]),
    ("input", [{"role": "user"}]),
    ("input", [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]),
    ("input", [{"type": "reasoning", "encrypted_content": "x"}]),
    ("input", [{"role": "user", "content": "x"}] * 2049),
    ("input", "x" * 600),
    ("max_output_tokens", 0),
    ("max_output_tokens", 10_000),
    ("max_tool_calls", 1),
    ("previous_response_id", "resp_1"),
    ("prompt", {"id": "p"}),
    ("reasoning", {"effort": "high"}),
    ("service_tier", "flex"),
    ("stream_options", {"include_obfuscation": True}),
    ("temperature", -1),
    ("text", {"format": {"type": "xml"}}),
    ("text", {"format": {"type": "json_schema", "name": "x"}}),
    ("text", {"format": {**SCHEMA, "schema": {"type": "string", "format": "odd"}}}),
    ("text", {"verbosity": "low"}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "file_search"}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "mcp", "server_label": "x"}]),
    ("tools", [{"type": "custom", "name": "x"}]),
    ("tools", [{**ADD, "name": "a b"}]),
    ("tools", [ADD, ADD]),
    ("top_logprobs", 2),
    ("truncation", "auto"),
    ("priority", 3),
    ("messages", []),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
async def test_refused(client: httpx.AsyncClient, engine: FakeAsyncEngine, name: str, value: Any) -> None:
    response = await client.post(URL, json={"model": "base", "input": "hi", name: value})
    assert response.status_code == 400, response.text
    inner = f"{name}.{next(iter(value))}" if isinstance(value, dict) and len(value) == 1 else "encrypted_content"
    assert response.json()["error"]["param"] in (name, inner)
    if inner in ("reasoning.effort", "text.verbosity", "stream_options.include_obfuscation"):
        assert response.json()["error"]["param"] == inner, "as the client sent it"
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": LOGPROBS, "tools": [ADD]}, "include"),
        ({"text": {"format": SCHEMA}, "tools": [ADD], "tool_choice": "required"}, "text"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"lora_path": "nope"}, "lora_path"),
    ],
)
async def test_refused_together(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post(URL, json={"model": "base", "input": "hi", **fields})
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "user": "ann", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"include": ["reasoning.encrypted_content"]},
        {"previous_response_id": None, "background": False, "truncation": "disabled", "service_tier": "auto"},
        {"reasoning": {"effort": None, "summary": None}, "text": {}, "tools": [], "parallel_tool_calls": True},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"lora_path": "sql"},
        {"merged_adapters": {"ids": ["sql", "chat"], "weights": [0.5, 0.5]}},
        {"request_id": "mine", "timeout": 9, "priority": 0},
    ],
)
async def test_fine(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    assert (await client.post(URL, json={"model": "base", "input": "hi", **fields})).status_code == 200


async def test_hints_are_refused_by_a_strict_server(engine: FakeAsyncEngine) -> None:
    async with client_of(create_app(engine, ServerConfig(strict_fields=True))) as client:
        response = await client.post(URL, json={"model": "base", "input": "hi", "store": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "store")


# ------------------------------------------------------------------------------------------------- the openai client


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class Sum(BaseModel):
    a: int


def test_the_sdk(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="a1", input="hi")
    assert answer.output_text == f"[a1] {REPLY}"
    again: Any = [{"role": "user", "content": "hi"}, *answer.model_dump()["output"], {"role": "user", "content": "ho"}]
    assert sdk.responses.create(model="a2", input=again).output_text.startswith("[a2] ")
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.responses.create(model="nope", input="hi")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_the_sdk_streams(sdk: openai.OpenAI, live: LiveServer) -> None:
    deltas = [
        event.delta
        for event in sdk.responses.create(model="a1", input="hi", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == f"[a1] {REPLY}"
    live.engine.reply = CALLS
    with sdk.responses.stream(model="a1", input="hi", tools=[ADD, SUB]) as stream:
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("add", '{"a": 1}'), ("sub", "{}")]


def test_the_sdk_parses_a_model(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.reply = '{"a": 7}'
    assert sdk.responses.parse(model="base", input="hi", text_format=Sum).output_parsed == Sum(a=7)
    with sdk.responses.stream(model="base", input="hi", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(a=7)
    form = live.engine.requests[-1].params.structured_outputs
    assert form is not None
    assert json.loads(str(form.json))["required"] == ["a"]


def test_a_client_that_closes_its_stream(sdk: openai.OpenAI, live: LiveServer) -> None:
    live.engine.hold(after_tokens=2)
    stream = sdk.responses.create(model="a1", input="hi", stream=True)
    assert [next(stream).type for _ in range(2)] == ["response.created", "response.in_progress"]
    stream.close()
    while live.engine.num_running:
        time.sleep(0.01)
    assert len(live.engine.aborted) == 1
