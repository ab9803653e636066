"""Open-loop load on an engine in this process: requests come when they come, whether or not the engine keeps up.

For the benchmarks of adapter memory; no command of its own. A schedule is drawn with a seed (`Draw`), `run` plays it on
an `LLM` and notes when each token came, `Summary` has the figures. Waiting counts from the moment a request was due,
not from the moment the loop came round to hand it in: an engine that is busy with a step does not hide the wait that
this step caused.
"""

from __future__ import annotations

import argparse
import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.arguments import positive
from loraplex.bench import FIRST_TOKEN_ID
from loraplex.core import LoRARequest, SamplingParams
from loraplex.errors import LoraplexError
from loraplex.frontend.llm import LLM

STALLED_WAIT_S = 0.05
CUT_OFF = "cut off at the time limit"

# ---------------------------------------------------------------------------------------------------------- what comes


def arrival_times(num_requests: int, rate: float, cv: float, seed: int) -> list[float]:
    """Seconds at which requests come: Gamma-distributed gaps of mean 1 / rate and coefficient of variation `cv` (1:
    Poisson).

    The gaps are scaled so that their mean is exactly 1 / rate: with cv 8, the mean of 300 draws is off by half as often
    as not.
    """
    gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / rate, num_requests)
    return [float(at_s) for at_s in np.cumsum(gaps * (num_requests / rate / gaps.sum()))]


def power_law(num_adapters: int, alpha: float, num_requests: int, seed: int) -> list[int]:
    """S-LoRA's choice of each request's adapter: int(np.random.power(alpha) * n). alpha 1: uniform; 0.1 favours few."""
    return [int(draw * num_adapters) for draw in np.random.default_rng(seed).power(alpha, num_requests)]


@dataclass(frozen=True)
class Lengths:
    """Tokens, uniformly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def of(cls, text: str) -> Lengths:
        """`8-64`, or one number for both, at least 1. Raises ArgumentTypeError."""
        low, dash, high = text.partition("-")
        lengths = cls(positive(low), positive(high if dash else low))
        if lengths.low > lengths.high:
            raise argparse.ArgumentTypeError(f"must be LOW-HIGH, the lower one first, got {text!r}")
        return lengths

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        return [int(length) for length in random.integers(self.low, self.high + 1, count)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Arrival:
    """A request that comes `due_s` seconds after the start; `lora_request` None is the base model."""

    due_s: float
    lora_request: LoRARequest | None
    prompt: Sequence[int]
    output_len: int


def schedule(
    due_s: Sequence[float],
    lora_requests: Sequence[LoRARequest | None],
    prompt_len: Lengths,
    output_len: Lengths,
    vocab_size: int,
    seed: int,
) -> list[Arrival]:
    """With random prompts. Prompts and lengths depend on the seed and the number of requests, not on adapters."""
    random, count = np.random.default_rng(seed), len(due_s)
    prompt_lens, output_lens = prompt_len.draw(count, random), output_len.draw(count, random)
    return [
        Arrival(at_s, adapter, random.integers(FIRST_TOKEN_ID, vocab_size, length).tolist(), num_tokens)
        for at_s, adapter, length, num_tokens in zip(due_s, lora_requests, prompt_lens, output_lens, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------- what became


@dataclass
class Record:
    """What became of one arrival. Times are seconds after the start; token_s: of each output token; error: why it
    failed, or empty."""

    arrival: Arrival
    submitted_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def time_to_first_token_s(self) -> float:
        return self.token_s[0] - self.arrival.due_s

    @property
    def end_to_end_s(self) -> float:
        return self.token_s[-1] - self.arrival.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [later - earlier for earlier, later in zip(self.token_s[:-1], self.token_s[1:], strict=True)]


@dataclass(frozen=True)
class Spread:
    """Of some values: the mean and percentiles (linear between neighbours); None of no values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        listed = np.fromiter(values, float)
        if not len(listed):
            return None
        p50, p90, p99, most = (float(value) for value in np.percentile(listed, (50, 90, 99, 100)))
        return cls(float(listed.mean()), p50, p90, p99, most)


@dataclass(frozen=True)
class Summary:
    """Of one or several runs of one kind, taken together. Percentiles are of the requests that did not fail.

    busy_s: from the first arrival of a run to its last token. tokens_per_s: output tokens over busy_s.
    """

    num_requests: int
    num_failed: int
    busy_s: float
    tokens_per_s: float
    time_to_first_token_s: Spread | None
    inter_token_s: Spread | None
    end_to_end_s: Spread | None
    errors: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[Sequence[Record]]) -> Summary:
        records = [record for run in runs for record in run]
        good = [record for record in records if not record.error]
        busy_s = sum(_busy_s(run) for run in runs)
        num_tokens = sum(len(record.token_s) for record in records)
        return cls(
            num_requests=len(records),
            num_failed=len(records) - len(good),
            busy_s=busy_s,
            tokens_per_s=num_tokens / busy_s if busy_s else 0.0,
            time_to_first_token_s=Spread.of(record.time_to_first_token_s for record in good),
            inter_token_s=Spread.of(gap for record in good for gap in record.gaps_s),
            end_to_end_s=Spread.of(record.end_to_end_s for record in good),
            errors=tuple(sorted({record.error for record in records if record.error})),
        )


def _busy_s(records: Sequence[Record]) -> float:
    ends = [record.token_s[-1] for record in records if record.token_s]
    return max(ends) - min(record.arrival.due_s for record in records) if ends else 0.0


def saturated_rate(records: Sequence[Record]) -> float:
    """Tokens/s for as long as a request waited, that is until the last first token: of a batch that came at once, the
    rate of a full engine."""
    until = max((record.token_s[0] for record in records if record.token_s), default=0.0)
    return sum(bisect.bisect_right(record.token_s, until) for record in records) / until if until else 0.0


# ------------------------------------------------------------------------------------------------------------ the load


class OpenLoop:
    """Plays arrivals, which are in the order of their times, on an engine that has nothing else to do.

    limit_s: what has not ended by then is aborted and counts as failed. clock and sleep are for tests.
    """

    def __init__(
        self,
        llm: LLM,
        arrivals: Sequence[Arrival],
        limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._llm = llm
        self._to_come = [Record(arrival) for arrival in reversed(arrivals)]
        self._running: dict[str, Record] = {}
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._began = 0.0

    def run(self) -> list[Record]:
        """A record of each arrival, in their order."""
        records = self._to_come[::-1]
        self._began = self._clock()
        while self._to_come or self._running:
            self._submit_due()
            if self._running:
                self._step()
            elif self._to_come:
                self._sleep(self._until_next_s())
            if self._now() > self._limit_s:
                self._cut_off()
        return records

    def _now(self) -> float:
        return self._clock() - self._began

    def _until_next_s(self) -> float:
        return max(0.0, self._to_come[-1].arrival.due_s - self._now())

    def _submit_due(self) -> None:
        while self._to_come and self._to_come[-1].arrival.due_s <= self._now():
            record = self._to_come.pop()
            arrival, record.submitted_s = record.arrival, self._now()
            params = SamplingParams(temperature=0, max_tokens=arrival.output_len, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": arrival.prompt}
            try:
                request_id = self._llm.submit(prompt, params, lora_request=arrival.lora_request)
            except LoraplexError as error:
                record.error = str(error)
            else:
                self._running[request_id] = record

    def _step(self) -> None:
        wait_s = min(STALLED_WAIT_S, self._until_next_s()) if self._to_come else STALLED_WAIT_S
        outputs, now = self._llm.step(wait_s), self._now()
        for output in outputs:
            record = self._running[output.request_id]
            if output.outputs:
                record.token_s += [now] * (len(output.outputs[0].token_ids) - len(record.token_s))
            if output.error is not None:
                record.error = str(output.error)
            if output.finished:
                del self._running[output.request_id]

    def _cut_off(self) -> None:
        for request_id, record in self._running.items():
            self._llm.abort(request_id)
            record.error = CUT_OFF
        for record in self._to_come:
            record.error = CUT_OFF
        self._running.clear()
        self._to_come.clear()


def run(llm: LLM, arrivals: Sequence[Arrival], limit_s: float) -> list[Record]:
    """A record of each arrival, in their order. What has not ended after `limit_s` is aborted and counts as failed."""
    return OpenLoop(llm, arrivals, limit_s).run()
