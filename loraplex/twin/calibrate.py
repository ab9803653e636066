"""`loraplex calibrate`: runs an engine for a bounded time, and fits what its steps and loads take.

    steps    batches of every size that fits: prompts and decodes, beside each other too, without and with adapters;
             every other trial is a mix, whose requests come one by one as those of a server do
    loads    an adapter of each rank from its files, and from the disk tier
    copies   from the host to a device with memory of its own
    front    what `LLM` does between two steps, and for a request that comes

Each trial runs a batch to its end and keeps what each step took, as the engine's caller sees it. Every HELD_OUT-th
trial is kept from the fit, and says how good it is.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import LoRARequest, LoraTarget, Request, SamplingParams, Tier
from loraplex.engine.engine import EngineCore
from loraplex.engine.schedule_plan import SchedulePlan
from loraplex.errors import ConfigError, LoraplexError
from loraplex.frontend.llm import LLM
from loraplex.twin.calibration import Calibration, FrontTime, ReadTime
from loraplex.twin.step_model import FEATURES, StepModel, StepWork

MIN_SECONDS = 5.0
MIN_TRIALS = 12
HELD_OUT = 5
MAX_TRIAL_TOKENS = 4096
"""Of the prompts of a trial: a batch of more takes long and tells nothing new."""

SMALL_TRIAL_TOKENS = 128
LONGEST_SHARE = 0.05
"""Of the time: trials whose prompts would take longer are left out, unless they are small."""

OUTPUT_TOKENS = 8
MIXED_STEPS = 32
"""Over which the requests of a mix come, and the most tokens that one of them draws: twice their mean."""

FRONT_ROWS, FRONT_STEPS = 16, 48
MIN_PROMPT_TOKENS = 4
MAX_ADAPTERS = 16
FIRST_ADAPTER_ID = 1 << 20
"""Of adapters that are made here: those of the registry are numbered from 1."""

FIRST_TOKEN_ID = 3
LOAD_ROUNDS = 3
MAX_RATIOS = 8192
"""Of steps that the calibration keeps; the last ones."""

Tell = Callable[[str, float], None]
"""(what is measured, the share of the time that is over)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`num_rows` prompts of `prompt_len` tokens at once, then a second batch beside their decodes; adapters in turn.

    is_mixed: twice as many prompts of drawn lengths up to that come one by one, so that about `num_rows` run at once.
    """

    num_rows: int
    prompt_len: int
    num_adapters: int
    rank: int
    is_mixed: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_rows * self.prompt_len


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What comes at one step of a trial; adapter: which of the trial's."""

    at_step: int
    adapter: int
    prompt_len: int
    output_len: int


def _halves(trial: Trial) -> list[TrialRequest]:
    """The second half comes two steps after the first."""
    half = -(-trial.num_rows // 2)
    return [
        TrialRequest(0 if row < half else 2, row % max(1, trial.num_adapters), trial.prompt_len, OUTPUT_TOKENS)
        for row in range(trial.num_rows)
    ]


@dataclass(frozen=True, slots=True)
class Sample:
    """A step and what it took."""

    work: StepWork
    ms: float


def calibrate(
    config: EngineConfig, ranks: Sequence[int], seconds: float, tell: Tell = lambda what, share: None
) -> Calibration:
    """Raises ConfigError for what cannot be measured. Takes about `seconds`, beside the start of the engine."""
    if seconds < MIN_SECONDS:
        raise ConfigError(f"seconds must be >= {MIN_SECONDS:g}, got {seconds:g}")
    if not ranks or not all(1 <= rank <= 512 for rank in ranks):
        raise ConfigError(f"ranks must be 1..512, got {tuple(ranks)}")
    if config.speculative is not None:
        raise ConfigError(f"speculative {config.speculative} is not in a step model, which is of plain steps")
    with tempfile.TemporaryDirectory(prefix="loraplex-calibrate-") as folder:
        lora = replace(config.lora or LoRAConfig(), disk_cache_dir=str(Path(folder, "disk")), enable_diagnosis=False)
        own = replace(config, lora=replace(lora, scrub_bytes_per_s=0), enable_prefix_caching=False)
        tell("engine", 0.0)
        with LLM.from_config(own) as llm:
            return _Bench(llm, sorted(set(ranks)), Path(folder)).run(seconds, tell)


class _Bench:
    """An engine, and adapters of each rank in it."""

    def __init__(self, llm: LLM, ranks: Sequence[int], folder: Path) -> None:
        self._llm = llm
        self._core: EngineCore = llm.engine
        self._config = llm.config
        self._folder = folder
        self._ranks = ranks
        self._request_ids = itertools.count()
        self._draw = random.Random(0)
        self._samples: list[Sample] = []
        self._seen: list[Sample] = []
        self._plan: SchedulePlan | None = None
        self._rank_of: dict[int, int] = {}
        self._ids_of: dict[int, list[int]] = {}
        self._core.watch_steps(self._see)

    def run(self, seconds: float, tell: Tell) -> Calibration:
        ends_s = time.perf_counter() + seconds
        bytes_of, num_extents = self._make_adapters()
        source, disk, copy = self._measure_loads(tell)
        front = FrontTime() if self._is_looking_ahead else self._measure_front(tell)
        fitted, held_out = self._measure_steps(ends_s, seconds, tell)
        model = StepModel.fit([each.work for each in fitted], [each.ms for each in fitted])
        errors = model.errors([each.work for each in held_out], [each.ms for each in held_out])
        seen = self._seen[-MAX_RATIOS:]
        ratios = tuple((each.work.num_tokens, round(each.ms / model.ms(each.work), 3)) for each in seen)
        info = self._core.info
        block_bytes = self._core.memory_report().kv_block_bytes
        return Calibration(
            model=self._config.model,
            machine=_machine(info.device),
            device=info.device,
            backend=info.backend_description or info.backend,
            dtype=info.dtype,
            num_threads=torch.get_num_threads(),
            step_ms=dict(zip(FEATURES, model.coefficients, strict=True)),
            error_p50=float(np.percentile(errors, 50)),
            error_p90=float(np.percentile(errors, 90)),
            num_steps=len(fitted),
            step_ratios=ratios,
            block_bytes=block_bytes,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            adapter_bytes=bytes_of,
            num_extents=num_extents,
            has_one_memory=self._core.adapters.is_shared,
            look_ahead=self._is_looking_ahead,
            source=source,
            disk=disk,
            copy=copy,
            front=front,
        )

    @property
    def _is_looking_ahead(self) -> bool:
        is_gpu = self._core.info.device.startswith("cuda")
        return is_gpu if self._config.look_ahead is None else self._config.look_ahead

    # --------------------------------------------------------------------------------------------------------- adapters

    def _make_adapters(self) -> tuple[dict[int, int], int]:
        """(packed bytes by rank, extents of each). Those of one rank share their tensors; each is packed by itself."""
        targets = [target for target in self._core.info.targets if target.is_linear]
        assert self._config.lora is not None
        budget = min(self._config.lora.adapter_memory_bytes, self._config.lora.host_memory_bytes)
        ids = itertools.count(FIRST_ADAPTER_ID)
        bytes_of: dict[int, int] = {}
        for rank in sorted({1, *self._ranks}):
            layers = _layers(targets, rank)
            most = 1 if rank == 1 else MAX_ADAPTERS
            known = self._ids_of.setdefault(rank, [])
            while len(known) < most and (not known or self._fits(bytes_of[rank], budget)):
                adapter_id = next(ids)
                model = LoRAModel(_digest(adapter_id), rank, layers, adapter_id)
                try:
                    self._core.adapters.add_adapter(model)
                except LoraplexError as error:
                    if known:
                        break
                    raise ConfigError(f"an adapter of rank {rank} cannot be loaded: {error}") from error
                known.append(adapter_id)
                self._rank_of[adapter_id] = rank
                (residency,) = self._core.adapters.list_adapters([adapter_id])
                bytes_of[rank] = residency.nbytes
        return bytes_of, len({target.layer for target in targets})

    def _fits(self, nbytes: int, budget: int) -> bool:
        """Whether one adapter more leaves a quarter of the memory to others."""
        return self._core.memory_report().tier(Tier.HOST.value).used_bytes + nbytes <= budget * 3 // 4

    # ------------------------------------------------------------------------------------------------------------ loads

    def _measure_loads(self, tell: Tell) -> tuple[ReadTime, ReadTime, ReadTime]:
        """From the source, from the disk tier, to the device."""
        adapters = self._core.adapters
        points: dict[str, list[tuple[int, float]]] = {"source": [], "disk": [], "copy": []}
        for number, (rank, _) in enumerate(itertools.product(self._ranks, range(LOAD_ROUNDS)), 1):
            tell("loads", 0.0)
            path = self._folder / f"r{rank}-{number}"
            _write_adapter(path, [t for t in self._core.info.targets if t.is_linear], rank, seed=number)
            began_s = time.perf_counter()
            self._llm.add_lora(LoRARequest(path.name, number, str(path)))
            source_s = time.perf_counter() - began_s
            (found,) = [each for each in adapters.list_adapters() if each.adapter_id < FIRST_ADAPTER_ID]
            points["source"].append((found.nbytes, source_s))
            while adapters.evict_adapter(found.adapter_id):
                pass
            whole_s = _timed(partial(adapters.promote_adapter, found.adapter_id))
            adapters.evict_adapter(found.adapter_id)
            copy_s = 0.0 if adapters.is_shared else _timed(partial(adapters.promote_adapter, found.adapter_id))
            points["copy"].append((found.nbytes, copy_s))
            points["disk"].append((found.nbytes, max(0.0, whole_s - copy_s)))
            self._llm.remove_lora(number)
        return _read_time(points["source"]), _read_time(points["disk"]), _read_time(points["copy"])

    # ------------------------------------------------------------------------------------------------------------ front

    def _measure_front(self, tell: Tell) -> FrontTime:
        """Of an engine that waits for it. One that looks ahead has a step under way meanwhile."""
        tell("front", 0.0)
        most = min(self._config.max_num_seqs, FRONT_ROWS)
        _, one_ms = self._front_of(1)
        request_ms, all_ms = self._front_of(most)
        output_ms = max(0.0, all_ms - one_ms) / max(1, most - 1)
        return FrontTime(request_ms, max(0.0, one_ms - output_ms), output_ms)

    def _front_of(self, num_rows: int) -> tuple[float, float]:
        """Milliseconds that a request takes, and that a step of so many takes more than the engine's: medians."""
        params = SamplingParams(temperature=0, max_tokens=FRONT_STEPS, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [FIRST_TOKEN_ID] * MIN_PROMPT_TOKENS}
        submit_s = [_timed(partial(self._llm.submit, prompt, params)) for _ in range(num_rows)]
        through_front_s = self._outside_parts(self._llm.step)
        for _ in range(num_rows):
            self._add(Trial(num_rows, MIN_PROMPT_TOKENS, 0, 0), TrialRequest(0, 0, MIN_PROMPT_TOKENS, FRONT_STEPS))
        engine_alone_s = self._outside_parts(self._core.step)
        return 1e3 * float(np.median(submit_s)), 1e3 * max(0.0, through_front_s - engine_alone_s)

    def _outside_parts(self, step: Callable[[], object]) -> float:
        """Seconds of a step that are in none of its parts, which what disturbs the machine is in: the median."""
        found = []
        while self._core.has_unfinished:
            before_s = self._parts_s()
            found.append(_timed(step) - (self._parts_s() - before_s))
        return float(np.median(found))

    def _parts_s(self) -> float:
        return sum(self._llm.stats().step_times.seconds.values())

    # ------------------------------------------------------------------------------------------------------------ steps

    def _measure_steps(self, ends_s: float, seconds: float, tell: Tell) -> tuple[list[Sample], list[Sample]]:
        """(for the fit, for its errors)."""
        fitted: list[Sample] = []
        held_out: list[Sample] = []
        trials, token_s, number = itertools.cycle(self._trials()), 0.0, 0
        while (left_s := ends_s - time.perf_counter()) > 0 or number < MIN_TRIALS:
            trial = next(trials)
            is_long = trial.num_prompt_tokens * token_s > seconds * LONGEST_SHARE
            if is_long and trial.num_prompt_tokens > SMALL_TRIAL_TOKENS:
                continue
            tell("steps", min(1.0, 1 - left_s / seconds))
            self._samples.clear()
            self._run(trial)
            token_s = max(token_s, self._token_s())
            if number > 0:  # the first one warms up
                (held_out if number % HELD_OUT == 0 else fitted).extend(self._samples)
                self._seen.extend(self._samples)
            number += 1
        return fitted, held_out

    def _token_s(self) -> float:
        """Of prompts, in the last trial; 0 where its steps were too small to tell."""
        large = [each for each in self._samples if each.work.num_tokens >= SMALL_TRIAL_TOKENS]
        return 1e-3 * sum(each.ms for each in large) / max(1, sum(each.work.num_tokens for each in large))

    def _trials(self) -> list[Trial]:
        """All that fit, in an order in which any beginning has small and large ones; behind each its mix."""
        most_rows, length = self._config.max_num_seqs, self._core.info.max_model_len - MIXED_STEPS
        most_tokens = min(MAX_TRIAL_TOKENS, self._core.info.num_kv_blocks * self._core.info.block_size // 2)
        rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most_rows]
        lengths = [size for size in (4, 16, 64, 256, 1024) if size <= length] or [max(1, length)]
        trials = {
            Trial(num_rows, prompt_len, min(num_adapters, num_rows, len(self._ids_of[rank])), rank)
            for num_rows, prompt_len, rank in itertools.product(rows, lengths, self._ranks)
            for num_adapters in (0, 1, 4, MAX_ADAPTERS)
            if num_rows * prompt_len <= most_tokens
        }
        listed = sorted(trials, key=lambda trial: (trial.num_rows, trial.prompt_len, trial.num_adapters, trial.rank))
        self._draw.shuffle(listed)
        return [each for trial in listed for each in (trial, replace(trial, is_mixed=True))]

    def _run(self, trial: Trial) -> None:
        requests = self._mix(trial) if trial.is_mixed else _halves(trial)
        for step in itertools.count():
            while requests and (requests[0].at_step <= step or not self._core.has_unfinished):
                self._add(trial, requests.pop(0))
            if not self._core.has_unfinished:
                return
            self._step()

    def _mix(self, trial: Trial) -> list[TrialRequest]:
        shortest, longest = min(MIN_PROMPT_TOKENS, trial.prompt_len), trial.prompt_len
        drawn = [
            TrialRequest(
                self._draw.randrange(MIXED_STEPS),
                row % max(1, trial.num_adapters),
                self._draw.randint(shortest, longest),
                self._draw.randint(1, MIXED_STEPS),
            )
            for row in range(2 * trial.num_rows)
        ]
        return sorted(drawn, key=lambda request: request.at_step)

    def _add(self, trial: Trial, request: TrialRequest) -> None:
        vocab_size = self._core.info.vocab_size
        params = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        prompt = tuple(self._draw.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(request.prompt_len))
        adapter_id = self._ids_of[trial.rank][request.adapter] if trial.num_adapters else None
        self._core.add_request(
            Request(
                f"calibrate-{next(self._request_ids)}",
                prompt,
                params,
                request.output_len,
                0,
                adapter_id=adapter_id,
                adapter_digest="" if adapter_id is None else _digest(adapter_id),
                arrival_s=0.0,
            )
        )

    def _see(self, plan: SchedulePlan) -> None:
        self._plan = plan

    def _step(self) -> None:
        """One step; with look-ahead its time is that of the one before it, which is about the same."""
        self._plan = None
        began_s = time.perf_counter()
        self._core.step()
        ms = 1000 * (time.perf_counter() - began_s)
        plan: SchedulePlan | None = self._plan
        if plan is not None:
            self._samples.append(Sample(StepWork.of(plan, self._rank_of), ms))


def _digest(adapter_id: int) -> str:
    """Of the content of an adapter that is made here: what it names is the same for equal ranks, and packed apart."""
    return f"{adapter_id:064x}"


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _read_time(points: Sequence[tuple[int, float]]) -> ReadTime:
    """Through the median of each size, with nothing negative."""
    by_size: Mapping[int, list[float]] = {nbytes: [s for n, s in points if n == nbytes] for nbytes, _ in points}
    medians = {nbytes: float(np.median(seconds)) for nbytes, seconds in by_size.items()}
    least, most = min(medians), max(medians)
    byte_s = max(0.0, (medians[most] - medians[least]) / (most - least)) if most > least else 0.0
    return ReadTime(max(0.0, medians[least] - byte_s * least), byte_s)


def _layers(targets: Sequence[LoraTarget], rank: int) -> dict[str, LoRALayerWeights]:
    return {name: LoRALayerWeights(name, rank, float(rank), a, b) for name, a, b in _factors(targets, rank, seed=rank)}


def _factors(targets: Sequence[LoraTarget], rank: int, seed: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(module, A, B) of each linear; the delta is small."""
    draw = torch.Generator().manual_seed(seed)
    for target in targets:
        for part in target.slices:
            num_in, num_out = target.full_in_features, part.full_out_features
            lora_a = torch.randn(rank, num_in, generator=draw) / math.sqrt(num_in)
            lora_b = 0.01 * torch.randn(num_out, rank, generator=draw) / math.sqrt(rank)
            yield part.module_name, lora_a.bfloat16(), lora_b.bfloat16()


def _write_adapter(path: Path, targets: Sequence[LoraTarget], rank: int, seed: int) -> None:
    """A LoRA as PEFT writes it, on all linears."""
    tensors = {}
    for module, lora_a, lora_b in _factors(targets, rank, seed):
        tensors[f"base_model.model.{module}.lora_A.weight"] = lora_a
        tensors[f"base_model.model.{module}.lora_B.weight"] = lora_b
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    modules = sorted({part.module_name.rpartition(".")[2] for target in targets for part in target.slices})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (path / "adapter_config.json").write_text(json.dumps(config))


def _machine(device: str) -> str:
    """The GPU's name, or the processor's with its cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    named = [line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if line.startswith("model name")]
    return f"{named[0] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
