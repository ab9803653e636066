"""How much a JSON text would cost its parser, counted in its bytes without making a value.

A parser is one call, which keeps the interpreter: so a text is counted first, in slices. Every value but the first
follows one of `,:[{` outside a string, names of fields included. First all of these are counted, which may be too many;
then without strings: when escaped quotes are gone, every other piece between two quotes is one. Numbers that take a
parser long are counted in the same way: 260,000 of them would take 3 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

MAX_LONG_NUMBERS = 1024
LONG_NUMBER_CHARS = 20
"""Those up to this and without an exponent are read in nanoseconds; others take 11 us each (measured), and long
integers the square of their digits."""

SLICE_BYTES = 2**20
"""A call on so many bytes keeps the interpreter for at most 3 ms (escapes, measured)."""

_KINDS = bytes(ord("0" if chr(i) in "0123456789." else "e" if chr(i) in "eE" else " ") for i in range(256))
"""What a byte outside a string is part of: a number, its exponent, something else."""
_NO_VALUE_BEGINS = bytes(set(range(256)) - set(b",:[{"))


class Excess(Enum):
    """What a text has too many of."""

    VALUES = "values"
    LONG_NUMBERS = f"numbers of over {LONG_NUMBER_CHARS} digits or with exponents"


def excess_of(data: bytes, max_values: int) -> Excess | None:
    """None for a text with at most `max_values` values and MAX_LONG_NUMBERS long numbers."""
    has_room = len(data) <= max_values or sum(map(_num_begun, slices(data))) < max_values
    if has_room and sum(map(_num_long, slices(data))) <= MAX_LONG_NUMBERS:
        return None
    num_begun = num_long = num_quotes = 0
    for part in slices(data):
        bare = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        is_in_string = num_quotes % 2
        num_quotes += bare.count(b'"')
        if num_quotes <= 2 * max_values:
            outside = b"".join(bare.split(b'"')[is_in_string::2])
            num_begun += _num_begun(outside)
            num_long += _num_long(outside)
        if num_quotes > 2 * max_values or num_begun >= max_values:
            return Excess.VALUES
        if num_long > MAX_LONG_NUMBERS:
            return Excess.LONG_NUMBERS
    return None


def slices(data: bytes) -> Iterator[bytes]:
    """None ends between a backslash and what it escapes."""
    start = 0
    while part := data[start : start + SLICE_BYTES]:
        num_backslashes = len(part) - len(part.rstrip(b"\\"))
        if num_backslashes % 2 and len(part) == SLICE_BYTES:
            part = part[:-1]
        yield part
        start += len(part)


def _num_long(text: bytes) -> int:
    """Exponents, and whole runs of more than LONG_NUMBER_CHARS digits: a number of 400 digits counts as 19."""
    kinds = text.translate(_KINDS)
    return kinds.count(b"0e") + kinds.count(b"0" * (LONG_NUMBER_CHARS + 1))


def _num_begun(outside: bytes) -> int:
    return len(outside.translate(None, delete=_NO_VALUE_BEGINS))
