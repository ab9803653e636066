"""Which modules a pattern of adapter_config.json names.

By the rules of peft 0.21, `check_target_module_exists` and `get_pattern_key`:

    regex in target_modules, exclude_modules:  re.fullmatch(pattern, name)
    key of rank_pattern, alpha_pattern:        re.match(rf"(.*\\.)?({key})$", name), the first key in the file's order
    layers_pattern:                            re.match(rf"(?:^|.*?\\.){pattern}\\.(?P<idx>\\d+)\\.", name)

Patterns come from tenants, and Python's regex engine backtracks while it holds the interpreter lock: one pattern could
stop a server. So patterns are matched here only when they are short, made of the plain parts that _TOKEN knows, and
`_max_steps` shows that they cost little. Behind q quantifiers, none on a group, and g alternatives (multiplied), a
place in a pattern is reached at most C(n + q, q) * g times in a name of n characters; the steps are the sum over the
places. Beyond MAX_STEPS (about 20 ms) or MAX_CHARS_HERE, or where the text bounds nothing, they are matched in a child
process with a deadline, and a limit on its processor time and memory, which is the same answer 20 ms later. At most
MAX_CHILDREN of them run at a time, one of a tenant; an adapter that waits CHILD_WAIT_S for one is to be loaded again.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from loraplex.errors import AdapterBusyError, shown
from loraplex.processes.environment import child_environment
from loraplex.processes.fair_turns import FairTurns

MAX_STEPS = 2_000_000
MAX_PATTERN_CHARS = 200_000
MAX_REGEXES = 512
MAX_CHARS_HERE = 4096
MAX_SETS_HERE = 32
"""`[` in patterns that are compiled here: one with a large range takes two milliseconds."""

MAX_KINDS_OF_KEYS = 16
"""Plain keys of one length with dots at different places; more are matched as regular expressions."""
HITS_A_NAME, SPARE_HITS = 4, 4096
"""How often the patterns of a child may name modules: the answer of 512 that name all of thousands is gigabytes."""

LOOKS_A_NAME, SPARE_LOOKS = 256, 2**20
"""How often the names of modules are compared with plain keys and entries: of real adapters some tens of times each."""

DEADLINE_S = 10.0
MAX_CHILDREN = 2
CHILD_WAIT_S = 5.0
CHILD_CPU_S, CHILD_MEMORY_BYTES = 2, 512 * 2**20
MAX_KNOWN_CHARS = 2**22
"""Of names that an answer is remembered with: those of a base model are fewer, those of a file are its owner's."""

_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.]+")
_ANY_PARENT = r"(.*\.)?"
_TOKEN = re.compile(
    r"(?P<literal>[^\\\[\](){}*+?|.^$\x80-\U0010ffff]|\\[^A-Za-z0-9\x80-\U0010ffff])"
    r"|(?P<item>[.^$]|\\[dDwWsSbBAZ]|\[\^?(?:[A-Za-z0-9_.|-]|\\[dws.-])+\])"
    r"|(?P<quantifier>(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})\??)"
    r"|(?P<open>\((?:\?:|\?P<idx>|(?!\?)))|(?P<bar>\|)|(?P<close>\))|(?P<other>(?s:.))"
)
"""What the cost of a regex is read from. What is none of the plain parts, as `(?=`, `\\1` or `[)]`, is `other`."""

Value = TypeVar("Value")
Matches = dict[str, str]
"""name -> the layer index as text, or "" for a pattern without one; a name that does not match is not in it."""

_CHILD = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
mode, regexes, names, max_hits = json.load(sys.stdin)
found = []
try:
    for regex in regexes:
        match = getattr(re.compile(regex), mode)
        hits = ((number, match(name)) for number, name in enumerate(names))
        found.append([[number, hit.groupdict().get("idx") or ""] for number, hit in hits if hit])
        max_hits -= len(found[-1])
        if max_hits < 0:
            break
    else:
        json.dump({"found": found}, sys.stdout)
        sys.exit()
    json.dump({"error": "and the patterns beside it name modules too often; list the modules by name"}, sys.stdout)
except MemoryError:
    json.dump({"error": "takes too much memory; list the modules by name"}, sys.stdout)
except Exception as error:
    json.dump({"error": f"is no regular expression: {type(error).__name__}: {error}"[:200]}, sys.stdout)
""".replace("CPU_S", str(CHILD_CPU_S)).replace("MEMORY_BYTES", str(CHILD_MEMORY_BYTES))

_children = FairTurns(MAX_CHILDREN, most_of_a_client=1)


class PatternError(ValueError):
    """A pattern that is no regular expression, or that takes too long."""


class Looks:
    """The comparisons that matching these names may take in all. `take` raises PatternError beyond them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.left = SPARE_LOOKS + LOOKS_A_NAME * len(names)

    def take(self, num_looks: int) -> None:
        self.left -= num_looks
        if self.left < 0:
            text = "its names of modules and the entries of adapter_config.json take too many comparisons"
            raise PatternError(f"{text}; no real adapter's do")


def fullmatches(pattern: str, names: Sequence[str]) -> Matches:
    """The names that the whole pattern matches (regex form of target_modules and exclude_modules)."""
    return _match("fullmatch", (pattern,), names)[0]


def layer_indices(layers_pattern: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """name -> its layer index by the first pattern that matches; by default the first number after two components."""
    regexes = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in layers_pattern]
    matched = _match("match", regexes, names) if regexes else [_match_here("match", _ANY_LAYER, names)]
    found: dict[str, int] = {}
    for matches in matched:
        for name, index in matches.items():
            found.setdefault(name, int(index) if index else -1)
    return {name: index for name, index in found.items() if index >= 0}


def pattern_values(patterns: Mapping[str, Value], names: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """name -> the values of the keys that name it, in their order: peft takes the first.

    Names that no key names are left out.
    """
    if not patterns:  # most adapters; a load asks three times
        return {}
    keys = list(patterns)
    plain = _PlainKeys({order: key for order, key in enumerate(keys) if _PLAIN_KEY.fullmatch(key)})
    regexes = {order: f"{_ANY_PARENT}({key})$" for order, key in enumerate(keys) if order not in plain.orders}
    matched = dict(zip(regexes, _match("match", list(regexes.values()), names), strict=True))
    found: dict[str, tuple[Value, ...]] = {}
    looks = Looks(names)
    for name in names:
        orders = sorted([*plain.naming(name, looks), *(order for order, matches in matched.items() if name in matches)])
        if orders:
            found[name] = tuple(patterns[keys[order]] for order in orders)
        elif name in patterns:  # peft looks a name up literally when no key matches it as a regex
            found[name] = (patterns[name],)
    return found


class _PlainKeys:
    """Keys of letters, digits, `_` and `.`, hundreds of them where each module has its own rank (EVA): found by hash.

    As a regex such a key matches a dotted suffix of its own length with any character where it has a dot. So keys with
    dots at the same places are in one table, by the characters that are left.
    """

    def __init__(self, keys: Mapping[int, str]) -> None:
        self._tables: dict[int, dict[tuple[int, ...], dict[str, list[int]]]] = {}
        self.orders: set[int] = set()
        """Of the keys that are in a table."""
        for order, key in keys.items():
            dots = tuple(index for index, char in enumerate(key) if char == ".")
            tables = self._tables.setdefault(len(key), {})
            if dots in tables or len(tables) < MAX_KINDS_OF_KEYS:
                tables.setdefault(dots, {}).setdefault(_without(key, dots), []).append(order)
                self.orders.add(order)

    def naming(self, name: str, looks: Looks) -> list[int]:
        """The orders of the keys that name this module. A look is at a run of characters between a key's dots."""
        orders: list[int] = []
        for suffix in dotted_suffixes(name):
            tables = self._tables.get(len(suffix), {})
            looks.take(1 + sum(len(dots) + 1 for dots in tables))
            for dots, table in tables.items():
                orders.extend(table.get(_without(suffix, dots), ()))
        return orders


def _without(text: str, positions: tuple[int, ...]) -> str:
    starts, ends = (0, *(index + 1 for index in positions)), (*positions, len(text))
    return "\0".join(text[start:end] for start, end in zip(starts, ends, strict=True))


@functools.lru_cache(maxsize=4096)  # a check asks three times for each module of the base
def dotted_suffixes(name: str) -> tuple[str, ...]:
    """What an entry of a list may say to name this module: `a.b.c` is named by `a.b.c`, `b.c` and `c`."""
    return (name, *(name[index + 1 :] for index, char in enumerate(name) if char == "."))


def named_by(entries: Collection[str], names: Sequence[str]) -> list[str]:
    """The names of which an entry is the whole or a dotted suffix (list form of target_modules and exclude_modules)."""
    known = frozenset(entries)
    return [name for name in names if not known.isdisjoint(dotted_suffixes(name))]


def named_by_ends(
    entries: frozenset[str], names: Sequence[str], with_parents: bool = False
) -> dict[str, frozenset[str]]:
    """name -> the entries that are an end of it, or with_parents of a parent of it, without regard to dots."""
    if not entries:
        return {}
    lengths, looks = _lengths(map(len, entries), map(len, names)), Looks(names)

    def sayable(name: str) -> frozenset[str]:
        stops = [len(name), *(index for index, char in enumerate(name) if char == "." and with_parents)]
        looks.take(len(stops) * len(lengths))
        return frozenset(name[stop - length : stop] for stop in stops for length in lengths if length <= stop)

    return _said(entries, names, sayable)


def named_by_spans(entries: frozenset[str], names: Sequence[str]) -> dict[str, frozenset[str]]:
    """name -> the entries that are runs of whole components of it."""
    if not entries:
        return {}
    lengths, looks = _lengths(map(_num_components, entries), map(_num_components, names)), Looks(names)

    def sayable(name: str) -> frozenset[str]:
        parts = name.split(".")
        looks.take(len(parts) * len(lengths))
        return frozenset(
            ".".join(parts[start : start + length]) for length in lengths for start in range(len(parts) - length + 1)
        )

    return _said(entries, names, sayable)


def _lengths(of_entries: Iterable[int], of_names: Iterable[int]) -> list[int]:
    """Those of the entries that some name may have."""
    longest = max(of_names, default=0)
    return sorted({length for length in of_entries if 0 < length <= longest})


def _num_components(name: str) -> int:
    return name.count(".") + 1


def _said(
    entries: frozenset[str], names: Sequence[str], sayable: Callable[[str], frozenset[str]]
) -> dict[str, frozenset[str]]:
    found = {name: entries & sayable(name) for name in names}
    return {name: hits for name, hits in found.items() if hits}


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise PatternError for one that cannot be compiled."""
    _match("match", [pattern for pattern in patterns if not _PLAIN_KEY.fullmatch(pattern)], ())


def _match(mode: str, regexes: Sequence[str], names: Sequence[str]) -> Sequence[Matches]:
    num_chars = sum(map(len, regexes))
    if num_chars > MAX_PATTERN_CHARS or len(regexes) > MAX_REGEXES:
        text = f"at most {MAX_REGEXES} patterns of {MAX_PATTERN_CHARS} characters in all are read"
        raise PatternError(f"{text}; list the modules by name")
    is_short = num_chars <= MAX_CHARS_HERE and sum(regex.count("[") for regex in regexes) <= MAX_SETS_HERE
    num_names = max(1, len(names))  # without names it is compiled
    if is_short and sum(_max_steps(regex, names) for regex in regexes) * num_names <= MAX_STEPS:
        return [_match_here(mode, regex, names) for regex in regexes]
    return _match_in_child(mode, tuple(regexes), tuple(names))


@dataclass(frozen=True, slots=True)
class _Ways:
    """How often a place in a regex can be reached: choices, times the splits of a name among quantifiers.

    before: the ways before the quantifier that ends here. A literal after it has only the places that the name has.
    """

    choices: int = 1
    quantifiers: int = 0
    before: _Ways | None = None

    def count(self, name_length: int) -> int:
        return self.choices * math.comb(name_length + self.quantifiers, self.quantifiers)

    def __or__(self, other: _Ways) -> _Ways:
        return _Ways(self.choices + other.choices, max(self.quantifiers, other.quantifiers))

    def repeated(self) -> _Ways:
        return _Ways(self.choices, self.quantifiers + 1, self)

    def at_literal(self, num_places: int) -> _Ways:
        return self if self.before is None else _Ways(self.before.choices * num_places, self.before.quantifiers)


def _max_steps(regex: str, names: Sequence[str]) -> float:
    """A bound on the steps of matching one of the names, from the text alone; infinite above MAX_STEPS or without one.

    The sum over the places in the text of the ways to reach them: each item, branch and end of a group takes a step
    each time, a quantified item one for each character.
    """
    if regex.startswith(_ANY_PARENT):
        regex = rf"(|.*\.){regex.removeprefix(_ANY_PARENT)}"
    length = max(map(len, names), default=0)
    places = functools.cache(lambda literal: max((name.count(literal) for name in names), default=0))
    starts, ends, ways, before = [_Ways()], [_Ways(0)], _Ways(), _Ways()
    steps, last = len(regex), ""
    for token in _TOKEN.finditer(regex):
        kind = token.lastgroup
        if kind == "quantifier":
            if last not in ("literal", "item"):
                return math.inf
            steps += before.count(length) * (length + 2)
            ways = before.repeated()
        else:
            before = ways
            steps += ways.count(length)
        if kind == "literal":
            ways = ways.at_literal(places(token[0][-1]))
        elif kind == "item":
            ways = _Ways(ways.choices, ways.quantifiers)
        elif kind == "open":
            starts.append(ways)
            ends.append(_Ways(0))
            steps += ways.count(length)  # of its first alternative
        elif kind == "bar":
            ends[-1], ways = ends[-1] | ways, starts[-1]
            steps += ways.count(length)  # of the next
        elif kind == "close" and len(starts) > 1:
            ways, _ = ends.pop() | ways, starts.pop()
            steps += ways.count(length)  # of the group's own end
        elif kind != "quantifier":
            return math.inf
        if steps > MAX_STEPS:
            return math.inf
        last = kind
    steps += (ends[0] | ways).count(length)
    return steps if steps <= MAX_STEPS else math.inf


def _match_here(mode: str, regex: str, names: Sequence[str]) -> Matches:
    try:
        match = getattr(re.compile(regex), mode)
    except Exception as error:  # re.error, OverflowError, RecursionError, and a warning where those are errors
        raise PatternError(f"{shown(regex)} is no regular expression: {str(error)[:200]}") from error
    hits = ((name, match(name)) for name in names)
    return {name: hit.groupdict().get("idx") or "" for name, hit in hits if hit}


def _match_in_child(mode: str, regexes: tuple[str, ...], names: tuple[str, ...]) -> list[Matches]:
    is_known = sum(map(len, names)) <= MAX_KNOWN_CHARS
    reply = json.loads((_known_reply_of_child if is_known else _reply_of_child)(mode, regexes, names))
    if "error" in reply:
        raise PatternError(f"{shown(regexes[0])} {reply['error']}")
    return [{names[number]: index for number, index in hits} for hits in reply["found"]]


def _reply_of_child(mode: str, regexes: tuple[str, ...], names: tuple[str, ...]) -> str:
    max_hits = SPARE_HITS + HITS_A_NAME * len(names)
    request, first = json.dumps([mode, regexes, names, max_hits]), shown(regexes[0])
    command = [sys.executable, "-I", "-S", "-c", _CHILD]
    try:
        with _children.own(CHILD_WAIT_S):
            child = subprocess.run(
                command, input=request, capture_output=True, text=True, timeout=DEADLINE_S, env=child_environment()
            )
        if child.returncode or not child.stdout:
            raise PatternError(f"{first} takes more than {CHILD_CPU_S} s or too much memory; list the modules by name")
        return child.stdout
    except TimeoutError:
        raise AdapterBusyError(
            "other adapters with costly patterns are being checked already; load this one again in a moment"
        ) from None
    except subprocess.TimeoutExpired:
        raise PatternError(f"{first} takes longer than {DEADLINE_S:g} s; list the modules by name") from None
    except OSError as error:
        raise PatternError(f"{first} cannot be matched now: {error.strerror}; load the adapter again") from error


_known_reply_of_child = functools.lru_cache(maxsize=16)(_reply_of_child)
"""Ranks, alphas and scalings of one adapter ask the same."""


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """Block-diagonal LoRA (arXiv 2510.23346): in which modules A, or B, is `num_blocks` blocks on its diagonal.

    A module is one of them when its name has one of these strings anywhere. is_strict: every target has to be one.
    """

    of_a: tuple[str, ...]
    of_b: tuple[str, ...]
    num_blocks: int
    is_strict: bool
    _named: dict[str, tuple[bool, bool]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def blocks_of(self, module: str) -> tuple[int, int]:
        """Of A and of B; 1: it is whole."""
        of_a, of_b = self._names(module)
        return self.num_blocks if of_a else 1, self.num_blocks if of_b else 1

    def _names(self, module: str) -> tuple[bool, bool]:
        """Whether for A, and for B. A load asks several times for each of a mixture's thousands of modules."""
        if (known := self._named.get(module)) is None:
            known = any(part in module for part in self.of_a), any(part in module for part in self.of_b)
            self._named[module] = known
        return known

    def reason_against(self, module: str, rank: int, in_features: int, out_features: int) -> str | None:
        """Why peft would not make it of such a module; None: it would."""
        is_a, is_b = self._names(module)
        if is_a and is_b:
            return f"{module}: use_bdlora names it for both A and B"
        if self.is_strict and not (is_a or is_b):
            return f"{module}: use_bdlora names it for neither A nor B, and match_strict is set"
        width = in_features if is_a else out_features
        if (is_a or is_b) and (rank % self.num_blocks or width % self.num_blocks):
            text = f"its rank {rank} and {width} features cannot be cut into {self.num_blocks} blocks"
            return f"{module}: {text}, as use_bdlora has it"
        return None
