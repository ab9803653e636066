"""Contents that are ill: when they are diagnosed, what their requests are told."""

from __future__ import annotations

from dataclasses import replace

from loraplex.memory.care.health import BACKOFF_S, DOUBT_INTERVAL_S, Recovery
from tests.memory.rig import FakeClock, Rig


def test_the_first_diagnosis_is_due_at_once_and_only_once() -> None:
    recovery = Recovery(FakeClock())
    assert recovery.open("d", "NaN")
    assert not recovery.open("d", "NaN again")
    case = recovery.due()
    assert case is not None
    assert (case.digest, case.num_tries) == ("d", 1)
    assert recovery.due() is None, "it runs"


def test_tries_back_off_and_end() -> None:
    clock = FakeClock()
    recovery = Recovery(clock)
    recovery.open("d", "NaN")
    assert recovery.due() is not None
    for wait_s in BACKOFF_S:
        recovery.failed("d", "still NaN")
        clock.now_s += wait_s - 0.5
        assert recovery.due() is None
        clock.now_s += 0.5
        assert recovery.due() is not None
    recovery.failed("d", "still NaN")
    clock.now_s += 1e6
    assert recovery.due() is None
    assert "until it is loaded again" in (recovery.state_of("d") or "")
    refusal = recovery.refusal("d", "a")
    assert refusal is not None
    assert "load it again" in str(refusal)


def test_a_refusal_says_when_to_try_again() -> None:
    clock = FakeClock()
    recovery = Recovery(clock)
    assert recovery.refusal("d", "a") is None
    recovery.open("d", "NaN")
    recovery.due()
    recovery.failed("d", "still NaN")
    clock.now_s += 2
    refusal = recovery.refusal("d", "a")
    assert refusal is not None
    assert (refusal.http_status, refusal.retry_after_s) == (503, BACKOFF_S[0] - 2)
    assert "adapter 'a' is quarantined (still NaN)" in str(refusal)


def test_a_closed_case_is_forgotten() -> None:
    recovery = Recovery(FakeClock())
    recovery.open("d", "NaN")
    assert recovery.close("d") is not None
    assert recovery.close("d") is None
    assert recovery.state_of("d") is None
    assert list(recovery) == []


def test_one_content_in_doubt_is_looked_at_in_an_interval_and_those_of_tenants_in_turn() -> None:
    """The odd adapters of one tenant cost the others one look a second, and hide none of theirs."""
    rig = Rig(num_device=4, num_host=4)
    for adapter_id, tenant in zip((1, 2, 3, 4), "aaab", strict=True):
        rig.manager.add_adapter(replace(rig.spec(adapter_id), adapter_name=f"{tenant}/{adapter_id}"))
        rig.acquire(adapter_id)
        rig.manager.health.doubt(adapter_id)
    found = []
    for _ in range(6):
        found += [rig.manager.health.next_doubt() for _ in range(2)]
        rig.manager.health.doubt(1)
        rig.clock.now_s += DOUBT_INTERVAL_S
    assert found[::2] == [1, 4, 2, 3, 1, 1]
    assert set(found[1::2]) == {None}
