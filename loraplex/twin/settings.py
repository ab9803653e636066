"""What a simulated server is set to: the engine's own settings, with their names, texts and defaults, as far as a step
model knows what they do."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from loraplex.config import EngineConfig, EngineSettings, LoRAConfig, setting
from loraplex.errors import ConfigError
from loraplex.performance.requests import ServiceTargets
from loraplex.routing import POLICIES

MAX_RUNNERS = 64
"""With steps; more are replicas of `--detail requests`."""

MAX_REPLICAS = 10_000
STARTS = ("loaded", "cold")
OF_A_FLEET = {"placement", "start", "max_num_seqs", "max_loras", "adapter_memory_bytes", "eviction_policy"}
"""Settings that replicas without steps have."""


def same_as(settings: type, name: str, group: str | None = None) -> Any:
    """A field that is another class's: its default and its text."""
    (found,) = (each for each in fields(settings) if each.name == name)
    metadata = {**found.metadata, "group": group}
    return field(default=found.default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSettings:
    """KV cache and adapters have two parts of the memory, as without `--device-memory`."""

    runners: int = setting(1, "engine processes behind one front")
    placement: str = setting("latency", "runner of a request: latency, pack or spread")
    start: str = setting(
        "loaded", "adapters at the start: loaded (as by --lora-modules, as far as the host has room) or cold"
    )
    max_num_seqs: int = same_as(EngineSettings, "max_num_seqs", "Scheduling")
    max_num_batched_tokens: int = same_as(EngineSettings, "max_num_batched_tokens")
    max_waiting_requests: int = same_as(EngineSettings, "max_waiting_requests")
    aging_steps: int = same_as(LoRAConfig, "aging_steps")
    kv_cache_memory_bytes: int = same_as(EngineSettings, "kv_cache_memory_bytes", "Memory")
    enable_prefix_caching: bool = same_as(EngineSettings, "enable_prefix_caching")
    max_loras: int | None = same_as(LoRAConfig, "max_loras", "Adapters")
    max_cpu_loras: int | None = same_as(LoRAConfig, "max_cpu_loras")
    adapter_memory_bytes: int = same_as(LoRAConfig, "adapter_memory_bytes", "Adapter memory")
    host_memory_bytes: int = same_as(LoRAConfig, "host_memory_bytes")
    disk_memory_bytes: int = same_as(LoRAConfig, "disk_memory_bytes")
    eviction_policy: str = same_as(LoRAConfig, "eviction_policy")
    enable_prediction: bool = same_as(LoRAConfig, "enable_prediction")
    num_loader_threads: int = same_as(LoRAConfig, "num_loader_threads")

    def __post_init__(self) -> None:
        if not 1 <= self.runners <= MAX_RUNNERS:
            raise ConfigError(f"runners must be 1..{MAX_RUNNERS}, got {self.runners}; more are --replicas of simulate")
        if self.placement not in POLICIES:
            raise ConfigError(f"placement must be one of {tuple(POLICIES)}, got {self.placement!r}")
        if self.start not in STARTS:
            raise ConfigError(f"start must be one of {STARTS}, got {self.start!r}")
        self.engine_config("checked", 16)

    def engine_config(self, model: str, block_size: int) -> EngineConfig:
        """Of the engine that the twin stands for; raises ConfigError as an engine would."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        of_lora = {each.name: own[each.name] for each in fields(LoRAConfig) if each.name in own}
        of_engine = {each.name: own[each.name] for each in fields(EngineSettings) if each.name in own}
        lora = LoRAConfig(**of_lora, enable_diagnosis=False, scrub_bytes_per_s=0)  # a twin has no bytes to look at
        return EngineConfig(model=model, lora=lora, block_size=block_size, **of_engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Many replicas without steps (fleet.py)."""

    replicas: int = setting(
        0, "replicas without steps, of one engine each, instead of --runners: waiting is an estimate; 0: none"
    )
    warm_up: float = setting(0.2, "share of the requests, the first ones, that no figure of --replicas counts")

    def __post_init__(self) -> None:
        if not 0 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas must be 0..{MAX_REPLICAS}, got {self.replicas}")
        if not 0 <= self.warm_up < 1:
            raise ConfigError(f"warm_up must be >= 0 and < 1, got {self.warm_up}")

    def check_uses(self, settings: TwinSettings) -> None:
        """Raises ConfigError for a setting that replicas without steps would ignore."""
        for each in fields(settings):
            if each.name not in OF_A_FLEET and getattr(settings, each.name) != each.default:
                raise ConfigError(f"{each.name} is of --runners: replicas without steps have none; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """What `plan` looks for. The percentiles are P99."""

    first_token_s: float = setting(
        ServiceTargets().first_token_s, "longest time to the first token, of 99 % of the requests"
    )
    inter_token_s: float = setting(
        ServiceTargets().inter_token_s, "longest time between two tokens, of 99 % of the gaps"
    )
    max_devices: int = setting(16, "most devices to look at, with a runner each")
    memory_bytes: int | None = setting(
        None, "bytes of a device for KV cache and adapters together (default: no bound)", flag="--device-memory-bytes"
    )

    def __post_init__(self) -> None:
        for name in ("first_token_s", "inter_token_s"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be > 0 and at most 86400, got {getattr(self, name)}")
        if not 1 <= self.max_devices <= MAX_RUNNERS:
            raise ConfigError(f"max_devices must be 1..{MAX_RUNNERS}, got {self.max_devices}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"memory_bytes must be >= 1, got {self.memory_bytes}")
