"""A fixed workload, and how fast the offline engine runs it: `loraplex bench`, `benchmarks/throughput.py`.

A closed batch of greedy requests with random prompts; which adapter each one uses follows a popularity pattern (Punica,
MLSys'24, section 7): base (none), identical (one), distinct (one each), uniform (about sqrt(n) of them), skewed (Zipf,
alpha 1.5, over as many as there are requests). On request `zipf_all:ALPHA`: Zipf over all adapters, however many.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from loraplex.config import EngineConfig
from loraplex.core import LoRARequest, SamplingParams
from loraplex.errors import ConfigError
from loraplex.frontend.llm import LLM

PATTERNS = ("base", "identical", "distinct", "uniform", "skewed")
ZIPF_ALL = "zipf_all"
FIRST_TOKEN_ID = 3  # below are special tokens
ZIPF_ALPHA = 1.5
IDENTICAL_ADAPTER = 3  # of the fixtures' first four ranks the largest


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` prompts of `prompt_len` random tokens, `output_len` tokens each; a seed gives the same prompts."""

    num_requests: int = 16
    prompt_len: int = 64
    output_len: int = 64
    seed: int = 11

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")

    def prompts(self, vocab_size: int) -> list[list[int]]:
        draw = random.Random(self.seed)
        return [
            [draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(self.prompt_len)]
            for _ in range(self.num_requests)
        ]

    def check_fits(self, max_model_len: int) -> None:
        """Raises ConfigError when completions would be cut, and tokens counted that were never made."""
        if self.prompt_len + self.output_len > max_model_len:
            raise ConfigError(
                f"{self.prompt_len} prompt and {self.output_len} output tokens do not fit in the model's length of "
                f"{max_model_len}"
            )

    def adapters(self, pattern: str, num_adapters: int) -> list[int | None]:
        """The adapter's index for each request, None for the base. Raises ConfigError for a pattern that cannot be."""
        count = self.num_requests
        name, _, parameter = pattern.partition(":")
        if pattern not in PATTERNS and name != ZIPF_ALL:
            raise ConfigError(f"pattern {pattern!r} is unknown; there are {', '.join(PATTERNS)}, {ZIPF_ALL}:ALPHA")
        if pattern == "base":
            return [None] * count
        if pattern == "identical" and num_adapters:
            return [IDENTICAL_ADAPTER % num_adapters] * count
        if pattern == "distinct" and num_adapters >= count:
            return list(range(count))
        num_used = min(num_adapters, math.ceil(math.sqrt(count)))
        if pattern == "uniform" and num_adapters:
            return [index % num_used for index in range(count)]
        if pattern == "skewed" and num_adapters:
            return self._zipf(min(count, num_adapters), ZIPF_ALPHA)
        if name == ZIPF_ALL and num_adapters:
            return self._zipf(num_adapters, _alpha(parameter))
        needed = "an adapter for each request" if pattern == "distinct" else "an adapter"
        raise ConfigError(
            f"pattern {pattern!r} cannot be run with {num_adapters} adapters and {count} requests: it needs {needed}"
        )

    def check_patterns(self, patterns: Sequence[str], num_adapters: int) -> None:
        """Raises ConfigError when one cannot be run, there is none, or adapters are given that none of them uses."""
        if not patterns:
            raise ConfigError(f"no pattern is given; there are {', '.join(PATTERNS)}")
        for pattern in patterns:
            self.adapters(pattern, num_adapters)
        if num_adapters and set(patterns) == {"base"}:
            raise ConfigError(
                f"{num_adapters} adapters are given, but pattern base uses none; ask for {', '.join(PATTERNS[1:])} "
                "(too)"
            )

    def _zipf(self, num_adapters: int, alpha: float) -> list[int | None]:
        """Adapter i in proportion to (i + 1)^-alpha."""
        weights = [1 / (rank + 1) ** alpha for rank in range(num_adapters)]
        return list(random.Random(self.seed).choices(range(num_adapters), weights=weights, k=self.num_requests))


def _alpha(text: str) -> float:
    try:
        return float(text or ZIPF_ALPHA)
    except ValueError:
        raise ConfigError(f"{ZIPF_ALL}:ALPHA needs a number, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run: output tokens per second over all of it, seconds to the first tokens, milliseconds of a decode step."""

    pattern: str
    num_adapters: int
    tokens_per_s: float
    time_to_first_token_s: float
    step_ms: float


def measure(
    llm: LLM, adapter_paths: Sequence[Path], workload: Workload, pattern: str, num_runs: int
) -> list[Measurement]:
    """Run the workload `num_runs` times after a warm-up, adapters loaded. Prompts are token ids, decoding is greedy."""
    prompts = workload.prompts(llm.engine.info.vocab_size)
    requests = lora_requests(adapter_paths, workload, pattern)
    num_adapters = len(set(requests) - {None})
    _generate(llm, prompts, requests, 2)
    runs = []
    for _ in range(num_runs):
        first_s = _generate(llm, prompts, requests, 1)
        seconds = _generate(llm, prompts, requests, workload.output_len)
        step_ms = 1e3 * (seconds - first_s) / max(1, workload.output_len - 1)
        rate = workload.num_requests * workload.output_len / seconds
        runs.append(Measurement(pattern, num_adapters, rate, first_s, step_ms))
    return runs


def lora_requests(adapter_paths: Sequence[Path], workload: Workload, pattern: str) -> list[LoRARequest | None]:
    """The adapter of each request of the workload."""
    return [
        None if i is None else LoRARequest(f"{i + 1}-{adapter_paths[i].name}", i + 1, str(adapter_paths[i]))
        for i in workload.adapters(pattern, len(adapter_paths))
    ]


def _generate(
    llm: LLM, prompts: Sequence[Sequence[int]], requests: Sequence[LoRARequest | None], output_len: int
) -> float:
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=requests)
    return time.perf_counter() - began


def run_bench(
    config: EngineConfig, adapter_paths: Sequence[Path], workload: Workload, patterns: Sequence[str], num_runs: int
) -> int:
    """Print a table: one row per pattern, the median of `num_runs` runs."""
    table = Table(
        title=f"{config.model}: {workload.num_requests} requests of {workload.prompt_len}+{workload.output_len} tokens"
        + (", their prompts in the prefix cache" if config.enable_prefix_caching else "")
    )
    for heading in ("pattern", "adapters", "output tokens/s", "first token s", "ms a decode step"):
        table.add_column(heading, justify="right")
    if num_runs < 1:
        raise ConfigError(f"runs must be >= 1, got {num_runs}")
    workload.check_patterns(patterns, len(adapter_paths))  # before the model is loaded
    with LLM.from_config(config) as llm:
        workload.check_fits(llm.engine.info.max_model_len)
        for pattern in track(patterns, "measuring"):
            run = median(measure(llm, adapter_paths, workload, pattern, num_runs))
            step_ms = (
                f"{run.step_ms:.1f}" if workload.output_len > 1 and run.step_ms > 0 else "-"
            )  # a difference of two runs
            cells = (f"{run.tokens_per_s:.1f}", f"{run.time_to_first_token_s:.3f}", step_ms)
            table.add_row(pattern, str(run.num_adapters), *cells)
    Console().print(table)
    return 0


def median(runs: Sequence[Measurement]) -> Measurement:
    """The run with the median rate (of an even number the lower one)."""
    rate = statistics.median_low(run.tokens_per_s for run in runs)
    return next(run for run in runs if run.tokens_per_s == rate)
