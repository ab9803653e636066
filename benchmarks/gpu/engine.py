"""The engine on a GPU with random weights in the shapes of Llama-3-8B and Llama-3.2-1B: what adapters cost.

    python -m benchmarks.gpu.engine     under 8 minutes; the table comes last
    python -m benchmarks.gpu.engine --models Llama-3.2-1B --variants default,eager --json results/gpu-engine.json
    python -m benchmarks.gpu.engine --interpret --variants default --lora-backend torch
                                        on a CPU, in seconds: only whether it runs; minutes without --lora-backend,
                                        in Triton's interpreter
of limit: tokens/s beside batch * copy bandwidth / bytes of the base weights. of floor: the time in which a copy moves
what a step reads (weights, the step's adapters, keys and values) beside the step's. / base: tokens/s beside the same
batch without adapters. replayed: the share of decode steps that were a CUDA graph's. A load that had others where
graphs are on, or operators that stock torch ran instead of a kernel, has failed. Adapters have rank 16 and are on every
linear. profile: the GPU's time of a decode step by kernel, in the JSON, and the longest after the table. Targets are
those of docs/gpu.md. Exit code 1 when a load failed or none was measured; 130 after Ctrl-C, with
what was measured until then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import listed_of, positive, seconds
from benchmarks.gpu.adapters import scratch_folder, write_adapters
from benchmarks.gpu.engine_loads import INTERPRETED, ON_A_GPU, Sizes, cold, decode, mixed
from benchmarks.gpu.engine_profile import Profile, profile_decode
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
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, SHAPES, TINY, Shape
from benchmarks.gpu.timing import Ceilings, measure_ceilings
from loraplex.core import LoRARequest
from loraplex.errors import LoraplexError
from loraplex.frontend.llm import LLM
from loraplex.metrics import EngineStats

RANK = 16
FAILED = "FAILED"
GIB = 1 << 30

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "int8 blocks": {"lora_dtype": "int8"},
    "eager": {"enforce_eager": True},
    "no look-ahead": {"look_ahead": False},
}
"""Settings that differ from the defaults."""

HEADINGS = (
    "model", "variant", "load", "tok/s", "ms/step", "of limit", "of floor", "/ base", "replayed", "besides", "target",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One load. base_ratio: of its tokens/s to the same batch's without adapters. replayed: share of its decode steps,
    None where none could be.

    eager: its other decode steps by reason. fallbacks: calls that stock torch ran for a kernel, by operator and reason.
    verdict: ok, MISSED, or empty where there is no target. base_of: the loads that this one is the base of; 0: none.
    """

    model: str
    variant: str
    load: str = ""
    tokens_per_s: float | None = None
    step_ms: float | None = None
    of_limit: float | None = None
    of_floor: float | None = None
    base_ratio: float | None = None
    note: str = ""
    verdict: str = ""
    replayed: float | None = None
    eager: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    profile: Profile | None = None
    base_of: int = 0

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> Row:
        """Of JSON."""
        profile = figures.get("profile")
        return cls(**{**figures, "profile": None if profile is None else Profile.read(profile)})

    @property
    def key(self) -> Key:
        return self.model, self.variant, self.load


Key = tuple[str, str, str]
"""Model, variant and load."""


@dataclass
class Bench:
    """One engine and what was measured on it. bases: tokens/s by `Row.base_of`."""

    llm: LLM
    place: Place
    shape: Shape
    variant: str
    requests: Sequence[LoRARequest]
    ceilings: Ceilings
    sizes: Sizes
    itemsize: int
    deadline: float
    has_graphs: bool = False
    bases: dict[int, float] = field(default_factory=dict)

    def rows(self, loads: Mapping[str, Load], kept: Mapping[Key, Row]) -> Iterator[Row]:
        """One for each load, in turn; those that the time is too short for say so. kept: of an earlier call."""
        for name, load in loads.items():
            row = kept.get((self.shape.name, self.variant, name)) or self._row(name, load)
            if row.base_of and row.tokens_per_s is not None:
                self.bases[row.base_of] = row.tokens_per_s
            yield row

    def _row(self, name: str, load: Load) -> Row:
        if time.monotonic() > self.deadline:
            return Row(self.shape.name, self.variant, name, note=LEFT_OUT)
        before = self.llm.stats()
        try:
            row = load(self)
        except LoraplexError as error:  # a request that failed; the engine goes on
            row = Row(self.shape.name, self.variant, name, note=f"{FAILED}: {type(error).__name__}: {error}")
        return ran(replace(row, load=name), before, self.llm.stats(), self.has_graphs)

    def _base(self, batch: int) -> Row:
        row = replace(self._measure([None] * batch), base_of=batch)
        return self._judged(row, row.of_limit, 0.85 if batch <= 32 else None)

    def _adapters(self, batch: int, num_adapters: int) -> list[LoRARequest | None]:
        return [self.requests[i % num_adapters] if num_adapters else None for i in range(batch)]

    def _profile(self, batch: int, num_adapters: int) -> Row:
        found = profile_decode(self.llm, self._adapters(batch, num_adapters), self.sizes, self.place)
        busy_ms, wall_ms = found.busy_us / 1e3, found.wall_us / 1e3
        note = f"GPU busy {busy_ms:.2f} of {wall_ms:.2f} ms, {found.num_launched:.0f} kernels a step"
        return Row(self.shape.name, self.variant, note=note, profile=found)

    def _decode(self, batch: int, num_adapters: int) -> Row:
        row = self._measure(self._adapters(batch, num_adapters))
        of_32 = 0.87 if self.variant == "int8 blocks" else 0.80
        target = {1: 0.95, 32: of_32 if batch == 32 else None}.get(num_adapters)
        return self._judged(row, row.base_ratio, target)

    def _spread(self, batch: int, num_adapters: int) -> Row:
        """Batches of as many distinct adapters that deal out their rows otherwise, and of other adapters."""
        even = [i % num_adapters for i in range(batch)]
        skewed = [min(i, num_adapters - 1) for i in range(batch)]
        last = len(self.requests) - 1
        dealt = (even, sorted(even), skewed, skewed[::-1], [last - i for i in even])
        rates = [decode(self.llm, [self.requests[i] for i in one], self.sizes).tokens_per_s for one in dealt]
        spread = (max(rates) - min(rates)) / min(rates)
        note = f"spread {100 * spread:.1f} % of {len(rates)} ways"
        row = Row(self.shape.name, self.variant, note=note)
        return self._judged(row, spread, 0.05, is_at_least=False)

    def _measure(self, adapters: Sequence[LoRARequest | None]) -> Row:
        found = decode(self.llm, adapters, self.sizes)
        weight_bytes = self.shape.weight_numbers() * self.itemsize
        num_adapters = len({one.lora_int_id for one in adapters if one is not None})
        adapter_itemsize = 1.0 if self.variant == "int8 blocks" else self.itemsize
        read = weight_bytes + num_adapters * self.shape.adapter_numbers(RANK) * adapter_itemsize
        read += len(adapters) * found.context * self.shape.kv_numbers() * self.itemsize
        base = self.bases.get(len(adapters)) if num_adapters else None
        return Row(
            self.shape.name,
            self.variant,
            tokens_per_s=found.tokens_per_s,
            step_ms=found.step_ms,
            of_limit=found.tokens_per_s * weight_bytes / len(adapters) / self.ceilings.bandwidth,
            of_floor=1e3 * read / self.ceilings.bandwidth / found.step_ms,
            base_ratio=None if base is None else found.tokens_per_s / base,
        )

    def _cold(self, seats: int) -> Row:
        background, others = self.requests[: max(1, seats - 1)], self.requests[max(1, seats - 1) :]
        found = cold(self.llm, background, others or self.requests[-1:], self.sizes)
        note = (
            f"first token {found.cold_first_ms:.1f} ms, {found.added_ms:+.1f} for a cold adapter; "
            f"others' gaps {100 * found.others_share:+.1f} %"
        )
        row = Row(self.shape.name, self.variant, note=note)
        return self._judged(row, max(found.added_ms / 5.0, found.others_share / 0.02), 1.0, is_at_least=False)

    def _mixed(self, seats: int, num_adapters: int) -> Row:
        adapters: Sequence[LoRARequest | None] = self.requests[:num_adapters] or [None]
        found = mixed(self.llm, adapters, seats, self.sizes)
        note = (
            f"{found.prompt_tokens_per_s:.0f} prompt tok/s, gap {found.gap_ms:.1f} ms, 99th {found.gap_p99_ms:.1f} ms"
        )
        base = self.bases.get(-seats) if num_adapters else None
        return Row(
            self.shape.name,
            self.variant,
            tokens_per_s=found.tokens_per_s,
            base_ratio=None if base is None else found.tokens_per_s / base,
            note=note,
            base_of=0 if num_adapters else -seats,
        )

    def _judged(self, row: Row, measured: float | None, target: float | None, is_at_least: bool = True) -> Row:
        """Targets are of the 8B shape with graphs and look-ahead."""
        if measured is None or target is None or self.shape is not LLAMA_8B or self.variant not in TARGETED:
            return row
        is_met = measured >= target if is_at_least else measured <= target
        return replace(row, verdict="ok" if is_met else "MISSED")


TARGETED = ("default", "int8 blocks")

Load = Callable[[Bench], Row]


def loads_of(variant: str, place: Place, count: int) -> dict[str, Load]:
    """By name, the ones with a target first, then the profiles: a profiler may leave something behind that costs time.
    count: adapters."""
    is_targeted, seats = variant in TARGETED, 2 if place.is_interpreted else 32
    most, few = min(seats, count), min(8, max(1, seats // 2), count)
    bases: tuple[int, ...] = ((1, 8, 64) if is_targeted else (64,)) if not place.is_interpreted else ()
    others = [k for k in (2, 4, 16) if k <= count] if is_targeted and bases else []

    def on(num_adapters: int, batch: int = seats) -> str:
        if not num_adapters:
            return f"{batch} base"
        return f"{batch} on {num_adapters} adapter{'s' * (num_adapters > 1)}"

    def decodes(*numbers: int, batch: int = seats) -> dict[str, Load]:
        return {f"decode, {on(k, batch)}": lambda bench, k=k: bench._decode(batch, k) for k in numbers}

    def base(batch: int) -> dict[str, Load]:
        return {f"decode, {on(0, batch)}": lambda bench: bench._base(batch)}

    found = base(seats) | decodes(1, most, *([few] if is_targeted else []))
    for batch in bases:
        found |= base(batch)
    found[f"cold adapters beside {max(1, seats - 1)}"] = lambda bench: bench._cold(seats)
    found |= {f"profile, {on(k)}": lambda bench, k=k: bench._profile(seats, k) for k in (0, 1, most)}
    found |= decodes(*others) | (decodes(most, batch=2 * seats) if bases else {})
    found[f"decode, {on(few)}, dealt out otherwise"] = lambda bench: bench._spread(seats, few)
    found[f"mixed, {seats} seats, base"] = lambda bench: bench._mixed(seats, 0)
    found[f"mixed, {seats} seats, {most} adapters"] = lambda bench: bench._mixed(seats, most)
    return found


def ran(row: Row, before: EngineStats, after: EngineStats, has_graphs: bool) -> Row:
    """The row with how its steps ran. It has failed where stock torch ran operators, or decode steps were eager in
    spite of graphs."""
    replayed = sum(_since(before.graph_steps, after.graph_steps).values())
    eager = _since(before.eager_steps, after.eager_steps)
    eager.pop("prefill", None)
    fallbacks = _since(before.kernel_fallbacks, after.kernel_fallbacks)
    steps = replayed + sum(eager.values())
    wrong = [f"{reason}: {count} calls by stock torch" for reason, count in fallbacks.items()]
    if has_graphs and (eager or not steps):
        why = ", ".join(f"{count} {reason}" for reason, count in eager.items()) or "no step was replayed"
        wrong.append(f"eager decode steps: {why}")
    note = row.note
    if wrong and not note.startswith(FAILED):
        note = f"{FAILED}: {'; '.join([*wrong, *([note] if note else [])])}"
    return replace(row, note=note, replayed=replayed / steps if steps else None, eager=eager, fallbacks=fallbacks)


def _since(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def settings_of(variant: str, place: Place, lora_backend: str) -> dict[str, Any]:
    common = {
        "load_format": "dummy",
        "lora_backend": lora_backend,
        "device": place.device.type,
        "enable_prefix_caching": False,
        "enable_prediction": False,
        "enable_diagnosis": False,
        "disk_memory_bytes": 0,
        **VARIANTS[variant],
    }
    if place.is_interpreted:
        return {**common, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    return {
        **common,
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 12 * GIB,
        "adapter_memory_bytes": 8 * GIB,
        "host_memory_bytes": 16 * GIB,
        "num_loader_threads": 8,
    }


@dataclass(frozen=True)
class Run:
    """What the engines of a run have in common. count: adapters."""

    place: Place
    ceilings: Ceilings
    sizes: Sizes
    folder: Path
    count: int
    deadline: float
    lora_backend: str
    kept: Mapping[Key, Row] = field(default_factory=dict)


def bench(shape: Shape, variant: str, run: Run) -> Iterator[Row]:
    """The rows of one engine. One that does not start is a row that says why."""
    place, loads = run.place, loads_of(variant, run.place, run.count)
    known = {load: run.kept.get((shape.name, variant, load)) for load in ("start", *loads)}
    is_whole = all(known[load] is not None for load in loads)
    if is_whole or time.monotonic() > run.deadline:
        yield from (row or Row(shape.name, variant, load, note=LEFT_OUT) for load, row in known.items())
        return
    requests = write_or_find(shape, run.count, run.folder)
    settings = settings_of(variant, place, run.lora_backend)
    began = time.monotonic()
    try:
        llm = LLM(str(shape.write(run.folder / shape.name / "base")), **settings)
    except (LoraplexError, torch.cuda.OutOfMemoryError) as error:
        yield Row(shape.name, variant, "start", note=f"{FAILED}: {type(error).__name__}: {error}")
        return
    started_s = time.monotonic() - began
    with llm:
        for request in requests:
            llm.add_lora(request)
        loaded_s = time.monotonic() - began - started_s
        note = f"{started_s:.1f} s, and {loaded_s:.1f} s for {len(requests)} adapters"
        yield ran(Row(shape.name, variant, "start", note=note), EngineStats(), llm.stats(), has_graphs=False)
        itemsize = 4 if place.is_interpreted else 2
        has_graphs = place.may_capture and run.lora_backend == "triton" and not settings.get("enforce_eager")
        on_it = Bench(llm, place, shape, variant, requests, run.ceilings, run.sizes, itemsize, run.deadline, has_graphs)
        yield from on_it.rows(loads, run.kept)
    del llm, on_it
    gc.collect()
    if not place.is_interpreted:
        torch.cuda.empty_cache()


def write_or_find(shape: Shape, count: int, folder: Path) -> list[LoRARequest]:
    """The shape's adapters, written for its first engine."""
    of_shape = folder / shape.name / "adapters"
    if not of_shape.exists():
        return write_adapters(shape, count, RANK if shape is not TINY else 4, of_shape)
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(sorted(of_shape.iterdir()), 1)]


def cells(row: Row) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    return [
        row.model,
        row.variant,
        row.load,
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        "-" if row.step_ms is None else f"{row.step_ms:.2f}",
        share(row.of_limit),
        share(row.of_floor),
        "-" if row.base_ratio is None else f"{row.base_ratio:.3f}",
        share(row.replayed),
        row.note,
        row.verdict,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when an engine did not start, a load failed or none was measured; a target that is missed is for the reader.
    130 after Ctrl-C."""
    args = parser().parse_args(arguments)
    place = find_place(args.interpret)
    deadline = time.monotonic() + args.budget
    models = [TINY] if place.is_interpreted else [SHAPES[name] for name in args.models]
    rows: list[Row] = []
    sizes = INTERPRETED if place.is_interpreted else ON_A_GPU
    settings = {variant: settings_of(variant, place, args.lora_backend) for variant in args.variants}
    count = 3 if place.is_interpreted else args.adapters
    described = {"settings": settings, "sizes": asdict(sizes), "rank": RANK, "adapters": count}
    path = json_path(args.json, "engine")
    earlier = find_earlier(path, place, args.resume)
    kept = kept_of(earlier, described)
    ceilings = Ceilings(**earlier.figures["ceilings"]) if kept else measure_ceilings(place)
    title = f"{place.title}\ncopy {ceilings.bandwidth / 1e12:.2f} TB/s{' (made up)' if place.is_interpreted else ''}"
    output = Output(path, title, place, earlier.commits if kept else ())
    described["settings"] = {**({"settings": {}} | earlier.figures)["settings"], **settings} if kept else settings

    def state() -> tuple[Sheet, dict[str, Any]]:
        """What is kept stays there, whatever this call comes to."""
        there = {row.key for row in rows}
        shown = [*rows, *(row for key, row in kept.items() if key not in there)]
        figures = {"ceilings": asdict(ceilings), "rows": [asdict(row) for row in shown], **described}
        return Sheet(HEADINGS, [cells(row) for row in shown], num_texts=3), figures

    with endable() as ending, scratch_folder() as folder:
        run = Run(place, ceilings, sizes, folder, count, deadline, args.lora_backend, kept)
        for variant, shape in itertools.product(args.variants, models):
            for row in bench(shape, variant, run):
                rows.append(row)
                output.keep(*state())
    output.finish(*state())
    for row in rows:
        if row.profile is not None:
            print("\n".join([f"{', '.join(row.key)}: {row.note}", *row.profile.lines()]))
    num_failed, num_left_out = (sum(row.note.startswith(how) for row in rows) for how in (FAILED, LEFT_OUT))
    print(f"{len(rows)} loads, {num_failed} failed, {num_left_out} left out")
    return ending.code or int(num_failed > 0 or num_left_out == len(rows))


def kept_of(earlier: Earlier, described: Mapping[str, Any]) -> dict[Key, Row]:
    """The loads that were measured in the same way, the start of their engines too."""
    figures = earlier.figures
    if any(figures.get(name) != described[name] for name in ("sizes", "rank", "adapters")):
        return {}
    found = {}
    for row in map(Row.read, figures["rows"]):
        is_same = figures["settings"].get(row.variant) == described["settings"].get(row.variant)
        if is_same and not row.note.startswith((FAILED, LEFT_OUT)):
            found[row.key] = row
    return found


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(new)
    names = (LLAMA_8B.name, LLAMA_1B.name)
    new.add_argument("--models", type=listed_of(names), default=list(names), help=f"of {', '.join(names)}")
    new.add_argument(
        "--variants", type=listed_of(tuple(VARIANTS)), default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}"
    )
    new.add_argument("--lora-backend", default="triton", help="torch: stock torch, to compare with (default: triton)")
    new.add_argument(
        "--adapters", type=positive, default=32, help="as many of rank 16; loads on more are not run (default: 32)"
    )
    new.add_argument(
        "--budget",
        type=seconds,
        default=450.0,
        help="seconds after which no load begins; the others are left out (default: 450)",
    )
    return new


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
