"""One loaded version of an adapter: what it is, how many requests use it, and what its last release sets going.

    load or reload -> current --(reload, rollback)--> kept: out of memory when its last reference goes
                       |  ^________(rollback)_________|   `--(unload, too many kept)--> draining
                       |--(unload)--> draining --(last reference released)--> dropped
                       `--(switched away)--> off the device when its last reference goes, and current still

A version is mutable and belongs to the registry, which touches it only under its lock. What leaves the registry is
`LoRARef`.
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from loraplex.adapters.registry.records import AdapterText, NameRecord, VersionRecord
from loraplex.core import AdapterId, AdapterSpec
from loraplex.errors import AdapterContentChangedError, AdapterUnavailableError, shown


@dataclass(frozen=True, slots=True)
class LoRARef:
    """What a request holds while it runs: one version of one adapter.

    `lora_path` is the source as its owner named it; `text` is None where requests are read and written as the base's;
    `loaded_time` is when it was registered, in Unix seconds, and outlives the server where there is a journal.
    """

    adapter_id: AdapterId
    adapter_name: str
    adapter_version: int
    adapter_digest: str
    lora_int_id: int | None
    max_rank: int
    lora_path: str = ""
    text: AdapterText | None = field(default=None, repr=False)
    loaded_time: float = field(default=0.0, compare=False)

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """Of an aLoRA, which acts from their last occurrence in a prompt on; (): on all rows."""
        return () if self.text is None else self.text.invocation_tokens


@dataclass(frozen=True, slots=True)
class OpenedAdapter:
    """An adapter that was fetched and found valid. `path` is its local directory, `nbytes` the size of its tensors."""

    path: str
    adapter_digest: str
    nbytes: int
    max_rank: int
    text: AdapterText | None = None


@dataclass(frozen=True, slots=True)
class ContentDigests:
    """adapter: of configuration and tensors; text: of the text of its own, "" where it brings none, None for any."""

    adapter: str
    text: str | None = None

    def check(self, opened: OpenedAdapter, path: str) -> None:
        """Raises AdapterContentChangedError for another content."""
        if opened.adapter_digest != self.adapter or self.text not in (None, text_digest(opened.text)):
            raise AdapterContentChangedError(f"{shown(path)} has another content than the digest that was given")


def text_digest(text: AdapterText | None) -> str:
    return "" if text is None else text.digest


class AfterDrain(enum.Enum):
    """What is done to a version when its last reference goes: off the device, out of device and host, or forgotten."""

    EVICT = "evict"
    SHELVE = "shelve"
    DROP = "drop"


@dataclass(eq=False, slots=True)
class PendingDrain:
    """`then` is due once `version` has no reference.

    `done`: whether the store changed something, or the error it raised.
    """

    version: AdapterVersion
    then: AfterDrain
    done: Future[bool] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """is_unloaded: its name stopped resolving, `name@N` too.

    is_forced_out: its requests are being aborted; what has not reached the engine yet must no longer be sent, until the
    last reference is released or it answers again. is_ready: the store knows it; another server has loaded one that is
    not.
    """

    ref: LoRARef
    spec: AdapterSpec
    origin: str
    is_pinned: bool
    loaded_time: float
    last_used_time: float
    num_references: int = 0
    pending_drain: PendingDrain | None = None
    is_unloaded: bool = False
    is_forced_out: bool = False
    is_ready: bool = True

    @property
    def adapter_id(self) -> AdapterId:
        return self.ref.adapter_id

    @property
    def number(self) -> int:
        return self.ref.adapter_version

    @property
    def is_to_be_dropped(self) -> bool:
        return self.pending_drain is not None and self.pending_drain.then is AfterDrain.DROP

    def check_ready(self) -> None:
        """Raises AdapterUnavailableError."""
        if not self.is_ready:
            text = "was loaded at another server, and its files are not at this one yet; try again"
            raise AdapterUnavailableError(f"adapter {self.ref.adapter_name!r} {text}")

    def start_drain(self, then: AfterDrain) -> PendingDrain:
        """Make `then` due once the last reference goes; one that was due before is off."""
        self.cancel_drain()
        self.pending_drain = PendingDrain(self, then)
        return self.pending_drain

    def cancel_drain(self) -> None:
        """What was due is off, and the verbs that wait for it are told that nothing was done."""
        self.is_forced_out = False
        if self.pending_drain is not None:
            self.pending_drain.done.set_result(False)
            self.pending_drain = None

    def release(self) -> PendingDrain | None:
        """One reference less; the drain that is complete, if it was the last."""
        self.num_references -= 1
        if self.num_references:
            return None
        self.is_forced_out = False
        return self.pending_drain

    # ----------------------------------------------------------------------------------------------- beyond the process

    def record(self) -> VersionRecord:
        ref, spec = self.ref, self.spec
        return VersionRecord(
            adapter_id=ref.adapter_id,
            number=ref.adapter_version,
            digest=ref.adapter_digest,
            path=spec.path,
            lora_path=ref.lora_path,
            origin=self.origin,
            nbytes=spec.nbytes,
            max_rank=ref.max_rank,
            is_pinned=self.is_pinned,
            loaded_time=self.loaded_time,
            text=ref.text,
        )

    @classmethod
    def from_record(cls, name: str, record: VersionRecord, owner: NameRecord) -> AdapterVersion:
        adapter_id = AdapterId(record.adapter_id)
        number, digest, max_rank = record.number, record.digest, record.max_rank
        ref = LoRARef(adapter_id, name, number, digest, owner.lora_int_id, max_rank, record.lora_path, record.text)
        return cls(
            ref=replace(ref, loaded_time=record.loaded_time),
            spec=AdapterSpec(adapter_id, name, number, digest, record.path, record.nbytes, max_rank),
            origin=record.origin,
            is_pinned=record.is_pinned,
            loaded_time=record.loaded_time,
            last_used_time=owner.usage.last_used_time,
        )
