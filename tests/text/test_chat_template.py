"""Chats as transformers renders them: in the styles of the big families, with everything that templates use."""

from __future__ import annotations

import enum
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import InvalidRequestError, PromptTooLongError
from loraplex.text.chat_template import MAX_ARGUMENT_CHARS, MAX_RENDERED_CHARS, plain_json, render_chat
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import tiny_backend, write_directory

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' or message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
    {%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
{%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant/user/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" and message["content"] %}
        {%- generation %}{{- " " + message["content"] | trim + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

QWEN = """{%- macro show(content) %}{%- if content is string %}{{- content }}{%- else %}{%- for item in content %}
{%- if 'text' in item %}{{- item.text }}{%- else %}{% continue %}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(show(message.content).startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = show(message.content or '') %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

RAG = """{% for d in documents or [] %}[{{ loop.index }}] {{ d.title }}: {{ d.text }}
{% endfor %}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "qwen": QWEN, "rag": RAG}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, <now> & \"here\" 'é' 世界",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
USER = {"role": "user", "content": " What is <b>é & 世界</b> like?\n"}
SYSTEM = {"role": "system", "content": "You are terse. "}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine, {{ not a template }}.  "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "n": 1.0}}}
    ],
}
RESULT = {"role": "tool", "content": '{"celsius": 21}'}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "ends with assistant": [USER, ASSISTANT],
    "tools": [SYSTEM, USER, CALL, RESULT, ASSISTANT, USER],
    "two assistants": [ASSISTANT, ASSISTANT],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b"}]}
    ],
}
CHATS = json.loads(json.dumps(CHATS))  # no object is there twice
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"tools": []},
    {"add_generation_prompt": False},
    {"template_kwargs": {"enable_thinking": False, "date_string": "1 May 2026", "bos_token": "<BOS>"}},
    {"documents": [{"title": "A", "text": "a"}, {"title": "B", "text": "b"}]},
    {"add_generation_prompt": False, "continue_final_message": True},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and the oracle, of one directory."""
    from transformers import AutoTokenizer

    config = {"chat_template": [{"name": name, "template": text} for name, text in TEMPLATES.items()]}
    path = write_directory(tmp_path_factory.mktemp("chat"), tokenizer_config={**config, "image_token": "<image>"})
    return Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)


def rendered_or_none(render: Any) -> str | None:
    try:
        return str(render())
    except Exception:
        return None


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(
    pair: tuple[Tokenizer, Any], template: str, chat: str, options: dict[str, Any]
) -> None:
    """The same text, or a refusal where it refuses."""
    ours, oracle = pair
    arguments = {"add_generation_prompt": True, **options}
    hf_arguments = {**arguments, **arguments.get("template_kwargs", {})}
    hf_arguments.pop("template_kwargs", None)
    expected = rendered_or_none(
        lambda: oracle.apply_chat_template(CHATS[chat], chat_template=template, tokenize=False, **hf_arguments)
    )
    if expected is None:
        with pytest.raises(InvalidRequestError):
            ours.apply_chat_template(CHATS[chat], chat_template=template, **arguments)
    else:
        assert ours.apply_chat_template(CHATS[chat], chat_template=template, **arguments) == expected


def test_most_of_these_cases_render(pair: tuple[Tokenizer, Any]) -> None:
    """The comparison above would be empty if both refused."""
    ours, _ = pair
    results = [
        rendered_or_none(lambda c=c, t=t, o=o: ours.apply_chat_template(c, chat_template=t, **o))
        for c in CHATS.values()
        for t in TEMPLATES
        for o in OPTIONS[:6]
    ]
    assert sum(result is not None for result in results) > 0.7 * len(results)


def test_special_tokens_are_variables(pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = pair
    source = "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token }}|{{ nothing }}"
    expected = oracle.apply_chat_template([USER], chat_template=source, tokenize=False)
    assert ours.apply_chat_template([USER], chat_template=source) == expected == "<s></s><image>|"


# ---------------------------------------------------------------------------------------------- which template


def tokenizer_with(templates: dict[str, str]) -> Tokenizer:
    return Tokenizer(tiny_backend("byte-bpe"), chat_templates=templates)


def test_tool_template_is_taken_for_tools() -> None:
    tokenizer = tokenizer_with({"default": "plain", "tool_use": "with tools"})
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], TOOLS) == "with tools"
    assert tokenizer.apply_chat_template([USER], TOOLS, chat_template="default") == "plain"


def test_no_template() -> None:
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        tokenizer_with({}).apply_chat_template([USER])
    with pytest.raises(InvalidRequestError, match="only: 'rag', 'short'; name one"):
        tokenizer_with({"short": "", "rag": ""}).apply_chat_template([USER])


def test_template_files_come_before_the_config(tmp_path: Path) -> None:
    path = write_directory(
        tmp_path, tokenizer_config={"chat_template": "config"}, chat_template={"chat_template": "old"}
    )
    assert Tokenizer.from_dir(path).chat_templates == {"default": "config"}
    (path / "chat_template.jinja").write_text("file", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("more", encoding="utf-8")
    assert Tokenizer.from_dir(path).chat_templates == {"default": "file", "rag": "more"}


def test_template_of_the_old_file(tmp_path: Path) -> None:
    path = write_directory(tmp_path, chat_template={"chat_template": "old"})
    assert Tokenizer.from_dir(path).apply_chat_template([USER]) == "old"


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this chat: roles must alternate"),
        ("{% if %}", "wrong at line 1"),
        ("{{ messages[9].content.text }}", "no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages + 1 }}", "can only concatenate"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{{ missing() }}", "undefined"),
        ("{{ messages | tojson(indent=-1, separators=3) }}", "refuses this chat"),
    ],
)
def test_template_errors_are_the_requests(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        render_chat(source, {"messages": [USER]})


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [None], None, 3], ids=str)
def test_messages_must_be_objects(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be a list"):
        tokenizer_with({"default": CHATML}).apply_chat_template(messages)


class _Role(enum.StrEnum):
    USER = "user"


def test_only_plain_data_reaches_a_template() -> None:
    assert plain_json({"a": (1, _Role.USER), "b": None}, "x") == {"a": [1, "user"], "b": None}
    assert type(plain_json([_Role.USER], "x")[0]) is str
    endless: list[Any] = []
    endless.append(endless)
    for value in ({1, 2}, object(), b"x", endless):
        with pytest.raises(InvalidRequestError, match="messages of a chat must be plain JSON data"):
            tokenizer_with({"default": CHATML}).apply_chat_template([{"role": "user", "content": value}])


def test_template_arguments_cannot_replace_the_chat() -> None:
    with pytest.raises(InvalidRequestError, match="cannot set messages, tools"):
        tokenizer_with({"default": CHATML}).apply_chat_template([USER], template_kwargs={"tools": [], "messages": []})


def test_messages_are_not_changed() -> None:
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}!{% endfor %}{% endfor %}"
    tokenizer = tokenizer_with({"default": source})
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == "so"
    assert chat == [{"role": "assistant", "content": [{"type": "text", "text": "so"}]}]


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ([{"role": "assistant"}], "no text content"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "no text content"),
        ([{"role": "assistant", "content": "x", "hide": True}], "drops or changes"),
    ],
)
def test_message_that_cannot_be_continued(chat: list[dict[str, Any]], reason: str) -> None:
    tokenizer = tokenizer_with({"default": "{% for m in messages if not m.hide %}{{ m.content }}{% endfor %}"})
    with pytest.raises(InvalidRequestError, match=reason):
        tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        tokenizer.apply_chat_template(chat, continue_final_message=True)


# ------------------------------------------------------------------------------------------------------------- bounds


def test_what_a_template_writes_for_each_message_is_bounded_while_it_is_written() -> None:
    """2,000 messages, each with an end-of-text token of 1 MiB from the client, were 4 GB and 7 s without an answer."""
    model = tokenizer_with({"default": "{% for message in messages %}{{ message.content + eos_token }}{% endfor %}"})
    chat = [USER] * 2000
    arguments = {"eos_token": "y" * (MAX_ARGUMENT_CHARS - len("eos_token"))}
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLongError, match=f"more than {MAX_RENDERED_CHARS} characters"):
            model.apply_chat_template(chat, template_kwargs=arguments)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_RENDERED_CHARS
    finally:
        tracemalloc.stop()
    text = model.apply_chat_template(chat[:200], add_generation_prompt=False, template_kwargs=arguments)
    assert len(text) == 200 * (len(USER["content"]) + len(arguments["eos_token"]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"eos_token": "y" * MAX_ARGUMENT_CHARS},
        {"x": [{"y" * MAX_ARGUMENT_CHARS: 1}]},
        dict.fromkeys("ab", "y" * 40_000),
    ],
    ids=["a text", "a key inside", "several"],
)
def test_long_template_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_ARGUMENT_CHARS} together"):
        tokenizer_with({"default": CHATML}).apply_chat_template([USER], template_kwargs=arguments)
