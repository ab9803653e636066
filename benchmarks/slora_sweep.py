"""S-LoRA's sweep: how many adapters may stand behind one base model before throughput or waiting suffer.

    python -m benchmarks.fixture --size s --adapters 2000 --ranks 8 --adapter-dtype bfloat16 --root DIR   makes them
    python -m benchmarks.slora_sweep --fixture DIR/s-r8-7-bfloat16 --json results/slora.json
    python -m benchmarks.slora_sweep --fixture DIR --cells n1000-a0.5-cv2,n2000-a1-cv8 --seconds 120
As in S-LoRA (MLSys'24, section 7): a request's adapter is int(np.random.power(alpha) * n), arrivals have
Gamma-distributed gaps with a coefficient of variation cv. A cell is nN-aALPHA-cvCV; n = 5 of the same alpha and cv is
what it is compared with, on the same arrival times, prompts and lengths. All adapters are registered in one engine; the
device has room for --device-room of them and the host for --host-room. The capacity comes first, with five adapters.
Then each cell gets --seconds of arrivals at 110 % of it for throughput and at 70 % for the time to the first token, in
turn with its n = 5, --rounds times, every other round the other way round. Targets: tokens/s at 110 % >= 0.95 of n = 5,
P99 time to the first token at 70 % <= 1.2 x n = 5.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks.arguments import positive, seconds
from benchmarks.loaded_engine import (
    add_arguments,
    capacity,
    each,
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
from benchmarks.open_loop import Arrival, Lengths, Record, Summary, arrival_times, power_law, run, schedule
from benchmarks.report import wide_console
from loraplex.core import LoRARequest
from loraplex.frontend.llm import LLM

FEW = 5
OVERLOAD = 1.1
MODERATE = 0.7
LOADS = (OVERLOAD, MODERATE)
MIN_THROUGHPUT = 0.95
MAX_FIRST_TOKEN = 1.2
CUT_OFF_AFTER = 4
"""A run that has not ended after so many times its arrivals' time is cut off."""

CELLS = (
    "n5-a0.1-cv1", "n2000-a0.1-cv1",
    "n5-a0.5-cv2", "n100-a0.5-cv2", "n2000-a0.5-cv2",
    "n5-a1-cv1", "n20-a1-cv1", "n1000-a1-cv1", "n2000-a1-cv1",
    "n5-a1-cv8", "n1000-a1-cv8", "n2000-a1-cv8",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Cell:
    """`num_adapters` by a power law with `alpha`; gaps with the coefficient of variation `cv`."""

    alpha: float
    cv: float
    num_adapters: int

    @property
    def name(self) -> str:
        return f"n{self.num_adapters}-a{self.alpha:g}-cv{self.cv:g}"

    @property
    def few(self) -> Cell:
        """What it is compared with."""
        return Cell(self.alpha, self.cv, FEW)

    @classmethod
    def of(cls, name: str) -> Cell:
        """Raises ArgumentTypeError."""
        found = re.fullmatch(r"n(\d+)-a([\d.]+)-cv([\d.]+)", name)
        try:
            cell = cls(float(found[2]), float(found[3]), int(found[1])) if found else None
        except ValueError:
            cell = None
        if cell is None or not (cell.alpha > 0 and cell.cv > 0 and cell.num_adapters > 0):
            raise argparse.ArgumentTypeError(f"a cell is nN-aALPHA-cvCV, each above 0, got {name!r}")
        return cell


def cells_of(text: str) -> list[Cell]:
    """Cells by name, separated by commas, and the n = 5 that each is compared with; equal alpha and cv together, few
    first."""
    named = {Cell.of(name) for name in text.split(",")}
    return sorted(named | {cell.few for cell in named})


@dataclass(frozen=True)
class Run:
    """One piece of the plan: a cell under a load, as a share of the capacity."""

    cell: Cell
    load: float
    round: int


def plan(cells: Sequence[Cell], num_rounds: int) -> list[Run]:
    """Cells of equal alpha and cv take turns under one load, and every other round the other way round."""
    runs = []
    for _, group in itertools.groupby(cells, key=lambda cell: (cell.alpha, cell.cv)):
        together = list(group)
        for load in LOADS:
            for number in range(num_rounds):
                runs += [Run(cell, load, number) for cell in (together[::-1] if number % 2 else together)]
    return runs


class Sweep:
    """An engine with all adapters, and what has been measured: records by cell and load, a list for each round."""

    def __init__(self, llm: LLM, requests: Sequence[LoRARequest], args: argparse.Namespace, rate: float) -> None:
        self.llm = llm
        self.requests = requests
        self.args = args
        self.rate = rate
        self.records: dict[tuple[Cell, float], list[list[Record]]] = {}
        self.counted: dict[tuple[Cell, float], Counters] = {}

    def run(self, one: Run) -> None:
        before = Counters.of(self.llm.stats())
        records = run(self.llm, self.arrivals(one), CUT_OFF_AFTER * self.args.seconds)
        key = one.cell, one.load
        self.records.setdefault(key, []).append(records)
        self.counted[key] = self.counted.get(key, Counters()) + (Counters.of(self.llm.stats()) - before)

    def arrivals(self, one: Run) -> list[Arrival]:
        """Of two cells with equal alpha and cv, only the adapters differ."""
        rate, cell, seed = one.load * self.rate, one.cell, 100 + one.round
        due_s = arrival_times(max(1, round(rate * self.args.seconds)), rate, cell.cv, seed)
        chosen = power_law(cell.num_adapters, cell.alpha, len(due_s), seed)
        vocab_size = self.llm.engine.info.vocab_size
        adapters = [self.requests[index] for index in chosen]
        return schedule(due_s, adapters, self.args.prompt_len, self.args.output_len, vocab_size, seed)


@dataclass(frozen=True)
class Row:
    """A cell's figures; throughput and first_token: over those of n = 5, None for n = 5 itself."""

    cell: Cell
    overload: Summary
    moderate: Summary
    counted: Counters
    throughput: float | None = None
    first_token: float | None = None

    @property
    def is_met(self) -> bool | None:
        """None for n = 5. A request that failed is a target missed."""
        if self.throughput is None or self.first_token is None:
            return None
        is_whole = not self.overload.num_failed and not self.moderate.num_failed
        return is_whole and self.throughput >= MIN_THROUGHPUT and self.first_token <= MAX_FIRST_TOKEN


def rows_of(
    cells: Sequence[Cell],
    summary_of: Callable[[Cell, float], Summary],
    counted: Mapping[tuple[Cell, float], Counters],
) -> list[Row]:
    """A row for each cell, with its ratios to n = 5."""
    rows = []
    for cell in cells:
        overload, moderate = (summary_of(cell, load) for load in LOADS)
        total = counted[cell, OVERLOAD] + counted[cell, MODERATE]
        if cell == cell.few:
            rows.append(Row(cell, overload, moderate, total))
            continue
        few_overload, few_moderate = (summary_of(cell.few, load) for load in LOADS)
        waits, few_waits = moderate.time_to_first_token_s, few_moderate.time_to_first_token_s
        throughput = overload.tokens_per_s / few_overload.tokens_per_s if few_overload.tokens_per_s else None
        first_token = waits.p99 / few_waits.p99 if waits is not None and few_waits is not None else None
        rows.append(Row(cell, overload, moderate, total, throughput, first_token))
    return rows


HEADINGS = (
    "cell", "requests", "tok/s at 110 %", "/ n=5", ">= 0.95", "first token at 70 %: p50 ms", "p99 ms", "p99 / n=5",
    "<= 1.2", "hit rate", "loads", "failed",
)  # fmt: skip


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    for number, row in enumerate(rows):
        waits, hit_rate = row.moderate.time_to_first_token_s, row.counted.hit_rate
        is_last = number + 1 == len(rows) or rows[number + 1].cell.few != row.cell.few
        table.add_row(
            row.cell.name,
            str(row.overload.num_requests + row.moderate.num_requests),
            f"{row.overload.tokens_per_s:.1f}",
            "" if row.throughput is None else f"{row.throughput:.3f}",
            "" if row.cell == row.cell.few else verdict(row.throughput, MIN_THROUGHPUT, is_at_least=True),
            "-" if waits is None else f"{1e3 * waits.p50:.0f}",
            "-" if waits is None else f"{1e3 * waits.p99:.0f}",
            "" if row.first_token is None else f"{row.first_token:.2f}",
            "" if row.cell == row.cell.few else verdict(row.first_token, MAX_FIRST_TOKEN),
            "-" if hit_rate is None else f"{100 * hit_rate:.0f} %",
            str(row.counted.num_loads),
            str(row.overload.num_failed + row.moderate.num_failed),
            end_section=is_last,
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    args.adapters = max(cell.num_adapters for cell in args.cells)
    made = fixture_for(args)
    one_bytes = packed_bytes(made, args)
    budgets = {
        "adapter_memory_bytes": args.device_room * one_bytes,
        "host_memory_bytes": args.host_room * one_bytes,
    }
    console = wide_console()
    with start(made, args, budgets) as llm:
        requests = lora_requests(made)
        registered_s = register(llm, requests)
        rate = capacity(llm, requests[:FEW], args.capacity_requests, args.prompt_len, args.output_len, args.rounds)
        sweep = Sweep(llm, requests, args, rate)
        console.print(f"registered in {registered_s:.0f} s; capacity with {FEW} adapters: {rate:.2f} requests/s")
        for one in each(plan(args.cells, args.rounds), lambda run: f"{run.cell.name} at {100 * run.load:.0f} %"):
            sweep.run(one)
        llm.check_integrity()
    what = (
        f"{args.prompt_len}+{args.output_len} tokens, {args.rounds} x {args.seconds:g} s a cell and load, room for "
        f"{args.device_room} on the device and {args.host_room} in all ({one_bytes} bytes each)"
    )
    title = title_of(made, args, what)
    rows = rows_of(args.cells, lambda cell, load: Summary.of(sweep.records[cell, load]), sweep.counted)
    console.print(table_of(rows, title))
    met = [row.is_met for row in rows if row.is_met is not None]
    console.print(f"both targets met in {sum(met)} of {len(met)} cells")
    figures = {"title": title, "requests_per_s": rate, "registered_s": registered_s, "adapter_bytes": one_bytes}
    save(args.json, figures | {"cells": [{"name": row.cell.name, "is_met": row.is_met} | asdict(row) for row in rows]})
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, rank=8)
    new.add_argument(
        "--cells", type=cells_of, default=cells_of(",".join(CELLS)), metavar="nN-aA-cvC,...",
        help=f"n = 5 is added where it lacks (default: {','.join(CELLS)})",
    )  # fmt: skip
    new.add_argument("--seconds", type=seconds, default=60.0, help="of arrivals, a cell, load and round (default: 60)")
    new.add_argument("--rounds", type=positive, default=1, help="(default: 1)")
    new.add_argument("--device-room", type=positive, default=32, help="adapters of memory on the device (default: 32)")
    new.add_argument("--host-room", type=positive, default=200, help="adapters of memory on the host (default: 200)")
    new.add_argument(
        "--prompt-len", type=Lengths.of, default=Lengths(8, 64), metavar="LOW-HIGH", help="(default: 8-64)"
    )
    new.add_argument(
        "--output-len", type=Lengths.of, default=Lengths(8, 64), metavar="LOW-HIGH", help="(default: 8-64)"
    )
    new.add_argument(
        "--capacity-requests", type=positive, default=96, help="that the capacity is measured with (default: 96)"
    )
    return new


if __name__ == "__main__":
    raise SystemExit(main())
