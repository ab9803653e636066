"""Limits of a tenant's bytes in either tier: what leaves for them, what waits, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_store import MemoryQuota
from loraplex.core import MixPart, Tier, WaitsFor
from loraplex.errors import AdapterBeyondQuotaError, AdapterError, AdapterNoRoomError, AdapterQuotaError
from tests.memory.eviction.test_shares import prefetch, spec, use
from tests.memory.fake_copies import FakeCopies
from tests.memory.rig import Rig, make_model

SIZE = Rig.packed_nbytes(make_model("size"))
TIERS = {"device_bytes": Tier.DEVICE, "host_bytes": Tier.HOST}


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(num_device=6, num_host=6, is_separate=request.param)


def limit(rig: Rig, **quotas: tuple[int | None, int | None]) -> None:
    """By tenant: adapters on the device, and in the host's memory."""

    def nbytes(num: int | None) -> int | None:
        return None if num is None else num * SIZE

    rig.manager.set_quotas(
        {tenant: MemoryQuota(nbytes(host), nbytes(device)) for tenant, (device, host) in quotas.items()}
    )


def attach(rig: Rig, **names: str | range | tuple[int, ...]) -> None:
    for tenant, numbers in names.items():
        rig.manager.attach_adapters([spec(rig, int(number), tenant) for number in numbers])


def on_device(rig: Rig, *adapter_ids: int) -> list[bool]:
    return [rig.tier_of(each) == "device" for each in adapter_ids]


def used(rig: Rig, tenant: str, tier: Tier) -> int:
    return rig.manager._residency.room.uses[tier].nbytes[tenant]


def ask(rig: Rig, adapter_id: int) -> WaitsFor | None:
    """In a pass of its own, and what it waits for once all loads have ended."""
    assert rig.loader is not None
    for _ in range(3):
        rig.manager.poll()
        result = rig.manager.try_acquire(adapter_id)
        if result.lora_slot is not None:
            return None
        rig.loader.run_all()
    return result.waits_for


@pytest.mark.parametrize("kind", ["device", "host"])
def test_its_own_leave_for_its_limit_and_no_others(rig: Rig, kind: str) -> None:
    limit(rig, acme=(2, None) if kind == "device" else (None, 2))
    attach(rig, acme=(1, 2, 3), beta=(4, 5))
    for number in (4, 5, 1, 2):
        use(rig, number)
    use(rig, 3)
    assert on_device(rig, 2, 3, 4, 5) == [True] * 4
    if kind == "device" or rig.manager.is_shared:
        assert on_device(rig, 1) == [False]
    assert used(rig, "acme", Tier.DEVICE if kind == "device" else Tier.HOST) <= 2 * SIZE
    use(rig, 1)
    assert on_device(rig, 1, 4, 5) == [True] * 3
    rig.manager.check_integrity()


def test_what_runs_of_its_own_is_waited_for_and_takes_turns(rig: Rig) -> None:
    limit(rig, acme=(2, None))
    attach(rig, acme=(1, 2, 3), beta=(4,))
    for number in (1, 2, 4):
        rig.acquire(number)
    assert ask(rig, 3) is WaitsFor.ROOM
    assert rig.manager.victims_for(3, [4, 2, 1]) == [2], "the first of its own, and no other tenant's"
    rig.manager.release(2)
    assert ask(rig, 3) is None
    assert on_device(rig, 1, 2, 3, 4) == [True, False, True, True]
    rig.manager.check_integrity()


def test_a_request_that_waits_for_its_limit_takes_no_room_from_others() -> None:
    """Memory on its way back was promised to it, and no other request got any."""
    rig = Rig(num_device=3, num_host=6)
    limit(rig, acme=(1, None))
    attach(rig, acme=(1, 2), beta=(3, 4, 5))
    rig.acquire(1)
    for number in (3, 4):
        use(rig, number)
    rig.manager.step_launched(1)
    assert ask(rig, 2) is WaitsFor.ROOM
    rig.manager.evict_adapter(3)
    assert ask(rig, 2) is WaitsFor.ROOM
    assert ask(rig, 5) is None, "the limit of another tenant is in no other one's way"
    rig.manager.step_committed(1)
    rig.manager.check_integrity()


def test_what_is_larger_than_its_limit_is_refused(rig: Rig) -> None:
    attach(rig, acme=(1, 2), beta=(3,))
    rig.manager.set_quotas({"acme": MemoryQuota(device_bytes=SIZE - 1)})
    with pytest.raises(AdapterBeyondQuotaError, match=rf"'acme/a1' needs {SIZE} .* device_bytes of tenant acme is"):
        ask(rig, 1)
    with pytest.raises(AdapterBeyondQuotaError, match=r"device_bytes of tenant acme") as caught:
        rig.manager.add_adapter(spec(rig, 9, "acme"))
    assert caught.value.tenant == "acme"
    assert ask(rig, 3) is None
    rig.manager.set_quotas({"acme": MemoryQuota(host_bytes=SIZE - 1)})
    with pytest.raises(AdapterBeyondQuotaError, match=r"host_bytes of tenant acme is"):
        ask(rig, 2)
    rig.manager.set_quotas({})
    assert ask(rig, 2) is None


def test_its_own_pins_refuse_a_request(rig: Rig) -> None:
    limit(rig, acme=(2, None))
    attach(rig, acme=(1, 2, 3))
    for number in (1, 2):
        rig.pin(number)
    with pytest.raises(AdapterQuotaError, match=rf"{2 * SIZE} are taken, {2 * SIZE} of them pinned; unpin or evict"):
        ask(rig, 3)
    rig.manager.unpin_adapter(1)
    assert ask(rig, 3) is None
    rig.manager.check_integrity()


def test_pins_by_its_own_verb_are_refused_beyond_its_limit_and_others_stay(rig: Rig) -> None:
    limit(rig, acme=(2, None))
    attach(rig, acme=(1, 2, 3))
    for number in (1, 2, 3):
        use(rig, number)
    for number in (1, 2):
        rig.manager.check_pins("acme", number)
        rig.pin(number)
    for number in (3, None):
        with pytest.raises(AdapterQuotaError, match=r"device_bytes of tenant acme .* of 2 adapters are pinned"):
            rig.manager.check_pins("acme", number)
    rig.manager.check_pins("acme", 1)
    rig.pin(3)  # an operator's, or what was pinned before a restart
    limit(rig, acme=(1, None))
    assert on_device(rig, 1, 2, 3) == [True] * 3
    rig.manager.check_integrity()


def test_a_pin_pushes_out_what_is_idle_of_its_own(rig: Rig) -> None:
    limit(rig, acme=(1, None))
    attach(rig, acme=(1, 2), beta=(3,))
    for number in (3, 1):
        use(rig, number)
    rig.pin(2)
    assert on_device(rig, 1, 2, 3) == [False, True, True]


def test_a_verb_does_not_wait_for_requests(rig: Rig) -> None:
    limit(rig, acme=(1, None))
    attach(rig, acme=(1, 2))
    use(rig, 2)
    rig.acquire(1)
    with pytest.raises(AdapterQuotaError, match="unpin or evict another adapter of the tenant"):
        rig.activate(2)
    rig.manager.release(1)
    assert rig.activate(2)


def test_loads_by_verbs_obey_the_hosts_limit() -> None:
    rig = Rig(num_device=6, num_host=6)
    limit(rig, acme=(None, 2))
    for number in (1, 2, 3):
        rig.manager.add_adapter(spec(rig, number, "acme"))
    assert [rig.tier_of(number) for number in (1, 2, 3)] == ["source", "host", "host"]
    for number in (2, 3):
        rig.acquire(number)
    with pytest.raises(AdapterQuotaError, match="host_bytes of tenant acme"):
        rig.manager.add_adapter(spec(rig, 4, "acme"))
    rig.manager.check_integrity()


def test_prefetch_obeys(rig: Rig) -> None:
    limit(rig, acme=(2, 2))
    attach(rig, acme=(1, 2, 3))
    for number in (1, 2):
        rig.acquire(number)
    prefetch(rig, 3)
    rig.manager.poll()
    rig.manager.housekeeping.prefetch([3])
    assert rig.loader is not None
    rig.loader.run_all()
    assert on_device(rig, 3) == [False]
    assert used(rig, "acme", Tier.DEVICE) == 2 * SIZE
    assert rig.manager.is_shared <= (rig.tier_of(3) == "source")
    rig.manager.check_integrity()


def test_a_smaller_limit_lets_go_at_once_what_is_idle_and_the_rest_later(rig: Rig) -> None:
    attach(rig, acme=range(1, 5), beta=(5,))
    for number in (5, 1, 2):
        use(rig, number)
    for number in (3, 4):
        rig.acquire(number)
    limit(rig, acme=(1, None))
    assert on_device(rig, *range(1, 6)) == [False, False, True, True, True]
    rig.manager.release(3)
    rig.manager.reclaim_beyond_quotas()  # the monitor
    assert on_device(rig, *range(1, 6)) == [False, False, False, True, True]
    rig.manager.release(4)
    use(rig, 1)
    assert on_device(rig, 1, 4, 5) == [True, False, True]
    limit(rig)
    for number in range(1, 5):
        use(rig, number)
    assert on_device(rig, *range(1, 6)) == [True] * 5
    rig.manager.check_integrity()


def test_a_smaller_limit_of_the_host_takes_spare_copies_too() -> None:
    rig = Rig(num_device=6, num_host=6, is_separate=True)
    attach(rig, acme=(1, 2))
    for number in (1, 2):
        rig.acquire(number)
    limit(rig, acme=(None, 1))
    assert used(rig, "acme", Tier.HOST) == SIZE
    assert on_device(rig, 1, 2) == [True, True], "requests run on"
    rig.manager.check_integrity()


def test_a_mix_larger_than_a_limit_is_refused(rig: Rig) -> None:
    models = [make_model(f"d{number}", modules=("v_proj",)) for number in (1, 2)]
    for number, model in enumerate(models, 1):
        rig.source.put(f"/p{number}", model)
    nbytes = sum(map(rig.packed_nbytes, models))
    rig.manager.set_quotas({"acme": MemoryQuota(device_bytes=nbytes - 1)})
    attach(rig, acme=(1, 2), beta=(3,))
    for number in (1, 2, 3):
        use(rig, number)
    rig.manager.poll()
    with pytest.raises(AdapterBeyondQuotaError, match=rf"a mix of 2 adapters of tenant acme needs {nbytes} bytes"):
        rig.manager.try_acquire_mix((MixPart(1, "d1", 1.0), MixPart(2, "d2", 1.0)))


# ------------------------------------------------------------------------------------------------------ shared contents


def test_a_shared_content_comes_for_a_tenant_within_its_limit(rig: Rig) -> None:
    """Whatever the other tenant that has it has, too."""
    limit(rig, acme=(1, None), beta=(2, None))
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same")])
    attach(rig, acme=(3,), beta=(4,))
    rig.acquire(3)
    assert ask(rig, 2) is None
    assert used(rig, "acme", Tier.DEVICE) == 2 * SIZE
    rig.manager.release(2)
    rig.manager.release(3)
    attach(rig, acme=(5,))
    use(rig, 5)
    assert on_device(rig, 1, 2, 3, 5) == [True, True, False, True], "what beta has within its limit stays"
    rig.manager.check_integrity()


def test_a_load_beyond_one_tenants_limit_ends_no_request_of_another_with_its_content(rig: Rig) -> None:
    """The first load is one job for both, and its size shows only when it is open."""
    assert rig.loader is not None
    rig.manager.set_quotas({"acme": MemoryQuota(host_bytes=1)})
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same")])
    for number in (1, 2):
        assert rig.manager.try_acquire(number).waits_for is WaitsFor.LOAD
    rig.loader.run_all()
    rig.manager.poll()
    with pytest.raises(AdapterBeyondQuotaError, match=r"host_bytes of tenant acme is 1 bytes"):
        rig.manager.try_acquire(1)
    assert rig.manager.try_acquire(2).waits_for is WaitsFor.LOAD
    rig.loader.run_all()
    assert ask(rig, 2) is None
    rig.manager.check_integrity()


def test_a_load_beyond_one_tenants_limit_ends_no_add_of_another_with_its_content(rig: Rig) -> None:
    """It waited for an older load when this one began, as one with its source too."""
    assert rig.loader is not None
    rig.manager.set_quotas({"acme": MemoryQuota(host_bytes=1)})
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same")])
    beta, residency = spec(rig, 2, "beta", "same"), rig.manager._residency
    with residency.held():
        residency.attach_locked(beta, lambda: rig.source.open(beta))
    assert rig.manager.try_acquire(1).waits_for is WaitsFor.LOAD
    rig.loader.run_all()
    assert [each.adapter_id for each in rig.manager.list_adapters()] == [1, 2]
    assert ask(rig, 2) is None
    rig.manager.check_integrity()


def test_a_verb_of_one_tenant_takes_no_content_from_another(rig: Rig) -> None:
    """A tenant with a copy of another's adapter, or of a public one, evicted it for both, as often as it liked."""
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same"), spec(rig, 3, "beta")])
    for number in (1, 3):
        assert ask(rig, number) is None
        rig.manager.release(number)
    assert on_device(rig, 1, 2, 3) == [True, True, True]
    assert not rig.manager.evict_adapter(2)
    assert not rig.manager.deactivate_adapter(2)
    assert rig.manager.evict_adapter(3), "no other tenant has it"
    assert on_device(rig, 1, 2, 3) == [True, True, False]
    rig.manager.drop_adapter(1)
    assert rig.manager.evict_adapter(2), "it is beta's alone now"
    rig.manager.check_integrity()


def test_pins_and_requests_of_another_tenant_are_not_in_its_way(rig: Rig) -> None:
    limit(rig, acme=(1, None), beta=(1, None))
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same")])
    attach(rig, acme=(3,))
    rig.pin(2)
    assert ask(rig, 3) is None
    assert on_device(rig, 1, 3) == [True, True]
    assert ask(rig, 1) is None, "it is there already"
    rig.manager.check_integrity()


def test_two_tenants_with_the_same_contents_have_no_more_than_their_limits(rig: Rig) -> None:
    """Each one's would be the other's."""
    limit(rig, acme=(2, None), beta=(2, None))
    for number in range(1, 6):
        rig.manager.attach_adapters(
            [spec(rig, number, "acme", f"s{number}"), spec(rig, number + 10, "beta", f"s{number}")]
        )
    for number in (1, 2, 13, 14, 5, 1, 12):
        use(rig, number)
        assert used(rig, "acme", Tier.DEVICE) <= 2 * SIZE
    rig.manager.check_integrity()


def test_of_a_shared_content_its_own_requests_give_way(rig: Rig) -> None:
    limit(rig, acme=(1, None))
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same")])
    attach(rig, acme=(3,))
    for number in (1, 2):
        rig.acquire(number)
    assert ask(rig, 3) is WaitsFor.ROOM
    assert rig.manager.victims_for(3, [2, 1]) == [1]
    rig.manager.release(1)
    assert ask(rig, 3) is None
    assert on_device(rig, 1, 2, 3) == [True] * 3
    rig.manager.check_integrity()


# ------------------------------------------------------------------------------------------------------------- anything

NUMBERS = st.integers(1, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["ask", "release", "prefetch", "expect", "promote", "evict", "unpin"]), NUMBERS),
        st.tuples(st.just("pin"), NUMBERS),
        st.tuples(st.just("load"), st.just(0)),
        st.tuples(st.just("commit"), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
    STEPS,
    st.sampled_from(["one memory", "two memories", "arriving"]),
    st.sampled_from(["lru", "cost_aware"]),
    st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=4, max_size=4),
    st.booleans(),
)
def test_no_tenant_has_more_than_its_limit(
    steps: list[tuple[str, int]], kind: str, policy: str, limits: list[int | None], is_shared: bool
) -> None:
    """But by pins, and by contents that another tenant has as well."""
    copies = FakeCopies() if kind == "arriving" else None
    rig = Rig(num_device=4, num_host=5, policy=policy, is_separate=kind != "one memory", copies=copies)
    tenants = ("", "acme", "beta")
    limit(rig, acme=(limits[0], limits[1]), beta=(limits[2], limits[3]))
    for number in range(1, 10):
        digest = f"d{number % 4}" if is_shared else ""
        rig.manager.attach_adapters([spec(rig, number, tenants[number % 3], digest)])
    run = _Run(rig, copies)
    for step, number in steps:
        run.step(step, number)
        rig.manager.check_integrity()
        room = rig.manager._residency.room
        for tenant, numbers in (("acme", (limits[1], limits[0])), ("beta", (limits[3], limits[2]))):
            for tier, most in zip((Tier.HOST, Tier.DEVICE), numbers, strict=True):
                held = [rig.manager._residency.weights[each] for each in room.uses[tier].digests.get(tenant, ())]
                alone = [each for each in held if each.tenants == {tenant} or not is_shared]
                pinned = sum(each.num_pinned > 0 for each in alone)
                assert most is None or len(alone) <= max(most, pinned), (tenant, tier)
    run.end()


class _Run:
    def __init__(self, rig: Rig, copies: FakeCopies | None) -> None:
        self._rig, self._copies = rig, copies
        self._running: list[int] = []
        self._step_id = 0

    def step(self, what: str, number: int) -> None:
        manager, loader = self._rig.manager, self._rig.loader
        assert loader is not None
        self._rig.clock.now_s += 0.5
        try:
            match what:
                case "ask":
                    manager.poll()
                    if manager.try_acquire(number).lora_slot is not None:
                        self._running.append(number)
                    victims = manager.victims_for(number, sorted(set(self._running)))
                    assert set(victims) <= set(self._running)
                case "release" if self._running:
                    manager.release(self._running.pop(number % len(self._running)))
                case "prefetch":
                    manager.prefetch(number)
                case "expect":
                    manager.housekeeping.prefetch([number])
                case "promote" | "pin":
                    loader.run_all()
                    tenant = ("", "acme", "beta")[number % 3]
                    if what == "pin":
                        self.release_all()  # a pin goes beyond a limit by what runs
                    if what == "pin" and tenant:
                        manager.check_pins(tenant, number)
                    self._rig.pin(number) if what == "pin" else self._rig.activate(number)
                case "evict":
                    manager.evict_adapter(number)
                case "unpin":
                    manager.unpin_adapter(number)
                    manager.reclaim_beyond_quotas()
                case "load":
                    loader.run_one()
                case "commit":
                    self._step_id += 1
                    manager.step_launched(self._step_id)
                    manager.step_committed(self._step_id)
        except AdapterError:
            return

    def release_all(self) -> None:
        while self._running:
            self._rig.manager.release(self._running.pop())

    def end(self) -> None:
        self.release_all()
        for number in range(1, 10):
            self._rig.manager.remove_adapter(number)
        assert self._rig.loader is not None
        self._rig.loader.run_all()
        self._rig.check_empty()


@settings(deadline=None, max_examples=60)
@given(st.lists(NUMBERS, min_size=1, max_size=40), st.booleans())
def test_each_that_asks_is_served(numbers: list[int], is_separate: bool) -> None:
    """Nothing runs: whatever is in the way leaves."""
    rig = Rig(num_device=3, num_host=3, is_separate=is_separate)
    limit(rig, acme=(1, 2), beta=(2, 1))
    for number in range(1, 10):
        rig.manager.attach_adapters([spec(rig, number, ("", "acme", "beta")[number % 3], f"d{number % 5}")])
    for number in numbers:
        rig.clock.now_s += 1
        use(rig, number)
        assert on_device(rig, number) == [True]
        rig.manager.check_integrity()


def test_without_limits_nothing_is_refused(rig: Rig) -> None:
    attach(rig, acme=(1, 2))
    rig.manager.set_quotas({})
    for number in (1, 2):
        rig.pin(number)
    rig.manager.check_pins("acme", 1)
    attach(rig, acme=range(3, 9))
    for number in range(3, 7):
        rig.pin(number)
    with pytest.raises(AdapterNoRoomError, match="unpin") as caught:
        rig.pin(7)
    assert not isinstance(caught.value, AdapterQuotaError)
