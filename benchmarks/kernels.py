"""Every native operator beside stock torch and beside what the machine could do at most.

    python -m benchmarks.kernels --threads 1
    python -m benchmarks.kernels --only linear --sizes m --dtypes float32,int8 --rows 1,16 --json results/kernels.json
Operators are called through the backend's interface, native and torch in turn; the best round of each counts. Weights,
adapters and keys come from memory, not from a cache (operators.py). floor: the larger of bytes / read bandwidth and
operations / peak, by `python -m benchmarks.machine`; of floor: floor / native.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.arguments import listed_of, positive
from benchmarks.fixture import SIZES
from benchmarks.limits import Peaks
from benchmarks.machine import cpu_name, isa_in_use, machine
from benchmarks.operators import (
    Case,
    add_rms_norm_case,
    attention_case,
    greedy_case,
    is_own,
    is_torch,
    linear_case,
    linears_of,
    lora_case,
    rms_norm_case,
    rotary_case,
    silu_mul_case,
)
from benchmarks.report import wide_console
from benchmarks.timing import best_of
from loraplex.errors import ConfigError
from loraplex.kernels.ops import KernelBackend, get_backend

OPS = ("linear", "lora", "attention", "glue", "sampling")
DTYPES = ("float32", "bfloat16", "float16", "int8", "int4", "int4-a16")
ROWS = (1, 4, 8, 16, 64, 256, 1024)
CONTEXTS = (100, 256, 1024)
MIXED_RANKS = (8, 16, 32, 64) * 4


@dataclass(frozen=True)
class Timed:
    """Microseconds of one case; torch_us None: stock torch has none. is_native False: the native backend runs
    torch's."""

    op: str
    name: str
    native_us: float
    torch_us: float | None
    floor_us: float | None
    is_native: bool


def cases(sizes: Sequence[str], dtypes: Sequence[str], rows: Sequence[int]) -> Iterator[Case]:
    """All of them, in the order of the table."""
    for size in sizes:
        for module in linears_of(size):
            for dtype in dtypes:
                for count in rows:
                    if module != "head" or count <= 64:  # the head sees a row per request
                        yield linear_case(size, module, dtype, count)
    for dtype in ("bfloat16", "float32"):
        for ranks, label in (
            ((16,), "1 x r16"),
            ((16,) * 4, "4 x r16"),
            ((16,) * 16, "16 x r16"),
            (MIXED_RANKS, "16 x r8-64"),
        ):
            yield lora_case("m", 16, ranks, dtype, label)
        yield lora_case("m", 16, (16,) * 16, dtype, "16 x r16 with gains", "outputs")
        yield lora_case("m", 512, (16,) * 8, dtype, "8 x r16")
    yield lora_case("m", 16, (0,) * 16, "float32", "16 x gains alone", "all")
    for size in sizes:
        for dtype in ("float32", "bfloat16", "int8"):
            for context in CONTEXTS:
                yield attention_case(size, (context,) * 16, 1, dtype)
            yield attention_case(size, (512,), 512, dtype)
        for count in (16, 512):
            yield rms_norm_case(size, count)
            yield add_rms_norm_case(size, count)
            yield silu_mul_case(size, count)
            yield rotary_case(size, count, "float32")
    yield greedy_case("s", 16)


def time_case(
    case: Case, native: KernelBackend, torch_backend: KernelBackend, seconds: float, peaks: Peaks | None
) -> Timed:
    """Native and stock torch in turn."""
    own, stock = case.build(native), case.build(torch_backend)
    if own is None:
        raise ConfigError(f"{case.name}: the native backend has no such operator")
    best = best_of({"native": own} | ({} if stock is None else {"torch": stock}), seconds)
    floor = None if peaks is None or case.floor_s is None else 1e6 * case.floor_s(peaks)
    stock_us = 1e6 * best["torch"] if stock is not None else None
    return Timed(case.op, case.name, 1e6 * best["native"], stock_us, floor, is_own(native, case))


def table_of(timed: Sequence[Timed], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("operator", "case", "native us", "torch us", "torch / native", "floor us", "of floor"):
        table.add_column(heading, justify="left" if heading in ("operator", "case") else "right")
    previous = ""
    for one in timed:
        if previous and previous != one.op:
            table.add_section()
        previous = one.op
        table.add_row(*cells(one))
    return table


def cells(one: Timed) -> list[str]:
    """A row of the table."""
    return [
        one.op,
        one.name if one.is_native else f"{one.name} (no native kernel yet)",
        _us(one.native_us),
        "-" if one.torch_us is None else _us(one.torch_us),
        "-" if one.torch_us is None else f"{one.torch_us / one.native_us:.2f}",
        "-" if one.floor_us is None else _us(one.floor_us),
        "-" if one.floor_us is None else f"{100 * one.floor_us / one.native_us:.0f} %",
    ]


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    cpu = torch.device("cpu")
    try:
        native, stock = get_backend("native", cpu), get_backend("torch", cpu)
    except ConfigError as error:
        print(error)
        return 1
    assert is_torch(stock)
    found = machine()
    peaks = None if found is None else found.peaks.get(args.threads)
    chosen = [
        case for case in cases(args.sizes, args.dtypes, args.rows) if case.op in args.only and args.match in case.name
    ]
    now = time.strftime("%Y-%m-%d %H:%M")
    title = f"{cpu_name()}, {isa_in_use()}, {args.threads} threads, torch {torch.__version__}, {now}"
    console = wide_console()
    timed: list[Timed] = []
    with torch.inference_mode(), console.status("measuring") as status:
        for number, case in enumerate(chosen, 1):
            status.update(f"{number} of {len(chosen)}: {case.op} {case.name}")
            timed.append(time_case(case, native, stock, args.seconds, peaks))
            gc.collect()
    console.print(table_of(timed, title))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        limits = None if peaks is None else asdict(peaks)
        args.json.write_text(
            json.dumps({"title": title, "peaks": limits, "timed": [asdict(one) for one in timed]}, indent=1)
        )
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    new.add_argument("--only", type=listed_of(OPS), default=list(OPS), help=f"comma-separated, of {', '.join(OPS)}")
    new.add_argument("--match", default="", help="only cases whose name has this text, e.g. 'T=16' or 'decode'")
    new.add_argument(
        "--sizes", type=listed_of(tuple(SIZES)), default=["s", "m"], help="shapes of which models (default: s,m)"
    )
    new.add_argument(
        "--dtypes", type=listed_of(DTYPES), default=list(DTYPES), help=f"of linears (default: {','.join(DTYPES)})"
    )
    new.add_argument(
        "--rows", type=lambda text: [positive(one) for one in text.split(",")], default=list(ROWS),
        help=f"of linears (default: {','.join(map(str, ROWS))})",
    )  # fmt: skip
    new.add_argument("--seconds", type=float, default=0.3, help="for each case (default: 0.3; at least 3 rounds)")
    new.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
