"""Templates of every family that is served, byte for byte as transformers renders them.

`templates/` has, for each family, what the family's own template does: its tags and roles, and the same constructs of
Jinja (loop controls, macros, namespaces, filters, methods of strings, `generation` blocks, white space), in few words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.errors import InvalidRequestError
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import write_directory

FOLDER = Path(__file__).parent / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, <now> & \"here\" 'é' 世界",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Where\n"},
                    "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                    "days": {"type": "array", "items": {"type": "integer"}, "default": [1, 2]},
                    "how": {"oneOf": [{"type": "string", "description": "a"}, {"type": ["number", "null"]}]},
                    "more": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                    "list": {"type": "array", "items": {"type": "object"}, "nullable": True},
                },
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]
DOCUMENTS = [{"title": "A", "text": "first <b>"}, {"title": "Ä", "text": "second\n"}]


def call(name: str, arguments: Any, call_id: str = "call12345") -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


SYSTEM, USER = {"role": "system", "content": "Be terse. "}, {"role": "user", "content": " What is é & <世界>?\n"}
ASSISTANT = {"role": "assistant", "content": "  Fine, {{ no template }} {% nor this %}.  "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."}
REASONED = {"role": "assistant", "content": "So.", "reasoning_content": "\nhm\n", "thinking": "hm"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"place": "Zürich", "n": 1.0})]}
CALLS = {
    "role": "assistant",
    "content": "Both.",
    "tool_plan": "two at once",
    "tool_calls": [call("get_weather", {"place": "<&>", "x": None}), call("now", {}, "call67890")],
}
RESULT = {"role": "tool", "content": '{"celsius": 21}', "tool_call_id": "call12345", "name": "get_weather"}
SECOND = {"role": "tool", "content": "noon", "tool_call_id": "call67890", "name": "now"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b\n"}]}
IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "system and turns": [SYSTEM, USER, ASSISTANT, USER],
    "two of a role": [USER, USER],
    "begins with assistant": [ASSISTANT, USER],
    "ends with assistant": [USER, ASSISTANT],
    "empty": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "empty answer": [USER, {"role": "assistant", "content": ""}, USER],
    "no content": [USER, {"role": "assistant", "content": None}, USER],
    "system later": [USER, ASSISTANT, SYSTEM, USER],
    "thoughts": [USER, THOUGHT, USER, THOUGHT],
    "reasoning": [USER, REASONED, USER, REASONED],
    "a call": [USER, CALL, RESULT, ASSISTANT, USER],
    "a call at the end": [SYSTEM, USER, CALL],
    "two calls": [SYSTEM, USER, CALLS, RESULT, SECOND],
    "a result at the end": [USER, CALL, RESULT],
    "a result without a call": [USER, RESULT],
    "arguments as text": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("now", '{"a": 1}')]},
        {**RESULT, "content": [{"type": "text", "text": "x"}]},
    ],
    "parts": [SYSTEM, PARTS, ASSISTANT, PARTS],
    "parts of a system": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, PARTS],
    "an image": [IMAGE],
    "tools in a message": [{**SYSTEM, "tools": '[{"name": "x"}]'}, USER],
    "switches": [{"role": "system", "content": "Go. /no_think"}, {"role": "user", "content": "x /nothink"}],
    "override": [{"role": "system", "content": "/system_override Just this. /think\n"}, USER, ASSISTANT],
    "unknown role": [USER, {"role": "critic", "content": "no"}],
    "roles of others": [{"role": "developer", "content": "d"}, USER, {"role": "ipython", "content": "1"}],
    "odd text": [{"role": "user", "content": "\ud800 \x00 \u2028 ﷽ 👩‍👩‍👧 \r\n\t </s> <|im_end|> [INST]"}],
}
CHATS = json.loads(json.dumps(CHATS))  # no object is there twice
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "no tools": {"tools": []},
    "documents": {"documents": DOCUMENTS},
    "tools and documents": {"tools": TOOLS, "documents": DOCUMENTS},
    "training": {"add_generation_prompt": False},
    "open": {"add_generation_prompt": False, "continue_final_message": True},
    "open with tools": {"add_generation_prompt": False, "continue_final_message": True, "tools": TOOLS},
    "no thoughts": {"template_kwargs": {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}},
    "switches": {
        "tools": TOOLS,
        "documents": DOCUMENTS,
        "template_kwargs": {
            "tools_in_user_message": False,
            "date_string": "1 May 2026",
            "builtin_tools": ["get_weather", "code_interpreter"],
            "controls": {"citations": True, "length": "short"},
            "safety_mode": "strict",
            "model_identity": "Me.",
            "xml_tools": ["x"],
            "bos_token": "<BOS>",
        },
    },
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and the oracle, of one directory."""
    from transformers import AutoTokenizer

    config = {"chat_template": [{"name": name, "template": text} for name, text in TEMPLATES.items()]}
    path = write_directory(tmp_path_factory.mktemp("chat"), tokenizer_config=config)
    return Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)


def expected_of(oracle: Any, chat: list[dict[str, Any]], template: str, arguments: dict[str, Any]) -> str | None:
    """What transformers renders; None where it or the template refuses."""
    hf_arguments = {**arguments, **arguments.get("template_kwargs", {})}
    hf_arguments.pop("template_kwargs", None)
    try:
        return str(oracle.apply_chat_template(chat, chat_template=template, tokenize=False, **hf_arguments))
    except Exception:
        return None


def check_same(pair: tuple[Tokenizer, Any], chat: list[dict[str, Any]], template: str, options: dict[str, Any]) -> bool:
    """Whether both render; the same then, or both refuse."""
    ours, oracle = pair
    arguments = {"add_generation_prompt": True, **options}
    expected = expected_of(oracle, chat, template, arguments)
    if expected is None:
        with pytest.raises(InvalidRequestError):
            ours.apply_chat_template(chat, chat_template=template, **arguments)
    else:
        assert ours.apply_chat_template(chat, chat_template=template, **arguments) == expected
    return expected is not None


@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(pair: tuple[Tokenizer, Any], template: str) -> None:
    """Every chat with every choice of options; a good part of them has to be something that the template renders."""
    rendered = [check_same(pair, chat, template, options) for chat in CHATS.values() for options in OPTIONS.values()]
    assert sum(rendered) > len(rendered) // 5


def test_every_construct_is_in_the_set() -> None:
    """What a template of a served family may use."""
    text = "\n".join(TEMPLATES.values())
    wanted = (
        "{%- macro", "namespace(", "{%- break %}", "{% generation %}", "strftime_now(", "raise_exception(", "tojson(",
        "selectattr(", "reject(", "map(attribute=", "| items", ".items()", "loop.last", "loop.index0", "|default(",
        ".startswith(", ".split(", ".rstrip(", ".replace(", ".get(", "[::-1]", "|upper", "|lower", "{#-", "is mapping",
        "is iterable", "is defined", "is string", "not in", " if ", "[1:]", "~", "documents", "reasoning_content",
    )  # fmt: skip
    assert [each for each in wanted if each not in text] == []
    assert len(TEMPLATES) >= 20


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
part_lists = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), min_size=1, max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(st.builds(call, texts, st.dictionaries(texts, json_values, max_size=3)), min_size=1, max_size=2)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool", "developer"]),
        "content": texts | part_lists | st.none(),
    },
    optional={
        "tool_calls": calls,
        "reasoning_content": texts,
        "thinking": texts,
        "tool_call_id": st.just("call12345"),
        "name": texts,
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chat=st.lists(messages, min_size=1, max_size=5),
    options=st.sampled_from(list(OPTIONS.values())),
    template=st.sampled_from(list(TEMPLATES)),
)
def test_any_chat_renders_as_in_transformers(
    pair: tuple[Tokenizer, Any], chat: list[dict[str, Any]], options: dict[str, Any], template: str
) -> None:
    check_same(pair, chat, template, options)
