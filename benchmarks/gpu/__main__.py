"""Check, kernels and engine in one go on a GPU, within so many seconds; installs nothing and needs no network.

    python -m benchmarks.gpu                  everything in nine and a half minutes, into $OUT or results/gpu/
    python -m benchmarks.gpu --only check,kernels --budget 300
    python -m benchmarks.gpu --resume         what the last call left there is kept; what it lacks is run
    python -m benchmarks.gpu --interpret      on a CPU, in Triton's interpreter: only whether it runs
Leaves check.json, kernels.json, engine.json, what each printed (.log), and gpu.md with their tables, and removes what
an earlier run left of the same. With --resume it keeps their checks that passed, cases that were timed and loads that
were measured, if they are of the same card, torch and Triton; the title says which commits they are of. A short summary
comes last. Exit code 1 when a check failed or was left out, or something did not run; 130 after Ctrl-C, with what was
measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.adapters import remove_scratch
from benchmarks.gpu.place import LEFT_OUT, Sheet, endable, exit_code

SHARES: Mapping[str, float] = {"check": 0.36, "kernels": 0.27, "engine": 0.37}
"""Of the time; what one leaves goes to the next."""

ENDING_S = 25.0
"""A part begins nothing after its budget; what it has begun may take this much longer before it is ended."""

GRACE_S = 10.0
"""A part that is told to end has so long for its table and its files."""

SHOWN_LINES = 45


def run_part(
    name: str, budget_s: float, limit_s: float, folder: Path, is_interpreted: bool, is_resumed: bool = False
) -> str:
    """Empty, or why it is not whole."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--json", str(folder / f"{name}.json")]
    command += ["--budget", f"{budget_s:.0f}", *(["--interpret"] if is_interpreted else [])]
    command += ["--resume"] if is_resumed else []
    with (folder / f"{name}.log").open("w") as log:
        return run_until(command, log, limit_s)


def run_until(command: Sequence[str], log: IO[str], limit_s: float) -> str:
    """Empty, or why it did not succeed. A session of its own: Ctrl-C comes to it as SIGTERM, once, and it leaves
    nothing."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:.0f} s"
    finally:
        _end(process)
    return "" if code == 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    remove_scratch(process.pid)


def remove_old(folder: Path, names: Sequence[str], kinds: Sequence[str] = ("json", "log")) -> None:
    """What an earlier run left of these parts: a part that fails shows nothing, and not that."""
    for name in ("gpu.md", *(f"{name}.{kind}" for name in names for kind in kinds)):
        (folder / name).unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Whether a file is a script's figures."""
    try:
        return {"title", "table"} <= json.loads(path.read_text()).keys()
    except (OSError, ValueError, AttributeError):
        return False


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
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    if not path.exists():
        return log.read_text().splitlines()[-12:] if log.exists() else ["not begun"]
    figures = json.loads(path.read_text())
    rows = figures["table"]["rows"]
    if name == "check":
        chosen = sorted((row for row in rows if row[2] != "ok"), key=lambda row: row[2] != "FAILED")
        counts = f"{sum(row[2] == 'FAILED' for row in rows)} failed, {sum(row[2] == '-' for row in rows)} left out"
        lines = [f"{len(rows)} checks, {counts}, in {figures['seconds']:.0f} s"]
    else:
        is_chosen = {"kernels": is_summed_up, "engine": lambda row: True}[name]
        chosen, lines = [row for row in rows if is_chosen(row)], [figures["title"], *figures.get("targets", ())]
    return [*lines, *(" | ".join(row) for row in chosen[:SHOWN_LINES])]


def is_summed_up(row: Sequence[str]) -> bool:
    """Whether a kernel's row is among the few that are shown."""
    return LEFT_OUT not in row[1] and (" r16 " in row[1] or not row[0].startswith("lora"))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    folder = args.out or Path(os.environ.get("OUT") or "results/gpu")
    folder.mkdir(parents=True, exist_ok=True)
    is_kept = {name: args.resume and is_whole(folder / f"{name}.json") for name in args.only}
    for name in args.only:
        remove_old(folder, [name], ("log",) if is_kept[name] else ("json", "log"))
    ends = time.monotonic() + args.budget
    problems = dict.fromkeys(args.only, "not whole: it was ended")
    with endable() as ending:
        for number, name in enumerate(args.only):
            left = ends - time.monotonic()
            share = SHARES[name] / sum(SHARES[one] for one in args.only[number:])
            budget = max(1.0, left * share - ENDING_S)
            problems[name] = run_part(name, budget, max(1.0, left * share), folder, args.interpret, args.resume)
    problems = {name: problem for name, problem in problems.items() if problem}
    (folder / "gpu.md").write_text(report(folder, args.only, problems))
    for name in args.only:
        print(f"== {name}" + (f": {problems[name]}" if name in problems else ""))
        print("\n".join(summary(folder, name)))
    return ending.code or int(bool(problems))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument(
        "--only", type=listed_of(tuple(SHARES)), default=list(SHARES), help=f"of {', '.join(SHARES)} (default: all)"
    )
    new.add_argument("--budget", type=seconds, default=570.0, help="seconds for all of it (default: 570)")
    new.add_argument("--out", type=Path, metavar="DIR", help="default: the folder that $OUT names, else results/gpu")
    new.add_argument("--resume", action="store_true", help="keep what succeeded in an earlier call, and run the rest")
    new.add_argument("--interpret", action="store_true", help="try it out on a CPU")
    return new


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
