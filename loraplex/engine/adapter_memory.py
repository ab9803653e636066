"""The adapters' memory of an engine, put together: arena, tiers, disk, and how sources are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from loraplex.adapters.checked_reader import CheckedReader
from loraplex.adapters.opener import read_spec
from loraplex.adapters.source import AdapterSource
from loraplex.config import LoRAConfig
from loraplex.events import EventLog
from loraplex.kernels.ops import KernelBackend
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import Arena
from loraplex.memory.weights.copies import CopyEngine, copies_for
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.packing import Packer
from loraplex.models.decoder import Decoder
from loraplex.models.packed_cache import default_folder
from loraplex.private_folder import private_folder


def build_manager(
    lora: LoRAConfig,
    source: AdapterSource,
    model: Decoder,
    backend: KernelBackend,
    arena: Arena,
    blocks: KVBlockAllocator,
    events: EventLog,
) -> LoRAModelManager:
    """On a CPU the arena is host and device memory in one; another device has host memory of its own, pinned for a GPU."""
    targets = model.lora_targets()
    lora = _with_one_dtype(lora, backend, model)
    host_arena, copies = host_side(lora, arena)
    manager = LoRAModelManager(
        lora,
        targets,
        backend,
        model.activation_dtype,
        arena,
        open_weights=partial(read_spec, source=source, reader=CheckedReader(targets, lora)),
        base_bias=model.base_bias,
        host_arena=host_arena,
        copies=copies,
        ask_kv=blocks.give_back,
        events=events,
        disk_tier=lambda packer: open_disk_tier(lora, packer),
    )
    blocks.reclaim = manager.reclaim_chunks
    model.bind_lora(manager.table, backend)
    backend.expect_adapters(manager.table, model.activation_dtype, lora.max_lora_rank or 0)
    return manager


def _with_one_dtype(lora: LoRAConfig, backend: KernelBackend, model: Decoder) -> LoRAConfig:
    """Where a backend packs all adapters in one dtype they are read in it: a value that does not fit is a reason to refuse."""
    dtype = backend.adapter_dtype(model.activation_dtype) if lora.lora_dtype == "auto" else None
    return lora if dtype is None else replace(lora, lora_dtype=str(dtype).removeprefix("torch."))


def host_side(lora: LoRAConfig, arena: Arena) -> tuple[Arena | None, CopyEngine | None]:
    """The host's memory beside that of another device, and how its bytes come there; None where they are one."""
    if arena.device.type == "cpu":
        return None, None
    is_gpu = arena.device.type == "cuda"
    return Arena(lora.host_memory_bytes, arena.chunk_bytes, "cpu", is_pinned=is_gpu), copies_for(arena.device)


def open_disk_tier(lora: LoRAConfig, packer: Packer) -> DiskCache | None:
    """Packed adapters on disk; None when the disk tier is off."""
    if lora.disk_memory_bytes == 0 or lora.disk_cache_dir == "none":
        return None
    default = default_folder()
    if lora.disk_cache_dir is not None:
        folder = Path(lora.disk_cache_dir)
    elif default is not None:
        folder = default / "adapters"
    else:
        return None
    private_folder(folder, "the folder of packed adapters", "give another with --disk-cache-dir")
    form = packer.form(lora.lora_dtype)
    return DiskCache(folder, lora.disk_memory_bytes, form, packer.check_layout, checksums=packer.checksums)
