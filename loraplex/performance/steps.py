"""What the steps of a profile were made of and what they took: sums by kind of step, never the steps themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from loraplex.performance.histogram import Histogram

MAX_MOMENTS = 240


def size_class(count: int) -> int:
    """0, 1, 2, 4, 8, ...: the largest power of two that is not above `count`."""
    return 0 if count == 0 else 1 << (count.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class StepKind:
    """num_adapters, num_rows: distinct adapters and sequences, as `size_class`; has_prefill: prompts are among them."""

    num_adapters: int
    num_rows: int
    has_prefill: bool


@dataclass(slots=True)
class StepSums:
    """All steps of one kind. seconds: by part (loraplex/performance/profiler.py); num_tokens: drawn ones."""

    kind: StepKind
    num_steps: int = 0
    num_rows: int = 0
    num_base_rows: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    times: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Timeline:
    """Tokens drawn in each stretch of `stretch_s` seconds. At most MAX_MOMENTS stretches: then each doubles."""

    stretch_s: float = 0.25
    num_tokens: list[int] = field(default_factory=list)

    def add(self, at_s: float, num_tokens: int) -> None:
        """at_s: seconds since the start."""
        while at_s >= self.stretch_s * MAX_MOMENTS:
            pairs = zip(self.num_tokens[::2], [*self.num_tokens[1::2], 0], strict=False)
            self.num_tokens = [first + second for first, second in pairs]
            self.stretch_s *= 2
        index = int(at_s / self.stretch_s)
        self.num_tokens += [0] * (index + 1 - len(self.num_tokens))
        self.num_tokens[index] += num_tokens


@dataclass(frozen=True, slots=True)
class StepProfile:
    """All steps of `seconds` of an engine's life."""

    seconds: float = 0.0
    sums: tuple[StepSums, ...] = ()
    timeline: Timeline = field(default_factory=Timeline)

    @classmethod
    def of_all(cls, profiles: Sequence[StepProfile]) -> StepProfile:
        """Of several engines at the same time; `seconds` are the sum of theirs."""
        timeline = Timeline()
        for each in profiles:
            for index, num_tokens in enumerate(each.timeline.num_tokens):
                timeline.add(index * each.timeline.stretch_s, num_tokens)
        sums = (sums for each in profiles for sums in each.sums)
        return cls(sum(each.seconds for each in profiles), tuple(sums), timeline)

    @property
    def num_steps(self) -> int:
        return sum(each.num_steps for each in self.sums)

    @property
    def part_seconds(self) -> Mapping[str, float]:
        """By part, over all steps."""
        total: dict[str, float] = {}
        for each in self.sums:
            for part, seconds in each.seconds.items():
                total[part] = total.get(part, 0.0) + seconds
        return total

    @property
    def has_kernel_parts(self) -> bool:
        """Whether the backend told where the time of `forward` goes (profiler.KERNEL_PARTS)."""
        return self.part_seconds.get("gemm", 0.0) > 0


class StepRow(NamedTuple):
    """One sequence of a step. adapter_ids: () for the base model; num_tokens: that the step computed of it, without a
    draft; num_drawn: that it got."""

    adapter_ids: tuple[int, ...]
    num_tokens: int
    num_drawn: int

    @property
    def is_prefill(self) -> bool:
        """A prompt that is one token long, or cached but for one, costs what a decode costs, and counts as one."""
        return self.num_tokens > 1


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

    def end(self, rows: Sequence[StepRow], seconds: Mapping[str, float], step_parts: tuple[str, ...]) -> None:
        """Count a committed step. `step_parts`: those that add up to the step."""
        sums = self._sums_of(rows)
        spent = {part: total - self._before.get(part, 0.0) for part, total in seconds.items()}
        num_drawn = sum(row.num_drawn for row in rows)
        sums.num_steps += 1
        sums.num_rows += len(rows)
        sums.num_base_rows += sum(not row.adapter_ids for row in rows)
        sums.num_tokens += num_drawn
        sums.num_prefill_tokens += sum(row.num_tokens for row in rows if row.is_prefill)
        self._before = seconds
        for part, each in spent.items():
            sums.seconds[part] = sums.seconds.get(part, 0.0) + each
        sums.times.observe(sum(spent.get(part, 0.0) for part in step_parts))
        self._timeline.add(self._clock() - self._begun_s, num_drawn)

    def profile(self) -> StepProfile:
        return StepProfile(self._clock() - self._begun_s, tuple(self._sums.values()), self._timeline)

    def _sums_of(self, rows: Sequence[StepRow]) -> StepSums:
        adapters = {adapter_id for row in rows for adapter_id in row.adapter_ids}
        has_prefill = any(row.is_prefill for row in rows)
        kind = StepKind(size_class(len(adapters)), size_class(len(rows)), has_prefill)
        return self._sums.setdefault(kind, StepSums(kind))
