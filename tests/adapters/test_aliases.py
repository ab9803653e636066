"""Names that were switched to another: both directions are of the same switches, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.registry.aliases import MAX_ALIASES, Aliases
from loraplex.errors import AdapterConflictError

NAMES = st.sampled_from("abcdef")


@given(st.lists(st.tuples(NAMES, st.none() | NAMES), max_size=40))
def test_both_directions_are_of_the_same_switches(changes: list[tuple[str, str | None]]) -> None:
    aliases, expected = Aliases(), dict[str, str]()
    for name, target in changes:
        if target is None:
            assert aliases.pop(name) == expected.pop(name, None)
        else:
            aliases[name] = target
            expected.pop(name, None)  # a switch again is the newest
            expected[name] = target
        aliases.check_integrity()
        assert aliases.copy() == expected
        for each in "abcdef":
            assert aliases.of(each) == tuple(name for name, target in expected.items() if target == each)
            assert aliases.is_target(each) == (each in expected.values())
            assert aliases.resolve(each) == expected.get(each, each)


def test_an_adapter_has_so_many_aliases_and_no_more() -> None:
    aliases = Aliases()
    for number in range(MAX_ALIASES - 2):
        aliases[f"n{number}"] = "new"
    aliases["first"] = "old"
    aliases.check_room("old", "new")
    aliases["new"] = "old"
    aliases.check_room("old", "new")  # it answers for itself again, and is no alias then
    aliases.check_room("n0", "new")  # it goes there already
    aliases["second"] = "old"
    with pytest.raises(AdapterConflictError, match=f"{MAX_ALIASES + 1} names would go to that adapter, at most"):
        aliases.check_room("old", "new")
