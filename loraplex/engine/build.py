"""An engine, put together: the model with its kernels, its memory, and the adapters' memory (arena, tiers, disk)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from loraplex.adapters.merging.base import MergedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import SourceReader
from loraplex.adapters.weights import CheckedReader
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import EngineInfo, LoraTarget, Shard
from loraplex.cpu import chosen_threads
from loraplex.distributed import ONE_RANK, RankGroup
from loraplex.engine.decode_graphs import build_steps
from loraplex.engine.engine import EngineCore
from loraplex.engine.maintenance import make_caretaker
from loraplex.engine.memory_plan import MemoryPlan, device_memory, plan_memory
from loraplex.engine.model_runner import ModelRunner
from loraplex.engine.sampler import Sampler
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.warm_up import rehearsals, warm_up
from loraplex.errors import ConfigError
from loraplex.events import EventLog
from loraplex.kernels.native.attention import kv_layout_gap
from loraplex.kernels.ops import KernelBackend, get_backend
from loraplex.kernels.profiled import profiled
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.eviction.custom import MakePolicy, PolicySource, policy_maker
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import Arena, KVShare
from loraplex.memory.weights.copies import CopyEngine, copies_for
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.packing import Packer, can_share
from loraplex.models.checkpoints.stored import KEPT_FORMAT
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.dominant import DominantMerger
from loraplex.models.loader import load_model, read_merged
from loraplex.models.packed_cache import PackedCache
from loraplex.models.shares import check_shares
from loraplex.models.source import read_tokenizer, resolve_model
from loraplex.performance.profiler import Profiler
from loraplex.private_folder import default_folder, private_folder
from loraplex.ranks.leader import LeadingRank
from loraplex.ranks.messages import UseMemory
from loraplex.structured.grammars import GrammarCompiler

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

MIN_CAPABILITY = (8, 0)
"""Of a GPU that device `auto` takes."""


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    profiler: Profiler | None = None,
    eviction_policy: PolicySource | None = None,
) -> EngineCore:
    """Load the model and give it memory. Raises ConfigError or ModelError, naming the setting or the file.

    progress(what, done, total) is called while weights are read, kernels compiled and graphs captured. With a profiler,
    kernels are measured one by one. eviction_policy: instead of the config's, which can name one only.
    """
    if eviction_policy is None and config.lora is not None:
        eviction_policy = config.lora.eviction_policy
    make_policy = None if eviction_policy is None else policy_maker(eviction_policy)
    usual = max(1, torch.get_num_threads() // config.tensor_parallel_size)
    torch.set_num_threads(chosen_threads(config.num_threads, usual))
    config, device, device_choice = with_device(config)
    path = resolve_model(config.model, config.revision)
    model_config = ModelConfig.from_dir(path)
    backend = _backend(config, device, profiler)
    merged = read_merged(config, model_config, getattr(torch, model_config.effective_dtype(config.dtype)), backend)
    if merged is not None:
        logger.info("adapter %s is merged into the base weights", merged.name)
        config = replace(config, merge_adapter_digest=merged.digest)  # what every rank reads
    ranks = _start_ranks(config, path, model_config, device, backend)
    try:
        return _build(
            config, path, model_config, backend, device, device_choice, ranks, progress, profiler, make_policy, merged
        )
    except BaseException:
        ranks.close()
        raise


def _start_ranks(
    config: EngineConfig, path: Path, model_config: ModelConfig, device: torch.device, backend: KernelBackend
) -> RankGroup:
    """The other ranks of the model, which load their shares of it from now on."""
    if config.tensor_parallel_size == 1:
        return ONE_RANK
    if device.type != "cpu":
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} is not supported on {device} yet: use cpu"
        )
    is_fully_sharded = config.lora is not None and config.lora.fully_sharded_loras
    if is_fully_sharded and not backend.rank_nbytes(config.tensor_parallel_size):
        raise ConfigError(f"fully_sharded_loras needs native kernels; this engine has {backend.description}")
    check_shares(model_config, config.tensor_parallel_size, is_fully_sharded)
    return LeadingRank(config, str(path), torch.get_num_threads(), backend)


def _build(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: KernelBackend,
    device: torch.device,
    device_choice: str,
    ranks: RankGroup,
    progress: Progress | None,
    profiler: Profiler | None,
    make_policy: MakePolicy | None,
    merged: MergedAdapter | None,
) -> EngineCore:
    dtype_name = model_config.effective_dtype(config.dtype)
    dtype = getattr(torch, dtype_name)
    model = _load_model(config, path, model_config, dtype, backend, device, progress, ranks, merged)
    kv_cache_dtype = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    backend.reserve_workspace(config.max_num_batched_tokens)
    kv_dtype, allocate = getattr(torch, kv_cache_dtype), ranks.allocate if isinstance(ranks, LeadingRank) else None
    memory = plan_memory(config, model_config, model, kv_dtype, device, device_memory(device), allocate)
    heads, windows = model_config.num_attention_heads, model_config.sliding_windows
    rule = model_config.attention_softcap, model_config.family.has_sinks
    backend.choose_attention(heads, model.activation_dtype, memory.kv, windows, *rule)
    if config.speculative is not None and (gap := kv_layout_gap(memory.kv[:, 0])) is not None:
        raise ConfigError(f"speculative {config.speculative} needs native attention, which has no {gap}; leave it out")
    blocks = _build_blocks(config, memory)
    events = EventLog()
    source, lora = AdapterSource(config.root_paths), memory.lora
    adapters = None
    if lora is not None:
        adapters = build_manager(lora, source, model, backend, memory.arena, blocks, events, make_policy)
    if isinstance(ranks, LeadingRank):
        _share_memory(config, ranks, memory, adapters)
    scheduler = _scheduler(config, blocks, adapters, memory.max_model_len)
    builder, graphs = build_steps(config, memory, model, backend, blocks, None if adapters is None else adapters.table)
    profiler = profiler or Profiler()
    prepare = None if adapters is None else adapters.prepare_step
    sampler = Sampler(model_config.vocab_size, backend)
    merger = _merger(config, model, backend, adapters)
    grammars = GrammarCompiler(partial(read_tokenizer, Path(config.tokenizer or path)), model_config.vocab_size)
    runner = ModelRunner(model, memory.kv, builder, sampler, profiler, prepare, graphs, merger, grammars)
    _make_ready(config, runner, blocks, memory, 0 if adapters is None else adapters.table.capacity, progress)
    caretaker = make_caretaker(config, adapters, scheduler, blocks, runner, events, model_config.vocab_size)
    info = _info(config, path, model_config, memory, model, backend, device_choice)
    look_ahead = device.type == "cuda" if config.look_ahead is None else config.look_ahead
    parts = info, scheduler, runner, blocks, adapters, config.max_waiting_requests, profiler, events, caretaker
    return EngineCore(*parts, look_ahead=look_ahead, grammars=grammars)


def _share_memory(
    config: EngineConfig, ranks: LeadingRank, memory: MemoryPlan, adapters: LoRAModelManager | None
) -> None:
    """The other ranks know the arena, the KV cache and the slots."""
    num_slots = 0
    if adapters is not None:
        assert adapters.slot_changes is not None
        num_slots, ranks.take_changes = adapters.table.capacity, adapters.slot_changes.take
    kv, max_tokens = memory.kv, config.max_num_batched_tokens
    ranks.use_memory(UseMemory(memory.arena.num_bytes, kv.dtype, tuple(kv.shape), num_slots, max_tokens))


def _other_targets(model: Decoder, num_ranks: int) -> list[tuple[LoraTarget, ...]]:
    """Of the other ranks of a model."""
    return [
        tuple(replace(t, shard=Shard(rank, num_ranks)) for t in model.lora_targets()) for rank in range(1, num_ranks)
    ]


def _info(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    memory: MemoryPlan,
    model: Decoder,
    backend: KernelBackend,
    device_choice: str,
) -> EngineInfo:
    dtype_name = model_config.effective_dtype(config.dtype)
    kv_cache_dtype = dtype_name if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    kept = f"{config.quantization}, of {dtype_name}" if config.quantization else dtype_name
    form = f"{model_config.model_type}; weights: {model.weights_form or kept}; KV cache: {kv_cache_dtype}"
    return EngineInfo(
        model_path=str(path),
        architecture=model_config.model_type,
        dtype=dtype_name,
        max_model_len=memory.max_model_len,
        num_kv_blocks=memory.num_kv_blocks,
        kv_cache_dtype=kv_cache_dtype,
        adapter_memory_bytes=0 if memory.lora is None else memory.lora.adapter_memory_bytes,
        targets=model.lora_targets() if config.lora is not None else (),
        vocab_size=model_config.vocab_size,
        block_size=config.block_size,
        backend=backend.name,
        backend_description=backend.description,
        device=str(memory.arena.device),
        form=form,
        choices=tuple(filter(None, (device_choice, memory.choice))),
        long_contexts=None
        if config.lora is None
        else model_config.long_contexts(config.lora.long_lora_scaling_factors),
    )


def _make_ready(
    config: EngineConfig,
    runner: ModelRunner,
    blocks: KVBlockAllocator,
    memory: MemoryPlan,
    num_slots: int,
    progress: Progress | None,
) -> None:
    """What a GPU does at first use. Graphs come last: they hold addresses of scratch memory, arena and slot table."""

    def told(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(what, done, total)

    if memory.arena.device.type != "cpu":
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        steps = rehearsals(num_tokens, num_seqs, memory.longest_len, num_slots)
        warm_up(runner, blocks, list(steps), told("kernels"))
    if runner.graphs is not None:
        runner.graphs.capture(told("graphs"))


def _scheduler(
    config: EngineConfig, blocks: KVBlockAllocator, adapters: LoRAModelManager | None, max_model_len: int
) -> Scheduler:
    scheduler = Scheduler(
        blocks,
        adapters,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        aging_steps=1 if config.lora is None else config.lora.aging_steps,
        num_speculative_tokens=0 if config.speculative is None else config.num_speculative_tokens,
    )
    if adapters is not None:
        adapters.on_digest_dropped = scheduler.forget_kv
    return scheduler


def _merger(
    config: EngineConfig, model: Decoder, backend: KernelBackend, adapters: LoRAModelManager | None
) -> DominantMerger | None:
    lora = config.lora
    if lora is None or adapters is None or not lora.merge_dominant_adapter:
        return None
    if any(linear.is_kept for linear in model.linears):
        raise ConfigError(
            f"merge_dominant_adapter needs base weights in floats ({model.weights_form}); leave it out, or serve a "
            "checkpoint that is not quantised"
        )
    merger = DominantMerger(model, backend, adapters, lora.merged_memory_bytes, config.critical_pressure)
    forget_kv = adapters.on_digest_dropped

    def forget(digest: str) -> None:
        merger.forget(digest)
        if forget_kv is not None:
            forget_kv(digest)

    adapters.on_digest_dropped = forget
    return merger


def _backend(config: EngineConfig, device: torch.device, profiler: Profiler | None) -> KernelBackend:
    lora_dtype = "auto" if config.lora is None else config.lora.lora_dtype
    backend = get_backend(config.lora_backend, device, lora_dtype, config.attention_backend)
    logger.info("kernels: %s", backend.description)
    if config.quantization is not None and config.quantization not in backend.quantizations:
        raise ConfigError(
            f"quantization {config.quantization} is not in the {backend.name} kernels, and these run: "
            f"{backend.description}; they have {', '.join(backend.quantizations) or 'none'} (int8 and int4 are on "
            "a CPU's native kernels too, int4-a16 on those alone; fp8 wants a GPU of compute capability 8.9 or later)"
        )
    if config.kv_cache_dtype == "int8" and device.type != "cpu":
        raise ConfigError(
            f"kv_cache_dtype int8 is not supported on {device} yet, whose kernels read no scales of keys and values: "
            "use auto, or float16 or bfloat16, which are half of float32"
        )
    if config.lora is not None and config.lora.merge_dominant_adapter and backend.name != "native":
        raise ConfigError(
            "merge_dominant_adapter needs the native kernels of a CPU: another form of base weights cannot be read and "
            f"written in pieces, and CUDA graphs are captured over the base's; these run: {backend.description}; leave "
            "it out"
        )
    if config.speculative is not None and backend.name != "native":
        raise ConfigError(
            f"speculative {config.speculative} needs the native kernels of a CPU, whose rows do not depend on what "
            "else is in a step, so that it draws what plain decoding draws; these run: "
            f"{backend.description}; leave it out"
        )
    return backend if profiler is None else profiled(backend, profiler)


def _load_model(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    dtype: torch.dtype,
    backend: KernelBackend,
    device: torch.device,
    progress: Progress | None,
    ranks: RankGroup,
    merged: MergedAdapter | None,
) -> Decoder:
    return load_model(
        path,
        model_config,
        dtype,
        device,
        config.load_format,
        config.seed,
        backend,
        config.lora is not None,
        None if progress is None else lambda done, total: progress("weights", done, total),
        config.quantization,
        None
        if ranks.shard.size > 1
        else _packed_cache(config, path, model_config, str(dtype).removeprefix("torch."), backend, merged),
        merged,
        ranks,
    )


def _packed_cache(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    dtype_name: str,
    backend: KernelBackend,
    merged: MergedAdapter | None,
) -> PackedCache | None:
    if backend.packed_format is None or config.load_format != "auto" or config.packed_cache_dir == "none":
        return None
    folder = default_folder() if config.packed_cache_dir is None else Path(config.packed_cache_dir)
    if folder is None:
        return None
    private_folder(folder, "the folder of packed weights", "give another with --packed-cache-dir")
    form = [dtype_name, *([config.quantization] if config.quantization else []), backend.packed_format]
    form += [KEPT_FORMAT] if model_config.form is not None or path.is_file() else []
    return PackedCache(folder, path, form, "" if merged is None else merged.digest)


def with_device(config: EngineConfig) -> tuple[EngineConfig, torch.device, str]:
    """(the settings with the device that `auto` means here, that device, why). Raises ConfigError."""
    kind, _, number = config.device.partition(":")
    if kind != "auto":
        return config, _device(config.device), ""
    name, reason = _automatic_device(config.lora_backend)
    if number and name == "cuda":  # of several engines, each has a GPU of its own
        name = f"cuda:{number}"
    device = _device(name)
    choice = f"device: {device} ({reason})"
    logger.info("%s", choice)
    return replace(config, device=str(device)), device, choice


def _automatic_device(lora_backend: str) -> tuple[str, str]:
    """(name, reason)."""
    if lora_backend == "native":
        return "cpu", "lora_backend native runs on a CPU"
    if torch.version.cuda is None:
        return "cpu", "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "cpu", "torch finds no GPU"
    try:
        capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    except (RuntimeError, AssertionError) as error:
        return "cpu", f"the GPU cannot be used: {str(error).splitlines()[0]}"
    if capability < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        return "cpu", f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernels need {needed}"
    return "cuda", f"{name}, of compute capability {capability[0]}.{capability[1]}"


def _device(name: str) -> torch.device:
    """With its number: `cuda` is the current one. Raises ConfigError when it cannot be used."""
    try:
        device = torch.empty(1, device=name).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels and graphs are launched on this thread's device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers, so nothing can be computed there; use cpu or cuda")
    return device


def _build_blocks(config: EngineConfig, memory: MemoryPlan) -> KVBlockAllocator:
    return KVBlockAllocator(
        memory.num_kv_blocks,
        config.block_size,
        is_prefix_caching=config.enable_prefix_caching,
        chunks=KVShare(memory.arena),
        blocks_per_chunk=memory.blocks_per_chunk,
    )


# ------------------------------------------------------------------------------------------------- the adapters' memory


def build_manager(
    lora: LoRAConfig,
    source: AdapterSource,
    model: Decoder,
    backend: KernelBackend,
    arena: Arena,
    blocks: KVBlockAllocator,
    events: EventLog,
    make_policy: MakePolicy | None,
) -> LoRAModelManager:
    """On a CPU the arena is host and device memory in one; another device has its own beside it, pinned for a GPU."""
    targets = model.lora_targets()
    lora = _with_one_dtype(lora, backend, model)
    host_arena, copies = host_side(lora, arena)
    long_contexts = model.config.long_contexts(lora.long_lora_scaling_factors)
    checked = CheckedReader(targets, lora, long_contexts, can_share(backend, targets, host_arena is None))
    reader = SourceReader(source, checked)
    manager = LoRAModelManager(
        lora,
        targets,
        backend,
        model.activation_dtype,
        arena,
        open_weights=reader.read,
        open_adapter=reader.open,
        base=model,
        host_arena=host_arena,
        copies=copies,
        ask_kv=blocks.give_back,
        events=events,
        disk_tier=lambda packer: open_disk_tier(lora, packer),
        make_policy=make_policy,
        other_ranks=_other_targets(model, model.num_ranks),
    )
    blocks.reclaim = manager.reclaim_chunks
    model.bind_lora(manager.table, backend)
    backend.expect_adapters(manager.table, model.activation_dtype, lora.max_lora_rank or 0)
    return manager


def _with_one_dtype(lora: LoRAConfig, backend: KernelBackend, model: Decoder) -> LoRAConfig:
    """Where a backend packs all adapters in one dtype they are read in it: a value that does not fit is refused."""
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
    return DiskCache(
        folder,
        lora.disk_memory_bytes,
        packer.form(lora.lora_dtype),
        packer.check_layout,
        checksums=packer.checksums,
        weights_name=packer.weights_name,
    )
