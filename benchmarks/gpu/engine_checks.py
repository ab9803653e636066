"""The sampler and whole models on a GPU: tokens as the CPU's sampler draws them, tokens as transformers + peft have
them, in float32.

Models are those of the tests (tests/fixtures.py): tiny, random, and such that greedy output does not repeat itself and
no two best logits are near a tie. The oracle runs on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.adapters import scratch_folder
from benchmarks.gpu.exact import poisoned_allocations
from benchmarks.gpu.kernel_checks import Finding, fallback_calls, fallen_back
from benchmarks.gpu.place import Place
from loraplex.core import LoRARequest, RequestOutput, SamplingParams
from loraplex.engine.sampler import Sampler, SamplingRow
from loraplex.frontend.llm import LLM
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import EngineStats
from tests.fixtures import ADAPTER_OPTIONS, NUM_TOKENS, GreedyCase, ModelZoo

# -------------------------------------------------------------------------------------------------------------- sampler

PARAMS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "top_k": 500, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.99}, {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.1}, {"temperature": 1.0, "logprobs": 3},
)  # fmt: skip


def sampler_findings(place: Place, is_small: bool) -> Iterator[Finding]:
    """Rows with all kinds of parameters, ties among their logits."""
    for vocab_size, rows in ((300, 20),) if is_small else ((300, 200), (32000, 200), (128256, 64)):
        generator = torch.Generator().manual_seed(vocab_size)
        logits = (3 * torch.randn(rows, vocab_size, generator=generator)).mul_(16).round_().div_(16)  # ties
        chosen = [
            SamplingRow(params=SamplingParams(**PARAMS[i % len(PARAMS)]), seed=i, position=i // 3) for i in range(rows)
        ]
        expected = Sampler(vocab_size, TorchBackend()).sample(logits.clone(), chosen)
        before = fallback_calls(place.backend)
        found = Sampler(vocab_size, place.backend).sample(logits.to(place.device), chosen)
        wrong = [i for i in range(rows) if found.token_ids[i] != expected.token_ids[i]]
        notes = [f"{len(wrong)} differ, the first with {PARAMS[wrong[0] % len(PARAMS)]}"] if wrong else []
        notes += fallen_back(before, fallback_calls(place.backend))
        yield Finding("sampler", f"{rows} rows of {vocab_size} as on the CPU", not notes, ", ".join(notes))


# --------------------------------------------------------------------------------------------------------------- models

MEMORY_BYTES = 256 << 20
"""Of each kind: far more than these models need. A GPU has room for what runs beside a check."""


@dataclass(frozen=True)
class Asked:
    """A prompt, its adapter, and what the oracle says."""

    name: str
    case: GreedyCase
    lora_request: LoRARequest | None


def engine_findings(place: Place, is_small: bool) -> Iterator[Finding]:
    num_tokens = 3 if is_small else NUM_TOKENS
    with scratch_folder() as folder:
        zoo = ModelZoo(folder)
        for family in ("llama",) if is_small else ("llama", "qwen3"):
            base = zoo.base(family)
            asked = _asked(zoo, base, ("all linears",) if is_small else tuple(ADAPTER_OPTIONS), num_tokens)
            yield from _parity_findings(place, family, base, asked, num_tokens, is_small)
            yield _cold_finding(place, family, base, asked, num_tokens)


def _asked(zoo: ModelZoo, base: Path, adapters: Sequence[str], num_tokens: int) -> list[Asked]:
    from peft import LoraConfig

    asked = [Asked("base", zoo.fit_case(base, length=9, num_tokens=num_tokens), None)]
    for number, name in enumerate(adapters, 1):
        path = zoo.adapter(base, LoraConfig(**ADAPTER_OPTIONS[name]), seed=number)
        case = zoo.fit_case(base, path, length=(12, 33, 17)[number % 3], num_tokens=num_tokens)
        asked.append(Asked(name, case, LoRARequest(name, number, str(path))))
    return asked


def _llm(place: Place, base: Path, **settings: Any) -> LLM:
    common = {"device": place.device.type, "dtype": "float32", "lora_backend": "triton", "disk_memory_bytes": 0}
    sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_model_len": 128, "enable_diagnosis": False}
    memory = dict.fromkeys(("kv_cache_memory_bytes", "adapter_memory_bytes", "host_memory_bytes"), MEMORY_BYTES)
    return LLM(str(base), **common, **sizes, **memory, **settings)


def _parity_findings(
    place: Place, family: str, base: Path, asked: Sequence[Asked], num_tokens: int, is_small: bool
) -> Iterator[Finding]:
    """One mixed batch, in each way in which steps run."""
    variants: dict[str, dict[str, Any]] = {"default": {}}
    if not is_small:
        variants |= {
            "eager": {"enforce_eager": True},
            "no look-ahead": {"look_ahead": False},
            "poisoned memory": {"enforce_eager": True},
        }
    for name, settings in variants.items():
        with _llm(place, base, **settings) as llm:
            if name == "poisoned memory":
                with poisoned_allocations():
                    outputs = _generate(llm, asked, num_tokens)
            else:
                outputs = _generate(llm, asked, num_tokens)
            yield _compared(f"{family}, {len(asked)} prompts, {name}", asked, outputs, llm.stats())
            if name == "default" and place.may_capture:
                yield _graph_finding(llm, family, asked, num_tokens)
            llm.check_integrity()


def _generate(llm: LLM, asked: Sequence[Asked], num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [list(one.case.prompt_token_ids) for one in asked]
    return llm.generate(prompts, params, lora_request=[one.lora_request for one in asked])


def _compared(name: str, asked: Sequence[Asked], outputs: Sequence[RequestOutput], stats: EngineStats) -> Finding:
    wrong = [
        one.name
        for one, output in zip(asked, outputs, strict=True)
        if not output.outputs or output.outputs[0].token_ids != one.case.output_token_ids
    ]
    notes = [f"wrong: {', '.join(wrong)}"] if wrong else []
    notes += fallen_back({}, stats.kernel_fallbacks)
    return Finding("engine", f"tokens of transformers + peft: {name}", not notes, ", ".join(notes))


def _graph_finding(llm: LLM, family: str, asked: Sequence[Asked], num_tokens: int) -> Finding:
    """Every replayed step once more, kernel by kernel, at the same padded size."""
    name = f"graphs equal eager bit for bit: {family}"
    graphs = llm.engine.graphs
    if graphs is None or not graphs.num_graphs:
        return Finding("engine", name, False, "there are no graphs")
    with graphs.compared() as counts:
        _generate(llm, asked, num_tokens)
    is_ok = counts["different"] == 0 < counts["equal"]
    return Finding("engine", name, is_ok, f"{counts['equal']} steps equal, {counts['different']} different")


def _cold_finding(place: Place, family: str, base: Path, asked: Sequence[Asked], num_tokens: int) -> Finding:
    """Room for two adapters: each is promoted while others' requests run, and pushes one out."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    finished: dict[str, RequestOutput] = {}
    with _llm(place, base, max_loras=2) as llm:
        waiting = [*asked, *asked[1:]]
        names: dict[str, Asked] = {}
        for number in itertools.count():
            if waiting and number % 3 == 0:
                one = waiting.pop(0)
                names[llm.submit(list(one.case.prompt_token_ids), params, lora_request=one.lora_request)] = one
            for output in llm.step():
                if output.finished:
                    finished[output.request_id] = output
            if not waiting and not llm.has_unfinished:
                break
        stats = llm.stats()
        llm.check_integrity()
    outputs = [finished[name] for name in names]
    found = _compared(f"{family}, cold adapters under load", list(names.values()), outputs, stats)
    return replace(found, note=found.note or f"{stats.memory.counters['promotions']} promotions")
