"""Every family and kind over two and four ranks, against transformers + peft in float32: alone, in one batch with the
base model, in chunks, from the prefix cache and after a reload; fully sharded, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.driver import Driver
from tests.fixtures import ADAPTER_OPTIONS, FAMILIES, KIND_OPTIONS, OWN_OPTIONS, GreedyCase, ModelZoo
from tests.ranks.engines import LORA, adapter_of, check, kind_of, load, opened

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]  # the oracles of a family are made in its first test

NUM_TOKENS = 24
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 16}
RELOADED = ("LoRA of the head", "DoRA", "trained tokens", "saved linears", "added tokens", "all linears")


class Matrix:
    """The base model of a family and an adapter of each kind, with what each says."""

    def __init__(self, zoo: ModelZoo, family: str) -> None:
        self.base = base = zoo.base(family, options={"tie_word_embeddings": family != "qwen2"})
        self.adapters: Mapping[str, Path] = {
            **{name: adapter_of(zoo, base, name) for name in ADAPTER_OPTIONS},
            **{name: kind_of(zoo, base, name) for name in KIND_OPTIONS},
            **{name: zoo.own_adapter(base, name, seed=60 + index) for index, name in enumerate(OWN_OPTIONS)},
        }
        self.cases: Mapping[str | None, GreedyCase] = {None: zoo.fit_case(base, length=40, num_tokens=NUM_TOKENS)}
        for index, (name, path) in enumerate(self.adapters.items()):
            length = (12, 33, 20)[index % 3]
            self.cases = {**self.cases, name: zoo.fit_case(base, path, length=length, num_tokens=NUM_TOKENS)}

    def check(self, driver: Driver, *names: str | None) -> None:
        """What these say in one batch."""
        check(driver, [(name, self.cases[name]) for name in names or self.cases], NUM_TOKENS)


@pytest.fixture(scope="module", params=FAMILIES)
def matrix(request: pytest.FixtureRequest, zoo: ModelZoo) -> Matrix:
    return Matrix(zoo, request.param)


@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "fully sharded"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_kinds_in_one_batch(matrix: Matrix, size: int, is_full: bool) -> None:
    with opened(matrix.base, size, replace(LORA, fully_sharded_loras=is_full), **CHUNKS) as driver:
        load(driver, matrix.adapters)
        matrix.check(driver)
        hits = driver.stats.num_prefix_hit_tokens
        matrix.check(driver)
        assert driver.stats.num_prefix_hit_tokens > hits
        for name in RELOADED:
            driver.registry.load("one name", str(matrix.adapters[name]), load_inplace=True)
            check(driver, [("one name", matrix.cases[name]), (None, matrix.cases[None])], NUM_TOKENS)


def test_each_alone_over_two_ranks(matrix: Matrix) -> None:
    with opened(matrix.base, 2) as driver:
        load(driver, matrix.adapters)
        for name in matrix.cases:
            matrix.check(driver, name)
