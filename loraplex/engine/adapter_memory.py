"""The adapters' memory of an engine, put together: arena, tiers, disk, and how sources are read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.engine.adapter_opener import read_spec
from loraplex.events import EventLog
from loraplex.kernels.ops import KernelBackend
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.arena import Arena
from loraplex.memory.disk_cache import DiskCache
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.packing import Packer
from loraplex.models.decoder import Decoder
from loraplex.models.packed_cache import default_folder


def build_manager(
    lora: LoRAConfig,
    model: Decoder,
    backend: KernelBackend,
    arena: Arena,
    blocks: KVBlockAllocator,
    events: EventLog,
) -> LoRAModelManager:
    """On a CPU the arena is host and device memory in one; another device has host memory of its own, pinned for a GPU."""
    targets = model.lora_targets()
    host_arena = None
    if arena.device.type != "cpu":
        host_arena = Arena(lora.host_memory_bytes, arena.chunk_bytes, "cpu", is_pinned=arena.device.type == "cuda")
    manager = LoRAModelManager(
        lora,
        targets,
        backend,
        model.activation_dtype,
        arena,
        open_weights=lambda spec: read_spec(spec, targets, lora),
        base_bias=model.base_bias,
        host_arena=host_arena,
        on_digest_dropped=blocks.drop_digest,
        events=events,
        disk_tier=lambda packer: open_disk_tier(lora, targets, model, backend, packer),
    )
    model.bind_lora(manager.table, backend)
    return manager


def open_disk_tier(
    lora: LoRAConfig, targets: Sequence[LoraTarget], model: Decoder, backend: KernelBackend, packer: Packer
) -> DiskCache | None:
    """Packed adapters on disk, in a form that names all that packing depends on beside the adapter; None when it is off."""
    if lora.disk_memory_bytes == 0 or lora.disk_cache_dir == "none":
        return None
    folder = default_folder() / "adapters" if lora.disk_cache_dir is None else Path(lora.disk_cache_dir)
    biases = hashlib.blake2b(digest_size=16)
    for target in targets:
        for part in target.slices:
            bias = model.base_bias(part.module_name)
            biases.update(b"-" if bias is None else bias.float().cpu().contiguous().numpy().tobytes())
    shape = hashlib.blake2b(repr(targets).encode(), digest_size=16).hexdigest()
    form = f"{backend.adapter_format} {model.activation_dtype} {lora.lora_dtype} {shape} {biases.hexdigest()}"
    return DiskCache(folder, lora.disk_memory_bytes, form, packer.check_layout)
