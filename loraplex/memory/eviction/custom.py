"""Eviction policies that are not Loraplex's: where one comes from, and that it does what `EvictionPolicy` asks.

A policy that lacks a method would fail in the middle of a step, under the lock of the adapters' memory. So it is
checked when an engine starts, before the model is read: its members, what its methods take, and a rehearsal with two
keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial, reduce
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, cast

from loraplex.errors import ConfigError
from loraplex.memory.eviction.policies import EvictionPolicy, get_policy

PolicySource = str | Callable[[], EvictionPolicy] | EvictionPolicy
"""A name of Loraplex's, `module:Class`, a class or what makes a policy, or a policy, which is copied for each tier."""

MakePolicy = Callable[[Callable[[], float]], EvictionPolicy]
"""A new policy for one tier; it is given what tells seconds."""

MEMBERS = {name: member for name, member in vars(EvictionPolicy).items() if not name.startswith("_")}


def policy_maker(source: PolicySource) -> MakePolicy:
    """Raises ConfigError when `source` names no policy, or when its policies cannot be used."""
    if isinstance(source, str) and ":" not in source:
        get_policy(source)
        return partial(get_policy, source)
    name = f"eviction policy {place_of(source)!r}"
    found = _imported(name, source) if isinstance(source, str) else source
    make = cast(Callable[[], EvictionPolicy], found if callable(found) else partial(copy.deepcopy, found))
    try:
        policy, other = make(), make()
    except Exception as error:
        raise ConfigError(f"{name} cannot be made without arguments: {type(error).__name__}: {error}") from error
    _check_members(name, policy)
    _rehearse(name, policy, other)
    return lambda clock: make()


def place_of(source: PolicySource) -> str:
    """As `--eviction-policy` says it, or would if the place could be imported."""
    if isinstance(source, str):
        return source
    owner = source if isinstance(source, type) else type(source)
    return f"{owner.__module__}:{owner.__qualname__}"


def _imported(name: str, place: str) -> Any:
    module, _, attributes = place.partition(":")
    try:
        return reduce(getattr, attributes.split("."), import_module(module))
    except Exception as error:  # a module of a user's may raise anything
        text = f"{name} cannot be imported: {error}; the module must be on the Python path (PYTHONPATH)"
        raise ConfigError(text) from error


def _check_members(name: str, policy: EvictionPolicy) -> None:
    """A member that a subclass of the protocol only inherits is missing, too."""
    kind = type(policy)
    missing = [
        member
        for member, declared in MEMBERS.items()
        if not hasattr(policy, member) or getattr(kind, member, None) is declared
    ]
    if missing:
        protocol = f"{EvictionPolicy.__module__}.{EvictionPolicy.__qualname__}"
        raise ConfigError(f"{name} lacks {', '.join(missing)}: {protocol} says what each does")
    for method, declared in MEMBERS.items():
        if callable(declared):
            parameters = list(signature(declared).parameters.values())[1:]
            _check_takes(name, policy, method, parameters)
            _check_takes(name, policy, method, [each for each in parameters if each.default is Parameter.empty])


def _check_takes(name: str, policy: EvictionPolicy, method: str, parameters: Iterable[Parameter]) -> None:
    names = [each.name for each in parameters]
    try:
        signature(getattr(policy, method)).bind(*names)
    except TypeError as error:
        raise ConfigError(f"{name}: {method} must take ({', '.join(names)}): {error}") from error


def _rehearse(name: str, policy: EvictionPolicy, other: EvictionPolicy) -> None:
    """Two keys come, are used, and leave; one that never came is told of, too."""
    try:
        policy.enter("a", 1000, 0.1)
        policy.enter("b", 2000, None)
        policy.enter("a", 1000, 0.2)
        for key in ("a", "unknown"):
            policy.use(key)
            policy.touch(key)
        policy.forget("unknown")
        _check_order(name, policy.order(lambda key: key == "a"), ["a", "b"])
        if list(other.order()):
            raise ConfigError(f"{name}: each tier needs a policy of its own, and two of them have the same keys")
        policy.evict("a")
        policy.forget("b")
        _check_order(name, policy.order(), [])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} fails in a rehearsal: {type(error).__name__}: {error}") from error


def _check_order(name: str, order: Iterable[str], keys: list[str]) -> None:
    found = list(order)
    if sorted(found) != keys:
        what = f"{', '.join(map(repr, keys))} are" if keys else "nothing is"
        raise ConfigError(f"{name}: order gives {found} when {what} in the tier; it must give every key once")
