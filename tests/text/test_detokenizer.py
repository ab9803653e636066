"""Text while it comes: equal to decoding everything, whatever the tokenizer, the cuts and the stop strings."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.core import SamplingParams
from loraplex.text.detokenizer import _MAX_RUN_TOKENS, IncrementalDetokenizer, StopMatch, StopMatcher, _WindowStream
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import KINDS, tiny_backend

TOKENIZERS = {kind: Tokenizer(tiny_backend(kind)) for kind in KINDS}
BYTE_BPE, SENTENCEPIECE = TOKENIZERS["byte-bpe"], TOKENIZERS["sentencepiece-bpe"]
TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        [
            "the fox",
            " sea",
            "\n\n",
            "  ",
            "世界",
            "é",
            "😀",
            "👩‍👩‍👧",
            "\ufffd",
            "ß",
            "\u0301",
            "</think>",
            "<tool call>",
        ]
    ),
    max_size=12,
).map("".join)


@dataclass(frozen=True, slots=True)
class Streamed:
    text: str
    num_tokens: int
    stop_reason: str | None


def stream(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), step: int = 1, **params: Any
) -> Streamed:
    """All ids through `update` and `finish`."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    deltas = [detokenizer.update(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    deltas.append(detokenizer.finish())
    assert detokenizer.finish() == ""
    return Streamed("".join(deltas), detokenizer.num_tokens, detokenizer.stop_reason)


# ----------------------------------------------------------------------------------------- equals decoding it all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False])
@given(text=TEXTS, step=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_equals_the_decoding_of_encoded_text(kind: str, skips: bool, text: str, step: int) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text)
    result = stream(tokenizer, token_ids, step=step, skip_special_tokens=skips)
    assert result.text == tokenizer.decode(token_ids, skip_special_tokens=skips)
    assert result.num_tokens == len(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", range(1, 12))
@pytest.mark.parametrize("then", ["\x80", "é", "€", "😀", "a"])
def test_a_text_of_replacement_characters_hides_no_beginning_of_another(kind: str, num: int, then: str) -> None:
    """So many tokens that it is taken as it is, in the middle of a character."""
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("\ufffd" * num + then * 3)
    assert stream(tokenizer, token_ids).text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skips", [True, False])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_equals_the_decoding_of_any_tokens(kind: str, skips: bool, data: st.DataObject) -> None:
    """What a model may well say: broken characters, specials in the middle, ids that no vocabulary has."""
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    result = stream(tokenizer, token_ids, skip_special_tokens=skips)
    assert result.text == tokenizer.decode(token_ids, skip_special_tokens=skips)


@given(token_ids=st.lists(st.sampled_from([*range(3, 259), 259, 300, 301]), max_size=60))
@settings(max_examples=200, deadline=None)
def test_equals_the_decoding_of_byte_runs(token_ids: list[int]) -> None:
    """One invalid byte in a run makes U+FFFD of all its bytes, those before it too."""
    assert stream(SENTENCEPIECE, token_ids).text == SENTENCEPIECE.decode(token_ids)


@pytest.mark.parametrize("run", [b"A", "\u20ac".encode(), "\U0001f600".encode(), b"\xe2", b"A\xff"], ids=repr)
def test_a_long_run_of_bytes_is_not_kept_for_the_end(run: bytes) -> None:
    """Thousands of byte tokens of 64 completions, decoded when these end, were 160 ms for every other request."""
    token_ids = [SENTENCEPIECE.backend.token_to_id(f"<0x{byte:02X}>") for byte in run * 1000]
    window = _WindowStream(SENTENCEPIECE, [], frozenset())
    texts, most = [], 0
    for token_id in token_ids:
        texts.append(window.push(token_id))
        most = max(most, len(window._held))
    assert most < _MAX_RUN_TOKENS
    assert "".join(texts) + window.flush() == SENTENCEPIECE.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_continues_the_prompt(kind: str, prompt: str, text: str) -> None:
    """The text is what prompt and output together have more than the prompt: leading spaces stand."""
    tokenizer = TOKENIZERS[kind]
    prompt_ids, token_ids = tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False)
    whole, before = tokenizer.decode(prompt_ids + token_ids), tokenizer.decode(prompt_ids)
    if whole.startswith(before):
        assert stream(tokenizer, token_ids, prompt_ids).text == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte-bpe", "sentencepiece-bpe"])
def test_character_split_between_prompt_and_output(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode("so 😀 then", add_special_tokens=False)
    cut = next(i for i, token in enumerate(token_ids) if tokenizer.token_bytes(token) == b"\x9f")
    assert stream(tokenizer, token_ids[cut:], token_ids[:cut]).text == "😀 then"


def test_leading_space_after_a_prompt() -> None:
    prompt = SENTENCEPIECE.encode("the quick")
    output = SENTENCEPIECE.encode("fox", add_special_tokens=False)
    assert stream(SENTENCEPIECE, output, prompt).text == " fox"
    assert stream(SENTENCEPIECE, output).text == "fox"


def test_nothing_is_shown_before_a_character_is_whole() -> None:
    token_ids = BYTE_BPE.encode("a😀b", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(BYTE_BPE, (), SamplingParams())
    deltas = [detokenizer.update([token]) for token in token_ids]
    assert deltas == ["a", "", "", "", "😀", "b"]


def test_unfinished_character_is_flushed() -> None:
    token_ids = BYTE_BPE.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(BYTE_BPE, (), SamplingParams())
    assert detokenizer.update(token_ids) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert BYTE_BPE.decode(token_ids) == "a\ufffd"


def test_specials_are_skipped_or_shown() -> None:
    end = BYTE_BPE.token_id("<|im_end|>")
    assert end is not None
    token_ids = [*BYTE_BPE.encode("fox", add_special_tokens=False), end]
    assert stream(BYTE_BPE, token_ids).text == "fox"
    assert stream(BYTE_BPE, token_ids, skip_special_tokens=False).text == "fox<|im_end|>"


def test_no_text_without_detokenize() -> None:
    result = stream(BYTE_BPE, BYTE_BPE.encode("fox"), detokenize=False, logprobs=1)
    assert result.text == ""
    assert result.num_tokens == 2


def test_work_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: tokens that are decoded for each new one."""
    decoded = []
    decode = SENTENCEPIECE.decode
    monkeypatch.setattr(SENTENCEPIECE, "decode", lambda ids, **kw: decoded.append(len(ids)) or decode(ids, **kw))
    token_ids = SENTENCEPIECE.encode("the quick fox 😀 ") * 200
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE, (), SamplingParams())
    for token in token_ids:
        detokenizer.update([token])
    assert max(decoded) < 20
    assert sum(decoded) < 20 * len(token_ids)


# --------------------------------------------------------------------------------------------------- stop strings


def first_match(text: str, stops: Sequence[str]) -> StopMatch | None:
    """By its definition: the earliest end, then the earliest start."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4)


@given(text=st.text("ab ", max_size=40), stops=STOPS, cuts=st.lists(st.integers(0, 40)))
@settings(max_examples=300, deadline=None)
def test_matcher_depends_on_the_text_only(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, found = StopMatcher(stops), None
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(places):
        found = found or matcher.feed(text[start:end])
    assert found == first_match(text, stops)
    if found is None:
        beginnings = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert matcher.num_held == max(beginnings, default=0)


@given(text=st.text("ab ", max_size=40), stops=STOPS, num_passed=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_what_is_passed_over_is_held_no_longer(text: str, stops: list[str], num_passed: int) -> None:
    matcher = StopMatcher(stops)
    passed = text[:num_passed]
    assert matcher.feed(passed, is_enabled=False) is None
    beginnings = [n for stop in stops for n in range(len(stop)) if passed.endswith(stop[:n])]
    assert matcher.num_held == max(beginnings, default=0)
    whole = StopMatcher(stops)
    assert whole.feed(passed, is_enabled=False) is None
    assert matcher.feed(text[num_passed:]) == whole.feed(text[num_passed:])


@given(text=st.text("ab ", max_size=40), stops=STOPS, includes=st.booleans(), step=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_text_ends_at_the_first_stop_string(text: str, stops: list[str], includes: bool, step: int) -> None:
    token_ids = BYTE_BPE.encode(text, add_special_tokens=False)
    result = stream(BYTE_BPE, token_ids, step=step, stop=tuple(stops), include_stop_str_in_output=includes)
    match = first_match(text, stops)
    if match is None:
        assert (result.text, result.stop_reason) == (text, None)
    else:
        assert result.text == text[: match.end if includes else match.start]
        assert result.stop_reason == match.stop
        used = BYTE_BPE.decode(token_ids[: result.num_tokens])
        assert len(BYTE_BPE.decode(token_ids[: result.num_tokens - 1])) < match.end <= len(used)


def deltas_of(text: str, stop: Sequence[str], **params: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(BYTE_BPE, (), SamplingParams(stop=tuple(stop), **params))
    deltas = [detokenizer.update([i]) for c in text for i in BYTE_BPE.encode(c, add_special_tokens=False)]
    return [*deltas, detokenizer.finish()]


def test_beginning_of_a_stop_string_is_held_back() -> None:
    assert deltas_of("xENOTE", ["END"]) == ["x", "", "", "ENO", "T", "", "E"]
    assert deltas_of("xEND", ["END"]) == ["x", "", "", "", ""]
    assert deltas_of("xEND", ["END"], include_stop_str_in_output=True) == ["x", "", "", "END", ""]
    assert deltas_of("aab", ["aaab"]) == ["", "", "aab", ""]


def test_stop_string_of_split_characters() -> None:
    assert "".join(deltas_of("so 😀 then", ["😀"])) == "so "
    assert "".join(deltas_of("so 😁 then", ["😀"])) == "so 😁 then"
    token_ids = SENTENCEPIECE.encode("so 😀", add_special_tokens=False)
    result = stream(SENTENCEPIECE, token_ids, stop=("😀",))
    assert (result.text, result.stop_reason) == ("so ", "😀")


def test_nothing_after_the_stop() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_BPE, (), SamplingParams(stop=("fox",)))
    token_ids = BYTE_BPE.encode("the fox jumps", add_special_tokens=False)
    assert detokenizer.update(token_ids) == "the "
    used = detokenizer.num_tokens
    assert used < len(token_ids)
    assert detokenizer.update(token_ids) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == used


def test_stop_string_counts_from_min_tokens_on() -> None:
    token_ids = [i for c in "abxabyab" for i in BYTE_BPE.encode(c, add_special_tokens=False)]
    assert len(token_ids) == 8
    expected = {0: "", 2: "", 3: "abx", 5: "abx", 6: "abxaby"}
    for min_tokens, text in expected.items():
        result = stream(BYTE_BPE, token_ids, stop=("ab",), min_tokens=min_tokens)
        assert (result.text, result.stop_reason) == (text, "ab")
    assert stream(BYTE_BPE, token_ids[:5], stop=("ab",), min_tokens=6).text == "abxab"


def test_prompt_does_not_complete_a_stop_string() -> None:
    prompt, output = (BYTE_BPE.encode(text, add_special_tokens=False) for text in ("xE", "ND"))
    assert stream(BYTE_BPE, output, prompt, stop=("END",)).text == "ND"


def test_what_was_returned_is_not_kept() -> None:
    """The output has it: of an answer of long tokens that is megabytes."""
    word = BYTE_BPE.encode("fox", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(BYTE_BPE, (), SamplingParams(stop=("END",), logprobs=1))
    sizes = []
    for _ in range(3):
        assert "".join(detokenizer.update(word) for _ in range(100)) == "fox" * 100
        sizes.append([len(value) for value in vars(detokenizer).values() if isinstance(value, Sized)])
    assert sizes[0] == sizes[1] == sizes[2]
