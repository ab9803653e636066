"""/openapi.json against the server that it describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.schemas import ChatCompletionRequest, CompletionRequest
from loraplex.server.wires.anthropic_messages_input import MessagesRequest
from loraplex.server.wires.native_forms import FORMS
from loraplex.server.wires.openai_responses_input import ResponsesRequest
from loraplex.testing import FakeAsyncEngine

COMPLETION = {"model": "base", "prompt": "hi", "max_tokens": 100}


@pytest.fixture
async def schema(client: httpx.AsyncClient) -> dict[str, Any]:
    schema: dict[str, Any] = (await client.get("/openapi.json")).json()
    return schema


def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, each) for path, methods in schema["paths"].items() for method, each in methods.items()]


def body_of(schema: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    content: dict[str, Any] = schema["paths"][path][method]["requestBody"]["content"]
    body: dict[str, Any] = content["application/json"]["schema"]
    return body


async def test_every_route_says_what_it_answers(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        if "html" in str(operation["responses"].get("200")):
            continue
        statuses = set(operation["responses"])
        done = "202" if path == "/v1/adapters/merge" else "200"
        assert {done, "400", "500", "503"} <= statuses, (method, path)
        assert "422" not in statuses
        if "requestBody" in operation:
            assert {"413", "415", "429"} <= statuses, (method, path)
        for status, response in operation["responses"].items():
            contents = [content["schema"] for content in response["content"].values()]
            assert contents
            assert all(contents), f"{method} {path} {status} says nothing about its answer"
    assert "ValidationError" not in str(schema["components"])


async def test_errors_have_the_form_of_their_route(schema: dict[str, Any]) -> None:
    for method, path, operation in operations(schema):
        form = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        for status, response in operation["responses"].items():
            if status >= "400":
                content = response["content"]["application/json"]
                forms = content["schema"].get("anyOf", [content["schema"]])
                assert forms[0] == {"$ref": f"#/components/schemas/{form}"}, (method, path, status)
                is_one_of_two = path in FORMS or form == "AnthropicError"  # a head is refused before its route is known
                assert len(forms) == (2 if is_one_of_two else 1), (method, path, status)


async def test_keys_are_in_the_schema_of_a_server_that_has_them(schema: dict[str, Any]) -> None:
    assert "401" not in schema["paths"]["/v1/models"]["get"]["responses"]
    guarded = create_app(FakeAsyncEngine(), ServerConfig(api_keys=("k",))).openapi()
    assert "401" in guarded["paths"]["/v1/models"]["get"]["responses"]
    assert guarded["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {"anthropic_key": []}]
    assert "401" not in guarded["paths"]["/health"]["get"]["responses"]


def numbers(properties: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Each bounded number of a body, with one of its bounds."""
    found = []
    for name, field in properties.items():
        forms = [field, *field.get("anyOf", ())]
        bounds = {key: form[key] for form in forms for key in ("minimum", "maximum") if key in form}
        if any(form.get("type") in ("number", "integer") for form in forms):
            found += [(name, key, value) for key, value in bounds.items()]
    return found


NUMBERS = numbers(CompletionRequest.model_json_schema()["properties"])


def test_there_are_bounds() -> None:
    names = {name for name, _, _ in NUMBERS}
    assert {"n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "seed"} <= names


@pytest.mark.parametrize(("name", "kind", "bound"), NUMBERS)
async def test_bounds_are_those_that_the_server_applies(
    client: httpx.AsyncClient, name: str, kind: str, bound: float
) -> None:
    beyond = bound + (1 if kind == "maximum" else -1)
    extra = {"echo": True} if name == "max_tokens" else {}
    refused = await client.post("/v1/completions", json={**COMPLETION, **extra, name: beyond})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    accepted = await client.post("/v1/completions", json={**COMPLETION, **extra, name: bound})
    told = "" if accepted.status_code == 200 else accepted.json()["error"]["message"]
    assert not told or "tokens" in told or "--max-priority" in told, accepted.text


@pytest.mark.parametrize(
    ("url", "body", "model"),
    [
        ("/v1/completions", COMPLETION, CompletionRequest),
        (
            "/v1/chat/completions",
            {"model": "base", "messages": [{"role": "user", "content": "x"}]},
            ChatCompletionRequest,
        ),
        ("/v1/responses", {"model": "base", "input": "x"}, ResponsesRequest),
        (
            "/v1/messages",
            {"model": "base", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
            MessagesRequest,
        ),
    ],
)
async def test_values_that_ask_for_nothing_are_in_the_schema(
    client: httpx.AsyncClient, schema: dict[str, Any], url: str, body: dict[str, Any], model: type[CompletionRequest]
) -> None:
    described = body_of(schema, url)
    assert described["additionalProperties"] == {"type": "null"}
    assert set(described["properties"]) == {*model.model_fields, *model.neutral}
    for name, accepted in model.neutral.items():
        assert described["properties"][name] == {"enum": [*accepted, None]}
        for value in described["properties"][name]["enum"]:
            assert (await client.post(url, json={**body, name: value})).status_code == 200
    nothing = {name: None for name in described["properties"] if name not in body}
    assert (await client.post(url, json={**body, **nothing})).status_code == 200
    assert (await client.post(url, json={**body, "xyzzy": None})).status_code == 200


async def test_no_reference_leads_out_of_a_body(schema: dict[str, Any]) -> None:
    for _, _, operation in operations(schema):
        assert "$ref" not in str(operation.get("requestBody"))


async def test_texts_in_a_url_have_no_control_characters(schema: dict[str, Any]) -> None:
    texts = [
        parameter["schema"]
        for operations in schema["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["in"] in ("path", "query") and parameter["schema"].get("type") == "string"
    ]
    assert texts
    for text in texts:
        assert text.keys() & {"pattern", "enum", "format", "const"}, text
    name = next(text for text in texts if text["title"] == "Name")
    assert re.search(name["pattern"], "sql/ä")
    assert not re.search(name["pattern"], "a\x07")


async def test_no_parameter_may_be_null(schema: dict[str, Any]) -> None:
    """A query has a text or none: what reads the schema would send the word."""
    for method, path, operation in operations(schema):
        for parameter in operation.get("parameters", ()):
            assert {"type": "null"} not in parameter["schema"].get("anyOf", ()), (method, path, parameter)
            assert parameter["schema"]["title"]


async def test_answers_have_no_keyword_that_readers_of_openapi_lack(schema: dict[str, Any]) -> None:
    assert "prefixItems" not in str(schema)
    answer = schema["paths"]["/generate"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    scored = answer["anyOf"][0]["properties"]["meta_info"]["properties"]["input_token_logprobs"]["items"]
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
    app = create_app(FakeAsyncEngine(), ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        said = (await client.post("/generate", json=body)).json()
    for each in said["meta_info"]["input_token_logprobs"]:
        jsonschema.validate(each, scored)


@pytest.mark.parametrize(
    ("path", "body", "is_valid"),
    [
        ("/v1/keys", {}, False),
        ("/v1/keys", {"tenant": "acme"}, True),
        ("/v1/keys", {"tenant": "acme", "role": "read-only"}, True),
        ("/v1/keys", {"role": "read-only"}, True),
        ("/v1/keys", {"role": "admin"}, True),
        ("/v1/keys", {"role": "admin", "tenant": "acme"}, False),
        ("/generate", {"text": "hi"}, True),
        ("/generate", {"text": "hi", "rid": "a b"}, False),
        ("/generate", {"text": "hi", "input_ids": [1]}, False),
        ("/v1/completions", {"model": "base", "prompt": "hi", "guided_json": {}}, True),
        ("/v1/completions", {"model": "base", "prompt": "hi", "guided_json": 7}, False),
        ("/v1/responses", {"model": "base", "input": [{"role": "user", "content": []}]}, False),
    ],
)
async def test_rules_are_in_the_schema(
    schema: dict[str, Any], client: httpx.AsyncClient, path: str, body: dict[str, Any], is_valid: bool
) -> None:
    """What is refused by the server for a combination of fields does not fit the schema either."""
    described = body_of(schema, path)
    forms = described.get("anyOf", [described])
    kind = next((form for form in forms if path != "/generate" or "text" in form["properties"]), described)
    assert jsonschema.Draft202012Validator(kind).is_valid(body) == is_valid
    if path != "/v1/keys":  # which need a state directory
        assert ((await client.post(path, json=body)).status_code == 200) == is_valid


BOUND_NAMES = {"ge", "le", "gt", "lt", "min_length", "max_length", "multiple_of"}
"""What pydantic calls bounds: readers of OpenAPI pass over them."""


def schemas_in(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if isinstance(node.get("type"), str):
            yield node
        for each in node.values():
            yield from schemas_in(each)
    elif isinstance(node, list):
        for each in node:
            yield from schemas_in(each)


async def test_bounds_have_the_words_of_openapi(schema: dict[str, Any]) -> None:
    found = list(schemas_in(schema["paths"]))
    assert len(found) > 1000
    assert [each for each in found if BOUND_NAMES & each.keys()] == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": "hi", "top_logprobs_num": 21}),
        ("/generate", {"text": "hi", "top_logprobs_num": -1}),
        ("/generate", {"text": "hi", "logprob_start_len": -2}),
        ("/v1/completions", {**COMPLETION, "guided_choice": []}),
        ("/v1/completions", {**COMPLETION, "guided_choice": ["a", ""]}),
    ],
)
async def test_what_is_refused_is_refused_by_the_schema(
    client: httpx.AsyncClient, schema: dict[str, Any], path: str, fields: dict[str, Any]
) -> None:
    assert (await client.post(path, json=fields)).status_code == 400
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fields, body_of(schema, path))


async def test_a_number_that_is_taken_is_an_answer_of_the_schema(
    client: httpx.AsyncClient, schema: dict[str, Any]
) -> None:
    number = {"lora_int_id": 7}
    assert (await client.post("/v1/adapters", json={"name": "first", "path": "/first", **number})).status_code == 200
    for method, path, body in (
        ("post", "/v1/adapters", {"name": "second", "path": "/second"}),
        ("put", "/v1/adapters/{name}", {"path": "/second"}),
        ("post", "/v1/adapters/{name}/clone", {"name": "third"}),
        ("post", "/v1/load_lora_adapter", {"lora_name": "fourth", "lora_path": "/fourth"}),
    ):
        taken = await client.request(method, path.replace("{name}", "sql"), json={**body, **number})
        assert 400 <= taken.status_code < 500, (path, taken.text)
        assert str(taken.status_code) in schema["paths"][path][method]["responses"], path
    other = await client.post("/v1/unload_lora_adapter", json={"lora_name": "first", "lora_int_id": 8})
    assert str(other.status_code) in schema["paths"]["/v1/unload_lora_adapter"]["post"]["responses"]
    assert 400 <= other.status_code < 500


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_field_more_of_response_format_is_refused_here_and_there(
    client: httpx.AsyncClient, schema: dict[str, Any], path: str
) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    for extra, is_fine in (({}, True), ({"more": 1}, False)):
        fields = {"model": "base", **said, "response_format": {"type": "text", **extra}}
        assert ((await client.post(path, json=fields)).status_code == 200) == is_fine
        assert jsonschema.Draft202012Validator(body_of(schema, path)).is_valid(fields) == is_fine
