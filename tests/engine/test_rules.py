"""The rules of adapters in use, each one test or a few named after it, on a whole engine in this process.

Rule 2 (all loads of one adapter are one load) is the registry's and the memory's: tests/adapters/test_registry_concurrency.py,
tests/memory/test_loads.py. Rule 11 is checked after every test here: whatever was taken has returned.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from loraplex import LoRAConfig
from loraplex.adapters.registry import LoadStatus
from loraplex.core import RequestOutput, SamplingParams
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    AdapterUnavailableError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
)
from tests.engine.driver import Driver
from tests.fixtures import TARGET_MODULES, GreedyCase, ModelZoo

LENGTH = 20
NUM_TOKENS = 16
NAMES = ("one", "two", "three", "four")
OpenDriver = Callable[..., Driver]


@dataclass(frozen=True)
class Bench:
    """A base model, four adapters of one size, and what base and adapters say to two prompts each."""

    base: Path
    adapters: dict[str, Path]
    cases: dict[str | None, list[GreedyCase]]
    oracle_tokens: Callable[[Path | None, Sequence[int]], tuple[int, ...]]


@pytest.fixture(scope="module")
def bench(zoo: ModelZoo) -> Bench:
    base = zoo.base("llama")
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    adapters = {name: zoo.adapter(base, config, seed=40 + index) for index, name in enumerate(NAMES)}
    cases: dict[str | None, list[GreedyCase]] = {
        name: zoo.fit_cases(base, adapters.get(name or ""), count=2, length=LENGTH) for name in (None, *NAMES)
    }

    def oracle_tokens(adapter: Path | None, prompt: Sequence[int]) -> tuple[int, ...]:
        case = zoo.oracle(base, adapter).greedy(prompt, NUM_TOKENS)
        assert case.min_gap >= 1e-3, "this prompt is too near a tie to judge by"
        return case.output_token_ids

    return Bench(base, adapters, cases, oracle_tokens)


@pytest.fixture
def open_driver(bench: Bench) -> Iterator[OpenDriver]:
    """Makes engines; after the test, rule 11 holds in all of them."""
    drivers: list[Driver] = []

    def make(lora: LoRAConfig | None = None, **settings: Any) -> Driver:
        drivers.append(Driver(bench.base, lora, **{"max_model_len": 128, **settings}))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.check_idle()
        driver.close()


@pytest.fixture
def driver(open_driver: OpenDriver, bench: Bench) -> Driver:
    """An engine with room for everything and the four adapters loaded."""
    driver = open_driver()
    for name, path in bench.adapters.items():
        driver.registry.load(name, str(path))
    return driver


def submit(driver: Driver, bench: Bench, name: str | None, which: int = 0, num_tokens: int = NUM_TOKENS) -> str:
    return driver.submit(bench.cases[name][which].prompt_token_ids, name, max_tokens=num_tokens)


def expect(driver: Driver, bench: Bench, request_id: str, name: str | None, which: int = 0) -> None:
    """The request has said what the oracle says."""
    said = driver.tokens(request_id)
    assert said == bench.cases[name][which].output_token_ids[: len(said)]
    assert len(said) == driver.outputs[request_id].outputs[0].token_ids.__len__() > 0


def room_for(driver: Driver, num_adapters: int) -> int:
    """Device bytes for so many of the four adapters, as an engine that holds them counts."""
    sizes = {info.nbytes for info in driver.registry.list_adapters()}
    assert len(sizes) == 1
    return num_adapters * sizes.pop()


def edited(source: Path, target: Path, factor: float) -> Path:
    """The adapter with every B times `factor`: the same shapes, other weights."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    file = target / "adapter_model.safetensors"
    tensors = {key: t * factor if "lora_B" in key else t for key, t in load_file(file).items()}
    save_file(tensors, file)
    return target
