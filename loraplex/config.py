"""Settings, as frozen dataclasses. The command line takes its names, defaults and help from the fields.

Sizes are bytes, times seconds. Where a `Size` may be given, it is a number of bytes, a text such as 4GiB or 512MB, or a
share such as 40%. A setting that cannot be is a `ConfigError` that names it and its value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loraplex.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
"""The field's short names, accepted for `lora_dtype`."""
QUANTIZATIONS = ("fp8", "int8", "int4", "int4-a16")
ATTENTION_BACKENDS = ("auto", "triton", "flash_attn")
SPECULATIVE_METHODS = ("n-gram",)
MAX_SPECULATIVE_TOKENS = 32
MAX_LORA_RANK = 4096
"""Each token costs what its adapter's rank does, in a step that others wait for."""

EVICTION_POLICIES = ("lru", "lfu", "fifo", "gdsf", "cost_aware", "none")
DEFAULT_KV_CACHE_BYTES = 512 * 2**20
DEFAULT_ADAPTER_BYTES = 1 * 2**30
DEFAULT_HOST_BYTES = 4 * 2**30
DEFAULT_DISK_BYTES = 16 * 2**30
DEFAULT_MERGED_BYTES = 4 * 2**30
DEFAULT_GPU_UTILIZATION = 0.9

MAX_CONTEXT = 2**24
"""Tokens: up to here float32, in which positions are turned into angles, has every whole number."""

MAX_CONTEXT_FACTOR = 1024
"""Of an adapter that stretches the base model's context."""


Size = int | str

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt])(i?)b?", re.IGNORECASE)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int | None:
    """Bytes of 512MiB, 2GiB, 4GB; None for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, unit, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** _POWERS[unit.lower()])


def num_bytes(name: str, size: Size, whole: int | None) -> int:
    """A size in bytes; a share is of `whole`. ConfigError names a setting that is no size, or has no whole."""
    text = str(size).strip()
    share = _SHARE.fullmatch(text)
    parsed = int(text) if text.isdecimal() else parse_bytes(text)
    if share is not None and float(share[1]) <= 100:
        if whole is None:
            of_what = (
                "the machine's memory, which is not known"
                if name == "device_memory"
                else "device_memory, which is not set"
            )
            raise ConfigError(f"{name} is {text}, a share of {of_what}; give bytes")
        parsed = int(whole * float(share[1]) / 100)
    if parsed is None or parsed < 1:
        raise ConfigError(f"{name} must be bytes > 0, a size such as 4GiB, or a share such as 40%, got {size!r}")
    return parsed


def _check_size(name: str, size: Size | None) -> None:
    if size is not None:
        num_bytes(name, size, 1 << 40)


def setting(default: Any, text: str, *, group: str | None = None, flag: str | None = None) -> Any:
    """A dataclass field with its help text beside it.

    group: the heading in `--help`, of this field and of those after it. flag: the name on the command line, if not
    the field's.
    """
    return field(default=default, metadata={"help": text, "group": group, "flag": flag})


def _require(is_fine: bool, text: str) -> None:
    if not is_fine:
        raise ConfigError(text)


def _require_one(name: str, size: Size | None, size_bytes: int, default: int) -> None:
    _require(
        size is None or size_bytes == default,
        f"{name} ({size}) and {name}_bytes ({size_bytes}) are one setting; give one",
    )


DEFAULT_DATABASE_PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class RegistryDatabase:
    """The database in which servers of one base model share their adapters' names. The URL may hold a password.

    patience_s: how long a server goes by what it knows of the names while the database does not answer it.
    """

    url: str = field(repr=False)
    patience_s: float = DEFAULT_DATABASE_PATIENCE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Limits and policies of adapters. The limits that count are bytes; `max_*` are optional, under vLLM's names."""

    adapter_memory_bytes: int = setting(DEFAULT_ADAPTER_BYTES, "device bytes for adapters")
    host_memory_bytes: int = setting(
        DEFAULT_HOST_BYTES, "host bytes for adapters; on a CPU it bounds device and host together"
    )
    adapter_memory: int | str | None = setting(
        None, "adapter_memory_bytes as 4GiB, or as 40% of --device-memory (default with it: all of it)"
    )
    adapter_floor: int | str | None = setting(
        None, "part of --device-memory that the KV cache cannot take from adapters (default: a tenth)"
    )
    max_loras: int | None = setting(
        None, "most adapters on the device (vLLM's name; default: as many as fit)", group="Adapters"
    )
    max_cpu_loras: int | None = setting(None, "most adapters in host memory (vLLM's name; default: as many as fit)")
    max_lora_rank: int | None = setting(
        None, f"highest rank of an adapter, 1..{MAX_LORA_RANK} (vLLM's name; default: {MAX_LORA_RANK})"
    )
    max_loaded_loras: int | None = setting(None, "most registered adapters (SGLang's name; default: no limit)")
    max_versions_kept: int = setting(
        2, "versions kept of each name, the current one included: what a rollback can return to"
    )
    lora_dtype: str = setting(
        "auto",
        "type of adapter weights in memory: auto (the adapter's own; with triton the model's), float32, float16 "
        "(fp16), bfloat16 (bf16), or int8 (triton; deltas are off by 1 %)",
    )
    bias_enabled: bool = setting(
        True, "support for adapters with `bias` or `lora_bias`; off: such adapters are refused"
    )
    adapter_text: bool = setting(
        True,
        "use of the added tokens, chat template and sampling defaults in an adapter's directory; off: the base model's "
        "for all",
    )
    fully_sharded_loras: bool = setting(
        False,
        "A and B of each adapter cut over all ranks of tensor_parallel_size, which then exchange what lies between; "
        "off: one of both is whole on each rank",
    )
    lora_extra_vocab_size: int = setting(
        256, "most tokens that an adapter may add to the base model's vocabulary (vLLM's name); 0: none"
    )
    long_lora_scaling_factors: tuple[float, ...] = setting(
        (),
        "a factor by which adapters may stretch the base model's context; repeatable; the KV cache holds a request of "
        "the longest (vLLM's name; default: none)",
    )
    disk_memory_bytes: int = setting(
        DEFAULT_DISK_BYTES,
        "disk bytes for packed adapters, which load faster than from their source; 0: none",
        group="Adapter memory",
    )
    disk_cache_dir: str | None = setting(
        None, "folder of packed adapters (default: adapters/ in $LORAPLEX_CACHE or ~/.cache/loraplex; none: none)"
    )
    host_compression: str = setting(
        "none",
        "compression of idle adapters in host memory under pressure: none, lossless, or int8 (lossy: answers change a "
        "little)",
    )
    enable_prediction: bool = setting(True, "preloading of adapters that are likely to be requested soon")
    enable_diagnosis: bool = setting(
        True, "recording of each adapter's result on a test prompt while the engine is idle, to judge odd results by"
    )
    scrub_bytes_per_s: int = setting(
        16 * 2**20, "bytes of adapters in memory whose checksums are verified each second; 0: none"
    )
    eviction_policy: str = setting(
        "cost_aware",
        "choice of adapters to evict: lru, lfu, fifo, gdsf or cost_aware; none: only by name; module:Class: a policy "
        "of your own, from the Python path",
    )
    aging_steps: int = setting(
        128, "maximum steps a request waits for adapter memory before it may pause any running request"
    )
    num_loader_threads: int = setting(2, "threads that load adapters beside the running steps")
    merge_dominant_adapter: bool = setting(
        False,
        "merging of an adapter that fills step after step alone into a copy of the weights that it changes, while the "
        "engine runs; answers then differ by rounding",
    )
    merged_memory_bytes: int = setting(DEFAULT_MERGED_BYTES, "most bytes of that copy; a larger one is not made")

    def __post_init__(self) -> None:
        _require(self.adapter_memory_bytes > 0, f"adapter_memory_bytes must be > 0, got {self.adapter_memory_bytes}")
        _check_size("adapter_memory", self.adapter_memory)
        _check_size("adapter_floor", self.adapter_floor)
        _require_one("adapter_memory", self.adapter_memory, self.adapter_memory_bytes, DEFAULT_ADAPTER_BYTES)
        _require(self.host_memory_bytes > 0, f"host_memory_bytes must be > 0, got {self.host_memory_bytes}")
        _require(self.max_loras is None or self.max_loras > 0, f"max_loras must be > 0, got {self.max_loras}")
        floor = self.max_loras or 1
        _require(
            self.max_cpu_loras is None or self.max_cpu_loras >= floor,
            f"max_cpu_loras ({self.max_cpu_loras}) must be >= max_loras ({floor})",
        )
        _require(
            self.max_lora_rank is None or 0 < self.max_lora_rank <= MAX_LORA_RANK,
            f"max_lora_rank must be 1..{MAX_LORA_RANK}, got {self.max_lora_rank}",
        )
        _require(
            self.max_loaded_loras is None or self.max_loaded_loras >= floor,
            f"max_loaded_loras ({self.max_loaded_loras}) must be >= max_loras ({floor})",
        )
        object.__setattr__(self, "lora_dtype", SHORT_DTYPES.get(self.lora_dtype, self.lora_dtype))
        _require(
            self.lora_dtype in ("auto", "int8", *DTYPES),
            f"lora_dtype must be auto, int8 or one of {DTYPES}, got {self.lora_dtype!r}",
        )
        _require(
            self.eviction_policy in EVICTION_POLICIES
            or (isinstance(self.eviction_policy, str) and ":" in self.eviction_policy),
            f"eviction_policy must be module:Class or one of {EVICTION_POLICIES}, got {self.eviction_policy!r}",
        )
        _require(self.disk_memory_bytes >= 0, f"disk_memory_bytes must be >= 0, got {self.disk_memory_bytes}")
        _require(
            self.host_compression in ("none", "lossless", "int8"),
            f"host_compression must be none, lossless or int8, got {self.host_compression!r}",
        )
        _require(self.scrub_bytes_per_s >= 0, f"scrub_bytes_per_s must be >= 0, got {self.scrub_bytes_per_s}")
        _require(self.max_versions_kept >= 1, f"max_versions_kept must be >= 1, got {self.max_versions_kept}")
        _require(self.aging_steps >= 1, f"aging_steps must be >= 1, got {self.aging_steps}")
        _require(self.num_loader_threads >= 1, f"num_loader_threads must be >= 1, got {self.num_loader_threads}")
        _require(self.merged_memory_bytes > 0, f"merged_memory_bytes must be > 0, got {self.merged_memory_bytes}")
        _require(
            self.lora_extra_vocab_size >= 0,
            f"lora_extra_vocab_size must be >= 0, got {self.lora_extra_vocab_size}",
        )
        object.__setattr__(self, "long_lora_scaling_factors", tuple(self.long_lora_scaling_factors or ()))
        _require(
            all(1 < factor <= MAX_CONTEXT_FACTOR for factor in self.long_lora_scaling_factors),
            f"long_lora_scaling_factors must be > 1 and <= {MAX_CONTEXT_FACTOR}, got {self.long_lora_scaling_factors}",
        )

    def effective_dtype(self, adapter_dtype: str) -> str:
        """The dtype an adapter is stored in: its own under `auto`."""
        return adapter_dtype if self.lora_dtype == "auto" else self.lora_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an engine runs, whatever its model."""

    revision: str | None = setting(None, "hub revision of the model", group="Model files")
    tokenizer: str | None = setting(None, "directory of the tokenizer (default: the model's)")
    generation_config: str = setting(
        "auto",
        "source of sampling defaults: auto (generation_config.json of the model, or of an adapter for its requests), "
        "or vllm (none; vLLM's name)",
    )
    dtype: str = setting(
        "auto", "type of weights and activations: auto (the checkpoint's), float32, float16 or bfloat16"
    )
    device: str = setting(
        "auto",
        "torch device to run on, such as cpu or cuda; auto: a GPU of compute capability 8.0 or later where torch has "
        "one, else the CPU",
        group="Kernels",
    )
    lora_backend: str = setting("auto", "kernels: auto, native (CPU), triton (GPU), torch or reference")
    attention_backend: str = setting(
        "auto",
        "attention of prompts on a GPU: triton, flash_attn (FlashAttention 3, on capability 9.x), or auto: the faster "
        "one in a trial at start (vLLM's name)",
    )
    quantization: str | None = setting(
        None,
        "base weights in fewer bits: int8, int4 (native, triton and reference kernels; activations of native int4 in "
        "8 bits), int4-a16 (native; in 16) or fp8 (activations too; triton on a GPU of capability 8.9 or later, "
        "reference)",
    )
    packed_cache_dir: str | None = setting(
        None,
        "folder of packed base weights for fast starts (default: $LORAPLEX_CACHE or ~/.cache/loraplex; none: none)",
        group="Model files",
    )
    load_format: str = setting("auto", "source of base weights: auto (safetensors files) or dummy (seeded random ones)")
    seed: int = setting(0, "seed of dummy weights and of sampling in `loraplex generate`")
    max_model_len: int | None = setting(
        None,
        "longest prompt plus output in tokens (default: the model's own, as far as the KV cache holds it)",
        group="Scheduling",
    )
    max_num_seqs: int = setting(64, "most running requests")
    enforce_eager: bool = setting(False, "no CUDA graphs; a CPU has none (vLLM's name)")
    cuda_graph_sizes: tuple[int, ...] = setting(
        (),
        "batch size with a CUDA graph of its own; repeatable; one alone: 1, 2, 4, and multiples of 8 up to it (vLLM's "
        "name; default: --max-num-seqs)",
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step; longer prompts take several")
    max_waiting_requests: int = setting(4096, "most waiting requests; further ones are answered with 429")
    block_size: int = setting(16, "tokens of a KV block", group="Memory")
    kv_cache_memory_bytes: int = setting(DEFAULT_KV_CACHE_BYTES, "bytes for the KV cache")
    device_memory: int | str | None = setting(
        None,
        "memory that KV cache and adapters share by demand: bytes, 4GiB, or 40% of the machine's or the GPU's (default "
        "on a GPU: what --gpu-memory-utilization leaves; elsewhere none is shared)",
    )
    gpu_memory_utilization: float = setting(
        DEFAULT_GPU_UTILIZATION,
        "share of the GPU's memory for everything together, without --device-memory (vLLM's name)",
    )
    kv_cache_memory: int | str | None = setting(
        None,
        "kv_cache_memory_bytes as 4GiB, or as 40% of --device-memory (default with it: all but --adapter-floor)",
    )
    kv_cache_floor: int | str | None = setting(
        None,
        "part of --device-memory that adapters cannot take from the KV cache (default: a tenth, at least one request "
        "of --max-model-len)",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache: auto (the model's), float32, float16, bfloat16, or int8 (a float32 scale per token and "
        "head; on a CPU)",
    )
    look_ahead: bool | None = setting(
        None,
        "asynchronous scheduling: the launch of a step before the tokens of the last one are known (default: on a GPU)",
        group="Scheduling",
    )
    speculative: str | None = setting(
        None,
        "drafts of the next tokens, verified in one step with the same outputs: n-gram (what followed the last tokens "
        "earlier in the request's own text; native kernels; default: none)",
    )
    num_speculative_tokens: int = setting(8, "longest draft in tokens (vLLM's name); each request finds its own")
    enable_prefix_caching: bool = setting(
        True, "reuse of the KV of equal prefixes within one adapter and tenant", group="Memory"
    )
    monitor_interval_s: float = setting(30.0, "seconds between two checks of the memory's monitor", group="Memory care")
    high_pressure: float = setting(0.80, "used share of a tier above which long idle adapters leave it")
    critical_pressure: float = setting(0.95, "share of memory that cannot be freed above which low-memory mode begins")
    relaxed_pressure: float = setting(0.70, "share below which low-memory mode ends")
    long_idle_s: float = setting(300.0, "seconds without use after which an adapter counts as long idle")
    max_fragmentation: float = setting(
        0.25, "share of the adapters' chunks that compaction could free, above which it runs"
    )
    num_threads: int | None = setting(
        None, "CPU threads of the engine, or of each rank (default: cores of affinity and quota)", group="Kernels"
    )
    tensor_parallel_size: int = setting(
        1,
        "processes that share each layer of the model, on a CPU (vLLM's name); adapters of linears and norms, if not 1",
    )

    def __post_init__(self) -> None:
        _require(self.dtype in ("auto", *DTYPES), f"dtype must be auto or one of {DTYPES}, got {self.dtype!r}")
        _require(
            self.quantization in (None, *QUANTIZATIONS),
            f"quantization must be one of {QUANTIZATIONS} or unset, got {self.quantization!r}",
        )
        _require(
            self.attention_backend in ATTENTION_BACKENDS,
            f"attention_backend must be one of {ATTENTION_BACKENDS}, got {self.attention_backend!r}",
        )
        _require(
            self.generation_config in ("auto", "vllm"),
            f"generation_config must be auto or vllm, got {self.generation_config!r}",
        )
        _require(self.load_format in ("auto", "dummy"), f"load_format must be auto or dummy, got {self.load_format!r}")
        _require(
            self.kv_cache_dtype in ("auto", *KV_CACHE_DTYPES),
            f"kv_cache_dtype must be auto or one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}",
        )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting_requests",
            "block_size",
            "kv_cache_memory_bytes",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("device_memory", "kv_cache_memory", "kv_cache_floor"):
            _check_size(name, getattr(self, name))
        _require_one("kv_cache_memory", self.kv_cache_memory, self.kv_cache_memory_bytes, DEFAULT_KV_CACHE_BYTES)
        _require(
            self.kv_cache_floor is None or self.device_memory is not None,
            f"kv_cache_floor ({self.kv_cache_floor}) needs device_memory: without it the KV cache shares no memory",
        )
        _require(self.block_size % 8 == 0, f"block_size must be a multiple of 8, got {self.block_size}")
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len must be >= 2, got {self.max_model_len}",
        )
        _require(
            not self.cuda_graph_sizes or (self._may_be_gpu and not self.enforce_eager),
            f"cuda_graph_sizes {self.cuda_graph_sizes} need a CUDA device, not {self.device!r}, and no enforce_eager; "
            "leave them out",
        )
        _require(
            all(0 < size <= self.max_num_seqs for size in self.cuda_graph_sizes),
            f"cuda_graph_sizes must be 1..max_num_seqs ({self.max_num_seqs}), got {self.cuda_graph_sizes}",
        )
        self._check_shares()
        self._check_speculation()
        _require(self.num_threads is None or self.num_threads >= 1, f"num_threads must be >= 1, got {self.num_threads}")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= max_num_seqs ({self.max_num_seqs})",
        )

    @property
    def _may_be_gpu(self) -> bool:
        """Device `auto` is checked once more when it is known."""
        return self.device.startswith(("auto", "cuda"))

    def _check_speculation(self) -> None:
        _require(
            self.speculative in (None, *SPECULATIVE_METHODS),
            f"speculative must be one of {SPECULATIVE_METHODS} or unset, got {self.speculative!r}",
        )
        _require(
            1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS,
            f"num_speculative_tokens must be 1..{MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}",
        )

    def _check_shares(self) -> None:
        _require(self.monitor_interval_s > 0, f"monitor_interval_s must be > 0, got {self.monitor_interval_s}")
        _require(self.long_idle_s >= 0, f"long_idle_s must be >= 0, got {self.long_idle_s}")
        _require(
            0 < self.relaxed_pressure <= self.high_pressure <= self.critical_pressure <= 1,
            f"relaxed_pressure ({self.relaxed_pressure}) <= high_pressure ({self.high_pressure}) <= critical_pressure "
            f"({self.critical_pressure}) must hold, all of them shares up to 1",
        )
        _require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization must be > 0 and <= 1, got {self.gpu_memory_utilization}",
        )
        _require(
            self.gpu_memory_utilization == DEFAULT_GPU_UTILIZATION or self._may_be_gpu,
            f"gpu_memory_utilization {self.gpu_memory_utilization} needs a CUDA device, not {self.device!r}; give "
            "device_memory there",
        )
        _require(0 <= self.max_fragmentation <= 1, f"max_fragmentation must be 0..1, got {self.max_fragmentation}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineSettings):
    """All that an engine needs to start. `model` is a directory or a hub id; `lora` None turns adapters off.

    adapter_roots: directories that local adapters may be read from; None: any. merge_adapter: directory or hub id of an
    adapter to merge into the base weights, with its digest once that is known; there are no others then.
    """

    model: str
    lora: LoRAConfig | None = field(default_factory=LoRAConfig)
    adapter_roots: tuple[str, ...] | None = None
    merge_adapter: str | None = None
    merge_adapter_digest: str | None = None

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)  # super() does not work in a dataclass with slots
        _require(
            self.lora is None or self.lora.adapter_floor is None or self.device_memory is not None,
            "adapter_floor needs device_memory: without it adapters share no memory",
        )
        _require(bool(self.model), "model is empty; give a directory or a hub id")
        self._check_ranks()
        _require(
            self.lora is None or not self.lora.merge_dominant_adapter or self.quantization is None,
            f"merge_dominant_adapter needs the base weights as they are, not in quantization {self.quantization}: what "
            "was rounded to fewer bits cannot be read back; leave one of them out",
        )
        _require(
            self.lora is None or not self.lora.merge_dominant_adapter or self.speculative is None,
            f"merge_dominant_adapter with speculative {self.speculative} is not supported: whether a step is merged "
            "decides its last bits, so drafts would change what is drawn; leave one of them out",
        )
        if self.merge_adapter is not None:
            _require(bool(self.merge_adapter), "merge_adapter is empty; give a directory or a hub id")
            _require(
                self.lora is None,
                f"merge_adapter {self.merge_adapter!r} is merged into the base weights, and no other adapter is served "
                "beside it: give enable_lora=False too",
            )
            _require(self.load_format == "auto", "merge_adapter needs the weights of the model, not load_format dummy")

    def _check_ranks(self) -> None:
        """What ranks do not share yet."""
        size = self.tensor_parallel_size
        _require(type(size) is int and size >= 1, f"tensor_parallel_size must be >= 1, got {size!r}")
        _require(
            size > 1 or self.lora is None or not self.lora.fully_sharded_loras,
            "fully_sharded_loras needs a tensor_parallel_size of 2 or more; remove it",
        )
        _require(
            size == 1 or self.lora is None or not self.lora.merge_dominant_adapter,
            f"merge_dominant_adapter with tensor_parallel_size {size} is not supported: each rank would have to make "
            "its share of the copy beside its steps, and ranks follow steps alone; leave one out",
        )
        _require(
            self.lora is None or not self.lora.fully_sharded_loras or self.lora.host_compression != "int8",
            "host_compression int8 with fully_sharded_loras is not supported; take lossless",
        )

    def with_real_roots(self) -> EngineConfig:
        """Links in `adapter_roots` resolved, once for front and engine processes: a later link is not followed."""
        if self.adapter_roots is None:
            return self
        return replace(self, adapter_roots=tuple(str(Path(root).resolve()) for root in self.adapter_roots))

    @property
    def root_paths(self) -> tuple[Path, ...] | None:
        return None if self.adapter_roots is None else tuple(map(Path, self.adapter_roots))
