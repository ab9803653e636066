"""openai, unchanged: chat, completions and responses, whole and streamed, forms, tools, errors, retries."""

from __future__ import annotations

import asyncio

import openai
from calls import ANSWERS, BLOCKED_KEY, KEY, PHRASE, SLOW_KEY, UNSEEN, USER, V1, Answer, refused

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=60)
ADD = openai.pydantic_function_tool(Answer, name="add")

for model, answer in ANSWERS.items():
    chat = client.chat.completions.create(model=model, messages=USER, temperature=0)
    assert chat.choices[0].message.content == answer, chat
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    with client.chat.completions.stream(
        model=model, messages=USER, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") >= 1  # one, where the machine is busy
    assert final.choices[0].message.content == answer
    assert final.usage is not None
    assert final.usage.completion_tokens == chat.usage.completion_tokens

    texts = client.completions.create(model=model, prompt=[f"{PHRASE}="] * 2, n=2, temperature=0, logprobs=2)
    assert [choice.text for choice in texts.choices] == [answer] * 4, texts
    assert texts.choices[0].logprobs is not None
    assert "".join(texts.choices[0].logprobs.tokens or ()).startswith(answer)
    pieces = client.completions.create(model=model, prompt=f"{PHRASE}=", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == answer

    response = client.responses.create(model=model, input=PHRASE, temperature=0)
    assert response.output_text == answer, response
    with client.responses.stream(model=model, input=PHRASE, temperature=0) as events:
        told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert told == events.get_final_response().output_text == answer

    parsed = client.chat.completions.parse(model=model, messages=USER, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    said = client.responses.parse(model=model, input=PHRASE, text_format=Answer)
    assert isinstance(said.output_parsed, Answer)
    with client.chat.completions.stream(model=model, messages=USER, response_format=Answer) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)

    called = client.chat.completions.parse(model=model, messages=USER, tools=[ADD], tool_choice="required")
    calls = called.choices[0].message.tool_calls or []
    assert calls
    assert all(isinstance(call.function.parsed_arguments, Answer) for call in calls)
    assert called.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model=model, messages=USER, tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [call.function.name for call in streamed] == ["add"]
    assert isinstance(streamed[0].function.parsed_arguments, Answer)
    turn = [
        {
            "role": "assistant",
            "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}}) for call in calls],
        }
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    after = client.chat.completions.create(
        model=model, messages=[*USER, *turn, *results], tools=[ADD], tool_choice="none", temperature=0
    )
    assert after.choices[0].message.content == answer
    item = client.responses.create(
        model=model,
        input=PHRASE,
        tools=[{"type": "function", "name": "add", "parameters": Answer.model_json_schema(), "strict": True}],
        tool_choice="required",
        parallel_tool_calls=False,
    ).output[0]
    assert item.type == "function_call"
    Answer.model_validate_json(item.arguments)

listed = [card.id for card in client.models.list()]
assert set(ANSWERS) <= set(listed)
assert client.models.retrieve("reverse").id == "reverse"

missing = refused(openai.NotFoundError, lambda: client.chat.completions.create(model=UNSEEN, messages=USER))
assert missing.code == "model_not_found"
refused(openai.NotFoundError, lambda: client.chat.completions.create(model=UNSEEN, messages=USER, stream=True))
refused(openai.NotFoundError, lambda: client.responses.create(model=UNSEEN, input=PHRASE))
refused(openai.NotFoundError, lambda: client.models.retrieve(UNSEEN))
unknown = refused(
    openai.BadRequestError,
    lambda: client.chat.completions.create(model="upper", messages=USER, extra_body={"temperatur": 0}),
)
assert (unknown.code, unknown.param) == ("unknown_field", "temperatur")
too_long = refused(openai.BadRequestError, lambda: client.completions.create(model="upper", prompt="a" * 10_000))
assert too_long.code == "context_length_exceeded"

if BLOCKED_KEY:
    stranger = client.with_options(api_key="lp-" + "0" * 43)
    refused(openai.AuthenticationError, lambda: stranger.chat.completions.create(model="upper", messages=USER))
    blocked = client.with_options(api_key=BLOCKED_KEY)
    limited = refused(openai.RateLimitError, lambda: blocked.chat.completions.create(model="upper", messages=USER))
    assert int(limited.response.headers["retry-after"]) > 60
    assert limited.response.headers["x-ratelimit-remaining-requests"] == "0"
    slow = client.with_options(api_key=SLOW_KEY, max_retries=5)
    for _ in range(2):
        waited = slow.chat.completions.create(model="upper", messages=USER, temperature=0)
        assert waited.choices[0].message.content == ANSWERS["upper"]


async def several() -> None:
    async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=60) as asynchronous:
        models = [*ANSWERS] * 8
        chats = await asyncio.gather(
            *(asynchronous.chat.completions.create(model=each, messages=USER, temperature=0) for each in models)
        )
        assert [chat.choices[0].message.content for chat in chats] == [ANSWERS[each] for each in models]
        stream = await asynchronous.chat.completions.create(model="upper", messages=USER, stream=True)
        async for _ in stream:
            break
        await stream.close()


asyncio.run(several())
print("all calls answered")
