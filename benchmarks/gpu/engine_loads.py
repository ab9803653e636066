"""Loads on an engine in this process, by token ids: full batches that decode, prompts among them, and adapters that are
not on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loraplex.core import LoRARequest, SamplingParams, Tier
from loraplex.errors import error_from_payload
from loraplex.frontend.llm import LLM

STALLED_WAIT_S = 0.05
FIRST_TOKEN_ID = 3


@dataclass(frozen=True)
class Sizes:
    """Of the loads. prompt: tokens of a decode load's prompts; steps: of each of `rounds` measurements."""

    prompt: int
    steps: int
    rounds: int
    mixed_requests: int
    mixed_prompt: int
    mixed_output: int
    cold_samples: int


ON_A_GPU = Sizes(64, 48, 3, 96, 512, 48, 24)
INTERPRETED = Sizes(3, 2, 1, 3, 4, 2, 1)


@dataclass(frozen=True)
class Decode:
    """tokens_per_s: the median of the rounds; context: mean tokens of a sequence meanwhile."""

    tokens_per_s: float
    step_ms: float
    context: float


@dataclass(frozen=True)
class Mixed:
    """tokens_per_s: generated; gaps of decoding sequences in milliseconds."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    gap_ms: float
    gap_p99_ms: float


@dataclass(frozen=True)
class Cold:
    """Medians: first tokens of adapters on the device and on the host, and the others' gaps beside each."""

    warm_first_ms: float
    cold_first_ms: float
    warm_gap_ms: float
    cold_gap_ms: float

    @property
    def added_ms(self) -> float:
        return self.cold_first_ms - self.warm_first_ms

    @property
    def others_share(self) -> float:
        """By how much the others' gaps grow."""
        return self.cold_gap_ms / self.warm_gap_ms - 1


@dataclass
class Driver:
    """Steps an engine and notes when tokens come, in seconds of `time.perf_counter`."""

    llm: LLM
    seed: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._vocab_size = self.llm.engine.info.vocab_size

    def submit(self, adapter: LoRARequest | None, prompt: int, output: int) -> str:
        """A greedy request of random ids, which runs to its end."""
        ids = self._rng.integers(FIRST_TOKEN_ID, self._vocab_size, prompt).tolist()
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        request_id = self.llm.submit(ids, params, lora_request=adapter)
        self.times[request_id] = []
        return request_id

    def step(self) -> int:
        """Tokens that came. Raises what a request failed with."""
        outputs = self.llm.engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise error_from_payload(output.error)
            request_id = output.request_id.rpartition("#")[0]  # of the only completion of a request
            if request_id not in self.times:
                continue  # ended before
            self.times[request_id] += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                self.finished.add(request_id)
        if self.llm.engine.is_stalled:
            self.llm.engine.adapters.wait_for_change(STALLED_WAIT_S)
        return sum(len(output.token_ids) for output in outputs)

    def run(self, num_steps: int) -> tuple[int, float]:
        """(tokens, seconds) of so many steps."""
        began = time.perf_counter()
        return sum(self.step() for _ in range(num_steps)), time.perf_counter() - began

    def forget(self, request_id: str) -> None:
        """End a request, if it has not ended."""
        self.llm.abort(request_id)
        del self.times[request_id]

    def end(self) -> None:
        """End all of them, and wait until the engine is empty."""
        for request_id in list(self.times):
            self.forget(request_id)
        while self.llm.engine.has_unfinished:
            self.llm.engine.step()


def decode(llm: LLM, adapters: Sequence[LoRARequest | None], sizes: Sizes) -> Decode:
    """One request for each entry, all of them decoding."""
    driver = Driver(llm)
    warm_up = 2 + sizes.steps // 4
    output = warm_up + sizes.steps * sizes.rounds + 16
    requests = [driver.submit(adapter, sizes.prompt, output) for adapter in adapters]
    while not all(driver.times[request_id] for request_id in requests):
        driver.step()
    driver.run(warm_up)
    rounds = [driver.run(sizes.steps) for _ in range(sizes.rounds)]
    seen = statistics.mean(len(driver.times[request_id]) for request_id in requests)
    driver.end()
    rate = statistics.median(tokens / seconds for tokens, seconds in rounds)
    step_s = statistics.median(seconds / sizes.steps for _, seconds in rounds)
    return Decode(rate, 1e3 * step_s, sizes.prompt + seen - sizes.steps * sizes.rounds / 2)


def mixed(llm: LLM, adapters: Sequence[LoRARequest | None], seats: int, sizes: Sizes) -> Mixed:
    """`seats` requests at a time, the adapters in turn: whenever one ends the next comes with its prompt."""
    driver = Driver(llm)
    waiting = [adapters[i % len(adapters)] for i in range(sizes.mixed_requests)]
    running: set[str] = set()
    began, tokens = time.perf_counter(), 0
    while waiting or running:
        while waiting and len(running) < seats:
            running.add(driver.submit(waiting.pop(), sizes.mixed_prompt, sizes.mixed_output))
        tokens += driver.step()
        running -= driver.finished
    took = time.perf_counter() - began
    gaps = np.concatenate([np.diff(times) for times in driver.times.values() if len(times) > 1] or [np.zeros(1)])
    driver.end()
    prompts = sizes.mixed_requests * sizes.mixed_prompt
    return Mixed(tokens / took, prompts / took, 1e3 * float(np.median(gaps)), 1e3 * float(np.quantile(gaps, 0.99)))


def cold(llm: LLM, background: Sequence[LoRARequest], others: Sequence[LoRARequest], sizes: Sizes) -> Cold:
    """Beside requests that decode, one with an adapter that is on the device and one whose adapter has to come from the
    host, in turn."""
    driver = Driver(llm)
    steps_each = 8
    output = 2 * sizes.cold_samples * (2 * steps_each + 8) + 64
    always = [driver.submit(adapter, sizes.prompt, output) for adapter in background]
    while not all(driver.times[request_id] for request_id in always):
        driver.step()
    first: dict[bool, list[float]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * sizes.cold_samples):
        is_cold = number % 2 == 1
        adapter = others[number // 2 % len(others)]
        if not all(len(driver.times[request_id]) < output - 4 * steps_each for request_id in always):
            break
        _place(driver, adapter, is_on_device=not is_cold, sizes=sizes)
        driver.run(steps_each)
        took, beside = _one(driver, adapter, always[0], steps_each, sizes)
        first[is_cold].append(took)
        gaps[is_cold] += beside
    driver.end()

    def middle(values: Sequence[float]) -> float:
        return 1e3 * statistics.median(values)

    return Cold(
        middle(first[False]), middle(first[True]), 1e3 * statistics.mean(gaps[False]), 1e3 * statistics.mean(gaps[True])
    )


def _place(driver: Driver, adapter: LoRARequest, is_on_device: bool, sizes: Sizes) -> None:
    """Bring an adapter to the device by using it, or send it to the host."""
    llm = driver.llm
    if not is_on_device:
        (info,) = [one for one in llm.adapters() if one.ref.adapter_name == adapter.lora_name]
        if info.tier is Tier.DEVICE:  # from the host it would go further
            llm.engine.adapters.evict_adapter(info.ref.adapter_id)
        return
    request_id = driver.submit(adapter, sizes.prompt, 1)
    while request_id not in driver.finished:
        driver.step()
    driver.forget(request_id)


def _one(driver: Driver, adapter: LoRARequest, beside: str, num_steps: int, sizes: Sizes) -> tuple[float, list[float]]:
    """(seconds to the first token of one request, the gaps of another until some steps after it)"""
    began = time.perf_counter()
    request_id = driver.submit(adapter, sizes.prompt, 2)
    while not driver.times[request_id]:
        driver.step()
    took = driver.times[request_id][0] - began
    driver.run(num_steps)
    times = [at for at in driver.times[beside] if at >= began]
    driver.forget(request_id)
    return took, np.diff(times).tolist()
