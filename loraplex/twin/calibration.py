"""What one machine takes: for a step, for a load, for an adapter's bytes. A small JSON file, made by `loraplex
calibrate` and read by `simulate` and `plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from loraplex.errors import ConfigError
from loraplex.kernels.slices import align
from loraplex.twin.step_model import FEATURES, StepModel

FORMAT = 2
"""Of the file. Another one is refused."""


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Seconds to bring an adapter of n bytes: open_s + n * byte_s."""

    open_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.open_s + nbytes * self.byte_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model on a machine, with the settings of an engine.

    step_ms: coefficient of each feature (step_model.FEATURES). error_p50, error_p90: of steps that the fit did not see,
    relative; num_steps: that it saw. step_ratios: measured over predicted, of steps in their order, since a machine's
    slow moments last for several. has_one_memory: kernels read host memory (a CPU). block_bytes: of a KV block of
    block_size tokens. adapter_bytes: packed, by rank, on all linears, in num_extents equal pieces. source, disk: how
    long a load takes from there; copy: from the host to a device with memory of its own.
    """

    model: str
    machine: str
    device: str
    backend: str
    dtype: str
    num_threads: int
    step_ms: Mapping[str, float]
    error_p50: float
    error_p90: float
    num_steps: int
    step_ratios: tuple[float, ...]
    block_bytes: int
    block_size: int
    max_model_len: int
    adapter_bytes: Mapping[int, int]
    num_extents: int
    has_one_memory: bool = True
    look_ahead: bool = False
    source: ReadTime = field(default_factory=ReadTime)
    disk: ReadTime = field(default_factory=ReadTime)
    copy: ReadTime = field(default_factory=ReadTime)
    format: int = FORMAT

    def step_model(self) -> StepModel:
        return StepModel([self.step_ms[name] for name in FEATURES])

    def sizes_of(self, rank: int) -> tuple[int, ...]:
        """Bytes of each extent of an adapter: straight lines between the ranks that were measured."""
        total = _between(self.adapter_bytes, rank)
        return (align(math.ceil(total / self.num_extents)),) * self.num_extents

    def nbytes_of(self, rank: int) -> int:
        return sum(self.sizes_of(rank))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises ConfigError for a file that is none."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"calibration {str(path)!r} cannot be read: {error}; `loraplex calibrate` makes one"
            ) from error
        return cls._of(found, str(path))

    @classmethod
    def _of(cls, found: Any, path: str) -> Calibration:
        wanted = {each.name for each in fields(cls)}
        if not isinstance(found, dict) or found.get("format") != FORMAT or found.keys() != wanted:
            raise ConfigError(f"{path!r} is no calibration of this version: make it again with `loraplex calibrate`")
        try:
            found["step_ratios"] = tuple(found["step_ratios"])
            found["adapter_bytes"] = {int(rank): int(nbytes) for rank, nbytes in found["adapter_bytes"].items()}
            for name in ("source", "disk", "copy"):
                found[name] = ReadTime(**found[name])
            made = cls(**found)
            times = (*(made.step_ms[name] for name in FEATURES), *made.step_ratios)
            is_fine = all(_is_positive(each, least=0.0) for each in times) and made.adapter_bytes
            positive = (made.block_bytes, made.block_size, made.max_model_len, made.num_extents)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"calibration {path!r} is damaged: {type(error).__name__}: {error}") from error
        if not is_fine or not all(_is_positive(each, least=1) for each in positive):
            raise ConfigError(f"calibration {path!r} is damaged: a coefficient or a size is no number that can be")
        return made


def _is_positive(value: object, least: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= least


def _between(points: Mapping[int, int], at: int) -> float:
    """Linear between points and beyond the last two of them; never below the least."""
    if at in points:
        return points[at]
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]] * at / known[0]
    upper = next((index for index, each in enumerate(known) if each > at and index), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    slope = (points[high] - points[low]) / (high - low)
    return max(float(min(points.values())), points[low] + slope * (at - low))
