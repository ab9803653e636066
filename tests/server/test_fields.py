"""Every field is honoured or refused by name; values that mean nothing are fine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

COMPLETION = {"model": "base", "prompt": "hi"}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]

REFUSED_EVERYWHERE: list[tuple[str, Any]] = [
    ("guided_json", {"not": {"type": "object"}}),
    ("guided_json", 7),
    ("guided_regex", "a("),
    ("guided_choice", []),
    ("structured_outputs", {"regex": "a", "json": {}}),
    ("structured_outputs", {"structural_tag": "a"}),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "string", "format": "odd"}}}),
    ("priority", 3),
    ("service_tier", "flex"),
    ("use_beam_search", True),
    ("length_penalty", 0.5),
    ("truncate_prompt_tokens", 5),
    ("allowed_token_ids", [1]),
    ("bad_words", ["x"]),
    ("spaces_between_special_tokens", False),
    ("metadata", "x"),
    ("metadata", {"a": "x" * 20_000}),
    ("store", 1),
    ("session_id", "x" * 513),
    ("kv_transfer_params", {"a": 1}),
    ("no_such_field", 1),
    ("max_new_tokens", 5),
]
FINE_EVERYWHERE: list[tuple[str, Any]] = [
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}}),
    ("guided_json", {"type": "object"}),
    ("guided_json", '{"type": "object"}'),
    ("guided_regex", "a+"),
    ("guided_choice", ["a"]),
    ("structured_outputs", {"regex": "a", "json": None, "backend": None}),
    ("structured_outputs", {"json": {}, "disable_any_whitespace": True}),
    ("no_such_field", None),
    ("user", "ann"),
    ("logit_bias", {}),
    ("n", 1),
    ("stop", None),
    ("stop", []),
    ("seed", None),
    ("priority", 0),
    ("service_tier", "auto"),
    ("store", False),
    ("metadata", {}),
    ("metadata", {"a": "b", "c": {"d": 1}}),
    ("store", True),
    ("prompt_cache_key", "x"),
    ("session_id", "x"),
    ("chat_id", "x"),
    ("bad_words", []),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
    ("length_penalty", 1),
    ("top_k", -1),
    ("temperature", 0),
    ("temperature", 1),
    ("stream_options", None),
    ("stream", None),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("parallel_tool_calls", True),
    ("parallel_tool_calls", False),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("safety_identifier", "x"),
    ("modalities", ["text"]),
    ("functions", []),
    ("reasoning_effort", None),
]
COMPLETION_ONLY: list[tuple[str, Any]] = [("best_of", 1), ("suffix", ""), ("echo", False), ("logprobs", None)]


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(("name", "value"), REFUSED_EVERYWHERE)
async def test_refused(client: httpx.AsyncClient, url: str, body: dict[str, Any], name: str, value: object) -> None:
    response = await client.post(url, json={**body, name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(("name", "value"), FINE_EVERYWHERE)
async def test_fine(client: httpx.AsyncClient, url: str, body: dict[str, Any], name: str, value: object) -> None:
    response = await client.post(url, json={**body, name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("url", "body", "name", "value"),
    [("/v1/chat/completions", CHAT, *case) for case in CHAT_ONLY]
    + [("/v1/completions", COMPLETION, *case) for case in COMPLETION_ONLY],
)
async def test_fine_on_one_route(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], name: str, value: object
) -> None:
    response = await client.post(url, json={**body, name: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"x": True}}, "x"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"model": 7}, "model"),
        ({"lora_path": ["sql", "chat"]}, "lora_path"),
    ],
)
async def test_values_out_of_range(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"temperature": -0.5}, "temperature", "temperature must be in [0, 100]"),
        ({"top_p": 0}, "top_p", "top_p must be in"),
        ({"top_p": 1.5}, "top_p", "top_p must be in"),
        ({"min_p": 2}, "min_p", "min_p must be in"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be in"),
        ({"min_tokens": 20}, "min_tokens", "min_tokens (20) must not be above max_tokens (16)"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": ["x" * 4000, "y" * 97]}, "stop", "more than 4096 characters"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias values"),
        ({"temperature": -1, "top_p": 2}, "temperature", "temperature"),
    ],
)
async def test_sampling_parameters_out_of_range(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, reason: str
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 512}, "prompt"),
        ("/v1/completions", {"prompt": "x" * (512 * 256 + 1)}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 512}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 512}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * (512 * 256 + 1)}]}, "messages"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 512}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 512}, "max_completion_tokens"),
    ],
)
async def test_what_is_too_long_for_the_model_is_named(
    client: httpx.AsyncClient, url: str, fields: dict[str, Any], param: str
) -> None:
    error = (await client.post(url, json={"model": "base", **fields})).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_a_chat_that_the_template_refuses_names_its_messages(client: httpx.AsyncClient) -> None:
    chat = {"model": "base", "messages": [{"role": "refuse", "content": "x"}]}
    assert (await client.post("/v1/chat/completions", json=chat)).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("url", "fields", "param", "message"),
    [
        (
            "/v1/completions",
            {"lora_path": 5},
            "lora_path",
            "lora_path: must be a string, or a list of strings and nulls",
        ),
        ("/v1/completions", {"lora_path": ["a", 5]}, "lora_path", "lora_path.1: Input should be a valid string"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "prompt.1: Input should be a valid string"),
        ("/v1/completions", {"stop": ["a", 5]}, "stop", "stop.1: Input should be a valid string"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages",
            "messages.0.content.0.text: Input should be a valid string",
        ),
    ],
)
async def test_places_in_errors_are_those_of_the_body(
    client: httpx.AsyncClient, url: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = (await client.post(url, json={**dict(ROUTES)[url], **fields})).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_no_field_is_honoured_and_refused(model: type[CompletionRequest]) -> None:
    assert not set(model.model_fields) & set(model.neutral)


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_every_field_is_in_the_docs(model: type[CompletionRequest]) -> None:

    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    missing = [name for name in (*model.model_fields, *model.neutral) if f"`{name}`" not in text]
    assert not missing


@pytest.mark.parametrize(
    ("url", "name", "meant"),
    [
        ("/v1/completions", "max_new_tokens", "max_tokens"),
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/completions", "adapter_id", "lora_path"),
        ("/v1/completions", "inputs", "prompt"),
        ("/v1/completions", "stop_sequences", "stop"),
        ("/v1/chat/completions", "prompt", "messages"),
        ("/v1/chat/completions", "message", "messages"),
        ("/v1/load_lora_adapter", "name", "lora_name"),
        ("/v1/load_lora_adapter", "path", "lora_path"),
        ("/v1/load_lora_adapter", "lora_nam", "lora_name"),
        ("/v1/unload_lora_adapter", "name", "lora_name"),
        ("/v1/adapters", "lora_name", "name"),
        ("/v1/adapters", "lora_path", "path"),
        ("/v1/adapters/switch", "old_name", "old"),
    ],
)
async def test_an_unknown_field_gets_a_suggestion(client: httpx.AsyncClient, url: str, name: str, meant: str) -> None:
    error = (await client.post(url, json={name: "x"})).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", name)
    assert error["message"] == f"unknown field {name!r}: did you mean {meant!r}?"


async def test_a_field_like_no_other_gets_none(client: httpx.AsyncClient) -> None:
    error = (await client.post("/v1/completions", json={"xyzzy": 1})).json()["error"]
    assert error["message"] == "unknown field 'xyzzy': remove it"


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(
    ("name", "value"), [("metadata", {"a": "b"}), ("store", True), ("user", "x"), ("chat_id", "x"), ("session_id", "x")]
)
async def test_a_strict_server_refuses_hints(url: str, body: dict[str, Any], name: str, value: object) -> None:
    app = create_app(FakeAsyncEngine(), ServerConfig(strict_fields=True))
    async with client_of(app) as client:
        error = (await client.post(url, json={**body, name: value})).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", name)
        fine = {**body, "metadata": {}, "store": False, "user": None}
        assert (await client.post(url, json=fine)).status_code == 200


@pytest.mark.parametrize("form", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_a_form_is_told_of_the_header(client: httpx.AsyncClient, form: str) -> None:
    response = await client.post("/v1/completions", content=b"{}", headers={"Content-Type": form})
    assert response.status_code == 415
    assert "-H 'Content-Type: application/json'" in response.json()["error"]["message"]
