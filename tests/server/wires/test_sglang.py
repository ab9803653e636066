"""SGLang's POST /generate, its loading of adapters, and what its clients ask of a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.server import ServerConfig, create_app, responses
from loraplex.server.wires import sglang
from loraplex.server.wires.sglang import MAX_TIMES_AGAIN
from loraplex.server.wires.sglang_fields import MAX_EBNF_LINES, SGLangGenerateRequest, SGLangSampling
from loraplex.tenants.records import new_secret
from loraplex.testing import FakeAsyncEngine, FakeModelInfo, FakeTokenizer
from tests.server.conftest import client_of
from tests.server.sse import events

URL = "/generate"
IDS = FakeTokenizer().encode("hi", add_special_tokens=False)


async def generate(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post(URL, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.content)


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await generate(client, text="hi", lora_path="sql", sampling_params={"max_new_tokens": 4}, rid="mine")
    assert answer == {
        "text": "[sql",
        "output_ids": FakeTokenizer().encode("[sql", add_special_tokens=False),
        "meta_info": {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 0,
            "weight_version": "default",
        },
    }


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"text": "hi"}, "[base] hi"),
        ({"text": "hi", "lora_path": ""}, "[base] hi"),
        ({"input_ids": IDS, "lora_path": "sql"}, "[sql] hi"),
        ({"text": ["hi", "ho"]}, ["[base] hi", "[base] ho"]),
        ({"text": ["hi"]}, ["[base] hi"]),
        ({"input_ids": [IDS, IDS], "lora_path": ["sql", "chat"]}, ["[sql] hi", "[chat] hi"]),
        ({"text": ["hi", "ho", "ha"], "lora_path": ["sql", None, ""]}, ["[sql] hi", "[base] ho", "[base] ha"]),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["[base] a", "[base] a #1", "[base] b", "[base] b #1"]),
        ({"text": "a", "sampling_params": {"n": 2}}, ["[base] a", "[base] a #1"]),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 1}]}, ["[base] a", "[base] b"]),
    ],
)
async def test_forms_of_prompts_whole_and_streamed(
    client: httpx.AsyncClient, fields: dict[str, Any], texts: str | list[str]
) -> None:
    """One prompt is answered by an object, a batch by a list, and by events that have its places."""
    answer = await generate(client, **fields)
    assert (answer["text"] if isinstance(texts, str) else [each["text"] for each in answer]) == texts
    last = {each.get("index"): each for each in await stream(client, **fields)}
    if isinstance(texts, str):
        assert list(last) == [None]
        assert last[None]["text"] == texts
    else:
        assert [last[index]["text"] for index in range(len(texts))] == texts
    assert all(each["meta_info"]["finish_reason"]["type"] == "stop" for each in last.values())


async def test_an_event_says_all_that_there_is(client: httpx.AsyncClient) -> None:
    found = await stream(client, text="hi", sampling_params={"max_new_tokens": 5}, return_logprob=True)
    assert [each["text"] for each in found] == ["[", "[b", "[ba", "[bas", "[base"]
    assert [len(each["meta_info"]["output_token_logprobs"]) for each in found] == [1, 2, 3, 4, 5]
    assert [each["meta_info"]["finish_reason"] for each in found[:-1]] == [None] * 4
    assert found[-1]["meta_info"]["completion_tokens"] == 5


async def test_a_long_stream_does_not_grow_with_the_square_of_its_length() -> None:
    engine = FakeAsyncEngine(model_info=FakeModelInfo(max_model_len=20_000, longest_len=20_000))
    num_tokens = 8 * MAX_TIMES_AGAIN
    async with client_of(create_app(engine)) as client:
        found = await stream(client, text="x" * num_tokens, sampling_params={"max_new_tokens": num_tokens})
    assert len(found[-1]["output_ids"]) == num_tokens
    assert sum(len(each["output_ids"]) for each in found) <= MAX_TIMES_AGAIN * num_tokens + num_tokens
    assert [len(each["output_ids"]) for each in found[:50]] == list(range(1, 51))


async def test_log_probabilities_of_a_stream_are_said_again_so_often_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang, "FREE_BYTES_AGAIN", 2000)
    monkeypatch.setattr(sglang, "MAX_TIMES_BYTES_AGAIN", 8)
    fields: Any = {"text": "x" * 250, "return_logprob": True, "top_logprobs_num": 2}
    fields["sampling_params"] = {"max_new_tokens": 240}
    async with client_of(create_app(FakeAsyncEngine())) as client:
        found = [each["meta_info"] for each in await stream(client, **fields)]
        whole = (await generate(client, **fields))["meta_info"]
    sizes = [len(json.dumps([meta[name] for name in whole if "logprobs" in name])) for meta in found]
    assert sizes == sorted(sizes)
    assert sum(sizes) < 12 * sizes[-1]
    assert len(sizes) > 8
    assert found[-1]["output_top_logprobs"] == whole["output_top_logprobs"]


async def test_log_probabilities_of_a_stream_have_an_eighth_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of all completions have all of it."""
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 8 * 600)
    fields: Any = {"text": "x" * 100, "return_logprob": True, "sampling_params": {"max_new_tokens": 100}}
    async with client_of(create_app(FakeAsyncEngine())) as client:
        answer = await client.post(URL, json={**fields, "stream": True})
        fits = await client.post(URL, json={**fields, "sampling_params": {"max_new_tokens": 10}, "stream": True})
        fields["sampling_params"] = {"max_new_tokens": 10, "n": 32}
        many = await client.post(URL, json={**fields, "stream": True})
    assert "log probabilities of this answer take more than 600 bytes" in answer.text
    assert "take more than" not in fits.text
    assert "log probabilities of this answer take more than 4800 bytes" in many.text


async def test_a_tenants_key_is_no_id(client: httpx.AsyncClient) -> None:
    """It came back in the answer and went to the collector of spans, in the clear."""
    key = new_secret()
    calls = [
        client.post(URL, json={"text": "hi", "rid": key}),
        client.post(URL, json={"text": ["hi", "ho"], "rid": ["a", key]}),
        client.post("/v1/completions", json={"model": "base", "prompt": "hi", "request_id": f"a-{key}"}),
        client.post(
            "/v1/chat/completions",
            json={"model": "base", "messages": [{"role": "user", "content": "hi"}], "request_id": key},
        ),
    ]
    for answer in await asyncio.gather(*calls):
        assert answer.status_code == 400
        assert "has the form of a key" in answer.text
        assert key not in answer.text


async def test_ids_of_a_batch(client: httpx.AsyncClient) -> None:
    for rid, ids in (("r", ["r_0", "r_1"]), (["a", "b"], ["a", "b"])):
        answer = await generate(client, text=["hi", "ho"], rid=rid)
        assert [each["meta_info"]["id"] for each in answer] == ids


@pytest.mark.parametrize(
    ("params", "text", "finish"),
    [
        ({"stop": " two"}, "[base] one", {"type": "stop", "matched": " two"}),
        ({"stop": [" two"], "no_stop_trim": True}, "[base] one two", {"type": "stop", "matched": " two"}),
        ({"stop_token_ids": IDS[:1]}, "[base] one two t", {"type": "stop", "matched": IDS[0]}),
        ({}, "[base] one two three", {"type": "stop", "matched": FakeTokenizer.EOS}),
        ({"max_new_tokens": 3}, "[ba", {"type": "length", "length": 3}),
        ({"max_new_tokens": 0}, "", {"type": "length", "length": 0}),
    ],
)
async def test_how_it_ends(client: httpx.AsyncClient, params: dict[str, Any], text: str, finish: object) -> None:
    answer = await generate(client, text="one two three", sampling_params=params)
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, finish)
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"])


async def test_without_a_number_it_is_128_tokens_or_the_rest_of_the_context(client: httpx.AsyncClient) -> None:
    for length, expected in ((200, 128), (450, 512 - 451)):
        answer = await generate(client, text="x" * length)
        assert answer["meta_info"]["completion_tokens"] == expected
    refused = await client.post(URL, json={"text": "x" * 450, "sampling_params": {"max_new_tokens": 128}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_new_tokens")


async def test_log_probabilities(client: httpx.AsyncClient) -> None:
    fields = {"text": "hi", "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    told = (await generate(client, **fields))["meta_info"]
    first, second = FakeTokenizer().encode("[b", add_special_tokens=False)
    assert told["output_token_logprobs"] == [[-0.25, first, None], [-0.25, second, None]]
    assert told["output_token_logprobs_length"] == 2
    assert told["input_token_logprobs"] == []
    assert "output_top_logprobs" not in told
    more = {"logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    told = (await generate(client, **fields, **more))["meta_info"]
    assert told["input_token_logprobs"] == [[None, IDS[0], "h"], [-0.25, IDS[1], "i"]]
    assert told["input_top_logprobs"] == [None, [[-0.25, IDS[1], "i"], [-0.75, IDS[1] + 1, "j"]]]
    assert told["output_top_logprobs"][0] == [[-0.25, first, "["], [-0.75, first + 1, "\\"]]
    answer = await generate(client, **fields | {"return_logprob": False}, **more)
    assert "output_token_logprobs" not in answer["meta_info"]
    only = await generate(client, **fields | {"sampling_params": {"max_new_tokens": 0}}, logprob_start_len=0)
    assert [each[1] for each in only["meta_info"]["input_token_logprobs"]] == [FakeTokenizer.BOS, *IDS]
    assert only["meta_info"]["output_token_logprobs"] == []


async def test_the_prompt_is_given_back_where_it_is_asked_for(client: httpx.AsyncClient) -> None:
    answer = await generate(client, input_ids=IDS, return_prompt_token_ids=True)
    assert answer["prompt_token_ids"] == IDS
    body = {"input_ids": IDS, "return_prompt_token_ids": True, "stream": True, "sampling_params": {"n": 2}}
    async with client.stream("POST", "/generate", json=body) as streamed:
        lines = [line.removeprefix("data: ") async for line in streamed.aiter_lines() if line.startswith("data: {")]
    assert sum("prompt_token_ids" in line for line in lines) == 2 < len(lines), "once of each completion"


async def test_a_prompt_is_given_back_so_often_and_no_more(engine: FakeAsyncEngine) -> None:
    """As with `return_token_ids` of a completion: 64 times 30,000 ids held the server up."""
    engine.model_info = replace(engine.model_info, max_model_len=2**15)
    async with client_of(create_app(engine, ServerConfig())) as client:
        body = {"input_ids": IDS * 10_000, "return_prompt_token_ids": True, "sampling_params": {"n": 64}}
        refused = await client.post("/generate", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_prompt_token_ids")


async def test_log_probabilities_from_behind_the_prompt_are_none(client: httpx.AsyncClient) -> None:
    for start in (len(IDS), len(IDS) + 48):
        answer = await generate(client, input_ids=IDS, return_logprob=True, logprob_start_len=start)
        assert answer["meta_info"]["input_token_logprobs"] == []


async def test_an_empty_text_is_a_prompt(client: httpx.AsyncClient) -> None:
    assert (await generate(client, text=""))["meta_info"]["prompt_tokens"] == 1


async def test_sampling_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    params = {
        "max_new_tokens": 9,
        "min_new_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 1 << 30,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "sampling_seed": 7,
        "logit_bias": {"5": 1.5},
        "regex": "a+",
    }
    await generate(client, text="hi", sampling_params=params)
    got = engine.requests[-1].params
    assert (got.max_tokens, got.min_tokens, got.temperature, got.top_p, got.top_k) == (9, 1, 0.5, 0.9, 1 << 30)
    assert (got.min_p, got.frequency_penalty, got.presence_penalty, got.repetition_penalty) == (0.1, 0.2, 0.3, 1.1)
    assert (got.stop_token_ids, got.ignore_eos, got.skip_special_tokens, got.seed) == ((9,), True, False, 7)
    assert dict(got.logit_bias) == {5: 1.5}
    assert got.structured_outputs is not None
    assert got.structured_outputs.regex == "a+"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "hi", "input_ids": IDS}, "text"),
        ({"text": 7}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": "hi"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": ["a", "b"], "lora_path": ["sql"]}, "lora_path"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": "a b"}, "rid"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"text": ["a", "b"], "return_logprob": [True, False]}, "return_logprob"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 9}}, "min_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"structural_tag": "{}"}}, "structural_tag"),
        ({"text": "a", "sampling_params": {"beam_width": 2}}, "beam_width"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"json_schema": "{}", "regex": "a"}}, "json_schema"),
        ({"text": "a", "sampling_params": {"regex": "a("}}, "regex"),
        ({"text": "a", "sampling_params": {"ebnf": "x"}}, "ebnf"),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "session_params": {"id": "x"}}, "session_params"),
        ({"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": "a", "no_such_field": 1}, "no_such_field"),
        ({"prompt": "a"}, "prompt"),
        ({"text": "a", "priority": 3}, "priority"),
    ],
)
async def test_what_it_cannot_do_is_400_and_named(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    refused = await client.post(URL, json=fields)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert param is None or error["param"] == param or param in error["message"], error


@pytest.mark.parametrize("model", [SGLangGenerateRequest, SGLangSampling])
async def test_values_that_ask_for_nothing_are_fine(client: httpx.AsyncClient, model: type[Any]) -> None:
    for name, accepted in model.neutral.items():
        for value in (*accepted, None):
            field = {name: value} if model is SGLangGenerateRequest else {"sampling_params": {name: value}}
            assert await generate(client, text="hi", **field)


async def test_fields_without_an_effect_are_refused_where_the_server_is_strict() -> None:
    hint = {"no_logs": True, "conversation_id": "c"}
    async with client_of(create_app(FakeAsyncEngine(), ServerConfig(strict_fields=True))) as client:
        refused = await client.post(URL, json={"text": "hi", **hint})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "no_logs")
    async with client_of(create_app(FakeAsyncEngine())) as client:
        assert await generate(client, text="hi", **hint)


async def test_a_grammar_in_ebnf_is_rewritten() -> None:
    engine = FakeAsyncEngine()
    ebnf = 'root ::= "a" | more\nmore ::= [0-9]+ "x"?'
    async with client_of(create_app(engine, ServerConfig(allow_grammars=True))) as client:
        await generate(client, text="hi", sampling_params={"ebnf": ebnf})
        wanted = engine.requests[-1].params.structured_outputs
        assert wanted is not None
        assert "start:" in (wanted.grammar or "")
        for wrong in ("root ::= (", "root ::= nothing", "x ::= y", "(" * 5000, "root ::= " + "(" * 5000):
            refused = await client.post(URL, json={"text": "hi", "sampling_params": {"ebnf": wrong}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ebnf"), refused.text
        long = "root ::= " + "\n" * MAX_EBNF_LINES
        refused = await client.post(URL, json={"text": "hi", "sampling_params": {"ebnf": long}})
        assert f"{MAX_EBNF_LINES} lines" in refused.text
    async with client_of(create_app(engine)) as client:
        refused = await client.post(URL, json={"text": "hi", "sampling_params": {"ebnf": ebnf}})
        assert "--allow-grammars" in refused.text


async def test_an_error_in_a_stream_is_an_event(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    assert (await client.post(URL, json={"text": "a", "lora_path": "nope", "stream": True})).status_code == 404
    async with client.stream("POST", URL, json={"text": "a", "stream": True}) as response:
        assert response.status_code == 200
    assert engine.num_running == 0


# ------------------------------------------------------------------------------------------------------------- adapters


async def test_an_adapter_is_loaded_used_and_unloaded(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    body = {"lora_name": "new", "lora_path": "/adapters/new", "pinned": True}
    loaded = await client.post("/load_lora_adapter", json=body)
    known = {"sql": "/adapters/sql", "chat": "/adapters/chat", "new": "/adapters/new"}
    assert (loaded.status_code, loaded.json()) == (
        200,
        {"success": True, "error_message": None, "loaded_adapters": known},
    )
    assert engine.registry is not None
    assert engine.registry.describe("new").is_pinned
    assert (await generate(client, text="hi", lora_path="new"))["text"] == "[new] hi"
    twice = await client.post("/load_lora_adapter", json=body)
    assert (twice.status_code, twice.json()["success"]) == (400, False)
    assert "already been loaded" in twice.json()["error_message"]
    assert twice.json()["loaded_adapters"] == known
    gone = await client.post("/unload_lora_adapter", json={"lora_name": "new"})
    assert (gone.status_code, gone.json()["success"]) == (200, True)
    assert "new" not in gone.json()["loaded_adapters"]
    again = await client.post("/unload_lora_adapter", json={"lora_name": "new"})
    assert (again.status_code, again.json()["success"]) == (404, False)


async def test_the_list_of_what_is_loaded_is_bounded_and_has_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.server.wires.sglang_loading.MAX_LISTED", 3)
    engine = FakeAsyncEngine({f"a{index}": f"/adapters/a{index}" for index in range(9)})
    async with client_of(create_app(engine)) as client:
        loaded = await client.post("/load_lora_adapter", json={"lora_name": "new", "lora_path": "/adapters/new"})
    assert set(loaded.json()["loaded_adapters"]) == {"a0", "a1", "new"}


async def test_loading_may_be_off() -> None:
    app = create_app(FakeAsyncEngine(), ServerConfig(disable_dynamic_loading=True))
    async with client_of(app) as client:
        for path in ("/load_lora_adapter", "/unload_lora_adapter"):
            refused = await client.post(path, json={"lora_name": "new", "lora_path": "/adapters/new"})
            assert refused.status_code == 403


# ------------------------------------------------------------------------------------------------------------- a server


async def test_what_clients_ask_of_a_server(app: FastAPI, client: httpx.AsyncClient) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = (await client.get(path)).json()
        assert (info["model_path"], info["served_model_name"], info["is_generation"]) == ("/models/base", "base", True)
    for path in ("/server_info", "/get_server_info"):
        info = (await client.get(path)).json()
        assert info["context_length"] == 512
        assert info["internal_states"][0].get("avg_spec_accept_length") is None  # bench_serving reads the first one
    assert (await client.get("/health_generate")).json()["status"] == "ok"


async def test_paths_are_the_operators_to_know() -> None:
    config = ServerConfig(api_keys=("u" * 20,), admin_api_keys=("a" * 20,))
    async with client_of(create_app(FakeAsyncEngine(), config)) as client:
        for path in ("/model_info", "/server_info", "/info"):
            assert (await client.get(path)).status_code == 401
            as_user = await client.get(path, headers={"authorization": f"Bearer {'u' * 20}"})
            assert "/models" not in as_user.text
            as_admin = await client.get(path, headers={"authorization": f"Bearer {'a' * 20}"})
            assert "/models/base" in json.dumps(as_admin.json())
        assert (await client.get("/health_generate")).status_code == 200
