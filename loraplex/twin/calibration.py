"""What one machine takes: for a step, for a load, for an adapter's bytes. A small JSON file, made by `loraplex
calibrate` and read by `simulate` and `plan`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from loraplex.errors import ConfigError
from loraplex.kernels.slices import align
from loraplex.twin.files import read_bounded
from loraplex.twin.step_model import FEATURES, StepModel

FORMAT = 5
"""Of the file. Another one is refused."""

MAX_FILE_BYTES = 2**20
MAX_TEXT_CHARS = 4096
MAX_MS = 1e8
MAX_BYTES = 2**50
MAX_RANK = 512
_MOST = {"block_bytes": 2**32, "block_size": 2**16, "max_model_len": 2**32, "num_extents": 2**16, "num_threads": 2**16}


@dataclass(frozen=True, slots=True)
class ReadTime:
    """Seconds to bring an adapter of n bytes: open_s + n * byte_s."""

    open_s: float = 0.0
    byte_s: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.open_s + nbytes * self.byte_s


@dataclass(frozen=True, slots=True)
class FrontTime:
    """Milliseconds of the front, while its engine waits: for a request that comes, for each step, for each output."""

    request_ms: float = 0.0
    step_ms: float = 0.0
    output_ms: float = 0.0

    def after_step_s(self, num_outputs: int) -> float:
        return 1e-3 * (self.step_ms + self.output_ms * num_outputs)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A model on a machine, with the settings of an engine.

    step_ms: coefficient of each feature (step_model.FEATURES). error_p50, error_p90: of steps that the fit did not see,
    relative; num_steps: that it saw. step_ratios: (tokens, measured over predicted) of steps in their order, since a
    machine's slow moments last for several. front: what passes between two steps. has_one_memory: kernels read host
    memory (a CPU). block_bytes: of a KV block of block_size tokens. adapter_bytes: packed, by rank, on all linears, in
    num_extents equal pieces. source, disk: how long a load takes from there; copy: from the host to a device with
    memory of its own.
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
    step_ratios: tuple[tuple[int, float], ...]
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
    front: FrontTime = field(default_factory=FrontTime)
    format: int = FORMAT

    def step_model(self) -> StepModel:
        return StepModel([self.step_ms[name] for name in FEATURES])

    def sizes_of(self, rank: int) -> tuple[int, ...]:
        """Bytes of each extent of an adapter: straight lines between the ranks that were measured."""
        total = _between(self.adapter_bytes, rank)
        return (align(math.ceil(total / self.num_extents)),) * self.num_extents

    def nbytes_of(self, rank: int) -> int:
        return sum(self.sizes_of(rank))

    def notes_on(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """What of a workload's ranks was not measured, in words."""
        most, largest = max(self.adapter_bytes), max(ranks)
        if largest <= most:
            return ()
        return (f"rank {largest} is beyond {most}, the highest that was measured: its times are drawn on as lines",)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises ConfigError for a file that is none."""
        try:
            found = json.loads(read_bounded(path, MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
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
            made = msgspec.convert(found, cls, str_keys=True)
            for name in ("source", "disk", "copy", "front"):  # msgspec passes over unknown names
                names = {each.name for each in fields(getattr(made, name))}
                if found[name].keys() != names:
                    text = f"{name} has {' and '.join(sorted(names))}, got {sorted(found[name])[:3]}"
                    raise msgspec.ValidationError(text)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ConfigError(f"calibration {path!r} is damaged: {error}") from error
        odd = made._odd()
        if odd:
            raise ConfigError(f"calibration {path!r} is damaged: {odd} is nothing that was measured")
        return made

    def _odd(self) -> str:
        """The field that cannot be; none: empty."""
        for name in ("model", "machine", "device", "backend", "dtype"):
            text: str = getattr(self, name)
            if not text.isprintable() or len(text) > MAX_TEXT_CHARS:
                return name
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                return name
        times = [*(self.step_ms.get(name, -1.0) for name in FEATURES)]
        times += [number for ratio in self.step_ratios for number in ratio]
        times += [self.front.request_ms, self.front.step_ms, self.front.output_ms]
        times += [1e3 * each for read in (self.source, self.disk, self.copy) for each in (read.open_s, read.byte_s)]
        if not all(0 <= each <= MAX_MS for each in times):
            return "a time"
        sizes = self.adapter_bytes.items()
        is_sized = sizes and all(1 <= rank <= MAX_RANK and 1 <= nbytes <= MAX_BYTES for rank, nbytes in sizes)
        return "" if is_sized else "adapter_bytes"


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
