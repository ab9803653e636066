"""instructor, unchanged: typed answers by tools and by JSON schemas, whole, in parts and several of them."""

from __future__ import annotations

import asyncio

import instructor
import openai
from calls import ANSWERS, BLOCKED_KEY, KEY, UNSEEN, USER, V1, Answer, refused
from instructor.core.exceptions import InstructorRetryException

sdk = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=60)
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(sdk, mode=mode)
    for model in ANSWERS:
        found = client.chat.completions.create(model=model, messages=USER, response_model=Answer, max_retries=0)
        assert isinstance(found, Answer), (mode, found)
        found, raw = client.chat.completions.create_with_completion(
            model=model, messages=USER, response_model=Answer, max_retries=0
        )
        assert isinstance(found, Answer)
        assert raw.usage.completion_tokens > 0
    parts = list(client.chat.completions.create_partial(model="upper", messages=USER, response_model=Answer))
    assert parts  # one, where the machine is busy
    Answer.model_validate(parts[-1].model_dump())

client = instructor.from_openai(sdk)


def cause(model: str, key: str = KEY) -> BaseException | None:
    """What instructor's error was made of."""
    with_key = instructor.from_openai(sdk.with_options(api_key=key))
    return refused(
        InstructorRetryException,
        lambda: with_key.chat.completions.create(model=model, messages=USER, response_model=Answer, max_retries=0),
    ).__cause__


def is_of(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None and not isinstance(error, kind):
        last = getattr(error, "last_attempt", None)
        error = error.__cause__ or (last.exception() if last is not None else None)
    return error is not None


assert is_of(cause(UNSEEN), openai.NotFoundError)
if BLOCKED_KEY:
    assert is_of(cause("upper", "lp-" + "0" * 43), openai.AuthenticationError)
    assert is_of(cause("upper", BLOCKED_KEY), openai.RateLimitError)


async def several() -> None:
    asynchronous = instructor.from_openai(openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=60))
    found = await asyncio.gather(
        *(
            asynchronous.chat.completions.create(model=model, messages=USER, response_model=Answer, max_retries=0)
            for model in [*ANSWERS] * 4
        )
    )
    assert all(isinstance(each, Answer) for each in found)


asyncio.run(several())
print("all calls answered")
