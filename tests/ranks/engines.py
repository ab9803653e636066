"""Engines of several ranks, and requests whose tokens are compared: with an oracle's, or with those of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.config import LoRAConfig
from loraplex.core import AdapterChoice
from tests.engine.driver import Driver
from tests.fixtures import ADAPTER_OPTIONS, KIND_OPTIONS, VOCAB_SIZE, GreedyCase, ModelZoo

NUM_TOKENS = 64
LORA = LoRAConfig(disk_memory_bytes=0, adapter_memory_bytes=16 << 20, host_memory_bytes=16 << 20)
SETTINGS = {"num_threads": 1, "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "packed_cache_dir": "none"}


def driver_of(base: Path, size: int, lora: LoRAConfig = LORA, **settings: object) -> Driver:
    return Driver(base, lora, **{**SETTINGS, "tensor_parallel_size": size, **settings})


@contextmanager
def opened(base: Path, size: int, lora: LoRAConfig = LORA, **settings: object) -> Iterator[Driver]:
    driver = driver_of(base, size, lora, **settings)
    try:
        yield driver
    finally:
        driver.close()


def adapter_of(zoo: ModelZoo, base: Path, field: str) -> Path:
    from peft import LoraConfig

    return zoo.adapter(base, LoraConfig(**ADAPTER_OPTIONS[field], task_type="CAUSAL_LM"))


def kind_of(zoo: ModelZoo, base: Path, kind: str) -> Path:
    import peft

    config_class, options = KIND_OPTIONS[kind]
    return zoo.adapter(base, getattr(peft, config_class)(**options, task_type="CAUSAL_LM"))


def check(driver: Driver, cases: Sequence[tuple[str | None, GreedyCase]], max_tokens: int = NUM_TOKENS) -> None:
    """All in one batch say what the oracle says."""
    ids = [driver.submit(case.prompt_token_ids, name, max_tokens=max_tokens) for name, case in cases]
    driver.finish()
    for request_id, (_, case) in zip(ids, cases, strict=True):
        assert driver.tokens(request_id) == tuple(case.output_token_ids)[:max_tokens]
    driver.check_idle()


@dataclass(frozen=True)
class Asked:
    """A request; its prompt is drawn by `shift`, and `at` has tokens in it that mean something."""

    name: AdapterChoice
    length: int = 20
    num_tokens: int = 16
    shift: int = 0
    at: tuple[int, tuple[int, ...]] = (0, ())

    @property
    def prompt(self) -> list[int]:
        prompt = [3 + (self.shift * 977 + 7919 * index) % (VOCAB_SIZE - 3) for index in range(self.length)]
        start, tokens = self.at
        prompt[start : start + len(tokens)] = tokens
        return prompt


def load(driver: Driver, adapters: Mapping[str, Path]) -> None:
    for name, path in adapters.items():
        driver.registry.load(name, str(path))


def answers(driver: Driver, asks: Iterable[Asked], **params: Any) -> list[tuple[int, ...]]:
    """What they say in one batch."""
    ids = [driver.submit(each.prompt, each.name, max_tokens=each.num_tokens, **params) for each in asks]
    driver.finish()
    driver.check_idle()
    return [driver.tokens(each) for each in ids]
