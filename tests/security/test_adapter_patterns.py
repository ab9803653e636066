"""Regular expressions of an adapter's configuration: they cost their own adapter alone, and a bounded amount."""

from __future__ import annotations

import math
import re
import subprocess
import threading
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters import patterns
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.patterns import (
    MAX_CHILDREN,
    MAX_KINDS_OF_KEYS,
    MAX_STEPS,
    PatternError,
    check_patterns,
    dotted_suffixes,
    fullmatches,
    pattern_values,
)
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterBusyError, AdapterValidationError
from loraplex.processes.fair_turns import working_for
from tests.security.regex_steps import StepCounter

NAMES = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(30) for part in "qkvo"]
MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def refused(**fields: Any) -> str:
    """What is said of a configuration whose patterns are asked about a base model; "" if nothing is."""
    helper = PEFTHelper.from_dict({**MINIMAL, **fields}, "sql")
    reasons = helper.reasons(LoRAConfig())
    try:
        helper.match_modules(NAMES)
        helper.numbers(NAMES)
    except AdapterValidationError as error:
        reasons += error.reasons
    return "\n".join(reasons)


@pytest.mark.parametrize(
    "regex",
    [
        "(a|b)" * 1100,
        "(a|b)*" * 1100,
        "(?:a|b)" * 5000,
        "a{1,65535}" * 400,
        "a{99999999999999999999}",
        "(" * 3000 + ")" * 3000,
        "((((((((((a{1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9}){1,9})",
        "[\0-\U0010ffff]" * 300,
        "(?i)[\0-\U0010ffff]" * 3,
        "[[a]&&[b]]",
        "(?P<idx>x)" * 200,
        "(?<=a{2,3})b",
        "(?(1)a|b)",
        "(?au)x",
        "(?L)x",
        "\\N{no such name}",
        "\\x{zz}",
        "\\1",
        "*",
        "a**",
        "[z-a]",
        "\ud800",
        "\0" * 100,
    ],
    ids=lambda regex: ascii(regex[:16]),
)
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "layers_pattern"])
def test_whatever_the_engine_raises_is_the_adapters_fault(field: str, regex: str) -> None:
    """`{"(a|b)" * 1100: 8, ...}` was a 500: an integer that no float can be was added to infinity."""
    value: dict[str, Any] = {field: {regex: 8, r"(\w+)*x": 4} if field == "rank_pattern" else regex}
    if field == "layers_pattern":
        value["layers_to_transform"] = [1]
    text = refused(**value)
    assert regex[:100] not in text or len(regex) < 100
    assert len(text) < 2000


def test_the_pattern_of_the_report() -> None:
    assert refused(rank_pattern={"(a|b)" * 1100: 8, r"(\w+\.)*q_proj": 4}) == ""


def test_catastrophic_backtracking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**30 steps, in a process that may take two seconds of a processor; then the adapter is refused."""
    text = refused(target_modules=r"([\w.]+)+!")
    assert "list the modules by name" in text


def test_matching_that_hangs_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(patterns, "DEADLINE_S", 0.2)
    with pytest.raises(PatternError, match=r"takes longer than 0\.2 s"):
        fullmatches(r"(?i)hangs", NAMES)


def test_a_child_has_bounded_memory_and_processor_time() -> None:
    assert "RLIMIT_AS, (536870912, 536870912)" in patterns._CHILD
    assert "RLIMIT_CPU, (2, 2)" in patterns._CHILD
    code = patterns._CHILD.replace("found = []", "found = bytearray(2**30)")
    done = subprocess.run(
        ["python3", "-I", "-c", code], input='["match", [], []]', capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 or "memory" in done.stdout


def test_no_more_than_two_are_matched_at_a_time_and_one_of_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are to come again rather than hold the threads that load adapters; the slots are free afterwards. Six
    loads of one tenant had every load of another refused."""
    running, release = threading.Semaphore(0), threading.Event()
    run = subprocess.run

    def wait_and_run(*args: Any, **options: Any) -> Any:
        running.release()
        assert release.wait(30)
        return run(*args, **options)

    monkeypatch.setattr(patterns.subprocess, "run", wait_and_run)
    monkeypatch.setattr(patterns, "CHILD_WAIT_S", 0.05)
    found: list[Any] = []

    def match(tenant: str) -> None:
        with working_for(tenant):
            found.append(fullmatches(f"(?i).*{tenant}_proj", NAMES))

    threads = [threading.Thread(target=match, args=(str(number),)) for number in range(MAX_CHILDREN)]
    for thread in threads:
        thread.start()
        assert running.acquire(timeout=30)
        with working_for("0"), pytest.raises(AdapterBusyError):  # while there is a place, too
            fullmatches(r"(?i).*q_Proj", NAMES)
    with pytest.raises(AdapterBusyError, match="load this one again in a moment") as caught:
        fullmatches(r"(?i).*Q_PROJ", NAMES)
    assert caught.value.http_status == 429
    assert fullmatches(r".*\.q_proj", NAMES), "what needs no child is not held up"
    release.set()
    for thread in threads:
        thread.join(60)
    assert len(found) == MAX_CHILDREN
    assert len(fullmatches(r"(?i).*Q_PROJ", NAMES)) == 30


@pytest.mark.parametrize(
    "regexes", [["(a" * 10 + ")" * 10] * 513, ["a" * 200_001], ["[ab]"] * 600], ids=["many", "long", "sets"]
)
def test_patterns_are_counted_before_they_are_compiled(regexes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("_match_here", "_match_in_child"):
        monkeypatch.setattr(patterns, way, lambda *args: pytest.fail("it was compiled"))
    with pytest.raises(PatternError, match="at most 512 patterns of 200000 characters"):
        patterns._match("match", regexes, NAMES)


def test_long_patterns_and_large_sets_are_not_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(patterns, "_match_in_child", lambda *args: asked.append(args) or ({},))
    for regex in ("a" * 5000 + "!", "[\0-\uffff]" * 40):
        check_patterns([regex])
    assert len(asked) == 2


def test_thousands_of_plain_keys_are_found_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_match_here", lambda *args: pytest.fail("a plain key was taken for a regex"))
    keys = {f"model.layers.{layer}.mlp.up_proj": layer + 1 for layer in range(8000)}
    assert pattern_values(keys, ["model.layers.77.mlp.up_proj"]) == {"model.layers.77.mlp.up_proj": (78,)}


# ----------------------------------------------------------------------------------- what is matched in this process

DEAR = [
    ".*.*.*.*" + "()" * 1990 + "\n",
    ".*.*.*" + "()" * 1300 + "\n",
    ".*.*.*" + "(?:)" * 1000 + "\n",
    ".*.*.*.*" + r"\b" * 1900,
    "(|)" * 30 + "X",
    "(.|.)" * 20 + "X",
    "(.(.(.|.)|.)|.)" * 9 + "X",
    "([^)]|.|.)" * 12 + "X",
    "([(]|.|.)" * 12 + "X",
    "([]|)]|.|.)" * 12 + "X",
    r"(\)|.|.)" * 12 + "X",
    r"\(?:" * 500 + "(?:a?){30}X",
    "(?:a?){30}a{30}X",
    "(?:(?:){9}){9}.*.*.*X",
    ".*?" * 12 + "X",
    ".{0,40}" * 12 + "X",
    "(.*.*.*.*|.*.*.*.*)X",
    "(?=.*.*.*.*X)",
    "(?<=a)(?<!b)X",
    r"(.*)(.*)(.*)\1\2\3X",
    "(?P<a>.*)(?P=a)X",
    "(a)?(?(1).*.*.*|.*.*.*)X",
    "(?>.*.*)X",
    ".*+.*.*X",
    "(?i)model.*X",
    "(?s:.*)X",
    "[\u4e00-\u9fff]*X",
    "(\u4e00|\u4e02|\u4e04)X",
    "(?#" + "x" * 99 + ").*X",
    "(model|modem|modest)" * 9 + "X" * 4000,
    "[a-z]" * 40,
]


@pytest.mark.parametrize("regex", DEAR, ids=lambda regex: ascii(regex[:20]))
@pytest.mark.parametrize("mode", ["match", "fullmatch"])
def test_what_could_cost_more_is_never_matched_here(mode: str, regex: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first held the lock for seconds; a `)` in a set was taken for a group's end, and held it without end."""
    monkeypatch.setattr(patterns, "_match_here", lambda *args: pytest.fail("it was matched here"))
    monkeypatch.setattr(patterns, "_match_in_child", lambda *args: [{}])
    for text in (regex, rf"(.*\.)?({regex})$", rf"(?:^|.*?\.){regex}\.(?P<idx>\d+)\."):
        assert patterns._match(mode, [text], NAMES) == [{}]


ITEMS = st.sampled_from(
    [
        *"modelay.",
        r"\.",
        r"\d",
        r"\w",
        "[^x]",
        "[a-z_]",
        "[0-9.]",
        "^",
        "$",
        r"\b",
        "",
        "()",
        "(?:)",
        "(|)",
        "q_proj",
        "layers",
    ]
)
QUANTIFIERS = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{0,}?"])
TEXTS = st.recursive(
    st.builds(str.__add__, ITEMS, QUANTIFIERS),
    lambda texts: st.one_of(
        st.lists(texts, min_size=1, max_size=5).map("".join),
        st.lists(texts, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds("(?:{}|{})".format, texts, texts),
    ),
    max_leaves=14,
)
FRAMES = st.sampled_from(["{}", "{}X", "(.*\\.)?({})$", "(?:^|.*?\\.){}\\.(?P<idx>\\d+)\\."])
SOME_NAMES = [*NAMES[:3], "q_proj", "", "m" * 12, "a.b", "model.layers.layers.0.1.x"]


@settings(max_examples=600, deadline=None)
@given(TEXTS, FRAMES)
def test_what_is_matched_here_takes_no_more_steps_than_its_bound(text: str, frame: str) -> None:
    """Counted by a matcher without the engine's shortcuts."""
    regex = frame.format(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(regex)
    except re.error:
        return
    bound = patterns._max_steps(regex, SOME_NAMES)
    if math.isinf(bound):
        return
    assert bound <= MAX_STEPS
    for mode in ("match", "fullmatch"):
        for name in SOME_NAMES:
            counter = StepCounter(regex, int(bound))
            assert counter.matches(mode, name) == bool(getattr(compiled, mode)(name)), (mode, name)


def test_thousands_of_plain_keys_of_as_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of keys was looked up for each module: 8,100 lookups in pure Python for each of thousands of names."""
    calls: list[str] = []
    without = patterns._without
    monkeypatch.setattr(patterns, "_without", lambda text, dots: calls.append(text) or without(text, dots))
    name = NAMES[0]
    keys = {
        "".join("." if number >> place & 1 else char for place, char in enumerate(name)): number
        for number in range(8100)
    }
    with pytest.raises(PatternError, match="at most 512 patterns"):
        pattern_values(keys, NAMES)
    some = dict(list(keys.items())[:300])
    expected = {each: tuple(some[key] for key in some if re.match(rf"(.*\.)?({key})$", each)) for each in NAMES}
    calls.clear()
    assert pattern_values(some, NAMES) == {each: found for each, found in expected.items() if found}
    lookups = sum(MAX_KINDS_OF_KEYS for each in NAMES for suffix in dotted_suffixes(each) if len(suffix) == len(name))
    assert len(calls) <= lookups + MAX_KINDS_OF_KEYS


def test_the_answer_of_a_child_is_bounded() -> None:
    """512 patterns that each name all of 36,000 modules would be 18 million entries, parsed in one go."""
    keys = {f"(?i:.*(?:{number})?.*)": number for number in range(300)}
    with pytest.raises(PatternError, match="name modules too often"):
        pattern_values(keys, NAMES)
    assert len(pattern_values(dict(list(keys.items())[:20]), NAMES)) == len(NAMES)
