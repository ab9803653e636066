"""The memory that clients share: of bodies, and of answers that are not read."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.server import ServerConfig, connections
from loraplex.server.connections import (
    IDLE_AT_LEAST_S,
    BySource,
    Connections,
    SharedBytes,
    Slot,
    TenantConnections,
)

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
    shared.answers.hold(slow, "slow", 30)
    for each in many:
        shared.answers.hold(each, "greedy", 20)
    shared.answers.hold(many[-1], "greedy", 20)  # a piece of it was read
    assert not slow.is_cut
    assert [each.is_cut for each in many] == [True] * 5 + [False] * 3
    for each in (slow, *many):
        shared.answers.release(each)
    shared.answers.hold(slow, "slow", 1000)  # alone it has room
    assert not slow.is_cut


PLACES = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abcd"), st.booleans()), max_size=120)


@given(PLACES)
def test_of_the_source_with_most_connections_the_oldest_is_first(steps: list[tuple[int, str, bool]]) -> None:
    made = [Answer() for _ in range(31)]
    places, model = BySource(), dict[int, str]()
    for number, source, is_discard in steps:
        if is_discard:
            places.discard(made[number])
            model.pop(number, None)
        else:
            places.add(made[number], source)
            model.setdefault(number, source)
        assert len(places) == len(model)
        counts = Counter(model.values())
        oldest = {next(n for n, source in model.items() if source == each): counts[each] for each in counts}
        first = places.first()
        assert (first is None) == (not model)
        if first is not None:
            assert oldest.get(made.index(first)) == max(counts.values())


def admit(shared: Connections, address: str) -> Answer:
    slot, handshake = shared.admit(address), Answer()
    assert isinstance(slot, Slot)
    slot.begin_handshake(handshake)
    handshake.close_now = lambda: (setattr(handshake, "is_cut", True), slot.release())  # type: ignore[method-assign]
    return handshake


def test_new_connections_of_the_address_that_has_most_of_them_go_first() -> None:
    """The oldest of all was another's, in its handshake."""
    shared = Connections(ServerConfig(), 4)
    slow = admit(shared, "10.0.0.2")
    flood = [admit(shared, "10.0.0.1") for _ in range(20)]
    assert not slow.is_cut
    assert [each.is_cut for each in flood] == [True] * 17 + [False] * 3
    assert (shared.num_open, shared.refused) == (4, {"closed_for_another": 17})


def test_handshakes_that_have_had_their_turn_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_HANDSHAKES", 4)
    shared = Connections(ServerConfig(), 100)
    made = [Answer() for _ in range(10)]
    shared.set_in_handshake(made[0], "slow")
    for each in made[1:]:
        shared.set_in_handshake(each, "greedy")
    assert [each.is_cut for each in made] == [False] + [True] * 6 + [False] * 3
    shared.set_busy(made[-1])
    shared.set_in_handshake(Answer(), "late")
    assert not any(each.is_cut for each in (made[0], *made[7:]))


# ------------------------------------------------------------------------------------------------------ tenants' places


def test_a_tenant_has_as_many_connections_as_it_leaves_to_others() -> None:
    places = TenantConnections(16)
    num_taken = []
    for tenant in ("acme", "beta", "gamma", "delta", "late"):
        num = 0
        while places.take(Answer(), tenant):
            num += 1
        num_taken.append(num)
    assert num_taken == [8, 4, 2, 1, 1], "each finds one, and more where they are free"


def test_a_limit_stands_for_the_share_and_nothing_bounds_the_operator() -> None:
    places = TenantConnections(10)
    assert [places.take(Answer(), "acme", 7) for _ in range(9)] == [True] * 7 + [False] * 2
    assert [places.take(Answer(), "beta", 1) for _ in range(2)] == [True, False]
    assert all(places.take(Answer(), "") for _ in range(20))
    assert places.take(Answer(), "gamma")


def test_an_idle_connection_of_the_tenant_makes_room_the_oldest_first() -> None:
    shared = Connections(ServerConfig(), 100, count(0.0, IDLE_AT_LEAST_S).__next__)
    made = [Answer() for _ in range(6)]
    other = Answer()
    assert shared.give_to(other, "beta", 1)
    shared.set_idle(other)
    assert all(shared.give_to(each, "acme", 3) for each in made[:3])
    shared.set_idle(made[1])
    shared.set_idle(made[0])
    assert shared.give_to(made[3], "acme", 3)
    assert [each.is_cut for each in made] == [False, True, False, False, False, False]
    shared.set_busy(made[0])  # its next request has come
    assert shared.give_to(made[0], "acme", 3)
    assert not shared.give_to(made[4], "acme", 3)
    shared.set_idle(made[0])
    assert shared.give_to(made[4], "acme", 3)
    assert made[0].is_cut
    assert not other.is_cut
    assert shared.refused == {"closed_for_another": 2}


def test_a_connection_belongs_to_the_tenant_of_its_latest_request() -> None:
    """As of a proxy that sends requests of many tenants over one."""
    shared = Connections(ServerConfig(), 100)
    proxy = Answer()
    assert shared.give_to(proxy, "acme", 1)
    shared.set_idle(proxy)
    assert shared.give_to(proxy, "beta", 1)
    assert shared.give_to(Answer(), "acme", 1)
    assert not proxy.is_cut
    assert not shared.give_to(Answer(), "beta", 1), "it is not idle any longer"
    shared.disown(proxy)
    assert shared.give_to(Answer(), "beta", 1)


def test_an_idle_connection_that_made_room_is_closed_when_it_has_rested() -> None:
    """It was closed at once: a router may have been sending another tenant's request, which was 502 then."""
    now = [0.0]
    shared = Connections(ServerConfig(), 100, lambda: now[0])
    made = [Answer() for _ in range(4)]
    for connection in made[:3]:
        assert shared.give_to(connection, "acme", 1)
        shared.set_idle(connection)
    assert shared.tenant_counts == {"acme": 1}
    assert shared.give_to(made[0], "beta", 1)
    shared.set_busy(made[0])
    now[0] = IDLE_AT_LEAST_S
    assert shared.give_to(made[3], "acme", 1)
    assert [each.is_cut for each in made] == [False, True, True, False]
    assert not shared.give_to(Answer(), "acme", 1)


def test_an_idle_connection_of_several_tenants_is_closed_for_none_of_them() -> None:
    shared = Connections(ServerConfig(), 100, count(0.0, IDLE_AT_LEAST_S).__next__)
    proxy = Answer()
    for tenant in ("beta", "acme", "acme"):
        assert shared.give_to(proxy, tenant, 1)
        shared.set_busy(proxy)
        assert shared.tenant_counts == {tenant: 1}
        shared.set_idle(proxy)
    assert not shared.tenant_counts
    assert shared.give_to(Answer(), "acme", 1)
    assert not shared.give_to(proxy, "acme", 1), "its requests count as those of any other"
    assert shared.give_to(proxy, "beta", 1)
    assert not proxy.is_cut
    assert not shared.refused


OWNED = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["take", "idle", "release"])),
    max_size=100,
)


@given(OWNED)
def test_places_are_counted_and_bounded(steps: list[tuple[int, str, str]]) -> None:
    made = [Answer() for _ in range(21)]
    places = TenantConnections(12)
    owners: dict[int, str] = {}
    served = defaultdict[int, set[str]](set)
    for index, tenant, action in steps:
        if action == "release":
            places.forget(made[index])
            owners.pop(index, None)
            served.pop(index, None)
        elif action == "idle":
            places.set_idle(made[index])
            if len(served[index]) > 1:
                owners.pop(index, None)
        else:
            before = owners.pop(index, None)
            others = Counter(owners.values())
            has_room = not tenant or not others[tenant] or others[tenant] + 1 <= 12 - others.total() - 1
            assert places.take(made[index], tenant) == (before == tenant or has_room)
            if before == tenant or has_room:
                owners[index] = tenant
                served[index].add(tenant)
        places.check_integrity()
    assert places.counts == Counter(owners.values())
