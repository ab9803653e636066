"""What the steps of a profile were made of and what they took: sums by kind of step, never the steps themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """All steps of one kind. seconds: by part (loraplex/profiler.py); num_tokens: drawn ones."""

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
