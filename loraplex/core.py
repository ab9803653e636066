"""The nouns that move between the parts, and the protocols that keep the parts apart.

Nothing here imports torch: a scheduler, a server and a client share these without it.
"""

from __future__ import annotations

import enum
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NewType, Protocol

from loraplex.errors import InvalidRequestError

BASE_SLOT = -1
"""The lora_slot of rows without an adapter: they are in no segment and stay bit-identical."""

AdapterId = NewType("AdapterId", int)
"""Process-wide number of one loaded version of an adapter; never reused."""

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_COMPLETIONS = 128


# ---------------------------------------------------------------------------------------------- what a client asks


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Names, defaults and meaning are vLLM's; see docs/names.md for differences.

    logits -> penalties -> logit_bias -> min_tokens -> temperature -> top_k -> top_p -> min_p -> one draw. `temperature=0` is greedy.
    `seed` makes a request's draws independent of its batch: the n-th child of a request draws with `seed + n`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", {int(k): float(v) for k, v in (self.logit_bias or {}).items()})
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        reasons = self._reasons()
        if reasons:
            raise InvalidRequestError("sampling parameters are refused: " + "; ".join(reasons))

    def _reasons(self) -> list[str]:
        checks = [
            (1 <= self.n <= MAX_COMPLETIONS, f"n must be 1..{MAX_COMPLETIONS}, got {self.n}"),
            (0 <= self.temperature < float("inf"), f"temperature must be finite and >= 0, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.top_k >= 0, f"top_k must be >= 1, or 0 or -1 for all tokens, got {self.top_k}"),
            (0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, f"seed must fit in 64 bits, got {self.seed}"),
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be >= 1, got {self.max_tokens}"),
            (self.min_tokens >= 0, f"min_tokens must be >= 0, got {self.min_tokens}"),
            (
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})",
            ),
            (len(self.stop) <= MAX_STOP_STRINGS, f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS}"),
            (all(self.stop), "stop has an empty string"),
            (not self.stop or self.detokenize, "stop strings need detokenize=True"),
            (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"logprobs must be 0..{MAX_LOGPROBS}"),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"prompt_logprobs must be 0..{MAX_LOGPROBS}",
            ),
            (-2 <= self.presence_penalty <= 2, f"presence_penalty must be in [-2, 2], got {self.presence_penalty}"),
            (-2 <= self.frequency_penalty <= 2, f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}"),
            (
                0 < self.repetition_penalty <= 10,
                f"repetition_penalty must be in (0, 10], got {self.repetition_penalty}",
            ),
            (len(self.logit_bias) <= MAX_LOGIT_BIAS, f"logit_bias has more than {MAX_LOGIT_BIAS} entries"),
            (all(-100 <= v <= 100 for v in self.logit_bias.values()), "logit_bias values must be in [-100, 100]"),
        ]
        return [reason for is_fine, reason in checks if not is_fine]

    def child(self, index: int) -> SamplingParams:
        """The parameters of the index-th of `n` completions: n = 1 and a seed of its own."""
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return replace(self, n=1, seed=seed)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt goes through: a name, a number >= 1 of the caller's, and where it is (a directory or a hub id).

    `adapter_id`, `name` and `path` are the same fields under their other names. `lora_local_path` is the old name of `lora_path`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None
    tensorizer_config_dict: Mapping[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_local_path is not None:
            warnings.warn("lora_local_path is deprecated: use lora_path", DeprecationWarning, stacklevel=3)
            if not self.lora_path:
                object.__setattr__(self, "lora_path", self.lora_local_path)
        for name in ("long_lora_max_len", "tensorizer_config_dict"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(
                    f"LoRARequest {self.lora_name!r}: {name}={getattr(self, name)!r} is not supported; remove it"
                )
        if not self.lora_name:
            raise InvalidRequestError("LoRARequest: lora_name is empty; give the adapter a name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError(
                f"LoRARequest {self.lora_name!r}: lora_int_id must be a whole number >= 1, got {self.lora_int_id!r}"
            )
        if not self.lora_path:
            raise InvalidRequestError(
                f"LoRARequest {self.lora_name!r}: lora_path is empty; give a directory or a hub id"
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as the engine gets it: token ids in, one completion out (n > 1 is several of these).

    `adapter_id` is None for the base model. `cache_salt` separates the KV prefixes of tenants. `seed` is always set.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    adapter_id: int | None = None
    adapter_digest: str = ""
    cache_salt: str = ""
    arrival_s: float = 0.0

    @staticmethod
    def random_seed() -> int:
        return secrets.randbits(63)


# --------------------------------------------------------------------------------------------- what a client gets


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position: natural log of its probability, its rank (1 is the likeliest), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one engine step adds to one request. `finish_reason` is set on the last one.

    `logprobs` is parallel to `token_ids`; `prompt_logprobs` (for positions 1.. of the prompt) comes once, with the first token.
    `error` is `LoraplexError.to_payload()` when finish_reason is `error`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the clock of `time.time()`; None until they happen."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns per prompt and `AsyncEngine.generate` yields: cumulative text and tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    lora_request: LoRARequest | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0


# ------------------------------------------------------------------------------------------------ what a layer offers


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's share of a layer in tensor parallelism; (0, 1) is the whole layer."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"shard rank {self.rank} of {self.size}"


class ShardKind(enum.StrEnum):
    """How a linear is split: `column` shards B's rows, `qkv` by heads (k, v replicated when scarce), `row` shards A's columns."""

    REPLICATED = "replicated"
    COLUMN = "column"
    QKV = "qkv"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One module of the checkpoint inside a (fused) linear: its PEFT name and its output columns [out_offset, +out_features).

    Sizes are this shard's; `full_out_features` is the checkpoint's.
    """

    module_name: str
    out_offset: int
    out_features: int
    full_out_features: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """What a linear publishes so that adapters can act on it: `y[:, slice] += weight * (scale * (x A^T) B^T + bias)`.

    name: dotted name of the (fused) linear, e.g. `model.layers.0.self_attn.qkv_proj`; layer: index of the decoder layer;
    in_features: this shard's inputs (`full_in_features` the checkpoint's); shard and kind: how A and B are sliced.
    """

    name: str
    layer: int
    in_features: int
    full_in_features: int
    slices: tuple[LoraSlice, ...]
    kind: ShardKind = ShardKind.REPLICATED
    shard: Shard = Shard()


# ---------------------------------------------------------------------------------------------------- adapters, weights


class Tier(enum.StrEnum):
    """Where an adapter's weights are, nearest the compute first. A name resolves in every tier."""

    DEVICE = "device"
    HOST = "host"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One version of an adapter as the engine knows it. `path` is a local directory (already fetched).

    `nbytes` is the size of its tensors in the file's dtype; `digest` identifies the content (docs/adapters.md).
    """

    adapter_id: int
    adapter_name: str
    adapter_version: int
    adapter_digest: str
    path: str
    nbytes: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class AdapterResidency:
    """Where one adapter is now. `lora_slot` is None off the device; `num_running` counts running requests."""

    adapter_id: int
    tier: Tier
    lora_slot: int | None
    nbytes: int
    num_running: int
    is_pinned: bool
    is_loading: bool
    last_used_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AddOutcome:
    """Result of adding an adapter to the store: whether something changed and which names were evicted to make room."""

    is_new: bool
    evicted: tuple[str, ...] = ()


class AdapterStore(Protocol):
    """An engine as the registry sees it. Each call may block until done and is made under no lock; each raises AdapterError."""

    def add_adapter(self, spec: AdapterSpec) -> AddOutcome: ...
    def drop_adapter(self, adapter_id: int) -> None: ...
    def promote_adapter(self, adapter_id: int) -> AddOutcome: ...
    def evict_adapter(self, adapter_id: int) -> bool: ...
    def pin_adapter(self, adapter_id: int) -> bool: ...
    def unpin_adapter(self, adapter_id: int) -> bool: ...
    def abort_adapter(self, adapter_id: int) -> int: ...
    def list_adapters(self) -> Sequence[AdapterResidency]: ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front must know of a started engine to check requests and adapters. Sizes are bytes, lengths tokens."""

    model_path: str
    architecture: str
    dtype: str
    backend: str
    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    block_size: int
    adapter_memory_bytes: int
    targets: tuple[LoraTarget, ...]


# ------------------------------------------------------------------------------- what the scheduler sees of the memory


class WaitsFor(enum.StrEnum):
    LOAD = "load"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """`lora_slot` when a reference was taken, else what the adapter waits for (no reference is held then)."""

    lora_slot: int | None
    waits_for: WaitsFor | None = None


class ResidencyView(Protocol):
    """Adapter residency as the scheduler sees it. No call blocks."""

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        """Take a reference for one running request, promoting if that needs no waiting; starts a load otherwise.

        Raises AdapterError when this adapter cannot be served (unknown, content changed, source gone, larger than what is unpinned).
        """
        ...

    def release(self, adapter_id: int) -> None: ...

    def prefetch(self, adapter_id: int) -> None: ...

    def victims_for(self, adapter_id: int) -> Sequence[int]:
        """Unpinned adapters in use, least recently used first, whose release would make room for `adapter_id`."""
        ...


class BlockAllocator(Protocol):
    """KV blocks as the scheduler sees them. No call blocks."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int: ...

    def start(self, request: Request, token_ids: Sequence[int]) -> int:
        """Open a block table for the request, share cached full blocks of its prefix; returns the number of cached tokens.

        At least the last token is never counted as cached, so that the step has logits to sample from.
        """
        ...

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Make the request's table cover `num_tokens` tokens in all; False (and nothing changed) when blocks run out."""
        ...

    def block_table(self, request_id: str) -> Sequence[int]: ...

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is written: full blocks may now be shared."""
        ...

    def free(self, request_id: str) -> None:
        """Return the request's blocks; shared and cached ones stay usable."""
        ...
