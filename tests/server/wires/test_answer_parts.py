"""Parts of an answer: the same whole wherever its text is cut, each part begun and ended once, and what is counted."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import CompletionOutput, RequestOutput, SamplingParams
from loraplex.server.generation import Generation, GenerationItem, Prompt
from loraplex.server.model_names import Target
from loraplex.server.schemas import ChatCompletionRequest
from loraplex.server.wires.answer_parts import AnswerParts, Part, PartKind, Step, StepKind
from loraplex.server.wires.anthropic_messages import MessageRenderer
from loraplex.server.wires.openai_responses import ResponseRenderer
from loraplex.server.wires.openai_responses_input import ResponsesRequest
from loraplex.testing import FakeTokenizer
from loraplex.testing.fake_engine import FakeText
from loraplex.text.tools.answer import MAX_CALLS, AnswerParser, Thoughts, call_parser
from loraplex.text.tools.json_calls import CallDelta
from loraplex.text.tools.wanted import AnswerReading

ADD = '<tool_call>{"name": "add", "arguments": {"a": [1, "\\u00e9\\""]}}</tool_call>'
ANSWERS = [
    "",
    'plain é\n"text"',
    "<think>Hm.\n</think>\n\nSo: " + ADD,
    ADD + ADD + " and then",
    "<think>only",
    ADD[:40],
]
BODY = ChatCompletionRequest.model_validate({"model": "base", "messages": [{"role": "user", "content": "hi"}]})
SAID_BACK = ResponsesRequest.model_validate({"model": "base", "input": "hi"}).said_back


def steps_of(pieces: list[str]) -> tuple[list[Step], list[Part]]:
    parser, parts = AnswerParser(Thoughts(False), call_parser("hermes", ("add",))), AnswerParts()
    steps = [step for piece in pieces for said in parser.read(piece, False) for step in parts.feed(said)]
    steps += [step for said in parser.read("", True) for step in parts.feed(said)]
    return [*steps, *parts.end()], parts.parts


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 120), max_size=8))
def test_where_it_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    steps, parts = steps_of(pieces)
    _, whole = steps_of([text])
    assert [(each.kind, each.name, each.encoded) for each in parts] == [(e.kind, e.name, e.encoded) for e in whole]
    is_open = False
    for step in steps:
        assert is_open is (step.kind is not StepKind.BEGIN)
        is_open = step.kind is not StepKind.END
    assert not is_open
    assert [step.part.index for step in steps if step.kind is StepKind.BEGIN] == list(range(len(parts)))
    for part in parts:
        said = b"".join(bytes(step.text)[1:-1] for step in steps if step.part is part and step.kind is StepKind.PIECE)
        assert b'"%s"' % said == part.encoded
        assert json.loads(part.encoded) is not None


def test_parts_are_as_many_as_calls_may_be() -> None:
    """Texts and calls in turns: what follows the last call is one text."""
    _, parts = steps_of([f"so {ADD}" * (3 * MAX_CALLS)])
    assert len(parts) == 2 * MAX_CALLS + 1
    assert json.loads(parts[-1].encoded).count("so") == 2 * MAX_CALLS


def test_kinds_and_names() -> None:
    _, parts = steps_of([ANSWERS[2]])
    assert [(part.kind, part.name) for part in parts] == [
        (PartKind.THOUGHTS, ""),
        (PartKind.TEXT, ""),
        (PartKind.CALL, "add"),
    ]
    assert json.loads(json.loads(parts[2].encoded)) == {"a": [1, 'é"']}
    assert len({part.key for part in parts}) == 3


def generation(*, shows_cached: bool) -> Generation:
    target = Target(None, None, FakeText(FakeTokenizer()))
    item = GenerationItem(Prompt((1,) * 9), target, "r", SamplingParams())
    return Generation("x-1", 7, "base", (item,), shows_cached_tokens=shows_cached)


@pytest.mark.parametrize("shows_cached", [True, False])
def test_cached_tokens_are_told_apart_where_they_may_be(shows_cached: bool) -> None:
    completion = CompletionOutput(0, "ab", (1, 2), finish_reason="stop")
    output = RequestOutput("r", None, (1,) * 9, (completion,), True, num_cached_tokens=5)
    made = generation(shows_cached=shows_cached)
    message: Any = json.loads(MessageRenderer(BODY, made, AnswerReading()).response([output]))["usage"]
    assert (message["input_tokens"], message["cache_read_input_tokens"]) == ((4, 5) if shows_cached else (9, None))
    response: Any = json.loads(ResponseRenderer(SAID_BACK, BODY, made, AnswerReading()).response([output]))["usage"]
    assert response["input_tokens"] == 9
    assert response["input_tokens_details"] == ({"cached_tokens": 5} if shows_cached else None)


def message_of(*said: CallDelta) -> bytes:
    renderer = MessageRenderer(BODY, generation(shows_cached=True), AnswerReading())
    for each in said:
        assert list(renderer.parts.feed(each))
    assert list(renderer.parts.end())
    completion = CompletionOutput(0, "", (1,), finish_reason="stop")
    renderer.usage.add(0, RequestOutput("r", None, (1,) * 9, (completion,), True))
    return renderer.whole(completion)


def test_no_value_is_made_of_a_calls_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB of long numbers took seconds, in one call."""
    arguments = '{"a": [' + "9007199254740993.0000001," * 1000 + "1]}"
    made: list[Any] = []
    decode = msgspec.json.decode
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "decode", lambda *args, **named: made.append(decode(*args, **named)) or made[-1])
        answer = message_of(CallDelta(0, "f", f" {arguments}\n"))
    assert {type(each) for each in made} <= {str, msgspec.Raw}
    assert b'"input":' + arguments.encode() in answer


@pytest.mark.parametrize("arguments", ["", "[1]", '"{}"', '{"a":', '{"a": 01}', "{} {}", '{"a": ' + "[" * 100_000])
def test_arguments_that_are_no_object_are_a_text(arguments: str) -> None:
    (block,) = json.loads(message_of(CallDelta(0, "f", arguments)))["content"]
    assert block == {"type": "text", "text": f"f({arguments})"}
