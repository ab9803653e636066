"""Tenants in one memory: which adapters one pushes out of it for its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapter_store import MemoryQuota
from loraplex.core import AdapterSpec, Tier, WaitsFor
from loraplex.errors import AdapterNoRoomError
from loraplex.memory.eviction.shares import RECENT_S
from loraplex.memory.residency.records import StoredWeights
from loraplex.memory.weights.disk_cache import DiskCache
from loraplex.memory.weights.packing import Packer
from tests.kernels.cases import BACKENDS
from tests.memory.fake_copies import FakeCopies
from tests.memory.rig import BASE, TARGETS, Rig, make_model


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(num_device=4, num_host=4, is_separate=request.param)


def spec(rig: Rig, adapter_id: int, tenant: str, digest: str = "") -> AdapterSpec:
    return replace(rig.spec(adapter_id, digest), adapter_name=f"{tenant}/a{adapter_id}" if tenant else f"a{adapter_id}")


def use(rig: Rig, adapter_id: int) -> None:
    rig.acquire(adapter_id)
    rig.manager.release(adapter_id)


@pytest.mark.parametrize("tenant", ["acme", ""], ids=["a tenant's", "the operator's"])
def test_what_is_within_a_share_stays_while_another_tenant_goes_round(rig: Rig, tenant: str) -> None:
    """Forty adapters of one tenant, and another one's only adapter left memory with each of its turns."""
    rig.manager.attach_adapters([spec(rig, 1, tenant), *(spec(rig, number, "beta") for number in range(2, 12))])
    use(rig, 1)
    for number in (*range(2, 12), *range(2, 12)):
        rig.clock.now_s += 1
        use(rig, number)
        assert rig.tier_of(1) == "device"
    rig.manager.check_integrity()


def test_a_share_of_the_disk_stays_too(rig: Rig, tmp_path: Path) -> None:
    """An adapter that left memory long ago comes back without its source, however many others were loaded since."""
    packer = Packer(TARGETS, BACKENDS[0], torch.float32, BASE)
    nbytes = 4 * (Rig.packed_nbytes(make_model("size")) + 3 * 4096)
    disk = rig.manager._tiers.disk = DiskCache(tmp_path, nbytes, "form", packer.check_layout)
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 12))])
    for number in range(1, 12):
        use(rig, number)
        rig.clock.now_s += RECENT_S + 1
    assert rig.tier_of(1) == "disk"
    assert disk.stats().num_evictions > 0
    rig.manager.check_integrity()


def test_what_is_not_used_leaves(rig: Rig) -> None:
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 7))])
    use(rig, 1)
    rig.clock.now_s += RECENT_S + 1
    for number in range(2, 7):
        use(rig, number)
    assert rig.tier_of(1) != "device"


def test_what_is_beyond_a_share_leaves(rig: Rig) -> None:
    rig.manager.attach_adapters([*(spec(rig, number, "acme") for number in range(1, 5)), spec(rig, 5, "beta")])
    for number in range(1, 5):
        use(rig, number)
    use(rig, 5)
    assert [rig.tier_of(number) == "device" for number in range(1, 6)] == [False, True, True, True, True]


def test_a_tenant_that_runs_beyond_its_share_waits_for_its_own(rig: Rig) -> None:
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 6))])
    use(rig, 1)
    for number in (2, 3, 4):
        rig.acquire(number)
    for _ in range(3):
        rig.manager.poll()
        waits_for = rig.manager.try_acquire(5).waits_for
        assert rig.loader is not None
        rig.loader.run_all()
    assert waits_for is WaitsFor.ROOM
    rig.manager.release(2)
    rig.acquire(5)
    assert (rig.tier_of(1), rig.tier_of(2) == "device") == ("device", False)
    rig.manager.check_integrity()


def test_where_nothing_of_its_own_runs_a_request_does_not_wait(rig: Rig) -> None:
    """Pins of its own fill its share: nothing of them ends by itself."""
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "") for number in range(2, 6))])
    use(rig, 1)
    for number in (2, 3, 4):
        rig.pin(number)
    use(rig, 5)
    assert rig.tier_of(1) != "device"


def test_pins_of_a_tenant_take_its_share_at_most(rig: Rig) -> None:
    """One tenant pinned all memory, and each request of another one for an adapter was refused."""
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 5))])
    for number in (2, 3):
        rig.manager.check_pins("beta", number)
        rig.pin(number)
    use(rig, 4)
    beyond = pytest.raises(AdapterNoRoomError, match=r"one more than 2 pinned adapters .* more than its share")
    for number in (4, None):
        with beyond:
            rig.manager.check_pins("beta", number)
    rig.manager.check_pins("beta", 2)
    rig.manager.check_pins("acme", 1)
    rig.manager.unpin_adapter(3)
    rig.manager.check_pins("beta", 4)
    rig.pin(4)
    rig.manager.check_integrity()


def test_a_check_of_pins_goes_over_nothing_but_pins(rig: Rig) -> None:
    """It went over all contents in the step loop, twice where any tenant had a limit of bytes."""

    class Unwalked(dict[str, StoredWeights]):
        def values(self) -> Any:
            raise AssertionError("all contents are gone over")

    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 5))])
    rig.manager.set_quotas({"beta": MemoryQuota(device_bytes=10**9)})
    for number in (2, 3):
        rig.pin(number)
    use(rig, 4)
    room = rig.manager._residency.room
    room._weights = Unwalked(room._weights)
    rig.manager.check_pins("beta", 2)
    with pytest.raises(AdapterNoRoomError, match="more than its share"):
        rig.manager.check_pins("beta", 4)


def test_what_is_pinned_stays_so_when_there_are_more_tenants(rig: Rig) -> None:
    """A new version of a pinned adapter, or an engine that starts again, lost the pin: the share had become smaller."""
    rig.manager.attach_adapters([spec(rig, number, "beta") for number in (1, 2, 3)])
    for number in (1, 2, 3):
        rig.pin(number)
    rig.manager.attach_adapters([spec(rig, 4, "acme"), spec(rig, 5, "gamma")])
    rig.manager.unpin_adapter(3)
    rig.pin(3)
    rig.manager.check_integrity()


def test_a_content_of_two_tenants_is_kept_for_either(rig: Rig) -> None:
    rig.manager.attach_adapters([spec(rig, 1, "acme", "same"), spec(rig, 2, "beta", "same")])
    rig.manager.attach_adapters([spec(rig, number, "beta") for number in range(3, 8)])
    use(rig, 1)
    for number in range(3, 8):
        rig.clock.now_s += 1
        use(rig, number)
    assert rig.tier_of(1) == "device"


def test_where_what_runs_of_its_own_is_pinned_a_request_does_not_wait(rig: Rig) -> None:
    """No end of requests takes a pinned adapter out of memory: the request for another one was refused."""
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "") for number in range(2, 6))])
    use(rig, 1)
    for number in (2, 3, 4):
        rig.pin(number)
        rig.acquire(number)
    rig.acquire(5)
    assert rig.tier_of(1) != "device"
    rig.manager.check_integrity()


def test_a_first_load_that_is_under_way_is_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its room before its layout is known: making room for another one beside it failed."""
    specs = [spec(rig, 1, "acme"), *(spec(rig, number, "beta") for number in range(2, 7))]
    rig.manager.attach_adapters(specs)
    for number in (1, 2, 3, 4, 5):
        use(rig, number)
    write = Packer.write
    asked = []

    def write_while_others_ask(self: Packer, *args: Any) -> None:
        asked.append(rig.manager.try_acquire(1).waits_for)
        asked.append(rig.manager.try_acquire(2).waits_for)
        write(self, *args)

    monkeypatch.setattr(Packer, "write", write_while_others_ask)
    rig.manager.poll()
    rig.manager.try_acquire(6)
    assert rig.loader is not None
    assert rig.loader.run_one()
    assert len(asked) == 2
    rig.manager.check_integrity()


def test_a_tenant_is_pushed_back_to_its_share_and_no_further(rig: Rig) -> None:
    """Room for an adapter of three times the size took all that another tenant had, since that was beyond its share."""
    wide = spec(rig, 5, "beta", "wide")
    rig.source.put(wide.path, make_model("wide", rank=12))
    rig.manager.attach_adapters([*(spec(rig, number, "acme") for number in (1, 2, 3)), wide, spec(rig, 4, "beta")])
    for number in (5, 4, 1, 2, 3):
        use(rig, number)
    prefetch(rig, 5)
    assert [rig.tier_of(number) == "device" for number in (2, 3)] == [True, True]
    use(rig, 5)
    assert rig.tier_of(2) != "device"


def prefetch(rig: Rig, adapter_id: int) -> None:
    for _ in range(3):
        rig.manager.poll()
        rig.manager.prefetch(adapter_id)
        assert rig.loader is not None
        rig.loader.run_all()


def test_a_prefetch_takes_nothing_that_is_kept(rig: Rig) -> None:
    rig.manager.attach_adapters([spec(rig, 1, "acme"), *(spec(rig, number, "") for number in range(2, 6))])
    for number in (5, 1):
        use(rig, number)
    for number in (2, 3, 4):
        rig.pin(number)
    prefetch(rig, 5)
    assert rig.tier_of(1) == "device"


def test_what_is_beyond_a_share_leaves_before_what_is_not_also_for_a_tenant_within_its_own() -> None:
    """One tenant's hoard had another one's adapter leave for a third."""
    rig = Rig(num_device=6, num_host=6)
    names = {1: "acme", **dict.fromkeys(range(2, 7), "beta"), 7: "gamma"}
    rig.manager.attach_adapters([spec(rig, number, tenant) for number, tenant in names.items()])
    for number in range(1, 8):
        use(rig, number)
    assert [number for number in names if rig.tier_of(number) != "device"] == [2]


def test_for_a_tenant_beyond_its_share_its_own_requests_are_paused(rig: Rig) -> None:
    """Requests of a tenant within its share were paused for one whose adapter then found no room all the same."""
    rig.manager.attach_adapters([spec(rig, 1, "acme"), spec(rig, 6, "acme")])
    rig.manager.attach_adapters([spec(rig, number, "beta") for number in range(2, 6)])
    use(rig, 6)
    for number in (1, 2, 3):
        rig.acquire(number)
    rig.manager.poll()
    rig.manager.try_acquire(4)
    assert rig.loader is not None
    rig.loader.run_all()
    assert rig.manager.try_acquire(4).waits_for is WaitsFor.ROOM
    assert rig.manager.victims_for(4, [1, 2, 3]) == [2]
    rig.manager.release(2)
    rig.acquire(4)
    assert (rig.tier_of(1), rig.tier_of(6)) == ("device", "device")


def test_what_was_removed_while_it_arrives_is_no_tenants() -> None:
    """Its job ends it. Room for another adapter in the meantime failed with a KeyError, in the step's thread."""
    rig = Rig(num_device=4, num_host=6, copies=FakeCopies())
    assert rig.loader is not None
    wide = spec(rig, 2, "beta", "wide")
    rig.source.put(wide.path, make_model("wide", rank=12))
    rig.manager.attach_adapters([spec(rig, 1, "acme"), spec(rig, 3, "beta")])
    use(rig, 1)
    rig.loader.run_all()
    rig.manager.add_adapter(wide)
    rig.manager.poll()
    rig.manager.prefetch(3)
    assert rig.loader.run_one()
    rig.manager.remove_adapter(3)
    rig.manager.poll()
    assert rig.manager.try_acquire(2).waits_for in (None, WaitsFor.ROOM)
    rig.loader.run_all()
    rig.acquire(2)
    rig.manager.check_integrity()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=40))
def test_whoever_asks_is_served(asks: list[tuple[int, int]]) -> None:
    """In any order of three tenants' requests with pauses: each gets its adapter at once, since nothing runs."""
    rig = Rig(num_device=3, num_host=3)
    rig.manager.attach_adapters([spec(rig, number, ("", "acme", "beta")[number % 3]) for number in range(1, 10)])
    for number, pause_s in asks:
        rig.clock.now_s += pause_s
        use(rig, number)
        assert rig.tier_of(number) == Tier.DEVICE.value
        rig.manager.check_integrity()
    for number in range(1, 10):
        rig.manager.remove_adapter(number)
    rig.manager.check_integrity()
