"""Adapters at the ends of the vocabulary, which ranks share: tokens are those of transformers, logits those of one
rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_own_weights import Family, check, make_family, started
from tests.fixtures import VOCAB_SIZE, ModelZoo
from tests.ranks.engines import Asked, answers, load, opened

RANKS = {"tensor_parallel_size": 2, "num_threads": 1}
AT_ENDS = ("LoRA of both", "saved embedding and head", "trained tokens apart", "added tokens, LoRA of both")


@pytest.fixture(scope="module")
def tied(zoo: ModelZoo) -> Family:
    return make_family(zoo, "llama")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_rows_and_lora_of_embedding_and_head_and_added_tokens(tied: Family, backend: str) -> None:
    """All in one batch, then from the prefix cache."""
    with started(tied, lora_backend=backend, **RANKS) as llm:
        check(llm.engine, tied)
        check(llm.engine, tied)
        assert llm.stats().num_prefix_hit_tokens > 0


@pytest.mark.ranks
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 4}, {"look_ahead": True}, {"dtype": "float32"}], ids=str)
def test_a_head_of_its_own_on_four_ranks_a_step_ahead_and_in_chunks(zoo: ModelZoo, settings: dict[str, Any]) -> None:
    family = make_family(zoo, "qwen2")
    with started(family, max_num_batched_tokens=11, max_num_seqs=7, **{**RANKS, **settings}) as llm:
        check(llm.engine, family)
        for name in family.cases:
            check(llm.engine, family, name)


@pytest.mark.ranks
def test_they_come_back_from_the_disk(tied: Family, tmp_path: Path) -> None:
    with started(tied, **RANKS) as llm:
        room = int(2.2 * max(each.nbytes for each in llm.engine.adapters.list_adapters()))
    memory = {"adapter_memory_bytes": room, "host_memory_bytes": 3 * room // 2, "aging_steps": 8}
    with started(tied, **memory, disk_cache_dir=str(tmp_path / "disk"), **RANKS) as llm:
        check(llm.engine, tied)
        check(llm.engine, tied)
        assert llm.stats().memory.found["disk"] > 0


def test_rows_are_on_the_rank_of_their_token(zoo: ModelZoo) -> None:
    """Together they take hardly more than with one rank; what is on all ranks is the narrow part of LoRA alone."""
    base, nbytes = zoo.base("qwen2"), {}
    adapters = {name: zoo.own_adapter(base, name) for name in AT_ENDS}
    for size in (1, 2):
        with opened(base, size) as driver:
            load(driver, adapters)
            listed = {each.adapter_id: each.nbytes for each in driver.engine.adapters.list_adapters()}
            nbytes[size] = {name: listed[driver.registry.resolve(name).adapter_id] for name in adapters}
    assert all(nbytes[2][name] < 1.1 * nbytes[1][name] for name in AT_ENDS[:3]), nbytes


def test_logprobs_of_prompts_through_adapters_of_the_head(zoo: ModelZoo) -> None:
    """Which are asked for beside those that follow a step; an adapter's added tokens are in the prompt."""
    base, seen = zoo.base("mistral"), []
    adapters = {name: zoo.own_adapter(base, name) for name in AT_ENDS}
    for size in (1, 2):
        with opened(base, size) as driver:
            load(driver, adapters)
            added = (4, (VOCAB_SIZE + 3, VOCAB_SIZE + 199))
            asks = [Asked(name, at=added if name in AT_ENDS[3:] else (0, ())) for name in AT_ENDS]
            ids = [driver.submit(each.prompt, each.name, max_tokens=1, prompt_logprobs=0) for each in asks]
            driver.finish()
            scored = [each for one in ids for each in driver.outputs[one].prompt_logprobs or () if each is not None]
            seen.append([each.logprob for position in scored for each in position.values()])
            assert answers(driver, [Asked(None)]), "a base row beside them"
    assert len(seen[0]) == sum(each.length - 1 for each in asks)
    assert seen[1] == pytest.approx(seen[0], abs=1e-3)
