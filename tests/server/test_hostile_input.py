"""Bodies made to break a server: each gets an answer of 400s in the one form, and the next request works."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.server import ServerConfig, create_app
from loraplex.server.request_model import MAX_DEPTH
from loraplex.testing import FakeAsyncEngine
from tests.server.conftest import client_of

JSON_HEADERS = {"Content-Type": "application/json"}
POST_ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/adapters",
    "/v1/adapters/switch",
    "/tokenize",
    "/detokenize",
]
NOT_JSON = {
    "empty": b"",
    "space": b"  ",
    "word": b"hello",
    "cut off": b'{"model": "base"',
    "NaN": b'{"model": "base", "prompt": "hi", "temperature": NaN}',
    "Infinity": b'{"model": "base", "prompt": "hi", "temperature": Infinity}',
    "number too large": b'{"model": "base", "prompt": "hi", "temperature": 1e999}',
    "no UTF-8": b'{"model": "base", "prompt": "\xff\xfe"}',
    "half a surrogate": b'{"model": "base", "prompt": "\\ud800"}',
    "deep list": b"[" * 10_000,
    "deep object": b'{"a":' * 4_000 + b"1" + b"}" * 4_000,
    "deep field": b'{"model": "base", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    "list": b"[]",
    "null": b"null",
    "string": b'"hi"',
    "number": b"1",
    "very long number": b'{"n": ' + b"9" * 5000 + b"}",
    "two values": b'{"model": "base"} {"model": "base"}',
    "comment": b'{"model": "base" /* hi */}',
    "UTF-16": json.dumps({"model": "base"}).encode("utf-16"),
}


def check_error(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) < 2000


@pytest.mark.parametrize("name", NOT_JSON)
async def test_what_is_no_json_object(client: httpx.AsyncClient, name: str) -> None:
    for url in POST_ROUTES:
        response = await client.post(url, content=NOT_JSON[name], headers=JSON_HEADERS)
        check_error(response)
        assert response.status_code == 400, url
    assert (await client.post("/v1/completions", json={"model": "base", "prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("escape", ["\\ud800", "\\uDBFFab", "a\\ud800 and more", "\\udc00", "\\ud800\\u0041"])
async def test_half_a_character_is_called_that(client: httpx.AsyncClient, escape: str) -> None:
    body = f'{{"model": "base", "prompt": "{escape}"}}'.encode()
    response = await client.post("/v1/completions", content=body, headers=JSON_HEADERS)
    assert response.status_code == 400
    assert "surrogate pair" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b'{"model": "base", "prompt": "\\ud800', b'{"model": "base", "prompt": "\\u00'])
async def test_a_body_that_is_cut_off_is_called_that(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/completions", content=body, headers=JSON_HEADERS)
    assert "truncated" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x" * 500])
async def test_packed_bodies_are_415(client: httpx.AsyncClient, encoding: str) -> None:
    headers = {**JSON_HEADERS, "Content-Encoding": encoding}
    response = await client.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    check_error(response)
    assert encoding[:40] in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
async def test_bodies_as_they_are_may_say_so(client: httpx.AsyncClient, encoding: str) -> None:
    headers = {**JSON_HEADERS, "Content-Encoding": encoding}
    response = await client.post("/v1/completions", content=b'{"model": "base", "prompt": "hi"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "text/json"])
async def test_other_media_types_are_415(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await client.post("/v1/completions", content=b'{"model": "base", "prompt": "hi"}', headers=headers)
    assert response.status_code == 415
    check_error(response)


async def test_media_types_with_parameters_are_fine(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = await client.post("/v1/completions", content=b'{"model": "base", "prompt": "hi"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        [[1], []],
        [1, "a"],
        ["a", 1],
        [[1], 2],
        [["a"]],
        [[[1]]],
        [None],
        [True],
        [1.0],
        [-1],
        [10**6],
        [2**63],
        [10**400],
        {"a": 1},
        7,
        True,
        [3] * 600,
        [[3] * 600],
        "x" * 600,
        "x" * 200_000,
        ["hi"] * 2000,
    ],
)
async def test_prompts_that_cannot_be(client: httpx.AsyncClient, prompt: object) -> None:
    check_error(await client.post("/v1/completions", json={"model": "base", "prompt": prompt}))


async def test_an_empty_text(client: httpx.AsyncClient) -> None:
    """With a beginning-of-text token there is something to continue; without it there is nothing."""
    body = {"model": "base", "prompt": ""}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    check_error(await client.post("/v1/completions", json={**body, "add_special_tokens": False}))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**400},
        {"seed": 10**400},
        {"max_tokens": 10**400},
        {"max_tokens": 2**31},
        {"max_tokens": 510},
        {"temperature": 10**400},
        {"top_k": 2**40},
        {"stop_token_ids": [2**40]},
        {"stop_token_ids": [10**400]},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {str(index): 1 for index in range(1025)}},
        {"logit_bias": {"5": 10**400}},
        {"model": "x" * 100_000},
        {"user": "x" * 1000},
        {"x" * 100_000: 1},
        {"prompt": ["hi"] * 512, "n": 128},
        {"guided_json": {"a": "b" * 100_000}},
    ],
)
async def test_values_beyond_reason(client: httpx.AsyncClient, fields: dict[str, object]) -> None:
    check_error(await client.post("/v1/completions", json={"model": "base", "prompt": "hi", **fields}))


def nested(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 300])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools", "documents", "tool_choice", "tool_calls"])
async def test_nesting_in_what_the_template_gets(client: httpx.AsyncClient, field: str, depth: int) -> None:
    value = nested(depth)
    message = {"role": "user", "content": "hi"}
    body = {"model": "base", "messages": [message]}
    if field == "tool_calls":
        body["messages"] = [{**message, "tool_calls": [value]}]
    else:
        body[field] = [value] if field in ("tools", "documents") else value  # type: ignore[assignment]
    check_error(await client.post("/v1/chat/completions", json=body))


async def test_moderate_nesting_is_fine(client: httpx.AsyncClient) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": nested(10)}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "NaN", "[" * 33 + "]" * 33, f"[{'[],' * 2**16}[]]"])
async def test_arguments_of_tool_calls(client: httpx.AsyncClient, arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    check_error(await client.post("/v1/chat/completions", json={"model": "base", "messages": [message]}))


@pytest.mark.parametrize("header", [b"a\xff", b"x" * 5000, b"a b", "\u00e9".encode(), b"a\tb"])
async def test_request_ids_that_cannot_be_used_are_replaced(client: httpx.AsyncClient, header: bytes) -> None:
    response = await client.get("/health", headers={"X-Request-Id": header})  # type: ignore[dict-item]
    assert response.status_code == 200
    assert len(response.headers["x-request-id"]) == 32


async def test_routes_and_methods_that_do_not_exist(client: httpx.AsyncClient) -> None:
    for method, url, status, code in [
        ("GET", "/nope", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ]:
        response = await client.request(method, url)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        check_error(response)


@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("GET", "/v1/models?x=1"),
        ("GET", "/v1/models/base?x"),
        ("POST", "/v1/completions?x=1&y=2"),
        ("POST", "/v1/chat/completions?x=1"),
        ("POST", "/tokenize?x=1"),
        ("GET", "/v1/adapters?x=1"),
        ("POST", "/v1/adapters/sql/pin?x=1"),
        ("DELETE", "/v1/adapters/sql?x=1"),
        ("DELETE", "/v1/adapters/sql?force=true&x=1"),
        ("GET", "/v1/memory?x=1"),
        ("GET", "/v1/events?stream=false&x=1"),
        ("GET", "/v1/profile?x=1"),
    ],
)
async def test_queries_that_nobody_reads_are_refused_by_name(client: httpx.AsyncClient, method: str, url: str) -> None:
    response = await client.request(method, url)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unknown_field", "x")


@pytest.fixture
def small() -> FastAPI:
    return create_app(FakeAsyncEngine(), ServerConfig(max_body_bytes=1024))


async def test_long_bodies_are_413(small: FastAPI) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with client_of(small) as client:
        for content in (b" " * 1025, pieces()):
            response = await client.post("/v1/completions", content=content, headers=JSON_HEADERS)
            assert response.status_code == 413
            check_error(response)
        lie = {**JSON_HEADERS, "Content-Length": "9" * 30}
        assert (await client.post("/v1/completions", content=b"{}", headers=lie)).status_code == 413


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "n",
    "max_tokens",
    "temperature",
    "stop",
    "logprobs",
    "stream_options",
    "tools",
    "tool_choice",
    "logit_bias",
    "chat_template_kwargs",
    "lora_path",
    "seed",
    "echo",
    "name",
    "path",
    "old",
    "new",
    "lora_name",
    "lora_path",
    "tokens",
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    url=st.sampled_from(POST_ROUTES),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), json_values, max_size=5),
)
async def test_any_json_gets_an_answer_that_is_no_500(
    client: httpx.AsyncClient, url: str, fields: dict[str, object]
) -> None:
    try:
        body = json.dumps(fields).encode()
    except UnicodeEncodeError:
        return
    response = await client.post(url, content=body, headers=JSON_HEADERS)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        check_error(response)
