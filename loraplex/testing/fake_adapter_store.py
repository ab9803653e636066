"""An `AdapterStore` without memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from loraplex.adapter_store import AdapterContent, AddOutcome, MemoryQuota
from loraplex.core import AdapterResidency, AdapterSpec, Tier
from loraplex.errors import AdapterNotFoundError

FAKE_BYTES = 1024
FAKE_RANK = 8


class FakeAdapterStore:
    """An `AdapterStore` that only counts. `max_resident` adapters are on the device; the oldest unpinned one leaves."""

    def __init__(self, max_resident: int | None = None) -> None:
        self._max_resident = max_resident
        self._lock = threading.Lock()
        self._adapters: dict[int, tuple[AdapterSpec, AdapterResidency]] = {}
        self.aborted_adapters: list[int] = []
        self.quotas: dict[str, MemoryQuota] = {}

    def open_adapter(
        self, path: str, adapter_name: str, tenant: str = "", roots: tuple[str, ...] = ()
    ) -> AdapterContent:
        """No file is read: the content of a path is the path."""
        return AdapterContent(hashlib.blake2b(path.encode()).hexdigest()[:64], FAKE_BYTES, FAKE_RANK)

    def add_adapter(self, spec: AdapterSpec) -> AddOutcome:
        with self._lock:
            residency = AdapterResidency(spec.adapter_id, Tier.HOST, None, spec.nbytes, 0, False, False, 0.0)
            self._adapters[spec.adapter_id] = (spec, residency)
            return AddOutcome(True, self._promote(spec.adapter_id))

    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None:
        with self._lock:
            for spec in specs:
                residency = AdapterResidency(spec.adapter_id, Tier.SOURCE, None, spec.nbytes, 0, False, False, 0.0)
                self._adapters.setdefault(spec.adapter_id, (spec, residency))

    def drop_adapter(self, adapter_id: int) -> None:
        with self._lock:
            self._find(adapter_id)
            del self._adapters[adapter_id]

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        with self._lock:
            was_resident = self._find(adapter_id).tier is Tier.DEVICE
            return AddOutcome(not was_resident, () if was_resident else self._promote(adapter_id))

    def evict_adapter(self, adapter_id: int) -> bool:
        with self._lock:
            was_resident = self._find(adapter_id).tier is Tier.DEVICE
            self._update(adapter_id, tier=Tier.HOST, is_pinned=False)
            return was_resident

    def set_quotas(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """Kept to be seen, and not heeded."""
        self.quotas = dict(quotas)

    def check_pins(self, tenant: str, adapter_id: int | None) -> None:
        """It has room for all."""

    def pin_adapter(self, adapter_id: int) -> bool:
        with self._lock:
            has_changed = not self._find(adapter_id).is_pinned
            self._promote(adapter_id)
            self._update(adapter_id, tier=Tier.DEVICE, is_pinned=True)
            return has_changed

    def unpin_adapter(self, adapter_id: int) -> bool:
        with self._lock:
            found = self._find(adapter_id)
            self._update(adapter_id, tier=found.tier, is_pinned=False)
            return found.is_pinned

    def abort_adapter(self, adapter_id: int) -> int:
        self.aborted_adapters.append(adapter_id)
        return 0

    def list_adapters(self, adapter_ids: Sequence[int] | None = None) -> Sequence[AdapterResidency]:
        with self._lock:
            asked = self._adapters if adapter_ids is None else adapter_ids
            return [self._adapters[each][1] for each in asked if each in self._adapters]

    def _find(self, adapter_id: int) -> AdapterResidency:
        if adapter_id not in self._adapters:
            raise AdapterNotFoundError(f"adapter_id {adapter_id} is not in the store")
        return self._adapters[adapter_id][1]

    def _update(self, adapter_id: int, *, tier: Tier, is_pinned: bool) -> None:
        spec, residency = self._adapters[adapter_id]
        self._adapters[adapter_id] = (spec, replace(residency, tier=tier, is_pinned=is_pinned))

    def _promote(self, adapter_id: int) -> tuple[str, ...]:
        self._update(adapter_id, tier=Tier.DEVICE, is_pinned=self._find(adapter_id).is_pinned)
        resident = [spec for spec, residency in self._adapters.values() if residency.tier is Tier.DEVICE]
        num_over = 0 if self._max_resident is None else len(resident) - self._max_resident
        others = [spec for spec in resident if spec.adapter_id != adapter_id]
        victims = [spec for spec in others if not self._find(spec.adapter_id).is_pinned][: max(num_over, 0)]
        for victim in victims:
            self._update(victim.adapter_id, tier=Tier.HOST, is_pinned=False)
        return tuple(victim.adapter_name for victim in victims)
