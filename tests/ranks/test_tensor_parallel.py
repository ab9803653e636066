"""Engines of several ranks: greedy tokens are those of transformers + peft in float32, whatever the batch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loraplex.config import LoRAConfig
from loraplex.core import AdapterMix
from loraplex.errors import ConfigError, DeviceLostError, ModelConfigError
from loraplex.memory.space.arena import Arena, Owner
from loraplex.ranks.messages import shared_tensor
from tests.engine.driver import Driver
from tests.fixtures import FAMILIES, GreedyCase, ModelZoo
from tests.ranks.engines import NUM_TOKENS, SETTINGS, adapter_of, check, driver_of

ADAPTERS = ("all linears", "patterns", "lora_bias")


def cases_of(zoo: ModelZoo, base: Path) -> list[tuple[str | None, GreedyCase]]:
    """Of the base model and of each adapter."""
    cases: list[tuple[str | None, GreedyCase]] = [(None, zoo.fit_case(base, length=40))]
    return [*cases, *((name, zoo.fit_case(base, adapter_of(zoo, base, name), length=17)) for name in ADAPTERS)]


def load_all(driver: Driver, zoo: ModelZoo, base: Path) -> None:
    for name in ADAPTERS:
        driver.registry.load(name, str(adapter_of(zoo, base, name)))


def check_each(driver: Driver, cases: Sequence[tuple[str | None, GreedyCase]], max_tokens: int = NUM_TOKENS) -> None:
    """Each alone, then all in one batch."""
    for case in cases:
        check(driver, [case], max_tokens)
    check(driver, cases, max_tokens)


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=[] if "qwen" in each else pytest.mark.ranks) for each in FAMILIES]
)
def family(request: pytest.FixtureRequest, zoo: ModelZoo) -> Iterator[tuple[Path, Driver]]:
    base = zoo.base(request.param)
    driver = driver_of(base, 2)
    load_all(driver, zoo, base)
    yield base, driver
    driver.close()


def test_two_ranks_say_what_transformers_and_peft_say(zoo: ModelZoo, family: tuple[Path, Driver]) -> None:
    base, driver = family
    check(driver, cases_of(zoo, base))


@pytest.mark.ranks
def test_four_ranks_of_two_kv_heads_in_chunks_with_a_prefix_cache(zoo: ModelZoo) -> None:
    base = zoo.base("qwen3")
    driver = driver_of(base, 4, max_num_batched_tokens=16, max_num_seqs=8)
    try:
        load_all(driver, zoo, base)
        cases = cases_of(zoo, base)
        check_each(driver, cases, 24)
        for name, case in cases:
            request_id = driver.submit(case.prompt_token_ids, name, max_tokens=8)
            driver.finish()
            assert driver.outputs[request_id].num_cached_tokens >= 16
            assert driver.tokens(request_id) == tuple(case.output_token_ids)[:8]
    finally:
        driver.close()


@pytest.mark.ranks
def test_adapters_that_take_turns_in_memory_and_a_reload_under_one_name(zoo: ModelZoo) -> None:
    base = zoo.base("llama")
    first, second = (adapter_of(zoo, base, name) for name in ADAPTERS[:2])
    cases = dict(cases_of(zoo, base))
    driver = driver_of(base, 2, LoRAConfig(disk_memory_bytes=0, max_loras=1, max_cpu_loras=1))
    try:
        for _ in range(2):
            load_all(driver, zoo, base)
            ids = {name: driver.submit(cases[name].prompt_token_ids, name, max_tokens=NUM_TOKENS) for name in ADAPTERS}
            driver.finish()
            assert all(driver.tokens(ids[name]) == tuple(cases[name].output_token_ids) for name in ADAPTERS)
        for name, path in (("all linears", first), ("patterns", second)):
            driver.registry.load("one name", str(path), load_inplace=True)
            request_id = driver.submit(cases[name].prompt_token_ids, "one name", max_tokens=NUM_TOKENS)
            driver.finish()
            assert driver.tokens(request_id) == tuple(cases[name].output_token_ids)
        driver.check_idle()
    finally:
        driver.close()


def test_logits_of_prompts_and_of_ranks_without_lora(zoo: ModelZoo) -> None:
    """Which are asked for beside those that follow a step."""
    base, prompt = zoo.base("mistral"), list(range(40, 80))
    answers = []
    for size in (1, 2):
        driver = Driver(base, is_lora_on=False, **{**SETTINGS, "tensor_parallel_size": size})
        try:
            request_id = driver.submit(prompt, max_tokens=4, prompt_logprobs=1)
            driver.finish()
            output = driver.outputs[request_id]
            assert output.prompt_logprobs is not None
            positions = [each for each in output.prompt_logprobs if each is not None]
            assert len(positions) == len(prompt) - 1
            answers.append([each[token].logprob for token, each in zip(prompt[1:], positions, strict=True)])
        finally:
            driver.close()
    assert answers[1] == pytest.approx(answers[0], abs=1e-3)


def test_a_rank_that_ends_is_an_engine_that_ends(zoo: ModelZoo) -> None:
    """While requests run, and while none does."""
    for is_busy in (True, False):
        driver = driver_of(zoo.base("llama"), 2)
        try:
            if is_busy:
                driver.submit(list(range(20)), max_tokens=64)
                driver.step(3)
            (process,) = driver.engine._runner._model._ranks._processes  # type: ignore[attr-defined]
            process.kill()
            if not is_busy:
                process.wait()
            with pytest.raises(DeviceLostError):
                driver.step(20)
        finally:
            driver.close()


def test_what_cannot_be_shared_is_refused_before_a_process_starts(zoo: ModelZoo) -> None:
    base = zoo.base("llama")
    with pytest.raises(ModelConfigError, match=re.escape("num_attention_heads of the model is 4, which 3 ranks")):
        driver_of(base, 3)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        driver_of(base, 2, tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="merge_dominant_adapter with tensor_parallel_size 2"):
        driver_of(base, 2, LoRAConfig(merge_dominant_adapter=True))
    with pytest.raises(ConfigError, match="host_compression int8 with fully_sharded_loras"):
        driver_of(base, 2, LoRAConfig(host_compression="int8", fully_sharded_loras=True))


@pytest.mark.ranks
def test_bits_depend_on_the_number_of_ranks_and_on_no_other_row(zoo: ModelZoo) -> None:
    """Alone and whole, or in chunks among others: what a token's logits were, to the last bit. In one engine of one
    rank it is so (tests/engine/test_rules.py), and sums over three or more could make it otherwise."""
    base = zoo.base("llama")
    cases = cases_of(zoo, base)
    seen = []
    for settings in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}):
        driver = driver_of(base, 4, enable_prefix_caching=False, **settings)
        try:
            load_all(driver, zoo, base)
            watched = []
            for name, case in cases:
                watched.append(driver.submit(case.prompt_token_ids, name, max_tokens=6, logprobs=2))
                if not settings:
                    driver.finish()
            driver.finish()
            outputs = [driver.outputs[each].outputs[0].logprobs for each in watched]
            seen.append([[{k: v.logprob for k, v in each.items()} for each in output or ()] for output in outputs])
        finally:
            driver.close()
    assert seen[0] == seen[1]
    assert all(len(each) == 6 for each in seen[0])


@pytest.mark.ranks
def test_a_mix_and_adapters_that_come_back_from_the_disk(zoo: ModelZoo, tmp_path: Path) -> None:
    """The tokens of one rank, whose logits are those of two but for rounding."""
    base, mix = zoo.base("llama"), AdapterMix((("all linears", 0.75), ("patterns", -0.5)))
    lora = LoRAConfig(disk_cache_dir=str(tmp_path), max_loras=2, max_cpu_loras=2)
    tokens, logprobs = [], []
    for size in (1, 2, 2):  # the third reads what the second has written
        driver = driver_of(base, size, lora)
        try:
            load_all(driver, zoo, base)
            request_id = driver.submit(list(range(30, 50)), mix, max_tokens=8, logprobs=1)
            driver.finish()
            tokens.append(driver.tokens(request_id))
            output = driver.outputs[request_id].outputs[0].logprobs or ()
            logprobs.append([max(each.logprob for each in position.values()) for position in output])
        finally:
            driver.close()
    assert tokens[1] == tokens[2] == tokens[0]
    assert logprobs[1] == logprobs[2] == pytest.approx(logprobs[0], abs=1e-3)
    assert len(list(tmp_path.glob("*"))) == 2, "a form for each number of ranks"


def test_free_chunks_of_shared_memory_go_back_to_the_system() -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, 1 << 16)
    other = shared_tensor(file, 1 << 16)
    arena = Arena(1 << 16, 1 << 15, "cpu", allocate=lambda num_bytes: shared_tensor(file, num_bytes))
    chunks = arena.lend(Owner.KV)
    assert chunks is not None
    arena.memory.fill_(7)
    assert bool((other == 7).all()), "one memory"
    assert arena.release_pages() == 1 << 15
    assert bool((other[: 1 << 15] == 7).all())
    assert not other[1 << 15 :].any()
    os.close(file)
