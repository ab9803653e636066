"""Kinds of adapters beyond LoRA, over ranks that have a share of each: the tokens of transformers + peft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from peft import BdLoraConfig, LoraConfig

from loraplex.core import AdapterMix
from tests.engine.driver import Driver
from tests.fixtures import KIND_OPTIONS, TARGET_MODULES, ModelZoo
from tests.ranks.engines import LORA, Asked, adapter_of, answers, check, driver_of, kind_of, load, opened

pytestmark = pytest.mark.slow

BIASES = ("bias all", "bias lora_only", "lora_bias")
OWN = ("saved norms", "saved linears", "a saved MLP", "LN tuning")


def adapters_of(zoo: ModelZoo, base: Path) -> dict[str, Path]:
    adapters = {name: kind_of(zoo, base, name) for name in KIND_OPTIONS}
    adapters |= {name: adapter_of(zoo, base, name) for name in BIASES}
    return adapters | {name: zoo.own_adapter(base, name) for name in OWN}


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    """Whose linears all have biases: those behind row-parallel ones belong to rank 0."""
    return zoo.base("llama", options={"attention_bias": True, "mlp_bias": True})


@pytest.fixture(scope="module")
def two_ranks(zoo: ModelZoo, base: Path) -> Iterator[Driver]:
    driver = driver_of(base, 2)
    load(driver, adapters_of(zoo, base))
    yield driver
    driver.close()


def test_kinds_biases_norms_and_linears_of_ones_own(zoo: ModelZoo, base: Path, two_ranks: Driver) -> None:
    cases = [(name, zoo.fit_case(base, path)) for name, path in adapters_of(zoo, base).items()]
    check(two_ranks, [(None, zoo.fit_case(base)), *cases])


def test_mixes_with_dora_say_what_one_rank_says(zoo: ModelZoo, base: Path, two_ranks: Driver) -> None:
    adapters = {"plain": adapter_of(zoo, base, "all linears"), **adapters_of(zoo, base)}
    load(two_ranks, {"plain": adapters["plain"]})
    asks = [Asked(AdapterMix((("plain", 0.75), ("DoRA", 1.0)))), Asked(AdapterMix((("DoRA", 1.0), ("plain", 0.75))))]
    with opened(base, 1) as driver:
        load(driver, {name: adapters[name] for name in ("plain", "DoRA")})
        expected = answers(driver, asks)
    assert expected[0] != expected[1]
    assert answers(two_ranks, asks) == expected


def test_dora_of_random_weights_and_norms_per_head(zoo: ModelZoo) -> None:
    """Whole rows are made again from the seed; q and k have norms of their own."""
    base = zoo.base("qwen3")
    adapters = {"DoRA": kind_of(zoo, base, "DoRA"), "norms": zoo.own_adapter(base, "saved norms")}
    said = []
    for size in (1, 2):
        with opened(base, size, load_format="dummy", seed=5) as driver:
            load(driver, adapters)
            said.append(answers(driver, [Asked(name, num_tokens=8) for name in adapters]))
    assert said[1] == said[0]


@pytest.mark.parametrize(
    ("size", "is_full", "num_exchanged"),
    [(1, False, 0), (2, False, 0), (2, True, 0), pytest.param(4, True, 10, marks=pytest.mark.ranks)],
)
def test_block_diagonal_lora_exchanges_nothing_where_ranks_match_its_blocks(
    zoo: ModelZoo, base: Path, size: int, is_full: bool, num_exchanged: int
) -> None:
    """Beside a plain LoRA, which does in a fully sharded engine. Two blocks match two kv heads on four ranks, too."""
    blocks = BdLoraConfig(["o_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], nblocks=2)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGET_MODULES), use_bdlora=blocks)
    adapters = {"blocks": zoo.adapter(base, config), "plain": adapter_of(zoo, base, "all linears")}
    cases = [(name, zoo.fit_case(base, path)) for name, path in adapters.items()]
    with opened(base, size, replace(LORA, fully_sharded_loras=is_full)) as driver:
        table, counts = driver.engine.adapters.table, []
        for case in cases:
            load(driver, {case[0]: adapters[case[0]]})
            check(driver, [case])
            layouts = [each for placed in table._placed for block in placed.values() for each in block.layouts]
            counts.append(sum(each is not None and each.is_exchanged for each in layouts))
        check(driver, cases)
    assert counts == [num_exchanged, num_exchanged + 14 * is_full]
