"""What a step takes: a sum of its features, each with a coefficient that is not negative, fitted to measured steps.

    ms(step) := sum over i of coefficient_i * feature_i(step),   coefficient_i >= 0

Features are counts of the plan alone: a constant; tokens; drawn rows; KV that attention reads; distinct adapters, their
ranks, and the tokens that go through them. Reading weights hides the first rows of a step, and large products run
better than small ones: so tokens and rows are there as straight lines, as what is above a bound and as what is below
it, and their sum can bend either way. The tokens of each adapter are there as a line and as what is below a bound: one
line through decodes, of which an adapter has a token or two, and prompts of hundreds would make prompts too dear and
take it off the base's. The sum never falls with more work.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.engine.schedule_plan import SchedulePlan

Floats = npt.NDArray[np.float64]

ABOVE_TOKENS = (4, 16, 64, 256)
BELOW_TOKENS = (4, 16, 64, 256)
ABOVE_ROWS = (8,)
BELOW_ROWS = (8,)
BELOW_ADAPTER_TOKENS = (4, 16, 64)

FEATURES = (
    "steps",
    "tokens",
    *(f"tokens above {bound}" for bound in ABOVE_TOKENS),
    *(f"tokens below {bound}" for bound in BELOW_TOKENS),
    "rows",
    *(f"rows above {bound}" for bound in ABOVE_ROWS),
    *(f"rows below {bound}" for bound in BELOW_ROWS),
    "KV tokens of decodes",
    "KV tokens of prompts",
    "adapters",
    "ranks",
    *(f"tokens x rank below {bound}" for bound in BELOW_ADAPTER_TOKENS),
    "tokens x rank",
)
"""In the order of the coefficients."""

TRIM_ROUNDS = 3
TRIM_ABOVE = 3.0
"""A measured step that is off by so many times the median error was disturbed: the fit leaves it out."""


RUN_STEPS = 32
"""Steps of one size in turn that are disturbed as measured ones were."""

SIZES = (4, 16, 64, 256)
"""Most tokens of a step of each size but the last: the fit may be off for one, and a disturbance of small steps is not
that of large ones."""


class StepWork(NamedTuple):
    """A step in numbers.

    num_rows: sequences that draw a token. num_decode_kv: of sequences that run one token, the tokens before it;
    num_prompt_kv: of the others, for each of their tokens those before it. adapters: rank and tokens of each.
    """

    num_tokens: int
    num_rows: int
    num_decode_kv: int
    num_prompt_kv: int
    adapters: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, plan: SchedulePlan, rank_of: Mapping[int, int]) -> StepWork:
        """rank_of: by adapter id."""
        num_tokens = num_rows = num_decode_kv = num_prompt_kv = 0
        tokens_of: dict[int, int] = {}
        for sequence in plan.sequences:
            count = sequence.num_tokens
            num_tokens += count
            num_rows += sequence.is_sampled
            if count == 1:
                num_decode_kv += sequence.start + 1
            else:
                num_prompt_kv += count * sequence.start + count * (count + 1) // 2
            for adapter_id in sequence.state.request.adapter_ids:
                tokens_of[adapter_id] = tokens_of.get(adapter_id, 0) + count
        adapters = tuple((rank_of[adapter_id], count) for adapter_id, count in tokens_of.items())
        return cls(num_tokens, num_rows, num_decode_kv, num_prompt_kv, adapters)

    def features(self) -> tuple[float, ...]:
        """In the order of FEATURES."""
        tokens, rows = self.num_tokens, self.num_rows
        return (
            1.0,
            tokens,
            *(max(0, tokens - bound) for bound in ABOVE_TOKENS),
            *(min(tokens, bound) for bound in BELOW_TOKENS),
            rows,
            *(max(0, rows - bound) for bound in ABOVE_ROWS),
            *(min(rows, bound) for bound in BELOW_ROWS),
            self.num_decode_kv,
            self.num_prompt_kv,
            len(self.adapters),
            sum(rank for rank, _ in self.adapters),
            *(sum(rank * min(count, bound) for rank, count in self.adapters) for bound in BELOW_ADAPTER_TOKENS),
            sum(rank * count for rank, count in self.adapters),
        )


class StepModel:
    """coefficients: milliseconds for one of each of FEATURES, in their order."""

    def __init__(self, coefficients: Sequence[float] | Floats) -> None:
        assert len(coefficients) == len(FEATURES), "a coefficient for each feature"
        self.coefficients = tuple(float(each) for each in coefficients)

    def ms(self, work: StepWork) -> float:
        return sum(map(float.__mul__, self.coefficients, map(float, work.features())))

    def errors(self, works: Sequence[StepWork], measured_ms: Sequence[float]) -> Floats:
        """|predicted - measured| / measured, of each step."""
        measured = np.array(measured_ms)
        predicted = np.array([self.ms(work) for work in works])
        return np.asarray(np.abs(predicted - measured) / measured)

    @classmethod
    def fit(cls, works: Sequence[StepWork], measured_ms: Sequence[float]) -> StepModel:
        """To the relative error, so that short steps count as much as long ones; disturbed ones are left out."""
        rows, measured = np.array([work.features() for work in works]), np.array(measured_ms)
        used = np.ones(len(measured), bool)
        model = cls(nnls(rows / measured[:, None], np.ones(len(measured))))
        for _ in range(TRIM_ROUNDS):
            errors = model.errors(works, measured_ms)
            used = errors <= TRIM_ABOVE * max(float(np.median(errors)), 1e-9)
            model = cls(nnls(rows[used] / measured[used, None], np.ones(int(used.sum()))))
        return model


class Disturbances:
    """What the next step takes over what the model says: runs of RUN_STEPS measured ratios of steps of its size, each
    from a drawn place.

    The median of the ratios is about 1, and their mean is above it: other load on a machine makes steps slower, for
    several steps in turn. A size without ratios has those of the next one that has any; without any every step takes
    what the model says. This is a block bootstrap (Künsch, Annals of Statistics 17, 1989).

    ratios: (tokens, measured over predicted) of steps in their order.
    """

    def __init__(self, ratios: Iterable[tuple[int, float]], seed: int) -> None:
        self._draw = random.Random(seed)
        by_size: list[list[float]] = [[] for _ in range(len(SIZES) + 1)]
        for num_tokens, ratio in ratios:
            by_size[_size(num_tokens)].append(ratio)
        known = [size for size, found in enumerate(by_size) if found]
        self._ratios = [by_size[min(known, key=lambda each: abs(each - size))] for size in range(len(by_size)) if known]
        self._runs: list[list[float]] = [[] for _ in by_size]

    def next(self, num_tokens: int) -> float:
        if not self._ratios:
            return 1.0
        size = _size(num_tokens)
        if not self._runs[size]:
            ratios = self._ratios[size]
            begin = self._draw.randrange(len(ratios))
            self._runs[size] = ratios[begin : begin + RUN_STEPS][::-1]
        return self._runs[size].pop()


def _size(num_tokens: int) -> int:
    return bisect.bisect_left(SIZES, num_tokens)


def nnls(matrix: Floats, target: Floats) -> Floats:
    """argmin over x >= 0 of ||matrix x - target||_2, by the active-set method of Lawson and Hanson (1974, ch. 23).

    Columns are scaled to length 1 first: a constant and a product of two counts are of different sizes.
    """
    scales = np.linalg.norm(matrix, axis=0)
    scales[scales == 0] = 1.0
    scaled = matrix / scales
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], bool)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(target)))
    for _ in range(30 * matrix.shape[1]):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                solution = trial
                break
            steps = solution[negative] / (solution[negative] - trial[negative])
            solution = solution + float(steps.min()) * (trial - solution)
            free &= solution > 1e-14
            solution[~free] = 0.0
    return np.asarray(solution / scales)
