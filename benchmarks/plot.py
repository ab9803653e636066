"""The figures of a comparison as a picture: tokens/s by pattern and engine, the machine's limit above each.

    python -m benchmarks.plot results/s.json s.png
Needs matplotlib (the `bench` extra); nothing else of the benchmarks does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import Report


def plot(report: Report, path: Path, title: str) -> None:
    """Bars: medians, with the range of the runs; a dash: the limit of this engine's weights on this machine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    patterns, names = report.patterns, list(report.engines)
    figure = Figure(figsize=(2 + 1.6 * len(patterns), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        result = report.engines[name]
        shown = [(at, pattern) for at, pattern in enumerate(patterns) if result.rate(pattern) is not None]
        places = [at - 0.4 + width * (number + 0.5) for at, _ in shown]
        medians = [result.rate(pattern) or 0.0 for _, pattern in shown]
        rates = [[run.tokens_per_s for run in result.of(pattern)] for _, pattern in shown]
        ranges = [
            [middle - min(of) for middle, of in zip(medians, rates, strict=True)],
            [max(of) - middle for middle, of in zip(medians, rates, strict=True)],
        ]
        axes.bar(places, medians, width, yerr=ranges, label=name, error_kw={"elinewidth": 1, "alpha": 0.6})
        limits = [
            (place, result.limits[p].tokens_per_s)
            for place, (_, p) in zip(places, shown, strict=True)
            if p in result.limits
        ]
        for place, limit in limits if result.is_own else []:
            axes.hlines(limit, place - width / 2, place + width / 2, colors="black", linestyles="dashed", linewidth=1)
    axes.set_xticks(range(len(patterns)), patterns)
    axes.set_ylabel("output tokens/s")
    axes.set_title(title, fontsize="small", loc="left", wrap=True)
    axes.legend(fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="what `throughput.py --json` wrote")
    parser.add_argument("picture", type=Path, help="PNG, PDF or SVG, by its ending")
    arguments = parser.parse_args()
    report = Report.from_json(arguments.report.read_text())
    plot(report, arguments.picture, str(report.configuration["title"]))


if __name__ == "__main__":
    main()
