"""Throughput of Loraplex beside transformers + peft, in one run on one machine; prints the ratios.

    python -m benchmarks.throughput --size s
    python -m benchmarks.throughput --size tiny --runs 1 --json results/tiny.json
Each engine runs in a process of its own, pattern by pattern in turn, so that both see the same weather. Quote the ratios: absolute
figures belong to the machine and its other load. Fixtures are made on the first run (`s`: 1.1 GB under fixtures/).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fixture import SIZES, Fixture, fixture
from loraplex.bench import PATTERNS, Measurement, Workload, median

ENGINES = {"loraplex": "benchmarks.engine_loraplex", "hf-peft": "benchmarks.peer_hf"}
WORKLOADS = {"tiny": Workload(4, 16, 64), "s": Workload(16, 64, 64), "m": Workload(8, 64, 32)}


def run_engine(
    engine: str, made: Fixture, dtype: str, workload: Workload, pattern: str, num_runs: int
) -> list[Measurement]:
    """One engine on one pattern, in its own process. Raises CalledProcessError when it fails."""
    command = [
        sys.executable, "-m", ENGINES[engine], "--base", str(made.base), "--dtype", dtype, "--pattern", pattern,
        "--requests", str(workload.num_requests), "--prompt-len", str(workload.prompt_len),
        "--output-len", str(workload.output_len), "--runs", str(num_runs), "--adapters", *map(str, made.adapters),
    ]  # fmt: skip
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Measurement(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def show(console: Console, results: dict[str, dict[str, list[Measurement]]], title: str) -> None:
    """One row per pattern: median tokens/s of each engine, decode step, and Loraplex over the peer."""
    engines = list(results)
    table = Table(title=title, title_justify="left")
    table.add_column("pattern")
    table.add_column("adapters", justify="right")
    for engine in engines:
        table.add_column(f"{engine}\ntok/s [min-max]", justify="right")
        table.add_column("ms/step", justify="right")
    for peer in engines[1:]:
        table.add_column(f"{engines[0]} /\n{peer}", justify="right", style="bold")
    for pattern in next(iter(results.values())):
        runs = {engine: results[engine][pattern] for engine in engines}
        row = [pattern, str(runs[engines[0]][0].num_adapters)]
        for engine in engines:
            rates = [run.tokens_per_s for run in runs[engine]]
            middle = median(runs[engine])
            row += [f"{middle.tokens_per_s:.1f} [{min(rates):.1f}-{max(rates):.1f}]", f"{middle.step_ms:.1f}"]
        own = median(runs[engines[0]]).tokens_per_s
        row += [f"{own / median(runs[peer]).tokens_per_s:.2f}" for peer in engines[1:]]
        table.add_row(*row)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--engines", default=",".join(ENGINES), help="the first one is compared with the others")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the measurements and their configuration here")
    args = parser.parse_args(arguments)
    workload = WORKLOADS[args.size]
    made = fixture(args.size, workload.num_requests)
    console = Console()
    results: dict[str, dict[str, list[Measurement]]] = {engine: {} for engine in args.engines.split(",")}
    for pattern in args.patterns.split(","):
        for engine in results:
            console.print(f"[dim]{time.strftime('%H:%M:%S')} {engine}: {pattern}[/]")
            results[engine][pattern] = run_engine(engine, made, args.dtype, workload, pattern, args.runs)
    title = (
        f"{args.size} {args.dtype}, {workload.num_requests} requests of {workload.prompt_len}+{workload.output_len} tokens, "
        f"median of {args.runs} runs, {os.cpu_count()} cores, torch {torch.__version__}"
    )
    show(console, results, title)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        measured = {e: {p: [asdict(run) for run in runs] for p, runs in by.items()} for e, by in results.items()}
        args.json.write_text(
            json.dumps({"title": title, "machine": platform.processor(), "results": measured}, indent=1)
        )


if __name__ == "__main__":
    main()
