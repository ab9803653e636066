"""Drafts change how many steps an answer takes, and no bit of it: with native kernels, tokens and log probabilities are
those of an engine without drafts."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from loraplex import LLM, LoRAConfig, SamplingParams
from loraplex.core import AdapterMix
from loraplex.engine.schedule_plan import SampledToken
from loraplex.engine.speculation import Drafting
from loraplex.errors import AdapterFaultError, ConfigError
from tests.engine.driver import Driver
from tests.engine.prophet import Prophet
from tests.engine.rules_bench import NAMES, Asked, Bench, OpenDriver, loaded
from tests.engine.test_look_ahead import KV_BLOCK_BYTES, PARAMS, Ask, LateRunner
from tests.engine.test_structured_outputs import driver_of as demo_driver
from tests.engine.test_structured_outputs import results, submit_all
from tests.fixtures import TARGET_MODULES, ModelZoo

NUM_COMPARED = int(os.environ.get("LORAPLEX_NUM_COMPARED", "400"))
"""Requests of the slow test; more to find what is rare."""

Said = tuple[tuple[int, ...], str | None, int | str | None, Any, Any]

MORE_PARAMS: tuple[Mapping[str, Any], ...] = (
    *PARAMS,
    {"temperature": 0.3, "seed": 11, "logprobs": 3, "n": 2},
    {"temperature": 0.7, "seed": 12, "presence_penalty": -1.5, "frequency_penalty": -1.0, "logprobs": 1},
    {"logit_bias": {9: 50.0}, "stop_token_ids": (9,), "min_tokens": 3},
    {"logit_bias": dict.fromkeys(range(20, 24), 40.0), "temperature": 0.6, "seed": 13, "logprobs": 4},
    {"logit_bias": {9: 90.0}, "logprobs": 1},
)
"""With some that make texts repeat themselves: drafts then hold, at random temperatures too."""

PROMPTS = st.builds(
    lambda length, period, shift: tuple((shift * 7 + i % period) % 200 + 3 for i in range(length)),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 2),
)
ASKS = st.builds(
    Ask,
    arrival=st.integers(0, 10),
    name=st.sampled_from([None, *NAMES]),
    prompt=PROMPTS,
    max_tokens=st.sampled_from([1, 2, 5, 12, 24]),
    params=st.sampled_from(MORE_PARAMS),
    leaves_at=st.none() | st.none() | st.integers(1, 16),
)
HARD = [
    Ask(i // 2, NAMES[i % 4], tuple(3 + j % 5 for j in range(30)), 24, MORE_PARAMS[-1 - i % 2], None) for i in range(8)
]
"""More than two adapters and little KV at any time, and drafts of which some hold."""


def said_by(driver: Driver, asks: list[Ask], check_each: bool = True) -> dict[int, list[Said] | str]:
    """What each said, to the bit, or its error; "" for those that left."""
    ids: dict[int, str] = {}
    for step in range(max(max(ask.arrival, ask.leaves_at or 0) for ask in asks) + 1):
        for index, ask in enumerate(asks):
            if ask.arrival == step:
                params = {**ask.params, "max_tokens": ask.max_tokens}
                params["min_tokens"] = min(ask.max_tokens, params.get("min_tokens", 0))
                ids[index] = driver.submit(ask.prompt, ask.name, **params)
            if ask.leaves_at == step and ids.get(index) in driver.running_ids:
                driver.abort(ids[index])
        driver.advance()
        driver.check_integrity()
    while driver.engine.has_unfinished and check_each:
        driver.advance()
        driver.check_integrity()
        if driver.engine.is_stalled:
            driver.engine.wait_for_change(0.05)
    driver.finish(max_steps=4000)
    driver.check_idle()
    answers: dict[int, list[Said] | str] = {}
    for index, request_id in ids.items():
        if asks[index].leaves_at is not None:
            answers[index] = ""
        elif request_id in driver.errors:
            answers[index] = repr(driver.errors[request_id])
        else:
            output = driver.outputs[request_id]
            answers[index] = [
                (each.token_ids, each.finish_reason, each.stop_reason, each.logprobs, output.prompt_logprobs)
                for each in output.outputs
            ]
    return answers


def one_driver(bench: Bench, num_kv_blocks: int, speculative: str | None, **more: Any) -> Driver:
    """Room for two of the four adapters and little KV, which holds NaN."""
    driver = Driver(
        bench.base,
        LoRAConfig(adapter_memory_bytes=2 * bench.nbytes, host_memory_bytes=16 << 20, aging_steps=8),
        speculative=speculative,
        max_model_len=64,
        kv_cache_memory_bytes=num_kv_blocks * KV_BLOCK_BYTES,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        **more,
    )
    driver.engine._runner._kv.fill_(math.nan)
    return loaded(driver, bench)


@pytest.fixture(
    scope="module",
    params=[(4, False), (12, False), (12, True)],
    ids=["little KV", "more KV", "more KV, look-ahead"],
)
def both(bench: Bench, request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Driver]]:
    num_kv_blocks, look_ahead = request.param
    drivers = (
        one_driver(bench, num_kv_blocks, None),
        one_driver(bench, num_kv_blocks, "n-gram", look_ahead=look_ahead),
    )
    yield drivers
    for driver in drivers:
        driver.close()


@pytest.mark.slow
@given(asks=st.lists(ASKS, min_size=1, max_size=9))
@example(asks=HARD)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_mix_has_the_outputs_of_plain_decoding(both: tuple[Driver, Driver], asks: list[Ask]) -> None:
    plain, drafting = both
    assert said_by(drafting, asks) == said_by(plain, asks)


def test_the_mix_was_hard(both: tuple[Driver, Driver]) -> None:
    """The property test's example: drafts held and failed, requests gave room to others, and prefixes were shared."""
    plain, drafting = both
    before = drafting.stats
    expected = said_by(plain, HARD)
    assert said_by(drafting, HARD) == expected
    assert said_by(drafting, HARD[:1]) == {0: expected[0]}
    stats = drafting.stats
    assert stats.num_accepted_tokens - before.num_accepted_tokens > 40
    assert stats.num_draft_tokens - stats.num_accepted_tokens > before.num_draft_tokens - before.num_accepted_tokens
    assert stats.num_pauses > before.num_pauses
    if stats.memory.num_kv_blocks == 4:
        assert stats.num_preemptions > before.num_preemptions
    else:
        assert stats.num_prefix_hit_tokens > before.num_prefix_hit_tokens


# ---------------------------------------------------------------------------------------------- drafts of any quality


def compare(plain: Driver, drafting: Driver, num_requests: int, patch: pytest.MonkeyPatch) -> None:
    """Rounds of 16 requests at random, compared to the bit, each engine's parts checked after each round."""
    rng, num_compared = Random(num_requests), 0
    mix = AdapterMix(((NAMES[0], 0.7), (NAMES[1], 0.3)))
    while num_compared < num_requests:
        asks = [
            Ask(
                rng.randrange(12),
                rng.choice([None, *NAMES, *NAMES, mix]),
                tuple(rng.randrange(3, 9 if rng.random() < 0.3 else 200) for _ in range(rng.randint(1, 40))),
                rng.choice([1, 4, 12, 24]),
                rng.choice(MORE_PARAMS),
                rng.randrange(14) if rng.random() < 0.1 else None,
            )
            for _ in range(16)
        ]
        expected = said_by(plain, asks, check_each=False)
        texts = [
            (*ask.prompt, *said[0])
            for ask, answers in zip(asks, (expected[index] for index in range(len(asks))), strict=True)
            for said in (answers if isinstance(answers, list) else ())
        ]
        Prophet(texts, rng.randrange(2**32)).drafts_for_all(patch)
        assert said_by(drafting, asks, check_each=False) == expected
        num_compared += sum(isinstance(each, list) for each in expected.values())


def test_drafts_of_any_quality_change_nothing(both: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    before = both[1].stats
    compare(*both, 20, monkeypatch)
    stats = both[1].stats
    drafted, accepted = (
        after - then
        for after, then in (
            (stats.num_draft_tokens, before.num_draft_tokens),
            (stats.num_accepted_tokens, before.num_accepted_tokens),
        )
    )
    assert accepted > drafted - accepted > 0


@pytest.mark.slow
def test_many_requests_have_the_outputs_of_plain_decoding(
    both: tuple[Driver, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(*both, NUM_COMPARED, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", {"quantization": "int8"}),
        ("mistral", {"quantization": "int4"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "float16", "kv_cache_dtype": "bfloat16"}),
        ("mistral", {"kv_cache_dtype": "int8"}),
        ("gemma2", {}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_every_form_of_weights(
    zoo: ModelZoo, family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of families with windows, caps and experts, too."""
    base = zoo.base(family)
    targets = [each for each in TARGET_MODULES if "moe" not in family or each.endswith(("q_proj", "v_proj", "o_proj"))]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    drivers = [Driver(base, LoRAConfig(), speculative=each, max_model_len=128, **more) for each in (None, "n-gram")]
    try:
        for driver in drivers:
            for index, name in enumerate(NAMES):
                driver.registry.load(name, str(zoo.adapter(base, config, seed=60 + index)))
        compare(drivers[0], drivers[1], 60, monkeypatch)
        assert drivers[1].stats.num_accepted_tokens > 100
    finally:
        for driver in drivers:
            driver.close()


# ------------------------------------------------------------------------------------------------------------ and also


def test_a_text_that_repeats_itself_takes_far_fewer_steps(open_driver: OpenDriver, bench: Bench) -> None:
    """Counted in steps, of which each is one forward pass."""
    said, num_steps = [], []
    for speculative in (None, "n-gram"):
        driver = loaded(open_driver(speculative=speculative), bench)
        request_id = driver.submit((5, 6, 7), "one", max_tokens=100, logit_bias={9: 90.0}, logprobs=1)
        driver.finish()
        said.append(driver.outputs[request_id].outputs[0])
        num_steps.append(driver.stats.step_times.num_steps)
        assert driver.stats.num_generated_tokens == 100, "what was rejected counts nowhere"
    assert said[0] == said[1]
    assert num_steps[0] == 100
    assert num_steps[1] <= 20


def test_a_request_that_moves_goes_on_with_drafts(open_driver: OpenDriver, bench: Bench) -> None:
    driver = loaded(open_driver(speculative="n-gram"), bench)
    params = {"max_tokens": 60, "logit_bias": {9: 90.0}, "logprobs": 1}
    alone = driver.submit((5, 6, 7), "one", **params)
    driver.finish()
    before = driver.stats.num_accepted_tokens
    moved = driver.submit((5, 6, 7), "one", **params)
    while moved in driver.running_ids:
        for _ in range(4):
            driver.advance()
        if moved in driver.running_ids:
            driver.move(moved)
    assert driver.outputs[moved].outputs == driver.outputs[alone].outputs
    assert driver.stats.num_accepted_tokens - before > 30


def test_a_text_ends_at_its_stop_string_inside_what_was_accepted(
    zoo: ModelZoo, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same token, with the same text, usage and log probabilities."""
    plain = Driver(bench.base, LoRAConfig())
    drafting = Driver(bench.base, LoRAConfig(), speculative="n-gram")
    try:
        (whole,) = ended(plain, [{}])
        assert len(whole.token_ids) == 40
        Prophet([(*PROMPT, *whole.token_ids)], 0, errors=0.0).drafts_for_all(monkeypatch)
        places = range(3, len(whole.text) - 6, 7)
        asks = [{"stop": [whole.text[at : at + 4]], "include_stop_str_in_output": at % 2 == 0} for at in places]
        expected = ended(plain, asks)
        assert any(len(each.token_ids) < 40 for each in expected)
        assert ended(drafting, asks) == expected
        assert drafting.stats.num_accepted_tokens > 0
    finally:
        plain.close()
        drafting.close()


PROMPT = tuple(range(20, 40))


def ended(driver: Driver, asks: Sequence[Mapping[str, Any]]) -> list[Any]:
    ids = [driver.submit(PROMPT, None, **{"max_tokens": 40, "logprobs": 1, **ask}) for ask in asks]
    driver.finish()
    driver.check_idle()
    return [driver.outputs[each].outputs[0] for each in ids]


def test_outputs_in_a_form_have_no_drafts_and_others_beside_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, drafting = demo_driver(), demo_driver(speculative="n-gram")
    with_form: list[bool] = []
    see = Drafting.propose

    def noted(self: Drafting, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        states = drafting.engine._scheduler._states.values()
        with_form.append(any(each.drafting is self and each.grammar is not None for each in states))
        return see(self, token_ids, depth)

    monkeypatch.setattr(Drafting, "propose", noted)
    try:
        assert results(drafting, submit_all(drafting)) == results(plain, submit_all(plain))
    finally:
        plain.close()
        drafting.close()
    assert with_form
    assert not any(with_form)


def test_an_adapter_is_in_doubt_for_odd_logits_behind_a_draft(
    open_driver: OpenDriver, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = loaded(open_driver(speculative="n-gram"), bench)
    expected = bench.cases[bench.adapters["one"]][0]
    prophet = Prophet([(*expected.prompt_token_ids, *expected.output_token_ids)], 0, errors=0.0, is_brief=False)
    prophet.drafts_for_all(monkeypatch)
    runner = LateRunner(driver)
    asked = Asked(driver, bench, "one")
    fault = SampledToken(0, error=AdapterFaultError("NaN"), has_odd_logits=True)
    doubted: list[int] = []
    monkeypatch.setattr(driver.engine.adapters.health, "doubt", doubted.append)

    def spoil(_: int, tokens: dict[str, SampledToken]) -> None:
        for name, token in tokens.items():
            if len(token.more) > 2:
                tokens[name] = SampledToken(token.token_id, more=(token.more[0], fault))

    runner.spoil = spoil
    driver.finish()
    assert isinstance(driver.errors[asked.request_id], AdapterFaultError)
    assert len(doubted) == 1
    assert driver.stats.num_generated_tokens == 3, "the first, and two before the odd one"


def test_offline(bench: Bench) -> None:
    with LLM(str(bench.base), max_model_len=160, speculative="n-gram", num_speculative_tokens=3) as llm:
        params = SamplingParams(temperature=0, max_tokens=50, logit_bias={9: 90.0})
        (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], params)
        assert output.outputs[0].token_ids == (9,) * 50
        stats = llm.stats()
        assert stats.step_times.num_steps < 20
        assert 3 * stats.num_drafts >= stats.num_draft_tokens == stats.num_accepted_tokens > 30


@pytest.mark.parametrize("lora_backend", ["torch", "reference"])
def test_kernels_whose_rows_depend_on_the_batch_are_refused(bench: Bench, lora_backend: str) -> None:
    with pytest.raises(ConfigError, match=r"speculative n-gram needs the native kernels of a CPU.*these run: "):
        Driver(bench.base, lora_backend=lora_backend, speculative="n-gram")


def test_a_kv_cache_of_stock_torch_is_refused(zoo: ModelZoo) -> None:
    base = zoo.base("llama", options={"head_dim": 12})
    with pytest.raises(ConfigError, match="speculative n-gram needs native attention, which has no heads of 12"):
        Driver(base, speculative="n-gram")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": "draft"}, "speculative must be one of"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be 1..32, got 0"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens must be 1..32, got 33"),
        (
            {"speculative": "n-gram", "lora": LoRAConfig(merge_dominant_adapter=True)},
            "merge_dominant_adapter with speculative n-gram is not supported",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Driver(Path("nowhere"), **settings)
