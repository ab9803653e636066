"""An engine in this process with a fixture's adapters: what the benchmarks of adapter memory have in common.

`add_arguments` gives a command its arguments, `fixture_for`, `start` and `register` do as they say, `show` and `save`
end it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import Progress, TimeElapsedColumn, track

from benchmarks.arguments import positive
from benchmarks.engines import parse_setting
from benchmarks.fixture import SIZES, Fixture, fixture, fixture_of
from benchmarks.machine import cpu_name, isa_in_use
from benchmarks.open_loop import Lengths, run, saturated_rate, schedule
from loraplex.core import LoRARequest
from loraplex.frontend.llm import LLM

T = TypeVar("T")

LIMIT_S = 600.0
"""Of the runs that find out what an engine can do."""


def add_arguments(parser: argparse.ArgumentParser, *, rank: int, adapters: int | None = None) -> None:
    """Where the adapters come from, how many threads, other settings, and where the figures go.

    Without `adapters` the command sets `args.adapters` itself.
    """
    parser.add_argument("--fixture", type=Path, metavar="DIR", help="a folder with base/ and folders of adapters")
    parser.add_argument("--size", choices=SIZES, default="s", help="without --fixture: what to make (default: s)")
    parser.add_argument("--rank", type=positive, default=rank, help=f"of the adapters that are made (default: {rank})")
    if adapters is not None:
        parser.add_argument(
            "--adapters", type=positive, default=adapters, help=f"as many of the fixture (default: {adapters})"
        )
    parser.add_argument("--requests-in-flight", type=positive, default=16, help="seats of a batch (default: 16)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="any other setting of LLM"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")


def fixture_for(args: argparse.Namespace) -> Fixture:
    """With `--adapters` adapters; made if no folder is given. Ends the program when the folder has fewer."""
    if args.fixture is None:
        return fixture(args.size, args.adapters, ranks=[args.rank], adapter_dtype="bfloat16")
    try:
        made = fixture_of(args.fixture)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if len(made.adapters) < args.adapters:
        raise SystemExit(f"{args.fixture} has {len(made.adapters)} adapters, {args.adapters} are asked for")
    return Fixture(made.size, made.base, made.adapters[: args.adapters])


def start(made: Fixture, args: argparse.Namespace, settings: Mapping[str, Any]) -> LLM:
    """An engine on the fixture's base model; `--set` goes before `settings`. Prefixes are not cached."""
    common = {
        "dtype": args.dtype,
        "num_threads": args.threads,
        "max_num_seqs": args.requests_in_flight,
        "enable_prefix_caching": False,
    }
    return LLM(str(made.base), **{**common, **settings, **dict(map(parse_setting, args.settings))})


def lora_requests(made: Fixture) -> list[LoRARequest]:
    """One for each adapter, numbered from 1."""
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(made.adapters, 1)]


def register(llm: LLM, requests: Sequence[LoRARequest]) -> float:
    """Seconds to load them all."""
    began = time.perf_counter()
    for request in track(requests, f"registering {len(requests)} adapters"):
        llm.add_lora(request)
    return time.perf_counter() - began


def each(runs: Sequence[T], name_of: Callable[[T], str]) -> Iterator[T]:
    """The runs in order, with a progress bar that says which one it is at."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=len(runs))
        for run in runs:
            progress.update(bar, description=name_of(run))
            yield run
            progress.advance(bar)


def packed_bytes(made: Fixture, args: argparse.Namespace) -> int:
    """Bytes of the largest of the fixture's first adapters in memory, found out by an engine of its own: a budget is a
    multiple of it.

    Adapters of one rank and dtype have the same; of the fixtures with several ranks, the first eight have all.
    """
    with start(made, args, {}) as llm:
        sizes = []
        for request in lora_requests(made)[:8]:
            before = llm.stats().memory.resident_bytes["host"]
            llm.add_lora(request)
            sizes.append(llm.stats().memory.resident_bytes["host"] - before)
    return max(sizes)


def capacity(
    llm: LLM,
    requests: Sequence[LoRARequest],
    num_requests: int,
    prompt_len: Lengths,
    output_len: Lengths,
    num_rounds: int = 1,
) -> float:
    """Requests/s of a full engine, the adapters in turn: all come at once, and count while one waits. After a warm-up.

    The median of `num_rounds`.
    """

    def full(count: int, seed: int) -> float:
        adapters = [requests[index % len(requests)] for index in range(count)]
        vocab_size = llm.engine.info.vocab_size
        arrivals = schedule([0.0] * count, adapters, prompt_len, output_len, vocab_size, seed)
        return saturated_rate(run(llm, arrivals, LIMIT_S)) / output_len.mean

    full(max(len(requests), llm.config.max_num_seqs), seed=17)
    return statistics.median(full(num_requests, seed=18 + number) for number in range(num_rounds))


def title_of(made: Fixture, args: argparse.Namespace, what: str) -> str:
    """What the figures depend on."""
    return (
        f"{made.base.parent.name} {args.dtype}, {what}, {args.threads} threads, {cpu_name()}, {isa_in_use()}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def verdict(measured: float | None, target: float, *, is_at_least: bool = False) -> str:
    """`ok` or `MISSED`; `-` where nothing was measured."""
    if measured is None:
        return "-"
    return "ok" if (measured >= target if is_at_least else measured <= target) else "MISSED"


def save(path: Path | None, figures: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1))
