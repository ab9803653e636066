"""What a change from one adapter to another costs: by request, by `switch_lora`, and from the host to the device.

    python -m benchmarks.switching --size s
    python -m benchmarks.switching --fixture DIR --samples 1000 --json results/switching.json
Two adapters of one rank, both registered, with room for both on the device.

alternating    requests one at a time. Blocks that stay on one adapter and blocks that alternate are interleaved, so
               that both see the same weather. Target: the medians differ by less than 1 ms a request.
switch         `llm.switch_lora(one, other)` and back: until requests for the old name go to the new adapter.
               Target: P99 < 50 ms.
promote        an adapter evicted to the host comes back to the device. Target: P99 < 100 ms.
Both verbs are timed in an idle engine and beside requests to the base model that another thread runs meanwhile. No
request runs on the adapter that leaves, so there is no drain in the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.progress import track
from rich.table import Table

from benchmarks.arguments import positive
from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import add_arguments, fixture_for, lora_requests, register, save, start, title_of, verdict
from benchmarks.open_loop import Spread
from benchmarks.report import wide_console
from loraplex.bench import Workload
from loraplex.core import LoRARequest, SamplingParams
from loraplex.frontend.llm import LLM

BLOCK = 8
MAX_ALTERNATING_MS = 1.0
MAX_SWITCH_MS = 50.0
MAX_PROMOTE_MS = 100.0
PAUSE_S = 0.01
"""Between calls in a busy engine, so that they meet a step anywhere."""


@dataclass(frozen=True)
class Row:
    """Milliseconds of `num_samples`; `figure_ms` is what the target is about, None where there is none."""

    what: str
    num_samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    figure_ms: float | None = None
    target_ms: float | None = None

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Row:
        spread = Spread.of(seconds)
        assert spread is not None
        return cls(what, len(seconds), *(1e3 * value for value in (spread.p50, spread.p99, spread.max)))


def time_requests(llm: LLM, prompt: list[int], adapters: Sequence[LoRARequest], output_len: int) -> list[float]:
    """Seconds of each request, one after the other."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    seconds = []
    for adapter in adapters:
        began = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
        seconds.append(time.perf_counter() - began)
    return seconds


def alternating(llm: LLM, one: LoRARequest, other: LoRARequest, args: argparse.Namespace) -> list[Row]:
    """Staying, and alternating; the figure is the difference of the medians."""
    prompt = Workload(1, args.prompt_len).prompts(llm.engine.info.vocab_size)[0]
    time_requests(llm, prompt, [one, other] * BLOCK, args.output_len)
    stays: list[float] = []
    changes: list[float] = []
    for index in track(range(args.blocks), "requests"):
        stays += time_requests(llm, prompt, [(one, other)[index % 2]] * BLOCK, args.output_len)
        changes += time_requests(llm, prompt, [one, other] * (BLOCK // 2), args.output_len)
    cost_ms = 1e3 * (statistics.median(changes) - statistics.median(stays))
    return [
        Row.of("staying", stays),
        replace(Row.of("alternating", changes), figure_ms=cost_ms, target_ms=MAX_ALTERNATING_MS),
    ]


def time_switches(llm: LLM, one: LoRARequest, other: LoRARequest, count: int, pause_s: float) -> list[float]:
    """Seconds of each `switch_lora`, there and back again; one leaves the device when the other comes."""
    pairs = [(one, other), (other, one)]
    seconds = []
    for index in range(count):
        old, new = pairs[index % 2]
        time.sleep(pause_s)
        began = time.perf_counter()
        result = llm.switch_lora(old.lora_int_id, new.lora_int_id)
        seconds.append(time.perf_counter() - began)
        assert result.num_references == 0, f"{old.lora_name} is in use: the drain would be in the figure"
    return seconds


def time_promotes(llm: LLM, adapter: LoRARequest, count: int, pause_s: float) -> list[float]:
    """Seconds of each way from the host to the device."""
    memory = llm.engine.adapters
    adapter_id = next(info.ref.adapter_id for info in llm.adapters() if info.ref.adapter_name == adapter.lora_name)
    memory.promote_adapter(adapter_id)
    seconds = []
    for _ in range(count):
        assert memory.evict_adapter(adapter_id), f"{adapter.lora_name} does not leave the device"
        time.sleep(pause_s)
        began = time.perf_counter()
        memory.promote_adapter(adapter_id)
        seconds.append(time.perf_counter() - began)
    return seconds


@contextlib.contextmanager
def base_requests(llm: LLM, num_requests: int, prompt_len: int) -> Iterator[None]:
    """Another thread keeps the engine busy with the base model."""
    prompts = Workload(num_requests, prompt_len).prompts(llm.engine.info.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=BLOCK, ignore_eos=True, detokenize=False)
    is_over = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not is_over.is_set():
                llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]


def verbs(llm: LLM, one: LoRARequest, other: LoRARequest, args: argparse.Namespace) -> list[Row]:
    """Each verb in an idle and in a busy engine."""

    def switches(pause_s: float) -> list[float]:
        return time_switches(llm, one, other, args.samples, pause_s)

    def promotes(pause_s: float) -> list[float]:
        return time_promotes(llm, one, args.samples, pause_s)

    kinds = (("promote", promotes, MAX_PROMOTE_MS), ("switch", switches, MAX_SWITCH_MS))
    rows = []
    for name, measure, target_ms in track(kinds, "verbs"):
        idle = Row.of(f"{name}, idle", measure(0.0))
        with base_requests(llm, args.requests_in_flight, args.prompt_len):
            busy = Row.of(f"{name}, busy", measure(PAUSE_S))
        rows += [replace(row, figure_ms=row.p99_ms, target_ms=target_ms) for row in (idle, busy)]
    return rows


def two_of_a_rank(made: Fixture) -> tuple[LoRARequest, LoRARequest]:
    """The first two, so that only the change of adapter differs. Ends the program when there are none."""
    first: dict[int, LoRARequest] = {}
    for request in lora_requests(made):
        rank = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())["r"]
        if rank in first:
            return first[rank], request
        first[rank] = request
    raise SystemExit(f"of {len(made.adapters)} adapters no two have one rank; raise --adapters")


def table_of(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "samples", "p50 ms", "p99 ms", "max ms", "difference or p99", "target", "verdict"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        table.add_row(
            row.what,
            str(row.num_samples),
            *(f"{value:.3f}" for value in (row.p50_ms, row.p99_ms, row.max_ms)),
            "" if row.figure_ms is None else f"{row.figure_ms:.3f}",
            "" if row.target_ms is None else f"< {row.target_ms:g}",
            "" if row.target_ms is None else verdict(row.figure_ms, row.target_ms),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    made = fixture_for(args)
    one, other = two_of_a_rank(made)
    with start(made, args, {}) as llm:
        register(llm, [one, other])
        rows = alternating(llm, one, other, args) + verbs(llm, one, other, args)
        llm.check_integrity()
    what = f"{args.prompt_len}+{args.output_len} tokens, {args.requests_in_flight} base requests beside the busy verbs"
    title = title_of(made, args, what)
    wide_console().print(table_of(rows, title))
    save(args.json, {"title": title, "rows": [asdict(row) for row in rows]})
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, rank=16, adapters=2)
    new.add_argument("--prompt-len", type=positive, default=16)
    new.add_argument("--output-len", type=positive, default=4)
    new.add_argument("--blocks", type=positive, default=20, help=f"of {BLOCK} requests each way (default: 20)")
    new.add_argument("--samples", type=positive, default=400, help="of each verb, idle and busy (default: 400)")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
