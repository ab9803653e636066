"""Which modules a pattern of adapter_config.json names, by PEFT's own rules (peft 0.21, `check_target_module_exists`, `get_pattern_key`).

    regex in target_modules, exclude_modules:  re.fullmatch(pattern, name)
    key of rank_pattern, alpha_pattern:        re.match(rf"(.*\\.)?({key})$", name), the first key in the order of the file
    layers_pattern:                            re.match(rf"(?:^|.*?\\.){pattern}\\.(?P<idx>\\d+)\\.", name)

Patterns come from tenants, and Python's regex engine backtracks while it holds the interpreter lock: one pattern could stop a server.
So patterns are matched here only when their text bounds the steps: with q quantifiers, none on a group, and g alternatives in the
groups (multiplied), a name of n characters takes at most C(n + q, q) * g. Beyond MAX_STEPS, or where the text bounds nothing, they are
matched in a child process with a deadline, which is the same answer 20 ms later.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

MAX_STEPS = 5_000_000
MAX_PATTERN_CHARS = 200_000
DEADLINE_S = 10.0

_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.]+")
_QUANTIFIER = re.compile(r"[*+{?]\??")
_QUANTIFIED_GROUP = re.compile(r"\)[*+{]")

Value = TypeVar("Value")
Matches = dict[str, str]
"""name -> the layer index as text, or "" for a pattern without one; a name that does not match is not in it."""

_CHILD = """
import json, re, sys
mode, regexes, names = json.load(sys.stdin)
found = []
try:
    for regex in regexes:
        match = getattr(re.compile(regex), mode)
        hits = ((name, match(name)) for name in names)
        found.append({name: hit.groupdict().get("idx") or "" for name, hit in hits if hit})
    json.dump({"found": found}, sys.stdout)
except Exception as error:
    json.dump({"error": f"{type(error).__name__}: {error}"}, sys.stdout)
"""


class PatternError(ValueError):
    """A pattern that is no regular expression, or that takes too long."""


def fullmatches(pattern: str, names: Sequence[str]) -> Matches:
    """The names that the whole pattern matches (regex form of target_modules and exclude_modules)."""
    return _match("fullmatch", (pattern,), names)[0]


def layer_indices(layers_pattern: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """name -> its layer index by the first pattern that matches; without patterns, the first number that follows two components."""
    regexes = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in layers_pattern]
    matched = _match("match", regexes, names) if regexes else [_match_here("match", _ANY_LAYER, names)]
    found: dict[str, int] = {}
    for matches in matched:
        for name, index in matches.items():
            found.setdefault(name, int(index) if index else -1)
    return {name: index for name, index in found.items() if index >= 0}


def pattern_values(patterns: Mapping[str, Value], names: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """name -> the values of the keys that name it, in their order: peft takes the first. Names that no key names are left out."""
    regexes = [key for key in patterns if not _PLAIN_KEY.fullmatch(key)]
    matched = dict(zip(regexes, _match("match", [rf"(.*\.)?({key})$" for key in regexes], names), strict=True))
    found: dict[str, tuple[Value, ...]] = {}
    for name in names:
        hits = tuple(
            value
            for key, value in patterns.items()
            if (name in matched[key] if key in matched else _plain_key_matches(key, name))
        )
        if hits or name in patterns:  # peft looks a name up literally when no key matches it as a regex
            found[name] = hits or (patterns[name],)
    return found


def names_by_suffix(entries: Sequence[str], name: str) -> str | None:
    """The first entry that is the name or a dotted suffix of it (list form of target_modules and exclude_modules)."""
    return next((entry for entry in entries if name == entry or name.endswith("." + entry)), None)


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise PatternError for one that cannot be compiled."""
    _match("match", [pattern for pattern in patterns if not _PLAIN_KEY.fullmatch(pattern)], ())


def _plain_key_matches(key: str, name: str) -> bool:
    """`re.match(rf"(.*\\.)?({key})$", name)` for a key of letters, digits, `_` and `.` (which matches any character)."""
    start = len(name) - len(key)
    if start < 0 or not name.endswith(key.rpartition(".")[2]) or (start > 0 and name[start - 1] != "."):
        return False
    return all(wanted in (".", char) for wanted, char in zip(key, name[start:], strict=True))


def _match(mode: str, regexes: Sequence[str], names: Sequence[str]) -> Sequence[Matches]:
    if sum(map(len, regexes)) > MAX_PATTERN_CHARS:
        raise PatternError(f"patterns of more than {MAX_PATTERN_CHARS} characters in all; list the modules by name")
    longest = max(map(len, names), default=0)
    if sum(_max_steps(regex, longest) for regex in regexes) * max(1, len(names)) > MAX_STEPS:
        return _match_in_child(mode, tuple(regexes), tuple(names))
    return [_match_here(mode, regex, names) for regex in regexes]


def _max_steps(regex: str, name_length: int) -> float:
    """A bound on the steps of matching one name, from the text alone; infinite where the text shows none."""
    text = re.sub(r"\\.", "_", regex.replace("(?:", "(").replace("(?P<idx>", "(").replace(r"(.*\.)?", "(.*)"))
    if "(?" in text or _QUANTIFIED_GROUP.search(text):
        return math.inf
    quantifiers = len(_QUANTIFIER.findall(text))
    return math.comb(name_length + quantifiers, quantifiers) * _num_choices(text)


def _num_choices(text: str) -> int:
    """The alternatives of all groups, multiplied."""
    product, open_groups = 1, [1]
    for char in text:
        if char == "(":
            open_groups.append(1)
        elif char == "|":
            open_groups[-1] += 1
        elif char == ")" and len(open_groups) > 1:
            product *= open_groups.pop()
    return product * math.prod(open_groups)


def _match_here(mode: str, regex: str, names: Sequence[str]) -> Matches:
    try:
        match = getattr(re.compile(regex), mode)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"{regex!r} is no regular expression: {error}") from error
    hits = ((name, match(name)) for name in names)
    return {name: hit.groupdict().get("idx") or "" for name, hit in hits if hit}


@functools.lru_cache(maxsize=64)  # ranks, alphas and scalings of one adapter ask the same
def _match_in_child(mode: str, regexes: tuple[str, ...], names: tuple[str, ...]) -> tuple[Matches, ...]:
    request = json.dumps([mode, regexes, names])
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=request,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        reply = json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        raise PatternError(f"{regexes[0]!r} takes longer than {DEADLINE_S:g} s; list the modules by name") from None
    except (OSError, ValueError) as error:
        raise PatternError(f"{regexes[0]!r} is too complex to be matched in this process: {error}") from error
    if "error" in reply:
        raise PatternError(f"{regexes[0]!r} is no regular expression: {reply['error']}")
    return tuple(reply["found"])
