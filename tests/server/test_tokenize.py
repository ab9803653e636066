"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

import httpx
import pytest

from loraplex.server import create_app, responses
from loraplex.testing import FakeAsyncEngine, FakeTokenizer
from tests.server.conftest import client_of

IDS = FakeTokenizer().encode("hi", add_special_tokens=False)
MESSAGES = [{"role": "user", "content": "hi"}]


async def test_text(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"model": "sql", "prompt": "hi"})).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [1, *IDS], "token_strs": None}
    body = {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}
    answer = (await client.post("/tokenize", json=body)).json()
    assert (answer["tokens"], answer["token_strs"]) == (IDS, ["h", "i"])


async def test_chat_as_the_chat_route_renders_it(client: httpx.AsyncClient, engine: FakeAsyncEngine) -> None:
    fields = {"messages": MESSAGES, "chat_template_kwargs": {"a": 1}}
    tokens = (await client.post("/tokenize", json=fields)).json()["tokens"]
    await client.post("/v1/chat/completions", json={"model": "base", **fields})
    assert tokens == list(engine.requests[0].prompt_token_ids)


async def test_round_trip(client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json={"prompt": "日本 \U0001f600"})).json()["tokens"]
    answer = (await client.post("/detokenize", json={"model": "base", "tokens": tokens})).json()
    assert answer == {"prompt": "<s>日本 \U0001f600"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("url", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "hi", "messages": MESSAGES}, 400),
        ("/tokenize", {"prompt": ["hi"]}, 400),
        ("/tokenize", {"prompt": "hi", "model": "nope"}, 404),
        ("/tokenize", {"prompt": "hi", "x": 1}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [259]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
        ("/detokenize", {"tokens": [3], "model": "nope"}, 404),
    ],
)
async def test_refusals(client: httpx.AsyncClient, url: str, body: dict[str, object], status: int) -> None:
    response = await client.post(url, json=body)
    assert response.status_code == status, response.text


async def test_a_model_without_a_tokenizer() -> None:
    async with client_of(create_app(FakeAsyncEngine(has_tokenizer=False))) as client:
        for url, body in [
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [5]}),
            ("/v1/completions", {"model": "base", "prompt": "hi"}),
            ("/v1/chat/completions", {"model": "base", "messages": MESSAGES}),
        ]:
            response = await client.post(url, json=body)
            assert response.status_code == 400
            assert "no tokenizer" in response.json()["error"]["message"]
        body = {"model": "base", "prompt": IDS, "logprobs": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    "body", [{"tokens": IDS * 60}, {"prompt": IDS * 60, "model": "base", "echo": True}], ids=["detokenize", "echo"]
)
async def test_a_text_that_no_answer_has_room_for_is_not_made(
    body: dict[str, object], client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object, skip_special_tokens: bool = True) -> str:
        assert skip_special_tokens, "the text was made"
        return "what the engine says"

    url = "/detokenize" if "tokens" in body else "/v1/completions"
    assert (await client.post(url, json=body)).status_code == 200
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 100)
    monkeypatch.setattr(FakeTokenizer, "decode", decode)
    response = await client.post(url, json=body)
    assert response.status_code == 400
    assert "take more than 100 bytes" in response.text
