"""Puts a PEFT adapter's file into a slot table with nothing but safetensors: no adapter code of loraplex takes part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.slices import SliceWeights, align


def pack_adapter(adapter: Path, table: SlotTable, backend: KernelBackend, lora_slot: int, start: int) -> int:
    """Pack every target of the adapter from byte `start` of the table's buffer on; returns the byte behind it."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    for target in table.targets:
        slices = [_slice(tensors, s.module_name, config["lora_alpha"] / root) for s in target.slices]
        if any(slices):
            nbytes = backend.packed_nbytes(slices, torch.float32)
            layouts = backend.pack(slices, torch.float32, table.buffer[start : start + nbytes])
            table.set_block(target.name, lora_slot, start, layouts)
            start = align(start + nbytes)
    return start


def _slice(tensors: dict[str, Tensor], module: str, scaling: float) -> SliceWeights | None:
    a, b = (tensors.get(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
    return None if a is None else SliceWeights(a, b, None, scaling)
