"""How many engine processes a front has, on which devices, and where requests go."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf

import psutil

from loraplex.config import EngineConfig
from loraplex.cpu import cpu_limit
from loraplex.errors import ConfigError
from loraplex.routing import POLICIES, Policy, Rules

MAX_RUNNERS = 64
_DEVICE = re.compile(r"(cpu|cuda)(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """data_parallel_size: of runners; None: as many as `devices`, or one. devices: `cuda:0,cuda:1` or `cpu:0,cpu:1`;
    None: the engine's own device and those after it. placement: a name of `routing.POLICIES`. min_runners: that serve
    whatever the load is (None: all); idle_s: without requests, after which one beyond them ends.

    Raises ConfigError for what contradicts itself.
    """

    data_parallel_size: int | None = None
    devices: str | None = None
    placement: str = "latency"
    min_runners: int | None = None
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        if self.placement not in POLICIES:
            raise ConfigError(f"placement must be one of {tuple(POLICIES)}, got {self.placement!r}")
        size, named = self.data_parallel_size, self._named
        if size is not None and not 1 <= size <= MAX_RUNNERS:
            raise ConfigError(f"data_parallel_size must be 1..{MAX_RUNNERS}, got {size}")
        if len(named) > MAX_RUNNERS:
            raise ConfigError(f"devices must be at most {MAX_RUNNERS}, got {len(named)}")
        if size is not None and named and size != len(named):
            raise ConfigError(
                f"data_parallel_size must be as many as devices, got {size} and {self.devices!r}: give one of them"
            )
        for each in named:
            if not _DEVICE.fullmatch(each):
                raise ConfigError(f"devices must be such as cuda:0,cuda:1 or cpu:0,cpu:1, got {self.devices!r}")
        if self.min_runners is not None and not 1 <= self.min_runners <= self.count:
            raise ConfigError(
                f"min_runners must be 1..{self.count}, as many as there are runners (data_parallel_size), "
                f"got {self.min_runners}"
            )
        if not 0 <= self.idle_s < inf:
            raise ConfigError(f"runner_idle_s must be >= 0, got {self.idle_s}")
        twice = next((each for each in named if named.count(each) > 1), None)
        if twice is not None:
            raise ConfigError(f"devices must differ, got {self.devices!r} with {twice} twice")
        if len({each.partition(":")[0] for each in named}) > 1:
            raise ConfigError(f"devices must be all CPUs or all GPUs, got {self.devices!r}")

    @property
    def _named(self) -> tuple[str, ...]:
        return () if self.devices is None else tuple(each.strip() for each in self.devices.split(","))

    @property
    def count(self) -> int:
        return len(self._named) or self.data_parallel_size or 1

    @property
    def policy(self) -> Policy:
        return POLICIES[self.placement]

    @property
    def rules(self) -> Rules:
        """Of consolidation."""
        return Rules(self.count if self.min_runners is None else self.min_runners, self.idle_s)

    def configs(self, config: EngineConfig) -> tuple[EngineConfig, ...]:
        """The settings of each runner: its device, and its share of the cores.

        Sizes of memory and limits of a batch are each runner's own. Raises ConfigError for settings that only one
        runner can have.
        """
        named = self._named
        if named and config.device != "auto":
            raise ConfigError(f"devices ({self.devices}) and device ({config.device}) are one setting; give one")
        if not named and self.count == 1:
            return (config,)
        devices = named or self._devices_after(config.device)
        is_gpu = devices[0].startswith("cuda")
        if self.count > 1 and not is_gpu and str(config.device_memory or "").strip().endswith("%"):
            raise ConfigError(
                f"device_memory must be bytes with {self.count} runners on one machine's memory, "
                f"got {config.device_memory!r}; each runner takes as much"
            )
        is_shared = self.count > 1 and not is_gpu and config.num_threads is None
        threads = shared_threads(self.count) if is_shared else [config.num_threads] * self.count
        return tuple(
            replace(config, device="cpu" if device.startswith("cpu") else device, num_threads=num_threads)
            for device, num_threads in zip(devices, threads, strict=True)
        )

    def _devices_after(self, device: str) -> tuple[str, ...]:
        kind = device.partition(":")[0]
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"device must be auto, cpu or cuda with {self.count} runners, got {device!r}; name each one in devices"
            )
        return tuple(f"{kind}:{number}" for number in range(self.count))


def shared_threads(count: int) -> list[int | None]:
    """The cores that one engine would take, shared out; at least one each."""
    limit = cpu_limit().num_threads
    total = min(limit, psutil.cpu_count(logical=False) or limit)
    return [max(1, total // count + (number < total % count)) for number in range(count)]
