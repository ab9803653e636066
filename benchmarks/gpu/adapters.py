"""Random adapters in PEFT's format, in memory-backed files, a fraction of a second each; no two have the same
content."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.shapes import Shape
from loraplex.core import LoRARequest

SHARED_MEMORY = Path("/dev/shm")
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip
TABLE_NUMBERS = 1 << 24


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """In memory where the machine has such a place."""
    with tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()), dir=_root()) as folder:
        yield Path(folder)


def remove_scratch(pid: int) -> None:
    """What a process that was killed had in its scratch folders."""
    for folder in _root().glob(f"{_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _prefix(pid: int) -> str:
    return f"loraplex-gpu-{pid}-"


def write_adapters(shape: Shape, count: int, rank: int, folder: Path) -> list[LoRARequest]:
    """On every linear, numbered from 1. Their numbers are pieces of one random table, each tensor's from another
    place."""
    generator = torch.Generator().manual_seed(11)
    table = (torch.randn(TABLE_NUMBERS, generator=generator) * 0.02).to(torch.bfloat16)
    return [_write(shape, rank, number, table, folder / f"adapter-{number:03d}") for number in range(1, count + 1)]


def _write(shape: Shape, rank: int, number: int, table: torch.Tensor, folder: Path) -> LoRARequest:
    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for name, (rows, columns) in _tensors(shape, rank):
        start = int(torch.randint(len(table) - rows * columns, (), generator=generator))
        tensors[name] = table[start : start + rows * columns].view(rows, columns).clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [module.rpartition(".")[2] for group in MODULES.values() for module in group]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, number, str(folder))


def _tensors(shape: Shape, rank: int) -> Iterator[tuple[str, Sequence[int]]]:
    for layer in range(shape.layers):
        for linear, (num_in, outs) in shape.linears().items():
            for module, out in zip(MODULES[linear], outs, strict=True):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_"
                yield f"{key}A.weight", (rank, num_in)
                yield f"{key}B.weight", (out, rank)
