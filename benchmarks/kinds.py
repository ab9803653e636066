"""What each kind of adapter costs beside the base model, in one process, in turns.

    python -m benchmarks.kinds --size s
    python -m benchmarks.kinds --size s --rounds 12 --kinds lora,dora --json results/kinds.json
16 adapters of one kind and rank in one batch of 16, one each; a step's time is the median of the decode steps of a
round, and a kind's speed is the median over the rounds of the base's step beside its own. Targets: 16 DoRA 0.80, 16
VeRA 0.85, 16 IA3 0.93 of the base. LORAPLEX_ISA=avx2 measures another instruction set. Needs the `dev` extra (peft
writes the adapters).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from benchmarks.arguments import listed_of, positive
from benchmarks.fixture import TARGET_MODULES, Fixture
from benchmarks.loaded_engine import add_arguments, fixture_for, register, save, start, title_of, verdict
from benchmarks.report import wide_console
from loraplex.bench import Workload
from loraplex.core import LoRARequest, SamplingParams
from loraplex.frontend.llm import LLM

TARGETS = {"lora": None, "dora": 0.80, "vera": 0.85, "ia3": 0.93}
"""Of the base model's speed; of LoRA the figure of today is the target."""


@dataclass(frozen=True)
class Row:
    """One kind: milliseconds of a decode step of base and kind, and base over kind, with its quartiles."""

    kind: str
    base_ms: float
    kind_ms: float
    speed: float
    low: float
    high: float


def adapters_of(kind: str, made: Fixture, rank: int) -> list[Path]:
    """As many adapters of the kind as the fixture has LoRAs, beside them; peft writes what is not there."""
    if kind == "lora":
        return list(made.adapters)
    folder = made.base.parent / f"{kind}-{rank}"
    paths = [folder / path.name for path in made.adapters]
    missing = [index for index, path in enumerate(paths) if not (path / "adapter_config.json").exists()]
    for index in track(missing, f"{kind} adapters", disable=not missing):
        _write(kind, made.base, paths[index], rank, index)
    return paths


def _write(kind: str, base: Path, path: Path, rank: int, seed: int) -> None:
    """An adapter with drawn weights, in bfloat16."""
    from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = list(TARGET_MODULES)
    configs: dict[str, Any] = {
        "dora": lambda: LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, use_dora=True),
        "vera": lambda: VeraConfig(r=rank, target_modules=targets, projection_prng_key=7),
        "ia3": lambda: IA3Config(target_modules=targets, feedforward_modules=["down_proj"]),
    }
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), configs[kind]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and ("ia3" in name or "magnitude" in name):
                weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
            elif weight.requires_grad:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    model.to(torch.bfloat16).save_pretrained(path)


def decode_ms(llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest | None], output_len: int) -> float:
    """The median time of the steps in which every request makes one token: the last ones, but for the very last."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    for prompt, adapter in zip(prompts, adapters, strict=True):
        llm.submit({"prompt_token_ids": prompt}, params, lora_request=adapter)
    steps = []
    while llm.has_unfinished:
        began = time.perf_counter()
        llm.step()
        steps.append(time.perf_counter() - began)
    return 1e3 * statistics.median(steps[4 - output_len : -1])


def measure(llm: LLM, kinds: dict[str, list[LoRARequest]], args: argparse.Namespace) -> list[Row]:
    """Base and the kinds in turns; the first round of all warms up."""
    prompts = Workload(args.requests_in_flight, args.prompt_len).prompts(llm.engine.info.vocab_size)
    everything: dict[str, Sequence[LoRARequest | None]] = {"base": [None] * len(prompts)}
    for kind, requests in kinds.items():
        everything[kind] = [requests[index % len(requests)] for index in range(len(prompts))]
    times: dict[str, list[float]] = {name: [] for name in everything}
    for number in track(range(args.rounds + 1), "rounds"):
        for name, chosen in everything.items():
            took = decode_ms(llm, prompts, chosen, args.output_len)
            if number:
                times[name].append(took)
    return [_row(kind, times["base"], times[kind]) for kind in kinds]


def _row(kind: str, base: Sequence[float], own: Sequence[float]) -> Row:
    ratios = [of_base / of_kind for of_base, of_kind in zip(base, own, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Row(kind, statistics.median(base), statistics.median(own), middle, low, high)


def table_of(rows: Sequence[Row], title: str, targets: Mapping[str, float | None] = TARGETS) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("kind", "base ms", "step ms", "speed", "quartiles", "target", "verdict"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in rows:
        target = targets[row.kind]
        table.add_row(
            row.kind,
            f"{row.base_ms:.2f}",
            f"{row.kind_ms:.2f}",
            f"{row.speed:.2f}",
            f"{row.low:.2f} {row.high:.2f}",
            "" if target is None else f">= {target:.2f}",
            "" if target is None else verdict(row.speed, target, is_at_least=True),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    made = fixture_for(args)
    paths = {kind: adapters_of(kind, made, args.rank) for kind in args.kinds}
    kinds = {
        kind: [
            LoRARequest(f"{kind}-{path.name}", 1 + number + place * len(of_kind), str(path))
            for number, path in enumerate(of_kind)
        ]
        for place, (kind, of_kind) in enumerate(paths.items())
    }
    room = {"adapter_memory_bytes": 4 << 30, "host_memory_bytes": 4 << 30}
    with start(made, args, {"max_loras": args.requests_in_flight, **room}) as llm:
        register(llm, [request for requests in kinds.values() for request in requests])
        rows = measure(llm, kinds, args)
        title = title_of(made, args, f"{args.adapters} adapters of rank {args.rank}, {args.rounds} rounds")
    wide_console().print(table_of(rows, title))
    save(args.json, {"title": title, "rows": [asdict(row) for row in rows]})
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(result, rank=16, adapters=16)
    result.add_argument("--kinds", type=listed_of(list(TARGETS)), default=list(TARGETS), help="default: all")
    result.add_argument("--rounds", type=positive, default=8, help="default: 8")
    result.add_argument("--prompt-len", type=positive, default=64, help="tokens (default: 64)")
    result.add_argument("--output-len", type=positive, default=64, help="tokens, at least 8 (default: 64)")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
