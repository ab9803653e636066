"""What a comparison of engines measured: kept as JSON, shown as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.limits import Limit
from benchmarks.protocol import Run

MIB = 2**20


@dataclass
class EngineResult:
    """One engine's starts and runs. is_own: Loraplex, not a peer. limits: by pattern, empty for an unknown machine."""

    is_own: bool
    settings: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    starts_s: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    limits: dict[str, Limit] = field(default_factory=dict)
    error: str = ""

    def of(self, pattern: str) -> list[Run]:
        return [run for run in self.runs if run.pattern == pattern]

    def rate(self, pattern: str) -> float | None:
        """Median tokens/s."""
        runs = self.of(pattern)
        return median(runs).tokens_per_s if runs else None

    @property
    def peak_rss_bytes(self) -> int | None:
        return max((run.peak_rss_bytes for run in self.runs if run.peak_rss_bytes is not None), default=None)


@dataclass
class Report:
    """Others are compared with the first engine. matches: engine -> pattern -> outputs equal to the first engine's."""

    configuration: dict[str, Any]
    engines: dict[str, EngineResult] = field(default_factory=dict)
    matches: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    @property
    def patterns(self) -> list[str]:
        return list(dict.fromkeys(run.pattern for result in self.engines.values() for run in result.runs))

    @property
    def first(self) -> str:
        return next(iter(self.engines))

    def best_peer(self, pattern: str) -> float | None:
        """The highest median of the peers."""
        rates = [result.rate(pattern) for result in self.engines.values() if not result.is_own]
        return max((rate for rate in rates if rate is not None), default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        fields = json.loads(text)
        engines = {name: _engine_result(values) for name, values in fields["engines"].items()}
        matches = {e: {p: (m[0], m[1]) for p, m in of.items()} for e, of in fields["matches"].items()}
        return cls(fields["configuration"], engines, matches)


def _engine_result(values: dict[str, Any]) -> EngineResult:
    runs = [Run(**run) for run in values.pop("runs")]
    limits = {pattern: Limit(**limit) for pattern, limit in values.pop("limits").items()}
    return EngineResult(**values, runs=runs, limits=limits)


def median(runs: Sequence[Run]) -> Run:
    """The run with the median rate (of an even number the lower one)."""
    rate = statistics.median_low(run.tokens_per_s for run in runs)
    return next(run for run in runs if run.tokens_per_s == rate)


# ------------------------------------------------------------------------------------------------------- token identity


def matches(tokens: Mapping[str, Mapping[str, list[list[int]]]], first: str) -> dict[str, dict[str, tuple[int, int]]]:
    """(equal outputs, outputs) of every other engine and pattern against the same pattern of `first`."""
    own = tokens.get(first, {})
    return {
        engine: {
            pattern: (sum(a == b for a, b in zip(own[pattern], outputs, strict=True)), len(outputs))
            for pattern, outputs in of.items()
            if pattern in own
        }
        for engine, of in tokens.items()
        if engine != first
    }


def save_tokens(path: Path, workload: Mapping[str, Any], tokens: Mapping[str, Mapping[str, list[list[int]]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workload": dict(workload), "tokens": tokens}))


def load_tokens(path: Path, workload: Mapping[str, Any]) -> dict[str, dict[str, list[list[int]]]]:
    """What `save_tokens` wrote, its engines named after the file. Raises ValueError when it is of another workload."""
    saved = json.loads(path.read_text())
    if saved["workload"] != dict(workload):
        raise ValueError(f"{path} is of another workload: {saved['workload']}, not {dict(workload)}")
    return {f"{engine} ({path.name})": of for engine, of in saved["tokens"].items()}


# ------------------------------------------------------------------------------------------------------------ the table

HEADINGS = (
    "pattern", "engine", "adapters", "tok/s (of limit)", "min-max", "first tokens s", "ms/step (of limit)",
    "{first} / it", "it / best peer", "same outputs", "others' CPU",
)  # fmt: skip
FILE_WIDTH = 170


def wide_console() -> Console:
    """A table that goes to a file or a pipe is not folded to 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def show(console: Console, report: Report, title: str) -> None:
    """A row per pattern and engine, then what a start takes and the memory."""
    table = Table(title=title, title_justify="left")
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading.format(first=report.first), justify="left" if number < 2 else "right")
    for pattern in report.patterns:
        for name, result in report.engines.items():
            if result.of(pattern):
                table.add_row(*row(report, pattern, name), style="bold" if name == report.first else "")
        table.add_section()
    console.print(table)
    console.print(_starts(report))
    for line in identity_lines(report):
        console.print(line)
    for name, result in report.engines.items():
        if result.error:
            console.print(f"{name} failed: {result.error}", style="red", markup=False, highlight=False)


def row(report: Report, pattern: str, name: str) -> list[str]:
    """The cells of one engine on one pattern."""
    result, runs = report.engines[name], report.engines[name].of(pattern)
    middle, rates = median(runs), [run.tokens_per_s for run in runs]
    limit = result.limits.get(pattern)
    own, best = report.engines[report.first].rate(pattern), report.best_peer(pattern)
    others = [run.others_share for run in runs if run.others_share is not None]
    is_peer_of_first = name != report.first and own is not None
    return [
        pattern,
        name,
        str(middle.num_adapters),
        f"{middle.tokens_per_s:.1f} ({_share(middle.tokens_per_s, limit and limit.tokens_per_s)})",
        f"{min(rates):.1f}-{max(rates):.1f}",
        f"{middle.first_token_s:.3f}",
        "-" if middle.step_ms is None else f"{middle.step_ms:.1f} ({_share(limit and limit.step_ms, middle.step_ms)})",
        f"{own / middle.tokens_per_s:.2f}" if is_peer_of_first and own is not None else "",
        f"{middle.tokens_per_s / best:.2f}" if result.is_own and best is not None else "",
        _fraction(report.matches.get(name, {}).get(pattern)),
        _share(statistics.mean(others), 1.0) if others else "-",
    ]


def identity_lines(report: Report) -> list[str]:
    """One line per engine: how many of its outputs are the first engine's, token for token."""
    lines = []
    for name, of in report.matches.items():
        same, total = (sum(pair[i] for pair in of.values()) for i in (0, 1))
        if total:
            lines.append(f"identical outputs, {report.first} and {name}: {same}/{total}")
    return lines


def _starts(report: Report) -> Table:
    table = Table(title="start and memory", title_justify="left")
    for heading in ("engine", "version", "start s", "peak RSS MiB", "{first} / it"):
        table.add_column(
            heading.format(first=report.first), justify="left" if heading in ("engine", "version") else "right"
        )
    own = report.engines[report.first].peak_rss_bytes
    for name, result in report.engines.items():
        if result.starts_s:
            peak = result.peak_rss_bytes
            table.add_row(
                name,
                result.version,
                f"{statistics.median(result.starts_s):.1f}",
                "-" if peak is None else f"{peak / MIB:.0f}",
                f"{own / peak:.2f}" if own and peak and name != report.first else "",
            )
    return table


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"


def _fraction(pair: tuple[int, int] | None) -> str:
    return "" if pair is None else f"{pair[0]}/{pair[1]}"
