"""One loaded version of an adapter: what it is, who uses it, and what happens when the last user leaves.

    load or reload -> current --(reload, rollback)--> kept: out of memory when its last reference goes, and registered still
                       |  ^________(rollback)_________|   `--(unload, too many kept)--> draining
                       |--(unload)--> draining --(last reference released)--> dropped
                       `--(switched away)--> off the device when its last reference goes, and current still

A version is mutable and belongs to the registry, which touches it only under its lock. What leaves the registry is `LoRARef`.
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field

from loraplex.core import AdapterId, AdapterSpec


@dataclass(frozen=True, slots=True)
class LoRARef:
    """What a request holds while it runs: one version of one adapter. `lora_path` is the source as its owner named it."""

    adapter_id: AdapterId
    adapter_name: str
    adapter_version: int
    adapter_digest: str
    lora_int_id: int | None
    max_rank: int
    lora_path: str = ""


@dataclass(frozen=True, slots=True)
class OpenedAdapter:
    """An adapter that was fetched and found valid. `path` is its local directory, `nbytes` the size of its tensors."""

    path: str
    adapter_digest: str
    nbytes: int
    max_rank: int


class Farewell(enum.Enum):
    """What is done to a version when its last reference goes: off the device, out of device and host, or forgotten."""

    EVICT = "evict"
    SHELVE = "shelve"
    DROP = "drop"


@dataclass(eq=False, slots=True)
class Parting:
    """A farewell that is due to `version`. `done` holds whether the store changed something, or the error it raised."""

    version: AdapterVersion
    farewell: Farewell
    done: Future[bool] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """is_unloaded: its name stopped resolving, `name@N` too. is_forced_out: its requests are being aborted; what
    has not reached the engine yet must not any more, until the last reference is gone or it answers again.
    """

    ref: LoRARef
    spec: AdapterSpec
    origin: str
    is_pinned: bool
    loaded_time: float
    last_used_time: float
    num_references: int = 0
    parting: Parting | None = None
    is_unloaded: bool = False
    is_forced_out: bool = False

    @property
    def adapter_id(self) -> AdapterId:
        return self.ref.adapter_id

    @property
    def number(self) -> int:
        return self.ref.adapter_version

    def part_with(self, farewell: Farewell) -> Parting:
        """Make `farewell` due once the last reference goes; one that was due before is off."""
        self.stay()
        self.parting = Parting(self, farewell)
        return self.parting

    def release(self) -> Parting | None:
        """One reference less; the farewell that is due, if it was the last."""
        self.num_references -= 1
        if self.num_references:
            return None
        self.is_forced_out = False
        return self.parting

    def stay(self) -> None:
        """Whatever farewell was due is off, and who waits for it is told that nothing was done."""
        self.is_forced_out = False
        if self.parting is not None:
            self.parting.done.set_result(False)
            self.parting = None
