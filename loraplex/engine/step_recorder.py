"""Records the steps of an engine while a profile runs: what each was made of, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.performance.steps import StepKind, StepProfile, StepSums, Timeline, size_class


class StepRecorder:
    """`begin` before a step and `end` at its commit, each with the seconds by part so far.

    Every second counts once. With look-ahead those of a step's launch go to the step that is committed in the same
    call.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun_s = clock()
        self._before: Mapping[str, float] = {}
        self._sums: dict[StepKind, StepSums] = {}
        self._timeline = Timeline()

    def begin(self, seconds: Mapping[str, float]) -> None:
        self._before = seconds

    def end(self, plan: SchedulePlan, seconds: Mapping[str, float], step_parts: tuple[str, ...]) -> None:
        """Count a committed step. `step_parts`: those that add up to the step."""
        sums = self._sums_of(plan)
        spent = {part: total - self._before.get(part, 0.0) for part, total in seconds.items()}
        num_sampled = sum(sequence.is_sampled for sequence in plan.sequences)
        sums.num_steps += 1
        sums.num_rows += len(plan.sequences)
        sums.num_base_rows += sum(sequence.state.request.adapter_id is None for sequence in plan.sequences)
        sums.num_tokens += num_sampled
        sums.num_prefill_tokens += sum(each.num_tokens for each in plan.sequences if _is_prefill(each.num_tokens))
        self._before = seconds
        for part, each in spent.items():
            sums.seconds[part] = sums.seconds.get(part, 0.0) + each
        sums.times.observe(sum(spent.get(part, 0.0) for part in step_parts))
        self._timeline.add(self._clock() - self._begun_s, num_sampled)

    def profile(self) -> StepProfile:
        return StepProfile(self._clock() - self._begun_s, tuple(self._sums.values()), self._timeline)

    def _sums_of(self, plan: SchedulePlan) -> StepSums:
        adapters = {sequence.state.request.adapter_id for sequence in plan.sequences} - {None}
        has_prefill = any(_is_prefill(sequence.num_tokens) for sequence in plan.sequences)
        kind = StepKind(size_class(len(adapters)), size_class(len(plan.sequences)), has_prefill)
        return self._sums.setdefault(kind, StepSums(kind))


def _is_prefill(num_tokens: int) -> bool:
    """A prompt that is one token long, or cached but for one, costs what a decode costs, and counts as one."""
    return num_tokens > 1
