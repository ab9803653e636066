"""Every kernel of a GPU: its time, and its share of what a copy moves and a large product computes there.

    python -m benchmarks.gpu.kernels                                       a few minutes; the table comes last
    python -m benchmarks.gpu.kernels --only lora --match 'r16 T=32' --json results/gpu-kernels.json
    python -m benchmarks.gpu.kernels --interpret                           on a CPU, in seconds: only whether it runs
Both ceilings are measured first. Times are medians over replays of a CUDA graph; weights, adapters and keys come from memory, not from
the L2. floor: the larger of bytes / copy bandwidth and operations / matrix rate; of floor: floor / time. Peers: bmm (each row with its
adapter out of a stacked tensor; rows that share one gather it first), torch._grouped_mm, and what stock torch has for the operator.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.arguments import listed_of, seconds
from benchmarks.gpu.kernel_cases import GROUPS, Build, Case
from benchmarks.gpu.place import Output, Place, Sheet, add_arguments, find_place
from benchmarks.gpu.timing import Ceilings, Timing, measure_ceilings, time_calls

HEADINGS = (
    "operator", "case", "us", "+-", "MB", "of copy", "of rate", "of floor", "bmm us", "grouped us", "torch us", "best peer / it",
)  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """One case. peers: microseconds, None where it cannot run the case. error: why the case itself did not run."""

    group: str
    name: str
    us: float | None
    spread: float
    num_bytes: float
    operations: float
    floor_us: float
    peers: dict[str, float | None]
    error: str = ""

    @property
    def best_peer(self) -> float | None:
        return min((us for us in self.peers.values() if us is not None), default=None)


def time_case(case: Case, place: Place, ceilings: Ceilings, budget_s: float) -> Timed:
    """The case, then its peers; none keeps memory for the next."""
    own, error = _time(case.build, place, budget_s)
    peers = {}
    for name, build in case.peers.items():
        if not (place.is_interpreted and name == "grouped"):
            timing, _ = _time(build, place, budget_s)
            peers[name] = None if timing is None else 1e6 * timing.seconds
    return Timed(
        case.group,
        case.name,
        None if own is None else 1e6 * own.seconds,
        0.0 if own is None else own.spread,
        case.num_bytes,
        case.operations,
        1e6 * ceilings.floor_s(case.num_bytes, case.operations),
        peers,
        error,
    )


def _time(build: Build, place: Place, budget_s: float) -> tuple[Timing | None, str]:
    """(None, why) where it does not run; a lost device ends the program."""
    try:
        return time_calls(build(), place, budget_s), ""
    except Exception as error:  # one that does not compile or fit is a line of the table, and the others are timed
        place.synchronize()
        return None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:120]}"
    finally:
        gc.collect()


def cells(one: Timed, ceilings: Ceilings) -> list[str]:
    if one.us is None:
        return [one.group, f"{one.name}: {one.error}", *["-"] * (len(HEADINGS) - 2)]
    own_s = one.us / 1e6
    return [
        one.group,
        one.name,
        _us(one.us),
        f"{100 * one.spread:.0f} %",
        f"{one.num_bytes / 1e6:.1f}",
        f"{100 * one.num_bytes / own_s / ceilings.bandwidth:.0f} %",
        f"{100 * one.operations / own_s / ceilings.matrix_rate:.0f} %",
        f"{100 * one.floor_us / one.us:.0f} %",
        *(_us(one.peers.get(name)) for name in ("bmm", "grouped", "torch")),
        "-" if one.best_peer is None else f"{one.best_peer / one.us:.2f}",
    ]


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a case did not run."""
    args = parser().parse_args(arguments)
    place = find_place(args.interpret)
    deadline = time.monotonic() + args.budget
    timed: list[Timed] = []
    with torch.inference_mode():
        ceilings = measure_ceilings(place)
        output = Output(args.json, "kernels", title_of(place, ceilings))
        chosen = [case for group in args.only for case in GROUPS[group](place) if args.match in case.name]

        def state() -> tuple[Sheet, dict[str, Any]]:
            figures = {"ceilings": asdict(ceilings), "timed": [asdict(one) for one in timed]}
            rows = [cells(one, ceilings) for one in timed]
            return Sheet(HEADINGS, rows, num_texts=2), {**figures, "num_left_out": len(chosen) - len(timed)}

        for case in chosen:
            if time.monotonic() > deadline:
                break
            timed.append(time_case(case, place, ceilings, args.seconds))
            output.keep(*state())
    output.finish(*state())
    if len(timed) < len(chosen):
        print(f"{len(chosen) - len(timed)} cases were left out when --budget was spent")
    return int(any(one.error for one in timed))


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
    new.add_argument("--seconds", type=seconds, default=0.05, help="of replays for each time (default: 0.05)")
    new.add_argument("--budget", type=seconds, default=450.0, help="seconds after which no case begins (default: 450)")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
