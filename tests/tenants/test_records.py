"""The rule of who sees which adapter under which name, for any tenants, names and grants."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from loraplex.adapters.registry import NameQuery
from loraplex.errors import (
    AdapterBeyondQuotaError,
    AdapterContentChangedError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterQuotaError,
    error_from_payload,
)
from loraplex.tenants.records import Scope, Tenant, TenantTable

TENANTS = ("a", "b", "c")
NAMES = st.sampled_from(
    ["x", "y", "a/x", "a/y", "b/x", "b/b/x", "a/b/x", "c/z", "org/x", "/srv/x", "a", "b", "a/a/x", "a/org/x"]
)
TABLES = st.builds(
    lambda shares: TenantTable(1, {name: Tenant(name, 0.0) for name in TENANTS}, {}, shares),
    st.dictionaries(NAMES, st.frozensets(st.sampled_from([*TENANTS, TenantTable.ALL])), max_size=6),
)
SCOPED = st.sampled_from([*TENANTS, ""])


@given(table=TABLES, tenant=SCOPED, names=st.frozensets(NAMES), asked=NAMES, version=st.sampled_from(["", "@1"]))
def test_what_is_found_is_there_and_may_be_seen(
    table: TenantTable, tenant: str, names: frozenset[str], asked: str, version: str
) -> None:
    scope = Scope(table, tenant)
    found = scope.find(
        asked + version, {name + version for name in names}.__contains__, lambda name: name.removesuffix("@1") in names
    )
    if found is not None:
        assert found.removesuffix("@1") in names
        assert scope.may_see(found)
        owner = table.owner_of(found)
        name = found.removesuffix("@1")
        assert owner == tenant or table.shares.get(name, frozenset()) & {tenant, TenantTable.ALL}


@given(table=TABLES, tenant=SCOPED, names=st.frozensets(NAMES), asked=NAMES)
def test_what_may_not_be_seen_is_as_if_it_was_not_there(
    table: TenantTable, tenant: str, names: frozenset[str], asked: str
) -> None:
    scope = Scope(table, tenant)
    visible = {name for name in names if scope.may_see(name)}
    assert scope.find(asked, names.__contains__, names.__contains__) == scope.find(
        asked, visible.__contains__, visible.__contains__
    )
    every = scope.query(NameQuery())
    assert list(every.of(sorted(names))) == list(every.of(sorted(visible)))


@example(table=TenantTable(1, {"a": Tenant("a", 0.0)}), tenant="a", names=frozenset(["a/a/x"]))
@given(table=TABLES, tenant=SCOPED, names=st.frozensets(NAMES))
def test_a_list_has_what_can_be_asked_for_once(table: TenantTable, tenant: str, names: frozenset[str]) -> None:
    """Whatever a list shows means just that, and whatever can be asked for is in the list."""
    scope = Scope(table, tenant)
    listed = list(scope.query(NameQuery(is_sorted=True)).of(sorted(names)))
    shown = [scope.shown(name) for name in listed]
    assert shown == sorted(set(shown))
    for name in listed:
        assert scope.find(scope.shown(name), names.__contains__, names.__contains__) == name
    for asked in names:
        found = scope.find(asked, names.__contains__, names.__contains__)
        assert found is None or found in listed


@given(
    table=TABLES, tenant=st.sampled_from(TENANTS), names=st.frozensets(NAMES), dead=st.frozensets(NAMES), asked=NAMES
)
def test_an_own_name_that_answers_nothing_is_no_other_adapter(
    table: TenantTable, tenant: str, names: frozenset[str], dead: frozenset[str], asked: str
) -> None:
    """dead: what nothing answers for now. Whatever answers, a name means one adapter."""
    scope = Scope(table, tenant)
    always = scope.find(asked, names.__contains__, names.__contains__)
    found = scope.find(asked, (names - dead).__contains__, names.__contains__)
    assert found == (None if always in dead else always)


@given(table=TABLES, names=st.frozensets(NAMES), asked=NAMES)
def test_an_operator_sees_all_as_it_is(table: TenantTable, names: frozenset[str], asked: str) -> None:
    scope = Scope(table, None)
    assert scope.find(asked, names.__contains__, names.__contains__) == (asked if asked in names else None)
    assert list(scope.query(NameQuery()).of(sorted(names))) == sorted(names)
    assert scope.shown(asked) == asked
    assert scope.may_change(asked)


@given(table=TABLES, tenant=SCOPED, asked=NAMES)
def test_a_tenant_changes_its_own_alone(table: TenantTable, tenant: str, asked: str) -> None:
    scope = Scope(table, tenant)
    assert scope.may_change(asked) is (tenant != "" and table.owner_of(asked) == tenant)
    if tenant:
        assert table.owner_of(scope.own(asked)) == tenant
        assert scope.own(scope.own(asked)) == scope.own(asked)


def test_no_two_tenants_own_one_name() -> None:
    table = TenantTable(1, {name: Tenant(name, 0.0) for name in TENANTS})
    owners = {name: table.owner_of(name) for name in ("a/x", "b/a/x", "x", "/a/x", "org/x", "a", "ab/x")}
    assert owners == {"a/x": "a", "b/a/x": "b", "x": "", "/a/x": "", "org/x": "", "a": "", "ab/x": ""}


def test_errors_are_cleaned_of_targets_and_fullness_alone() -> None:
    scope = Scope(TenantTable(1, {"a": Tenant("a", 0.0)}), "a")
    error = AdapterContentChangedError("adapters 'a/x', 'y@2' and 'z' at 'b/x' changed")
    assert scope.cleaned(error, {"y"}) == "adapters 'x', '(another adapter)' and 'z' at 'b/x' changed"
    assert "bytes" not in scope.cleaned(AdapterNoRoomError("7 bytes of 9 are taken"))


ANY_NAME = st.text(st.sampled_from("ab/'\"\\@2 "), min_size=1, max_size=8)


@given(own=st.sampled_from(["sql", "it's", 'say "hi"', "c\\d"]), target=ANY_NAME, version=st.sampled_from(["", "@2"]))
@example(own="it's", target="private", version="")
@example(own="sql", target="c/o'neil", version="@2")
@example(own="sql", target="c/a\\b", version="")
@example(own="sql", target="c/'\"", version="")
def test_a_target_is_hidden_whatever_characters_its_name_has(own: str, target: str, version: str) -> None:
    scope = Scope(TenantTable(1, {"a": Tenant("a", 0.0)}), "a")
    text = "adapter {!r} of the server's was switched to {!r}, which isn't loaded"
    error = AdapterNotFoundError(text.format(f"a/{own}", target + version))
    assume(target != f"a/{own}")
    assert scope.cleaned(error, {target}) == text.format(own, "(another adapter)")


@pytest.mark.parametrize("kind", [AdapterBeyondQuotaError, AdapterQuotaError])
def test_the_numbers_of_a_limit_in_memory_are_for_its_own_tenant(
    kind: type[AdapterBeyondQuotaError | AdapterQuotaError],
) -> None:
    """A request for a granted adapter meets the limit of the tenant that granted it."""
    error = error_from_payload(kind("adapter 'a/x' needs 9 bytes of 7", "a").to_payload())
    table = TenantTable(1, {name: Tenant(name, 0.0) for name in ("a", "b")})
    assert Scope(table, "a").cleaned(error) == "adapter 'x' needs 9 bytes of 7"
    for other in ("b", ""):
        assert "bytes" not in Scope(table, other).cleaned(error)
