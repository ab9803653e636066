"""langchain-openai, unchanged: chat by both of OpenAI's APIs, completions, forms, tools, batches, errors, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from calls import ANSWERS, BLOCKED_KEY, KEY, PHRASE, SLOW_KEY, UNSEEN, V1, Answer, refused
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def chat(model: str, key: str = KEY, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": model, "base_url": V1, "api_key": key, "max_retries": 0, "temperature": 0, **fields})


for model, answer in ANSWERS.items():
    for uses_responses in (False, True):
        llm = chat(model, use_responses_api=uses_responses)
        whole = llm.invoke(PHRASE)
        assert whole.text == answer, whole
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] > 0
        pieces = [chunk.text for chunk in llm.stream(PHRASE)]
        assert "".join(pieces) == answer
        assert pieces  # one, where the machine is busy
        for method in ("json_schema", "function_calling"):
            formed = llm.with_structured_output(Answer, method=method).invoke(PHRASE)
            assert isinstance(formed, Answer), (method, formed)
        called: Any = llm.bind_tools([Answer], tool_choice="any").invoke(PHRASE)
        assert called.tool_calls
        assert not called.invalid_tool_calls
        for call in called.tool_calls:
            Answer.model_validate(call["args"])
        results = [ToolMessage("3", tool_call_id=call["id"]) for call in called.tool_calls]
        after = llm.invoke([HumanMessage(PHRASE), called, *results])
        assert after.text == answer, after
        gathered: Any = None
        for chunk in llm.bind_tools([Answer], tool_choice="Answer").stream(PHRASE):
            gathered = chunk if gathered is None else gathered + chunk
        Answer.model_validate(gathered.tool_calls[0]["args"])
    text = OpenAI(model=model, base_url=V1, api_key=KEY, max_retries=0, temperature=0, max_tokens=64)
    assert text.invoke(f"{PHRASE}=") == answer
    assert "".join(text.stream(f"{PHRASE}=")) == answer
    assert text.batch([f"{PHRASE}="] * 4) == [answer] * 4

refused(openai.NotFoundError, lambda: chat(UNSEEN).invoke(PHRASE))
refused(openai.NotFoundError, lambda: list(chat(UNSEEN).stream(PHRASE)))
refused(openai.BadRequestError, lambda: chat("upper", extra_body={"temperatur": 0}).invoke(PHRASE))
if BLOCKED_KEY:
    refused(openai.AuthenticationError, lambda: chat("upper", "lp-" + "0" * 43).invoke(PHRASE))
    refused(openai.RateLimitError, lambda: chat("upper", BLOCKED_KEY).invoke(PHRASE))
    slow = chat("upper", SLOW_KEY, max_retries=5)
    assert [slow.invoke(PHRASE).text for _ in range(2)] == [ANSWERS["upper"]] * 2


async def several() -> None:
    models = [*ANSWERS] * 8
    found = await asyncio.gather(*(chat(each).ainvoke(PHRASE) for each in models))
    assert [each.text for each in found] == [ANSWERS[each] for each in models]


asyncio.run(several())
print("all calls answered")
