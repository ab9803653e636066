"""litellm, unchanged, by its providers for OpenAI, vLLM and Anthropic."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from calls import ANSWERS, BLOCKED_KEY, KEY, PHRASE, SLOW_KEY, UNSEEN, URL, USER, V1, Answer, refused

ADD = {"type": "function", "function": {"name": "add", "parameters": Answer.model_json_schema()}}


def at(provider: str, model: str, key: str = KEY, **fields: Any) -> dict[str, Any]:
    base = URL if provider == "anthropic" else V1
    return {"model": f"{provider}/{model}", "api_base": base, "api_key": key, "max_retries": 0, **fields}


for model, answer in ANSWERS.items():
    for provider in ("openai", "hosted_vllm", "anthropic"):
        whole = litellm.completion(**at(provider, model, messages=USER, temperature=0, max_tokens=64))
        assert whole.choices[0].message.content == answer, (provider, whole)
        assert whole.usage.completion_tokens > 0
        chunks = litellm.completion(**at(provider, model, messages=USER, temperature=0, max_tokens=64, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    for provider in ("openai", "hosted_vllm"):
        formed = litellm.completion(**at(provider, model, messages=USER, response_format=Answer))
        Answer.model_validate_json(formed.choices[0].message.content)
    # to its other providers litellm sends the schemas without `additionalProperties`
    tools = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    called = litellm.completion(**at("openai", model, messages=USER, **tools)).choices[0]
    assert called.finish_reason == "tool_calls"
    [call] = called.message.tool_calls
    Answer.model_validate_json(call.function.arguments)
    text = litellm.text_completion(**at("text-completion-openai", model, prompt=f"{PHRASE}=", temperature=0))
    assert text.choices[0].text == answer
    said = litellm.responses(**at("openai", model, input=PHRASE, temperature=0))
    assert said.output[0].content[0].text == answer


def ask(provider: str, model: str, key: str = KEY, **fields: Any) -> Any:
    return litellm.completion(**at(provider, model, key, messages=USER, max_tokens=64, **fields))


def refuse(provider: str) -> None:
    refused(litellm.NotFoundError, lambda: ask(provider, UNSEEN))
    refused(litellm.BadRequestError, lambda: ask(provider, "upper", extra_body={"temperatur": 0}))
    if BLOCKED_KEY:
        refused(litellm.AuthenticationError, lambda: ask(provider, "upper", "lp-" + "0" * 43))
        refused(litellm.RateLimitError, lambda: ask(provider, "upper", BLOCKED_KEY))


for provider in ("openai", "hosted_vllm", "anthropic"):
    refuse(provider)
if BLOCKED_KEY:
    for _ in range(2):
        waited = ask("openai", "upper", SLOW_KEY, temperature=0, **{"max_retries": 5})
        assert waited.choices[0].message.content == ANSWERS["upper"]


async def several() -> None:
    models = [*ANSWERS] * 8
    chats = await asyncio.gather(
        *(litellm.acompletion(**at("openai", each, messages=USER, temperature=0)) for each in models)
    )
    assert [chat.choices[0].message.content for chat in chats] == [ANSWERS[each] for each in models]


asyncio.run(several())
print("all calls answered")
