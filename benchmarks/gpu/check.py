"""Whether all of it is right on this GPU.

    python -m benchmarks.gpu.check                                         a few minutes; the table comes last, exit code 1 on a failure
    python -m benchmarks.gpu.check --only lora,attention --match bf16
    python -m benchmarks.gpu.check --interpret                             on a CPU, in Triton's interpreter, at tiny sizes
Kernels against their formulas in float64, on random inputs, with poisoned memory: a row's relative error, the same bits in two runs,
a CUDA graph's replay after its inputs changed equal to eager, no row dependent on its neighbours. The sampler's tokens against the
CPU's. Tiny models in float32 against transformers + peft: several adapters in one batch, graphs against eager, adapters that are promoted
under load. And a part of the kernels under compute-sanitizer, where that is on the PATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.engine_checks import engine_findings, sampler_findings
from benchmarks.gpu.kernel_checks import PROBLEMS, Finding, check
from benchmarks.gpu.place import Output, Place, Sheet, add_arguments, find_place

OTHERS: Mapping[str, Callable[[Place, bool], Iterator[Finding]]] = {
    "sampler": sampler_findings, "engine": engine_findings,
}  # fmt: skip
SANITIZER = "sanitizer"
GROUPS = (*PROBLEMS, *OTHERS, SANITIZER)

SANITIZED = "lora,attention,glue"
SANITIZER_LIMIT_S = 240
ERRORS_FOUND = 99

HEADINGS = ("group", "check", "", "largest error", "allowed", "note")


def findings(place: Place, groups: Sequence[str], match: str, is_small: bool, deadline: float) -> Iterator[Finding]:
    """In the order of GROUPS, until the time is up."""
    for group in groups:
        if group in PROBLEMS:
            with torch.inference_mode():
                for problem in PROBLEMS[group](place, is_small):
                    if match in problem.name and time.monotonic() < deadline:
                        yield _guarded(problem.group, problem.name, lambda p=problem: check(p, place))
        elif time.monotonic() >= deadline:
            yield Finding(group, "all", None, "left out: --budget is spent")
        elif group == SANITIZER:
            yield sanitized(min(SANITIZER_LIMIT_S, deadline - time.monotonic() + 15))
        else:
            yield from _guarded_all(group, OTHERS[group](place, is_small))


def _guarded(group: str, name: str, run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except Exception as error:  # a kernel that does not compile is a finding, and the others are checked
        return Finding(group, name, False, f"{type(error).__name__}: {_first_line(error)}")


def _guarded_all(group: str, found: Iterator[Finding]) -> Iterator[Finding]:
    try:
        yield from found
    except Exception as error:
        yield Finding(group, "the rest", False, f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def sanitized(limit_s: float = SANITIZER_LIMIT_S) -> Finding:
    """Small problems in a process of its own under memcheck, every allocation on its own so that none hides behind another."""
    tool = shutil.which("compute-sanitizer")
    name = f"memcheck of {SANITIZED}"
    if tool is None:
        return Finding(SANITIZER, name, None, "compute-sanitizer is not on the PATH")
    command = [
        tool, "--tool", "memcheck", "--error-exitcode", str(ERRORS_FOUND), sys.executable, "-m", "benchmarks.gpu.check",
        "--only", SANITIZED, "--small", "--no-graphs",
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("OUT", None)
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Finding(SANITIZER, name, None, f"not done in {limit_s:.0f} s")
    lines = [line for line in result.stdout.splitlines() if line.startswith("=====") or "FAILED" in line]
    return Finding(SANITIZER, name, result.returncode == 0, "" if result.returncode == 0 else " ".join(lines)[-300:])


def cells(one: Finding) -> list[str]:
    outcome = {True: "ok", False: "FAILED", None: "-"}[one.is_ok]
    numbers = ["" if value is None else f"{value:.1e}" for value in (one.error, one.limit)]
    return [one.group, one.name, outcome, *numbers, one.note]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when something failed."""
    args = parser().parse_args(arguments)
    place = find_place(args.interpret)
    if args.no_graphs:
        place = replace(place, may_capture=False)
    started = time.monotonic()
    is_small = args.small or place.is_interpreted
    groups = [group for group in args.only if not (place.is_interpreted and group == SANITIZER)]
    output, found = Output(args.json, "check", place.title), list[Finding]()

    def sheet() -> Sheet:
        return Sheet(HEADINGS, [cells(one) for one in found], num_texts=3)

    def figures() -> dict[str, Any]:
        return {
            "seconds": time.monotonic() - started,
            "fallbacks": fallbacks,
            "findings": [asdict(one) for one in found],
        }

    fallbacks: dict[str, int] = {}
    for one in findings(place, groups, args.match, is_small, started + args.budget):
        found.append(one)
        fallbacks = dict(getattr(place.backend, "fallbacks", {}))
        output.keep(sheet(), figures())
    output.finish(sheet(), figures())
    num_failed = sum(one.is_ok is False for one in found)
    for reason, count in fallbacks.items():
        print(f"stock torch ran {reason} ({count} times)")
    print(f"{len(found)} checks, {num_failed} failed, {sum(one.is_ok is None for one in found)} left out")
    return int(num_failed > 0)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new)
    new.add_argument("--only", type=listed_of(GROUPS), default=list(GROUPS), help=f"of {', '.join(GROUPS)}")
    new.add_argument("--match", default="", help="only kernel checks whose name has this text, e.g. bf16")
    new.add_argument("--small", action="store_true", help="the interpreter's sizes")
    new.add_argument("--no-graphs", action="store_true", help="capture nothing")
    new.add_argument("--budget", type=seconds, default=300.0, help="seconds after which no check begins (default: 300)")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
