"""The commands `loraplex calibrate | simulate | plan`. What they need is imported when they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps as to_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from loraplex.cli_help import Flat, Listed, group_engine_fields, group_fields
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig
from loraplex.errors import ConfigError
from loraplex.twin.settings import FleetSettings, ServiceLevel, TwinSettings
from loraplex.twin.workload import Workload

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from loraplex.twin.calibration import Calibration
    from loraplex.twin.results import SimulationResult

group_engine_fields()
group_fields(Workload, "Workload")
group_fields(TwinSettings, "Fleet")
group_fields(FleetSettings, "Fleet")
group_fields(ServiceLevel, "Service level")


def calibrate(
    model: str,
    /,
    *,
    output: Path = Path("calibration.json"),
    ranks: Annotated[tuple[int, ...], Listed] = (8, 64),
    seconds: float = 120.0,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
) -> int:
    """Measure what steps and loads take here, for `simulate` and `plan`. Give the settings that the server will have,
    and leave the machine alone meanwhile.

    Parameters
    ----------
    model
        Directory or hub id of the base model.
    output
        JSON file of the result.
    ranks
        Ranks of the adapters that it makes and runs, such as the server's adapters have.
    seconds
        Time for the measurement, beside the start of the engine.
    """
    from loraplex.twin.calibrate import calibrate as measure

    if not output.absolute().parent.is_dir():
        raise ConfigError(f"output {str(output)!r}: there is no directory {str(output.absolute().parent)!r}")
    config = EngineConfig(**asdict(engine or EngineSettings()), model=model, lora=lora or LoRAConfig())
    with _progress() as (bars, bar):
        made = measure(config, ranks, seconds, lambda what, share: bars.update(bar, description=what, completed=share))
    made.write(output)
    print(
        f"{output}: {made.num_steps} steps on {made.machine} ({made.backend}); steps that the fit did not see are off "
        f"by {100 * made.error_p50:.0f} % in the median, {100 * made.error_p90:.0f} % in the worst tenth"
    )
    return 0


def simulate(
    calibration: Path,
    /,
    *,
    json: bool = False,
    workload: Annotated[Workload | None, Flat] = None,
    settings: Annotated[TwinSettings | None, Flat] = None,
    fleet: Annotated[FleetSettings | None, Flat] = None,
) -> int:
    """Say how a server would fare under a workload: throughput, waiting, hits, evictions; without a model or a device.

    Parameters
    ----------
    calibration
        What `loraplex calibrate` wrote.
    json
        Figures as JSON on standard output.
    """
    from loraplex.twin.calibration import Calibration

    measured = Calibration.read(calibration)
    workload, settings = workload or Workload(), settings or TwinSettings()
    fleet = fleet or FleetSettings()
    result = _simulated(measured, workload, settings, fleet)
    if json:
        print(to_json(result.figures(), indent=2))
        return 0
    num_engines = fleet.replicas or settings.runners
    _console().print(result.table(f"{measured.model} on {num_engines} x {measured.machine}"))
    for note in result.notes:
        print(note)
    return 0


def plan(
    calibration: Path,
    /,
    *,
    json: bool = False,
    plot: Path | None = None,
    level: Annotated[ServiceLevel | None, Flat] = None,
    workload: Annotated[Workload | None, Flat] = None,
    settings: Annotated[TwinSettings | None, Flat] = None,
) -> int:
    """Say how many devices a service level takes, and which budgets. Exit code 1 when no size that it looks at holds.

    Parameters
    ----------
    calibration
        What `loraplex calibrate` wrote.
    json
        Everything that was simulated as JSON on standard output.
    plot
        Picture of what was simulated: PNG, PDF or SVG, by its ending. Needs matplotlib.
    """
    from loraplex.twin.calibration import Calibration
    from loraplex.twin.planning import check_plotting, make_plan

    settings = settings or TwinSettings()
    if settings.runners != 1:
        raise ConfigError("runners is what plan looks for: leave it out, or give max_devices")
    if plot is not None:
        check_plotting()
    with _progress(is_counted=False) as (bars, bar):
        made = make_plan(
            Calibration.read(calibration),
            settings,
            workload or Workload(),
            level or ServiceLevel(),
            lambda what: bars.update(bar, description=what),
        )
    if plot is not None:
        made.plot(plot)
    if json:
        print(to_json(made.figures(), indent=2))
    else:
        _console().print(made.table())
        print(made.sentence())
        for note in made.options[-1].result.notes:
            print(note)
    return 0 if made.chosen is not None else 1


def _simulated(
    calibration: Calibration, workload: Workload, settings: TwinSettings, fleet: FleetSettings
) -> SimulationResult:
    with _progress() as (bars, bar):

        def tell(done: int, total: int) -> None:
            bars.update(bar, description="requests", completed=done / total)

        if fleet.replicas:
            from loraplex.twin.fleet import Fleet

            return Fleet(calibration, workload, settings, fleet).run(tell)
        from loraplex.twin.simulation import Simulation

        return Simulation(calibration, settings, workload).run(tell)


@contextmanager
def _progress(is_counted: bool = True) -> Iterator[tuple[Progress, TaskID]]:
    """On a terminal, on standard error: figures go to standard output alone."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    has_terminal = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not has_terminal) as bars:
        yield bars, bars.add_task("starting", total=1.0 if is_counted else None)


def _console() -> Console:
    from rich.console import Console

    return Console()
