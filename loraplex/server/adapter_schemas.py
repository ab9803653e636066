"""What clients may send to the adapter routes, and what an adapter looks like in their answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import Field, model_validator
from pydantic.json_schema import JsonSchemaValue

from loraplex.adapters.merging.wish import MAX_MERGED, MAX_SVD_RANK, Combination, MergeWish
from loraplex.adapters.registry import (
    AdapterInfo,
    ContentDigests,
    LoadResult,
    LoadStatus,
    LoRARef,
    SwitchResult,
    UnloadResult,
    VersionInfo,
    text_digest,
)
from loraplex.frontend.making import Exported, JobState, MergeJob
from loraplex.server.api_error import ApiError
from loraplex.server.request_model import RequestModel, any_of, has, lacks
from loraplex.tenants.records import EVERYTHING, Scope

MAX_PATH_CHARS = 4096
TEXT = {"type": "string", "minLength": 1}
NUMBER = {"type": "integer"}

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Of an adapter or a tenant. Not every one is looked at again before a database is asked, and PostgreSQL has no NUL."""

Path = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
Deadline = Annotated[float, Field(ge=0, le=86400)]


class LoadLoraAdapterRequest(RequestModel):
    """vLLM's `POST /v1/load_lora_adapter`. Both strings may be empty here: the route has its own words for that."""

    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_path: Annotated[str, Field(max_length=MAX_PATH_CHARS)] = ""
    load_inplace: bool = False

    aliases: ClassVar[Mapping[str, str]] = {"name": "lora_name", "path": "lora_path"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False,)}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (has(lora_name=TEXT, lora_path=TEXT),)


class UnloadLoraAdapterRequest(RequestModel):
    """vLLM's `POST /v1/unload_lora_adapter`. `lora_int_id`, if sent, must be the adapter's."""

    lora_name: Annotated[str, Field(max_length=256)] = ""
    lora_int_id: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None

    aliases: ClassVar[Mapping[str, str]] = {"name": "lora_name"}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (has(lora_name=TEXT),)


class LoadAdapterRequest(RequestModel):
    """`POST /v1/adapters`."""

    name: Name
    path: Path
    lora_int_id: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    load_inplace: bool = False
    is_pinned: bool = False

    aliases: ClassVar[Mapping[str, str]] = {"lora_name": "name", "lora_path": "path", "pinned": "is_pinned"}


class PutAdapterRequest(RequestModel):
    """`PUT /v1/adapters/{name}`: what the adapter is to be. Fields that are not sent stay as they are.

    path: load from there, unless path and content are what answers already; digest: which content has to be there, and
    text_digest: with which text of its own ("": none); alias_of: what answers for the name instead, as after a switch,
    from the first moment on; version: let that kept version answer.
    """

    path: Path | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    text_digest: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] | None = None
    alias_of: Name | None = None
    version: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    is_pinned: bool | None = None
    lora_int_id: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None

    aliases: ClassVar[Mapping[str, str]] = {"lora_path": "path"}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(lacks("path"), lacks("version")),
        any_of(lacks("digest"), has(path=TEXT)),
        any_of(lacks("text_digest"), has(digest=TEXT)),
        any_of(lacks("alias_of"), has(path=TEXT)),
        any_of(lacks("alias_of"), lacks("is_pinned")),
        any_of(has(path=TEXT), has(version=NUMBER), has(is_pinned={"type": "boolean"}), has(lora_int_id=NUMBER)),
    )

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        if self.path is not None and self.version is not None:
            raise ApiError("path and version exclude each other: send one of them", param="version")
        if self.digest is not None and self.path is None:
            raise ApiError("digest is of the content of a path: send path too", param="digest")
        if self.text_digest is not None and self.digest is None:
            raise ApiError("text_digest is of the content of a digest: send digest too", param="text_digest")
        if self.alias_of is not None and (self.path is None or self.is_pinned):
            raise ApiError("alias_of is of a load without a pin: send path, and no is_pinned", param="alias_of")
        if not self.model_fields_set:
            raise ApiError("nothing is to be changed: send path, version, is_pinned or lora_int_id", param="path")
        return self

    @property
    def digests(self) -> ContentDigests | None:
        return None if self.digest is None else ContentDigests(self.digest, self.text_digest)


class SwitchAdapterRequest(RequestModel):
    """`POST /v1/adapters/switch`. `new_path` is needed when `new` is not loaded yet."""

    old: Name
    new: Name
    new_path: Path | None = None
    deadline_s: Deadline | None = None
    force: bool = False

    aliases: ClassVar[Mapping[str, str]] = {"old_name": "old", "new_name": "new", "path": "new_path"}


class WeightedAdapter(RequestModel):
    """One of the adapters of a merge."""

    name: Name
    weight: float


class MergeAdaptersRequest(RequestModel):
    """`POST /v1/adapters/merge`: the fields of peft's `add_weighted_adapter`, and the new adapter's name."""

    name: Name
    adapters: Annotated[tuple[WeightedAdapter, ...], Field(min_length=1, max_length=MAX_MERGED, strict=False)]
    combination_type: Annotated[str, Field(json_schema_extra={"enum": [*Combination]})] | None = None
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    majority_sign_method: Annotated[str, Field(json_schema_extra={"enum": ["total", "frequency"]})] | None = None
    svd_rank: Annotated[int, Field(ge=1, le=MAX_SVD_RANK)] | None = None
    svd_clamp: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    is_pinned: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"svd_full_matrices": (True, False)}

    @property
    def wish(self) -> MergeWish:
        """Raises InvalidRequestError for fields that do not go together."""
        return MergeWish(
            adapters=tuple((each.name, each.weight) for each in self.adapters),
            combination_type=self.combination_type,
            density=self.density,
            majority_sign_method=self.majority_sign_method,
            svd_rank=self.svd_rank,
            svd_clamp=self.svd_clamp,
            seed=self.seed,
        )


class CloneAdapterRequest(RequestModel):
    """`POST /v1/adapters/{name}/clone`: the name of the copy."""

    name: Name
    lora_int_id: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    is_pinned: bool = False

    aliases: ClassVar[Mapping[str, str]] = {"lora_name": "name", "pinned": "is_pinned"}


class VersionCard(msgspec.Struct, frozen=True):
    """The version that `name@version` addresses. `state`: current, kept (for rollback) or draining (to its last
    request)."""

    version: int
    digest: str
    path: str
    rank: int
    state: str
    tier: str
    references: int
    loaded_time: float

    @classmethod
    def of(cls, info: VersionInfo) -> VersionCard:
        ref = info.ref
        return cls(
            version=ref.adapter_version,
            digest=ref.adapter_digest,
            path=ref.lora_path,
            rank=ref.max_rank,
            state=info.state.value,
            tier=info.tier.value,
            references=info.num_references,
            loaded_time=info.loaded_time,
        )


class AdapterCard(msgspec.Struct, frozen=True):
    """One adapter. `bytes` are those of its weights where they are now; times are Unix seconds.

    references: requests that run on this version; draining: other versions that requests still run on;
    text_digest: of what it brings for text, "" where it brings nothing;
    alias_of: the adapter that answers for this name since a switch; loads, requests: of all versions; brings: what its
    requests are read and written with beside the base's (tokenizer, chat_template, generation_config); max_model_len,
    rope_factor: the context that it has, and what it stretches the base's positions by, null where it has the base's;
    versions: the newest first.
    """

    name: str
    version: int
    digest: str
    text_digest: str
    path: str
    origin: str
    rank: int
    lora_int_id: int | None
    tier: str
    bytes: int
    lora_slot: int | None
    is_pinned: bool
    is_loading: bool
    references: int
    draining: int
    loaded_time: float
    last_used_time: float
    alias_of: str | None
    aliases: tuple[str, ...]
    error: str | None
    loads: int
    requests: int
    brings: tuple[str, ...]
    max_model_len: int | None
    rope_factor: float | None
    versions: tuple[VersionCard, ...]

    @classmethod
    def of(cls, info: AdapterInfo) -> AdapterCard:
        ref = info.ref
        return cls(
            name=ref.adapter_name,
            version=ref.adapter_version,
            digest=ref.adapter_digest,
            text_digest=text_digest(ref.text),
            path=ref.lora_path,
            origin=info.origin,
            rank=ref.max_rank,
            lora_int_id=ref.lora_int_id,
            tier=info.tier.value,
            bytes=info.nbytes,
            lora_slot=info.lora_slot,
            is_pinned=info.is_pinned,
            is_loading=info.is_loading,
            references=info.num_references,
            draining=info.num_draining,
            loaded_time=info.loaded_time,
            last_used_time=info.last_used_time,
            alias_of=info.alias_of,
            aliases=info.aliases,
            error=info.error,
            loads=info.num_loads,
            requests=info.num_requests,
            brings=() if ref.text is None else ref.text.brings,
            max_model_len=None if ref.text is None else ref.text.max_model_len,
            rope_factor=None if ref.text is None else ref.text.rope_factor,
            versions=tuple(map(VersionCard.of, info.versions)),
        )


class BriefVersionCard(msgspec.Struct, frozen=True):
    """As VersionCard, for a key that is not an operator's."""

    version: int
    digest: str
    rank: int
    state: str


class BriefAdapterCard(msgspec.Struct, frozen=True):
    """As AdapterCard, for a key that is not an operator's: what answers, not where it lies or how others use it."""

    name: str
    version: int
    digest: str
    rank: int
    lora_int_id: int | None
    alias_of: str | None
    aliases: tuple[str, ...]
    brings: tuple[str, ...]
    max_model_len: int | None
    rope_factor: float | None
    versions: tuple[BriefVersionCard, ...]

    @classmethod
    def of(cls, info: AdapterInfo, scope: Scope = EVERYTHING) -> BriefAdapterCard:
        """scope: of the caller, who sees no other names."""
        card = AdapterCard.of(info)
        versions = tuple(BriefVersionCard(each.version, each.digest, each.rank, each.state) for each in card.versions)
        return cls(
            name=scope.shown(card.name),
            version=card.version,
            digest=card.digest,
            rank=card.rank,
            lora_int_id=card.lora_int_id,
            alias_of=next(iter(scope.visible(filter(None, [card.alias_of]))), None),
            aliases=scope.visible(card.aliases),
            brings=card.brings,
            max_model_len=card.max_model_len,
            rope_factor=card.rope_factor,
            versions=versions,
        )


class SourceAdapterCard(msgspec.Struct, frozen=True):
    """An adapter that a source of the operator has. `name`: what a request says in `model` to have it loaded."""

    name: str
    source: str


class LoadReply(msgspec.Struct, frozen=True):
    """`status`: loaded, already_loaded, loaded_with_eviction (of `evicted`), reloaded, or moved (to a kept version).

    previous_version: the name's own one before a reload or a move; null when another adapter answered until a move.
    """

    status: str
    name: str
    version: int
    digest: str
    rank: int
    lora_int_id: int | None
    evicted: tuple[str, ...]
    load_s: float
    previous_version: int | None

    @classmethod
    def of(cls, result: LoadResult, scope: Scope = EVERYTHING) -> LoadReply:
        """scope: of the caller, who learns of no other adapter that was evicted, or that answers since a switch."""
        ref, evicted = result.ref, scope.visible(result.evicted)
        is_silent = result.status is LoadStatus.LOADED_WITH_EVICTION and not evicted
        is_seen = scope.may_see(ref.adapter_name)
        return cls(
            status=(LoadStatus.LOADED if is_silent else result.status).value,
            name=scope.shown_or_not(ref.adapter_name),
            version=ref.adapter_version if is_seen else 0,
            digest=ref.adapter_digest if is_seen else "",
            rank=ref.max_rank if is_seen else 0,
            lora_int_id=ref.lora_int_id if is_seen else None,
            evicted=evicted,
            load_s=result.load_s,
            previous_version=result.previous_version,
        )


class UnloadReply(msgspec.Struct, frozen=True):
    """The name no longer resolves. `is_drained` false: `references` requests still run; weights go with the last."""

    name: str
    version: int | None
    is_drained: bool
    references: int
    aborted: int

    @classmethod
    def of(cls, result: UnloadResult, scope: Scope = EVERYTHING) -> UnloadReply:
        version = None if result.ref is None else result.ref.adapter_version
        name = scope.shown(result.adapter_name)
        return cls(name, version, result.is_drained, result.num_references, result.num_aborted)


class SwitchReply(msgspec.Struct, frozen=True):
    """New requests for `old` go to `new`.

    is_old_active: `old` was on the device or in use; evict_s: null while `references` requests still run on it.
    """

    old: str
    new: str
    version: int
    is_old_active: bool
    load_s: float
    promote_s: float
    evict_s: float | None
    evicted: tuple[str, ...]
    references: int
    aborted: int

    @classmethod
    def of(cls, result: SwitchResult, scope: Scope = EVERYTHING) -> SwitchReply:
        ref: LoRARef = result.ref
        return cls(
            old=scope.shown(result.old),
            new=scope.shown_or_not(ref.adapter_name),
            version=ref.adapter_version,
            is_old_active=result.is_old_active,
            load_s=result.load_s,
            promote_s=result.promote_s,
            evict_s=result.evict_s,
            evicted=scope.visible(result.evicted),
            references=result.num_references,
            aborted=result.num_aborted,
        )


class MergeCard(msgspec.Struct, frozen=True):
    """A merge. state: waiting, running, done, failed or cancelled; progress: 0 to 1; bytes: of the result, at most.

    adapter: what was loaded, when it is done; error: why not, when it failed.
    """

    id: str
    name: str
    state: str
    progress: float
    bytes: int
    combination_type: str
    adapters: dict[str, float]
    created_time: float
    error: str | None
    adapter: LoadReply | None

    @classmethod
    def of(cls, job: MergeJob) -> MergeCard:
        return cls(
            id=job.job_id,
            name=job.name,
            state=job.state.value,
            progress=1.0 if job.state is JobState.DONE else job.done / (job.total + 1),
            bytes=job.nbytes,
            combination_type=job.wish.combination.value,
            adapters=dict(job.wish.adapters),
            created_time=job.created_time,
            error=None if job.error is None else str(job.error),
            adapter=None if job.result is None else LoadReply.of(job.result),
        )


class ExportReply(msgspec.Struct, frozen=True):
    """Where on the server the adapter was written: a PEFT directory. digest: of what is served."""

    name: str
    path: str
    digest: str
    bytes: int

    @classmethod
    def of(cls, exported: Exported) -> ExportReply:
        return cls(exported.name, exported.path, exported.adapter_digest, exported.nbytes)


class ResidencyReply(msgspec.Struct, frozen=True):
    """Answer of pin, unpin, evict and preload."""

    name: str
    has_changed: bool
    evicted: tuple[str, ...] = ()
