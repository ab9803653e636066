"""The fit: what non-negative least squares must be, and that steps of a known formula are found again."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loraplex.core import Request, SamplingParams
from loraplex.engine.schedule_plan import RequestState, ScheduledSequence, SchedulePlan
from loraplex.twin.step_model import FEATURES, RUN_STEPS, Disturbances, StepModel, StepWork, nnls

NUMBERS = st.floats(-100, 100, allow_nan=False).map(lambda number: round(number, 3))
PROBLEMS = st.tuples(st.integers(1, 12), st.integers(1, 6)).flatmap(
    lambda shape: st.tuples(arrays(float, shape, elements=NUMBERS), arrays(float, shape[0], elements=NUMBERS))
)


@given(PROBLEMS)
def test_a_fit_is_the_least_square_of_those_that_are_not_negative(problem: tuple[np.ndarray, np.ndarray]) -> None:
    """The conditions of Karush, Kuhn and Tucker, which hold for the least square alone."""
    matrix, target = problem
    found = nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ found)
    size = 1e-7 * max(1.0, float(np.abs(matrix).max()) ** 2 * len(target)) * max(1.0, float(np.abs(target).max()))
    assert (found >= 0).all()
    assert (gradient <= size).all(), "more of a feature would be nearer"
    assert (np.abs(gradient[found > 1e-9]) <= size).all(), "another amount of a used feature would be nearer"


def works(seed: int, count: int) -> list[StepWork]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        decodes, prompts = draw.choice([0, 1, 4, 9, 30]), draw.choice([0, 0, 1, 3])
        tokens = max(1, decodes + prompts * draw.choice([2, 20, 200]))
        num_adapters, rank = draw.choice([0, 1, 2, 7]), draw.choice([8, 64])
        adapters = tuple((rank, draw.randint(1, tokens)) for _ in range(num_adapters))
        made.append(StepWork(tokens, max(1, decodes + prompts), 100 * decodes, tokens * tokens // 2, adapters))
    return made


FORMULAS: dict[str, Callable[[StepWork], float]] = {
    "hidden by the weights": lambda work: 30 + 2.0 * max(0, work.num_tokens - 16) + 0.5 * len(work.adapters),
    "better in large products": lambda work: 5 + 3.0 * min(work.num_tokens, 16) + 0.3 * work.num_tokens,
    "all": lambda work: (
        1 + work.num_tokens + 0.2 * work.num_rows + 0.001 * work.num_decode_kv + 0.05 * sum(r for r, _ in work.adapters)
    ),
    "better in long parts of an adapter": lambda work: (
        5 + work.num_tokens + sum(rank * (0.002 * count + 0.05 * min(count, 16)) for rank, count in work.adapters)
    ),
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=list(FORMULAS))
def test_known_formulas_are_found(formula: Callable[[StepWork], float]) -> None:
    seen, others = works(1, 400), works(2, 100)
    model = StepModel.fit(seen, [formula(work) for work in seen])
    assert model.errors(others, [formula(work) for work in others]).max() < 1e-6
    assert min(model.coefficients) >= 0


def test_disturbed_steps_are_left_out() -> None:
    """One in ten takes thrice as long, since something else ran: the others are still met."""
    draw, formula = random.Random(3), FORMULAS["all"]
    seen, others = works(1, 400), works(2, 100)
    noisy = [formula(work) * draw.uniform(0.99, 1.01) * (3 if draw.random() < 0.1 else 1) for work in seen]
    errors = StepModel.fit(seen, noisy).errors(others, [formula(work) for work in others])
    assert np.median(errors) < 0.02


def test_steps_are_disturbed_in_runs_as_they_were_measured() -> None:
    ratios = [1 + number / 1000 for number in range(1000)]
    measured = [(8, ratio) for ratio in ratios]
    drawn = Disturbances(measured, seed=5)
    taken = [ratios.index(drawn.next(8)) for _ in range(40 * RUN_STEPS)]
    breaks = [index for index in range(1, len(taken)) if taken[index] != taken[index - 1] + 1]
    assert 30 < len(breaks) < 60, "a run ends after RUN_STEPS, or at the last ratio"
    again = Disturbances(measured, seed=5)
    assert [ratios.index(again.next(8)) for _ in range(len(taken))] == taken
    other = Disturbances(measured, seed=6)
    assert [ratios.index(other.next(8)) for _ in range(len(taken))] != taken


def test_a_step_is_disturbed_as_steps_of_its_size_were() -> None:
    """Small steps took a fifth more than the fit says, and large ones what it says."""
    drawn = Disturbances([(each, 1.2 if each == 1 else 1.0) for each in (1, 300) * 500], seed=5)
    assert {drawn.next(3) for _ in range(100)} == {1.2}
    assert {drawn.next(512) for _ in range(100)} == {1.0}
    assert {drawn.next(9) for _ in range(100)} == {1.2}, "the nearest size that was measured"


def test_without_ratios_nothing_is_disturbed() -> None:
    drawn = Disturbances((), seed=5)
    assert [drawn.next(each) for each in (1, 20, 500)] == [1.0] * 3


@given(st.lists(st.floats(0, 10), min_size=len(FEATURES), max_size=len(FEATURES)), st.integers(0, 99))
def test_more_work_never_takes_less(coefficients: list[float], seed: int) -> None:
    (work,) = works(seed, 1)
    model = StepModel(coefficients)
    more = {field: getattr(work, field) + 5 for field in work._fields if field != "adapters"}
    tried = [work._replace(**{field: value}) for field, value in more.items()]
    tried.append(work._replace(adapters=(*work.adapters, (8, 5))))
    tried.append(work._replace(adapters=tuple((rank, count + 5) for rank, count in work.adapters)))
    assert all(model.ms(each) >= model.ms(work) - 1e-9 for each in tried)


def state(adapter_id: int | None) -> RequestState:
    request = Request("r", (5, 6, 7), SamplingParams(), 4, 0, adapter_id=adapter_id)
    return RequestState(request, 0, request.prompt_token_ids)


def test_the_work_of_a_plan() -> None:
    plan = SchedulePlan(
        1,
        (
            ScheduledSequence(state(1), 99, 1, True),  # a decode that reads 100 tokens
            ScheduledSequence(state(1), 10, 4, False),  # a chunk: its tokens read 11, 12, 13, 14
            ScheduledSequence(state(2), 0, 2, True),
            ScheduledSequence(state(None), 49, 1, True),
        ),
    )
    work = StepWork.of(plan, {1: 8, 2: 32})
    assert work == StepWork(8, 3, 150, 50 + 3, ((8, 5), (32, 2)))
    features = dict(zip(FEATURES, work.features(), strict=True))
    of_adapters = {"adapters": 2, "ranks": 40, "tokens x rank below 4": 8 * 4 + 32 * 2, "tokens x rank": 8 * 5 + 32 * 2}
    assert {name: features[name] for name in of_adapters} == of_adapters
