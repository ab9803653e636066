"""Requests that are withdrawn between any two steps and go on from what their clients have: nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex import SamplingParams
from loraplex.errors import InvalidRequestError
from tests.engine.driver import Driver
from tests.engine.rules_bench import NAMES, Bench, OpenDriver, loaded
from tests.engine.test_look_ahead import ASKS, Ask, one_driver, run

PROMPT = tuple(range(3, 33))


@pytest.fixture(scope="module", params=[False, True], ids=["a step at a time", "look-ahead"])
def both(bench: Bench, request: pytest.FixtureRequest) -> Iterator[tuple[Driver, Driver]]:
    drivers = one_driver(bench, False, 12), one_driver(bench, request.param, 12)
    yield drivers
    for driver in drivers:
        driver.close()


class Moving:
    """Before each step of `driver` it moves the requests that `moves` has for it, by their places in the batch."""

    def __init__(self, driver: Driver, moves: list[tuple[int, int]]) -> None:
        self._driver, self._moves = driver, moves
        self._step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def advance(self) -> None:
        self._move()
        self._driver.advance()

    def finish(self, max_steps: int) -> None:
        while self._driver.engine.has_unfinished and any(step >= self._step for step, _ in self._moves):
            self.advance()
        self._driver.finish(max_steps)

    def _move(self) -> None:
        ids = self._driver.running_ids
        for step, place in self._moves:
            if step == self._step and ids:
                self._driver.move(ids[place % len(ids)])
                self._driver.check_integrity()
        self._step += 1


@given(
    asks=st.lists(ASKS.map(lambda ask: replace(ask, leaves_at=None)), min_size=1, max_size=7),
    moves=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_moves_of_any_mix_change_no_output(
    both: tuple[Driver, Driver], asks: list[Ask], moves: list[tuple[int, int]]
) -> None:
    plain, moving = both
    before = [driver.stats for driver in both]
    assert run(Moving(moving, moves), asks) == run(plain, asks)
    after = [driver.stats for driver in both]
    for count in ("num_generated_tokens", "num_prompt_tokens"):
        expected, counted = (getattr(b, count) - getattr(a, count) for a, b in zip(before, after, strict=True))
        assert counted == expected, f"{count}: a token is billed once"
    assert sum(after[1].num_finished.values()) - sum(before[1].num_finished.values()) == len(asks)


def test_a_move_in_the_middle_of_a_step_in_flight(open_driver: OpenDriver, bench: Bench) -> None:
    driver = loaded(open_driver(look_ahead=True), bench)
    params: dict[str, Any] = {"temperature": 1.1, "seed": 4, "presence_penalty": 0.5, "logprobs": 2, "max_tokens": 20}
    still = driver.submit(PROMPT, NAMES[0], **params)
    driver.finish()
    moved = driver.submit(PROMPT, NAMES[0], **params)
    for _ in range(6):
        driver.advance()
    driver.move(moved)
    assert driver.engine.has_unfinished
    driver.finish()
    assert driver.tokens(moved) == driver.tokens(still)
    assert driver.outputs[moved].outputs[0].logprobs == driver.outputs[still].outputs[0].logprobs
    assert driver.outputs[moved].num_cached_tokens > driver.outputs[still].num_cached_tokens == 0


def test_the_first_engine_says_what_was_cached_of_the_prompt(open_driver: OpenDriver, bench: Bench) -> None:
    driver = open_driver(is_lora_on=False)
    whole = driver.submit(PROMPT, max_tokens=12)
    driver.step(3)
    other = driver.submit(PROMPT, max_tokens=12)
    assert driver.engine.withdraw(["unknown"]) == {}
    driver.move(other)
    driver.step(3)
    driver.move(whole)
    driver.finish()
    assert driver.outputs[whole].num_cached_tokens == 0
    assert driver.outputs[other].num_cached_tokens > 0
    assert driver.tokens(whole) == driver.tokens(other)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"output_token_ids": (3, 4)}, "has ended"),
        ({"output_token_ids": (3,) * 62, "max_tokens": 99}, "has ended"),
        ({"output_token_ids": (1 << 20,)}, "not in the vocabulary"),
        ({"output_token_ids": (-1,)}, "not in the vocabulary"),
        ({"num_cached_tokens": 4}, "4 cached tokens of a prompt of 2"),
        ({"num_cached_tokens": -1}, "-1 cached tokens"),
    ],
)
def test_what_no_front_sends_is_refused(open_driver: OpenDriver, fields: dict[str, Any], text: str) -> None:
    driver = open_driver(is_lora_on=False, max_model_len=64)
    made = driver._front.inputs.prepare("r", (3, 4), SamplingParams(max_tokens=2)).children[0]
    assert driver.engine.add_request(replace(made, request_id="whole")) == []  # its prompt is known to be right
    with pytest.raises(InvalidRequestError, match=text):
        driver.engine.add_request(replace(made, **fields))
    driver.engine.abort(["whole"])
