"""What commits that matter measured, a line each in `history.json`, and the picture of it in the documentation.

    python -m benchmarks.throughput --fixture DIR --peer ... --json results/s.json
    python -m benchmarks.history add results/s.json     its medians, by commit; draws the picture again
    python -m benchmarks.history show                   as a table
    python -m benchmarks.history draw                   the picture alone

Rates of two machines are not compared, so the picture has ratios: Loraplex over the best peer that was timed in the
same run. Needs matplotlib (the `bench` extra) to draw.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import Report, wide_console

HISTORY = Path(__file__).parent / "history.json"
PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "history.svg"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `throughput.py`. rates: engine -> pattern -> median tokens/s; own: which engines are Loraplex;
    versions: of the peers; workload: of the model, its dtype, requests and tokens, as lines of one curve share it."""

    date: str
    commit: str
    machine: str
    workload: str
    rates: Mapping[str, Mapping[str, float]]
    own: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, report: Report) -> Measured:
        """Raises ValueError for a checkout with changes: it could not be measured again."""
        facts = report.configuration
        commit = facts["commit"]
        if not commit or commit.endswith("+"):
            raise ValueError(f"the report is of commit {commit}: measure a commit without changes")
        work = facts["workload"]
        return cls(
            date=facts["date"][:10],
            commit=commit,
            machine=f"{facts['cpu']}, {facts['isa']}, {facts['threads']} threads",
            workload=f"{facts['size'] or facts['fixture']} {facts['dtype']}, {work['num_requests']} x "
            f"({work['prompt_len']}+{work['output_len']})",
            rates={name: _rates(report, name) for name in report.engines if _rates(report, name)},
            own=tuple(name for name, result in report.engines.items() if result.is_own),
            versions={name: each.version for name, each in report.engines.items() if not each.is_own and each.version},
        )

    def over_best_peer(self, pattern: str) -> float | None:
        """The first engine of ours that ran it over the best peer; None where either is missing."""
        own = next((self.rates[name][pattern] for name in self.own if pattern in self.rates.get(name, {})), None)
        peers = [rates[pattern] for name, rates in self.rates.items() if name not in self.own and pattern in rates]
        return own / max(peers) if own is not None and peers else None

    @property
    def patterns(self) -> list[str]:
        return list(dict.fromkeys(pattern for rates in self.rates.values() for pattern in rates))


def _rates(report: Report, engine: str) -> dict[str, float]:
    found = {pattern: report.engines[engine].rate(pattern) for pattern in report.patterns}
    return {pattern: round(rate, 1) for pattern, rate in found.items() if rate is not None}


def read(path: Path = HISTORY) -> list[Measured]:
    return [Measured(**{**fields, "own": tuple(fields["own"])}) for fields in json.loads(path.read_text())]


def write(history: Iterable[Measured], path: Path = HISTORY) -> None:
    """A line each, oldest first, so that a commit changes one line."""
    lines = [json.dumps(asdict(each)) for each in sorted(history, key=lambda each: each.date)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def added(history: Sequence[Measured], new: Measured) -> list[Measured]:
    """The same commit, machine and workload measured again replaces what was there."""
    key = (new.commit, new.machine, new.workload)
    return [*(each for each in history if (each.commit, each.machine, each.workload) != key), new]


def curves(history: Sequence[Measured]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(workload, pattern) -> (place in the history, Loraplex over the best peer), oldest first."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for place, each in enumerate(history):
        for pattern in each.patterns:
            ratio = each.over_best_peer(pattern)
            if ratio is not None:
                found.setdefault((each.workload, pattern), []).append((place, ratio))
    return found


def digest(path: Path = HISTORY) -> str:
    """What the picture says it is of: a test finds one that was not drawn again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def draw(history: Sequence[Measured], picture: Path = PICTURE) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for (workload, pattern), points in curves(history).items():
        places, ratios = zip(*points, strict=True)
        axes.plot(places, ratios, marker="o", label=f"{workload}, {pattern}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.set_ylabel("tokens/s over the best peer's, same run")
    axes.set_xticks(range(len(history)), [f"{each.date}\n{each.commit[:8]}" for each in history], fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    picture.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "history"}):
        figure.savefig(picture, metadata={"Description": digest(), "Date": None})


def show(console: Console, history: Sequence[Measured]) -> None:
    table = Table("date", "commit", "workload", "pattern", "tokens/s", "best peer", "ratio", "peers", "machine")
    for each in history:
        for pattern in each.patterns:
            own = next((each.rates[name][pattern] for name in each.own if pattern in each.rates.get(name, {})), None)
            ratio = each.over_best_peer(pattern)
            peer = "" if ratio is None or own is None else f"{own / ratio:.0f}"
            versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
            shown = ("" if own is None else f"{own:.0f}", peer, "" if ratio is None else f"{ratio:.2f}")
            table.add_row(each.date, each.commit[:10], each.workload, pattern, *shown, versions, each.machine)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs: Any = parser.add_subparsers(dest="verb", required=True)
    adding = verbs.add_parser("add", help="a report of throughput.py, and draw")
    adding.add_argument("report", type=Path, help="what `throughput.py --json` wrote")
    verbs.add_parser("show", help="the lines as a table")
    verbs.add_parser("draw", help=f"write {PICTURE.relative_to(PICTURE.parents[2])}")
    args = parser.parse_args(arguments)
    history = read()
    if args.verb == "show":
        show(wide_console(), history)
        return 0
    if args.verb == "add":
        try:
            write(added(history, Measured.of(Report.from_json(args.report.read_text()))))
        except ValueError as error:
            raise SystemExit(str(error)) from error
        history = read()
    draw(history)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
