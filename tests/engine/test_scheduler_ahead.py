"""The scheduler with a plan in flight while the next is made, over fakes: outputs are those of one plan at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import FinishReason, TokenOutput
from loraplex.engine.schedule_plan import SampledToken, SchedulePlan
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import EngineError
from tests.engine.test_scheduler import EOS, Harness, ran

STOP = 98


class Ahead(Harness):
    """`step` makes and "launches" the next plan before it commits the last one. Tokens depend on request and
    position."""

    def __init__(self, *, is_ahead: bool = True, **settings: Any) -> None:
        super().__init__(**settings)
        self.is_ahead = is_ahead
        self.flights: list[SchedulePlan] = []
        self.ends: dict[str, tuple[int, int]] = {}  # request -> (position, token) of a token that ends it
        self.errors: dict[str, int] = {}  # request -> position whose logits are wrong
        self.num_ahead = 0

    def step(self) -> SchedulePlan:
        if self.flights and self.scheduler.needs_commit():
            self.land()
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self._take(plan.failed)
        self.num_ahead += bool(self.flights) and bool(plan.sequences)
        if plan.sequences:
            self.flights.append(plan)
        self._check_pending(plan)
        while len(self.flights) > (self.is_ahead and bool(plan.sequences)):
            self.land()
        return plan

    def land(self) -> None:
        plan = self.flights.pop(0)
        tokens = {}
        for sequence in plan.sequences:
            name, position = sequence.state.request.request_id, sequence.end - sequence.state.num_prompt_tokens
            is_wrong = self.errors.get(name) == position
            end_position, end_token = self.ends.get(name, (-1, 0))
            token_id = end_token if end_position == position else 10 + position % 50
            error = EngineError("NaN") if is_wrong else None
            if sequence.is_sampled:
                tokens[name] = SampledToken(0 if is_wrong else token_id, error=error)
        self._take(self.scheduler.commit(plan, tokens))

    def _check_pending(self, plan: SchedulePlan) -> None:
        """Everything that a sequence reads is computed, in this step, or in the one in flight; at most one token of it
        is not known."""
        for sequence in plan.sequences:
            state = sequence.state
            assert sequence.end <= len(state.token_ids) + (len(self.flights) > 1)
            assert len(self.blocks.block_table(state.request.request_id)) * self.blocks.block_size >= sequence.end

    def run(self, limit: int = 1000) -> int:
        for count in range(limit):
            if not self.scheduler.has_unfinished:
                while self.flights:
                    self.land()
                assert self.blocks.num_free_blocks == self.blocks.num_blocks
                assert self.residency.refs == {}
                return count
            self.step()
        raise AssertionError(f"not finished after {limit} steps")


class TestAhead:
    def test_the_next_token_is_scheduled_while_the_last_is_drawn(self) -> None:
        harness = Ahead()
        harness.add("a", length=4, max_tokens=5)
        first, second = harness.step(), harness.step()
        assert [sequence.end for plan in (first, second) for sequence in plan.sequences] == [4, 5]
        assert harness.tokens("a") == [10]
        harness.run()
        assert len(harness.tokens("a")) == 5
        assert sum(len(plan.sequences) for plan in harness.plans) == 5, "max_tokens is known: no step is wasted"

    def test_max_tokens_1_runs_once(self) -> None:
        harness = Ahead()
        harness.add("a", max_tokens=1)
        harness.run()
        assert [len(plan.sequences) for plan in harness.plans] == [1, 0]

    def test_the_models_length_is_known_too(self) -> None:
        harness = Ahead(num_blocks=2)
        harness.add("a", length=14, max_tokens=50)
        harness.run()
        assert len(harness.tokens("a")) == 2
        assert sum(len(plan.sequences) for plan in harness.plans) == 2

    def test_seats_are_counted_once_a_step_however_many_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Thousands may wait for their adapters while seats are free, and each count looks at all that run."""
        harness = Ahead(seqs=3)
        for name in ("a", "b", "c"):
            harness.add(name, max_tokens=3 if name == "a" else 6)
        harness.step()
        counted, count = [], Scheduler._num_seats_taken.fget
        assert count is not None

        def counting(scheduler: Scheduler) -> int:
            counted.append(count(scheduler))
            return counted[-1]

        monkeypatch.setattr(Scheduler, "_num_seats_taken", property(counting))
        for name in ("d", "e", "f", "g"):
            harness.add(name, max_tokens=6)
        plans = [harness.step() for _ in range(4)]
        assert len(counted) == 4
        assert max(len(plan.sequences) for plan in plans) == 3
        harness.run()

    def test_what_is_drawn_after_the_end_is_dropped_and_not_cached(self) -> None:
        harness = Ahead()
        harness.ends["a"] = (4, EOS)  # with the prompt 16 tokens, two blocks
        harness.add("a", length=11, max_tokens=50)
        harness.run()
        assert harness.tokens("a") == [10, 11, 12, 13, EOS]
        assert harness.reason("a") is FinishReason.STOP
        assert sum(len(plan.sequences) for plan in harness.plans) == 6, "one step was wasted"
        assert harness.scheduler.num_generated_tokens == 5
        harness.add("again", length=11, max_tokens=1)
        state = harness.scheduler._states["again"]
        state.token_ids = [
            *state.token_ids,
            10,
            11,
            12,
            13,
            EOS,
            1,
        ]  # as after a preemption: it may share what is cached of these
        harness.step()
        assert state.num_cached_tokens == 8, "the KV of the last token, which filled a block, is not"

    def test_its_kv_and_adapter_stay_until_the_step_in_flight_is_done(self) -> None:
        harness = Ahead()
        harness.ends["a"] = (0, EOS)
        harness.add("a", adapter=1)
        harness.add("b", adapter=2, max_tokens=9)
        harness.step()
        harness.step()
        assert harness.reason("a") is FinishReason.STOP
        assert harness.residency.refs == {1: 1, 2: 1}
        harness.step()
        assert harness.residency.refs == {2: 1}
        harness.run()

    def test_a_name_may_come_back_at_once(self) -> None:
        harness = Ahead()
        harness.ends["a"] = (1, EOS)
        harness.add("a")
        harness.add("b", max_tokens=20)
        while "a" not in harness.outputs or harness.reason("a") is None:
            harness.step()
        harness.outputs.pop("a")
        harness.add("a")
        assert "a" not in ran(harness.step()), "the old one's KV is in use"
        assert "a" in ran(harness.step())
        harness.run()
        assert harness.tokens("a") == [10, EOS]

    def test_a_prompt_in_chunks_needs_no_commit_between_them(self) -> None:
        harness = Ahead(tokens=16)
        harness.add("long", 40, prompt_logprobs=None)
        assert [ran(harness.step()) for _ in range(3)] == [{"long": 16}, {"long": 16}, {"long": 8}]
        assert harness.num_ahead == 2
        harness.run()

    @pytest.mark.parametrize(
        "params", [{"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}], ids=str
    )
    def test_penalties_wait_for_the_token(self, params: dict[str, float]) -> None:
        harness = Ahead(tokens=16)
        harness.add("a", 20, max_tokens=6, **params)
        harness.run()
        assert harness.num_ahead == 1, "the second chunk of the prompt alone"

    def test_bias_and_min_tokens_do_not(self) -> None:
        harness = Ahead()
        harness.add("a", max_tokens=6, min_tokens=3, logit_bias={3: 1.0})
        harness.run()
        assert harness.num_ahead == 5

    def test_prompt_logprobs_wait_between_chunks(self) -> None:
        harness = Ahead(tokens=16)
        harness.add("a", 40, max_tokens=6, prompt_logprobs=1)
        harness.run()
        assert harness.num_ahead == 5

    def test_who_ends_for_sure_leaves_its_seat(self) -> None:
        harness = Ahead(seqs=1)
        for name in "ab":
            harness.add(name, max_tokens=2)
        assert [set(ran(harness.step())) for _ in range(4)] == [{"a"}, {"a"}, {"b"}, {"b"}]
        harness.run()

    def test_nobody_in_flight_is_preempted(self) -> None:
        harness = Ahead(num_blocks=4)
        harness.add("a", length=12, max_tokens=12)
        harness.add("b", length=12, max_tokens=12)
        harness.run()
        assert harness.scheduler.num_preemptions > 0
        assert len(harness.tokens("a")) == len(harness.tokens("b")) == 12

    def test_an_aged_adapter_gets_in_within_its_bound(self) -> None:
        harness = Ahead(room=1, aging_steps=8)
        harness.add("hog", adapter=1, max_tokens=100)
        harness.step()
        harness.add("late", adapter=2, max_tokens=2)
        num_steps = next(count for count in range(1, 14) if "late" in ran(harness.step()))
        assert num_steps <= 11
        harness.run()
        assert len(harness.tokens("hog")) == 100

    def test_abort_of_what_two_steps_run(self) -> None:
        harness = Ahead()
        for name in "ab":
            harness.add(name, adapter=1, max_tokens=9)
        harness.step()
        plan = harness.scheduler.schedule()
        harness.flights.append(plan)
        ended = harness.scheduler.abort("a")
        assert ended is not None
        assert ended.finish_reason is FinishReason.ABORT
        harness.scheduler.check_integrity()
        harness.land()
        assert "a" not in harness.outputs
        assert harness.residency.refs == {1: 2}
        harness.land()
        assert harness.residency.refs == {1: 1}
        harness.run()
        assert len(harness.tokens("b")) == 9

    def test_a_failed_step_takes_those_of_the_next_with_it(self) -> None:
        harness = Ahead()
        harness.add("a", max_tokens=9)
        harness.step()
        harness.add("b", max_tokens=3)
        harness.flights.append(harness.scheduler.schedule())
        harness._take(harness.scheduler.fail(harness.flights.pop(0), EngineError("broken")))
        assert harness.reason("a") is FinishReason.ERROR
        harness.run()
        assert harness.tokens("a") == []
        assert len(harness.tokens("b")) == 3

    def test_an_adapter_fails_while_its_next_step_runs(self) -> None:
        harness = Ahead()
        harness.add("a", adapter=1, max_tokens=9)
        harness.add("b", max_tokens=9)
        harness.step()
        harness.step()
        (ended,) = harness.scheduler.fail_adapter(1, EngineError("NaN"))
        assert ended.request_id == "a"
        harness.scheduler.check_integrity()
        harness.run()
        assert len(harness.tokens("b")) == 9

    def test_no_third_plan(self) -> None:
        harness = Ahead()
        harness.add("a", max_tokens=9)
        harness.step()
        harness.scheduler.schedule()
        with pytest.raises(AssertionError, match="before the last is not committed"):
            harness.scheduler.schedule()


@dataclass(frozen=True)
class Case:
    """A request of the property test, when it comes, and what ends it."""

    arrival: int
    length: int
    max_tokens: int
    adapter: int | None
    end: tuple[int, int] | None
    error_at: int | None
    params: dict[str, Any] = field(default_factory=dict)


CASES = st.builds(
    Case,
    arrival=st.integers(0, 12),
    length=st.integers(1, 40),
    max_tokens=st.integers(1, 12),
    adapter=st.sampled_from([None, 1, 2, 3]),
    end=st.none() | st.tuples(st.integers(0, 12), st.sampled_from([EOS, STOP])),
    error_at=st.sampled_from([None, None, None, 0, 3]),
    params=st.sampled_from(
        [{}, {}, {"min_tokens": 3}, {"ignore_eos": True}, {"presence_penalty": 0.1}, {"prompt_logprobs": 0}]
    ),
)


def outputs_of(
    harness: Ahead, cases: Sequence[Case]
) -> dict[str, tuple[list[int], FinishReason | None, int | None, bool]]:
    for name, case in enumerate(cases):
        if case.end is not None:
            harness.ends[str(name)] = case.end
        if case.error_at is not None:
            harness.errors[str(name)] = case.error_at
    step = 0
    while step <= max(case.arrival for case in cases) or harness.scheduler.has_unfinished:
        for name, case in enumerate(cases):
            if case.arrival == step:
                params = {"stop_token_ids": (STOP,), **case.params}
                params["min_tokens"] = min(case.max_tokens, params.get("min_tokens", 0))
                harness.add(str(name), case.length, case.adapter, case.max_tokens, **params)
        harness.step()
        step += 1
        assert step < 3000
    harness.run()
    last: dict[str, TokenOutput] = {name: outputs[-1] for name, outputs in harness.outputs.items()}
    return {
        name: (harness.tokens(name), end.finish_reason, end.stop_token_id, end.error is None)
        for name, end in last.items()
    }


@given(
    cases=st.lists(CASES, min_size=1, max_size=10),
    num_blocks=st.integers(8, 20),
    seqs=st.integers(1, 6),
    tokens=st.integers(8, 40),
    room=st.integers(1, 3),
    aging_steps=st.sampled_from([1, 8, 40]),
)
@settings(max_examples=200, deadline=None)
def test_any_mix_has_the_outputs_of_one_plan_at_a_time(cases: list[Case], **limits: int) -> None:
    expected = outputs_of(Ahead(is_ahead=False, **limits), cases)
    assert outputs_of(Ahead(**limits), cases) == expected
    assert set(expected) == {str(name) for name in range(len(cases))}
