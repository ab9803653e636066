"""The offline LLM over ranks: what one rank says; a rank that ends is an error of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from loraplex.core import LoRARequest, SamplingParams
from loraplex.errors import DeviceLostError
from loraplex.frontend.llm import LLM
from tests.fixtures import ModelZoo
from tests.ranks.engines import NUM_TOKENS, adapter_of
from tests.ranks.test_lost_rank import followers

SETTINGS: dict[str, Any] = {"max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "num_threads": 1}


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("qwen2")


def test_it_generates_as_one_rank_does_and_ends_its_processes(zoo: ModelZoo, base: Path) -> None:
    adapter = adapter_of(zoo, base, "all linears")
    cases = [zoo.fit_case(base), zoo.fit_case(base, adapter)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(base), tensor_parallel_size=2, fully_sharded_loras=True, **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": case.prompt_token_ids} for case in cases]
        outputs = llm.generate(prompts, params, lora_request=[None, LoRARequest("sql", 1, str(adapter))])
        for output, case in zip(outputs, cases, strict=True):
            assert output.outputs[0].token_ids == tuple(case.output_token_ids)
        (follower,) = followers(None)
        llm.check_integrity()
    psutil.wait_procs([follower], timeout=10)
    assert not follower.is_running()


def test_a_rank_that_ends_is_an_error_of_the_call(base: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(str(base), tensor_parallel_size=2, **SETTINGS) as llm:
        (follower,) = followers(None)
        follower.kill()
        for _ in range(2):
            with pytest.raises(DeviceLostError, match="rank"):
                llm.generate({"prompt_token_ids": [7, 300, 41]}, params)
