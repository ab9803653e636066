"""The twin beside the engine: six cells, each predicted and then measured, on the same arrivals.

    python -m benchmarks.twin --json results/twin.json                 makes its fixture, calibrates, about 32 minutes
    python -m benchmarks.twin --calibration calibration.json --seconds 60
A calibration is of one machine with its settings: give --threads and --requests-in-flight as they were. A machine's
speed changes by some percent within minutes, so it is calibrated before each run of a cell and after the last, and
their mean predicts. What disturbs steps is drawn: the median of --draws simulations counts.

Rates are shares of the throughput that the twin predicts for requests that come all at once. A cell has an engine of
its own, with all adapters registered; its arrivals, lengths and adapters are drawn once for both, and it runs --runs
times: their median counts, and "runs" says how far apart they are, which no prediction can be better than. Targets:
throughput and the median time to the first token within 10 % of what is measured, their P99 within 25 %.

Near its capacity an engine makes much waiting of little time: at a load of L > 1, where a request waits for what has
piled up before it, 1 % of capacity is L / (L - 1) % of the median wait: 6 % at 1.2, where two runs are further apart
than the target, and 2 % at 2, the load of "overload". The last line of a cell has the seconds of its steps, which wait
for nothing: what the model says of the steps that ran, and what they took. "scaled" is the prediction again with every
step off by that factor: what is left between it and the measured figure is not of the model of steps.

Run it alone on a quiet machine: it stops at once where the load is above --max-load of the cores. What disturbs the
calibration is in every prediction.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.arguments import positive, seconds
from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import (
    add_arguments,
    each,
    fixture_for,
    lora_requests,
    register,
    save,
    start,
    title_of,
    verdict,
)
from benchmarks.many_adapters import Counters
from benchmarks.open_loop import Arrival, Summary, run
from benchmarks.report import wide_console
from loraplex.bench import FIRST_TOKEN_ID
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import LoRARequest
from loraplex.frontend.llm import LLM
from loraplex.twin.calibrate import calibrate
from loraplex.twin.calibration import Calibration, FrontTime
from loraplex.twin.results import SimulationResult
from loraplex.twin.settings import TwinSettings
from loraplex.twin.simulation import Simulation
from loraplex.twin.step_model import Disturbances, StepWork
from loraplex.twin.workload import Workload

MAX_OFF, MAX_OFF_P99 = 0.10, 0.25
MAX_MODEL_LEN = 1024
CUT_OFF_AFTER = 6
SATURATING_RATE = 1e4
SATURATING_REQUESTS = 96
WARM_UP_REQUESTS = 4


@dataclass(frozen=True)
class Cell:
    """adapters: in all, on a device with room for `room` of them. load: share of the predicted capacity."""

    name: str
    adapters: int
    room: int
    load: float
    prompt_tokens: str = "16-128"
    output_tokens: str = "16-64"
    zipf: float = 0.9
    cv: float = 1.0
    share: float = 1.0
    """Of --seconds."""

    def workload(self, rank: int, rate: float, num_requests: int, seed: int) -> Workload:
        return Workload(
            adapters=self.adapters,
            zipf=self.zipf,
            rate=rate,
            cv=self.cv,
            requests=num_requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            ranks=(rank,),
            seed=seed,
        )


CELLS = (
    Cell("base", adapters=0, room=16, load=0.7),
    Cell("resident", adapters=16, room=16, load=0.7),
    Cell("overload", adapters=16, room=16, load=2.0, share=0.5),
    Cell("bursts", adapters=16, room=16, load=0.6, cv=4.0),
    Cell("prompts", adapters=16, room=16, load=0.7, prompt_tokens="256-512", output_tokens="8-16"),
    Cell("few slots", adapters=48, room=8, load=0.6),
)


@dataclass(frozen=True)
class Steps:
    """Of one run: how many, what the model says of them, disturbed as a simulation's are, and what they took."""

    count: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Row:
    """A cell: what was predicted and measured, in the same units; `load`: of the machine when its run began.

    steps: of each run. scaled: predicted once more, its steps off as those of the runs were.
    """

    cell: Cell
    rate: float
    predicted: SimulationResult
    scaled: SimulationResult
    measured: tuple[Summary, ...]
    steps: tuple[Steps, ...]
    counted: Counters
    load: float

    @property
    def figures(self) -> dict[str, tuple[float, tuple[float, ...], float]]:
        """By name: predicted, measured in each run, the most that prediction and median may be apart."""
        firsts = [run.time_to_first_token_s for run in self.measured]
        waits = [first for first in firsts if first is not None]
        assert len(waits) == len(firsts), "no request had a token"
        tokens_per_s, p50, p99 = _figures_of(self.predicted)
        return {
            "tokens/s": (tokens_per_s, tuple(run.tokens_per_s for run in self.measured), MAX_OFF),
            "first token p50 ms": (p50, tuple(1e3 * each.p50 for each in waits), MAX_OFF),
            "first token p99 ms": (p99, tuple(1e3 * each.p99 for each in waits), MAX_OFF_P99),
        }

    @property
    def steps_off(self) -> float:
        """What the model says of the steps that ran, over what they took; the median of the runs."""
        return statistics.median(each.predicted_s / each.measured_s for each in self.steps) - 1

    def off(self, figure: str) -> float:
        predicted, measured, _ = self.figures[figure]
        return predicted / statistics.median(measured) - 1

    def apart(self, figure: str) -> float:
        """The runs, over their median."""
        _, measured, _ = self.figures[figure]
        return (max(measured) - min(measured)) / statistics.median(measured)

    @property
    def is_met(self) -> bool:
        near = all(abs(self.off(figure)) <= most for figure, (_, _, most) in self.figures.items())
        return near and self._is_whole

    @property
    def is_within_runs(self) -> bool:
        """Whether what is not met is no further off than the runs are apart."""
        near = all(abs(self.off(name)) <= max(most, self.apart(name)) for name, (_, _, most) in self.figures.items())
        return near and self._is_whole

    @property
    def _is_whole(self) -> bool:
        return not self.predicted.num_failed and not any(run.num_failed for run in self.measured)


def _figures_of(result: SimulationResult) -> tuple[float, float, float]:
    """Tokens/s, P50 and P99 of the time to the first token in ms."""
    return result.tokens_per_s, 1e3 * result.first_token_s.p50, 1e3 * result.first_token_s.p99


def settings_for(cell: Cell, args: argparse.Namespace, adapter_bytes: int) -> TwinSettings:
    """As the engine of the cell has them: all adapters in memory, `room` of them on the device."""
    return TwinSettings(
        max_num_seqs=args.requests_in_flight,
        enable_prefix_caching=False,
        adapter_memory_bytes=cell.room * adapter_bytes,
        host_memory_bytes=max(cell.adapters + 1, cell.room) * adapter_bytes,
    )


def capacity(calibration: Calibration, cell: Cell, settings: TwinSettings, rank: int) -> float:
    """Requests/s that the twin predicts for a full engine."""
    full = cell.workload(rank, SATURATING_RATE, SATURATING_REQUESTS, seed=5)
    return Simulation(calibration, settings, full).run().requests_per_s


def arrivals_of(workload: Workload, requests: Sequence[LoRARequest], vocab_size: int) -> list[Arrival]:
    """The twin's arrivals, with random prompts."""
    draw = np.random.default_rng(workload.seed)
    return [
        Arrival(
            come.at_s,
            None if come.adapter is None else requests[come.adapter],
            draw.integers(FIRST_TOKEN_ID, vocab_size, come.num_prompt_tokens).tolist(),
            come.num_output_tokens,
        )
        for come in workload.arrivals()
    ]


@dataclass(frozen=True)
class Measured:
    """What a cell's engines did. works: of each run's steps, and step_s, what they took together.

    calibrations: before each run, and after the last.
    """

    cell: Cell
    settings: TwinSettings
    workload: Workload
    runs: tuple[Summary, ...]
    works: tuple[tuple[StepWork, ...], ...]
    step_s: tuple[float, ...]
    counted: Counters
    load: float
    calibrations: tuple[Calibration, ...]


def measure(
    cell: Cell,
    workload: Workload,
    made: Fixture,
    args: argparse.Namespace,
    settings: TwinSettings,
    calibration: Calibration,
) -> Measured:
    """Each run has an engine of its own, and a calibration behind it."""
    budgets = {
        "adapter_memory_bytes": settings.adapter_memory_bytes,
        "host_memory_bytes": settings.host_memory_bytes,
        "max_model_len": MAX_MODEL_LEN,
    }
    load = os.getloadavg()[0]
    runs, works, step_s, calibrations = [], [], [], [calibration]
    for _ in range(args.runs):
        with start(made, args, budgets) as llm:
            requests = lora_requests(made)[: cell.adapters]
            register(llm, requests)
            _warm_up(llm)
            before = Counters.of(llm.stats())
            arrivals = arrivals_of(workload, requests, llm.engine.info.vocab_size)
            with _watched(llm, args.rank) as ran:
                runs.append(Summary.of([run(llm, arrivals, CUT_OFF_AFTER * args.seconds)]))
            works.append(tuple(ran.works))
            step_s.append(ran.seconds)
            counted = Counters.of(llm.stats()) - before
            llm.check_integrity()
        calibrations.append(calibration_of(made, args))
    of_runs = tuple(runs), tuple(works), tuple(step_s)
    return Measured(cell, settings, workload, *of_runs, counted, load, tuple(calibrations))


def row_of(measured: Measured, num_draws: int) -> Row:
    """What the twin says of a cell."""
    calibration = mean_of(measured.calibrations)
    model, seed = calibration.step_model(), measured.workload.seed
    steps = []
    for works, seconds_of_steps in zip(measured.works, measured.step_s, strict=True):
        disturbances = Disturbances(calibration.step_ratios, seed)
        predicted_s = 1e-3 * sum(model.ms(work) * disturbances.next(work.num_tokens) for work in works)
        steps.append(Steps(len(works), predicted_s, seconds_of_steps))
    factor = statistics.median(each.measured_s / each.predicted_s for each in steps)
    predicted, scaled = (
        predict(each, measured.settings, measured.workload, num_draws)
        for each in (calibration, _scaled(calibration, factor))
    )
    about = measured.cell, measured.workload.rate, predicted, scaled
    return Row(*about, measured.runs, tuple(steps), measured.counted, measured.load)


def predict(calibration: Calibration, settings: TwinSettings, workload: Workload, num_draws: int) -> SimulationResult:
    """The first of some simulations of the same arrivals, with the medians of all in the figures that are compared."""
    results = []
    for draw in range(num_draws):
        turn = draw * len(calibration.step_ratios) // num_draws  # other ratios at each place that is drawn
        ratios = calibration.step_ratios[turn:] + calibration.step_ratios[:turn]
        results.append(Simulation(replace(calibration, step_ratios=ratios), settings, workload).run())
    tokens_per_s, p50, p99 = (statistics.median(figures) for figures in zip(*map(_figures_of, results), strict=True))
    first_token_s = replace(results[0].first_token_s, p50=1e-3 * p50, p99=1e-3 * p99)
    num_failed = max(each.num_failed for each in results)
    return replace(results[0], tokens_per_s=tokens_per_s, first_token_s=first_token_s, num_failed=num_failed)


@dataclass
class _Ran:
    works: list[StepWork]
    seconds: float = 0.0


@contextmanager
def _watched(llm: LLM, rank: int) -> Iterator[_Ran]:
    """What runs within the block; its seconds when it ends."""
    ran = _Ran([])
    rank_of: defaultdict[int, int] = defaultdict(lambda: rank)
    before_s = sum(llm.stats().step_times.seconds.values())
    llm.engine.watch_steps(lambda plan: ran.works.append(StepWork.of(plan, rank_of)))
    yield ran
    llm.engine.watch_steps(None)
    ran.seconds = sum(llm.stats().step_times.seconds.values()) - before_s


def mean_of(calibrations: Sequence[Calibration]) -> Calibration:
    """Steps take the mean of all, and are disturbed as they were in any; loads take what they took in the first."""
    first = calibrations[0]
    front = FrontTime(*map(statistics.mean, zip(*(astuple(each.front) for each in calibrations), strict=True)))
    step_ms = {name: statistics.mean(each.step_ms[name] for each in calibrations) for name in first.step_ms}
    step_ratios = tuple(itertools.chain.from_iterable(each.step_ratios for each in calibrations))
    return replace(first, step_ms=step_ms, step_ratios=step_ratios, front=front)


def _scaled(calibration: Calibration, factor: float) -> Calibration:
    """Whose steps take so many times as long."""
    return replace(calibration, step_ms={name: factor * ms for name, ms in calibration.step_ms.items()})


def _warm_up(llm: LLM) -> None:
    """Of the base model: adapters stay as they were registered."""
    warm = Workload(adapters=0, requests=WARM_UP_REQUESTS, rate=SATURATING_RATE, seed=9)
    run(llm, arrivals_of(warm, (), llm.engine.info.vocab_size), limit_s=120.0)


HEADINGS = (
    *("cell", "rate", "requests", "figure", "predicted", "scaled", "measured", "runs", "off", "within", ""),
    *("hits p / m", "load"),
)


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("cell", "figure") else "right")
    for row in rows:
        hits = "-" if row.counted.hit_rate is None else f"{100 * row.counted.hit_rate:.0f} %"
        about = row.cell.name, f"{row.rate:.2f}/s", str(row.measured[0].num_requests)
        after = f"{100 * row.predicted.hit_rate:.0f} % / {hits}", f"{row.load:.1f}"
        figures = zip(row.figures.items(), _figures_of(row.scaled), strict=True)
        for number, ((figure, (predicted, measured, most)), scaled) in enumerate(figures):
            off = row.off(figure)
            table.add_row(
                *(about if number == 0 else ("", "", "")),
                figure,
                f"{predicted:.1f}",
                f"{scaled:.1f}",
                f"{statistics.median(measured):.1f}",
                f"{100 * row.apart(figure):.0f} %",
                f"{100 * off:+.1f} %",
                f"{100 * most:.0f} %",
                verdict(abs(off), most),
                *(after if number == 0 else ("", "")),
            )
        predicted_s, measured_s = (statistics.median(each) for each in zip(*map(_seconds_of, row.steps), strict=True))
        table.add_row(
            *("", "", "", "seconds of steps", f"{predicted_s:.2f}", "", f"{measured_s:.2f}", ""),
            *(f"{100 * row.steps_off:+.1f} %", "", "", "", ""),
            end_section=True,
        )
    return table


def _seconds_of(steps: Steps) -> tuple[float, float]:
    return steps.predicted_s, steps.measured_s


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > args.max_load * cores:
        print(f"the machine is not quiet: its load is {load:.1f}, and --max-load is {args.max_load} of {cores} cores")
        return 2
    cells = [cell for cell in CELLS if args.cell in (None, cell.name)]
    args.adapters = max(cell.adapters for cell in cells) or 1
    made = fixture_for(args)
    calibrations, rows = [calibration_of(made, args)], list[Row]()
    for cell in each(cells, lambda one: one.name):
        settings = settings_for(cell, args, calibrations[0].nbytes_of(args.rank))
        rate = cell.load * capacity(calibrations[-1], cell, settings, args.rank)
        num_requests = max(20, round(rate * cell.share * args.seconds))
        workload = cell.workload(args.rank, rate, num_requests, args.seed)
        measured = measure(cell, workload, made, args, settings, calibrations[-1])
        calibrations.extend(measured.calibrations[1:])
        rows.append(row_of(measured, args.draws))
    title = title_of(made, args, f"{args.seconds:g} s of arrivals a cell, rank {args.rank}")
    console = wide_console()
    console.print(table_of(rows, title))
    met = sum(row.is_met for row in rows)
    near = sum(row.is_within_runs for row in rows)
    console.print(f"all targets met in {met} of {len(rows)} cells, or missed by less than the runs are apart in {near}")
    save(
        args.json,
        {"title": title, "calibrations": [*map(asdict, calibrations)], "cells": [cell_figures(row) for row in rows]},
    )
    return 0


def cell_figures(row: Row) -> dict[str, object]:
    figures = {name: {"predicted": p, "measured": m} for name, (p, m, _) in row.figures.items()}
    about = {"cell": row.cell.name, "rate": row.rate, "load": row.load, "is_met": row.is_met}
    of_steps = {"steps": [asdict(each) for each in row.steps], "scaled": _figures_of(row.scaled)}
    return {**about, "is_within_runs": row.is_within_runs, **of_steps, **figures}


def calibration_of(made: Fixture, args: argparse.Namespace) -> Calibration:
    """Read, or made with the settings of the cells' engines."""
    if args.calibration is not None:
        return Calibration.read(args.calibration)
    config = EngineConfig(
        model=str(made.base),
        dtype=args.dtype,
        num_threads=args.threads,
        max_num_seqs=args.requests_in_flight,
        max_model_len=MAX_MODEL_LEN,
        lora=LoRAConfig(),
    )
    print(f"calibrating for {args.calibrate_seconds:g} s", file=sys.stderr, flush=True)
    return calibrate(config, [args.rank], args.calibrate_seconds)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, rank=8)
    new.add_argument("--calibration", type=Path, metavar="FILE", help="of `loraplex calibrate` (default: made first)")
    new.add_argument("--calibrate-seconds", type=seconds, default=40.0, help="each time (default: 40)")
    new.add_argument("--seconds", type=seconds, default=60.0, help="of arrivals a cell (default: 60)")
    new.add_argument("--cell", choices=[cell.name for cell in CELLS], help="this one alone")
    new.add_argument("--runs", type=positive, default=3, help="of a cell (default: 3)")
    new.add_argument("--draws", type=positive, default=5, help="simulations of a cell (default: 5)")
    new.add_argument("--seed", type=positive, default=11, help="of the arrivals (default: 11)")
    new.add_argument(
        "--max-load", type=seconds, default=0.25, help="of the machine at the start, a core (default: 0.25)"
    )
    return new


if __name__ == "__main__":
    raise SystemExit(main())
