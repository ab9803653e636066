"""More adapters than the device has room for: what does it cost to be in turn?

    python -m benchmarks.few_slots --fixture DIR --json results/few_slots.json
    python -m benchmarks.few_slots --size s                  makes 16 adapters of rank 8 first, under fixtures/
Requests of equal length arrive at --load of the capacity, as a Poisson process, each through an adapter by chance.

collapse   --adapters over device room for --room of them, against room for all, on the same arrivals. Two engines in
           this process take turns, --rounds times, every other round the other way round. SGLang's median time to the
           first token is 150 times as long with little room; target: <= 1.3.
fair       6 adapters over room for 3, --requests requests. No request starves while others take their turns: P99 end to
           end <= 2 x the median.
The capacity is measured first, with room for all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.progress import track
from rich.table import Table

from benchmarks.arguments import positive, seconds
from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import (
    add_arguments,
    capacity,
    fixture_for,
    lora_requests,
    packed_bytes,
    register,
    save,
    start,
    title_of,
    verdict,
)
from benchmarks.many_adapters import Counters
from benchmarks.open_loop import Arrival, Lengths, Record, Spread, Summary, arrival_times, run, schedule
from benchmarks.report import wide_console
from loraplex.frontend.llm import LLM

MAX_COLLAPSE = 1.3
MAX_TAIL = 2.0
FAIR_ADAPTERS = 6
FAIR_ROOM = 3
CUT_OFF_AFTER = 10
"""A run that has not ended after so many times its arrivals' time is cut off."""


class Room:
    """An engine with `num_adapters` registered and device room for `num_slots` of them; `records` has a list a run."""

    def __init__(
        self, made: Fixture, args: argparse.Namespace, num_adapters: int, num_slots: int, one_bytes: int
    ) -> None:
        self.args = args
        self.num_adapters = num_adapters
        self.num_slots = num_slots
        self.requests = lora_requests(made)[:num_adapters]
        budgets = {
            "adapter_memory_bytes": num_slots * one_bytes,
            "host_memory_bytes": 2 * num_adapters * one_bytes,  # never short: this is about the device
        }
        self.llm: LLM = start(made, args, budgets)
        register(self.llm, self.requests)
        self.records: list[list[Record]] = []
        self.counted = Counters()

    def capacity(self) -> float:
        return capacity(
            self.llm, self.requests, self.args.capacity_requests, self.args.prompt_len, self.args.output_len
        )

    def run(self, rate: float, num_requests: int, seed: int) -> None:
        before = Counters.of(self.llm.stats())
        self.records.append(run(self.llm, self.arrivals(rate, num_requests, seed), CUT_OFF_AFTER * num_requests / rate))
        self.counted += Counters.of(self.llm.stats()) - before

    def arrivals(self, rate: float, num_requests: int, seed: int) -> list[Arrival]:
        """Of two engines with as many adapters, the same."""
        chosen = np.random.default_rng(seed).integers(0, self.num_adapters, num_requests)
        adapters = [self.requests[index] for index in chosen]
        due_s, vocab_size = arrival_times(num_requests, rate, 1.0, seed), self.llm.engine.info.vocab_size
        return schedule(due_s, adapters, self.args.prompt_len, self.args.output_len, vocab_size, seed)

    def row(self, case: str) -> Row:
        return Row(case, self.num_adapters, self.num_slots, Summary.of(self.records), self.counted)


@dataclass(frozen=True)
class Row:
    case: str
    num_adapters: int
    num_slots: int
    summary: Summary
    counted: Counters


@dataclass(frozen=True)
class Judged:
    """One ratio against its target; None where too little was measured."""

    what: str
    ratio: float | None
    target: float

    @property
    def is_met(self) -> bool:
        return verdict(self.ratio, self.target) == "ok"


def judge(little: Row, all_fit: Row, fair: Row) -> list[Judged]:
    """The two targets. Requests that failed make a ratio worthless, so there is none."""
    waits, fit_waits = little.summary.time_to_first_token_s, all_fit.summary.time_to_first_token_s
    ends = fair.summary.end_to_end_s
    is_whole = not (little.summary.num_failed or all_fit.summary.num_failed)
    collapse = waits.p50 / fit_waits.p50 if is_whole and waits and fit_waits else None
    tail = ends.p99 / ends.p50 if ends and not fair.summary.num_failed else None
    return [
        Judged("median time to the first token, little room / room for all", collapse, MAX_COLLAPSE),
        Judged(f"P99 end to end / median, {fair.num_adapters} over {fair.num_slots}", tail, MAX_TAIL),
    ]


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in (
        "case", "adapters", "room for", "requests", "first token p50 ms", "p99 ms", "end to end p50 ms", "p99 ms",
        "hits", "misses", "promotions", "evictions", "failed",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        summary, counted = row.summary, row.counted
        table.add_row(
            row.case,
            str(row.num_adapters),
            str(row.num_slots),
            str(summary.num_requests),
            *_cells(summary.time_to_first_token_s),
            *_cells(summary.end_to_end_s),
            *map(str, (counted.num_hits, counted.num_misses, counted.num_promotions, counted.num_evictions)),
            str(summary.num_failed),
        )
    return table


def _cells(spread: Spread | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{1e3 * spread.p50:.0f}", f"{1e3 * spread.p99:.0f}")


def measure(made: Fixture, args: argparse.Namespace, one_bytes: int) -> tuple[float, Row, Row, Row]:
    """(capacity in requests/s, little room, room for all, six over three)."""
    little, all_fit = (Room(made, args, args.adapters, slots, one_bytes) for slots in (args.room, args.adapters))
    with little.llm, all_fit.llm:
        full_rate = all_fit.capacity()
        rate = args.load * full_rate
        num_requests = max(1, round(rate * args.seconds))
        little.run(rate, little.num_adapters, seed=50)  # a warm-up
        little.records.clear()
        little.counted = Counters()
        for number in track(range(args.rounds), "collapse"):
            for side in (little, all_fit) if number % 2 else (all_fit, little):
                side.run(rate, num_requests, seed=51 + number)
            little.llm.check_integrity()
    fair = Room(made, args, FAIR_ADAPTERS, FAIR_ROOM, one_bytes)
    with fair.llm:
        for number in track(range(args.rounds), "fair"):
            fair.run(rate, args.requests, seed=71 + number)
        fair.llm.check_integrity()
    return full_rate, little.row("collapse"), all_fit.row("room for all"), fair.row("fair")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not 1 <= args.room < args.adapters or args.adapters < FAIR_ADAPTERS:
        raise SystemExit(f"--adapters must be at least {FAIR_ADAPTERS}, and --room fewer than these")
    made = fixture_for(args)
    one_bytes = packed_bytes(made, args)
    full_rate, *rows = measure(made, args, one_bytes)
    what = (
        f"{args.prompt_len}+{args.output_len} tokens, Poisson arrivals at {args.load * full_rate:.2f} requests/s, "
        f"{100 * args.load:.0f} % of the capacity"
    )
    title, console = title_of(made, args, what), wide_console()
    console.print(table_of(rows, title))
    judged = judge(*rows)
    for one in judged:
        ratio = "not measured" if one.ratio is None else f"{one.ratio:.2f}"
        console.print(f"{one.what}: {ratio}, target <= {one.target:g}: {verdict(one.ratio, one.target)}")
    figures = {"title": title, "requests_per_s": full_rate, "adapter_bytes": one_bytes}
    save(args.json, figures | {"rows": [asdict(row) for row in rows], "targets": [asdict(one) for one in judged]})
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, rank=8, adapters=16)
    new.add_argument("--room", type=positive, default=8, help="adapters that the device has room for (default: 8)")
    new.add_argument("--load", type=float, default=0.5, help="arrivals as a share of the capacity (default: 0.5)")
    new.add_argument("--seconds", type=seconds, default=60.0, help="of arrivals, each side and round (default: 60)")
    new.add_argument("--requests", type=positive, default=200, help="of the fair case, each round (default: 200)")
    new.add_argument("--rounds", type=positive, default=2, help="(default: 2)")
    new.add_argument("--prompt-len", type=Lengths.of, default=Lengths(32, 32), metavar="LOW-HIGH", help="(default: 32)")
    new.add_argument("--output-len", type=Lengths.of, default=Lengths(32, 32), metavar="LOW-HIGH", help="(default: 32)")
    new.add_argument(
        "--capacity-requests", type=positive, default=96, help="that the capacity is measured with (default: 96)"
    )
    return new


if __name__ == "__main__":
    raise SystemExit(main())
