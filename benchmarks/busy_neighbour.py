"""Throughput while another process computes on one of the cores, over that of the quiet machine.

    python -m benchmarks.busy_neighbour --size s
    python -m benchmarks.busy_neighbour --model loraplex/demo/assets/base --batches 1 --output-len 64 --free

The neighbour is a loop without memory traffic, in a session of its own, pinned to the last core or, with --free,
wherever the system puts it. Quiet and busy runs take turns in one process, base model, greedy; the median of --runs
each. It needs at least two cores that nothing else uses: the first column says what a thread waited for a core in quiet
runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.fixture import SIZES, fixture
from loraplex.core import SamplingParams
from loraplex.frontend.llm import LLM

PROMPT_LEN = 16
LONGEST_S = 200
BURN = "import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until:\n    sum(range(10000))"
SETTLE_S = 0.3


@dataclass(frozen=True)
class Outcome:
    """Output tokens a second, of each run."""

    batch: int
    quiet: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.busy) / statistics.median(self.quiet)


@contextmanager
def neighbour(core: int | None) -> Iterator[None]:
    """A process that computes all the time, at most LONGEST_S."""
    burner = subprocess.Popen([sys.executable, "-c", BURN.format(seconds=LONGEST_S)], start_new_session=True)
    if core is not None:
        os.sched_setaffinity(burner.pid, {core})
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        burner.kill()
        burner.wait()


def tokens_per_s(llm: LLM, batch: int, output_len: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    prompts = [[3 + i + row for i in range(PROMPT_LEN)] for row in range(batch)]
    began = time.perf_counter()
    llm.generate(prompts, params)
    return batch * output_len / (time.perf_counter() - began)


def measure(llm: LLM, batch: int, output_len: int, runs: int, core: int | None) -> Outcome:
    quiet, busy = [], []
    tokens_per_s(llm, batch, 2)
    for _ in range(runs):
        quiet.append(tokens_per_s(llm, batch, output_len))
        with neighbour(core):
            busy.append(tokens_per_s(llm, batch, output_len))
        time.sleep(SETTLE_S)
    return Outcome(batch, tuple(quiet), tuple(busy))


def main(arguments: Sequence[str] | None = None) -> int:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument(
        "--size", choices=SIZES, default="s", help="fixture, made if it is not there (default: %(default)s)"
    )
    new.add_argument("--model", help="folder of a model instead")
    new.add_argument(
        "--batches", type=positive, nargs="+", default=[1, 4, 16], help="requests at a time (default: 1 4 16)"
    )
    new.add_argument("--output-len", type=positive, default=24, help="tokens of a request (default: %(default)s)")
    new.add_argument("--runs", type=positive, default=3, help="default: %(default)s")
    new.add_argument("--threads", type=positive, default=os.cpu_count(), help="default: all cores")
    new.add_argument("--free", action="store_true", help="neighbour not pinned to a core")
    new.add_argument("--json", type=Path, help="file for the figures")
    args = new.parse_args(arguments)
    model = args.model or str(fixture(args.size, 1).base)
    llm = LLM(
        model, num_threads=args.threads, enable_lora=False, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False
    )
    core = None if args.free else max(os.sched_getaffinity(0))
    outcomes = [measure(llm, batch, args.output_len, args.runs, core) for batch in args.batches]
    table = Table(
        title=f"{Path(model).parent.name}, {args.threads} threads, median of {args.runs}", title_justify="left"
    )
    for heading in ("batch", "quiet tok/s", "busy tok/s", "busy / quiet", "busy, all"):
        table.add_column(heading, justify="right")
    for each in outcomes:
        medians = (f"{statistics.median(rates):.1f}" for rates in (each.quiet, each.busy))
        table.add_row(str(each.batch), *medians, f"{each.ratio:.2f}", " ".join(f"{rate:.1f}" for rate in each.busy))
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
