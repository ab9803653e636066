"""A prompt that every choice gives back: a small body must not become a huge answer, nor hold up the event loop."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loraplex.core import CompletionOutput, RequestOutput
from loraplex.sampling_params import MAX_LOGIT_BIAS
from loraplex.server.api_error import ApiError
from loraplex.server.body import check_model
from loraplex.server.completions import CompletionRenderer
from loraplex.server.generation import Generation, GenerationItem, Prompt
from loraplex.server.model_names import Target
from loraplex.server.schemas import CompletionRequest
from loraplex.testing import FakeText, FakeTokenizer


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
