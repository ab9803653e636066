"""The memory that clients share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplex.server.connections import SharedBytes

HOLDS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=60)


@given(HOLDS)
def test_what_is_held_is_counted_and_bounded(steps: list[tuple[str, int, bool]]) -> None:
    shared, held = SharedBytes(100), Counter[str]()
    for client, num_bytes, is_release in steps:
        if is_release:
            shared.release(client, held.pop(client, 0))
        elif shared.hold(client, num_bytes, 0):
            held[client] += num_bytes
            assert held[client] == num_bytes or held[client] <= 100 - held.total()
        assert shared.num_held == held.total() <= 100


def test_greedy_clients_leave_a_share_for_the_next_one() -> None:
    shared = SharedBytes(1200)
    free = []
    for client in "abc":
        while shared.hold(client, 10, 0):
            pass
        free.append(1200 - shared.num_held)
    assert free == [600, 300, 150]


def test_a_single_request_may_have_all_but_what_is_kept() -> None:
    shared = SharedBytes(100)
    assert shared.hold("a", 60, 0, num_kept=12)
    assert shared.hold("a", 20, 60, num_kept=12)
    assert not shared.hold("a", 9, 80, num_kept=12)
    assert shared.hold("b", 9, 0)
    shared.release("a", 80)
    shared.release("b", 9)
    assert shared.num_held == 0
