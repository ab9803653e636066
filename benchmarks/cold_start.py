"""What a request waits whose adapter is not on the device, and what the others notice of it.

    python -m benchmarks.cold_start --fixture DIR --json results/cold_start.json           16 adapters of one rank
    python -m benchmarks.cold_start --size s                                               makes them first, of rank 16
States: `resident` (on the device), `host` (evicted from there), `disk` (evicted from the host too, into the disk tier),
`source` (no disk tier: read from the adapter's own files). Files are in the page cache: they were read, or written,
when they were registered. One engine without a disk tier measures `source`, another one with it `disk`; both without
prediction. Every request is cold: its adapter is brought into the state before it is submitted.

first token    one request at a time, the states in turn; medians and their ratio to `resident` of the same engine.
others         --background requests decode through resident adapters while others come through cold ones, each adapter
               once. The mean time between the tokens of the background, against the same with those adapters resident.
Targets: host <= 1.10 and disk <= 1.5 of the first token, others <= 1.10. An adapter that came back before its request
is counted and said.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.progress import track
from rich.table import Table

from benchmarks.arguments import positive, seconds
from benchmarks.fixture import Fixture
from benchmarks.loaded_engine import (
    add_arguments,
    fixture_for,
    lora_requests,
    packed_bytes,
    register,
    save,
    start,
    title_of,
    verdict,
)
from benchmarks.open_loop import Arrival, Lengths, Record, Spread, run, schedule
from benchmarks.report import wide_console
from loraplex.core import LoRARequest
from loraplex.frontend.llm import LLM

RESIDENT, HOST, DISK, SOURCE = "resident", "host", "disk", "source"
TIER_OF = {RESIDENT: "device", HOST: "host", DISK: "disk", SOURCE: "source"}
MAX_FIRST_TOKEN = {HOST: 1.10, DISK: 1.5}
MAX_OTHERS = 1.10
LIMIT_S = 120.0
BACKGROUND_FIRST_S = 0.5
"""The background decodes alone for so long."""

LAST_ENDS_S = 2.0
"""After its arrival the last cold request has so long."""


class NoSuchTierError(RuntimeError):
    """The engine has no such tier, or the adapter does not leave a nearer one."""


class ColdEngine:
    """An engine with all adapters registered, and those of its states that it measures."""

    def __init__(
        self, made: Fixture, args: argparse.Namespace, states: Sequence[str], settings: dict[str, Any]
    ) -> None:
        self.args = args
        self.states = tuple(states)
        self.llm: LLM = start(made, args, settings)
        self.requests = lora_requests(made)
        register(self.llm, self.requests)
        self._adapter_ids = {info.ref.adapter_name: info.ref.adapter_id for info in self.llm.adapters()}
        self._seeds = itertools.count(1)

    def bring(self, request: LoRARequest, state: str) -> None:
        """The adapter to the device, or down to the tier of this state. Raises NoSuchTierError."""
        memory, adapter_id = self.llm.engine.adapters, self._adapter_ids[request.lora_name]
        memory.promote_adapter(adapter_id)
        while self.tier(request) != TIER_OF[state]:
            if not memory.evict_adapter(adapter_id):
                raise NoSuchTierError(
                    f"{request.lora_name} is in tier {self.tier(request)}, not in {TIER_OF[state]}, and cannot be "
                    "evicted"
                )

    def tier(self, request: LoRARequest) -> str:
        adapter_id = self._adapter_ids[request.lora_name]
        return next(str(a.tier) for a in self.llm.engine.adapters.list_adapters() if a.adapter_id == adapter_id)

    def first_token(self, request: LoRARequest, state: str) -> float:
        """Seconds until the first token of a request through an adapter in this state, nothing else running."""
        self.bring(request, state)
        one = Lengths(1, 1)
        (record,) = run(self.llm, self._arrivals([0.0], [request], self.args.prompt_len, one), LIMIT_S)
        _check([record])
        return record.time_to_first_token_s

    def others(self, state: str) -> tuple[list[float], int]:
        """(seconds between the background's tokens while others come, how many cold adapters were back before their
        request was due).

        The background would go on for as long as the model allows, and is cut off when the others have ended.
        """
        background, cold = self.requests[: self.args.background], self.requests[self.args.background :]
        for requests, tier in ((background, RESIDENT), (cold, state)):
            for request in requests:
                self.bring(request, tier)
        prompt_len = self.args.prompt_len
        longest = self.llm.engine.info.max_model_len - prompt_len.high
        due_s = [BACKGROUND_FIRST_S + index * self.args.every for index in range(len(cold))]
        arrivals = self._arrivals([0.0] * len(background), background, prompt_len, Lengths(longest, longest))
        arrivals += self._arrivals(due_s, cold, prompt_len, Lengths(1, 1))
        before = self.llm.stats().memory.counters["misses"]
        records = run(self.llm, arrivals, due_s[-1] + LAST_ENDS_S)
        _check(records[len(background) :])
        num_missed = self.llm.stats().memory.counters["misses"] - before
        until_s = max(record.token_s[-1] for record in records[len(background) :])
        gaps = [gap for record in records[: len(background)] for gap in gaps_within(record, due_s[0], until_s)]
        return gaps, 0 if state == RESIDENT else max(0, len(cold) - num_missed)

    def _arrivals(
        self, due_s: Sequence[float], requests: Sequence[LoRARequest], prompt_len: Lengths, output_len: Lengths
    ) -> list[Arrival]:
        vocab_size = self.llm.engine.info.vocab_size
        return schedule(due_s, requests, prompt_len, output_len, vocab_size, next(self._seeds))


def gaps_within(record: Record, from_s: float, until_s: float) -> list[float]:
    """Seconds between its tokens, of those that ended in this time."""
    ended_s = record.token_s[1:]
    return [gap for gap, at_s in zip(record.gaps_s, ended_s, strict=True) if from_s <= at_s <= until_s]


def _check(records: Sequence[Record]) -> None:
    errors = {record.error for record in records if record.error}
    if errors:
        raise RuntimeError(f"a request failed: {'; '.join(sorted(errors))}")


@dataclass
class Measured:
    """One state of one engine, in seconds. first_token_s: of each request; others_s, num_early: of all blocks
    (`others`)."""

    state: str
    first_token_s: list[float] = field(default_factory=list)
    others_s: list[float] = field(default_factory=list)
    num_early: int = 0


@dataclass(frozen=True)
class Row:
    """A state against `resident` of the same engine. Times in seconds; ratios are None for `resident` itself."""

    state: str
    first_token_s: float
    first_token_p99_s: float
    first_token_ratio: float | None
    others_s: float
    others_p99_s: float
    others_ratio: float | None
    num_early: int

    @classmethod
    def of(cls, measured: Measured, resident: Measured) -> Row:
        waits, warm = _spread(measured.first_token_s), _spread(resident.first_token_s)
        gaps, warm_gaps = _spread(measured.others_s), _spread(resident.others_s)
        is_cold = measured is not resident
        return cls(
            measured.state,
            waits.p50,
            waits.p99,
            waits.p50 / warm.p50 if is_cold else None,
            gaps.mean,
            gaps.p99,
            gaps.mean / warm_gaps.mean if is_cold else None,
            measured.num_early,
        )


def _spread(values: Sequence[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None, "every state has a request and a block at least"
    return spread


def in_turn(states: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """(round, state): every round has each state once, and starts with another one."""
    for number in range(num_rounds):
        at = number % len(states)
        yield from ((number, state) for state in (*states[at:], *states[:at]))


def measure(engine: ColdEngine, args: argparse.Namespace) -> list[Measured]:
    """The engine's states, `resident` first."""
    measured = {state: Measured(state) for state in engine.states}
    for state in engine.states:  # a warm-up; a tier that is not there is found out before the work
        engine.first_token(engine.requests[0], state)
    turns = list(in_turn(engine.states, args.rounds))
    for number, state in track(turns, f"first token: {', '.join(engine.states)}"):
        request = engine.requests[number % len(engine.requests)]
        measured[state].first_token_s.append(engine.first_token(request, state))
    turns = list(in_turn(engine.states, args.blocks))
    for _, state in track(turns, f"others: {', '.join(engine.states)}"):
        gaps, num_early = engine.others(state)
        measured[state].others_s += gaps
        measured[state].num_early += num_early
    engine.llm.check_integrity()
    return list(measured.values())


def measure_engines(made: Fixture, args: argparse.Namespace, budgets: Mapping[str, Any]) -> list[list[Row]]:
    """Rows of the engine without the disk tier, then of the one that has it, in a folder of its own."""
    engines = []
    with tempfile.TemporaryDirectory(prefix="loraplex-disk-") as folder:
        plans = (
            ((RESIDENT, HOST, SOURCE), {"disk_memory_bytes": 0}),
            ((RESIDENT, HOST, DISK), {"disk_cache_dir": folder}),
        )
        for states, settings in plans:
            engine = ColdEngine(made, args, states, {**budgets, "enable_prediction": False, **settings})
            with engine.llm:
                measured = measure(engine, args)
            engines.append([Row.of(one, measured[0]) for one in measured])
    return engines


def table_of(engines: Sequence[Sequence[Row]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in (
        "state", "first token p50 ms", "p99 ms", "/ resident", "target", "",
        "others' mean ms a token", "p99 ms", "/ resident", "target", "", "came early",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for rows in engines:
        for row in rows:
            target = MAX_FIRST_TOKEN.get(row.state)
            table.add_row(
                row.state,
                f"{1e3 * row.first_token_s:.1f}",
                f"{1e3 * row.first_token_p99_s:.1f}",
                "" if row.first_token_ratio is None else f"{row.first_token_ratio:.3f}",
                "" if target is None else f"<= {target:.2f}",
                "" if target is None else verdict(row.first_token_ratio, target),
                f"{1e3 * row.others_s:.2f}",
                f"{1e3 * row.others_p99_s:.2f}",
                "" if row.others_ratio is None else f"{row.others_ratio:.3f}",
                "" if row.others_ratio is None else f"<= {MAX_OTHERS:.2f}",
                "" if row.others_ratio is None else verdict(row.others_ratio, MAX_OTHERS),
                str(row.num_early) if row.num_early else "",
            )
        table.add_section()
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.background >= args.adapters:
        raise SystemExit(f"--background {args.background} leaves none of {args.adapters} adapters to be cold")
    made = fixture_for(args)
    room = 2 * args.adapters * packed_bytes(made, args)
    try:
        figures = measure_engines(made, args, {"adapter_memory_bytes": room, "host_memory_bytes": room})
    except NoSuchTierError as error:
        raise SystemExit(str(error)) from error
    what = (
        f"{args.adapters} adapters, {args.prompt_len} prompt tokens, {args.rounds} first tokens a state; background "
        f"of {args.background}, a cold request every {args.every:g} s, {args.blocks} blocks"
    )
    title = title_of(made, args, what)
    wide_console().print(table_of(figures, title))
    save(args.json, {"title": title, "engines": [[asdict(row) for row in rows] for rows in figures]})
    return 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new, rank=16, adapters=16)
    new.add_argument("--prompt-len", type=Lengths.of, default=Lengths(64, 64), metavar="LOW-HIGH", help="(default: 64)")
    new.add_argument("--rounds", type=positive, default=60, help="first tokens of each state (default: 60)")
    new.add_argument("--background", type=positive, default=4, help="requests that decode meanwhile (default: 4)")
    new.add_argument("--every", type=seconds, default=0.3, help="seconds between cold requests (default: 0.3)")
    new.add_argument("--blocks", type=positive, default=6, help="of background, of each state (default: 6)")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
