"""The records of the memory: what is known of each adapter, and of the weights of each content digest.

Several adapters with one digest share one `StoredWeights`: one load, one copy in each tier, one lora_slot. Its
transitions are in store.py, which alone writes `state`, `host`, `device`, `job`, `layout` and `failure`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterSpec, WaitsFor
from loraplex.errors import AdapterNotFoundError, LoraplexError, error_from_payload
from loraplex.memory.space.arena import Extent
from loraplex.memory.weights.copies import Arriving
from loraplex.memory.weights.packing import PackedLayout


class WeightState(enum.Enum):
    SOURCE = "source"
    LOADING = "loading"
    HOST = "host"
    ARRIVING = "arriving"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an adapter is in a tier: its extents (none where memory is shared), its lora_slot if there are slots, and
    the extent of its projections, which others may read (eviction/budget.py)."""

    extents: tuple[Extent, ...] = ()
    lora_slot: int | None = None
    shared: Extent | None = None

    @property
    def all_extents(self) -> tuple[Extent, ...]:
        """In the order of `PackedLayout.sizes`."""
        return self.extents if self.shared is None else (*self.extents, self.shared)


@dataclass(slots=True, eq=False)
class Demand:
    """Who wants weights nearer the compute, and what that pushed out.

    cause: `add`, `promote`, `pin`, `request` or `prefetch`. adapter: whose source is the first to be read.
    is_for_request: what was asked for earlier in this scheduling pass is not evicted for it (requests take turns);
    verbs come from outside the passes and heed only the rules for all.
    """

    cause: str
    is_for_request: bool = False
    adapter: StoredAdapter | None = None
    evicted: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class LoadJob:
    """One load or copy under way. A request for the same weights waits for it: one job, one outcome for all.

    sources: the adapters whose sources may be read, the last one first. is_awaited: a request was told to wait for it.
    may_wait: for memory on its way back, in the thread of a verb; a loader's thread must not, or none is left to bring
    that memory back. arriving: its copies, once they are under way. damaged_copies: tiers whose read failed.
    error: known before the job is done while requests run on what did not arrive. errors: what it is to each of
    `sources`, by adapter_id, where that differs. failed_s, raised_in_pass: since when requests that waited may have the
    error, and the scheduling pass in which the first one got it.
    """

    weights: StoredWeights
    demand: Demand
    sources: tuple[StoredAdapter, ...]
    began_s: float
    is_awaited: bool = False
    may_wait: bool = False
    is_done: bool = False
    num_failed_copies: int = 0
    arriving: Arriving | None = None
    damaged_copies: list[str] = field(default_factory=list)
    error: LoraplexError | None = None
    errors: dict[int, LoraplexError] = field(default_factory=dict)
    failed_s: float = 0.0
    raised_in_pass: int | None = None

    def error_of(self, adapter: StoredAdapter) -> LoraplexError | None:
        """None when all went well, or failed without having tried the source of `adapter`, or for another tenant's
        limit."""
        return self.errors.get(adapter.adapter_id) if self.errors else self.error


@dataclass(slots=True, eq=False)
class StoredAdapter:
    """One adapter id. `open_weights` reads its source. A removed one stays until its last request ends.

    is_attached: it was registered without a load, and stays when its first load fails. load_error: what else removes
    it, for the thread that adds it and may be in no load at that moment.
    """

    spec: AdapterSpec
    open_weights: Callable[[], LoRAModel]
    weights: StoredWeights
    num_running: int = 0
    is_pinned: bool = False
    is_removed: bool = False
    load_error: LoraplexError | None = None
    is_attached: bool = False

    @property
    def adapter_id(self) -> int:
        return self.spec.adapter_id

    @property
    def name(self) -> str:
        return self.spec.adapter_name

    def count_running(self, change: int) -> None:
        self.num_running += change
        self.weights.num_running += change
        assert self.num_running >= 0, f"adapter {self.name!r} is released more often than acquired"

    def set_pinned(self, is_pinned: bool) -> bool:
        """Whether that changed something."""
        has_changed = self.is_pinned is not is_pinned
        self.weights.num_pinned += int(is_pinned) - int(self.is_pinned)
        self.is_pinned = is_pinned
        return has_changed

    def check_not_removed(self) -> None:
        if self.load_error is not None:
            raise error_from_payload(self.load_error.to_payload()) from self.load_error
        if self.is_removed:
            raise AdapterNotFoundError(
                f"adapter {self.name!r} (id {self.adapter_id}) was removed meanwhile; add it again"
            )


@dataclass(slots=True, eq=False)
class StoredWeights:
    """The weights of one digest. `layout` is known from the first load on: equal content is packed equally.

    host, device: the place in either tier, None when it is not there (on a CPU the device's has no extents of its own).
    num_running, num_pinned: sums over `adapters`. num_readers: threads beside the engine's that read its memory.
    is_lent: one of `num_running` is a diagnosis, which is soon over.
    wanted_in_pass: the last scheduling pass in which a request asked and did not get it.
    fault: requests run on what is not to be used, and are to end with this error.
    checksums: of the extents as they were loaded; checked_s: when the host's were last compared, or made.
    is_restoring: damaged copies were let go and the weights are on their way back.
    failed_job: the last one, when it failed; failure: the same, for the requests that waited for it.
    has_missed: the next reference taken counts as a miss; is_cold: it had to wait for a load.
    brought_from: what the load read that a request caused and that no request has used yet, None when there was none.
    is_prefetch_off: the last load failed and no request asked since.
    is_prediction_off: a verb took it out of memory, as a version that is only kept, and no request asked since.
    reload_s: what the last load took, its wait for others included; None before the first.
    """

    digest: str
    adapters: dict[int, StoredAdapter] = field(default_factory=dict)
    state: WeightState = WeightState.SOURCE
    layout: PackedLayout | None = None
    checksums: tuple[int, ...] = ()
    checked_s: float = -math.inf
    is_restoring: bool = False
    host: Place | None = None
    device: Place | None = None
    num_running: int = 0
    num_pinned: int = 0
    num_readers: int = 0
    is_lent: bool = False
    job: LoadJob | None = None
    failure: LoadJob | None = None
    failed_job: LoadJob | None = None
    fault: LoraplexError | None = None
    waits_for: WaitsFor | None = None
    wanted_in_pass: int = -1
    has_missed: bool = False
    is_cold: bool = False
    brought_from: str | None = None
    is_prefetch_off: bool = False
    is_prediction_off: bool = False
    last_used_s: float = 0.0
    reload_s: float | None = None

    @property
    def nbytes(self) -> int:
        """Packed bytes, with those that others share. Only once a load has told them."""
        assert self.layout is not None, f"digest {self.digest} was never loaded"
        return self.layout.nbytes

    @property
    def own_nbytes(self) -> int:
        """The same, without those."""
        return self.nbytes - (0 if self.layout is None else self.layout.shared_nbytes)

    @property
    def shared(self) -> Extent | None:
        return None if self.host is None else self.host.shared

    @property
    def lora_slot(self) -> int | None:
        return None if self.device is None else self.device.lora_slot

    @property
    def is_on_device(self) -> bool:
        """Whether steps launched from now on may use it: also while it arrives."""
        return self.state in (WeightState.ARRIVING, WeightState.DEVICE)

    @property
    def is_at_rest(self) -> bool:
        """It may be moved or let go as far as its bytes go: no load or copy under way, no thread that reads them."""
        return self.job is None and self.num_readers == 0

    @property
    def is_idle(self) -> bool:
        """It would not be missed: no running request, no pin, and it is at rest."""
        return self.num_running == 0 and self.num_pinned == 0 and self.is_at_rest

    @property
    def tenants(self) -> set[str]:
        return {adapter.spec.tenant for adapter in self.adapters.values()}

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.adapters.values() if not adapter.is_removed]
