"""Masks have the tokens that a grammar allows and no others, whatever a vocabulary is made of."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex import StructuredOutputsParams
from loraplex.errors import InvalidRequestError
from loraplex.structured import grammars
from loraplex.structured.grammars import GrammarCompiler, GrammarState, OwnMatcher, StepMasks, Words
from loraplex.structured.params import MAX_CHOICES
from loraplex.structured.turns import NUM_COMPILE_THREADS

SPECIAL = (b"<s>", b"</s>")
TEXTS = (*(bytes([byte]) for byte in range(256)), b"ab", b'{"', b'":', b"\xe2\x98", b"\x85", b"true", b"")
VOCAB_SIZE = len(SPECIAL) + len(TEXTS)
EOS = 1
ADDED_EOS = VOCAB_SIZE + 40


class Bytes:
    """Two special tokens, every byte, some longer ones, parts of a character, and a token without text."""

    special_ids = frozenset((0, EOS))

    def token_bytes(self, token_id: int) -> bytes:
        return (*SPECIAL, *TEXTS)[token_id]


def ids_of(text: str) -> list[int]:
    return [len(SPECIAL) + byte for byte in text.encode()]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is late."""
    monkeypatch.setattr(grammars, "MIN_WAIT_S", 60)
    monkeypatch.setattr(grammars, "MAX_WAIT_S", 60)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Bytes, VOCAB_SIZE)
    yield compiler
    compiler.close()


def started(compiler: GrammarCompiler, eos: tuple[int, ...] = (EOS,), output: str = "", **form: Any) -> GrammarState:
    state = compiler.start(StructuredOutputsParams(**form), eos, ids_of(output))
    while compiler.turns.is_busy:
        compiler.turns.wait(60)
    assert state.is_ready()
    return state


def allowed(state: GrammarState) -> list[int]:
    words = state.fill(VOCAB_SIZE)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def said(state: GrammarState, text: str) -> GrammarState:
    for token_id in ids_of(text):
        assert token_id in allowed(state)
        state.commit(token_id)
    return state


def test_a_mask_has_every_token_that_can_follow(compiler: GrammarCompiler) -> None:
    state = started(compiler, regex="(ab|\u2605)c")
    whole, star = VOCAB_SIZE - len(TEXTS) + 256, VOCAB_SIZE - len(TEXTS) + 259
    assert allowed(state) == sorted([*ids_of("a"), len(SPECIAL) + 0xE2, whole, star])
    state.commit(star)
    assert allowed(state) == [len(SPECIAL) + 0x85, star + 1]
    state.commit(star + 1)
    assert allowed(state) == ids_of("c")
    assert not state.is_complete
    state.commit(ids_of("c")[0])
    assert state.is_complete


def test_end_tokens_are_the_requests_own_and_only_where_it_may_end(compiler: GrammarCompiler) -> None:
    """One that an adapter added is behind the base's vocabulary; the one behind the last of the base's as well."""
    for eos in (EOS, ADDED_EOS, VOCAB_SIZE):
        state = started(compiler, (eos,), regex="a{1,2}")
        assert eos not in allowed(state)
        said(state, "a")
        assert allowed(state) == sorted([*ids_of("a"), eos])
        state.commit(eos)
        assert state.is_complete
    assert allowed(said(started(compiler, (), regex="a{1,2}"), "a")) == ids_of("a")


@pytest.mark.parametrize("form", [{"json_object": True}, {"regex": "(?s:.*)"}, {"grammar": "start: /[^x]*/"}])
def test_special_tokens_and_those_without_text_are_in_no_mask(compiler: GrammarCompiler, form: dict[str, Any]) -> None:
    found = set(allowed(started(compiler, (), **form)))
    assert found
    assert not found & {0, EOS, VOCAB_SIZE - 1, VOCAB_SIZE}


def test_a_state_is_rebuilt_from_its_tokens(compiler: GrammarCompiler) -> None:
    form = {"json": {"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 2, "maxItems": 2}}
    text = '["ab", "c'
    assert allowed(started(compiler, output=text, **form)) == allowed(said(started(compiler, **form), text))
    moved = compiler.start(StructuredOutputsParams(**form), (EOS,), ids_of("{"))
    compiler.turns.wait(60)
    with pytest.raises(InvalidRequestError, match="the output so far did not fit"):
        moved.is_ready()


def test_equal_grammars_are_compiled_once_and_advance_apart(compiler: GrammarCompiler) -> None:
    one, other = started(compiler, regex="abc"), started(compiler, regex="abc")
    assert compiler.compile(StructuredOutputsParams(regex="abc")) is compiler.compile(
        StructuredOutputsParams(regex="abc")
    )
    said(one, "ab")
    assert allowed(other) == sorted([*ids_of("a"), VOCAB_SIZE - len(TEXTS) + 256])


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        ({"json": {"type": "string", "format": "nonsense"}}, "Unknown format"),
        ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "https://example.com/s.json"}}, "not fetch"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"regex": "(" * 1000}, "regex"),
        ({"regex": "a(?!b)"}, "look"),
        ({"grammar": "begin: /a/"}, "start"),
        ({"grammar": "start: " + "(" * 20_000}, "nested"),
        ({"grammar": "root ::= " + "(" * 16_000}, "nested too deeply"),
        ({"grammar": "root ::= undefined"}, "undefined"),
        ({"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "%llguidance"),
        ({"grammar": 'start: %json {"multipleOf": 1000003}'}, "%json"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(
    compiler: GrammarCompiler, form: dict[str, Any], reason: str
) -> None:
    for _ in range(2):  # an answer that is kept is the same
        with pytest.raises(InvalidRequestError, match=reason) as refused:
            compiler.check(StructuredOutputsParams(**form))
        assert refused.value.param == "structured_outputs"
        assert len(refused.value.message) < 400


def test_what_a_schema_allows_is_not_widened(compiler: GrammarCompiler) -> None:
    state = started(compiler, json={"x": 1, "type": "integer", "multipleOf": 5, "minimum": 12})
    assert not set(ids_of('0-n"{[t')) & set(allowed(state))


def test_a_token_that_does_not_fit_ends_the_request(compiler: GrammarCompiler) -> None:
    state = started(compiler, regex="abc")
    state.commit(ids_of("x")[0])
    assert allowed(state) == []
    assert state.error is not None
    assert "did not fit" in state.error.message


def test_without_llguidance_or_a_tokenizer_the_reason_is_said(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = StructuredOutputsParams(regex="never compiled before")
    without = GrammarCompiler(lambda: None, 10)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        without.check(wanted)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="pip install llguidance"):
        compiler.check(wanted)


def test_as_many_choices_as_there_may_be_are_followed(compiler: GrammarCompiler) -> None:
    choices = [f"a{number}" for number in range(MAX_CHOICES)]
    state, data = started(compiler, choice=choices), b""
    while not state.is_complete:
        token_id = allowed(state)[-1]
        state.commit(token_id)
        data += Bytes().token_bytes(token_id) if token_id != EOS else b""
    assert state.error is None
    assert data.decode() in choices
    with pytest.raises(InvalidRequestError, match="choice has 2000 texts, at most 1999 can be followed"):
        StructuredOutputsParams(choice=[*choices, "b"])


REGEXES = ("[a-c]{2,4}[0-9]", "(ab)*c", "\u2605?[xy]+z", "a|bc|def", "[^a]{3}", '"(\\\\.|[^"\\\\]){0,5}"')


@given(regex=st.sampled_from(REGEXES), draws=st.lists(st.integers(0, 10**9), min_size=60, max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_walk_through_the_masks_ends_in_a_match(compiler: GrammarCompiler, regex: str, draws: list[int]) -> None:
    state, data = started(compiler, regex=regex), b""
    for draw in draws:
        choices = allowed(state)
        assert choices
        token_id = EOS if EOS in choices and draw % 3 == 0 else choices[draw % len(choices)]
        state.commit(token_id)
        if token_id != EOS:
            data += Bytes().token_bytes(token_id)
        if state.is_complete:
            assert re.fullmatch(regex, data.decode(), re.DOTALL)
            return
    assert state.error is None


class Broken:
    """A matcher of a library that has a mistake."""

    def is_accepting(self) -> bool:
        return False

    def consume_token(self, token_id: int) -> bool:
        raise RuntimeError(f"no {token_id}")

    def unsafe_compute_mask_ptr(self, address: int, nbytes: int) -> None:
        raise RuntimeError("panic")


def test_a_mistake_of_the_library_is_one_requests_error() -> None:
    future: Future[Any] = Future()
    future.set_result(OwnMatcher(Broken(), None))
    masked, committed = GrammarState(future, (EOS,)), GrammarState(future, (EOS,))
    assert allowed(masked) == []
    committed.commit(5)
    for state in (masked, committed):
        assert state.error is not None
        assert "RuntimeError" in state.error.message


# --------------------------------------------------------------------------------------------------------------- costs


def test_rules_of_gbnf_are_counted_before_they_are_translated(compiler: GrammarCompiler) -> None:
    """The translation is Python's and quadratic: 1,750 rules took 2.3 s, in which no step runs."""
    rules = [f"r{number} ::= r{number + 1}" for number in range(2000)]
    grammar = "\n".join(["root ::= r0", *rules, 'r2000 ::= "x"'])
    with pytest.raises(InvalidRequestError, match="at most 256 rules, this has 2002"):
        compiler.compile(StructuredOutputsParams(grammar=grammar))
    assert allowed(started(compiler, grammar='root ::= "x" | "y"'))


class Clock:
    """Each look takes as long as it says."""

    def __init__(self, look_s: float) -> None:
        self.now_s, self.look_s = 0.0, look_s

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s


def test_a_mask_that_takes_too_long_ends_its_request(compiler: GrammarCompiler, patient: None) -> None:
    matcher = started(compiler, regex="[a-z]{400}")._future
    slow, other = (GrammarState(matcher, (EOS,), None, Clock(look_s)) for look_s in (0.3, 0.2))
    masks = compiler.begin_masks([slow, other]).take(is_alone=True)
    assert masks[0] is not None
    assert not masks[0].any()
    assert "it takes too long to find the tokens that may follow" in str(slow.error)
    assert masks[1] is not None
    assert masks[1].any()
    assert other.error is None


class Slow(GrammarState):
    """Notes when its mask is made, and makes it when it may."""

    def __init__(self, name: str, client: str, made: list[str], may: threading.Event | None = None) -> None:
        super().__init__(Future(), (EOS,), client)
        self.name, self.made, self.may = name, made, may

    def fill(self, vocab_size: int) -> Words:
        assert self.may is None or self.may.wait(60)
        self.made.append(self.name)
        return np.ones(1, np.int32)


def test_masks_are_made_of_one_client_and_another_in_turn_and_of_ones_by_how_long_they_waited(
    compiler: GrammarCompiler,
    patient: None,
) -> None:
    made: list[str] = []
    states = [Slow(name, name[0], made) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    states[2].num_waits, states[4].num_waits = 2, 1
    masks = compiler.begin_masks([None, *states]).take(is_alone=False)
    assert [mask is None for mask in masks] == [True, *6 * [False]]
    assert made == ["a3", "b2", "c1", "a1", "b1", "a2"]


def test_late_masks_are_left_out_and_what_is_left_is_not_made(compiler: GrammarCompiler) -> None:
    made: list[str] = []
    may = threading.Event()
    states = [Slow("quick", "a", made), Slow("slow", "b", made, may), Slow("never", "b", made)]
    masks = compiler.begin_masks(states)
    while not made:
        time.sleep(0.001)
    assert [mask is None for mask in masks.take(is_alone=True)] == [False, True, True]
    assert [state.num_waits for state in states] == [0, 1, 1]
    may.set()
    assert compiler.begin_masks([states[0]]).take(is_alone=True)[0] is not None
    assert made == ["quick", "slow", "quick"]


def test_quick_masks_are_made_before_the_forward_pass_where_it_takes_all_cores(compiler: GrammarCompiler) -> None:
    matcher = started(compiler, regex="[a-z]{400}")._future
    clocks = Clock(0.0001), Clock(0.002), Clock(0.0001)
    quick, slow, new = (GrammarState(matcher, (EOS,), None, clock) for clock in clocks)
    for state in (quick, slow):
        state.fill(compiler.vocab_size)
        state._words = None
    masks = StepMasks([quick, slow, new], compiler.vocab_size)
    masks.make_quick()
    assert [mask is not None for mask in masks._masks] == [True, False, False]
    masks.make()
    assert masks.are_made
    first, *others = masks.take(is_alone=True)
    assert first is not None
    assert all(mask is not None and np.array_equal(mask, first) for mask in others)
    quick.num_waits = 1  # its mask was late: the thread may be in the middle of it
    assert not quick.is_quick
    quick.num_waits = 0
    clocks[0].look_s = 0.002  # one that takes longer is made, and is the last
    quick._words = None
    for is_made in (True, False):
        masks = StepMasks([quick], compiler.vocab_size)
        masks.make_quick()
        assert masks.are_made is is_made


def test_a_step_of_late_masks_alone_waits_for_one(compiler: GrammarCompiler) -> None:
    made: list[str] = []
    may = threading.Event()
    masks = compiler.begin_masks([Slow("one", "a", made, may), Slow("two", "a", made)])
    threading.Timer(0.05, may.set).start()
    assert masks.take(is_alone=True)[0] is not None


def test_without_memory_for_a_mask_its_request_ends(compiler: GrammarCompiler, patient: None) -> None:
    class Full(Slow):
        def fill(self, vocab_size: int) -> Words:
            raise MemoryError

    state = Full("x", "a", [])
    masks = compiler.begin_masks([state]).take(is_alone=True)
    assert masks[0] is not None
    assert not masks[0].any()
    assert "MemoryError" in str(state.error)


def test_grammars_are_compiled_of_clients_in_turn_and_not_for_those_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred aborted requests of one client held another one's up for 14 s."""
    begun: list[str] = []
    may, both = threading.Event(), threading.Barrier(3)
    compile_grammar = grammars.compile_grammar

    def noted(params: StructuredOutputsParams, tokens: Any) -> Any:
        assert params.choice is not None
        begun.append(params.choice[0])
        if len(begun) <= NUM_COMPILE_THREADS:
            both.wait(60)
            assert may.wait(60)
        return compile_grammar(params, tokens)

    monkeypatch.setattr(grammars, "compile_grammar", noted)
    compiler = GrammarCompiler(Bytes, VOCAB_SIZE)
    names = ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2", "c0"]
    states = [compiler.start(StructuredOutputsParams(choice=[name]), (EOS,), client=name[0]) for name in names]
    both.wait(60)
    for name in ("a2", "a4", "a0"):
        states[names.index(name)].cancel()
    may.set()
    while compiler.turns.is_busy:
        compiler.turns.wait(60)
    assert set(begun[:2]) == {"a0", "b0"}
    assert sorted(begun[2:]) == ["a1", "a3", "b1", "b2", "c0"]
    assert begun.index("c0") < begun.index("b2"), "in turn"
    assert states[0].is_ready(), "what has begun is compiled"
    compiler.close()


def test_a_full_automaton_is_its_clients_loss_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a compiled grammar share it: one output ended all that had the same form, and all that came later."""
    monkeypatch.setitem(grammars.LIMITS, "max_lexer_states", 100)
    compiler = GrammarCompiler(Bytes, VOCAB_SIZE)

    def error_after(client: str, text: str) -> str:
        state = compiler.start(StructuredOutputsParams(regex="x{200}"), (EOS,), client=client)
        while compiler.turns.is_busy:
            compiler.turns.wait(60)
        assert state.is_ready()
        for token_id in ids_of(text):
            state.fill(VOCAB_SIZE)
            if state.error is None:
                state.commit(token_id)
        return str(state.error)

    assert error_after("b", "x") == "None"
    assert "too many states" in error_after("a", 190 * "x")
    assert error_after("b", "xxx") == error_after("c", "xxx") == "None"
    assert error_after("a", "xxx") == "None", "compiled once more"
    compiler.close()


def test_an_ordinary_long_text_fits(compiler: GrammarCompiler) -> None:
    """8,192 states of an automaton were full after 890 characters."""
    state = started(compiler, json={"type": "object", "properties": {"text": {"type": "string", "maxLength": 1500}}})
    for token_id in ids_of('{"text": "' + "ordinary words " * 95):
        state.fill(VOCAB_SIZE)
        state.commit(token_id)
        assert state.error is None


def test_a_mask_is_kept_until_the_next_token(compiler: GrammarCompiler) -> None:
    state = started(compiler, regex="[ab]c")
    first = state.fill(VOCAB_SIZE)
    assert state.fill(VOCAB_SIZE) is first
    state.commit(ids_of("a")[0])
    assert allowed(state) == ids_of("c")


def test_items_of_ambiguous_grammars_are_counted(compiler: GrammarCompiler) -> None:
    """256 arrays at once took 11 ms a token, and 60 completions of them 660 ms a step."""
    arrays = [{"type": "array", "items": {"$ref": f"#/$defs/{number}"}} for number in range(16)]
    schema = {"$ref": "#/$defs/0", "$defs": {str(number): {"anyOf": arrays} for number in range(16)}}
    state = started(compiler, json=schema)
    for token_id in ids_of("[[["):
        state.fill(VOCAB_SIZE)
        state.commit(token_id)
    assert "Too many items" in str(state.error)
    union = {"anyOf": [{"type": "object", "properties": {f"p{number}": {}}} for number in range(100)]}
    state = started(compiler, json=union)
    for token_id in ids_of('{"p7": [1'):
        assert token_id in allowed(state)
        state.commit(token_id)
    assert state.error is None


def test_what_a_grammar_is_refused_for_is_told_anew_each_time(compiler: GrammarCompiler) -> None:
    """An exception that is kept would keep the frames of all that raised it, with the texts in them."""
    params, lengths = StructuredOutputsParams(regex="(a"), set()
    errors = []
    for _ in range(3):
        with pytest.raises(InvalidRequestError) as caught:
            compiler.compile(params)
        errors.append(caught.value)
        frame, length = caught.value.__traceback__, 0
        while frame is not None:
            frame, length = frame.tb_next, length + 1
        lengths.add(length)
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == len(lengths) == 1


def test_an_output_that_comes_with_a_request_is_read_in_pieces(compiler: GrammarCompiler) -> None:
    state = started(compiler, regex="a{50}b", output="a" * 50)
    assert allowed(state) == ids_of("b")
