"""An engine and a set of sources for tests of the registry: they count, fail when told to, and stop at gates."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from loraplex.adapter_store import AdapterContent, AddOutcome, MemoryQuota
from loraplex.adapters.registry import (
    AdapterText,
    Journal,
    LoRARegistry,
    NameChange,
    NameRecord,
    NameUsage,
    OpenedAdapter,
)
from loraplex.core import AdapterResidency, AdapterSpec, Tier
from loraplex.errors import AdapterNoRoomError, AdapterNotFoundError, AdapterPathNotFoundError, JournalError
from loraplex.events import EventKind

NBYTES = 1000


class Gate:
    """A thread that passes says so and waits to be let through."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.arrived.set()
        assert self.opened.wait(60), "the gate stayed closed"


@dataclass
class Faults:
    """What happens to the next call of a method: an error (once), a gate (once); and a hook for every call."""

    errors: dict[str, Exception] = field(default_factory=dict)
    gates: dict[str, Gate] = field(default_factory=dict)
    before: Callable[[str], None] = lambda method: None

    def meet(self, method: str) -> None:
        self.before(method)
        gate = self.gates.pop(method, None)
        if gate is not None:
            gate.pass_through()
        error = self.errors.pop(method, None)
        if error is not None:
            raise error


class FakeStore:
    """Implements AdapterStore. An adapter_id is added once and dropped once, or the test fails."""

    def __init__(self) -> None:
        self.adapters: dict[int, AdapterResidency] = {}
        self.specs: dict[int, AdapterSpec] = {}
        self.calls: list[tuple[str, int]] = []
        self.faults = Faults()
        self.evicts_on_add: tuple[str, ...] = ()
        self.device_room = 1000
        self.abort: Callable[[int], int] = lambda adapter_id: 0
        self._lock = threading.Lock()

    def open_adapter(self, path: str, adapter_name: str) -> AdapterContent:
        raise AssertionError("the registry opens adapters by what it was given")

    def add_adapter(self, spec: AdapterSpec) -> AddOutcome:
        self.faults.meet("add")
        with self._lock:
            self.calls.append(("add", spec.adapter_id))
            is_new = spec.adapter_id not in self.adapters
            assert ("drop", spec.adapter_id) not in self.calls, "an adapter_id was used again"
            self.specs[spec.adapter_id] = spec
            self.adapters[spec.adapter_id] = AdapterResidency(
                spec.adapter_id, Tier.HOST, None, NBYTES, 0, False, False, 0.0
            )
            return AddOutcome(is_new, self.evicts_on_add)

    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None:
        self.faults.meet("attach")
        with self._lock:
            for spec in specs:
                assert ("drop", spec.adapter_id) not in self.calls, "an adapter_id was used again"
                where = AdapterResidency(spec.adapter_id, Tier.SOURCE, None, NBYTES, 0, False, False, 0.0)
                self.specs.setdefault(spec.adapter_id, spec)
                self.adapters.setdefault(spec.adapter_id, where)

    def drop_adapter(self, adapter_id: int) -> None:
        self.faults.meet("drop")
        with self._lock:
            self.find(adapter_id)
            self.calls.append(("drop", adapter_id))
            del self.adapters[adapter_id], self.specs[adapter_id]

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        self.faults.meet("promote")
        is_there = self.find(adapter_id).tier is Tier.DEVICE
        if not is_there and len(self.on_device()) >= self.device_room:
            raise AdapterNoRoomError(f"no room for adapter_id {adapter_id} on the device")
        return AddOutcome(self._change("promote", adapter_id, tier=Tier.DEVICE, lora_slot=adapter_id))

    def evict_adapter(self, adapter_id: int) -> bool:
        self.faults.meet("evict")
        with self._lock:
            where = self.find(adapter_id)
        assert not where.is_pinned, "a pinned adapter is evicted"
        lower = Tier.HOST if where.tier is Tier.DEVICE else Tier.SOURCE
        return self._change("evict", adapter_id, tier=lower, lora_slot=None)

    def set_quotas(self, quotas: Mapping[str, MemoryQuota]) -> None:
        self.faults.meet("set_quotas")

    def check_pins(self, tenant: str, adapter_id: int | None) -> None:
        self.faults.meet("check_pins")

    def pin_adapter(self, adapter_id: int) -> bool:
        self.faults.meet("pin")
        return self._change("pin", adapter_id, is_pinned=True, tier=Tier.DEVICE, lora_slot=adapter_id)

    def unpin_adapter(self, adapter_id: int) -> bool:
        self.faults.meet("unpin")
        return self._change("unpin", adapter_id, is_pinned=False)

    def abort_adapter(self, adapter_id: int) -> int:
        self.faults.meet("abort")
        self.calls.append(("abort", adapter_id))
        return self.abort(adapter_id)

    def list_adapters(self, adapter_ids: Sequence[int] | None = None) -> Sequence[AdapterResidency]:
        self.faults.meet("list")
        with self._lock:
            asked = self.adapters if adapter_ids is None else adapter_ids
            return tuple(self.adapters[each] for each in asked if each in self.adapters)

    def start_again(self) -> None:
        """What is left of an engine that died."""
        with self._lock:
            self.adapters.clear()
            self.specs.clear()

    def find(self, adapter_id: int) -> AdapterResidency:
        if adapter_id not in self.adapters:
            raise AdapterNotFoundError(f"the engine has no adapter_id {adapter_id}")
        return self.adapters[adapter_id]

    def count(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.calls)

    def pinned(self) -> set[int]:
        return {adapter_id for adapter_id, where in self.adapters.copy().items() if where.is_pinned}

    def on_device(self) -> set[int]:
        return {adapter_id for adapter_id, where in self.adapters.copy().items() if where.tier is Tier.DEVICE}

    def _change(self, verb: str, adapter_id: int, **changes: object) -> bool:
        with self._lock:
            before = self.find(adapter_id)
            self.calls.append((verb, adapter_id))
            self.adapters[adapter_id] = replace(before, **changes)  # type: ignore[arg-type]
            return self.adapters[adapter_id] != before


def digest_of(path: str) -> str:
    """Of what `FakeSources` finds under a path, unless a test says otherwise."""
    return hashlib.blake2b(path.encode(), digest_size=32).hexdigest()


class FakeSources:
    """Paths with contents. `open` is the registry's `open_adapter`: it counts and fails like the real one."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.texts: dict[str, AdapterText] = {}
        self.num_opened: Counter[str] = Counter()
        self.faults = Faults()

    def open(self, path: str) -> OpenedAdapter:
        self.num_opened[path] += 1
        digest = self.digests.get(path, digest_of(path))  # read first, as a slow reader would
        self.faults.meet("open")
        if digest == "missing":
            raise AdapterPathNotFoundError(f"no such path: {path}")
        return OpenedAdapter(f"/cache{path}", digest, NBYTES, 8, self.texts.get(path))


class MemoryJournal:
    """Implements registry.Journal in a dict."""

    def __init__(self) -> None:
        self.names: dict[str, NameRecord] = {}
        self.last_adapter_id = 0
        self.error: JournalError | None = None
        self.num_changes = 0

    def record(self, changes: Sequence[NameChange]) -> Future[None]:
        for change in changes:
            self.num_changes += 1
            if change.record is None:
                self.names.pop(change.name, None)
            else:
                self.names[change.name] = change.record
                ids = [version.adapter_id for version in change.record.versions]
                self.last_adapter_id = max(self.last_adapter_id, *ids)
        written: Future[None] = Future()
        if self.error is None:
            written.set_result(None)
        else:
            written.set_exception(self.error)
        return written

    def count(self, take_usage: Callable[[], Sequence[NameUsage]]) -> None:
        pass


@dataclass
class Bench:
    """A registry on fakes. Jobs that `release` hands on are kept in `jobs` until `run_jobs`."""

    max_loaded_loras: int | None = None
    abort_grace_s: float = 0.0
    max_versions_kept: int = 1
    journal: Journal | None = None
    told: list[tuple[EventKind, str, str]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    store: FakeStore = field(default_factory=FakeStore)
    sources: FakeSources = field(default_factory=FakeSources)
    jobs: list[Callable[[], None]] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.registry = LoRARegistry(
            self.store,
            self.sources.open,
            self.max_loaded_loras,
            ("base",),
            run_later=self.jobs.append,
            clock=lambda: self.now,
            abort_grace_s=self.abort_grace_s,
            max_versions_kept=self.max_versions_kept,
            journal=self.journal,
            on_unused=self.unused.append,
            on_change=lambda kind, name, text, details: self.told.append((kind, name, text)),
        )

    def run_jobs(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def forbid_calls_under_lock(self) -> None:
        """From now on a call of the store or a source while this thread holds the registry's lock fails the test."""
        lock = self.registry._lock

        def check(method: str) -> None:
            assert lock.acquire(blocking=False), f"{method} is called under the lock"
            lock.release()

        self.store.faults.before = self.sources.faults.before = check

    def check_idle(self) -> None:
        """Rule 11: no references, no leftovers, and the store holds what is registered and nothing else."""
        self.run_jobs()
        self.registry.check_integrity()
        assert self.registry.num_references == 0
        assert set(self.registry.specs()) == set(self.store.specs.values())
        registered = {each.ref.adapter_id for info in self.registry.list_adapters() for each in info.versions}
        assert registered == set(self.store.adapters)
