"""A whole model on the Triton backend in the interpreter: the reference's tokens, and nothing left to stock torch of
what has kernels."""

from __future__ import annotations

import pytest

from loraplex import LLM, SamplingParams
from loraplex.kernels.triton.backend import TritonBackend
from tests.fixtures import ModelZoo

pytestmark = pytest.mark.interpreter

PROMPTS = ("One day, a long time ago, when there was no path yet", "Two", "Three cats and four dogs")


def generate(base: str, backend: str) -> list[tuple[int, ...]]:
    """Chunks of 8 tokens: prefills, decodes and steps with both."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(base, dtype="float32", lora_backend=backend, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(list(PROMPTS), params)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_greedy_tokens_equal_the_reference(zoo: ModelZoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mistral has a sliding window, qwen3 norms of q and k."""
    fallbacks: list[str] = []
    monkeypatch.setattr(
        TritonBackend, "_fall_back", lambda _, operator, reason: fallbacks.append(f"{operator}: {reason}")
    )
    base = str(zoo.base(family))
    assert generate(base, "triton") == generate(base, "reference")
    assert not fallbacks
