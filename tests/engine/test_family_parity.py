"""The families that are data alone (models/families.py), whole: token-identical to transformers + peft over 64 tokens.

test_parity.py has every field of PEFT on four families; here each further family has the base and one adapter of each
kind that meets what is its own: fused linears, norms that are stored less one, scales at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from loraplex.adapters.merging.dominance import DominanceRule
from loraplex.models import dominant
from loraplex.models.config import ModelConfig
from tests.engine.test_dominant import WINDOW, Served
from tests.engine.test_parity import BLOCK_SIZE, PROMPT_LENGTHS, FamilyCases, ParityCase, generate, start
from tests.fixtures import MORE_FAMILIES, NUM_TOKENS, ModelZoo, some_of

BACKENDS = ("native", "torch")
LAST = {"starcoder2": "c_proj"}


def adapter_options(family: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Class of PEFT's configuration and its arguments, for each kind."""
    last = LAST.get(family, "down_proj")
    return {
        "all linears": ("LoraConfig", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
        "attention": (
            "LoraConfig",
            {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": r".*\.1\.self_attn\.\w+_proj"},
        ),
        "DoRA": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True}),
        "IA3": ("IA3Config", {"target_modules": ["o_proj", last], "feedforward_modules": [last]}),
        "LoRA of both ends": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head"]}),
        "saved embedding": (
            "LoraConfig",
            {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        ),
    } | ({} if family == "starcoder2" else {"norms": ("LNTuningConfig", {"target_modules": r".*norm"})})


@pytest.fixture(scope="module", params=some_of(MORE_FAMILIES, 3))
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> FamilyCases:
    import peft

    base = zoo.base(request.param)
    cases = [ParityCase("base", greedy) for greedy in zoo.fit_cases(base, count=2, length=PROMPT_LENGTHS[1])]
    for index, (name, (kind, options)) in enumerate(adapter_options(request.param).items()):
        path = zoo.adapter(base, getattr(peft, kind)(**options, task_type="CAUSAL_LM"))
        greedy = zoo.fit_case(base, path, length=PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)])
        cases.append(ParityCase(name, greedy, path, index + 1))
    config = ModelConfig.from_dir(base)
    kv_block_bytes = 4 * 2 * BLOCK_SIZE * config.head_dim * config.num_key_value_heads * config.num_hidden_layers
    return FamilyCases(base, tuple(cases), kv_block_bytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_one_mixed_batch_and_again_from_the_prefix_cache(family: FamilyCases, backend: str) -> None:
    captured = [case for case in family.cases if case.field != "norms"]
    with start(family, lora_backend=backend, num_threads=1) as llm:
        generate(llm, captured)
        assert llm.stats().step_times.num_steps <= NUM_TOKENS + 1, "the batch was not one batch"
        for case, output in zip(captured, generate(llm, captured), strict=True):
            assert output.num_cached_tokens == (len(case.greedy.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert not llm.stats().kernel_fallbacks or backend == "torch"
        generate(llm, family.cases)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_chunks_and_preempted(family: FamilyCases, backend: str) -> None:
    num_blocks = 4 * len(family.cases)
    settings = {"max_num_batched_tokens": 11, "max_num_seqs": 7, "num_threads": 1, "lora_backend": backend}
    with start(family, kv_cache_memory_bytes=num_blocks * family.kv_block_bytes, **settings) as llm:
        generate(llm, family.cases)
        assert llm.stats().num_preemptions > 0


IN_LAYERS = ("all linears", "attention", "DoRA", "IA3", "norms")
"""What a merged copy of the layers has as a whole."""


def test_the_dominant_adapter_is_merged(family: FamilyCases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dominant, "DominanceRule", lambda: DominanceRule(window=WINDOW, bytes_per_s=float("inf")))
    monkeypatch.setattr(dominant, "MIN_GAIN", 0.0)
    cases = [case for case in family.cases if case.field in IN_LAYERS]
    with Served(family.base) as served:
        for case in cases:
            assert case.adapter is not None
            served.load(case.field, case.adapter)
            for _ in range(3):
                said = served.say(case.greedy.prompt_token_ids, case.field, max_tokens=NUM_TOKENS)
                assert said == case.greedy.output_token_ids, case.field
                served.wait()
            assert served.merged == case.field


def test_an_adapter_is_merged_into_the_weights_at_load(family: FamilyCases) -> None:
    for case in family.cases:
        if case.field in IN_LAYERS:
            with start(family, enable_lora=False, merge_adapter=str(case.adapter)) as llm:
                generate(llm, [ParityCase(case.field, case.greedy)])
