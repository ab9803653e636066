"""Arguments of the benchmarks that argparse has no type for; a mistake is one line, before anything is made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {text!r}")
    return value


def listed_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names, separated by commas."""

    def listed(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in names]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(names)}")
        return text.split(",")

    return listed
