"""Do the native kernels still do what they are there for, and do the verbs keep their promises? The check of CI.

Of the kernels ratios within one run, no absolute figures.

    python -m benchmarks.guard                      # skips, with a message, where no native library is built
    python -m benchmarks.guard --require-native     # ... but fails where a compiler could have built it
    python -m benchmarks.guard --show               # what is measured only, each once; always exits 0
    python -m benchmarks.guard --latencies          # the latencies alone, without native kernels too
One thread, calls in turn, the best round of each. A ratio is the time of a native operator over the time of something
that must be slower, or not much faster. Limits are about 1.5 times what a quiet machine shows, so a loss of a factor of
2 breaks one and the weather does not: a ratio over its limit is measured again, twice, and its best counts.

Beside the ratios stand the latencies that docs/memory.md promises, on the demo's model: medians of repeated tries, so
that a slow moment is no finding. The verbs' promises are 99th percentiles on a model of 135M; the demo's is small,
so a tenth is their limit, which is some 50 times what a shared machine shows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.table import Table

from benchmarks.limits import WEIGHT_BYTES
from benchmarks.machine import compiler
from benchmarks.operators import (
    Case,
    add_rms_norm_case,
    attention_case,
    is_own,
    linear_case,
    linears_of,
    lora_case,
    lora_parameters,
    read_of,
    silu_mul_case,
    stock_linear,
)
from benchmarks.report import wide_console
from benchmarks.switching import (
    BLOCK,
    MAX_ALTERNATING_MS,
    MAX_PROMOTE_MS,
    MAX_SWITCH_MS,
    time_promotes,
    time_requests,
    time_switches,
)
from benchmarks.timing import Call, best_of
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import LoRARequest, SamplingParams
from loraplex.demo.tasks import adapter_path, assets_path
from loraplex.frontend.llm import LLM
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend

SECONDS = 0.15
ATTEMPTS = 3
TRIES = 25
"""Of a verb, and blocks of requests, whose median is a latency."""

SMALLER = 10.0
"""The demo's adapters come so many times as fast, at least."""

RANK_16 = ("reverse", "rot13")
"""Adapters of the demo with one rank: what differs is the change alone."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ratio:
    """time(ours) / time(theirs) must be at most `limit`. build makes both calls; is_native: it is a kernel of our own
    that runs."""

    name: str
    limit: float
    build: Callable[[], tuple[Call, Call]]
    is_native: bool = True
    measured: float = float("inf")

    @property
    def is_broken(self) -> bool:
        return self.is_native and self.measured > self.limit


def ratios() -> list[Ratio]:
    """What is checked, most of it at 16 rows of the shapes of `s`: a decode step of a batch of 16."""
    return [
        _against_read("linear fp32, 1 row / reading the weight", "float32", 1.8),
        _against_read("linear int8, 1 row / reading the weight", "int8", 2.6),
        _ratio(
            "linear fp32, 16 rows / F.linear",
            0.85,
            linear_case("s", "gate_up", "float32", 16),
            lambda: stock_linear("s", "gate_up", 16),
        ),
        _against_storage("linear bf16, 1 row / fp32", "bfloat16", 1, 0.95),
        _against_storage("linear int8, 1 row / fp32", "int8", 1, 0.7),
        _against_storage("linear int8, 16 rows / fp32", "int8", 16, 1.5),
        _lora_against_read(5.0),
        _against_torch(
            "LoRA, 16 adapters of rank 16 / torch", lora_case("m", 16, (16,) * 16, "bfloat16", "16 x r16"), 0.6
        ),
        _against_torch("attention, 16 x 256 / torch", attention_case("s", (256,) * 16, 1, "float32"), 0.9),
        _against_torch("attention, prefill of 512 / torch", attention_case("s", (512,), 512, "float32"), 1.0),
        _against_torch("add_rms_norm, 16 rows / torch", add_rms_norm_case("s", 16), 1.0),
        _against_torch("silu_mul, 16 rows / torch", silu_mul_case("s", 16), 1.4),
        Ratio("16 requests of 8 tokens, demo model / torch", 1.15, _demo_batches),
    ]


def _ratio(name: str, limit: float, case: Case, theirs: Callable[[], Call]) -> Ratio:
    native = get_backend("native", CPU)

    def build() -> tuple[Call, Call]:
        return _built(case, "native"), theirs()

    return Ratio(name, limit, build, is_own(native, case))


def _against_torch(name: str, case: Case, limit: float) -> Ratio:
    return _ratio(name, limit, case, lambda: _built(case, "torch"))


def _against_read(name: str, storage: str, limit: float) -> Ratio:
    out, inputs = linears_of("s")["gate_up"]
    num_bytes = WEIGHT_BYTES[storage] * out * inputs
    return _ratio(name, limit, linear_case("s", "gate_up", storage, 1), lambda: read_of(num_bytes))


def _against_storage(name: str, storage: str, rows: int, limit: float) -> Ratio:
    """Narrow weights against those of float32, both native."""
    wide = linear_case("s", "gate_up", "float32", rows)
    return _ratio(name, limit, linear_case("s", "gate_up", storage, rows), lambda: _built(wide, "native"))


def _lora_against_read(limit: float) -> Ratio:
    ranks = (16,) * 16
    num_bytes = WEIGHT_BYTES["bfloat16"] * lora_parameters("m", ranks)
    case = lora_case("m", 16, ranks, "bfloat16", "16 x r16")
    return _ratio("LoRA, 16 adapters of rank 16 / reading them", limit, case, lambda: read_of(num_bytes))


def _built(case: Case, backend: str) -> Call:
    call = case.build(get_backend(backend, CPU))
    assert call is not None, case.name
    return call


def _demo_batches() -> tuple[Call, Call]:
    """In an engine of each backend: mostly what is not a kernel, so only a gross loss shows."""
    return _demo_batch("native"), _demo_batch("torch")


def _demo_batch(backend: str) -> Call:
    config = EngineConfig(
        model=str(assets_path() / "base"), device="cpu", num_threads=1, lora_backend=backend, lora=None,
        kv_cache_memory_bytes=1 << 26, packed_cache_dir="none", enable_prefix_caching=False,
    )  # fmt: skip
    llm = LLM.from_config(config)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [[5 + i, 6, 7, 8] for i in range(16)]
    return lambda: llm.generate(prompts, params)


def measure(ratio: Ratio, attempts: int = ATTEMPTS, seconds: float = SECONDS) -> Ratio:
    """With the best of as many attempts as it takes to come under the limit."""
    ours, theirs = ratio.build()
    for _ in range(attempts):
        best = best_of({"ours": ours, "theirs": theirs}, seconds)
        ratio = replace(ratio, measured=min(ratio.measured, best["ours"] / best["theirs"]))
        if not ratio.is_broken:
            break
    return ratio


@dataclass(frozen=True)
class Latency:
    """Milliseconds that may be at most `limit_ms`. measure: one median of repeated tries, in seconds."""

    name: str
    limit_ms: float
    measure: Callable[[], float]
    measured_ms: float = float("inf")

    @property
    def is_broken(self) -> bool:
        return self.measured_ms > self.limit_ms


def latencies(llm: LLM) -> list[Latency]:
    """What docs/memory.md promises of two adapters that are in memory."""
    one, other = (LoRARequest(name, index, str(adapter_path(name))) for index, name in enumerate(RANK_16, 1))
    for request in (one, other):
        llm.add_lora(request)
    return [
        Latency("alternating, both resident", MAX_ALTERNATING_MS, lambda: _alternating_s(llm, one, other)),
        Latency(
            "host to device", MAX_PROMOTE_MS / SMALLER, lambda: statistics.median(time_promotes(llm, one, TRIES, 0.0))
        ),
        Latency(
            "switch_lora",
            MAX_SWITCH_MS / SMALLER,
            lambda: statistics.median(time_switches(llm, one, other, TRIES, 0.0)),
        ),
    ]


def _alternating_s(llm: LLM, one: LoRARequest, other: LoRARequest) -> float:
    """What a request costs more when the one before it had the other adapter; blocks take turns."""
    stays: list[float] = []
    changes: list[float] = []
    time_requests(llm, [5, 6, 7, 8], [one, other] * BLOCK, 1)
    for index in range(TRIES):
        stays += time_requests(llm, [5, 6, 7, 8], [(one, other)[index % 2]] * BLOCK, 1)
        changes += time_requests(llm, [5, 6, 7, 8], [one, other] * (BLOCK // 2), 1)
    return statistics.median(changes) - statistics.median(stays)


def measure_latency(latency: Latency, attempts: int = ATTEMPTS) -> Latency:
    """With the best of as many attempts as it takes to come under the limit."""
    for _ in range(attempts):
        latency = replace(latency, measured_ms=min(latency.measured_ms, 1e3 * latency.measure()))
        if not latency.is_broken:
            break
    return latency


def measured_latencies(attempts: int) -> list[Latency]:
    config = EngineConfig(
        model=str(assets_path() / "base"), device="cpu", num_threads=1, kv_cache_memory_bytes=1 << 26,
        packed_cache_dir="none", enable_prefix_caching=False,
        lora=LoRAConfig(disk_memory_bytes=0, enable_prediction=False, enable_diagnosis=False),
    )  # fmt: skip
    with LLM.from_config(config) as llm:
        return [measure_latency(each, attempts) for each in latencies(llm)]


def table_of_latencies(measured: Sequence[Latency]) -> Table:
    table = Table(title="adapters in memory, demo model: medians", title_justify="left")
    for heading in ("latency", "ms", "at most", ""):
        table.add_column(heading, justify="left" if heading in ("latency", "") else "right")
    for each in measured:
        verdict, style = ("BROKEN", "bold red") if each.is_broken else ("ok", "")
        table.add_row(each.name, f"{each.measured_ms:.2f}", f"{each.limit_ms:g}", verdict, style=style)
    return table


def table_of(measured: Sequence[Ratio]) -> Table:
    table = Table(title="native kernels, one thread: time over time", title_justify="left")
    for heading in ("ratio", "measured", "at most", ""):
        table.add_column(heading, justify="left" if heading in ("ratio", "") else "right")
    for ratio in measured:
        verdict = "no native kernel yet" if not ratio.is_native else "BROKEN" if ratio.is_broken else "ok"
        style = "bold red" if ratio.is_broken else "dim" if not ratio.is_native else ""
        table.add_row(ratio.name, f"{ratio.measured:.2f}", f"{ratio.limit:.2f}", verdict, style=style)
    return table


def missing_library(reason: str, is_required: bool) -> tuple[int, str]:
    """(exit code, what to say) where there are no native kernels."""
    found = compiler()
    if is_required and found is not None:
        return 1, f"guard: no native kernels although {found} could build them: {reason}"
    return 0, f"guard: skipped, there are no native kernels here: {reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--require-native", action="store_true", help="fail where the library is missing and a compiler is not"
    )
    parser.add_argument("--show", action="store_true", help="only show: one attempt each, exit code 0")
    parser.add_argument("--latencies", action="store_true", help="only the latencies of verbs")
    args = parser.parse_args(arguments)
    attempts, console = 1 if args.show else ATTEMPTS, wide_console()
    torch.set_num_threads(1)
    slow = measured_latencies(attempts)
    console.print(table_of_latencies(slow))
    late = [each.name for each in slow if each.is_broken]
    if args.latencies:
        console.print(f"broken: {'; '.join(late) or 'none'}")
        return int(bool(late) and not args.show)
    library = open_library()
    if not isinstance(library, NativeLibrary):
        code, text = missing_library(library.reason, args.require_native)
        print(text)
        return code or int(bool(late) and not args.show)
    began, measured = time.monotonic(), []
    for ratio in ratios():
        with torch.inference_mode():
            measured.append(measure(ratio, attempts))
        gc.collect()
    console.print(table_of(measured))
    broken = [*late, *(ratio.name for ratio in measured if ratio.is_broken)]
    console.print(f"{library.isa}, {time.monotonic() - began:.0f} s, broken: {'; '.join(broken) or 'none'}")
    return int(bool(broken) and not args.show)


if __name__ == "__main__":
    raise SystemExit(main())
