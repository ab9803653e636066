"""Any sequence of verbs, requests, loads and steps keeps the books exact, outputs right, and returns all at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex.adapter_store import MemoryQuota
from loraplex.compat.vllm import WorkerLoRAManager
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterError, AdapterPathNotFoundError
from tests.memory.fake_copies import FakeCopies
from tests.memory.rig import Rig, make_model, make_shared

RANKS = {"d0": 4, "d1": 1, "d2": 12, "d3": 4, "d4": 7}
DIGEST_OF = {adapter_id: f"d{adapter_id % 5}" for adapter_id in range(1, 8)}  # 1 and 6, 2 and 7 share a content
MODELS = {digest: make_model(digest, rank) for digest, rank in RANKS.items()}
SHARED_MODELS = {
    "d0": make_shared("d0"),
    "d1": make_shared("d1"),
    "d2": make_shared("d2"),
    "d3": make_shared("d3", pair="other"),
    "d4": MODELS["d4"],
}
ADAPTERS = st.sampled_from(sorted(DIGEST_OF))
BYTES = st.one_of(st.none(), st.integers(0, 4 * Rig.packed_nbytes(MODELS["d0"])))


class MemoryMachine(RuleBasedStateMachine):
    """The engine's thread and verbs, interleaved; loads happen when the machine says so."""

    policy = "lru"
    is_separate = False
    is_arriving = False
    models = MODELS

    @initialize(adapter_ids=st.lists(ADAPTERS, min_size=3, unique=True))
    def start(self, adapter_ids: list[int]) -> None:
        self.copies = FakeCopies() if self.is_arriving else None
        self.rig = Rig(num_device=4, num_host=6, policy=self.policy, is_separate=self.is_separate, copies=self.copies)
        self.manager = self.rig.manager
        assert self.rig.loader is not None
        self.loader = self.rig.loader
        self.references: Counter[int] = Counter()
        self.in_flight: list[int] = []
        self.step_id = 0
        for adapter_id in adapter_ids:
            self.add(adapter_id)

    def spec(self, adapter_id: int) -> AdapterSpec:
        digest = DIGEST_OF[adapter_id]
        self.rig.source.models.setdefault(f"/p{adapter_id}", self.models[digest])
        return self.rig.spec(adapter_id, digest)

    @property
    def known(self) -> set[int]:
        return {residency.adapter_id for residency in self.manager.list_adapters()}

    def has_no_step_in_flight(self) -> bool:
        return not self.in_flight

    # Verbs that wait need a thread that commits steps: test_steps.py and test_loads.py have the threads for that.

    @precondition(has_no_step_in_flight)
    @rule(adapter_id=ADAPTERS)
    def add(self, adapter_id: int) -> None:
        was_known = adapter_id in self.known
        try:
            with self.loader.opened():
                outcome = self.manager.add_adapter(self.spec(adapter_id))
        except AdapterError:
            assert (adapter_id in self.known) == was_known
        else:
            assert outcome.is_new != was_known
            assert adapter_id in self.known

    @rule(adapter_ids=st.lists(ADAPTERS, max_size=3))
    def attach(self, adapter_ids: list[int]) -> None:
        try:
            self.manager.attach_adapters([self.spec(adapter_id) for adapter_id in adapter_ids])
        except AdapterError:
            return  # requests still run on a removed adapter of that id
        assert set(adapter_ids) <= self.known

    @precondition(has_no_step_in_flight)
    @rule(adapter_id=ADAPTERS, verb=st.sampled_from(["activate_adapter", "pin_adapter"]))
    def bring(self, adapter_id: int, verb: str) -> None:
        # a first load takes its room when it knows its size: one begun before may push this one out again
        self.loader.run_all()
        try:
            with self.loader.opened():
                getattr(self.manager, verb)(adapter_id)
        except AdapterError:
            return
        assert self.rig.tier_of(adapter_id) == "device"

    @rule(adapter_id=ADAPTERS)
    def remove(self, adapter_id: int) -> None:
        was_known = adapter_id in self.known
        assert self.manager.remove_adapter(adapter_id) == was_known
        assert adapter_id not in self.known

    @rule(adapter_id=ADAPTERS, verb=st.sampled_from(["deactivate_adapter", "evict_adapter", "unpin_adapter"]))
    def let_go(self, adapter_id: int, verb: str) -> None:
        before = {r.adapter_id: r for r in self.manager.list_adapters()}
        if adapter_id not in before:
            return
        has_changed = getattr(self.manager, verb)(adapter_id)
        after = {r.adapter_id: r for r in self.manager.list_adapters()}
        assert has_changed == (before[adapter_id] != after[adapter_id])

    # -------------------------------------------------------------------------------------------- the engine's thread

    @rule(adapter_id=ADAPTERS)
    def acquire(self, adapter_id: int) -> None:
        try:
            result = self.manager.try_acquire(adapter_id)
        except AdapterError:
            return
        assert (result.lora_slot is None) != (result.waits_for is None)
        if result.lora_slot is not None:
            self.references[adapter_id] += 1
            self.check_unless_arriving(result.lora_slot, adapter_id)

    @rule(adapter_ids=st.lists(ADAPTERS, min_size=1, max_size=4))
    def schedule(self, adapter_ids: list[int]) -> None:
        """Passes in which several requests ask in turn, with the loads that they start in between."""
        for _ in range(3):
            self.poll()
            for adapter_id in adapter_ids:
                self.acquire(adapter_id)
            self.loader.run_all()

    @precondition(lambda self: self.references)
    @rule()
    def release_all(self) -> None:
        for adapter_id in sorted(self.references.elements()):
            self.manager.release(adapter_id)
        self.references.clear()

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        adapter_id = data.draw(st.sampled_from(sorted(self.references.elements())))
        self.references -= Counter([adapter_id])
        self.manager.release(adapter_id)

    @rule(adapter_id=ADAPTERS)
    def prefetch(self, adapter_id: int) -> None:
        self.manager.prefetch(adapter_id)

    @rule(adapter_id=ADAPTERS)
    def name_victims(self, adapter_id: int) -> None:
        if adapter_id in self.known:
            victims = self.manager.victims_for(adapter_id, sorted(set(self.references.elements())))
            pinned = {r.adapter_id for r in self.manager.list_adapters() if r.is_pinned}
            assert all(self.references[victim] for victim in victims)
            assert pinned.isdisjoint(victims)

    @rule()
    def poll(self) -> None:
        self.rig.clock.now_s += 1.0
        self.manager.poll()

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def launch(self) -> None:
        self.step_id += 1
        self.in_flight.append(self.step_id)
        self.manager.step_launched(self.step_id)

    @precondition(lambda self: self.in_flight)
    @rule()
    def commit(self) -> None:
        self.manager.step_committed(self.in_flight.pop(0))

    # --------------------------------------------------------------------------------------------- what happens outside

    @rule()
    def load_one(self) -> None:
        self.loader.run_one()

    @rule(adapter_id=ADAPTERS, has_vanished=st.booleans())
    def source_turns_bad(self, adapter_id: int, has_vanished: bool) -> None:
        if has_vanished:
            self.rig.source.errors[f"/p{adapter_id}"] = AdapterPathNotFoundError("gone")
        else:
            self.rig.source.models[f"/p{adapter_id}"] = self.models[DIGEST_OF[adapter_id % 7 + 1]]

    @rule()
    def sources_are_mended(self) -> None:
        self.rig.source.errors.clear()
        self.rig.source.models.clear()
        for adapter_id, digest in DIGEST_OF.items():
            self.rig.source.models[f"/p{adapter_id}"] = self.models[digest]

    # ----------------------------------------------------------------------------------------------------------- always

    @invariant()
    def books_are_exact(self) -> None:
        self.manager.check_integrity()
        running = {r.adapter_id: r.num_running for r in self.manager.list_adapters() if r.num_running}
        assert all(self.references[adapter_id] == count for adapter_id, count in running.items())
        stats = self.manager.report()
        assert stats.tier("device").used_bytes <= stats.tier("device").max_bytes
        assert stats.tier("host").used_bytes <= stats.tier("host").max_bytes
        assert stats.pinned_bytes <= stats.tier("device").max_bytes

    @invariant()
    def slots_hold_what_they_say(self) -> None:
        for slot, adapter_id in enumerate(WorkerLoRAManager(self.manager).lora_index_to_id[:4]):
            if adapter_id is not None:
                self.check_unless_arriving(slot, adapter_id)

    def check_unless_arriving(self, lora_slot: int, adapter_id: int) -> None:
        """Looking as a step does would end the copy."""
        if lora_slot not in self.manager._residency.arriving:
            self.rig.check_output(lora_slot, self.models[DIGEST_OF[adapter_id]])

    def teardown(self) -> None:
        for adapter_id in self.references.elements():
            self.manager.release(adapter_id)
        for step_id in self.in_flight:
            self.manager.step_committed(step_id)
        for adapter_id in self.known:
            self.manager.remove_adapter(adapter_id)
        self.loader.run_all()
        self.rig.check_empty()
        self.manager.close()


class OneMemoryNoEviction(MemoryMachine):
    policy = "none"


class TwoMemories(MemoryMachine):
    is_separate = True


class TwoMemoriesNoEviction(TwoMemories):
    policy = "none"


class Arriving(MemoryMachine):
    """Copies are done when the machine, a loader's thread or a step says so; weights are checked beside the steps."""

    is_arriving = True

    @rule(num_pieces=st.integers(1, 2))
    def pieces_arrive(self, num_pieces: int) -> None:
        assert self.copies is not None
        self.copies.run(num_pieces)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def run_layers(self, data: st.DataObject) -> None:
        """A step on what may be arriving: each layer is right when its gate opens."""
        adapter_id = data.draw(st.sampled_from(sorted(self.references)))
        weights = next(each for each in self.manager._residency.weights.values() if adapter_id in each.adapters)
        slot = weights.lora_slot
        assert slot is not None
        self.rig.check_output(slot, self.models[DIGEST_OF[adapter_id]])

    @rule(max_bytes=st.integers(1, 20_000))
    def scrub(self, max_bytes: int) -> None:
        assert self.manager.health.scrub(max_bytes) == {}
        assert self.manager.health.take_faults() == {}

    @rule()
    def compact(self) -> None:
        self.manager.compact(1 << 20, deadline_s=float("inf"))


class Shared(MemoryMachine):
    """Adapters over two pairs of projections, beside a plain one; memory changes, is checked and compacted."""

    models = SHARED_MODELS

    @rule(max_bytes=st.integers(1, 20_000))
    def scrub(self, max_bytes: int) -> None:
        assert self.manager.health.scrub(max_bytes) == {}

    @rule()
    def compact(self) -> None:
        self.manager.compact(1 << 20, deadline_s=float("inf"))

    @rule(num_chunks=st.integers(1, 3))
    def give_chunks_to_the_kv_cache(self, num_chunks: int) -> None:
        self.manager.reclaim_chunks(num_chunks)


class Limited(MemoryMachine):
    """Adapters of three tenants that share contents, whose limits in memory come, change and go."""

    def spec(self, adapter_id: int) -> AdapterSpec:
        tenant = ("acme", "beta", "gamma")[adapter_id % 3]
        return replace(super().spec(adapter_id), adapter_name=f"{tenant}/{adapter_id}")

    @rule(limits=st.dictionaries(st.sampled_from(["acme", "beta"]), st.tuples(BYTES, BYTES)))
    def limit(self, limits: dict[str, tuple[int | None, int | None]]) -> None:
        self.manager.set_quotas({tenant: MemoryQuota(*nbytes) for tenant, nbytes in limits.items()})

    @rule()
    def look(self) -> None:
        self.manager.reclaim_beyond_quotas()

    @rule(adapter_id=ADAPTERS)
    def expect(self, adapter_id: int) -> None:
        self.manager.housekeeping.prefetch([adapter_id])


class LimitedTwoMemories(Limited):
    is_separate = True


class LimitedArriving(Limited, Arriving):
    policy = "cost_aware"


class SharedByCost(Shared):
    policy = "cost_aware"


class ArrivingByCost(Arriving):
    policy = "cost_aware"


class OneMemoryByCost(MemoryMachine):
    policy = "cost_aware"


class TwoMemoriesByCost(TwoMemories):
    policy = "cost_aware"


_SETTINGS = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestOneMemory = MemoryMachine.TestCase
TestOneMemory.settings = _SETTINGS
TestOneMemoryNoEviction = OneMemoryNoEviction.TestCase
TestOneMemoryNoEviction.settings = _SETTINGS
TestTwoMemories = TwoMemories.TestCase
TestTwoMemories.settings = _SETTINGS
TestTwoMemoriesNoEviction = TwoMemoriesNoEviction.TestCase
TestTwoMemoriesNoEviction.settings = _SETTINGS
TestArriving = Arriving.TestCase
TestArriving.settings = _SETTINGS
TestArrivingByCost = ArrivingByCost.TestCase
TestArrivingByCost.settings = _SETTINGS
TestOneMemoryByCost = OneMemoryByCost.TestCase
TestOneMemoryByCost.settings = _SETTINGS
TestTwoMemoriesByCost = TwoMemoriesByCost.TestCase
TestTwoMemoriesByCost.settings = _SETTINGS
TestShared = Shared.TestCase
TestShared.settings = _SETTINGS
TestLimited = Limited.TestCase
TestLimited.settings = _SETTINGS
TestLimitedTwoMemories = LimitedTwoMemories.TestCase
TestLimitedTwoMemories.settings = _SETTINGS
TestLimitedArriving = LimitedArriving.TestCase
TestLimitedArriving.settings = _SETTINGS
TestSharedByCost = SharedByCost.TestCase
TestSharedByCost.settings = _SETTINGS
