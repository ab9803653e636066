"""LoRAX's POST /generate, /generate_stream and /, its headers and its errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from loraplex.errors import EngineOverloadedError
from loraplex.server import ServerConfig, create_app
from loraplex.server.wires.lorax_fields import LoraxParameters
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of

PATHS = ("/generate", "/generate_stream", "/")


async def generate(client: httpx.AsyncClient, inputs: str = "hi", **parameters: Any) -> httpx.Response:
    response = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response


async def stream(client: httpx.AsyncClient, inputs: str = "hi", **parameters: Any) -> list[dict[str, Any]]:
    response = await client.post("/generate_stream", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """There is no [DONE]."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    return [json.loads(part.removeprefix("data:")) for part in parts]


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await generate(client, adapter_id="sql", max_new_tokens=2, details=True, seed=7)
    first, second = FakeTokenizer().encode("[s", add_special_tokens=False)
    token = {"logprob": -0.25, "special": False, "skipped": False}
    assert answer.json() == {
        "generated_text": "[s",
        "details": {
            "finish_reason": "length",
            "prompt_tokens": 3,
            "generated_tokens": 2,
            "seed": 7,
            "prefill": [],
            "tokens": [{"id": first, "text": "[", **token}, {"id": second, "text": "s", **token}],
            "skipped_tokens": 0,
        },
    }


async def test_headers_of_an_answer(client: httpx.AsyncClient) -> None:
    headers = (await generate(client, "hello", adapter_id="sql", max_new_tokens=2)).headers
    told = {name: headers[f"x-{name}"] for name in ("adapter-id", "adapter-source", "model-id", "compute-characters")}
    assert told == {"adapter-id": "sql", "adapter-source": "local", "model-id": "base", "compute-characters": "5"}
    counts = [headers[f"x-{name}-tokens"] for name in ("prompt", "generated", "total", "skipped")]
    assert counts == ["6", "2", "8", "0"]
    assert headers["x-total-time"].isdigit()
    assert "x-adapter-id" not in (await generate(client)).headers
    streamed = await client.post("/generate_stream", json={"inputs": "hi", "parameters": {"adapter_id": "chat"}})
    assert streamed.headers["x-adapter-id"] == "chat"


async def test_the_kind_of_an_adapters_source_is_told(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    assert engine.registry is not None
    engine.registry.load("hub/sql", "hf://org/sql")
    engine.registry.load("cold", "s3://bucket/cold")
    told = [
        (await generate(client, adapter_id=name)).headers["x-adapter-source"] for name in ("hub/sql", "cold", "sql")
    ]
    assert told == ["hub", "s3", "local"]
    merged = {"ids": ["hub/sql", "cold", "sql", "chat"], "weights": [1, 1, 1, 1]}
    assert (await generate(client, merged_adapters=merged)).headers["x-adapter-source"] == "hub,s3,local"


async def test_stream_beside_a_route_of_one_kind_says_what_it_is(client: httpx.AsyncClient) -> None:
    for path, is_stream in (("/generate", False), ("/generate_stream", True)):
        for wanted in (False, True):
            answer = await client.post(path, json={"inputs": "hi", "stream": wanted})
            assert answer.status_code == (200 if wanted is is_stream else 400), answer.text
            if wanted is not is_stream:
                assert answer.json()["param"] == "stream"


@pytest.mark.parametrize("adapter_id", [None, "", "__base_model__"])
async def test_without_an_adapter_it_is_the_base_model(client: httpx.AsyncClient, adapter_id: str | None) -> None:
    assert (await generate(client, adapter_id=adapter_id)).json()["generated_text"] == "[base] hi"


async def test_a_post_to_the_root_is_a_list_or_a_stream(client: httpx.AsyncClient) -> None:
    body = {"inputs": "hi", "parameters": {"adapter_id": "sql"}}
    assert (await client.post("/", json=body)).json() == [{"generated_text": "[sql] hi", "details": None}]
    assert (await client.post("/", json={**body, "stream": False})).json()[0]["generated_text"] == "[sql] hi"
    streamed = events_of((await client.post("/", json={**body, "stream": True})).text)
    assert streamed[-1]["generated_text"] == "[sql] hi"
    assert (await client.get("/")).json()["name"] == "loraplex"


async def test_a_stream_has_an_event_for_each_token(client: httpx.AsyncClient) -> None:
    found = await stream(client, "hé", adapter_id="sql", details=True)
    assert "".join(each["token"]["text"] for each in found if not each["token"]["special"]) == "[sql] hé"
    *others, last = found
    assert {(each["generated_text"], each["details"]) for each in others} == {(None, None)}
    assert last["generated_text"] == "[sql] hé"
    assert last["details"] == {"finish_reason": "eos_token", "prompt_tokens": 4, "generated_tokens": 10, "seed": None}
    assert len(found) == 10
    assert (await stream(client, adapter_id="sql"))[-1]["details"] is None


@pytest.mark.parametrize(
    ("parameters", "text", "finish"),
    [
        ({"stop": [" two"]}, "[base] one two", "stop_sequence"),
        ({}, "[base] one two three", "eos_token"),
        ({"max_new_tokens": 3}, "[ba", "length"),
        ({"max_new_tokens": 3, "return_full_text": True}, "one two three[ba", "length"),
    ],
)
async def test_how_it_ends(client: httpx.AsyncClient, parameters: dict[str, Any], text: str, finish: str) -> None:
    """The stop sequence is in the text, as LoRAX has it."""
    answer = (await generate(client, "one two three", details=True, **parameters)).json()
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (text, finish)
    last = (await stream(client, "one two three", details=True, **parameters))[-1]
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, finish)


async def test_texts_of_tokens_make_the_text_though_some_was_held_back(client: httpx.AsyncClient) -> None:
    found = await stream(client, "one two", stop=["twice", "xyz"])
    assert "".join(each["token"]["text"] for each in found if not each["token"]["special"]) == "[base] one two"


async def test_prefill_and_alternatives(client: httpx.AsyncClient) -> None:
    answer = await generate(client, decoder_input_details=True, return_k_alternatives=2, max_new_tokens=1)
    details = answer.json()["details"]
    assert [each["text"] for each in details["prefill"]] == ["<s>", "h", "i"]
    assert [each["logprob"] for each in details["prefill"]] == [None, -0.25, -0.25]
    assert [each["text"] for each in details["tokens"][0]["alternative_tokens"]] == ["[", "\\"]


async def test_without_a_wish_the_likeliest_token_is_taken_and_nothing_bounds_it_but_the_context(
    client: httpx.AsyncClient, engine: FakeAsyncEngine
) -> None:
    answer = await generate(client, "x" * 100, details=True)
    assert answer.json()["details"]["generated_tokens"] == 108
    assert engine.requests[-1].params.temperature == 0
    for wish, temperature in (({"do_sample": True}, 1.0), ({"top_p": 0.5}, 1.0), ({"temperature": 0.7}, 0.7)):
        await generate(client, **wish)
        assert engine.requests[-1].params.temperature == temperature


async def test_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await generate(
        client,
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        seed=9,
        ignore_eos_token=True,
        max_new_tokens=7,
        response_format={"type": "json_object", "schema": schema},
    )
    got = engine.requests[-1].params
    assert (got.top_k, got.top_p, got.repetition_penalty, got.seed) == (5, 0.9, 1.1, 9)
    assert (got.frequency_penalty, got.presence_penalty, got.ignore_eos, got.max_tokens) == (0.2, 0.3, True, 7)
    assert got.structured_outputs is not None
    assert got.structured_outputs.json is not None
    for wanted, is_object in (({"type": "json_object"}, True), ({"type": "text"}, None)):
        await generate(client, response_format=wanted)
        form = engine.requests[-1].params.structured_outputs
        assert (None if form is None else form.json_object) is is_object


async def test_a_mix_of_adapters(client: httpx.AsyncClient) -> None:
    mix = {"ids": ["sql", "chat"], "weights": [0.5, 0.5], "density": 0, "merge_strategy": None}
    answer = await generate(client, merged_adapters=mix)
    assert answer.json()["generated_text"] == "[sql + chat] hi"
    assert answer.headers["x-adapter-id"] == "sql,chat"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"best_of": 2}, "best_of"),
        ({"truncate": 5}, "truncate"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"watermark": True}, "watermark"),
        ({"apply_chat_template": True}, "apply_chat_template"),
        ({"adapter_source": "hub", "adapter_id": "sql"}, "adapter_source"),
        ({"adapter_source": "s3", "merged_adapters": {"ids": ["sql"], "weights": [1]}}, "adapter_source"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 5000}, "max_new_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3.0}, "top_p"),
        ({"return_k_alternatives": 1000}, "return_k_alternatives"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": "strin"}}}, "response_format"),
        ({"merged_adapters": {"ids": ["sql"], "weights": [1, 2]}}, "merged_adapters"),
        ({"merged_adapters": {"ids": ["sql"], "weights": [1]}, "adapter_id": "sql"}, "adapter_id"),
        ({"merged_adapters": {"ids": ["sql", "nope"], "weights": [1, 1]}}, "nope"),
        ({"adapter_id": "nope"}, "nope"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"top_n_tokens": 2}, "return_k_alternatives"),
    ],
)
async def test_errors_have_its_form_and_name_the_field(
    client: httpx.AsyncClient, path: str, parameters: dict[str, Any], named: str
) -> None:
    refused = await client.post(path, json={"inputs": "hi", "parameters": parameters, "stream": path != "/generate"})
    error = refused.json()
    assert refused.status_code == (404 if named == "nope" else 400)
    assert error["error_type"] == ("not_found" if named == "nope" else "validation")
    assert named in error["error"] or named == error["param"], error


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
async def test_bodies_that_are_none(client: httpx.AsyncClient, path: str) -> None:
    for body in ({}, {"inputs": ""}, {"inputs": ["a"]}, {"inputs": "a", "stream": 1}, {"text": "hi"}):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error_type"]) == (400, "validation")


async def test_details_of_the_prompt_are_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    body = {"inputs": "hi", "parameters": {"decoder_input_details": True}}
    assert (await client.post("/generate_stream", json=body)).json()["param"] == "decoder_input_details"
    assert (await client.post("/", json={**body, "stream": True})).status_code == 400


async def test_an_error_before_and_in_a_stream(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    engine.fail_next(EngineOverloadedError("too many wait"))
    refused = await client.post("/generate_stream", json={"inputs": "hi"})
    assert (refused.status_code, refused.json()["error_type"]) == (429, "overloaded")
    assert refused.headers["retry-after"] == "1"
    engine.fail_next(EngineOverloadedError("too many wait"), after_tokens=2)
    found = await stream(client)
    assert [each["token"]["text"] for each in found[:-1]] == ["[", "b"]
    assert found[-1]["error_type"] == "overloaded"


async def test_values_that_ask_for_nothing_are_fine(client: httpx.AsyncClient) -> None:
    for name, accepted in LoraxParameters.neutral.items():
        for value in (*accepted, None):
            await generate(client, **{name: value})
    for source in (None, "", "local"):
        await generate(client, adapter_id="sql", adapter_source=source)
    await generate(client, adapter_source="hub")  # what LoRAX's client sends for the base model


async def test_a_token_for_a_source_is_taken_and_used_for_nothing(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    secret = "hf_secret_of_the_client"
    await generate(client, adapter_id="sql", api_token=secret)
    refused = await client.post("/generate", json={"inputs": "hi", "parameters": {"api_token": secret, "top_p": 9.0}})
    assert refused.status_code == 400
    assert secret not in refused.text
    assert secret not in caplog.text
    async with client_of(create_app(FakeAsyncEngine(), ServerConfig(strict_fields=True))) as strict:
        body = {"inputs": "hi", "parameters": {"api_token": secret}}
        assert (await strict.post("/generate", json=body)).json()["param"] == "api_token"


async def test_what_it_says_of_itself(client: httpx.AsyncClient) -> None:
    info = (await client.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_length"]) == ("/models/base", 512, 511)


async def test_a_post_to_the_root_needs_a_key() -> None:
    """The page of that path is open to reading."""
    key = "k" * 20
    async with client_of(create_app(FakeAsyncEngine(), ServerConfig(api_keys=(key,)))) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.post("/", json={"inputs": "hi"})).status_code == 401
        answer = await client.post("/", json={"inputs": "hi"}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200


@pytest.mark.parametrize("adapter_id", ["/adapters/sql", "adapters/sql", "./sql"])
async def test_a_path_of_a_local_source_is_400_and_says_what_to_do(client: httpx.AsyncClient, adapter_id: str) -> None:
    """LoRAX would load it for any client; here a verb gives it a name."""
    parameters = {"adapter_id": adapter_id, "adapter_source": "local"}
    refused = await client.post("/generate", json={"inputs": "hi", "parameters": parameters})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "validation")
    assert "PUT /v1/adapters/NAME" in refused.json()["error"]
    parameters["adapter_id"] = "sql"
    assert (await client.post("/generate", json={"inputs": "hi", "parameters": parameters})).status_code == 200
