"""A heap whose items leave from anywhere: held against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.waiting.keyed_heap import MAX_STALE, KeyedHeap

VERBS = st.lists(st.tuples(st.sampled_from(["put", "discard", "first"]), st.integers(0, 6), st.integers(0, 4)))


@given(VERBS)
def test_the_first_has_the_least_key_and_of_equals_was_put_first(verbs: list[tuple[str, int, int]]) -> None:
    heap, listed = KeyedHeap[int](), list[tuple[int, int]]()  # (key, item) in order of `put`
    for verb, item, key in verbs:
        if verb != "first":
            listed = [each for each in listed if each[1] != item]
        if verb == "put":
            heap.put(item, key)
            listed.append((key, item))
        elif verb == "discard":
            heap.discard(item)
        assert heap.first() == (min(listed, key=lambda each: each[0])[1] if listed else None)
        assert len(heap) == len(listed)
        assert (item in heap) == (item in [each for _, each in listed])


def test_what_left_does_not_pile_up() -> None:
    heap = KeyedHeap[int]()
    heap.put(0, 0)
    for item in range(1, 10_000):
        heap.put(item, item)
        heap.discard(item)
    assert len(heap._heap) <= 2 + MAX_STALE + 2
    assert heap.first() == 0


def test_the_key_of_what_is_not_in_is_an_error() -> None:
    with pytest.raises(KeyError):
        KeyedHeap[int]().key(1)
