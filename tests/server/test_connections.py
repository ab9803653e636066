"""The memory that clients share: of bodies, and of answers that are not read."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server import ServerConfig, connections
from loraplex.server.connections import Connections, SharedBytes

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


class Answer:
    def __init__(self) -> None:
        self.is_cut = False

    def close_now(self) -> None:
        self.is_cut = True


def test_answers_of_the_client_with_most_of_them_are_cut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However seldom another client reads its own."""
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", 100)
    shared = Connections(ServerConfig(), 10)
    slow, many = Answer(), [Answer() for _ in range(8)]
    shared.hold_answer(slow, "slow", 30)
    for each in many:
        shared.hold_answer(each, "greedy", 20)
    shared.hold_answer(many[-1], "greedy", 20)  # a piece of it was read
    assert not slow.is_cut
    assert [each.is_cut for each in many] == [True] * 5 + [False] * 3
    for each in (slow, *many):
        shared.release_answer(each)
    shared.hold_answer(slow, "slow", 1000)  # alone it has room
    assert not slow.is_cut
