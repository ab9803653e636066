"""lorax-client, unchanged: whole and streamed answers, details, forms, mixes, errors."""

import asyncio

from calls import ANSWERS, KEY, PHRASE, UNSEEN, URL
from lorax import AsyncClient, Client
from lorax.errors import NotFoundError, ValidationError
from lorax.types import MergedAdapters

prompt, answer = f"{PHRASE}=", ANSWERS["reverse"]
client = Client(URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)

found = client.generate(prompt, adapter_id="reverse", adapter_source="local", max_new_tokens=32)
assert found.generated_text.strip() == answer, found
assert found.details.finish_reason.value == "eos_token"
assert found.details.prompt_tokens > 5
assert len(found.details.tokens) == found.details.generated_tokens

events = list(client.generate_stream(prompt, adapter_id="reverse", max_new_tokens=32))
assert "".join(each.token.text for each in events if not each.token.special).strip() == answer
assert events[-1].generated_text.strip() == answer
assert events[-1].details.generated_tokens == len(events)

scored = client.generate(prompt, adapter_id="reverse", max_new_tokens=4, decoder_input_details=True)
assert len(scored.details.prefill) == scored.details.prompt_tokens
kinds = client.generate(prompt, max_new_tokens=4, return_k_alternatives=3, temperature=0.7, seed=1)
assert all(len(each.alternative_tokens) >= 3 for each in kinds.details.tokens)
form = {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
assert client.generate(prompt, response_format=form, max_new_tokens=8).generated_text.lstrip().startswith("{")
mix = MergedAdapters(ids=["reverse", "upper"], weights=[1.0, 0.0], density=0.0)
assert client.generate(prompt, merged_adapters=mix, max_new_tokens=32).generated_text.strip() == answer

for wanted, call in (
    (NotFoundError, lambda: client.generate(prompt, adapter_id=UNSEEN)),
    (NotFoundError, lambda: list(client.generate_stream(prompt, adapter_id=UNSEEN))),
    (ValidationError, lambda: client.generate(prompt, truncate=3)),
    (ValidationError, lambda: client.generate(prompt, adapter_id="reverse", adapter_source="hub")),
):
    try:
        call()
    except wanted:
        pass
    else:
        raise AssertionError(f"no {wanted.__name__}")


async def several() -> None:
    asynchronous = AsyncClient(URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
    answers = await asyncio.gather(
        *(asynchronous.generate(prompt, adapter_id="reverse", max_new_tokens=32) for _ in range(8))
    )
    assert {each.generated_text.strip() for each in answers} == {answer}
    texts = [
        each.token.text
        async for each in asynchronous.generate_stream(prompt, adapter_id="reverse", max_new_tokens=32)
        if not each.token.special
    ]
    assert "".join(texts).strip() == answer


asyncio.run(several())
print("all calls answered")
