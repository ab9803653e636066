"""What adapters on experts cost beside a base with a mixture of experts, in one process, in turns.

    python -m benchmarks.experts
    python -m benchmarks.experts --layers 8 --rounds 4 --threads 2
A Mixtral of the sizes of `s` (SmolLM2-135M's shape) with 8 experts a layer, of which a token has 2; 16 adapters in
one batch of 16, one each, on attention and on all experts (peft's target_parameters), and on attention alone. A step's
time is the median of the decode steps of a round; the speed is the median over the rounds of the base's step beside the
adapters'. Target: 0.70 of the base.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.progress import track
from safetensors.torch import save_file

from benchmarks.arguments import positive
from benchmarks.fixture import ROOT, SIZES, Fixture
from benchmarks.kinds import measure, table_of
from benchmarks.loaded_engine import add_arguments, register, save, start, title_of
from benchmarks.report import wide_console
from loraplex.core import LoRARequest

NUM_EXPERTS, TOP_K = 8, 2
KINDS = ("experts", "attention")
TARGET = {"experts": 0.70, "attention": None}
DTYPE = torch.bfloat16


def fixture(size: str, num_layers: int, num_adapters: int, rank: int, root: Path = ROOT) -> tuple[Path, list[Path]]:
    """(the base, adapters on attention and experts); what is not there is made."""
    folder = root / f"experts-{size}-{num_layers}-r{rank}"
    base, adapters = folder / "base", [folder / f"a{index:04d}" for index in range(num_adapters)]
    dims = {**SIZES[size], "num_hidden_layers": num_layers}
    if not (base / "config.json").exists():
        _write_base(base, dims)
    missing = [index for index, path in enumerate(adapters) if not (path / "adapter_config.json").exists()]
    for index in track(missing, "adapters", disable=not missing):
        _write_adapter(adapters[index], dims, rank, index, KINDS[0])
    return base, adapters


def of_attention(adapters: list[Path], dims: dict[str, int], rank: int) -> list[Path]:
    paths = [path.with_name(f"attention-{path.name}") for path in adapters]
    for index, path in enumerate(paths):
        if not (path / "adapter_config.json").exists():
            _write_adapter(path, dims, rank, index, KINDS[1])
    return paths


def _attention(dims: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Module of a layer -> (in, out)."""
    hidden = dims["hidden_size"]
    kv = hidden // dims["num_attention_heads"] * dims["num_key_value_heads"]
    return {f"self_attn.{name}_proj": (hidden, kv if name in "kv" else hidden) for name in "qkvo"}


def _weights(dims: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    generator, depth = torch.Generator().manual_seed(7), 1 / math.sqrt(2 * dims["num_hidden_layers"])
    hidden, inner = dims["hidden_size"], dims["intermediate_size"]

    def draw(num_in: int, num_out: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(num_out, num_in, generator=generator) * (gain / math.sqrt(num_in))).to(DTYPE)

    yield "model.embed_tokens.weight", draw(hidden, dims["vocab_size"], 0.5)
    yield "model.norm.weight", torch.ones(hidden, dtype=DTYPE)
    for layer in range(dims["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", torch.ones(hidden, dtype=DTYPE)
        for module, (num_in, num_out) in _attention(dims).items():
            yield f"{name}.{module}.weight", draw(num_in, num_out, 2 * depth if "o_proj" in module else 2.0)
        block = f"{name}.block_sparse_moe"
        yield f"{block}.gate.weight", draw(hidden, NUM_EXPERTS)
        for expert in range(NUM_EXPERTS):
            for module, sizes in (("w1", (hidden, inner)), ("w3", (hidden, inner)), ("w2", (inner, hidden))):
                yield f"{block}.experts.{expert}.{module}.weight", draw(*sizes, 2 * depth if module == "w2" else 1.0)


def _write_base(path: Path, dims: dict[str, int]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(_weights(dims)), path / "model.safetensors", metadata={"format": "pt"})
    own = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "tie_word_embeddings": True}
    own |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1}
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": "bfloat16", **dims, **own}
    (path / "config.json").write_text(json.dumps(config, indent=1))


def _write_adapter(path: Path, dims: dict[str, int], rank: int, seed: int, kind: str) -> None:
    generator, hidden, inner = (
        torch.Generator().manual_seed(1000 + seed),
        dims["hidden_size"],
        dims["intermediate_size"],
    )
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, num_in: int, num_out: int, num_ranks: int) -> None:
        b = 0.3 / math.sqrt(rank)
        for part, shape, std in (("A", (num_ranks, num_in), 1 / math.sqrt(num_in)), ("B", (num_out, num_ranks), b)):
            key = f"base_model.model.{name}.lora_{part}.weight"
            tensors[key] = (torch.randn(shape, generator=generator) * std).to(DTYPE)

    for layer in range(dims["num_hidden_layers"]):
        for module, sizes in _attention(dims).items():
            add(f"model.layers.{layer}.{module}", *sizes, rank)
        if kind == "experts":
            block = f"model.layers.{layer}.mlp.experts"
            add(f"{block}.base_layer", hidden, 2 * inner, NUM_EXPERTS * rank)
            add(block, inner, hidden, NUM_EXPERTS * rank)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if kind == "experts" else None
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_parameters": parameters,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))


def main() -> int:
    args = parser().parse_args()
    dims = {**SIZES[args.size], "num_hidden_layers": args.layers}
    base, adapters = fixture(args.size, args.layers, args.adapters, args.rank)
    made = Fixture(args.size, base, tuple(adapters))
    kinds = {
        kind: [LoRARequest(path.name, 1 + index + place * len(paths), str(path)) for index, path in enumerate(paths)]
        for place, (kind, paths) in enumerate(
            zip(KINDS, (adapters, of_attention(adapters, dims, args.rank)), strict=True)
        )
    }
    room = {"adapter_memory_bytes": 3 << 30, "host_memory_bytes": 4 << 30}
    with start(made, args, {"max_loras": args.requests_in_flight, **room}) as llm:
        register(llm, [request for requests in kinds.values() for request in requests])
        rows = measure(llm, kinds, args)
        title = title_of(made, args, f"{args.adapters} adapters of rank {args.rank}, {args.rounds} rounds")
    wide_console().print(table_of(rows, title, TARGET))
    save(args.json, {"title": title, "rows": [asdict(row) for row in rows]})
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(result, rank=16, adapters=16)
    result.set_defaults(dtype="bfloat16")
    result.add_argument("--layers", type=positive, default=30, help="default: 30, as `s` has")
    result.add_argument("--rounds", type=positive, default=6, help="default: 6")
    result.add_argument("--prompt-len", type=positive, default=64, help="tokens (default: 64)")
    result.add_argument("--output-len", type=positive, default=32, help="tokens, at least 8 (default: 32)")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
