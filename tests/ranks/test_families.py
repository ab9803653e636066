"""The families that are data alone, over ranks that have a share of each: the tokens of transformers + peft in float32.

Two fuse linears in the checkpoint, of which a rank has a part of each (phi3, glm4), and two have norms over all heads
(olmo2 and, in test_experts.py, olmoe).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.test_family_parity import adapter_options
from tests.fixtures import MORE_FAMILIES, GreedyCase, ModelZoo
from tests.ranks.engines import LORA, check, load, opened

NUM_TOKENS = 24
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 16}
CUT_BY_PARTS = ("phi3", "glm4", "olmo2")
FAMILIES = [
    pytest.param(each, marks=[] if each == "phi3" else pytest.mark.slow if each == "olmo2" else pytest.mark.ranks)
    for each in MORE_FAMILIES
]

pytestmark = pytest.mark.timeout(1800)

Cases = list[tuple[str | None, GreedyCase]]


def cases_of(zoo: ModelZoo, family: str) -> tuple[Path, Mapping[str, Path], Cases]:
    """The model, an adapter of each kind that meets what is the family's own, and what each says."""
    import peft

    base = zoo.base(family)
    adapters = {
        name: zoo.adapter(base, getattr(peft, kind)(**options, task_type="CAUSAL_LM"))
        for name, (kind, options) in adapter_options(family).items()
    }
    cases: Cases = [(None, zoo.fit_case(base, length=40))]
    for index, (name, path) in enumerate(adapters.items()):
        cases.append((name, zoo.fit_case(base, path, length=(12, 33, 20)[index % 3])))
    return base, adapters, cases


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_transformers_and_peft_say(zoo: ModelZoo, family: str) -> None:
    base, adapters, cases = cases_of(zoo, family)
    with opened(base, 2) as driver:
        load(driver, adapters)
        check(driver, cases)
        assert all(each.startswith("layers: adapters have norms") for each in driver.stats.kernel_fallbacks)


@pytest.mark.ranks
@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "fully sharded"])
@pytest.mark.parametrize(
    ("family", "size"), [*((each, 2) for each in CUT_BY_PARTS), *((each, 4) for each in MORE_FAMILIES)]
)
def test_in_chunks_from_the_prefix_cache_and_after_a_reload(
    zoo: ModelZoo, family: str, size: int, is_full: bool
) -> None:
    base, adapters, cases = cases_of(zoo, family)
    with opened(base, size, replace(LORA, fully_sharded_loras=is_full), **CHUNKS) as driver:
        load(driver, adapters)
        check(driver, cases, NUM_TOKENS)
        hits = driver.stats.num_prefix_hit_tokens
        check(driver, cases, NUM_TOKENS)
        assert driver.stats.num_prefix_hit_tokens > hits
        for name, case in cases[1:]:
            assert name is not None
            driver.registry.load("one name", str(adapters[name]), load_inplace=True)
            check(driver, [("one name", case), cases[0]], NUM_TOKENS)


@pytest.mark.ranks
@pytest.mark.parametrize("family", CUT_BY_PARTS)
def test_without_native_kernels(zoo: ModelZoo, family: str) -> None:
    base, adapters, cases = cases_of(zoo, family)
    with opened(base, 2, lora_backend="torch") as driver:
        load(driver, adapters)
        check(driver, cases, NUM_TOKENS)
