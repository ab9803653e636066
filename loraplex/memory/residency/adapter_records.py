"""Which adapters there are, by id: those that resolve, and removed ones whose requests still run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterConflictError, AdapterNotFoundError
from loraplex.memory.residency.records import StoredAdapter, StoredWeights
from loraplex.memory.residency.store import WeightStore


class AdapterRecords:
    """Called with the store's lock held. open_weights: reads the source of a spec, in any thread."""

    def __init__(self, store: WeightStore, open_weights: Callable[[AdapterSpec], LoRAModel]) -> None:
        self._store = store
        self._open_weights = open_weights
        self.draining: dict[int, StoredAdapter] = {}

    def get(self, adapter_id: int) -> StoredAdapter:
        """One that resolves; raises AdapterNotFoundError."""
        adapter = self._store.adapters.get(adapter_id)
        if adapter is None:
            raise AdapterNotFoundError(f"adapter id {adapter_id} is unknown; add the adapter first")
        return adapter

    def in_use(self, adapter_id: int) -> StoredAdapter:
        """One that a request runs on, removed or not."""
        return self.draining.get(adapter_id) or self.get(adapter_id)

    def spec_of(self, adapter: AdapterSpec | LoRAModel) -> tuple[AdapterSpec, Callable[[], LoRAModel]]:
        """The spec, and what reads its weights."""
        if isinstance(adapter, AdapterSpec):
            return adapter, partial(self._open_weights, adapter)
        digest, name = adapter.adapter_digest, str(adapter.adapter_id)
        spec = AdapterSpec(adapter.adapter_id, name, 1, digest, "", adapter.nbytes, adapter.rank)
        return spec, lambda: adapter  # the caller's object is its source

    def known(self, spec: AdapterSpec) -> StoredAdapter | None:
        """The adapter of that id, if it is there with the same content; raises AdapterConflictError for another one."""
        draining = self.draining.get(spec.adapter_id)
        known = self._store.adapters.get(spec.adapter_id)
        if draining is not None:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: requests still run on the removed adapter {draining.name!r} of the same id "
                f"{spec.adapter_id}; take another id or wait for them"
            )
        if known is not None and known.weights.digest != spec.adapter_digest:
            raise AdapterConflictError(
                f"adapter {spec.adapter_name!r}: id {spec.adapter_id} belongs to adapter {known.name!r} with another content; "
                "take another id or remove that one first"
            )
        return known

    def attach(self, spec: AdapterSpec, opener: Callable[[], LoRAModel]) -> StoredAdapter:
        """A new record over the weights of its content."""
        weights = self._store.weights_of(spec.adapter_digest)
        adapter = StoredAdapter(spec, opener, weights)
        weights.adapters[spec.adapter_id] = adapter
        self._store.adapters[spec.adapter_id] = adapter
        return adapter

    def attach_unread(self, specs: Sequence[AdapterSpec]) -> None:
        """Records of adapters that nobody has read; known ones are passed over."""
        for spec in specs:
            if self.known(spec) is None:
                self.attach(*self.spec_of(spec)).is_attached = True

    def remove(self, adapter: StoredAdapter) -> None:
        """It resolves no more; its weights go now, or with its last request."""
        del self._store.adapters[adapter.adapter_id]
        adapter.set_pinned(False)
        adapter.is_removed = True
        if adapter.num_running:
            self.draining[adapter.adapter_id] = adapter
        else:
            self._detach(adapter)

    def end_draining(self, adapter: StoredAdapter) -> None:
        """The last request of a removed adapter has ended."""
        del self.draining[adapter.adapter_id]
        self._detach(adapter)

    def _detach(self, adapter: StoredAdapter) -> None:
        weights: StoredWeights = adapter.weights
        del weights.adapters[adapter.adapter_id]
        if not weights.adapters:
            self._store.drop(weights)
