"""What an engine does beside plain steps, over two ranks: the tokens are those of one rank."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from loraplex.config import LoRAConfig
from loraplex.core import AdapterId
from loraplex.engine import memory_plan
from loraplex.errors import AdapterFaultError, EngineError
from loraplex.events import EventKind
from loraplex.memory.space.arena import Owner
from tests.engine.driver import Driver
from tests.engine.prophet import Prophet
from tests.engine.test_maintenance import is_well, kinds, poison, settle
from tests.fixtures import TARGET_MODULES, ModelZoo
from tests.ranks.engines import LORA, Asked, adapter_of, answers, driver_of, kind_of, load, opened

POSITIONS, FACTOR = 64, 4.0
INVOCATION = (71, 72, 71)
LONG = replace(LORA, long_lora_scaling_factors=(FACTOR,))
SETTINGS: dict[str, Any] = {"max_model_len": None, "block_size": 16}
ASKS = (
    Asked(None),
    Asked("plain", 40),
    Asked("plain", 40),
    Asked("long", 150),
    Asked("long", 100, shift=1),
    Asked("activated", 43, at=(22, INVOCATION)),
    Asked("activated", 43, shift=2, at=(32, INVOCATION)),
    Asked("activated", 30, shift=3),
    Asked("gains", 30, shift=4),
    Asked(None, 43, at=(22, INVOCATION)),
)
OF_THE_BASE = tuple(Asked(None, 44, shift=10 + index) for index in range(8))


@dataclass(frozen=True)
class Served:
    """A base, its adapters, and what one rank says to each."""

    base: Path
    adapters: dict[str, Path]
    answers: Mapping[Asked, tuple[int, ...]]


@pytest.fixture(scope="module")
def served(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Served:
    base = zoo.base("llama", options={"max_position_embeddings": POSITIONS})
    targets = list(TARGET_MODULES)
    plain = adapter_of(zoo, base, "all linears")
    long = shutil.copytree(plain, tmp_path_factory.mktemp("long") / "adapter")
    file = long / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "context_length": int(POSITIONS * FACTOR)}))
    activated = LoraConfig(
        r=8, lora_alpha=16, target_modules=targets, alora_invocation_tokens=list(INVOCATION), task_type="CAUSAL_LM"
    )
    adapters = {"plain": plain, "long": long, "activated": zoo.adapter(base, activated, seed=70)}
    adapters["gains"] = kind_of(zoo, base, "IA3")
    with opened(base, 1, LONG, **SETTINGS) as driver:
        load(driver, adapters)
        asks = {*ASKS, *OF_THE_BASE}
        expected = dict(zip(asks, answers(driver, asks), strict=True))
    assert len(set(expected.values())) == len(asks), "each says something else"
    return Served(base, adapters, expected)


@pytest.fixture(scope="module")
def two_ranks(served: Served) -> Iterator[Driver]:
    driver = driver_of(served.base, 2, LONG, **SETTINGS)
    load(driver, served.adapters)
    yield driver
    driver.close()


def test_activated_and_longer_adapters_beside_others_and_again_from_the_prefix_cache(
    served: Served, two_ranks: Driver
) -> None:
    hits = 0
    for asks in (ASKS, ASKS[::-1]):
        hits = two_ranks.stats.num_prefix_hit_tokens
        assert answers(two_ranks, asks) == [served.answers[each] for each in asks]
    assert two_ranks.stats.num_prefix_hit_tokens - hits > 300


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_drafts_through_activated_and_longer_adapters(
    served: Served, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(*asked.prompt, *said) for asked, said in served.answers.items()]
    Prophet(texts, seed=1).drafts_for_all(monkeypatch)
    with opened(served.base, size, LONG, speculative="n-gram", **SETTINGS) as driver:
        load(driver, served.adapters)
        for asks in (ASKS, OF_THE_BASE, ASKS[::-1]):
            assert answers(driver, asks) == [served.answers[each] for each in asks]
        stats = driver.stats
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 50


@pytest.mark.ranks
def test_memory_that_is_too_little_with_steps_launched_ahead(
    served: Served, two_ranks: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts, preemption, evictions, KV cache and adapters that lend each other memory; what is free holds
    NaN."""
    block_bytes = two_ranks.engine._runner.kv_block_bytes
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 4 * block_bytes)
    floor = max(each.nbytes for each in two_ranks.engine.adapters.list_adapters())
    lora = LoRAConfig(disk_memory_bytes=0, adapter_floor=floor, aging_steps=8, long_lora_scaling_factors=(FACTOR,))
    driver = Driver(
        served.base,
        lora,
        tensor_parallel_size=2,
        num_threads=1,
        device_memory=2 * floor + 24 * block_bytes,
        look_ahead=True,
        max_num_batched_tokens=40,
        max_num_seqs=6,
        packed_cache_dir="none",
    )
    try:
        driver.engine._runner._kv.fill_(math.nan)  # all of the arena
        load(driver, served.adapters)
        arena, shares = driver.engine.adapters._residency.tiers.host.pool.arena, set()
        for asks in (ASKS, OF_THE_BASE, ASKS[::-1]):
            ids = [driver.submit(each.prompt, each.name, max_tokens=each.num_tokens) for each in asks]
            while driver.engine.has_unfinished:
                driver.advance()
                shares.add((arena.num_lent(Owner.KV), arena.num_lent(Owner.ADAPTERS)))
                if driver.engine.is_stalled and driver.engine.has_unfinished:
                    driver.engine.adapters.wait_for_change(0.05)
            assert [driver.tokens(each) for each in ids] == [served.answers[each] for each in asks]
            driver.check_idle()
        stats = driver.stats
        assert stats.num_preemptions > 0
        assert stats.memory.evictions["host_room"] > 0
        assert stats.memory.evictions["kv_pressure"] > 0
        assert len({kv for kv, _ in shares}) > 2
        assert len({adapters for _, adapters in shares}) > 1
    finally:
        driver.close()


@pytest.mark.ranks
def test_adapters_that_move_are_found_by_every_rank(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "CHUNK_BYTES", 1 << 17)
    with opened(served.base, 2, LONG, **SETTINGS) as driver:
        for name in ("plain", "gains", "long", "activated"):
            load(driver, {name: served.adapters[name]})
            answers(driver, [each for each in ASKS if each.name == name])
        while driver.engine.adapters.evict_adapter(AdapterId(driver.registry.resolve("plain").adapter_id)):
            pass
        assert driver.engine.adapters.compact(1 << 20, math.inf).num_moved > 0
        others = [each for each in ASKS if each.name != "plain"]
        assert answers(driver, others, cache_salt="new") == [served.answers[each] for each in others]


def test_an_adapter_whose_logits_are_not_finite_is_quarantined_and_read_again(
    served: Served, two_ranks: Driver
) -> None:
    """Those of the diagnostic prompt, too, which every rank runs."""
    driver = two_ranks
    driver.engine.take_events()
    ids = [driver.submit(each.prompt, each.name, max_tokens=each.num_tokens) for each in ASKS]
    driver.step(3)
    poison(driver, "plain")
    driver.finish()
    for request_id, asked in zip(ids, ASKS, strict=True):
        if asked.name == "plain":
            with pytest.raises((AdapterFaultError, EngineError), match=r"not finite|NaN"):
                driver.tokens(request_id)
        else:
            assert driver.tokens(request_id) == served.answers[asked]
    settle(driver, lambda: is_well(driver, "plain"))
    assert set(kinds(driver)) == {EventKind.FAULT, EventKind.RECOVERY}
    assert answers(driver, ASKS) == [served.answers[each] for each in ASKS]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        pytest.param("bfloat16", "auto", marks=pytest.mark.ranks),
        ("bfloat16", "torch"),
        pytest.param("float16", "torch", marks=pytest.mark.ranks),
    ],
)
def test_models_in_sixteen_bits(zoo: ModelZoo, dtype: str, backend: str) -> None:
    """Where activations have them, too, each rank's summand is rounded before it is added: logits differ by that."""
    base = zoo.base("qwen2", dtype=dtype)
    adapters = {name: adapter_of(zoo, zoo.base("qwen2"), name) for name in ("all linears", "lora_bias")}
    said, logprobs, kernels = [], [], ""
    for size in (1, 2):
        with opened(base, size, lora_backend=backend) as driver:
            load(driver, adapters)
            asks = [Asked(None, 30), Asked("all linears"), Asked("lora_bias", 25)]
            said.append(answers(driver, asks))
            ids = [driver.submit(each.prompt, each.name, max_tokens=1, prompt_logprobs=0) for each in asks]
            driver.finish()
            scored = [each for request_id in ids for each in driver.outputs[request_id].prompt_logprobs or () if each]
            logprobs.append([logprob.logprob for each in scored for logprob in each.values()])
            kernels = driver.engine.info.backend
    assert len(logprobs[0]) == 72
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4 if kernels == "native" else 0.05)
    assert kernels != "native" or said[1] == said[0]
