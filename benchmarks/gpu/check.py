"""Whether all of it is right on this GPU.

    python -m benchmarks.gpu.check                 minutes; the table comes last
    python -m benchmarks.gpu.check --only lora,attention --match bf16
    python -m benchmarks.gpu.check --interpret     on a CPU, in Triton's interpreter, at tiny sizes
Kernels against their formulas in float64, on random inputs, with poisoned memory: a row's relative error, the same bits
in two runs, a CUDA graph's replay after its inputs changed equal to eager, no row dependent on its neighbours. The
sampler's tokens against the CPU's. Tiny models in float32 against transformers + peft: several adapters in one batch,
graphs against eager, adapters that are promoted under load. And a part of the kernels under compute-sanitizer: memory
errors, and races of the LoRA and attention kernels of a decode step. Groups run side by side, in processes of their
own. A check that stock torch ran instead of a kernel has failed. Exit code 1 when a check failed, was left out (no
time, no compute-sanitizer), or there was none; 130 after Ctrl-C, with what was found until then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import listed_of, positive, seconds
from benchmarks.gpu.check_pieces import Piece, SideBySide, kill_session, python
from benchmarks.gpu.engine_checks import engine_findings, sampler_findings
from benchmarks.gpu.kernel_checks import PROBLEMS, Finding, check
from benchmarks.gpu.place import (
    LEFT_OUT,
    Output,
    Place,
    Sheet,
    add_arguments,
    endable,
    exit_code,
    find_place,
    json_path,
)
from benchmarks.gpu.resume import find_earlier

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
    group: str
    match: str = ""

    @property
    def name(self) -> str:
        return f"{self.tool} of {self.group}" + (f", {self.match}" if self.match else "")


SANITIZED = (
    *(Sanitized("memcheck", group) for group in ("lora", "attention", "experts", "glue")),
    *(Sanitized("racecheck", group, "decode") for group in ("lora", "attention")),
)
"""Races: of contexts that are split, where the last program to arrive adds the parts up, and of LoRA."""

NUM_PIECES: Mapping[str, int] = {"experts": 3, "lora": 3, "attention": 2, SANITIZER: len(SANITIZED)}
"""Of a group, side by side; of others one."""

ORDER = ("experts", "lora", "attention", SANITIZER, "engine", "linear", "glue", "sampler")
"""In which they begin: the longest first, and the sanitizer while others still run."""

assert sorted(ORDER) == sorted(GROUPS)

HEADINGS = ("group", "check", "", "largest error", "allowed", "note")


@dataclass(frozen=True)
class Kept:
    """What an earlier call found to be right: of groups in `whole` there is nothing else."""

    findings: Sequence[Finding] = ()
    whole: Sequence[str] = ()

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> Kept:
        found = [Finding(**one) for one in figures.get("findings", ())]
        wrong = {one.group for one in found if not one.is_ok}
        whole = [group for group in figures.get("whole", ()) if group not in wrong]
        return cls([one for one in found if one.is_ok], whole)

    def find(self, group: str, name: str) -> Finding | None:
        return next((one for one in self.findings if (one.group, one.name) == (group, name)), None)

    def of_piece(self, piece: Piece) -> list[Finding]:
        """Of groups whose checks only they know, all or none."""
        if piece.names is None:
            return [one for one in self.findings if one.group == piece.group and piece.group in self.whole]
        return [one for name in piece.names if (one := self.find(piece.group, name)) is not None]

    def others(self, found: Sequence[Finding]) -> list[Finding]:
        """Those that are not among `found`: they stay in the file, whatever this call comes to."""
        there = {(one.group, one.name) for one in found}
        return [one for one in self.findings if (one.group, one.name) not in there]

    def is_all_of(self, piece: Piece) -> bool:
        return piece.group in self.whole if piece.names is None else len(self.of_piece(piece)) == len(piece.names)


def names_of(group: str, match: str, place: Place, is_small: bool) -> tuple[str, ...] | None:
    """Of a group's checks; None where only they know them."""
    if group == SANITIZER:
        return tuple(one.name for one in SANITIZED)
    if group in OTHERS:
        return None
    return tuple(planned.name for planned in PROBLEMS[group](place, is_small) if match in planned.name)


def pieces_of(groups: Sequence[str], match: str, place: Place, is_small: bool) -> list[Piece]:
    """In the order in which they begin. None is empty."""
    pieces = []
    for group in sorted(groups, key=ORDER.index):
        of, names = NUM_PIECES.get(group, 1), names_of(group, match, place, is_small)
        shares = [None] if names is None else [names[number::of] for number in range(of)]
        pieces += [Piece(group, i, of, share) for i, share in enumerate(shares) if share is None or share]
    return pieces


def findings(
    place: Place,
    groups: Sequence[str],
    match: str,
    is_small: bool,
    deadline: float,
    share: tuple[int, int] = (0, 1),
    kept: Kept = Kept(),
) -> Iterator[Finding]:
    """In the order of `groups`, until the time is up. share (i, n): every n-th of a group's checks from the i-th on."""
    for group in groups:
        if group in PROBLEMS:
            with torch.inference_mode():
                matching = (planned for planned in PROBLEMS[group](place, is_small) if match in planned.name)
                for planned in itertools.islice(matching, share[0], None, share[1]):
                    if (known := kept.find(group, planned.name)) is not None:
                        yield known
                    elif time.monotonic() < deadline:
                        yield _guarded(group, planned.name, lambda p=planned: check(p.build(), place))
                    else:
                        yield Finding(group, planned.name, None, LEFT_OUT)
        elif group == SANITIZER:
            for one in SANITIZED[share[0] :: share[1]]:
                yield kept.find(SANITIZER, one.name) or sanitized(place, one, deadline + 15)
        elif group in kept.whole:
            yield from (one for one in kept.findings if one.group == group)
        elif time.monotonic() >= deadline:
            yield Finding(group, "all", None, LEFT_OUT)
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


def sanitized(place: Place, one: Sanitized, deadline: float) -> Finding:
    """Small problems in a process of their own, every allocation on its own so that none hides behind another."""
    tool = shutil.which("compute-sanitizer")
    limit_s = min(SANITIZER_LIMIT_S, deadline - time.monotonic())
    if place.is_interpreted:
        return Finding(SANITIZER, one.name, None, "left out: it is for a GPU")
    if tool is None:
        return Finding(SANITIZER, one.name, None, "left out: compute-sanitizer is not on the PATH")
    if limit_s <= 0:
        return Finding(SANITIZER, one.name, None, LEFT_OUT)
    problems = python("--only", one.group, "--match", one.match, "--small", "--no-graphs", "--jobs", "1")
    under_it = [tool, "--tool", one.tool, "--error-exitcode", str(ERRORS_FOUND), *problems]
    ends = time.monotonic() + limit_s
    try:
        said_by(problems, limit_s)  # compiles the kernels
        code, said = said_by(under_it, ends - time.monotonic())
    except subprocess.TimeoutExpired:
        return Finding(SANITIZER, one.name, None, f"left out: not done in {limit_s:.0f} s")
    lines = [line for line in said.splitlines() if line.startswith("=====") or "FAILED" in line]
    return Finding(SANITIZER, one.name, code == 0, "" if code == 0 else " ".join(lines)[-300:])


def said_by(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """(exit code, output). Raises subprocess.TimeoutExpired; nothing of it runs on then."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment.pop("OUT", None)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(max(0.0, limit_s))
        finally:
            kill_session(process)
        output.seek(0)
        return code, output.read()


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
    is_small = args.small or place.is_interpreted
    groups = args.only or [group for group in GROUPS if not (place.is_interpreted and group == SANITIZER)]
    run = Run(place, sorted(groups, key=GROUPS.index), args.match, is_small, time.monotonic() + args.budget)
    path = json_path(args.json, "check")
    earlier = find_earlier(path, place, args.resume)
    output, kept = Output(path, place.title, place, earlier.commits), Kept.of(earlier.figures)
    pieces = [] if args.jobs == 1 else pieces_of(run.groups, run.match, place, is_small)
    if len(pieces) > 1:
        options = [f"--{name.replace('_', '-')}" for name in ("interpret", "small", "no_graphs") if getattr(args, name)]
        found, code = _side_by_side(run, pieces, args.jobs, ["--match", args.match, *options], kept, output)
    else:
        found, code = _in_turn(run, args.piece, kept, output)
    counts = Counter(one.is_ok for one in found)
    print(f"{len(found)} checks, {counts[False]} failed, {counts[None]} left out" + (", ended" if code else ""))
    return code or int(not found or counts[True] < len(found))


@dataclass(frozen=True)
class Run:
    place: Place
    groups: Sequence[str]
    match: str
    is_small: bool
    deadline: float
    began: float = field(default_factory=time.monotonic)

    def sheet(self, found: Sequence[Finding]) -> Sheet:
        return Sheet(HEADINGS, [cells(one) for one in found], num_texts=3)

    def figures(self, found: Sequence[Finding], whole: Sequence[str]) -> dict[str, Any]:
        """whole: groups that came to their end."""
        seconds_taken = time.monotonic() - self.began
        return {"seconds": seconds_taken, "findings": [asdict(one) for one in found], "whole": sorted(set(whole))}


def _in_turn(run: Run, share: tuple[int, int], kept: Kept, output: Output) -> tuple[list[Finding], int]:
    """(findings, exit code of what ended it)"""
    found, whole = list[Finding](), list[str]()
    began = time.monotonic()
    with endable() as ending:
        for group in run.groups:
            for one in findings(run.place, [group], run.match, run.is_small, run.deadline, share, kept):
                found.append(one)
                _keep(run, [*found, *kept.others(found)], [*kept.whole, *whole], output)
            whole.append(group)
    if ending.code and SANITIZER in run.groups:
        note = f"left out: not done in {time.monotonic() - began:.0f} s"
        names = {one.name for one in found if one.group == SANITIZER}
        missing = [one.name for one in SANITIZED[share[0] :: share[1]] if one.name not in names]
        found += [Finding(SANITIZER, name, None, note) for name in missing]
    _keep(run, [*found, *kept.others(found)], [*kept.whole, *whole], output, is_last=True)
    return found, ending.code


def _keep(run: Run, found: Sequence[Finding], whole: Sequence[str], output: Output, is_last: bool = False) -> None:
    in_order = sorted(found, key=lambda one: GROUPS.index(one.group))
    (output.finish if is_last else output.keep)(run.sheet(in_order), run.figures(in_order, whole))


def _side_by_side(
    run: Run, pieces: Sequence[Piece], jobs: int, options: Sequence[str], kept: Kept, output: Output
) -> tuple[list[Finding], int]:
    """The same, of pieces in processes of their own. What was kept whole needs none."""

    def command(piece: Piece, path: Path, budget_s: float) -> list[str]:
        given = ["--json", str(path), "--budget", f"{budget_s:.3f}", "--resume"]
        return python(*piece.arguments(), *given, *options)

    with tempfile.TemporaryDirectory(prefix="loraplex-check-") as name:
        folder = Path(name)
        template = folder / "kept.json"
        Output(template, run.place.title, run.place).keep(run.sheet([]), {}, is_last=True)
        machine = json.loads(template.read_text())

        def kept_of(piece: Piece) -> dict[str, Any]:
            return {**machine, "findings": [asdict(one) for one in kept.of_piece(piece)], "whole": [*kept.whole]}

        there = {piece: kept.of_piece(piece) for piece in pieces if kept.is_all_of(piece)}
        side = SideBySide(pieces, there, jobs, folder, run.deadline, command, kept_of)

        def found() -> list[Finding]:
            return [one for group in run.groups for one in side.findings(group)]

        def keep(is_last: bool = False) -> list[Finding]:
            now = found()
            _keep(run, [*now, *kept.others(now)], [*kept.whole, *side.whole], output, is_last)
            return now

        with endable() as ending:
            for _ in side.run():
                keep()
        side.end()
        return keep(is_last=True), ending.code


def piece_share(text: str) -> tuple[int, int]:
    """I/N, I from 0 on."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise argparse.ArgumentTypeError(f"must be I/N with I below N, got {text!r}")
    return int(number), int(of)


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
        "--jobs",
        type=positive,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="processes side by side (default: half of the CPUs, at most 8)",
    )
    new.add_argument(
        "--piece", type=piece_share, default=(0, 1), metavar="I/N", help="every N-th check from the I-th on"
    )
    new.add_argument(
        "--budget",
        type=seconds,
        default=300.0,
        help="seconds after which no check begins; the others are left out (default: 300)",
    )
    return new


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
