"""A hostile request beside others: their tokens are those of a quiet run, and the adapter stays well."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from loraplex.core import SamplingParams, TokenOutput
from loraplex.engine.sampler import DrawnTokens, SamplingRow
from loraplex.errors import AdapterFaultError, EngineError, InvalidRequestError, LoraplexError
from loraplex.memory.care.health import DOUBT_INTERVAL_S
from loraplex.text.processor import InputProcessor, ModelLimits, OutputProcessor, _Completion
from tests.engine.driver import Driver
from tests.engine.test_maintenance import poison, settle
from tests.fixtures import TARGET_MODULES, VOCAB_SIZE, ModelZoo
from tests.security.test_sampling import PARAMS

ODD_SEED, BARE_SEED = 666, 667
"""Seeds of requests whose logits the model makes NaN, or -Inf but for ten tokens."""

NEIGHBOURS: tuple[tuple[str | None, tuple[int, ...], dict[str, Any]], ...] = tuple(
    (name, tuple(range(3 + index, 3 + index + length)), params)
    for index, (name, length, params) in enumerate(
        (name, length, params)
        for name in (None, "one", "two")
        for length, params in ((20, {}), (33, {"temperature": 1.0, "seed": 5, "top_p": 0.9, "logprobs": 2}))
    )
)


@pytest.fixture(scope="module")
def attacked(zoo: ModelZoo) -> Iterator[Driver]:
    """An engine with two adapters. What a test leaves behind would show in the next one."""
    from peft import LoraConfig

    base = zoo.base("llama")
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    driver = Driver(base, max_model_len=128, max_num_seqs=16)
    for index, name in enumerate(("one", "two")):
        driver.registry.load(name, str(zoo.adapter(base, config, seed=70 + index)))
    sampler = driver.engine._runner._sampler
    launch = sampler.launch

    def spoiled(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> DrawnTokens:
        for index, row in enumerate(rows):
            if row.seed == ODD_SEED:
                logits[index, 5] = torch.nan
            elif row.seed == BARE_SEED:
                logits[index, 10:] = -torch.inf
        return launch(logits, rows)

    sampler.launch = spoiled  # type: ignore[method-assign, assignment]
    yield driver
    driver.check_idle()
    driver.close()


@pytest.fixture(scope="module")
def quiet(attacked: Driver) -> list[tuple[int, ...]]:
    """What the neighbours say when they are alone."""
    ids = ask_neighbours(attacked)
    attacked.finish()
    return [attacked.tokens(each) for each in ids]


def ask_neighbours(driver: Driver) -> list[str]:
    return [
        driver.submit(prompt, name, cache_salt=f"{index}", max_tokens=12, **params)
        for index, (name, prompt, params) in enumerate(NEIGHBOURS)
    ]


Attack = Callable[[Driver], object]


def under(attack: Attack, driver: Driver, quiet: list[tuple[int, ...]]) -> None:
    """The attack comes while the neighbours run, and once more when they are about to end."""
    ids = ask_neighbours(driver)
    driver.step(2)
    attack(driver)
    driver.step(6)
    attack(driver)
    driver.finish()
    assert [driver.tokens(each) for each in ids] == quiet
    check_well(driver)


def check_well(driver: Driver) -> None:
    assert driver.engine.adapters.health.quarantined() == {}
    assert driver.engine.adapters.report().counters["quarantines"] == 0
    driver.check_integrity()


def try_submit(driver: Driver, name: str | None, prompt: Sequence[int] = (3, 4, 5), **params: Any) -> str | None:
    try:
        return driver.submit(prompt, name, **{"max_tokens": 6, **params})
    except LoraplexError:
        return None


HOSTILE: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 0.001},
    {"repetition_penalty": 10, "frequency_penalty": 2, "presence_penalty": 2},
    {"repetition_penalty": 0.001, "frequency_penalty": -2, "temperature": 100, "seed": 1},
    {"temperature": 1e-5, "seed": -(2**63), "top_p": 5e-324},
    {"temperature": 1e300},
    {"temperature": 1.0, "seed": 2**63 - 1, "min_p": 1.0, "n": 8},
    {"logit_bias": dict.fromkeys(range(1024), -100.0)},
    {"logit_bias": dict.fromkeys(range(1024), 100.0), "temperature": 1e-5, "seed": 4},
    {"logit_bias": {VOCAB_SIZE: 1.0}},
    {"min_tokens": 6, "stop_token_ids": tuple(range(1024))},
    {"min_tokens": 6, "stop_token_ids": tuple(range(VOCAB_SIZE))},
    {"logprobs": 20, "prompt_logprobs": 20, "n": 8, "temperature": 1.0},
    {"max_tokens": 2**63 - 1},
    {"min_tokens": 2**31, "max_tokens": None},
)


@pytest.mark.parametrize("params", HOSTILE, ids=lambda params: ",".join(params))
def test_parameters(attacked: Driver, quiet: list[tuple[int, ...]], params: dict[str, Any]) -> None:
    under(lambda driver: [try_submit(driver, name, **params) for name in (None, "one")], attacked, quiet)


@pytest.mark.parametrize(
    "prompt", [(), (VOCAB_SIZE,), (-1,), (2**70,), (3,) * 128, (0, 1, 2), (3,) * 127], ids=lambda p: f"{p[:1]}*{len(p)}"
)
def test_prompts(attacked: Driver, quiet: list[tuple[int, ...]], prompt: tuple[int, ...]) -> None:
    """What is no prompt is refused; one of special tokens, or of the model's whole length, is as any other."""
    under(lambda driver: [try_submit(driver, name, prompt) for name in (None, "one")], attacked, quiet)


def test_a_request_that_forbids_all_that_the_model_allows_ends_alone_by_its_own_fault(
    attacked: Driver, quiet: list[tuple[int, ...]]
) -> None:
    ended: list[str | None] = []

    def attack(driver: Driver) -> None:
        bare = {"seed": BARE_SEED, "min_tokens": 3, "stop_token_ids": tuple(range(10))}
        ended.extend(try_submit(driver, name, **bare) for name in (None, "one"))

    under(attack, attacked, quiet)
    for each in ended:
        assert each is not None
        with pytest.raises(InvalidRequestError, match="min_tokens forbids every token"):
            attacked.tokens(each)


@given(PARAMS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parameters(attacked: Driver, quiet: list[tuple[int, ...]], params: dict[str, Any]) -> None:
    under(lambda driver: [try_submit(driver, name, **params) for name in (None, "one")], attacked, quiet)


def test_requests_that_leave_fail_or_are_refused_speak_against_no_adapter(
    attacked: Driver, quiet: list[tuple[int, ...]]
) -> None:
    def attack(driver: Driver) -> None:
        for which in range(12):
            request_id = try_submit(driver, "one", range(3, 90), seed=which, temperature=1.0)
            driver.step(which % 3)
            assert request_id is not None
            if request_id in driver.running_ids:
                driver.abort(request_id)
            assert try_submit(driver, "one", temperature=-1) is None

    under(attack, attacked, quiet)
    assert not attacked.engine._caretaker.is_at_work


# ---------------------------------------------------------------- requests that take much


def test_logits_of_a_prompt_that_is_scored_are_made_a_few_at_a_time(
    attacked: Driver, quiet: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 2,048 tokens times a vocabulary of 152,000 would be 1.2 GB at once."""
    runner = attacked.engine._runner
    expected = attacked.submit(range(3, 120), "one", max_tokens=1, prompt_logprobs=3)
    attacked.finish()
    compute, sizes = runner._model.compute_logits, []

    def measured(hidden: torch.Tensor, *segments: Any) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden, *segments)

    monkeypatch.setattr(runner._model, "compute_logits", measured)
    monkeypatch.setattr("loraplex.engine.sampler._MAX_ELEMENTS", 8 * VOCAB_SIZE)
    found = attacked.submit(range(3, 120), "one", max_tokens=1, prompt_logprobs=3)
    attacked.finish()
    assert max(sizes) == 8
    pairs = zip(
        attacked.outputs[found].prompt_logprobs or (), attacked.outputs[expected].prompt_logprobs or (), strict=True
    )
    assert all(list(few or ()) == list(all_at_once or ()) for few, all_at_once in pairs)
    under(lambda driver: try_submit(driver, "one", range(3, 120), prompt_logprobs=20), attacked, quiet)


def test_the_completions_of_a_prompt_score_it_once(attacked: Driver) -> None:
    request_id = attacked.submit(range(3, 60), "one", n=8, max_tokens=2, temperature=1.0, prompt_logprobs=1)
    children = [each.request for _, each in attacked._front.outputs._owner_of.values()]
    assert [child.sampling_params.prompt_logprobs for child in children] == [1, *[None] * 7]
    attacked.finish()
    assert len(attacked.outputs[request_id].prompt_logprobs or ()) == 57


def test_more_logprobs_of_prompts_than_an_answer_should_have_are_refused() -> None:
    inputs = InputProcessor(None, ModelLimits(1000, 2**20))
    inputs.prepare("r", [5] * (2**17), SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs=20 of 32768 prompt tokens are 688128 entries"):
        inputs.prepare("r", [5] * 32768, SamplingParams(prompt_logprobs=20))


def test_an_output_of_many_completions_is_written_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one it was written n times, n completions each: a quarter of a second of the server's time for n = 128."""
    outputs = OutputProcessor(None)
    prepared = InputProcessor(None, ModelLimits(1000, 64)).prepare("r", [5], SamplingParams(n=128, max_tokens=9))
    outputs.add(prepared)
    written: list[int] = []
    write = _Completion.to_output
    monkeypatch.setattr(_Completion, "to_output", lambda self, lora: written.append(1) or write(self, lora))
    told = outputs.process_step([TokenOutput(child.request_id, (9,)) for child in prepared.children])
    assert (len(told), len(written)) == (1, 128)


# ---------------------------------------------------------------- prompts that overflow in one adapter alone


@pytest.fixture
def clock(attacked: Driver, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of diagnoses, none of which has been yet."""
    now_s, caretaker, recovery = [1000.0], attacked.engine._caretaker, attacked.engine.adapters.health._recovery
    for owner, last in ((caretaker, "_last_base_check_s"), (recovery, "_last_look_s")):
        monkeypatch.setattr(owner, "_clock", lambda: now_s[0])
        monkeypatch.setattr(owner, last, -math.inf)
    return now_s


def count_diagnoses(driver: Driver) -> int:
    return driver.engine._caretaker._diagnosis._num_asked


@pytest.mark.parametrize("name", [None, "one"])
def test_a_crafted_prompt_ends_its_request_alone_however_often_it_comes(
    attacked: Driver, quiet: list[tuple[int, ...]], clock: list[float], name: str | None
) -> None:
    """What one prompt makes of an adapter keeps it from no other: it answers a diagnosis, once a second."""
    before, ended = count_diagnoses(attacked), []

    def attack(driver: Driver) -> None:
        for _ in range(5):
            ended.append(driver.submit((3, 4, 5), name, seed=ODD_SEED, temperature=1.0, max_tokens=6))
            driver.step()

    under(attack, attacked, quiet)
    for each in ended:
        with pytest.raises((AdapterFaultError, EngineError), match="NaN"):
            attacked.tokens(each)
    assert count_diagnoses(attacked) - before <= 2, "the base and the adapter were asked once"
    clock[0] += DOUBT_INTERVAL_S
    attacked.step(2)
    assert count_diagnoses(attacked) - before <= 4
    clock[0] += DOUBT_INTERVAL_S
    attacked.step(2)
    assert not attacked.engine._caretaker.is_at_work
    assert count_diagnoses(attacked) - before <= 4, "no doubt is left"
    check_well(attacked)


def test_many_adapters_with_odd_results_cost_one_diagnosis_a_second(
    attacked: Driver, zoo: ModelZoo, clock: list[float]
) -> None:
    """Each of them was looked at between two steps, and the base before each: all others waited for it."""
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    names = [f"odd {index}" for index in range(8)]
    for index, name in enumerate(names):
        attacked.registry.load(name, str(zoo.adapter(zoo.base("llama"), config, seed=90 + index)))
    before = count_diagnoses(attacked)
    attacked.submit(range(3, 20), max_tokens=60)  # while the engine is idle, answers are recorded
    for name in names:
        attacked.submit((3, 4, 5), name, seed=ODD_SEED, temperature=1.0)
    attacked.step(4)
    assert count_diagnoses(attacked) - before == 2, "of the base and of one adapter"
    for second in range(1, 10):
        clock[0] += DOUBT_INTERVAL_S
        attacked.step(2)
        assert count_diagnoses(attacked) - before == 2 * min(second + 1, len(names))
    attacked.finish()
    check_well(attacked)
    for name in names:
        attacked.registry.unload(name)


def test_what_a_crafted_prompt_computed_is_not_shared(attacked: Driver, quiet: list[tuple[int, ...]]) -> None:
    prompt = range(1000, 1064)
    crafted = attacked.submit(prompt, "one", seed=ODD_SEED, temperature=1.0)
    attacked.finish()
    assert isinstance(attacked.errors[crafted], AdapterFaultError)
    request_id = attacked.submit(prompt, "one", max_tokens=1)
    attacked.finish()
    assert attacked.outputs[request_id].num_cached_tokens == 0


def test_an_adapter_that_is_really_bad_is_quarantined_and_comes_back(
    attacked: Driver, quiet: list[tuple[int, ...]]
) -> None:
    """Held before, and after: its requests end, the others notice nothing, and blocks that held its NaN serve again."""
    ids = ask_neighbours(attacked)
    attacked.step(2)
    poison(attacked, "one")
    attacked.finish()
    for each, (name, _, _), expected in zip(ids, NEIGHBOURS, quiet, strict=True):
        if name == "one":
            with pytest.raises(AdapterFaultError, match=r"NaN|not finite"):
                attacked.tokens(each)
        else:
            assert attacked.tokens(each) == expected
    settle(attacked, lambda: attacked.engine.adapters.report().counters["recoveries"] == 1)
    assert attacked.engine.adapters.report().counters["quarantines"] == 1
    again = ask_neighbours(attacked)
    attacked.finish()
    assert [attacked.tokens(each) for each in again] == quiet
