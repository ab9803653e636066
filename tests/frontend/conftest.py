"""A small base model and two adapters of it, for tests of the offline LLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from loraplex import LoRARequest
from tests.fixtures import TARGET_MODULES, ModelZoo


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama")


@pytest.fixture(scope="module")
def one(zoo: ModelZoo, base: Path) -> LoRARequest:
    return adapter_of(zoo, base, 1, seed=60)


@pytest.fixture(scope="module")
def two(zoo: ModelZoo, base: Path) -> LoRARequest:
    return adapter_of(zoo, base, 2, seed=61)


def adapter_of(zoo: ModelZoo, base: Path, number: int, seed: int) -> LoRARequest:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    return LoRARequest(f"adapter{number}", number, str(zoo.adapter(base, config, seed=seed)))
