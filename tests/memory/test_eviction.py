"""One contract for every eviction policy."""

from __future__ import annotations

import pytest

from loraplex.errors import ConfigError
from loraplex.memory.eviction import POLICIES, EvictionPolicy, get_policy


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return get_policy(request.param)


def test_it_is_found_by_its_name(policy: EvictionPolicy) -> None:
    assert type(get_policy(policy.name)) is type(policy)
    assert get_policy(policy.name) is not policy


def test_it_tracks_what_is_touched_until_it_is_forgotten(policy: EvictionPolicy) -> None:
    for key in ("a", "b", "c", "a"):
        policy.touch(key)
    assert sorted(policy.order()) == ["a", "b", "c"]
    policy.forget("b")
    policy.forget("unknown")
    assert sorted(policy.order()) == ["a", "c"]


def test_the_one_just_used_goes_last(policy: EvictionPolicy) -> None:
    for key in ("a", "b", "a"):
        policy.touch(key)
    assert list(policy.order())[-1] == "a"


def test_a_new_policy_is_empty(policy: EvictionPolicy) -> None:
    assert list(policy.order()) == []


def test_lru_order_is_that_of_the_last_use() -> None:
    policy = get_policy("lru")
    for key in ("a", "b", "c", "a", "b"):
        policy.touch(key)
    assert list(policy.order()) == ["c", "a", "b"]
    assert policy.evicts


def test_none_evicts_nothing() -> None:
    assert not get_policy("none").evicts


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of \('lru', 'none'\), got 'random'"):
        get_policy("random")
