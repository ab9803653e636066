"""Which modules a pattern of adapter_config.json names, by PEFT's own rules (peft 0.21, `check_target_module_exists`, `get_pattern_key`).

    regex in target_modules, exclude_modules:  re.fullmatch(pattern, name)
    key of rank_pattern, alpha_pattern:        re.match(rf"(.*\\.)?({key})$", name), the first key in the order of the file
    layers_pattern:                            re.match(rf"(?:^|.*?\\.){pattern}\\.(?P<idx>\\d+)\\.", name)

Patterns come from tenants, and Python's regex engine backtracks while it holds the interpreter lock: one pattern could stop a server.
So a pattern is matched here only when its text bounds the work (at most `MAX_QUANTIFIERS` quantifiers and none on a group, which is
at most a few hundred thousand steps on names of 40 characters); any other is matched in a child process with a deadline.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

MAX_QUANTIFIERS = 5
MAX_PATTERN_CHARS = 20_000
DEADLINE_S = 10.0

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.]+")
_QUANTIFIER = re.compile(r"[*+{?]")
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
    regexes = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in layers_pattern] or [
        r".*?\.[^.]*\.(?P<idx>\d+)\."
    ]
    found: dict[str, int] = {}
    for matches in _match("match", regexes, names):
        for name, index in matches.items():
            found.setdefault(name, int(index) if index else -1)
    return {name: index for name, index in found.items() if index >= 0}


def pattern_values(patterns: Mapping[str, Value], names: Sequence[str]) -> dict[str, Value]:
    """name -> the value of the first key that names it; names that no key names are left out."""
    found: dict[str, Value] = {}
    regexes = [key for key in patterns if not _PLAIN_KEY.fullmatch(key)]
    matched = dict(zip(regexes, _match("match", [rf"(.*\.)?({key})$" for key in regexes], names), strict=True))
    for name in names:
        for key, value in patterns.items():
            if name in matched[key] if key in matched else _plain_key_matches(key, name):
                found[name] = value
                break
        else:
            if name in patterns:  # peft looks a name up literally when no key matches it as a regex
                found[name] = patterns[name]
    return found


def names_by_suffix(entries: Sequence[str], name: str) -> str | None:
    """The first entry that is the name or a dotted suffix of it (list form of target_modules and exclude_modules)."""
    return next((entry for entry in entries if name == entry or name.endswith("." + entry)), None)


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise PatternError for one that cannot be compiled."""
    _match("match", patterns, ())


def _plain_key_matches(key: str, name: str) -> bool:
    """`re.match(rf"(.*\\.)?({key})$", name)` for a key of letters, digits, `_` and `.` (which matches any character)."""
    start = len(name) - len(key)
    if start < 0 or not name.endswith(key.rpartition(".")[2]) or (start > 0 and name[start - 1] != "."):
        return False
    return all(wanted in (".", char) for wanted, char in zip(key, name[start:], strict=True))


def _match(mode: str, regexes: Sequence[str], names: Sequence[str]) -> list[Matches]:
    if sum(map(len, regexes)) > MAX_PATTERN_CHARS:
        raise PatternError(f"patterns of more than {MAX_PATTERN_CHARS} characters in all; list the modules by name")
    if not all(map(_is_bounded, regexes)):
        return _match_in_child(mode, regexes, names)
    return [_match_here(mode, regex, names) for regex in regexes]


def _is_bounded(regex: str) -> bool:
    """Whether the text alone shows that matching a name cannot take long."""
    text = regex.replace("(?:", "(").replace("(?P<idx>", "(").removeprefix(r"(.*\.)?")
    return "(?" not in text and not _QUANTIFIED_GROUP.search(text) and len(_QUANTIFIER.findall(text)) <= MAX_QUANTIFIERS


def _match_here(mode: str, regex: str, names: Sequence[str]) -> Matches:
    try:
        match = getattr(re.compile(regex), mode)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"{regex!r} is no regular expression: {error}") from error
    hits = ((name, match(name)) for name in names)
    return {name: hit.groupdict().get("idx") or "" for name, hit in hits if hit}


def _match_in_child(mode: str, regexes: Sequence[str], names: Sequence[str]) -> list[Matches]:
    request = json.dumps([mode, list(regexes), list(names)])
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
    found: list[Matches] = reply["found"]
    return found
