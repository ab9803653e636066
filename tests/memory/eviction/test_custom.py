"""Eviction policies of a user's own: found, checked before they are used, and obeyed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loraplex.config import LoRAConfig
from loraplex.errors import ConfigError
from loraplex.memory.eviction.custom import policy_maker
from loraplex.memory.eviction.policies import LRU, POLICIES, CostAware, EvictionPolicy, IsQueued
from tests.memory.rig import FakeClock, Rig


class NewestFirst:
    """Written against the protocol alone."""

    name = "newest"
    evicts = True

    def __init__(self) -> None:
        self.keys: list[str] = []

    def enter(self, key: str, nbytes: int, reload_s: float | None = None) -> None:
        self.forget(key)
        self.keys.append(key)

    def use(self, key: str) -> None:
        pass

    def touch(self, key: str) -> None:
        pass

    def evict(self, key: str) -> None:
        self.forget(key)

    def forget(self, key: str) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def order(self, is_queued: IsQueued | None = None) -> Iterator[str]:
        return reversed(self.keys)


PLACE = f"{__name__}:NewestFirst"


# ----------------------------------------------------------------------------------------------------- where it is from


@pytest.mark.parametrize("source", [PLACE, NewestFirst, NewestFirst(), lambda: NewestFirst()])
def test_each_tier_gets_one_of_its_own(source: Any) -> None:
    make = policy_maker(source)
    one, other = make(FakeClock()), make(FakeClock())
    one.enter("a", 1)
    assert (list(one.order()), list(other.order())) == (["a"], [])
    assert isinstance(one, NewestFirst)


def test_an_object_keeps_its_settings_and_is_not_touched() -> None:
    mine = NewestFirst()
    mine.name = "mine"
    made = policy_maker(mine)(FakeClock())
    assert made.name == "mine"
    made.enter("a", 1)
    assert mine.keys == []


def test_the_named_ones_are_made_with_the_clock() -> None:
    clock = FakeClock()
    for name in POLICIES:
        assert policy_maker(name)(clock).name == name
    assert policy_maker("loraplex.memory.eviction.policies:LRU")(clock).name == "lru"
    assert policy_maker(partial(CostAware, half_life_s=60))(clock).name == "cost_aware"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("random", "eviction_policy must be one of"),
        ("nowhere:Policy", "'nowhere:Policy' cannot be imported: No module named 'nowhere'"),
        (f"{__name__}:Nothing", "cannot be imported: .* has no attribute 'Nothing'"),
        (f"{__name__}:", "cannot be imported"),
        (":NewestFirst", "cannot be imported"),
        (object, "object' lacks name, evicts, enter, use, touch, evict, forget, order"),
        (partial(CostAware, nonsense=1), "cannot be made without arguments: .*nonsense"),
    ],
)
def test_what_cannot_be_found_or_made_is_refused(source: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        policy_maker(source)


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'broken_policy:Policy' cannot be imported: division by zero"):
        policy_maker("broken_policy:Policy")


# ------------------------------------------------------------------------------------------------------------- checked


@pytest.mark.parametrize("member", ["name", "evicts", "enter", "use", "touch", "evict", "forget", "order"])
def test_a_missing_member_is_named(member: str) -> None:
    members = {name: value for name, value in vars(NewestFirst).items() if name != member}
    without = type("Without", (), members)
    inherited = type("Inherited", (EvictionPolicy,), members)
    for policy in (without, inherited):
        with pytest.raises(ConfigError, match=rf"{policy.__name__}' lacks {member}: .*EvictionPolicy says"):
            policy_maker(policy)


@pytest.mark.parametrize(
    ("method", "function", "text"),
    [
        ("enter", lambda self, key: None, re.escape("enter must take (key, nbytes, reload_s)")),
        ("enter", lambda self, key, nbytes, reload_s: None, re.escape("enter must take (key, nbytes)")),
        ("order", lambda self: iter(self.keys), re.escape("order must take (is_queued)")),
        ("touch", None, re.escape("touch must take (key)")),
        ("order", lambda self, is_queued=None: iter(()), r"order gives \[\] when 'a', 'b' are in the tier"),
        ("order", lambda self, is_queued=None: None, "TypeError"),
        ("forget", lambda self, key: self.keys.remove(key), "ValueError: list.remove"),
        ("evict", lambda self, key: None, r"order gives \['a'\] when nothing is in the tier"),
    ],
)
def test_a_method_that_does_not_fit_is_named(method: str, function: Callable[..., Any] | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        policy_maker(type("Misfit", (NewestFirst,), {method: function}))


def test_two_tiers_must_not_share_their_keys() -> None:
    shared = NewestFirst()
    with pytest.raises(ConfigError, match="each tier needs a policy of its own"):
        policy_maker(lambda: shared)


# -------------------------------------------------------------------------------------------------------------- obeyed


def test_the_setting_takes_a_place() -> None:
    assert LoRAConfig(eviction_policy=PLACE).eviction_policy == PLACE
    for wrong in ("newest", None, NewestFirst):
        with pytest.raises(
            ConfigError, match=r"eviction_policy must be module:Class or one of .*got ('newest'|None|<)"
        ):
            LoRAConfig(eviction_policy=wrong)  # type: ignore[arg-type]


def test_the_memory_evicts_in_its_order() -> None:
    rig = Rig(num_device=2, num_host=3, policy=PLACE)
    rig.add(1, 2, 3)
    for adapter in (1, 2, 3):
        rig.activate(adapter)
    assert [rig.tier_of(adapter) for adapter in (1, 2, 3)] == ["device", "host", "device"]


def test_one_that_does_not_evict_is_named_in_the_refusal() -> None:
    rig = Rig(policy=f"{__name__}:Keeper")
    rig.add(1, 2, 3)
    rig.activate(1)
    rig.activate(2)
    with pytest.raises(Exception, match="eviction_policy is keeper"):
        rig.activate(3)


class Keeper(LRU):
    name = "keeper"
    evicts = False
