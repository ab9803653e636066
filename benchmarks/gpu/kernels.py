"""Every kernel of a GPU: its time, and its share of what a copy moves and a large product computes there.

    python -m benchmarks.gpu.kernels                                       a few minutes; the table comes last
    python -m benchmarks.gpu.kernels --only lora --match 'r16 T=32' --json results/gpu-kernels.json
    python -m benchmarks.gpu.kernels --interpret                           on a CPU, in seconds: only whether it runs
Both ceilings are measured first. Times are medians over replays of a CUDA graph; weights, adapters and keys come from
memory, not from the L2. Stock torch's experts are timed without a graph, which cannot hold them. floor: the larger of
bytes / copy bandwidth and operations / matrix rate; of floor: floor / time. Peers: bmm (each row with its adapter out
of a stacked tensor; rows that share one gather it first), torch._grouped_mm, what stock torch has for the operator, and
FlashAttention 3 for prompts where it is installed. target: of docs/gpu.md, on a GPU only; faster: than bmm and grouped.
A case that stock torch ran has failed. Exit code 1 when a case did not run or nothing was timed; 130 after Ctrl-C, with
what was timed until then.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.kernel_cases import GROUPS, TARGETS, Build, Case
from benchmarks.gpu.kernel_checks import fallback_calls, fallen_back
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
from benchmarks.gpu.resume import Earlier, find_earlier
from benchmarks.gpu.timing import Ceilings, Timing, measure_ceilings, time_calls

HEADINGS = (
    "operator", "case", "us", "+-", "MB", "of copy", "of rate", "of floor", "bmm us", "grouped us", "torch us",
    "flash_attn us", "best peer / it", "target",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One case. peers: microseconds, None where it cannot run the case; missing: those that are not here, and why.

    error: why the case itself did not run. eager: what was timed without a graph, of "" (the case) and peers.
    """

    group: str
    name: str
    us: float | None
    spread: float
    num_bytes: float
    operations: float
    floor_us: float
    peers: dict[str, float | None]
    error: str = ""
    target: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    eager: Sequence[str] = ()

    @property
    def best_peer(self) -> float | None:
        return min((us for us in self.peers.values() if us is not None), default=None)

    def share(self, ceilings: Ceilings, is_of_rate: bool) -> float:
        """Of the matrix rate, or of the copy bandwidth."""
        assert self.us is not None
        done, ceiling = (self.operations, ceilings.matrix_rate) if is_of_rate else (self.num_bytes, ceilings.bandwidth)
        return done / (self.us / 1e6) / ceiling


def time_case(case: Case, place: Place, ceilings: Ceilings, budget_s: float) -> Timed:
    """The case, then its peers; none keeps memory for the next."""
    gc.collect()
    backend = case.backend or place.backend
    before = fallback_calls(backend)
    own, error = _time(case.build, place, budget_s)
    error = error or ", ".join(fallen_back(before, fallback_calls(backend)))
    timings = {"": own}
    for name, build in case.peers.items():
        timings[name], _ = _time(build, place, budget_s, may_capture=name not in case.eager_peers)
    peers = {name: None if (timing := timings[name]) is None else 1e6 * timing.seconds for name in case.peers}
    return Timed(
        case.group,
        case.name,
        None if own is None or error else 1e6 * own.seconds,
        0.0 if own is None else own.spread,
        case.num_bytes,
        case.operations,
        1e6 * ceilings.floor_s(case.num_bytes, case.operations),
        peers,
        error,
        case.target,
        case.missing,
        [name for name, timing in timings.items() if timing is not None and not timing.is_captured],
    )


def _time(build: Build, place: Place, budget_s: float, may_capture: bool = True) -> tuple[Timing | None, str]:
    """(None, why) where it does not run; a lost device ends the program."""
    try:
        return time_calls(build(), place, budget_s, may_capture), ""
    except Exception as error:  # one that does not compile or fit is a line of the table, and the others are timed
        place.synchronize()
        return None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"


# -------------------------------------------------------------------------------------------------------------- targets

FASTER = "lora, faster than bmm and grouped"
PEERS = ("bmm", "grouped")


def verdicts(one: Timed, ceilings: Ceilings) -> dict[str, bool | None]:
    """Whether each target that a case has is met; None: it was not measured."""
    found: dict[str, bool | None] = {}
    if one.target:
        target = TARGETS[one.target]
        found[one.target] = None if one.us is None else one.share(ceilings, target.is_of_rate) >= target.share
    if one.group.startswith("lora") and one.peers.keys() & set(PEERS):
        peers = [us for name in PEERS if (us := one.peers.get(name)) is not None]
        found[FASTER] = None if one.us is None or not peers else one.us < min(peers)
    return found


def judged(timed: Sequence[Timed], ceilings: Ceilings) -> list[str]:
    """A line for each target."""
    found = [verdicts(one, ceilings) for one in timed]
    lines = []
    for name in (*TARGETS, FASTER):
        those = [of_case[name] for of_case in found if name in of_case]
        least = f", {100 * TARGETS[name].share:.0f} %" if name in TARGETS else ""
        if False in those:
            outcome = f"MISSED in {those.count(False)} of {len(those)} cases"
        elif True in those:
            outcome = f"met in {those.count(True)} cases"
        else:
            outcome = "not measured"
        unknown = those.count(None) if outcome != "not measured" else 0
        lines.append(f"target: {name}{least}: {outcome}" + (f", not measured in {unknown}" if unknown else ""))
    return lines


# ---------------------------------------------------------------------------------------------------------------- table


def _verdict(one: Timed, ceilings: Ceilings) -> str:
    words = {True: "met", False: "MISSED", None: "not measured"}
    found = verdicts(one, ceilings)
    texts = [words[outcome] for name, outcome in found.items() if name != FASTER]
    texts += [{True: "faster", False: "SLOWER", None: "no peer"}[found[FASTER]]] if FASTER in found else []
    return ", ".join(texts)


def cells(one: Timed, ceilings: Ceilings, is_judged: bool) -> list[str]:
    if one.us is None:
        return [one.group, f"{one.name}: {one.error}", *["-"] * (len(HEADINGS) - 2)]
    return [
        one.group,
        one.name,
        _us(one.us),
        f"{100 * one.spread:.0f} %",
        f"{one.num_bytes / 1e6:.1f}",
        f"{100 * one.share(ceilings, is_of_rate=False):.0f} %",
        f"{100 * one.share(ceilings, is_of_rate=True):.0f} %",
        f"{100 * one.floor_us / one.us:.0f} %",
        *(one.missing.get(name) or _us(one.peers.get(name)) for name in ("bmm", "grouped", "torch", "flash_attn")),
        "-" if one.best_peer is None else f"{one.best_peer / one.us:.2f}",
        _verdict(one, ceilings) if is_judged else "",
    ]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def left_out(case: Case, ceilings: Ceilings) -> Timed:
    floor_us = 1e6 * ceilings.floor_s(case.num_bytes, case.operations)
    no_peers = dict.fromkeys(case.peers)
    return Timed(
        case.group, case.name, None, 0.0, case.num_bytes, case.operations, floor_us, no_peers, LEFT_OUT, case.target
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a case did not run or none was timed; 130 after Ctrl-C."""
    args = parser().parse_args(arguments)
    place = find_place(args.interpret)
    deadline = time.monotonic() + args.budget
    timed: list[Timed] = []
    path = json_path(args.json, "kernels")
    earlier = find_earlier(path, place, args.resume)
    kept = kept_of(earlier)
    ceilings = Ceilings(**earlier.figures["ceilings"]) if kept else measure_ceilings(place)
    output = Output(path, title_of(place, ceilings), place, earlier.commits if kept else ())

    def lines() -> list[str]:
        return [] if place.is_interpreted else judged(shown(), ceilings)

    def shown() -> list[Timed]:
        """What is kept stays there, whatever this call comes to."""
        there = {(one.group, one.name) for one in timed}
        return [*timed, *(one for key, one in kept.items() if key not in there)]

    def state() -> tuple[Sheet, dict[str, Any]]:
        figures = {"ceilings": asdict(ceilings), "timed": [asdict(one) for one in shown()], "targets": lines()}
        rows = [cells(one, ceilings, is_judged=not place.is_interpreted) for one in shown()]
        return Sheet(HEADINGS, rows, num_texts=2), figures

    with endable() as ending, frozen_objects(), torch.inference_mode():
        for case in (case for group in args.only for case in GROUPS[group](place) if args.match in case.name):
            known = kept.get((case.group, case.name))
            if known is not None and known.peers.keys() >= case.peers.keys():
                timed.append(known)
            elif time.monotonic() > deadline:
                timed.append(left_out(case, ceilings))
            else:
                timed.append(time_case(case, place, ceilings, args.seconds))
            output.keep(*state())
    output.finish(*state())
    num_left_out = sum(one.error == LEFT_OUT for one in timed)
    num_failed = sum(bool(one.error) for one in timed) - num_left_out
    eager = [f"timed without a graph: {one.group} {one.name}, {name or 'it'}" for one in timed for name in one.eager]
    print(
        "\n".join(
            [
                *([] if place.is_interpreted else eager),
                *lines(),
                f"{len(timed)} cases, {num_failed} did not run, {num_left_out} left out",
            ]
        )
    )
    return ending.code or int(num_failed > 0 or len(timed) == num_left_out)


def kept_of(earlier: Earlier) -> dict[tuple[str, str], Timed]:
    """By group and name, the cases that were timed."""
    timed = [Timed(**one) for one in earlier.figures.get("timed", ())]
    return {(one.group, one.name): one for one in timed if one.us is not None and not one.error}


@contextmanager
def frozen_objects() -> Iterator[None]:
    """What is there already is not looked through for each case; that took longer than most of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def title_of(place: Place, ceilings: Ceilings) -> str:
    rates = f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 product {ceilings.matrix_rate / 1e12:.0f} TFLOP/s"
    return f"{place.title}\n{'made up' if place.is_interpreted else 'measured'}: {rates}"


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new)
    new.add_argument(
        "--only", type=listed_of(tuple(GROUPS)), default=list(GROUPS), help=f"comma-separated, of {', '.join(GROUPS)}"
    )
    new.add_argument("--match", default="", help="only cases whose name has this text, e.g. 'T=32 distinct'")
    new.add_argument("--seconds", type=seconds, default=0.02, help="of replays for each time (default: 0.02)")
    new.add_argument(
        "--budget",
        type=seconds,
        default=450.0,
        help="seconds after which no case begins; the others are left out (default: 450)",
    )
    return new


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
