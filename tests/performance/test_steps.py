"""Sums of steps by kind, the timeline, and what adapters cost a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.performance.profile import mixes, slowdown
from loraplex.performance.profiler import STEP_PARTS
from loraplex.performance.steps import (
    MAX_MOMENTS,
    StepKind,
    StepProfile,
    StepRecorder,
    StepRow,
    StepSums,
    Timeline,
    size_class,
)


def test_size_classes() -> None:
    assert [size_class(count) for count in (0, 1, 2, 3, 4, 7, 8, 100)] == [0, 1, 2, 2, 4, 4, 8, 64]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=300))
def test_a_timeline_loses_no_token_and_stays_short(gaps: list[tuple[float, int]]) -> None:
    timeline, now_s = Timeline(), 0.0
    for gap_s, count in gaps:
        now_s += gap_s
        timeline.add(now_s, count)
    assert sum(timeline.num_tokens) == sum(count for _, count in gaps)
    assert len(timeline.num_tokens) <= MAX_MOMENTS
    assert len(timeline.num_tokens) * timeline.stretch_s >= now_s or not gaps


def test_a_timeline_that_gets_coarser_keeps_the_order() -> None:
    timeline = Timeline(1.0)
    for at_s in range(2 * MAX_MOMENTS):
        timeline.add(at_s, at_s)
    assert timeline.stretch_s == 2.0
    assert timeline.num_tokens[:3] == [1, 5, 9]


def row(adapter_id: int | None, num_tokens: int = 1, num_drawn: int = 1) -> StepRow:
    return StepRow(() if adapter_id is None else (adapter_id,), num_tokens, num_drawn)


def test_a_step_is_counted_under_its_kind() -> None:
    now = iter((0.0, 0.5, 1.0, 2.0))
    recorder = StepRecorder(lambda: next(now))
    recorder.begin({"schedule": 1.0, "forward": 5.0, "gemm": 2.0})
    decode = [row(7), row(8), row(None)]
    recorder.end(decode, {"schedule": 1.25, "forward": 6.0, "gemm": 2.5}, STEP_PARTS)
    recorder.begin({"forward": 6.0})
    prefill = [row(7, 3, num_drawn=0), row(None)]
    recorder.end(prefill, {"forward": 7.0}, STEP_PARTS)
    profile = recorder.profile()
    first, second = profile.sums
    assert (first.kind, second.kind) == (StepKind(2, 2, False), StepKind(1, 2, True))
    assert (first.num_rows, first.num_base_rows, first.num_tokens, first.num_prefill_tokens) == (3, 1, 3, 0)
    assert first.seconds == {"schedule": 0.25, "forward": 1.0, "gemm": 0.5}
    assert first.times.total_s == pytest.approx(1.25)  # without gemm, which is a part of forward
    assert (second.num_tokens, second.num_prefill_tokens) == (1, 3)
    assert (profile.num_steps, profile.seconds, profile.part_seconds["forward"]) == (2, 2.0, 2.0)
    assert profile.has_kernel_parts
    assert sum(profile.timeline.num_tokens) == 4


def sums(
    num_adapters: int, num_rows: int, times_s: list[float], has_prefill: bool = False, **seconds: float
) -> StepSums:
    each = StepSums(StepKind(num_adapters, num_rows, has_prefill), len(times_s), num_rows * len(times_s))
    each.num_tokens = each.num_rows
    each.seconds = dict(seconds)
    for time_s in times_s:
        each.times.observe(time_s)
    return each


def test_adapters_are_compared_with_as_many_rows_of_the_base() -> None:
    profile = StepProfile(
        1.0,
        (
            sums(0, 8, [0.01, 0.03], gemm=0.03),
            sums(0, 64, [0.9]),
            sums(0, 8, [5.0], has_prefill=True),
            sums(1, 8, [0.03, 0.03], gemm=0.04, lora=0.01),
            sums(2, 8, [0.04], gemm=0.03, lora=0.01),
            sums(2, 16, [9.0]),  # nothing to compare with
        ),
    )
    base, one, two = mixes(profile)
    assert (base.slowdown, base.lora_share) == (None, 0.0)
    assert (one.least_adapters, one.num_steps, one.slowdown) == (1, 2, pytest.approx(1.5))
    assert one.lora_share == pytest.approx(0.2)
    assert one.tokens_per_s == pytest.approx(16 / 0.06)
    assert (two.slowdown, two.mean_rows) == (pytest.approx(2.0), 12.0)
    assert slowdown([profile.sums[5]], profile.sums) is None


def test_without_kernel_parts_the_share_is_unknown() -> None:
    (mix,) = mixes(StepProfile(1.0, (sums(1, 1, [0.1], forward=0.1),)))
    assert mix.lora_share is None
