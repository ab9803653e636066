"""Nothing of a victim shows in who comes after it, in whatever order ranks and contents follow each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.memory.space.arena import POISON
from tests.memory.rig import Rig, make_model

RANKS = (64, 8, 5, 1, 16, 3)


@pytest.mark.parametrize("is_separate", [False, True], ids=["one memory", "two memories"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_small_adapter_after_a_large_one_in_the_same_slot(backend: str, is_separate: bool) -> None:
    rig = Rig(num_device=16, num_host=16, backend=backend, is_separate=is_separate)
    for adapter_id, rank in enumerate(RANKS, 1):
        rig.manager.add_adapter(rig.spec(adapter_id, rank=rank))
        slot = rig.acquire(adapter_id)
        assert slot == 0
        rig.check_output(slot, make_model(f"d{adapter_id}", rank))
        rig.manager.release(adapter_id)
        rig.manager.remove_adapter(adapter_id)
    rig.check_empty()


def test_modules_that_the_victim_had_are_gone() -> None:
    rig = Rig(num_device=4)
    rig.source.put("/p1", make_model("d1", modules=("q_proj", "k_proj", "v_proj", "down_proj")))
    rig.source.put("/p2", make_model("d2", modules=("v_proj",)))
    for adapter_id in (1, 2):
        rig.manager.add_adapter(rig.spec(adapter_id))
        slot = rig.acquire(adapter_id)
        rig.check_output(slot, rig.source.models[f"/p{adapter_id}"])
        rig.manager.release(adapter_id)
        rig.manager.deactivate_adapter(adapter_id)
    assert slot == 0


def test_packed_bytes_do_not_depend_on_what_was_there() -> None:
    """Padding too: the bytes of an extent are a function of the adapter."""
    images = []
    for victim_rank in (64, 2):
        rig = Rig(num_device=16, num_host=16)
        rig.manager.add_adapter(rig.spec(1, rank=victim_rank))
        rig.manager.remove_adapter(1)
        rig.manager.add_adapter(rig.spec(2, rank=5))
        host = rig.manager._residency.weights["d2"].host
        assert host is not None
        images.append([rig.arena.view(extent).clone() for extent in host.extents])
    assert all(a.equal(b) for a, b in zip(*images, strict=True))
    assert not any(bool((image == POISON).all()) for image in images[0])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=25))
def test_any_order_of_requests_sees_only_its_own_weights(order: list[int]) -> None:
    rig = Rig(num_device=20, num_host=24)
    for adapter_id, rank in enumerate(RANKS, 1):
        rig.manager.add_adapter(rig.spec(adapter_id, rank=rank))
    for adapter_id in order:
        rig.check_output(rig.acquire(adapter_id), make_model(f"d{adapter_id}", RANKS[adapter_id - 1]))
        rig.manager.release(adapter_id)
        rig.manager.check_integrity()
