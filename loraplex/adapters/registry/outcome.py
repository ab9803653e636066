"""What the registry's verbs answer. Times are seconds; names in `evicted` lost a tier to make room."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from loraplex.adapters.registry.version import LoRARef
from loraplex.core import Tier


class LoadStatus(enum.StrEnum):
    LOADED = "loaded"
    ALREADY_LOADED = "already_loaded"
    LOADED_WITH_EVICTION = "loaded_with_eviction"
    RELOADED = "reloaded"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`ref` is the version that answers for the name now: after a switch, that of the adapter it was switched to.

    moved: what answered earlier answers again. previous_version: the name's own one before a reload or a move; None when nothing
    changed, or another adapter answered until a move.
    """

    status: LoadStatus
    ref: LoRARef
    evicted: tuple[str, ...] = ()
    load_s: float = 0.0
    previous_version: int | None = None


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """The name no longer resolves. `is_drained`: every tier is freed already; else that follows the last of `num_references`.

    `ref` is None when the name was being loaded for the first time: that load is called off, its callers get an error.
    """

    adapter_name: str
    ref: LoRARef | None
    is_drained: bool
    num_references: int = 0
    num_aborted: int = 0


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """New requests go to `ref`. `is_old_active`: the old adapter was on the device or in use, so there was something to evict.

    load_s: until the new adapter was loaded (0 if it was); promote_s: from there until it answered for both names;
    evict_s: from there until the old one was evicted, None while requests still run on it (it follows the last of them).
    """

    old: str
    ref: LoRARef
    is_old_active: bool
    load_s: float
    promote_s: float
    evict_s: float | None
    evicted: tuple[str, ...] = ()
    num_references: int = 0
    num_aborted: int = 0


class VersionState(enum.StrEnum):
    """`current` answers for the name; `kept` can be rolled back to; `draining` is dropped after its last request."""

    CURRENT = "current"
    KEPT = "kept"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version that `name@N` addresses."""

    ref: LoRARef
    state: VersionState
    tier: Tier
    nbytes: int
    num_references: int
    loaded_time: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One name as `GET /v1/adapters` shows it.

    alias_of: the adapter that answers for this name since a switch; aliases: the names that were switched to this one;
    num_references: requests on this version; num_draining: other versions that requests still run on; times: `time.time()`.
    num_loads, num_requests: of all versions; versions: the newest first.
    """

    ref: LoRARef
    origin: str
    alias_of: str | None
    aliases: tuple[str, ...]
    tier: Tier
    nbytes: int
    lora_slot: int | None
    is_pinned: bool
    is_loading: bool
    num_references: int
    num_draining: int
    loaded_time: float
    last_used_time: float
    error: str | None = None
    num_loads: int = 0
    num_requests: int = 0
    versions: tuple[VersionInfo, ...] = ()
