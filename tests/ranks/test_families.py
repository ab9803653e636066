"""The families that are data alone, of two ranks; and those that are refused with several."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.errors import ModelConfigError
from tests.fixtures import MORE_FAMILIES, GreedyCase, ModelZoo
from tests.ranks.engines import check, driver_of

REFUSED = {"glm4": "fused in the checkpoint", "olmo2": "norms over all heads", "phi3": "fused in the checkpoint"}
SHARED = tuple(family for family in MORE_FAMILIES if family not in REFUSED)
OPTIONS = {
    "all linears": ("LoraConfig", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}),
    "DoRA": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True}),
    "both ends": ("LoraConfig", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head"]}),
}


def adapter_of(zoo: ModelZoo, base: Path, name: str) -> Path:
    import peft

    kind, options = OPTIONS[name]
    return zoo.adapter(base, getattr(peft, kind)(**options, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "gemma2" else pytest.mark.ranks) for each in SHARED]
)
def test_two_ranks_say_what_transformers_and_peft_say(zoo: ModelZoo, family: str) -> None:
    base = zoo.base(family)
    cases: list[tuple[str | None, GreedyCase]] = [(None, zoo.fit_case(base, length=40))]
    cases += [(name, zoo.fit_case(base, adapter_of(zoo, base, name), length=17)) for name in OPTIONS]
    driver = driver_of(base, 2)
    try:
        for name in OPTIONS:
            driver.registry.load(name, str(adapter_of(zoo, base, name)))
        check(driver, cases)
    finally:
        driver.close()


@pytest.mark.parametrize(("family", "reason"), REFUSED.items())
def test_several_ranks_are_refused_with_the_reason(zoo: ModelZoo, family: str, reason: str) -> None:
    with pytest.raises(ModelConfigError, match=f"a model of {family} has .*{reason}: set tensor_parallel_size to 1"):
        driver_of(zoo.base(family), 2)
