"""The nouns that move between the parts, and the protocols that keep the parts apart.

Nothing here imports torch: a scheduler, a server and a client share these without it.
"""

from __future__ import annotations

import enum
import math
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol

from loraplex.errors import InvalidRequestError, LoraplexError
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.sampling_params import SamplingParams as SamplingParams  # a noun like the others: imported from here

BASE_SLOT = -1
"""The lora_slot of rows without an adapter: they are in no segment and stay bit-identical."""

AdapterId = NewType("AdapterId", int)
"""Process-wide number of one loaded version of an adapter; never reused."""


# ---------------------------------------------------------------------------------------------- what a client asks


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """Which adapter a prompt goes through: a name, a number >= 1 of the caller's, and a directory or hub id.

    `adapter_id`, `name` and `path` are the same fields under their other names. `lora_local_path` is the old name of
    `lora_path`. `long_lora_max_len`: most tokens of the prompt and the output, within the adapter's context.
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
        if self.tensorizer_config_dict is not None:
            raise InvalidRequestError(
                f"LoRARequest {self.lora_name!r}: tensorizer_config_dict={self.tensorizer_config_dict!r} is not "
                "supported; remove it"
            )
        length = self.long_lora_max_len
        if length is not None and (type(length) is not int or length < 2):
            raise InvalidRequestError(
                f"LoRARequest {self.lora_name!r}: long_lora_max_len must be a whole number >= 2, got {length!r}"
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


MAX_MIX_ADAPTERS, MAX_MIX_WEIGHT = 8, 100.0

LoRAMix = tuple[tuple[LoRARequest, float], ...]
"""Adapters that one prompt goes through together, in this order, each with its weight."""


@dataclass(frozen=True, slots=True)
class AdapterMix:
    """The same by name: `y = base(x) + sum of weight * delta(x)`. Raises InvalidRequestError for what cannot be one."""

    parts: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= MAX_MIX_ADAPTERS:
            raise InvalidRequestError(f"a mix has {len(self.parts)} adapters; it takes 1 to {MAX_MIX_ADAPTERS}")
        names = [name for name, _ in self.parts]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequestError(f"a mix has adapter {twice!r} twice; add its weights up")
        for name, weight in self.parts:
            if not (math.isfinite(weight) and abs(weight) <= MAX_MIX_WEIGHT):
                raise InvalidRequestError(
                    f"a mix gives adapter {name!r} the weight {weight!r}; weights are within +-{MAX_MIX_WEIGHT:g}"
                )

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(weight for _, weight in self.parts)

    def __str__(self) -> str:
        """As `model` of a request has it."""
        return ",".join(f"{name}:{weight:g}" for name, weight in self.parts)


AdapterChoice = str | AdapterMix | None
"""What a request goes through, by name; None is the base model."""


@dataclass(frozen=True, slots=True)
class MixPart:
    """One adapter of a mix as the engine knows it."""

    adapter_id: int
    adapter_digest: str
    weight: float


def mix_digest(mix: Sequence[MixPart]) -> str:
    """What KV of a mix is kept under: contents, their order and weights count, names do not."""
    return "+".join(f"{float(part.weight).hex()}*{part.adapter_digest}" for part in mix)


def contents_of(adapter_digest: str) -> frozenset[str]:
    """The digests of the adapters whose `adapter_digest` it is, of one or of a mix."""
    return frozenset(part.rpartition("*")[2] for part in adapter_digest.split("+"))


def has_content(adapter_digest: str, content: str) -> bool:
    """Whether `content` is an adapter's digest that `adapter_digest`, of an adapter or a mix, is or contains."""
    return content in contents_of(adapter_digest)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate, as the engine gets it: token ids in, one completion out (n > 1 is several of these).

    `adapter_id` is None for the base model. Of a mix it is the first one's, and `adapter_digest` is `mix_digest`.
    `cache_salt` separates the KV prefixes of tenants. `seed` is always set. Tokens before `adapter_from` are base rows.
    `max_model_len`: of a request through an adapter with a longer context, else 0.

    Of one that began in another engine: `output_token_ids` is what that one drew, and `num_cached_tokens` what it had
    cached of the prompt, None where the prompt was not begun.
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
    mix: tuple[MixPart, ...] = ()
    adapter_from: int = 0
    max_model_len: int = 0
    output_token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None
    claim: Claim = NO_CLAIM

    @property
    def adapter_ids(self) -> tuple[int, ...]:
        """Of all adapters that it goes through; () for the base model."""
        if self.mix:
            return tuple(part.adapter_id for part in self.mix)
        return () if self.adapter_id is None else (self.adapter_id,)

    def check(self, max_model_len: int, longest: int = 0) -> None:
        """Raises InvalidRequestError for what no front sends: kernels read it without another look.

        longest: the longest sequence that an adapter may have.
        """
        if self.max_model_len:
            longest = 0 if self.adapter_id is None else longest
            if not 0 < self.max_model_len <= longest:
                text = f"a context of {self.max_model_len} tokens is longer than the longest here, {longest}"
                raise InvalidRequestError(text, param="prompt")
            max_model_len = self.max_model_len
        num_tokens = len(self.prompt_token_ids)
        if not 0 < num_tokens < max_model_len or self.max_tokens < 1:
            sizes = f"{num_tokens} prompt tokens and max_tokens {self.max_tokens}"
            raise InvalidRequestError(f"a request of {sizes} does not fit in {max_model_len} tokens", param="prompt")
        num_outputs = len(self.output_token_ids)
        if num_outputs and (num_outputs >= self.max_tokens or num_tokens + num_outputs >= max_model_len):
            raise InvalidRequestError(f"a request with {num_outputs} tokens has ended: it cannot go on here")
        if self.num_cached_tokens is not None and not 0 <= self.num_cached_tokens <= num_tokens:
            raise InvalidRequestError(f"{self.num_cached_tokens} cached tokens of a prompt of {num_tokens}")
        self.claim.check()
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidRequestError("a seed does not fit in 64 bits", param="seed")
        if self.adapter_from and (self.adapter_from < 0 or self.adapter_id is None or self.mix):
            raise InvalidRequestError(f"adapter_from is {self.adapter_from}, and no single adapter begins there")
        if self.mix:
            AdapterMix(tuple((str(part.adapter_id), part.weight) for part in self.mix))
            if self.adapter_id != self.mix[0].adapter_id or self.adapter_digest != mix_digest(self.mix):
                raise InvalidRequestError("adapter_id and adapter_digest are not those of the mix")

    def check_prompt(self, vocab_size: int) -> None:
        """The same for its token ids: once for all completions of a long prompt that have no output yet."""
        for token_ids in filter(None, (self.prompt_token_ids, self.output_token_ids)):
            if min(token_ids) < 0 or max(token_ids) >= vocab_size:
                raise InvalidRequestError(f"a token id is not in the vocabulary, 0..{vocab_size - 1}", param="prompt")

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


TokenLogprobs = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one engine step adds to one request. `finish_reason` is set on the last one.

    `logprobs` is parallel to `token_ids`; `prompt_logprobs` (for positions 1.. of the prompt) comes with the first
    token, or in parts: the last one with it, those before without a token. `error` is `LoraplexError.to_payload()` when
    finish_reason is `error`. scheduled_s: Unix time when it began to run; 0: in another engine.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_cached_tokens: int = 0
    error: dict[str, Any] | None = None
    scheduled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the clock of `time.time()`; None until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Until it is finished a `GrowingCompletion`, and the sequences a `Prefix` of text/output_collections.py."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | LoRAMix | None = None

    @property
    def num_chars(self) -> int:
        return len(self.text)

    def text_from(self, begin: int) -> str:
        return self.text[begin:]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What `LLM.generate` returns per prompt, `LLM.step` per request, and `AsyncEngine.generate` yields; cumulative.
    `error` is why a request failed, from `LLM.step` alone: the others raise it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    lora_request: LoRARequest | LoRAMix | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    error: LoraplexError | None = None


# ------------------------------------------------------------------------------------------------ what a layer offers


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's share of a layer in tensor parallelism; (0, 1) is the whole layer."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"shard rank {self.rank} of {self.size}"


class ShardKind(enum.StrEnum):
    """How a linear is split: `column`: B's rows; `qkv`: by heads (k, v replicated when scarce); `row`: A's columns.

    The others are no linears between two layers: `embedding` (in_features is the vocabulary), `head` (out_features
    is), `norm` (one vector).
    """

    REPLICATED = "replicated"
    COLUMN = "column"
    QKV = "qkv"
    ROW = "row"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One module of the checkpoint inside a (fused) linear: PEFT name and output columns [out_offset, +out_features).

    Sizes are this shard's; `full_out_features` is the checkpoint's. parts: (full, this shard's) outputs of each linear
    of a module that the checkpoint has as one (qkv_proj of phi3), under one another; empty: it is one linear.
    """

    module_name: str
    out_offset: int
    out_features: int
    full_out_features: int
    has_bias: bool = False
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """What a linear publishes so that adapters can act on it: `y[:, slice] += weight * (scale * (x A^T) B^T + bias)`.

    name: dotted name of the (fused) linear, e.g. `model.layers.0.self_attn.qkv_proj`; layer: index of the decoder
    layer; in_features: this shard's inputs (`full_in_features` the checkpoint's); shard and kind: how A and B are
    sliced. is_tied: of a head, whether its weight is the embedding's. is_fully_sharded: A and B are cut finer than the
    linear (loraplex/distributed.py). expert, parameter: which of how many, and peft's name of its weight, or of all
    experts' (adapters/experts.py); on what has one of these no other kind acts than LoRA, and no own weight.
    takes_turns: outputs of the slices take turns in that parameter. swaps_factors: its B and A are those of its
    transpose, A and B here.
    """

    name: str
    layer: int
    in_features: int
    full_in_features: int
    slices: tuple[LoraSlice, ...]
    kind: ShardKind = ShardKind.REPLICATED
    shard: Shard = Shard()
    is_tied: bool = False
    is_fully_sharded: bool = field(default=False, repr=False)
    expert: tuple[int, int] | None = field(default=None, repr=False)
    parameter: str = field(default="", repr=False)
    takes_turns: bool = field(default=False, repr=False)
    swaps_factors: bool = field(default=False, repr=False)

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear of a decoder layer, and neither norm nor an end of the vocabulary."""
        return self.kind not in (ShardKind.EMBEDDING, ShardKind.HEAD, ShardKind.NORM)


# ---------------------------------------------------------------------------------------------------- adapters, weights


class Tier(enum.StrEnum):
    """Where an adapter's weights are, nearest the compute first. A name resolves in every tier."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One version of an adapter as the engine knows it. `path` is a local directory (already fetched).

    `nbytes` is the size of its tensors in the file's dtype; `adapter_digest` identifies the content (docs/adapters.md).
    """

    adapter_id: int
    adapter_name: str
    adapter_version: int
    adapter_digest: str
    path: str
    nbytes: int
    max_rank: int

    @property
    def tenant(self) -> str:
        """Before the slash of its name; empty without one."""
        head, slash, _ = self.adapter_name.partition("/")
        return head if slash else ""


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


STRETCHED_ROPE_TYPES = ("default", "linear")
"""Those that an adapter's factor replaces."""


@dataclass(frozen=True, slots=True)
class LongContexts:
    """What adapters may make of the base model's positions.

    rope_type, rope_factor: of the base; num_positions: before any factor. scaling_factors: those adapters may have.
    """

    rope_type: str
    num_positions: int
    rope_factor: float = 1.0
    scaling_factors: tuple[float, ...] = ()

    @property
    def longest(self) -> int:
        """0 where no adapter may stretch them."""
        return int(self.num_positions * max(self.scaling_factors, default=0))


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front must know of a started engine to check requests and adapters. Sizes are bytes, lengths tokens.

    backend_description: which kernels run, and why no faster ones; form: the family, how weights and KV cache are kept.
    choices: what the engine chose where a setting left it open, a line each. long_contexts: None without LoRA.
    """

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
    kv_cache_dtype: str
    backend_description: str = ""
    form: str = ""
    device: str = "cpu"
    choices: tuple[str, ...] = ()
    long_contexts: LongContexts | None = None


# ------------------------------------------------------------------------------- what the scheduler sees of the memory


class WaitsFor(enum.StrEnum):
    LOAD = "load"
    ROOM = "room"


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """`lora_slot` when a reference was taken, else what the adapter waits for (no reference is held then).

    vocab_size: where the adapter's vocabulary ends; None where the residency cannot know.
    mix_slots: of all adapters of a mix, in their order.
    """

    lora_slot: int | None
    waits_for: WaitsFor | None = None
    vocab_size: int | None = None
    mix_slots: tuple[int, ...] = ()


class ResidencyView(Protocol):
    """Adapter residency as the scheduler sees it. No call blocks."""

    def try_acquire(self, adapter_id: int) -> AcquireResult:
        """Take a reference for one running request, promoting if that needs no waiting; starts a load otherwise.

        Raises AdapterError when this adapter cannot be served (unknown, content changed, source gone, larger than what
        is unpinned).
        """
        ...

    def try_acquire_mix(self, mix: Sequence[MixPart]) -> AcquireResult:
        """`try_acquire` of all adapters of a mix: a reference to each, or to none while one of them has to wait.

        Raises AdapterError for adapters that have no mix, or do not fit on the device together, as well.
        """
        ...

    def release(self, adapter_id: int) -> None: ...

    def prefetch(self, adapter_id: int) -> None: ...

    def victims_for(self, adapter_id: int, in_use: Sequence[int]) -> Sequence[int]:
        """The first unpinned ones of the adapters `in_use` whose release makes room for `adapter_id`, or ()."""
        ...

    def victims_for_mix(self, adapter_ids: Sequence[int], in_use: Sequence[int]) -> Sequence[int]:
        """`victims_for` the first adapter of a mix that lacks room beside the others of it."""
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
        """Open a block table for the request, share cached full blocks of its prefix; returns the number of its tokens.

        At least the last token is never counted as cached, so that the step has logits to sample from.
        """
        ...

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Make the request's table cover `num_tokens` tokens in all; False, and no change, when blocks run out."""
        ...

    def block_table(self, request_id: str) -> Sequence[int]: ...

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of the first `num_computed` tokens is written: full blocks may now be shared."""
        ...

    def withdraw(self, request_id: str) -> None:
        """Share none of the request's blocks with later ones: what it computed is odd."""
        ...

    def drop_digest(self, adapter_digest: str) -> None:
        """Forget the KV of an adapter's content. Running requests keep their own blocks."""
        ...

    def free(self, request_id: str) -> None:
        """Return the request's blocks; shared and cached ones stay usable."""
        ...
