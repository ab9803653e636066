"""A prompt that every choice gives back: a small body must not become a huge answer, nor hold up the event loop."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.sampling_params import MAX_LOGIT_BIAS
from loraplex.server import ServerConfig, create_app, openai_api
from loraplex.server.api_error import ApiError
from loraplex.server.body import check_model
from loraplex.server.completions import CompletionRenderer
from loraplex.server.generation import CHARS_A_TOKEN, Generation, GenerationItem, Prompt
from loraplex.server.model_names import Target
from loraplex.server.schemas import CompletionRequest
from loraplex.testing import FakeAsyncEngine, FakeText, FakeTokenizer


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


class GreedyTokenizer(FakeTokenizer):
    """One token of any text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [100]


class CountingTokenizer(FakeTokenizer):
    num_decoded = 0

    def decode(self, *arguments: Any, **options: Any) -> str:
        self.num_decoded += 1
        return super().decode(*arguments, **options)


def test_an_echoed_prompt_becomes_text_once_for_all_choices() -> None:
    """A prompt of ids was decoded for each choice, on the event loop: 131,000 ids with n=128 took seconds."""
    n, ids, tokenizer = 64, (100,) * 50, CountingTokenizer()
    body = CompletionRequest.model_validate({"model": "base", "prompt": list(ids), "echo": True, "n": n})
    target = Target(None, None, FakeText(tokenizer))
    generation = Generation("id", 0, "base", (GenerationItem(Prompt(ids), target, "x", body.to_sampling_params()),))
    completions = tuple(
        CompletionOutput(
            index=index,
            text="",
            token_ids=(),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="length",
            stop_reason=None,
            lora_request=None,
        )
        for index in range(n)
    )
    output = RequestOutput("x", None, ids, completions, True, None, None, None, 0)
    CompletionRenderer(body, generation).response([output])
    assert tokenizer.num_decoded == 1


@pytest.mark.parametrize("value", [1, "no number"])
def test_too_many_biases_are_counted_before_they_are_checked(value: Any) -> None:
    """131,000 wrong ones became 131,000 reasons: two calls that held the interpreter for 100 ms and 170 ms."""
    fields = {"model": "base", "prompt": "x", "logit_bias": {str(i): value for i in range(2**17 - 100)}}
    began_s = time.perf_counter()
    with pytest.raises(ApiError, match=f"logit_bias: has more than {MAX_LOGIT_BIAS} entries"):
        check_model(fields, CompletionRequest)
    assert time.perf_counter() - began_s < 0.05


@pytest.mark.parametrize("prompts", [1, 4])
async def test_few_tokens_of_many_characters_are_not_given_back_by_every_choice(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 MB of tabs behind a token that takes the space behind it became 133 MB, and 439 ms for everybody."""
    app = create_app(FakeAsyncEngine(tokenizer=GreedyTokenizer()), ServerConfig())
    monkeypatch.setattr(openai_api, "MAX_REPEATED_TOKENS", 8000)
    text = "\t" * (CHARS_A_TOKEN * 1000)
    fields = {"model": "base", "prompt": [text] * prompts, "max_tokens": 1, "echo": True}
    async with client_of(app) as client:
        refused = await client.post("/v1/completions", json=fields | {"n": 8 // prompts + 1})
        allowed = await client.post("/v1/completions", json=fields | {"n": 8 // prompts})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
        once = await client.post("/v1/completions", json=fields)
    assert (allowed.status_code, once.status_code) == (200, 200)
    assert once.json()["choices"][0]["text"].startswith(text)


def noting(render: Any, threads: list[int]) -> Any:
    def noted(self: Any, *arguments: Any) -> bytes:
        threads.append(threading.get_ident())
        written: bytes = render(self, *arguments)
        return written

    return noted


async def test_a_long_answer_is_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5 million tokens of 1,024 completions were 196 ms of the event loop."""
    threads: list[int] = []
    monkeypatch.setattr(CompletionRenderer, "response", noting(CompletionRenderer.response, threads))
    app = create_app(FakeAsyncEngine(), ServerConfig())
    fields = {"model": "base", "prompt": "hi", "n": 16, "return_token_ids": True, "ignore_eos": True}
    async with client_of(app) as client:
        for num_tokens in (openai_api.LONG_ANSWER // 16 + 1, 8):
            answer = await client.post("/v1/completions", json={**fields, "max_tokens": num_tokens})
            assert answer.json()["usage"]["completion_tokens"] == 16 * num_tokens
    assert threads[0] != threading.get_ident()
    assert threads[1] == threading.get_ident()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_few_tokens_of_many_characters_are_written_in_a_thread(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(CompletionRenderer, "_choice", noting(CompletionRenderer._choice, threads))
    app = create_app(FakeAsyncEngine(tokenizer=GreedyTokenizer()), ServerConfig())
    text = "\t" * (CHARS_A_TOKEN * (openai_api.LONG_ANSWER + 1))
    fields = {"model": "base", "prompt": text, "max_tokens": 1, "echo": True, "stream": is_stream}
    async with client_of(app) as client:
        assert (await client.post("/v1/completions", json=fields)).status_code == 200
    assert threads[0] != threading.get_ident()
