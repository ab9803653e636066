"""A form of outputs and everything else that an engine does: nothing changes what a grammar allows, and a grammar
changes no other request."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex import SamplingParams, StructuredOutputsParams
from loraplex.core import Claim
from loraplex.demo.tasks import adapter_path
from loraplex.errors import InvalidRequestError
from loraplex.structured.grammars import GrammarState, StepMasks, Words
from loraplex.structured.turns import MAX_AHEAD, NUM_COMPILE_THREADS
from tests.engine.driver import Driver
from tests.frontend.processes import BASE
from tests.frontend.test_messages import REQUEST

PROMPT = tuple(range(20, 40))
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bb"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
}
COMPACT = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
WORDS = StructuredOutputsParams(regex="[a-z]{2,6}( [a-z]{2,6}){2,4}")
ASKS: list[dict[str, Any]] = [
    {"structured_outputs": COMPACT},
    {"structured_outputs": COMPACT, "temperature": 1.0, "seed": 3, "logprobs": 3},
    {"structured_outputs": WORDS, "temperature": 1.2, "seed": 5, "presence_penalty": 0.8},
    {"structured_outputs": WORDS, "temperature": 1.0, "seed": 6, "n": 3},
    {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"]), "logit_bias": {"40": -5}},
    {},
    {"temperature": 1.0, "seed": 9},
]


def driver_of(**settings: Any) -> Driver:
    driver = Driver(Path(BASE), **{"kv_cache_memory_bytes": 1 << 26, "num_threads": 1, **settings})
    for name in ("upper", "sort"):
        driver.registry.load(name, str(adapter_path(name)))
    return driver


def submit_all(driver: Driver, name_of: Any = lambda place: (None, "upper", "sort")[place % 3]) -> list[str]:
    return [
        driver.submit(PROMPT, name_of(place), **{"max_tokens": 60, "ignore_eos": False, **ask})
        for place, ask in enumerate(ASKS)
    ]


def results(driver: Driver, ids: list[str]) -> list[Any]:
    driver.finish(2000)
    assert driver.errors == {}
    driver.check_integrity()
    return [[(each.text, each.token_ids, each.finish_reason) for each in driver.outputs[i].outputs] for i in ids]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = driver_of()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def expected(driver: Driver) -> list[Any]:
    """Each of them alone."""
    found = []
    for place, ask in enumerate(ASKS):
        name = (None, "upper", "sort")[place % 3]
        request_id = driver.submit(PROMPT, name, **{"max_tokens": 60, "ignore_eos": False, **ask})
        found += results(driver, [request_id])
    return found


def test_each_alone_has_its_form(expected: list[Any]) -> None:
    for text, _, reason in (expected[0][0], expected[1][0]):
        assert reason == "stop"
        assert set(json.loads(text)) == {"kind", "n"}
    for text, _, _ in (*expected[2], *expected[3]):
        assert re.fullmatch(str(WORDS.regex), text)
    assert len({text for text, _, _ in expected[3]}) > 1, "completions draw for themselves"
    assert expected[4][0][0] in ("yes", "no")


def test_a_batch_changes_nothing(driver: Driver, expected: list[Any]) -> None:
    assert results(driver, submit_all(driver)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"look_ahead": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_ways_of_running_change_nothing(expected: list[Any], settings: dict[str, Any]) -> None:
    driver = driver_of(**settings)
    try:
        assert results(driver, submit_all(driver)) == expected
    finally:
        driver.close()


@pytest.mark.parametrize("look_ahead", [False, True])
def test_late_masks_change_nothing(expected: list[Any], look_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose mask is late sits the step out, with its prompt's log probabilities taken once."""
    take, draws, num_late = StepMasks.take, random.Random(4), 0

    def taken(masks: StepMasks, is_alone: bool) -> list[Words | None]:
        nonlocal num_late
        made = take(masks, is_alone)
        late = [mask is not None and draws.random() < 0.6 for mask in made]
        num_late += sum(late)
        return [None if is_late else mask for mask, is_late in zip(made, late, strict=True)]

    driver = driver_of(look_ahead=look_ahead)
    try:
        ask = {**ASKS[1], "prompt_logprobs": 1, "max_tokens": 60, "ignore_eos": False}
        alone = driver.submit(PROMPT, "upper", **ask)
        driver.finish(2000)
        monkeypatch.setattr(StepMasks, "take", taken)
        assert results(driver, submit_all(driver)) == expected
        again = driver.submit(PROMPT, "upper", **ask)
        driver.finish(2000)
        assert driver.outputs[again].prompt_logprobs == driver.outputs[alone].prompt_logprobs
        assert driver.outputs[again].outputs[0].logprobs == driver.outputs[alone].outputs[0].logprobs
        assert num_late > 50
    finally:
        driver.close()


def test_a_late_mask_holds_no_other_row_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the mask of one row is made all others go on, the row without a form by a token a step."""
    release, fill = threading.Event(), GrammarState.fill

    def slow(state: GrammarState, vocab_size: int) -> Words:
        assert release.wait(60)
        return fill(state, vocab_size)

    monkeypatch.setattr(GrammarState, "fill", slow)
    driver = driver_of()
    try:
        formed = driver.submit(PROMPT, None, structured_outputs=COMPACT, max_tokens=60, ignore_eos=False)
        while driver.engine.grammars is not None and driver.engine.grammars.turns.is_busy:
            driver.engine.grammars.turns.wait(60)
        plain = driver.submit(PROMPT, None, max_tokens=40)
        while not driver.outputs.get(plain) or not driver.outputs[plain].finished:
            driver.step()
        assert not driver.outputs.get(formed) or not driver.outputs[formed].outputs[0].token_ids
        driver.check_integrity()
        release.set()
        driver.finish(2000)
        assert set(json.loads(driver.outputs[formed].outputs[0].text)) == {"kind", "n"}
    finally:
        release.set()
        driver.close()


def test_preemption_changes_nothing(expected: list[Any]) -> None:
    driver = driver_of(max_model_len=96, kv_cache_memory_bytes=12 * 2**15)
    try:
        assert results(driver, submit_all(driver)) == expected
        assert driver.stats.num_preemptions > 0
    finally:
        driver.close()


@pytest.mark.parametrize("step", [1, 2, 5, 9])
def test_a_move_changes_nothing(driver: Driver, expected: list[Any], step: int) -> None:
    """The grammar goes on from the tokens."""
    ids = submit_all(driver)
    for _ in range(step):
        driver.advance()
    for request_id in [each for each in ids if each in driver.running_ids]:
        driver.move(request_id)
    assert results(driver, ids) == expected


def test_log_probabilities_are_those_of_allowed_tokens(driver: Driver) -> None:
    form = StructuredOutputsParams(choice=["yes", "no"])
    request_id = driver.submit(PROMPT, structured_outputs=form, logprobs=5, max_tokens=9)
    results(driver, [request_id])
    logprobs = driver.outputs[request_id].outputs[0].logprobs
    assert logprobs is not None
    finite = [each.logprob for each in logprobs[0].values() if each.logprob > -1e30]
    assert len(finite) == 2
    assert sum(2.718281828459045**each for each in finite) == pytest.approx(1, abs=1e-4)


def test_what_nothing_can_follow_ends(driver: Driver) -> None:
    """Also before min_tokens, and past the end of sequence."""
    form = StructuredOutputsParams(regex="ab")
    request_id = driver.submit(PROMPT, structured_outputs=form, min_tokens=9, max_tokens=20, ignore_eos=True)
    assert [(text, reason) for text, _, reason in results(driver, [request_id])[0]] == [("ab", "stop")]


def test_min_tokens_keep_an_output_open(driver: Driver) -> None:
    form = StructuredOutputsParams(regex="a{1,9}")
    request_id = driver.submit(PROMPT, structured_outputs=form, min_tokens=5, max_tokens=20, ignore_eos=False)
    assert 5 <= len(results(driver, [request_id])[0][0][0]) <= 9


def test_stop_strings_end_it_as_ever(driver: Driver) -> None:
    request_id = driver.submit(PROMPT, structured_outputs=COMPACT, stop=['",'], max_tokens=60)
    text, _, reason = results(driver, [request_id])[0][0]
    assert (text[:9], reason) == ('{"kind":"', "stop")
    assert '",' not in text


def test_a_grammar_without_a_token_here_ends_its_request_alone(driver: Driver, expected: list[Any]) -> None:
    form = StructuredOutputsParams(regex="a\u2605")
    bad = driver.submit(PROMPT, structured_outputs=form, max_tokens=9)
    ids = submit_all(driver)
    driver.finish(2000)
    error = driver.errors.pop(bad)
    assert isinstance(error, InvalidRequestError)
    assert "no text of this vocabulary fits" in error.message
    assert results(driver, ids) == expected


def test_an_engine_refuses_what_no_front_has_checked(driver: Driver) -> None:
    bad = driver.submit(PROMPT, structured_outputs=StructuredOutputsParams(json={"not": {}}), max_tokens=9)
    driver.finish(200)
    assert "Unimplemented keys" in driver.errors.pop(bad).message
    assert replace(COMPACT).digest == COMPACT.digest


def test_a_client_is_one_however_many_salts_it_sends(driver: Driver) -> None:
    """Else its masks come before those of every other client."""
    grammars = driver.engine.grammars
    assert grammars is not None
    claims = [("acme", "1"), ("acme", "2"), ("", "key-1"), ("", "key-2")]
    states = [
        driver.engine._grammar_of(
            replace(
                REQUEST,
                sampling_params=SamplingParams(structured_outputs=COMPACT),
                claim=Claim(tenant),
                cache_salt=salt,
            )
        )
        for tenant, salt in claims
    ]
    assert [state and state.client for state in states] == ["acme", "acme", "key-1", "key-2"]
    while grammars.turns.is_busy:
        grammars.turns.wait(60)


def test_many_different_forms_are_not_all_compiled_while_they_wait() -> None:
    """Each compiled grammar may take 60 MB."""
    few = driver_of(max_num_seqs=2)
    try:
        forms = [f"({'|'.join(f'{word}{place}' for word in ('ab', 'cd'))})" for place in range(60)]
        wishes = [{"max_tokens": 8, "structured_outputs": StructuredOutputsParams(regex=form)} for form in forms]
        ids = [few.submit(PROMPT, None, ignore_eos=False, **wish) for wish in wishes]
        turns = few.engine.grammars.turns
        most = 0
        for _ in range(4000):
            if not few.engine.has_unfinished:
                break
            few.step()
            most = max(most, sum(map(len, turns._ahead.values())))
        assert few.errors == {}
        for form, request_id in zip(forms, ids, strict=True):
            assert re.fullmatch(form, few.outputs[request_id].outputs[0].text)
        assert 2 < most <= MAX_AHEAD // 2 + NUM_COMPILE_THREADS
        assert not turns.is_busy
    finally:
        few.close()
