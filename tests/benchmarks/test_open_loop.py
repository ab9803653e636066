"""Schedules are what they say, and an open loop notes when things came: on its own clock, nothing is timed."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.open_loop import (
    CUT_OFF,
    Arrival,
    Lengths,
    OpenLoop,
    Record,
    Spread,
    Summary,
    arrival_times,
    power_law,
    saturated_rate,
    schedule,
)
from loraplex.core import CompletionOutput, LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import EngineError, EngineOverloadedError
from loraplex.frontend.llm import LLM

ADAPTER = LoRARequest("one", 1, "/somewhere")

# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0, 8.0])
def test_gaps_have_their_mean_and_variation(cv: float) -> None:
    times = arrival_times(50_000, 8.0, cv, seed=3)
    gaps = np.diff([0.0, *times])
    assert times == sorted(times)
    assert times[-1] == pytest.approx(50_000 / 8.0)
    assert gaps.mean() == pytest.approx(1 / 8.0)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_a_short_schedule_has_its_rate_too() -> None:
    for seed in range(5):
        assert arrival_times(20, 5.0, 8.0, seed)[-1] == pytest.approx(4.0)


def test_arrivals_are_seeded() -> None:
    assert arrival_times(9, 1.0, 2.0, seed=1) == arrival_times(9, 1.0, 2.0, seed=1)
    assert arrival_times(9, 1.0, 2.0, seed=1) != arrival_times(9, 1.0, 2.0, seed=2)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_adapters_are_drawn_by_the_power_law(alpha: float) -> None:
    """P(index < k) = (k / n) ^ alpha."""
    drawn = power_law(2000, alpha, 20_000, seed=5)
    assert drawn == [int(x * 2000) for x in np.random.default_rng(5).power(alpha, 20_000)]
    assert 0 <= min(drawn) <= max(drawn) < 2000
    share = sum(index < 200 for index in drawn) / len(drawn)
    assert share == pytest.approx(0.1**alpha, abs=0.02)


def test_prompts_and_lengths_do_not_depend_on_the_adapters() -> None:
    due_s = [0.0, 0.5, 2.0]
    one, other = (
        schedule(due_s, adapters, Lengths(3, 9), Lengths(2, 4), 100, seed=7) for adapters in ([ADAPTER] * 3, [None] * 3)
    )
    assert [(a.due_s, a.prompt, a.output_len) for a in one] == [(a.due_s, a.prompt, a.output_len) for a in other]
    assert [arrival.lora_request for arrival in one] == [ADAPTER] * 3
    assert all(3 <= len(arrival.prompt) <= 9 and 2 <= arrival.output_len <= 4 for arrival in one)
    assert len({tuple(arrival.prompt) for arrival in one}) == 3


def test_lengths() -> None:
    assert Lengths.of("8-64") == Lengths(8, 64)
    assert (Lengths.of("5"), str(Lengths.of("5")), str(Lengths(8, 64)), Lengths(8, 64).mean) == (
        Lengths(5, 5),
        "5",
        "8-64",
        36,
    )
    drawn = Lengths(2, 4).draw(200, np.random.default_rng(1))
    assert set(drawn) == {2, 3, 4}
    for text in ("0", "9-8", "-3", "8-", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            Lengths.of(text)


# -------------------------------------------------------------------------------------------------------------- figures


def test_percentiles() -> None:
    spread = Spread.of(range(1, 102))
    assert spread == Spread(mean=51.0, p50=51.0, p90=91.0, p99=100.0, max=101.0)
    assert Spread.of([]) is None


def a_record(due_s: float, token_s: list[float], error: str = "") -> Record:
    return Record(Arrival(due_s, None, [5], len(token_s)), due_s, token_s, error)


def test_records_become_a_summary() -> None:
    first = [a_record(1.0, [1.5, 1.75, 2.0]), a_record(2.0, [4.0])]
    second = [a_record(0.0, [1.0, 2.0]), a_record(0.5, [], "no room")]
    summary = Summary.of([first, second])
    assert (summary.num_requests, summary.num_failed, summary.errors) == (4, 1, ("no room",))
    assert summary.busy_s == (4.0 - 1.0) + (2.0 - 0.0)
    assert summary.tokens_per_s == 6 / 5.0
    assert summary.time_to_first_token_s is not None
    assert (summary.time_to_first_token_s.p50, summary.time_to_first_token_s.max) == (1.0, 2.0)
    assert summary.inter_token_s is not None
    assert summary.inter_token_s.mean == pytest.approx((0.25 + 0.25 + 1.0) / 3)
    assert summary.end_to_end_s is not None
    assert summary.end_to_end_s.p50 == 2.0


def test_nothing_that_ended_is_a_summary_too() -> None:
    summary = Summary.of([[a_record(0.0, [], "no room")]])
    assert (summary.tokens_per_s, summary.time_to_first_token_s, summary.num_failed) == (0.0, None, 1)


def test_a_saturated_rate_counts_for_as_long_as_somebody_waits() -> None:
    records = [a_record(0.0, [1.0, 2.0, 3.0]), a_record(0.0, [2.0, 3.0]), a_record(0.0, [], "no room")]
    assert saturated_rate(records) == 3 / 2.0
    assert saturated_rate([]) == 0.0


# ------------------------------------------------------------------------------------------------------------- the loop


@dataclass
class FakeLLM:
    """A token for each request and step; a step takes a second."""

    now: float = 100.0
    max_running: int = 9
    failing: set[str] = field(default_factory=set)
    running: dict[str, list[int]] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.names = (f"r{number}" for number in itertools.count())

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now += seconds

    def submit(self, prompt: Any, params: SamplingParams, *, lora_request: LoRARequest | None = None) -> str:
        if len(self.running) >= self.max_running:
            raise EngineOverloadedError("too many")
        name = next(self.names)
        assert params.max_tokens is not None
        self.running[name], self.wanted[name] = [], params.max_tokens
        return name

    def step(self, stalled_wait_s: float) -> list[RequestOutput]:
        self.now += 1.0
        self.waits_s.append(stalled_wait_s)
        outputs = []
        for name in list(self.running):
            tokens = self.running[name]
            tokens.append(7)
            is_finished = len(tokens) == self.wanted[name] or name in self.failing
            error = EngineError("broken") if name in self.failing else None
            completions = () if error else (CompletionOutput(0, "", tuple(tokens)),)
            outputs.append(RequestOutput(name, None, (5,), completions, is_finished, error=error))
            if is_finished:
                del self.running[name]
        return outputs

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.running.pop(request_id, None) is not None


def play(llm: FakeLLM, *arrivals: tuple[float, int], limit_s: float = 1000.0) -> list[Record]:
    listed = [Arrival(due_s, None, [5], output_len) for due_s, output_len in arrivals]
    return OpenLoop(cast(LLM, llm), listed, limit_s, llm.clock, llm.sleep).run()


def test_waiting_counts_from_when_a_request_was_due() -> None:
    """The second one is due within a step, and is handed in after it."""
    llm = FakeLLM()
    first, second = play(llm, (0.0, 3), (1.25, 2))
    assert (first.submitted_s, first.token_s, first.error) == (0.0, [1.0, 2.0, 3.0], "")
    assert (second.submitted_s, second.token_s) == (2.0, [3.0, 4.0])
    assert second.time_to_first_token_s == 1.75
    assert second.end_to_end_s == 2.75
    assert second.gaps_s == [1.0]


def test_an_idle_engine_sleeps_until_the_next_is_due() -> None:
    llm = FakeLLM()
    play(llm, (2.5, 1), (10.0, 1))
    assert llm.slept_s == [2.5, 6.5]


def test_a_stalled_engine_waits_no_longer_than_until_the_next_is_due() -> None:
    llm = FakeLLM()
    play(llm, (0.0, 2), (0.02, 1), (1000.0, 1))
    assert llm.waits_s[0] == pytest.approx(0.02)
    assert set(llm.waits_s[1:]) == {0.05}


def test_failures_are_noted_and_nobody_waits_for_them() -> None:
    llm = FakeLLM(failing={"r0"}, max_running=2)
    failed, good, refused = play(llm, (0.0, 3), (0.0, 2), (0.0, 2))
    assert (failed.error, failed.token_s) == ("broken", [])
    assert (good.error, good.token_s) == ("", [1.0, 2.0])
    assert (refused.error, refused.token_s) == ("too many", [])


def test_what_has_not_ended_at_the_limit_is_cut_off() -> None:
    llm = FakeLLM()
    ended, running, to_come = play(llm, (0.0, 2), (0.0, 50), (70.0, 1), limit_s=4.0)
    assert (ended.error, running.error, to_come.error) == ("", CUT_OFF, CUT_OFF)
    assert len(running.token_s) == 5
    assert llm.aborted == ["r1"]
    assert not llm.running
