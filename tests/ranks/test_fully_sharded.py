"""A and B of adapters cut over all ranks: what plain sharding and transformers + peft say, with less memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from loraplex.config import LoRAConfig
from loraplex.core import AdapterMix
from loraplex.errors import ConfigError
from tests.engine.driver import Driver
from tests.fixtures import KIND_OPTIONS, ModelZoo
from tests.ranks.engines import LORA, Asked, adapter_of, answers, check, driver_of, kind_of, load, opened

FULLY = replace(LORA, fully_sharded_loras=True)
ADAPTERS = ("all linears", "patterns", "lora_bias", "bias all")


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    """Whose linears all have biases."""
    return zoo.base("llama", options={"attention_bias": True, "mlp_bias": True})


@pytest.fixture(scope="module")
def adapters(zoo: ModelZoo, base: Path) -> dict[str, Path]:
    adapters = {name: adapter_of(zoo, base, name) for name in ADAPTERS}
    odd = LoraConfig(r=5, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return {**adapters, **{kind: kind_of(zoo, base, kind) for kind in KIND_OPTIONS}, "odd": zoo.adapter(base, odd)}


@pytest.fixture(scope="module")
def two_ranks(base: Path, adapters: dict[str, Path]) -> Iterator[Driver]:
    driver = driver_of(base, 2, FULLY)
    load(driver, adapters)
    yield driver
    driver.close()


def test_it_says_what_transformers_and_peft_say(
    zoo: ModelZoo, base: Path, adapters: dict[str, Path], two_ranks: Driver
) -> None:
    cases = [(name, zoo.fit_case(base, path)) for name, path in adapters.items()]
    check(two_ranks, [(None, zoo.fit_case(base)), *cases])


def prompt_logprobs(driver: Driver, asks: Sequence[Asked]) -> list[float]:
    ids = [driver.submit(each.prompt, each.name, max_tokens=1, prompt_logprobs=0) for each in asks]
    driver.finish()
    scored = [each for request_id in ids for each in driver.outputs[request_id].prompt_logprobs or () if each]
    return [logprob.logprob for each in scored for logprob in each.values()]


def nbytes_of(driver: Driver, name: str) -> int:
    adapter_id = driver.registry.resolve(name).adapter_id
    return next(each.nbytes for each in driver.engine.adapters.list_adapters() if each.adapter_id == adapter_id)


def test_sharded_and_fully_sharded_are_equal_but_for_rounding_and_the_bytes(
    base: Path, adapters: dict[str, Path], two_ranks: Driver
) -> None:
    """Also mixes, whose segments share rows."""
    mix = AdapterMix((("all linears", 0.75), ("DoRA", 1.0), ("odd", -0.5)))
    asks = [*(Asked(name, 25) for name in adapters), Asked(mix, 30)]
    with opened(base, 2) as driver:
        load(driver, adapters)
        expected, said = prompt_logprobs(driver, asks), answers(driver, asks)
        whole = {name: nbytes_of(driver, name) for name in adapters}
    assert prompt_logprobs(two_ranks, asks) == pytest.approx(expected, abs=1e-4)
    assert answers(two_ranks, asks) == said
    assert nbytes_of(two_ranks, "all linears") < 0.8 * whole["all linears"]
    assert nbytes_of(two_ranks, "IA3") == whole["IA3"]


@pytest.mark.ranks
def test_four_ranks_in_chunks_with_adapters_from_the_disk(
    zoo: ModelZoo, base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A rank that four cannot share, two kv heads on four ranks, and what an earlier engine has packed."""
    lora = LoRAConfig(disk_cache_dir=str(tmp_path), max_loras=3, max_cpu_loras=3, fully_sharded_loras=True)
    names = ("all linears", "odd", "DoRA", "lora_bias", "VeRA")
    for _ in range(2):
        with opened(base, 4, lora, max_num_batched_tokens=16, max_num_seqs=8) as driver:
            load(driver, {name: adapters[name] for name in names})
            check(driver, [(name, zoo.fit_case(base, adapters[name])) for name in names], 16)
            from_disk = driver.stats.memory.found["disk"]
    assert from_disk > 0


def test_it_needs_several_ranks_whose_kernels_can_exchange(base: Path) -> None:
    with pytest.raises(ConfigError, match="fully_sharded_loras needs a tensor_parallel_size of 2 or more"):
        driver_of(base, 1, FULLY)
    with pytest.raises(ConfigError, match="fully_sharded_loras needs native kernels; this engine has stock torch"):
        driver_of(base, 2, FULLY, lora_backend="torch")
