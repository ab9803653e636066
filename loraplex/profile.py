"""`loraplex profile`: where the time of a prefill and of a decode step goes, and what is the largest part of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loraplex.bench import Workload, lora_requests
from loraplex.config import EngineConfig
from loraplex.core import SamplingParams
from loraplex.errors import ConfigError
from loraplex.frontend.llm import LLM
from loraplex.performance.profiler import KERNEL_PARTS, STEP_PARTS, Profiler
from loraplex.performance.settings import ProfileSettings
from loraplex.views.live_profile import give_report

PARTS = ("schedule", "build", *KERNEL_PARTS, "python", "sample", "wait", "commit", "detokenise", "other")
"""Of the table. python: the rest of `forward`, between kernels; other: what no part claims."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds a step by part, and steps. `total_ms` is the wall time."""

    num_steps: int
    total_ms: float
    part_ms: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Mapping[str, float], wall_s: float, num_steps: int) -> Profile:
        per_step = {name: 1e3 * value / max(1, num_steps) for name, value in seconds.items()}
        kernels = sum(per_step.get(name, 0.0) for name in KERNEL_PARTS)
        total = 1e3 * wall_s / max(1, num_steps)
        parts = {name: per_step.get(name, 0.0) for name in PARTS}
        parts["python"] = per_step.get("forward", 0.0) - kernels
        claimed = sum(per_step.get(name, 0.0) for name in (*STEP_PARTS, "detokenise"))
        parts["other"] = total - claimed
        return cls(num_steps, total, parts)

    @property
    def largest(self) -> str:
        return max(self.part_ms, key=lambda name: self.part_ms[name])


class StepProfiler(Profiler):
    """Remembers, at the end of each step, when that was and the seconds so far."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[float, Mapping[str, float]]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with super().part(name):
            yield
        if name == STEP_PARTS[-1]:
            self.ends.append((time.perf_counter(), self.seconds))


def profile(
    llm: LLM, profiler: StepProfiler, adapters: Sequence[Path], workload: Workload, pattern: str
) -> list[Profile]:
    """(the prefill, a decode step): the steps of one run until every request has a token, and those after them."""
    requests = lora_requests(adapters, workload, pattern)

    def run(output_len: int, seed: int) -> None:
        """With prompts of its own: one that is in the prefix cache would be no prefill."""
        prompts: list[str | Sequence[int] | Mapping[str, object]] = [
            {"prompt_token_ids": prompt} for prompt in replace(workload, seed=seed).prompts(llm.engine.info.vocab_size)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=llm.tokenizer is not None
        )
        llm.generate(prompts, params, lora_request=requests)

    run(2, workload.seed)  # loads the adapters
    before = len(profiler.ends)
    run(1, workload.seed + 1)
    num_prefills = len(profiler.ends) - before
    began, at_first = time.perf_counter(), profiler.seconds
    before = len(profiler.ends)
    run(workload.output_len, workload.seed + 2)
    ended, at_last = time.perf_counter(), profiler.seconds
    middle, at_middle = profiler.ends[before + num_prefills - 1]
    num_decodes = len(profiler.ends) - before - num_prefills
    return [
        Profile.of(_spent(at_first, at_middle), middle - began, num_prefills),
        Profile.of(_spent(at_middle, at_last), ended - middle, num_decodes),
    ]


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def run_profile(
    config: EngineConfig,
    adapters: Sequence[Path],
    workload: Workload,
    pattern: str,
    settings: ProfileSettings | None = None,
) -> int:
    """Print a table: milliseconds and share of each part, the largest one named; or, if wished, a report of the run."""
    settings = settings or ProfileSettings()
    if workload.output_len < 2:
        raise ConfigError(f"output_len must be >= 2 to have a decode step, got {workload.output_len}")
    workload.check_patterns([pattern], len(adapters))  # before the model is loaded
    profiler = StepProfiler()
    with LLM.from_config(config, profiler=profiler) as llm:
        workload.check_fits(llm.engine.info.max_model_len)
        llm.start_lora_profiling(settings.targets)
        profiles = profile(llm, profiler, adapters, workload, pattern)
        report = llm.generate_lora_performance_report(settings.json or settings.report is not None)
    give_report(report, config.model, settings)
    if settings.json:
        return 0
    console = Console()
    console.print(_table(config, workload, pattern, profiles))
    for name, one in zip(("prefill", "decode"), profiles, strict=True):
        share = 100 * one.part_ms[one.largest] / one.total_ms
        console.print(
            f"{name}: the largest part is [bold]{one.largest}[/], {share:.0f} % of {one.total_ms:.2f} ms a step"
        )
    return 0


def _table(config: EngineConfig, workload: Workload, pattern: str, profiles: Sequence[Profile]) -> Table:
    requests = f"{workload.num_requests} requests of {workload.prompt_len}+{workload.output_len} tokens"
    table = Table(title=f"{config.model}, {pattern}: {requests}", title_justify="left")
    table.add_column("part")
    for name, one in zip(("prefill", "decode"), profiles, strict=True):
        table.add_column(f"{name}\nms/step ({one.num_steps} steps)", justify="right")
        table.add_column("%", justify="right")
    for part in PARTS:
        cells = [f"{one.part_ms[part]:.2f}" for one in profiles]
        shares = [f"{100 * one.part_ms[part] / one.total_ms:.1f}" for one in profiles]
        table.add_row(part, cells[0], shares[0], cells[1], shares[1])
    table.add_row("total", f"{profiles[0].total_ms:.2f}", "", f"{profiles[1].total_ms:.2f}", "", style="bold")
    return table
