"""Seeded random models and adapters in the peers' own formats, made once and kept under `fixtures/` (not in git).

    python -m benchmarks.fixture --size s --adapters 16
    python -m benchmarks.fixture --size s --adapters 16 --ranks 64                                    1.3 GB of float32
    python -m benchmarks.fixture --size s --adapters 1000 --ranks 8 --adapter-dtype bfloat16          4.9 GB
    python -m benchmarks.fixture --size s --adapters 2000 --ranks 8 --adapter-dtype bfloat16 --root DIR \\
        --targets q_proj,k_proj,v_proj,o_proj                                                         3.7 GB, 2 min
Sizes: `tiny` for a look, `s` (SmolLM2-135M's shape), `m` (Qwen2.5-0.5B's shape as a Llama with a 32k vocabulary).
Adapter i has rank 8, 16, 32, 64 in turn; no two have the same content. Weights are drawn so that greedy output does not
fall into one repeated token: the residual stream stays O(1) at any depth, attention is sharp, embeddings are small. A
run that was broken off goes on where it was. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file

from benchmarks.arguments import listed_of

ROOT = Path(__file__).resolve().parent.parent / "fixtures"
RANKS = (8, 16, 32, 64)
DTYPES = ("float32", "bfloat16", "float16")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
             "intermediate_size": 160, "vocab_size": 8192},
    "s": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
          "intermediate_size": 1536, "vocab_size": 49152},
    "m": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
          "intermediate_size": 4864, "vocab_size": 32000},
}  # fmt: skip
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Fixture:
    """A base model and its adapters on disk."""

    size: str
    base: Path
    adapters: tuple[Path, ...]


def fixture(
    size: str,
    num_adapters: int,
    *,
    ranks: Sequence[int] = RANKS,
    adapter_dtype: str = "float32",
    targets: Sequence[str] = TARGET_MODULES,
    seed: int = 7,
    root: Path = ROOT,
) -> Fixture:
    """The fixture of these arguments, in a folder of `root` that is named after them; what is not there is made."""
    name = f"{size}-r{'-'.join(map(str, ranks))}-{seed}" + ("" if adapter_dtype == "float32" else f"-{adapter_dtype}")
    if tuple(targets) != TARGET_MODULES:
        name += "-" + "".join(target[0] for target in targets)
    folder = root / name
    base = folder / "base"
    if not (base / "model.safetensors").exists():
        _write_base(base, size, seed)
    adapters = tuple(folder / f"a{index:04d}" for index in range(num_adapters))
    missing = [index for index, path in enumerate(adapters) if not (path / "adapter_config.json").exists()]
    for index in track(missing, f"adapters of {name}", disable=not missing):
        dtype = getattr(torch, adapter_dtype)
        _write_adapter(adapters[index], size, ranks[index % len(ranks)], index, len(ranks), seed, dtype, targets)
    return Fixture(size, base, adapters)


def fixture_of(folder: Path) -> Fixture:
    """What lies in a folder that was made before: base/, and a folder per adapter, in the order of their names.

    Its size is the one of the same shape, else the folder's name. Raises ValueError.
    """
    base = folder / "base"
    if not (base / "config.json").exists():
        raise ValueError(f"{folder} is no fixture: there is no base/config.json in it")
    config = json.loads((base / "config.json").read_text())
    sizes = (size for size, dims in SIZES.items() if all(config.get(name) == value for name, value in dims.items()))
    adapters = sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    return Fixture(next(sizes, folder.name), base, tuple(adapters))


def _write_base(path: Path, size: str, seed: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=2048, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    depth = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.1 * torch.randn(weight.shape))
            else:
                weight.normal_(0, _gain(name, depth) / math.sqrt(weight.shape[1]))
    model.save_pretrained(path)


def _gain(name: str, depth: float) -> float:
    if "embed_tokens" in name:
        return 0.5
    if "o_proj" in name or "down_proj" in name:
        return 2 * depth
    return 2.0 if "q_proj" in name or "k_proj" in name else 1.0


def _write_adapter(
    path: Path,
    size: str,
    rank: int,
    index: int,
    num_ranks: int,
    seed: int,
    dtype: torch.dtype,
    targets: Sequence[str],
) -> None:
    """Scaling is 1 or 2 in turn, so that a lost alpha shows; the update is 0.3 of the base's output in size."""
    alpha = rank * (1 + index // num_ranks % 2)
    generator = torch.Generator().manual_seed(seed * 100_003 + index)
    tensors: dict[str, torch.Tensor] = {}
    for module, num_in, num_out in _linears(SIZES[size]):
        if module.rpartition(".")[2] not in targets:
            continue
        key = f"base_model.model.{module}.lora_"
        tensors[key + "A.weight"] = torch.randn(rank, num_in, generator=generator) / math.sqrt(num_in)
        tensors[key + "B.weight"] = torch.randn(num_out, rank, generator=generator) * (
            0.3 * rank / alpha / math.sqrt(rank)
        )
    path.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": rank,
        "lora_alpha": alpha, "target_modules": list(targets), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True,
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _linears(dims: dict[str, int]) -> list[tuple[str, int, int]]:
    """(module, in, out) of every target of a Llama of these sizes."""
    hidden, inner = dims["hidden_size"], dims["intermediate_size"]
    kv = hidden // dims["num_attention_heads"] * dims["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    return [
        (f"model.layers.{layer}.{module}", *shape)
        for layer in range(dims["num_hidden_layers"])
        for module, shape in shapes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--ranks", default="8,16,32,64", help="in turn (default: %(default)s)")
    parser.add_argument("--adapter-dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--targets",
        type=listed_of(TARGET_MODULES),
        default=TARGET_MODULES,
        help="of the adapters (default: all linears)",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, metavar="DIR", help="where the fixture's folder is made (default: fixtures/)"
    )
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    made = fixture(
        arguments.size,
        arguments.adapters,
        ranks=ranks,
        adapter_dtype=arguments.adapter_dtype,
        targets=arguments.targets,
        root=arguments.root,
    )
    print(f"{made.base} and {len(made.adapters)} adapters")


if __name__ == "__main__":
    main()
