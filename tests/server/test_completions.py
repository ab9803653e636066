"""/v1/completions: forms of prompts, choices, echo, usage, streaming."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from loraplex.server import ServerConfig, create_app
from loraplex.server.model_names import ModelNames
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of
from tests.server.sse import events, text_of

URL = "/v1/completions"
IDS = FakeTokenizer().encode("hi", add_special_tokens=False)


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "base", **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"model": "base", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.content)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi", ["[base] hi"]),
        (["hi", "ho"], ["[base] hi", "[base] ho"]),
        (IDS, ["[base] hi"]),
        ([IDS, IDS], ["[base] hi", "[base] hi"]),
    ],
)
async def test_forms_of_prompts(client: httpx.AsyncClient, prompt: object, texts: list[str]) -> None:
    answer = await complete(client, prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    chunks = await stream(client, prompt=prompt)
    assert [text_of(chunks, index) for index in range(len(texts))] == texts


async def test_shape_of_an_answer(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", max_tokens=4)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "base"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_n_and_several_prompts(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=["a", "b"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["[base] a", "[base] a #1", "[base] b", "[base] b #1"]
    assert answer["usage"]["prompt_tokens"] == 4
    chunks = await stream(client, prompt=["a", "b"], n=2)
    assert [text_of(chunks, index) for index in range(4)] == [choice["text"] for choice in answer["choices"]]


async def test_the_default_of_max_tokens_is_openais(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"max_tokens": None}):
        answer = await complete(client, prompt="x" * 40, **fields)
        assert answer["usage"]["completion_tokens"] == 16


async def test_stop_strings_and_tokens(client: httpx.AsyncClient) -> None:
    choice = (await complete(client, prompt="one two", stop=[" two"]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("[base] one", "stop", " two")
    choice = (await complete(client, prompt="one two", stop=" two", include_stop_str_in_output=True))["choices"][0]
    assert choice["text"] == "[base] one two"
    choice = (await complete(client, prompt="one", stop_token_ids=[FakeTokenizer.FIRST_BYTE + ord("e")]))["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("[bas", FakeTokenizer.FIRST_BYTE + ord("e"))
    chunks = await stream(client, prompt="one two", stop=" two")
    assert text_of(chunks) == "[base] one"


async def test_every_token_is_a_chunk(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="hi", max_tokens=20, ignore_eos=True)
    assert len(chunks) == 20
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 19 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_characters_of_several_tokens_arrive_whole(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="日本", max_tokens=50)
    assert text_of(chunks) == "[base] 日本"
    assert "\ufffd" not in "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_usage_chunk(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt=["hi", "ho"], max_tokens=3, stream_options={"include_usage": True})
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 6
    assert last["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in others)


async def test_continuous_usage(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, prompt="hi", max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_echo(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi ", echo=True, max_tokens=3, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["hi [ba", "hi [ba"]
    assert (await complete(client, prompt=IDS, echo=True, max_tokens=3))["choices"][0]["text"] == "hi[ba"
    chunks = await stream(client, prompt=["hi ", "ho "], echo=True, max_tokens=3)
    assert [text_of(chunks, index) for index in range(2)] == ["hi [ba", "ho [ba"]


async def test_echo_alone_asks_for_no_new_token(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "hi"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    chunks = await stream(client, prompt="hi", echo=True, max_tokens=0, stream_options={"include_usage": True})
    assert text_of(chunks) == "hi"
    assert len(chunks) == 2
    assert chunks[1]["usage"]["completion_tokens"] == 0


async def test_special_tokens_of_the_prompt(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    await complete(client, prompt="hi")
    await complete(client, prompt="hi", add_special_tokens=False)
    assert [request.prompt_token_ids for request in engine.requests] == [(1, *IDS), tuple(IDS)]


async def test_token_ids_on_request(client: httpx.AsyncClient) -> None:
    choice = (await complete(client, prompt="hi", max_tokens=2, return_token_ids=True))["choices"][0]
    assert choice["prompt_token_ids"] == [1, *IDS]
    assert choice["token_ids"] == FakeTokenizer().encode("[b", add_special_tokens=False)
    chunks = await stream(client, prompt="hi", max_tokens=2, return_token_ids=True)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[1, *IDS], None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token_id] for token_id in choice["token_ids"]]
    plain = (await complete(client, prompt="hi", max_tokens=2))["choices"][0]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(plain)


async def test_ids_of_requests(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    response = await client.post(URL, json={"model": "base", "prompt": "hi"}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    response = await client.post(URL, json={"model": "base", "prompt": "hi", "request_id": "mine-1"})
    assert response.json()["id"] == "cmpl-mine-1"
    assert response.headers["x-request-id"] != "mine-1"
    assert len({request.request_id for request in engine.requests}) == 2, "the engine's ids never collide"


async def test_sampling_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "max_tokens": 11,
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 3,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    await complete(client, prompt="hi", logit_bias={"5": 1.5}, cache_salt="pepper", **given)
    request = engine.requests[0]
    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(request.params, name) == expected, name
    assert request.params.logit_bias == {5: 1.5}
    assert request.cache_salt == "pepper"


async def test_what_vllms_benchmark_sends(client: httpx.AsyncClient) -> None:
    chunks = await stream(
        client,
        prompt="hi",
        repetition_penalty=1.0,
        max_tokens=4,
        logprobs=None,
        ignore_eos=True,
        temperature=0.0,
        stream_options={"include_usage": True},
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_what_sglangs_benchmark_sends(client: httpx.AsyncClient) -> None:
    fields = {"best_of": 1, "temperature": 0.0, "ignore_eos": True, "max_tokens": 4, "lora_path": "sql"}
    chunks = await stream(client, prompt="hi", **fields)
    assert text_of(chunks) == "[sql"
    assert chunks[0]["model"] == "sql"


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"), [(9, 1, "prompt"), (1, 9, "n"), (3, 3, "n"), (200, 1, "prompt"), (1, 128, "n")]
)
async def test_what_could_never_wait_is_400(num_prompts: int, n: int, param: str) -> None:
    async with client_of(create_app(FakeAsyncEngine(max_waiting_requests=8))) as client:
        body = {"model": "base", "prompt": ["a"] * num_prompts, "n": n, "max_tokens": 1}
        response = await client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert f"{num_prompts} prompts times n={n} are {num_prompts * n} completions, at most 8 " in error["message"]
        assert "--max-waiting-requests" in error["message"]
        assert "Retry-After" not in response.headers


async def test_what_just_can_wait_is_served() -> None:
    async with client_of(create_app(FakeAsyncEngine(max_waiting_requests=8))) as client:
        body = {"model": "base", "prompt": ["a"] * 4, "n": 2, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        chat = {"model": "base", "messages": [{"role": "user", "content": "a"}], "n": 9}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["error"]["param"] == "n"


async def test_the_servers_own_limit_is_named() -> None:
    async with client_of(create_app(FakeAsyncEngine(), ServerConfig(max_sequences_per_request=4))) as client:
        error = (await client.post("/v1/completions", json={"model": "base", "prompt": ["a"] * 5})).json()["error"]
        assert "at most 4 fit in a request (--max-sequences-per-request)" in error["message"]


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
async def test_prompts_that_many_choices_give_back_are_bounded(client: httpx.AsyncClient, field: str) -> None:
    body = {"model": "base", "prompt": ["x" * 300] * 8, "max_tokens": 1, "n": 128, field: True}
    reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_names_of_prompts_are_looked_up_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 prompts for one mix were 1,024 looks at its names: half a second in the event loop."""
    asked: list[str | None] = []
    resolve = ModelNames.resolve

    async def counted(names: ModelNames, request: Any, model: str | None, path: str | None, *values: Any) -> Any:
        asked.append(path)
        return await resolve(names, request, model, path, *values)

    monkeypatch.setattr(ModelNames, "resolve", counted)
    app = create_app(FakeAsyncEngine({"sql": "/sql", "chat": "/chat"}), ServerConfig())
    body = {"model": "base", "prompt": ["a"] * 9, "lora_path": ["sql", None, "chat"] * 3, "max_tokens": 1}
    async with client_of(app) as client:
        assert len((await client.post("/v1/completions", json=body)).json()["choices"]) == 9
    assert asked == ["sql", None, "chat"]
