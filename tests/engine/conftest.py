"""Engines stepped by hand over one base model with adapters of one size (rules_bench.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from loraplex import LoRAConfig
from tests.engine.driver import Driver, packed_nbytes
from tests.engine.rules_bench import MAX_MODEL_LEN, NAMES, PROMPT_LENGTH, Bench, OpenDriver, loaded
from tests.fixtures import TARGET_MODULES, ModelZoo


@pytest.fixture(scope="package")
def bench(zoo: ModelZoo) -> Bench:
    base = zoo.base("llama")
    from peft import LoraConfig

    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    paths = [zoo.adapter(base, config, seed=40 + index) for index in range(len(NAMES) + 2)]
    cases = {path: zoo.fit_cases(base, path, count=2, length=PROMPT_LENGTH) for path in (None, *paths)}
    adapters = dict(zip(NAMES, paths, strict=False))
    return Bench(base, adapters, (paths[-2], paths[-1]), cases, packed_nbytes(base, paths[0]))


@pytest.fixture
def open_driver(bench: Bench) -> Iterator[OpenDriver]:
    """Makes engines; after the test, rule 11 holds in all of them."""
    drivers: list[Driver] = []

    def make(*, is_lora_on: bool = True, lora: Mapping[str, Any] | None = None, **settings: Any) -> Driver:
        config = LoRAConfig(**(lora or {}))
        settings = {"max_model_len": MAX_MODEL_LEN, **settings}
        drivers.append(Driver(bench.base, config, is_lora_on=is_lora_on, **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.check_idle()
        driver.close()


@pytest.fixture
def driver(open_driver: OpenDriver, bench: Bench) -> Driver:
    """An engine with room for everything, and the four adapters loaded."""
    return loaded(open_driver(), bench)
