"""An engine as the registry of adapters sees it: what is asked of it, and what it answers.

The engine's wire is made of `AdapterStore` (frontend/messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from loraplex.core import AdapterResidency, AdapterSpec


@dataclass(frozen=True, slots=True)
class LongContext:
    """rope_factor: what the adapter's rows divide the rotary frequencies by. max_model_len: prompt and output together,
    in tokens."""

    rope_factor: float
    max_model_len: int


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """What the files of an adapter have, once they are read and found good. nbytes: of its tensors in the files' dtype.

    vocab_size: where its vocabulary ends; None: where the base's does. invocation_tokens: of an aLoRA. long_context:
    None where it has the base's positions.
    """

    adapter_digest: str
    nbytes: int
    rank: int
    vocab_size: int | None = None
    invocation_tokens: tuple[int, ...] = ()
    long_context: LongContext | None = None


@dataclass(frozen=True, slots=True)
class AddOutcome:
    """Result of adding an adapter to the store: whether something changed and which names were evicted to make room."""

    is_new: bool
    evicted: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether something changed, as the verbs of vLLM's manager answer."""
        return self.is_new


@dataclass(frozen=True, slots=True)
class MemoryQuota:
    """Most bytes of a tenant's adapters at a time in the memory of each engine process; None: no limit.

    host_bytes: in the host's memory; where the device reads that memory (a CPU), what kernels reach is part of it.
    device_bytes: on the device; on a CPU, what kernels reach.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None


class AdapterStore(Protocol):
    """An engine as the registry sees it. Calls may block and are made under no lock; each raises AdapterError.

    open_adapter: reads and validates the files of a local directory, in turns of the tenants that ask, which must lie
    in these roots (() as the engine knows them); `add_adapter` of that path and content within seconds does not read
    them again. attach_adapters: as `add_adapter` of each, but
    nothing is read: the first request or verb that needs the weights loads them. check_pins: raises AdapterNoRoomError
    where what is pinned of a tenant, with this adapter (None: one that is not there yet), is beyond its share of the
    device, or its `device_bytes`. set_quotas: of all tenants that have one; those that are left out have none any more.
    list_adapters: those of `adapter_ids` that it has; None: all.
    """

    def open_adapter(
        self, path: str, adapter_name: str, tenant: str = "", roots: tuple[str, ...] = ()
    ) -> AdapterContent: ...
    def add_adapter(self, spec: AdapterSpec) -> AddOutcome: ...
    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None: ...
    def drop_adapter(self, adapter_id: int) -> None: ...
    def promote_adapter(self, adapter_id: int) -> AddOutcome: ...
    def evict_adapter(self, adapter_id: int) -> bool: ...
    def set_quotas(self, quotas: Mapping[str, MemoryQuota]) -> None: ...
    def check_pins(self, tenant: str, adapter_id: int | None) -> None: ...
    def pin_adapter(self, adapter_id: int) -> bool: ...
    def unpin_adapter(self, adapter_id: int) -> bool: ...
    def abort_adapter(self, adapter_id: int) -> int: ...
    def list_adapters(self, adapter_ids: Sequence[int] | None = None) -> Sequence[AdapterResidency]: ...
