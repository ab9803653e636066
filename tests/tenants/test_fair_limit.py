"""A limit that one tenant may fill, and that leaves each other one its share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.fair_limit import SHARE, FairLimit


def test_one_may_hold_all_and_another_still_finds_its_share() -> None:
    limit = FairLimit(80)
    assert limit.take("acme", 80)
    assert not limit.take("acme", 1)
    assert not limit.take("beta", 80 // SHARE + 1)
    assert limit.take("beta", 80 // SHARE)
    assert not limit.take("beta", 1)
    limit.give_back("acme", 11)
    assert limit.take("beta", 1)


def test_without_keys_there_is_one_limit() -> None:
    limit = FairLimit(8)
    assert limit.take("", 8)
    assert not limit.take("", 1)
    assert limit.take("beta", 1), "beside keys"


def test_what_is_too_large_is_let_in_alone() -> None:
    assert not FairLimit(8).take("acme", 9)
    limit = FairLimit(8, lets_one_in=True)
    assert limit.take("", 9)
    assert not limit.take("", 1)
    limit.give_back("", 9)
    assert limit.take("", 1)


@given(st.integers(1, 100), st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.integers(1, 40)), max_size=200))
def test_twice_the_limit_is_the_most(size: int, steps: list[tuple[str, int]]) -> None:
    limit, held = FairLimit(size), Counter[str]()
    for tenant, num in steps:
        if limit.take(tenant, num):
            held[tenant] += num
        elif held[tenant]:
            limit.give_back(tenant, held.pop(tenant))
        assert limit.total == held.total() <= 2 * size
        if held.total() < 2 * size:
            assert limit.take("new", 1), "a tenant that holds nothing finds a place"
            limit.give_back("new", 1)
