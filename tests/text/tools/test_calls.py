"""Calls in the formats of models: whole, cut anywhere, wrong, and hostile."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.text.tools.answer import MAX_CALLS, AnswerParser, Thoughts, call_parser, forced_parser, parser_for
from loraplex.text.tools.json_calls import CallParser

NAMES = ("f", "get_weather")
MAKERS: dict[str, Callable[[], CallParser]] = {
    **{name: (lambda name=name: call_parser(name, NAMES)) for name in ("hermes", "llama3_json", "mistral", "pythonic")},
    "list": lambda: forced_parser(None),
    "one": lambda: forced_parser("f"),
}


def parsed(name: str, *pieces: str) -> tuple[str, list[tuple[str | None, str]]]:
    """(content, calls as (name, arguments))."""
    return answer(AnswerParser(None, MAKERS[name]()), pieces)[1:]


def answer(parser: AnswerParser, pieces: tuple[str, ...]) -> tuple[str, str, list[tuple[str | None, str]]]:
    deltas = [parser.feed(piece, False) for piece in pieces] + [parser.feed("", True)]
    calls: list[tuple[str | None, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.index == len(calls):
            assert call.name is not None, "the name comes first"
            calls.append((call.name, ""))
        else:
            assert call.name is None, "the name comes once"
            assert call.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert parser.num_calls == len(calls)
    msgspec.json.encode(calls)  # no half of a surrogate pair
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


CASES = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "}<\\"{"}}\n</tool_call>',
        "",
        [("f", '{"a": "}<\\"{"}')],
    ),
    (
        "hermes",
        'Hm.\n<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>\n<tool_call>{"name":"g"}</tool_call>\n',
        "Hm.",
        [("f", '{"a": [1, {}]}'), ("g", "{}")],
    ),
    ("hermes", " a < b <tool> ", " a < b <tool> ", []),
    ("hermes", "x <tool_call> never mind", "x<tool_call> never mind", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null")]),
    ("hermes", r'<tool_call>{"name": "f\ud83d", "arguments": {}}</tool_call>', "", [(r"f\ud83d", "{}")]),
    (
        "hermes",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\ud83d \ud83d\ude00\"}"}</tool_call>',
        "",
        [("f", '{"a": "\\ud83d \U0001f600"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>ok',
        '<tool_call>{"name": 7, "arguments": {}}ok',
        [],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        ' <|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"b": 2}}',
        "",
        [("f", "{}"), ("f", '{"b": 2}')],
    ),
    ("llama3_json", '{"name": "John", "parameters": {}}', '{"name": "John", "parameters": {}}', []),
    ("llama3_json", '{"age": 3, "name": "f"} and so on', '{"age": 3, "name": "f"} and so on', []),
    ("llama3_json", ' I say {"name": "f", "parameters": {}}', ' I say {"name": "f", "parameters": {}}', []),
    ("llama3_json", "  <|pyth", "  <|pyth", []),
    (
        "mistral",
        'So [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "So",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": [2]}[TOOL_CALLS]g[ARGS]{"b": "}"}', "", [("f", '{"a": [2]}'), ("g", '{"b": "}"}')]),
    ("mistral", "no [TOOL", "no [TOOL", []),
    (
        "pythonic",
        '[get_weather(city="S)F", n=-3, m=[1.5, None]), f()]',
        "",
        [("get_weather", '{"city": "S)F", "n": -3, "m": [1.5, null]}'), ("f", "{}")],
    ),
    ("pythonic", "[f(a={'x': [True, false]})]", "", [("f", '{"a": {"x": [true, false]}}')]),
    ("pythonic", r"[f(a='\ud83d', b={'\ude00': 1})]", "", [("f", r'{"a": "\ud83d", "b": {"\ude00": 1}}')]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[f(g(1))]", "[f(g(1))]", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "I call f(a=1)", "I call f(a=1)", []),
    ("pythonic", '[f(a="', '[f(a="', []),
    (
        "list",
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("one", '{"a": 1}', "", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_known_answers(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(name, text) == (content, calls)
    assert parsed(name, *text) == (content, calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", "[ARGS]"),
        *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', '{"name": "f", "arguments": {}}'),
        *("[f(a=", "[f()]", "null", "\u2605"),
        *(r"\ud83d", r"\ude00"),
        *"()[]{}\"',;\\<fx7 \n",
    ]
)


@given(name=st.sampled_from(sorted(MAKERS)), pieces=st.lists(PIECES, max_size=14), data=st.data())
@settings(max_examples=1500, deadline=None)
def test_any_cut_of_any_text_gives_the_same(name: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]

    def made(*parts: str) -> tuple[str, str, list[tuple[str | None, str]]]:
        return answer(AnswerParser(Thoughts(is_open=False), MAKERS[name]()), parts)

    assert made(*cut) == made(text) == made(*text)


@given(text=st.text(max_size=40), name=st.sampled_from(("hermes", "mistral")))
def test_a_text_without_calls_is_content_as_it_is(text: str, name: str) -> None:
    if "[TOOL_CALLS]" not in text and "tool_call>" not in text:
        assert parsed(name, text) == (text, [])


json_objects = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text(max_size=8) | st.lists(st.booleans())
)


@given(calls=st.lists(st.tuples(st.sampled_from(NAMES), json_objects), min_size=1, max_size=4))
def test_calls_that_are_written_are_read(calls: list[tuple[str, dict[str, object]]]) -> None:
    def written(key: str) -> list[str]:
        return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]

    texts = {
        "hermes": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written("arguments")),
        "llama3_json": "; ".join(written("parameters")),
        "mistral": f"[TOOL_CALLS] [{', '.join(written('arguments'))}]",
        "list": f"[{','.join(written('parameters'))}]",
    }
    for name, text in texts.items():
        content, found = parsed(name, text)
        assert content == ""
        assert [(each, json.loads(arguments)) for each, arguments in found] == calls


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm </think>\n\nYes", False, ("Hm", "Yes")),
        ("\n<think>Hm", False, ("Hm", "")),
        ("Hm\n</think>\nYes ", True, ("Hm", "Yes ")),
        ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
        ("<thi", False, ("", "<thi")),
        ("<think></think>Yes", False, ("", "Yes")),
    ],
)
def test_thoughts(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    for pieces in ((text,), tuple(text)):
        assert answer(AnswerParser(Thoughts(is_open), None), pieces)[:2] == expected


@pytest.mark.parametrize(
    "value",
    [
        *('f"{1}"', "F'{1}'", 'rf"{1}"', 'fR"""{1}"""', '"a" f"{1}"', '"a"f"{1}"', "{'a': [f'{1}']}"),
        *("""'''a' 'b''' f'{1}'""", '"""""" f"{1}"', '1, # "\n b=f"{1}" # "\n', r"'\\' f'{1}'", r"r'\'' f'{1}'"),
    ],
)
def test_an_f_string_is_not_given_to_pythons_parser(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes quadratic time for it. The text is content."""
    monkeypatch.setattr("loraplex.text.tools.pythonic.ast", None)
    text = f"[f(a={value})]"
    assert parsed("pythonic", text) == (text, [])


@pytest.mark.parametrize("unit", ["1,", "[],", "'',", "\ufb01,", "-"])
def test_a_call_of_many_words_and_signs_is_not_given_to_pythons_parser(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is theirs; a long text in a call is one of them."""
    long = json.dumps("x" * 30_000)
    assert parsed("pythonic", f"[f(a={long})]") == ("", [("f", json.dumps({"a": "x" * 30_000}))])
    monkeypatch.setattr("loraplex.text.tools.pythonic.ast", None)
    text = f"[f(a=[{unit * 8200}])]"
    assert parsed("pythonic", text) == (text, [])


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        *(("'f'", "f"), ("\"if\" 'f'", "iff"), (r"'\'f' r'f'", "'ff"), ("'f''f'", "ff"), ("'#'", "#")),
        *(("1 # f''\n", 1), ('"""a\nf"s" """', 'a\nf"s" '), ('"t\'s"', "t's"), (r"'f\\'", "f\\")),
    ],
)
def test_what_only_looks_like_an_f_string_is_read(value: str, meant: str | int) -> None:
    content, [(_, arguments)] = parsed("pythonic", f"[f(a={value})]")
    assert (content, json.loads(arguments)) == ("", {"a": meant})


@pytest.mark.parametrize("name", sorted(MAKERS))
@pytest.mark.parametrize(
    "unit", ["[", "{", ",", " ", "<tool_call>", '{"', '"', "\\", "[f(", "[TOOL_CALLS]", '<tool_call>{"a":']
)
def test_hostile_texts_are_read_to_their_end(name: str, unit: str) -> None:
    """What is long is read in pieces; the time limit of a test would show a parser that looks back."""
    text = unit * (200_000 // len(unit))
    content, calls = parsed(name, text)
    if name not in ("one", "list", "mistral"):
        assert len(content.strip()) + sum(len(arguments) for _, arguments in calls) <= len(text)
    parsed(name, *[unit] * 5000)


@pytest.mark.parametrize(
    ("name", "begin", "call", "end"),
    [
        ("hermes", "", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "done"),
        ("mistral", "[TOOL_CALLS][", '{"name": "f", "arguments": {}},', "]"),
        ("list", "[", '{"name": "f", "arguments": {}},', "]"),
        ("llama3_json", "", '{"name": "f", "parameters": {}};', ""),
        ("pythonic", "[", "f(),", "]"),
    ],
)
def test_calls_of_an_answer_are_bounded(name: str, begin: str, call: str, end: str) -> None:
    """Each takes a kilobyte in an answer, and counts what its arguments say: two bytes. The rest is read as ever."""
    for num_calls in (MAX_CALLS, MAX_CALLS + 1, 5 * MAX_CALLS):
        content, calls = parsed(name, begin + call * num_calls + end)
        assert content.strip() == ("done" if name == "hermes" else "")
        assert calls == [("f", "{}")] * MAX_CALLS


def test_parsers_are_chosen_by_template() -> None:
    assert parser_for("... <tool_call>\n{...") == "hermes"
    assert parser_for("[TOOL_CALLS] ") == "mistral"
    assert parser_for("Environment: ipython") == "llama3_json"
    assert parser_for("[func_name1(params_name1=params_value1") == "pythonic"
    assert parser_for("{{ messages }}") is None
