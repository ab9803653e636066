"""Whether all of it is right on this GPU.

    python -m benchmarks.gpu.check                 a few minutes; the table comes last
    python -m benchmarks.gpu.check --only lora,attention --match bf16
    python -m benchmarks.gpu.check --interpret     on a CPU, in Triton's interpreter, at tiny sizes
Kernels against their formulas in float64, on random inputs, with poisoned memory: a row's relative error, the same bits
in two runs, a CUDA graph's replay after its inputs changed equal to eager, no row dependent on its neighbours. The
sampler's tokens against the CPU's. Tiny models in float32 against transformers + peft: several adapters in one batch,
graphs against eager, adapters that are promoted under load. And a part of the kernels under compute-sanitizer: memory
errors, and races of the LoRA and attention kernels of a decode step. A check that stock torch ran instead of a kernel
has failed. Exit code 1 when a check failed, was left out (no time, no compute-sanitizer), or there was none; 130 after
Ctrl-C, with what was found until then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.engine_checks import engine_findings, sampler_findings
from benchmarks.gpu.kernel_checks import PROBLEMS, Finding, check
from benchmarks.gpu.place import LEFT_OUT, Output, Place, Sheet, add_arguments, endable, exit_code, find_place

OTHERS: Mapping[str, Callable[[Place, bool], Iterator[Finding]]] = {
    "sampler": sampler_findings, "engine": engine_findings,
}  # fmt: skip
SANITIZER = "sanitizer"
GROUPS = (*PROBLEMS, *OTHERS, SANITIZER)

SANITIZER_LIMIT_S = 240
ERRORS_FOUND = 99


@dataclass(frozen=True)
class Sanitized:
    """A tool of compute-sanitizer, and the small problems that run under it."""

    tool: str
    groups: str
    match: str = ""


SANITIZED = (Sanitized("memcheck", "lora,attention,glue,experts"), Sanitized("racecheck", "lora,attention", "decode"))
"""Races: the LoRA kernel of one launch, and contexts that are split, where programs wait for one another."""

HEADINGS = ("group", "check", "", "largest error", "allowed", "note")


def findings(place: Place, groups: Sequence[str], match: str, is_small: bool, deadline: float) -> Iterator[Finding]:
    """In the order of GROUPS, until the time is up."""
    for group in groups:
        if group in PROBLEMS:
            with torch.inference_mode():
                for planned in PROBLEMS[group](place, is_small):
                    if match not in planned.name:
                        continue
                    if time.monotonic() < deadline:
                        yield _guarded(group, planned.name, lambda p=planned: check(p.build(), place))
                    else:
                        yield Finding(group, planned.name, None, LEFT_OUT)
        elif time.monotonic() >= deadline:
            yield Finding(group, "all", None, LEFT_OUT)
        elif group == SANITIZER:
            yield from sanitized(place, deadline + 15)
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


def sanitized(place: Place, deadline: float) -> Iterator[Finding]:
    """Small problems in processes of their own, every allocation on its own so that none hides behind another."""
    tool = shutil.which("compute-sanitizer")
    for one in SANITIZED:
        name = f"{one.tool} of {one.groups}" + (f", {one.match}" if one.match else "")
        left_s = min(SANITIZER_LIMIT_S, deadline - time.monotonic())
        if place.is_interpreted:
            yield Finding(SANITIZER, name, None, "left out: it is for a GPU")
        elif tool is None:
            yield Finding(SANITIZER, name, None, "left out: compute-sanitizer is not on the PATH")
        elif left_s <= 0:
            yield Finding(SANITIZER, name, None, LEFT_OUT)
        else:
            yield _sanitized(tool, one, name, left_s)


def _sanitized(tool: str, one: Sanitized, name: str, limit_s: float) -> Finding:
    command = [
        tool, "--tool", one.tool, "--error-exitcode", str(ERRORS_FOUND), sys.executable, "-m", "benchmarks.gpu.check",
        "--only", one.groups, "--match", one.match, "--small", "--no-graphs",
    ]  # fmt: skip
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("OUT", None)
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Finding(SANITIZER, name, None, f"left out: not done in {limit_s:.0f} s")
    lines = [line for line in result.stdout.splitlines() if line.startswith("=====") or "FAILED" in line]
    return Finding(SANITIZER, name, result.returncode == 0, "" if result.returncode == 0 else " ".join(lines)[-300:])


def cells(one: Finding) -> list[str]:
    outcome = {True: "ok", False: "FAILED", None: "-"}[one.is_ok]
    numbers = ["" if value is None else f"{value:.1e}" for value in (one.error, one.limit)]
    return [one.group, one.name, outcome, *numbers, one.note]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when something failed or was left out, or there was nothing; 130 after Ctrl-C."""
    args = parser().parse_args(arguments)
    place = find_place(args.interpret)
    if args.no_graphs:
        place = replace(place, may_capture=False)
    started = time.monotonic()
    is_small = args.small or place.is_interpreted
    groups = args.only or [group for group in GROUPS if not (place.is_interpreted and group == SANITIZER)]
    output, found = Output(args.json, "check", place.title, place), list[Finding]()

    def sheet() -> Sheet:
        return Sheet(HEADINGS, [cells(one) for one in found], num_texts=3)

    def figures() -> dict[str, Any]:
        return {"seconds": time.monotonic() - started, "findings": [asdict(one) for one in found]}

    with endable() as ending:
        for one in findings(place, groups, args.match, is_small, started + args.budget):
            found.append(one)
            output.keep(sheet(), figures())
    output.finish(sheet(), figures())
    counts = Counter(one.is_ok for one in found)
    print(f"{len(found)} checks, {counts[False]} failed, {counts[None]} left out" + (", ended" if ending.code else ""))
    return ending.code or int(not found or counts[True] < len(found))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new)
    new.add_argument(
        "--only",
        type=listed_of(GROUPS),
        help=f"of {', '.join(GROUPS)} (default: all; with --interpret all but {SANITIZER})",
    )
    new.add_argument("--match", default="", help="of the kernel checks only those whose name has this text, e.g. bf16")
    new.add_argument("--small", action="store_true", help="the interpreter's sizes")
    new.add_argument("--no-graphs", action="store_true", help="capture nothing")
    new.add_argument(
        "--budget",
        type=seconds,
        default=300.0,
        help="seconds after which no check begins; the others are left out (default: 300)",
    )
    return new


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
