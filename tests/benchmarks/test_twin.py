"""The six cells are what they say, the same arrivals go to both, and a busy machine is not measured."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benchmarks import twin
from benchmarks.many_adapters import Counters
from benchmarks.open_loop import Spread as MeasuredSpread
from benchmarks.open_loop import Summary
from loraplex.core import LoRARequest
from loraplex.twin.calibration import FrontTime
from loraplex.twin.results import Spread
from loraplex.twin.simulation import Simulation
from loraplex.twin.step_model import StepWork
from loraplex.twin.workload import Workload, lengths
from tests.twin.parts import calibration, settings

REQUESTS = [LoRARequest(f"a{number}", number, "/x") for number in range(1, 49)]


def test_there_are_six_cells_that_fit() -> None:
    assert len({cell.name for cell in twin.CELLS}) == 6
    for cell in twin.CELLS:
        workload = cell.workload(8, 5.0, 30, seed=1)
        longest = lengths("p", workload.prompt_tokens)[1] + lengths("o", workload.output_tokens)[1]
        assert longest <= twin.MAX_MODEL_LEN
        args = twin.parser().parse_args([])
        assert twin.settings_for(cell, args, 1_000_000).adapter_memory_bytes == cell.room * 1_000_000


def test_both_get_the_same_arrivals() -> None:
    workload = Workload(adapters=48, requests=50, prompt_tokens="3-9", base_share=0.2)
    for drawn, given in zip(workload.arrivals(), twin.arrivals_of(workload, REQUESTS, 100), strict=True):
        assert (given.due_s, given.output_len) == (drawn.at_s, drawn.num_output_tokens)
        assert len(given.prompt) == drawn.num_prompt_tokens
        assert given.lora_request == (None if drawn.adapter is None else REQUESTS[drawn.adapter])


@pytest.mark.parametrize(
    ("tokens_per_s", "p50", "p99", "failed", "is_met"),
    [
        (100.0, 0.2, 0.5, 0, True),
        (109.0, 0.219, 0.62, 0, True),
        (112.0, 0.2, 0.5, 0, False),
        (100.0, 0.17, 0.5, 0, False),
        (100.0, 0.2, 0.38, 0, True),
        (100.0, 0.2, 0.3, 0, False),
        (100.0, 0.2, 0.5, 1, False),
    ],
)
def test_targets(tokens_per_s: float, p50: float, p99: float, failed: int, is_met: bool) -> None:
    """Measured: 100 tokens/s, 200 ms, 500 ms."""
    made = Simulation(calibration(), settings(), Workload(adapters=1, requests=2)).run()
    predicted = replace(made, tokens_per_s=tokens_per_s, first_token_s=Spread(p50=p50, p99=p99))
    first = MeasuredSpread(0.2, 0.2, 0.3, 0.5, 0.6)
    measured = Summary(20, failed, 10.0, 100.0, first, first, first, ())
    steps = twin.Steps(9, 1.1, 1.0)
    row = twin.Row(twin.CELLS[1], 2.0, predicted, predicted, (measured,), (steps,), Counters(3, 1), 0.1)
    assert row.is_met is row.is_within_runs is is_met, "one run is no spread"
    assert row.steps_off == pytest.approx(0.1)
    assert twin.table_of([row], "title").row_count == 4
    assert twin.cell_figures(row)["is_met"] is is_met


def test_the_median_of_the_runs_counts() -> None:
    made = Simulation(calibration(), settings(), Workload(adapters=1, requests=2)).run()
    predicted = replace(made, tokens_per_s=100.0, first_token_s=Spread(p50=0.2, p99=0.5))
    runs = []
    for factor in (0.5, 1.0, 1.1):
        first = MeasuredSpread(0.2, 0.2 * factor, 0.3, 0.5 * factor, 0.6)
        runs.append(Summary(20, 0, 10.0, 100.0 * factor, first, first, first, ()))
    steps = tuple(twin.Steps(9, predicted_s, 1.0) for predicted_s in (1.0, 0.9, 1.3))
    row = twin.Row(twin.CELLS[1], 2.0, predicted, predicted, tuple(runs), steps, Counters(3, 1), 0.1)
    assert row.is_met
    assert row.steps_off == 0
    further = replace(row, predicted=replace(predicted, tokens_per_s=140.0))
    assert not further.is_met
    assert further.is_within_runs, "the runs are further apart than that"
    assert not replace(row, predicted=replace(predicted, tokens_per_s=170.0)).is_within_runs
    assert {figure: round(row.apart(figure), 3) for figure in row.figures} == dict.fromkeys(row.figures, 0.6)


def test_steps_that_ran_are_what_the_model_says_of_them() -> None:
    known, made = calibration(), Workload(adapters=1, requests=12, rate=50.0)
    works: list[StepWork] = []
    simulated = Simulation(known, settings(), made, lambda number, plan: works.append(StepWork.of(plan, {1: 8}))).run()
    first = MeasuredSpread(0.2, simulated.first_token_s.p50, 0.3, simulated.first_token_s.p99, 0.6)
    run = Summary(12, 0, 10.0, simulated.tokens_per_s, first, first, first, ())
    took_s = 1.25e-3 * sum(map(known.step_model().ms, works))
    quiet = replace(known, step_ratios=())
    of_run = (run,), (tuple(works),), (took_s,)
    cell = twin.Measured(twin.CELLS[1], settings(), made, *of_run, Counters(3, 1), 0.1, (quiet, quiet))
    row = twin.row_of(cell, 3)
    assert row.is_met, "the twin itself was measured"
    assert row.steps_off == pytest.approx(-0.2)
    assert row.scaled.first_token_s.p50 > row.predicted.first_token_s.p50


def test_the_mean_of_the_calibrations_predicts() -> None:
    before = replace(calibration(), step_ratios=((1, 1.0),), front=FrontTime(1.0, 2.0, 3.0))
    slower = {name: 1.5 * ms for name, ms in before.step_ms.items()}
    after = replace(before, step_ms=slower, step_ratios=((2, 1.1),), front=FrontTime(2.0, 2.0, 5.0))
    mean, work = twin.mean_of([before, after]), StepWork(40, 8, 900, 120, ((8, 20), (8, 20)))
    assert mean.step_model().ms(work) == pytest.approx(1.25 * before.step_model().ms(work))
    assert mean.step_ratios == ((1, 1.0), (2, 1.1))
    assert mean.front == FrontTime(1.5, 2.0, 4.0)


def test_a_busy_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    assert twin.main([]) == 2
    assert "the machine is not quiet: its load is 9.0" in capsys.readouterr().out
