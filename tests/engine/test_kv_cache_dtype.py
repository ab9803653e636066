"""--kv-cache-dtype: keys and values in another dtype than the model's, in every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.demo.run import ask, base_path, questions
from tests.fixtures import ModelZoo
from tests.kernels.cases import BACKENDS

pytestmark = pytest.mark.slow

NAMES = [backend.name for backend in BACKENDS]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = [{"prompt_token_ids": list(range(start, start + length))} for start, length in ((3, 40), (9, 5), (20, 17))]


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("qwen2")


def logprobs(base: Path, **settings: object) -> torch.Tensor:
    """Of the first sampled token of each prompt: nothing has diverged yet."""
    with LLM(str(base), max_model_len=128, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return torch.tensor([next(iter(o.outputs[0].logprobs[0].values())).logprob for o in outputs])


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0), ("float16", 1e-3), ("bfloat16", 1e-2), ("int8", 2e-2)])
def test_results_move_by_one_rounding(base: Path, backend: str, dtype: str, allowed: float) -> None:
    exact = logprobs(base, lora_backend=backend)
    got = logprobs(base, lora_backend=backend, kv_cache_dtype=dtype)
    assert (got - exact).abs().max() <= allowed
    assert torch.equal(got, exact) is (allowed == 0)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_another_cache_than_the_models(base: Path, backend: str, dtype: str, kv_cache_dtype: str) -> None:
    other = logprobs(base, lora_backend=backend, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert (other - logprobs(base, lora_backend=backend, dtype=dtype)).abs().max() <= 5e-2


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [("auto", "auto", "float32"), ("bfloat16", "auto", "bfloat16"), ("auto", "float16", "float16")],
)
def test_info_names_it_and_half_the_bytes_hold_twice_the_blocks(
    base: Path, dtype: str, kv_cache_dtype: str, expected: str
) -> None:
    settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 16, "kv_cache_memory_bytes": 1 << 16}
    with LLM(str(base), **settings) as llm, LLM(str(base), max_model_len=16, kv_cache_memory_bytes=1 << 16) as usual:
        assert llm.engine.info.kv_cache_dtype == expected
        times = 1 if expected == "float32" else 2
        assert llm.engine.info.num_kv_blocks == times * usual.engine.info.num_kv_blocks


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_the_demo_answers_as_before(dtype: str) -> None:
    with LLM(base_path(), kv_cache_dtype=dtype) as llm:
        answers = ask(llm, questions(each=2, seed=0))
    assert [a.text for a in answers if not a.is_right] == []
