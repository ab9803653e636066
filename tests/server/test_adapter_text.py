"""Routes with an adapter that has a tokenizer, a vocabulary and sampling defaults of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from loraplex.adapters.registry import AdapterText, LoRARef, LoRARegistry, OpenedAdapter
from loraplex.errors import AdapterUnavailableError
from loraplex.server import create_app
from loraplex.server.prompts import PromptEncoder
from loraplex.testing import FakeAsyncEngine, FakeText, FakeTokenizer

CHAT = [{"role": "user", "content": "hi"}]


class ShoutingTokenizer(FakeTokenizer):
    """Of an adapter: every text is read in capitals, a token more ends its vocabulary, and chats begin with a line."""

    vocab_size = FakeTokenizer.vocab_size + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.upper(), add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return b"<own>" if token_id == FakeTokenizer.vocab_size else super().token_bytes(token_id)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        return "own template\n" + super().apply_chat_template(*arguments, **options)


OWN_TOKEN = FakeTokenizer.vocab_size


@pytest.fixture
def engine() -> FakeAsyncEngine:
    engine = FakeAsyncEngine({"own": "/own", "plain": "/plain"})
    defaults = {"temperature": 0.25, "top_k": 7, "max_tokens": 40}
    engine.texts["own"] = FakeText(ShoutingTokenizer(), ShoutingTokenizer.vocab_size, defaults, "d" * 64, True)
    return engine


@pytest.fixture
async def client(engine: FakeAsyncEngine) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(transport=ASGITransport(create_app(engine)), base_url="http://localhost") as client:
        yield client


async def post(client: AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    reply = await client.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def read(engine: FakeAsyncEngine, index: int = -1) -> str:
    return FakeTokenizer().decode(engine.requests[index].prompt_token_ids)


async def test_prompts_are_read_by_their_adapters(client: AsyncClient, engine: FakeAsyncEngine) -> None:
    """In one request, too."""
    prompts = ["one", "two", "three"]
    await post(client, "/v1/completions", model="base", prompt=prompts, lora_path=["own", "plain", None])
    assert {read(engine, index) for index in range(3)} == {"ONE", "two", "three"}
    params = {read(engine, index): engine.requests[index].params for index in range(3)}
    assert [params[each].temperature for each in ("ONE", "two", "three")] == [0.25, 1.0, 1.0]
    assert [params[each].max_tokens for each in ("ONE", "two", "three")] == [40, 16, 16]


async def test_chats_are_rendered_by_their_adapters(client: AsyncClient, engine: FakeAsyncEngine) -> None:
    await post(client, "/v1/chat/completions", model="own", messages=CHAT)
    assert read(engine) == "OWN TEMPLATE\n<|USER|>HI\n<|ASSISTANT|>"
    assert engine.requests[-1].params.max_tokens == 40
    await post(client, "/v1/chat/completions", model="plain", messages=CHAT)
    assert read(engine) == "<|user|>hi\n<|assistant|>"
    assert engine.requests[-1].params.max_tokens is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_request_says_goes_before_the_defaults(
    client: AsyncClient, engine: FakeAsyncEngine, path: str
) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    await post(client, path, model="own", temperature=1.0, max_tokens=16, top_k=None, **body)
    params = engine.requests[-1].params
    assert (params.temperature, params.max_tokens, params.top_k) == (1.0, 16, 7)


async def test_a_default_length_does_not_refuse_a_prompt_that_fits(
    client: AsyncClient, engine: FakeAsyncEngine
) -> None:
    prompt = "x" * (engine.model_info.max_model_len - 10)
    reply = await post(client, "/v1/completions", model="own", prompt=prompt)
    assert reply["choices"][0]["finish_reason"] == "length"
    for refused in ({"model": "own", "max_tokens": 40}, {"model": "plain"}):
        reply = await post(client, "/v1/completions", 400, prompt=prompt, **refused)
        assert "maximum context length" in reply["error"]["message"]


async def test_token_ids_are_checked_against_the_vocabulary_of_the_adapter(client: AsyncClient) -> None:
    await post(client, "/v1/completions", model="own", prompt=[OWN_TOKEN])
    for model, token_id, last in (("plain", OWN_TOKEN, OWN_TOKEN - 1), ("own", OWN_TOKEN + 1, OWN_TOKEN)):
        reply = await post(client, "/v1/completions", 400, model=model, prompt=[token_id])
        assert reply["error"]["message"] == f"token id {token_id} is not in the vocabulary, 0..{last}"


async def test_tokenize_and_detokenize_ask_the_adapter(client: AsyncClient) -> None:
    own = await post(client, "/tokenize", model="own", prompt="ab", return_token_strs=True)
    assert own["token_strs"] == ["<s>", "A", "B"]
    for named in ({}, {"model": "plain"}, {"model": "base"}):
        reply = await post(client, "/tokenize", prompt="ab", return_token_strs=True, **named)
        assert reply["token_strs"] == ["<s>", "a", "b"]
    chat = await post(client, "/tokenize", model="own", messages=CHAT)
    assert FakeTokenizer().decode(chat["tokens"]).startswith("OWN TEMPLATE")
    assert (await post(client, "/detokenize", model="own", tokens=[OWN_TOKEN]))["prompt"] == "<own>"
    await post(client, "/detokenize", 400, model="plain", tokens=[OWN_TOKEN])
    await post(client, "/detokenize", 404, model="unknown", tokens=[5])


async def test_logprobs_have_the_texts_of_the_adapter(client: AsyncClient) -> None:
    body = {"prompt": [OWN_TOKEN, 70], "echo": True, "max_tokens": 0, "logprobs": 0}
    reply = await post(client, "/v1/completions", model="own", **body)
    assert reply["choices"][0]["logprobs"]["tokens"][0] == "<own>"
    assert reply["choices"][0]["text"].startswith("<own>")


async def test_a_prompt_goes_to_the_version_that_read_it(client: AsyncClient, engine: FakeAsyncEngine) -> None:
    """And a request that has the base's text is for the name."""
    await post(client, "/v1/completions", model="own", prompt="x")
    assert engine.requests[-1].model == "own@1"
    await post(client, "/v1/completions", model="plain", prompt="x")
    assert engine.requests[-1].model == "plain"


def reload(registry: LoRARegistry, name: str) -> None:
    registry.load(name, f"/another-{name}", load_inplace=True)


def load_again(registry: LoRARegistry, name: str) -> None:
    """Under the number of the version before."""
    registry.unload(name)
    registry.load(name, f"/another-{name}")


def switch(registry: LoRARegistry, name: str) -> None:
    registry.switch(name, "own" if name == "plain" else "plain")


BODIES = {
    "/v1/completions": {"prompt": ["hi", "ho"]},
    "/v1/chat/completions": {"messages": CHAT},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["own", "plain"])
@pytest.mark.parametrize("verb", [reload, load_again, switch])
async def test_the_version_that_reads_a_prompt_answers_it(
    client: AsyncClient,
    engine: FakeAsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[[LoRARegistry, str], None],
    name: str,
    path: str,
    is_stream: bool,
) -> None:
    """Whatever happens to its name between the two; the next request has the text of what answers then."""
    registry, check, text_of = engine.registry, PromptEncoder.check, engine.text_of
    assert registry is not None
    before, other = registry.resolve(name).adapter_id, "plain" if name == "own" else "own"
    is_old = {registry.resolve(each).adapter_id for each in ("own", "plain")}.__contains__

    def texts(ref: LoRARef | None) -> FakeText:
        """A version that is loaded later has the text that its name had not."""
        swapped = {"own": "plain", "plain": "own"}
        is_new = ref is not None and not is_old(ref.adapter_id)
        return text_of(replace(ref, adapter_name=swapped[ref.adapter_name]) if ref is not None and is_new else ref)

    def meanwhile(self: PromptEncoder, *values: Any, **named: Any) -> None:
        check(self, *values, **named)
        if not is_changed:
            is_changed.append(True)
            verb(registry, name)

    is_changed: list[bool] = []
    monkeypatch.setattr(engine, "text_of", texts)
    monkeypatch.setattr(PromptEncoder, "check", meanwhile)
    for is_later in (False, True):
        engine.requests.clear()
        reply = await client.post(path, json={"model": name, "stream": is_stream, "max_tokens": 2, **BODIES[path]})
        assert reply.status_code == 200, reply.text
        assert "error" not in reply.text
        reads_loudly = (name == "own") is not is_later
        for index, request in enumerate(engine.requests):
            assert read(engine, index).isupper() is reads_loudly
            assert (request.adapter_ids == (before,)) is not is_later
        assert registry.num_references == 0
    if verb is switch:
        assert engine.requests[-1].adapter_ids == (registry.resolve(other).adapter_id,)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_held_for_a_prompt_returns_whatever_happens(
    client: AsyncClient, engine: FakeAsyncEngine, is_stream: bool
) -> None:
    """Refused before and after its adapter is held, failed by the engine, with prompts that never begin."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "x" * 4000},
        {"prompt": [[5], [OWN_TOKEN + 9]]},
        {"prompt": "x", "lora_path": ["own", "unknown"]},
        {"prompt": ["a", "b", "c"], "lora_path": ["own", "plain", "own"]},
    ]
    for body in bodies:
        engine.fail_next(AdapterUnavailableError("its source is gone"))
        reply = await client.post(
            "/v1/completions", json={"model": "base", "lora_path": "own", "stream": is_stream, **body}
        )
        assert "error" in reply.text
        assert engine.registry is not None
        assert engine.registry.num_references == 0


async def test_a_mix_of_one_is_read_as_the_engine_reads_it(client: AsyncClient, engine: FakeAsyncEngine) -> None:
    for parts, words in (({"own": 0.5}, "X"), ({"own": 0.5, "plain": 0.5}, "x")):
        merged = {"ids": list(parts), "weights": list(parts.values())}
        await post(client, "/v1/completions", model="base", prompt="x", merged_adapters=merged)
        assert read(engine) == words


async def test_lists_that_wait_for_the_engine_keep_no_text_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them for a silent runner held up the requests of all adapters with a text, for seconds."""
    text = AdapterText.of({"generation_config": {}})
    engine = FakeAsyncEngine({"own": "/own"}, open_adapter=lambda path: OpenedAdapter(path, "e" * 64, 1, 1, text))
    app = create_app(engine)
    transport, gate = ASGITransport(app), threading.Event()
    lists = [asyncio.ensure_future(app.state.context.views.run(each, gate.wait, 0)) for each in "ab"]
    body = {"model": "own", "prompt": "x", "max_tokens": 1}
    try:
        async with AsyncClient(transport=transport, base_url="http://localhost") as client, asyncio.timeout(10):
            await post(client, "/v1/completions", **body)
            monkeypatch.setattr(engine, "known_text", engine.text_of)
            making = [app.state.context.texts.run(each, gate.wait, 0) for each in "ab"]
            lists += map(asyncio.ensure_future, making)
            await post(client, "/v1/completions", **body)
    finally:
        gate.set()
        await asyncio.gather(*lists)


async def test_the_adapters_page_says_what_each_brings(client: AsyncClient, engine: FakeAsyncEngine) -> None:
    def open_with_text(path: str) -> OpenedAdapter:
        text = AdapterText.of({"chat_templates": {"default": "x"}, "generation_config": {}})
        return OpenedAdapter(path, "e" * 64, 1, 1, text)

    def open_activated(path: str) -> OpenedAdapter:
        return OpenedAdapter(path, "f" * 64, 1, 1, AdapterText.activated(None, (5, 6)))

    openers = {"/texts": open_with_text, "/activated": open_activated}
    registry = LoRARegistry(engine.store, lambda path: openers[path](path), base_names=["base"])
    registry.load("texts", "/texts")
    registry.load("activated", "/activated")
    engine._registry = registry
    assert (await client.get("/v1/adapters/texts")).json()["brings"] == ["chat_template", "generation_config"]
    assert (await client.get("/v1/adapters/activated")).json()["brings"] == ["invocation_tokens"]
