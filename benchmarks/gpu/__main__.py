"""Check, kernels and engine in one go on a GPU, within so many seconds; installs nothing and needs no network.

    python -m benchmarks.gpu                                   everything in nine and a half minutes, into $OUT or results/gpu/
    python -m benchmarks.gpu --only check,kernels --budget 300
    python -m benchmarks.gpu --interpret                       on a CPU, in Triton's interpreter: only whether it runs
Leaves check.json, kernels.json, engine.json, what each printed (.log), and gpu.md with their tables; a short summary comes last. Exit
code 1 when a check failed or something did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.place import Sheet

SHARES: Mapping[str, float] = {"check": 0.36, "kernels": 0.27, "engine": 0.37}
"""Of the time; what one leaves goes to the next."""

ENDING_S = 25.0
"""A part begins nothing after its budget; what it has begun may take this much longer before it is ended."""

SHOWN_LINES = 45


def run_part(name: str, budget_s: float, limit_s: float, folder: Path, is_interpreted: bool) -> str:
    """Empty, or why it has no result."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--json", str(folder / f"{name}.json")]
    command += ["--budget", f"{budget_s:.0f}", *(["--interpret"] if is_interpreted else [])]
    with (folder / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {limit_s:.0f} s"
    return "" if code == 0 else f"exit code {code}"


def sheet_of(figures: Mapping[str, Any]) -> Sheet:
    return Sheet(**figures["table"])


def report(folder: Path, names: Sequence[str], problems: Mapping[str, str]) -> str:
    """Markdown of all that was found."""
    parts = ["# On a GPU"]
    for name in names:
        parts.append(f"## {name}" + (f": {problems[name]}" if name in problems else ""))
        path = folder / f"{name}.json"
        if path.exists():
            figures = json.loads(path.read_text())
            parts += [figures["title"].replace("\n", "; "), sheet_of(figures).markdown()]
    return "\n\n".join(parts) + "\n"


def summary(folder: Path, name: str) -> list[str]:
    """What matters of a part, in a few lines: failed checks, LoRA of rank 16, every row of the engine."""
    path = folder / f"{name}.json"
    if not path.exists():
        return (folder / f"{name}.log").read_text().splitlines()[-12:]
    figures = json.loads(path.read_text())
    rows = figures["table"]["rows"]
    if name == "check":
        chosen = [row for row in rows if row[2] != "ok"]
        lines = [f"{len(rows)} checks, {sum(row[2] == 'FAILED' for row in rows)} failed, in {figures['seconds']:.0f} s"]
    else:
        is_chosen = {"kernels": lambda row: " r16 " in row[1] or "LoRA" not in row[0], "engine": lambda row: True}[name]
        chosen, lines = [row for row in rows if is_chosen(row)], [figures["title"]]
    return [*lines, *(" | ".join(row) for row in chosen[:SHOWN_LINES])]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    folder = args.out or Path(os.environ.get("OUT") or "results/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.budget
    problems = {}
    for number, name in enumerate(args.only):
        left = ends - time.monotonic()
        share = SHARES[name] / sum(SHARES[one] for one in args.only[number:])
        budget = max(1.0, left * share - ENDING_S)
        problem = run_part(name, budget, max(1.0, left * share), folder, args.interpret)
        if problem:
            problems[name] = problem
    (folder / "gpu.md").write_text(report(folder, args.only, problems))
    for name in args.only:
        print(f"== {name}" + (f": {problems[name]}" if name in problems else ""))
        print("\n".join(summary(folder, name)))
    return int(bool(problems))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--only", type=listed_of(tuple(SHARES)), default=list(SHARES), help=f"of {', '.join(SHARES)}")
    new.add_argument("--budget", type=seconds, default=570.0, help="seconds for all of it (default: 570)")
    new.add_argument("--out", type=Path, metavar="DIR", help="default: the folder that $OUT names, else results/gpu")
    new.add_argument("--interpret", action="store_true", help="try it out on a CPU")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
