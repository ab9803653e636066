"""What a front has learned of a runner, bounded and by client."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from loraplex.routing.known import KnownPrefixes


def test_a_client_with_many_prefixes_takes_none_of_others() -> None:
    """1,024 prompts of blanks of one tenant, and every other tenant's next request went to any replica."""
    known = KnownPrefixes(100)
    for number in range(40):
        known.put(b"beta %d" % number, "beta")
    for number in range(1000):
        known.put(b"acme %d" % number, "acme")
    assert sum(digest.startswith(b"beta") for digest in set(known.keys())) == 40
    assert len(known.keys()) == 100
    assert {b"acme 999"} <= known.keys()
    known.clear()
    known.put(b"x", "beta")
    assert [*known.keys()] == [b"x"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=200))
def test_what_goes_is_the_oldest_of_the_client_that_has_most(puts: list[tuple[str, int]]) -> None:
    known, kept = KnownPrefixes(8), dict[bytes, str]()
    for client, number in puts:
        digest = f"{client}{number}".encode()
        known.put(digest, client)
        kept.pop(digest, None)
        kept[digest] = client
        if len(kept) > 8:
            num_of = Counter(kept.values())
            largest = min(num_of, key=lambda each: (-num_of[each], each))
            del kept[next(each for each in kept if kept[each] == largest)]
        assert known.keys() == kept.keys()
    known._largest.check_integrity(known._of)
