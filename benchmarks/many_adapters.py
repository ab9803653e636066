"""A thousand adapters over a small memory, requests Zipf-distributed over all of them, against the same with five.

    python -m benchmarks.many_adapters --fixture DIR     1,000 adapters, 2 GiB for them; base/ and one folder each
    python -m benchmarks.many_adapters --size s          makes such a fixture first: 4.9 GB under fixtures/
A closed loop of --requests-in-flight requests: one that ends makes room for the next. Batches of requests over all
adapters and batches over five alternate in one engine, so that both see the same weather. Printed: tokens/s of both and
their ratio, how often an adapter was there when it was wanted (hits), loads from disk and evictions meanwhile, the peak
of the process's memory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import add_arguments, fixture_for, lora_requests, register, save, start, title_of
from benchmarks.process_tree import peak_rss_bytes
from benchmarks.report import wide_console
from loraplex.bench import FIRST_TOKEN_ID, Workload
from loraplex.core import SamplingParams
from loraplex.metrics import EngineStats

FEW = 5
BLOCKS = 4
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Counters:
    """What an engine counts of its adapters' memory."""

    num_hits: int = 0
    num_misses: int = 0
    num_loads: int = 0
    num_promotions: int = 0
    num_evictions: int = 0

    @classmethod
    def of(cls, stats: EngineStats) -> Counters:
        memory = stats.memory
        hits, misses, promotions = (int(memory.counters[name]) for name in ("hits", "misses", "promotions"))
        return cls(hits, misses, int(sum(memory.loads.values())), promotions, int(sum(memory.evictions.values())))

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(_values(self), _values(before), strict=True)))

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(one + two for one, two in zip(_values(self), _values(other), strict=True)))

    @property
    def hit_rate(self) -> float | None:
        """None when no adapter was wanted."""
        wanted = self.num_hits + self.num_misses
        return self.num_hits / wanted if wanted else None


def _values(counters: Counters) -> tuple[int, ...]:
    return tuple(asdict(counters).values())


@dataclass(frozen=True)
class Side:
    """One of the two: rates of its blocks, what was counted in them."""

    num_adapters: int
    num_used: int
    rates: tuple[float, ...]
    counters: Counters

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def draw_adapters(num_adapters: int, alpha: float, num_requests: int, seed: int) -> list[int]:
    """The adapter of each request: Zipf over all of them, which ones are popular being a matter of chance."""
    places = list(range(num_adapters))
    random.Random(seed).shuffle(places)
    drawn = Workload(num_requests, seed=seed).adapters(f"zipf_all:{alpha}", num_adapters)
    return [places[index] for index in drawn if index is not None]


def blocks_of(chosen: Sequence[int], num_blocks: int) -> list[list[int]]:
    """In order, of nearly equal length."""
    cuts = [len(chosen) * i // num_blocks for i in range(num_blocks + 1)]
    return [list(chosen[start:end]) for start, end in itertools.pairwise(cuts)]


class Bench:
    """An engine with all adapters registered."""

    def __init__(self, made: Fixture, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = start(made, args, settings_of(args))
        self.requests = lora_requests(made)
        self.draw = random.Random(11)

    def run(self, chosen: Sequence[int]) -> tuple[float, Counters]:
        """(tokens/s, what was counted) of one block of requests."""
        vocab_size = self.llm.engine.info.vocab_size
        prompts = [
            {"prompt_token_ids": [self.draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(self.args.prompt_len)]}
            for _ in chosen
        ]
        params = SamplingParams(temperature=0, max_tokens=self.args.output_len, ignore_eos=True, detokenize=False)
        before, began = Counters.of(self.llm.stats()), time.perf_counter()
        outputs = self.llm.generate(prompts, params, lora_request=[self.requests[index] for index in chosen])
        seconds = time.perf_counter() - began
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return num_tokens / seconds, Counters.of(self.llm.stats()) - before


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_waiting_requests": args.requests_in_flight,  # those behind are not known yet: a closed loop
        "host_memory_bytes": args.host_memory_bytes,
        "adapter_memory_bytes": args.adapter_memory_bytes or args.host_memory_bytes,
    }


def measure(bench: Bench, num_adapters: int, args: argparse.Namespace) -> tuple[Side, Side]:
    """(all adapters, few), block by block in turn after a block that warms both up."""
    many = draw_adapters(num_adapters, args.alpha, args.requests, seed=11)
    few = draw_adapters(min(FEW, num_adapters), args.alpha, args.requests, seed=12)
    bench.run(few[: args.requests_in_flight])
    bench.run(draw_adapters(num_adapters, args.alpha, args.requests_in_flight, seed=13))
    rates: tuple[list[float], list[float]] = ([], [])
    totals = [Counters(), Counters()]
    pairs = list(zip(blocks_of(many, BLOCKS), blocks_of(few, BLOCKS), strict=True))
    for pair in track(pairs, "measuring"):
        for side, block in enumerate(pair):
            rate, counted = bench.run(block)
            rates[side].append(rate)
            totals[side] += counted
    used = len(set(many)), len(set(few))
    return (
        Side(num_adapters, used[0], tuple(rates[0]), totals[0]),
        Side(min(FEW, num_adapters), used[1], tuple(rates[1]), totals[1]),
    )


def table_of(sides: Sequence[Side], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in (
        "adapters",
        "used",
        "tok/s",
        "min-max",
        "hit rate",
        "hits",
        "misses",
        "loads",
        "promotions",
        "evictions",
    ):
        table.add_column(heading, justify="right")
    for side in sides:
        counted, hit_rate = side.counters, side.counters.hit_rate
        table.add_row(
            str(side.num_adapters),
            str(side.num_used),
            f"{side.rate:.1f}",
            f"{min(side.rates):.1f}-{max(side.rates):.1f}",
            "-" if hit_rate is None else f"{100 * hit_rate:.1f} %",
            *map(str, _values(counted)),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    made = fixture_for(args)
    bench = Bench(made, args)
    registered_s = register(bench.llm, bench.requests)
    many, few = measure(bench, len(made.adapters), args)
    peak = peak_rss_bytes(os.getpid())
    stats = bench.llm.stats()
    title = title_of(
        made,
        args,
        f"{args.requests} requests of {args.prompt_len}+{args.output_len} tokens, {args.requests_in_flight} in flight, "
        f"Zipf {args.alpha}, {args.host_memory_bytes / GIB:.1f} GiB for adapters",
    )
    console = wide_console()
    console.print(table_of((many, few), title))
    ratio = many.rate / few.rate
    console.print(
        f"{len(made.adapters)} adapters / {min(FEW, len(made.adapters))} adapters: {ratio:.2f} of the tokens/s; "
        f"registered in {registered_s:.1f} s; "
        f"{stats.memory.num_adapters} registered; peak RSS {'-' if peak is None else f'{peak / MIB:.0f} MiB'}"
    )
    figures = {"title": title, "ratio": ratio, "registered_s": registered_s, "peak_rss_bytes": peak}
    save(args.json, figures | {"many": asdict(many), "few": asdict(few)})
    bench.llm.close()
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, adapters=1000, rank=8)
    new.add_argument("--alpha", type=float, default=0.9, help="of the Zipf distribution (default: 0.9)")
    new.add_argument("--requests", type=int, default=400, help="of each kind (default: 400)")
    new.add_argument("--prompt-len", type=int, default=32)
    new.add_argument("--output-len", type=int, default=32)
    new.add_argument("--host-memory-bytes", type=int, default=2 * GIB, help="for adapters (default: 2 GiB)")
    new.add_argument("--adapter-memory-bytes", type=int, help="of these for running ones (default: all)")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
