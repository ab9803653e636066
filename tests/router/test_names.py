"""Which adapters a replica is to have again, after any order of lists, verbs, absences and new processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.names import Card, Names, differing

SQL, CHAT = Card("sql", "/sql", "d1"), Card("chat", "/chat", "d2", is_pinned=True)
ALIAS = Card("best", "/best", "d6", alias_of="sql")


def listed(*cards: Card) -> dict[str, Card]:
    return {card.name: card for card in cards}


def known(*cards: Card) -> Names:
    names = Names()
    assert names.learn("a", listed(*cards)) == (False, set())
    return names


def test_a_new_process_is_to_have_what_the_one_before_it_had() -> None:
    names = known(SQL, CHAT)
    assert names.learn("b", listed(CHAT)) == (True, set())
    assert names.to_do == {"sql": SQL}
    assert names.has("chat")
    assert names.lacks("sql")
    assert names.is_promised("sql")
    names.change("sql", SQL)
    assert names.has("sql")
    assert not names.to_do


def test_a_name_that_a_new_process_has_by_itself_stays_as_it_is() -> None:
    names = known(SQL)
    names.learn("b", listed(Card("sql", "/sql-2", "d3")))
    assert not names.to_do


def test_what_vanishes_from_a_process_that_runs_on_was_unloaded_there() -> None:
    names = known(SQL, CHAT)
    assert names.learn("a", listed(SQL)) == (False, {"chat"})
    assert not names.to_do
    assert names.lacks("chat")
    assert not names.is_promised("chat")


def test_verbs_of_the_others_are_owed_to_one_that_was_away() -> None:
    newer = Card("chat", "/chat-2", "d4")
    names = known(SQL, CHAT)
    names.owe("sql", None)
    names.owe("chat", newer)
    names.owe("new", Card("new", "/new", "d5"))
    names.learn("a", listed(SQL, CHAT))
    assert names.to_do == {"sql": None, "chat": newer, "new": Card("new", "/new", "d5")}
    assert not names.has("chat"), "until it means there what it means at the others"
    names.learn("b", listed(newer))
    assert names.to_do == {"new": Card("new", "/new", "d5")}, "and a start later what was done is done"


def test_a_process_that_ends_before_it_has_all_again_loses_nothing() -> None:
    names = known(SQL, CHAT)
    names.learn("b", listed())
    names.change("chat", CHAT)
    names.learn("c", listed())
    assert names.to_do == {"sql": SQL, "chat": CHAT}


def test_aliases_come_after_what_they_stand_for() -> None:
    names = known(ALIAS, SQL)
    names.learn("b", listed())
    assert [name for name, _ in names.in_order()] == ["sql", "best"]


def test_what_a_doubtful_replica_had_is_promised() -> None:
    names = known(SQL)
    assert not names.is_promised("sql")
    names.is_doubtful = True
    assert names.is_promised("sql")
    assert not names.is_promised("chat")


def test_of_what_was_never_listed_nothing_is_known() -> None:
    names = Names()
    names.change("sql", SQL)
    assert [names.has("sql"), names.lacks("sql"), names.is_promised("sql")] == [False] * 3


NAMES = st.sampled_from("abc")
CARDS = st.builds(Card, NAMES, st.just("/path"), st.sampled_from(["d1", "d2"]))
LISTS = st.lists(CARDS, max_size=3).map(lambda cards: listed(*cards))


@given(st.lists(LISTS, min_size=2, max_size=4))
def test_names_differ_where_a_list_lacks_them_or_says_another_thing(lists: list[dict[str, Card]]) -> None:
    found = [name for name in differing(lists) if name is not None]
    everything = {name for each in lists for name in each}
    expected = {
        name for name in everything if len({each[name].meaning if name in each else None for each in lists}) > 1
    }
    assert sorted(found) == sorted(expected), "each once"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("verb"), CARDS, st.booleans()),
        st.tuples(st.just("restart"), LISTS, st.booleans()),
        st.tuples(st.just("restored"), NAMES, st.booleans()),
    ),
    max_size=20,
)


@given(LISTS, STEPS)
def test_nothing_that_was_acknowledged_is_forgotten(
    first: dict[str, Card], steps: list[tuple[str, object, bool]]
) -> None:
    """The model: what a verb said last holds, or what was there before; a restart with other content may say more."""
    names, process = Names(), dict(first)
    names.learn("0", dict(first))
    promised = set(first)
    for number, (kind, what, is_away) in enumerate(steps, 1):
        if kind == "verb":
            assert isinstance(what, Card)
            promised.add(what.name)
            if is_away:
                names.owe(what.name, what)
                names.learn(str(number), dict(process))
            else:
                process[what.name] = what
                names.change(what.name, what)
        elif kind == "restart":
            assert isinstance(what, dict)
            process = dict(what)
            promised |= set(process)
            names.learn(f"restart {number}", dict(process))
        elif what in names.to_do:
            card = names.to_do[str(what)]
            assert card is not None
            process[card.name] = card
            names.change(card.name, card)
        assert promised == set(names.held or {}) | set(names.to_do)
        assert set(process) == set(names.held or {})
