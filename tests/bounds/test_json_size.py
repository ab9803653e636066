"""Texts are counted without being parsed; tests/security/test_long_bodies.py compares the counts with a parser's."""

from __future__ import annotations

import json

import pytest

from loraplex.bounds.json_size import LONG_NUMBER_CHARS, MAX_LONG_NUMBERS, Excess, excess_of

LONG = "1" * (LONG_NUMBER_CHARS + 1)


@pytest.mark.parametrize(
    ("text", "excess"),
    [
        (json.dumps({"a": [1] * 7}), None),
        (json.dumps({"a": [1] * 8}), Excess.VALUES),
        (json.dumps({"a": ",:[{" * 1000}), None),
        (f"[{LONG}]", None),
        ("[" + LONG * MAX_LONG_NUMBERS + LONG + "]", Excess.LONG_NUMBERS),
        (json.dumps(LONG * (MAX_LONG_NUMBERS + 1)), None),
        (json.dumps('\\"' + "0e" * (MAX_LONG_NUMBERS + 1)), None),
    ],
)
def test_what_is_too_much(text: str, excess: Excess | None) -> None:
    assert excess_of(text.encode(), 10) is excess


def test_exponents_are_long_numbers() -> None:
    text = json.dumps([5e-324] * (MAX_LONG_NUMBERS + 1)).encode()
    assert excess_of(text, 10_000) is Excess.LONG_NUMBERS
    assert excess_of(text.replace(b", 5e-324", b"", 1), 10_000) is None
