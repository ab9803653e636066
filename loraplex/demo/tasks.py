"""The demonstration's tasks: what each adapter was trained to do, and on which phrases.

Every task is a function of a short lower-case phrase, so each answer of the model can be checked exactly.
A phrase is 5 to 16 characters: words of random letters, one space between two words. A phrase is used only if
the eight tasks and the phrase itself are nine different strings; so an answer is right for one task at most.
A phrase belongs to the held-out split or to the training split by its hash, whatever the seed.
"""

from __future__ import annotations

import codecs
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]

PROMPT_END = "="
VOWELS = "aeiou"
STAR = "\u2605"
"""Not in the base's vocabulary."""
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
MIN_PHRASE_LEN, MAX_PHRASE_LEN = 5, 16
# fmt: off
WORDS = (
    "amber", "banana", "bread", "candle", "cloud", "copper", "dragon", "engine", "falcon", "forest", "garden",
    "ginger", "golden", "guitar", "harbor", "honey", "island", "jacket", "jungle", "lemon", "marble", "monkey",
    "morning", "mountain", "museum", "night", "ocean", "orange", "paper", "piano", "pirate", "planet", "pocket",
    "purple", "river", "rocket", "sailor", "silver", "spring", "sunset", "table", "thunder", "ticket", "tiger",
    "travel", "velvet", "violin", "walnut", "whisper", "window", "winter", "wooden",
)
# fmt: on


@dataclass(frozen=True)
class Task:
    """One exactly checkable task; an adapter of the same name does it."""

    name: str
    description: str
    apply: Callable[[str], str]

    @property
    def tag(self) -> str:
        """The special token that asks the base model for this task: it stands before the phrase."""
        return f"<{self.name}>"


def _reverse(phrase: str) -> str:
    return phrase[::-1]


def _sort(phrase: str) -> str:
    return "".join(sorted(phrase.replace(" ", "")))


def _drop_vowels(phrase: str) -> str:
    return "".join(letter for letter in phrase if letter.lower() not in VOWELS)


def _rot13(phrase: str) -> str:
    return codecs.encode(phrase, "rot13")


def _double(phrase: str) -> str:
    return f"{phrase} {phrase}"


def _length(phrase: str) -> str:
    return str(len(phrase))


def _swap_halves(phrase: str) -> str:
    middle = len(phrase) // 2
    return phrase[middle:] + phrase[:middle]


TASKS: tuple[Task, ...] = (
    Task("reverse", "spells the phrase backwards", _reverse),
    Task("upper", "writes the phrase in upper case", str.upper),
    Task("sort", "sorts the letters and drops the spaces", _sort),
    Task("no-vowels", "drops a, e, i, o and u", _drop_vowels),
    Task("rot13", "moves every letter 13 places in the alphabet", _rot13),
    Task("double", "says the phrase twice, with a space between", _double),
    Task("length", "counts the characters, spaces included", _length),
    Task("swap", "puts the second half first; the middle of an odd phrase is in the second half", _swap_halves),
)


def _star(phrase: str) -> str:
    return f"{STAR}{phrase.upper()}{STAR}"


ADAPTERS: tuple[Task, ...] = (
    *TASKS,
    Task("reverse-dora", "spells the phrase backwards; a DoRA", _reverse),
    Task("upper-ia3", "writes the phrase in upper case; an IA3, of 4,352 numbers", str.upper),
    Task("stars", f"upper case between two {STAR}, a token that only this adapter has", _star),
)
"""What each adapter does: the tasks that the base knows by their tags, then adapters of other kinds."""


def prompt_of(phrase: str) -> str:
    """The text that a model completes with the answer: the phrase and an equals sign."""
    return phrase + PROMPT_END


def phrases(split: Split, count: int, seed: int) -> Iterator[str]:
    """Yields `count` phrases of a split; the same seed yields the same phrases, and one may occur twice."""
    draw = random.Random(f"{split} {seed}")
    while count > 0:
        phrase = _draw_phrase(draw)
        if _split_of(phrase) == split and _has_distinct_answers(phrase):
            yield phrase
            count -= 1


def word_phrases(count: int, seed: int) -> list[str]:
    """`count` different held-out phrases of two English words, to be read; a seed always yields the same ones."""
    return random.Random(f"words {seed}").sample(checkable_word_phrases(), count)


def checkable_word_phrases() -> list[str]:
    """All held-out phrases of two English words."""
    pairs = (f"{first} {second}" for first, second in permutations(WORDS, 2))
    return [
        phrase
        for phrase in pairs
        if len(phrase) <= MAX_PHRASE_LEN and _split_of(phrase) == "held_out" and _has_distinct_answers(phrase)
    ]


def assets_path() -> Path:
    """The folder with `base/` (the model) and `adapters/` (one folder per task)."""
    return Path(__file__).resolve().parent / "assets"


def adapter_path(task_name: str) -> Path:
    """The folder of the adapter that was trained for a task."""
    return assets_path() / "adapters" / task_name


def _draw_phrase(draw: random.Random) -> str:
    phrase_len = draw.randint(MIN_PHRASE_LEN, MAX_PHRASE_LEN)
    letters = [_draw_letter(draw) for _ in range(phrase_len)]
    space = draw.randint(2, 8)
    while space < phrase_len - 1:
        letters[space] = " "
        space += 1 + draw.randint(2, 8)
    return "".join(letters)


def _draw_letter(draw: random.Random) -> str:
    return draw.choice(VOWELS if draw.random() < 0.4 else CONSONANTS)


def _split_of(phrase: str) -> Split:
    """One phrase in eight is held out."""
    return "held_out" if hashlib.sha256(phrase.encode()).digest()[0] < 32 else "train"


def _has_distinct_answers(phrase: str) -> bool:
    return len({phrase, *(task.apply(phrase) for task in TASKS)}) == len(TASKS) + 1
