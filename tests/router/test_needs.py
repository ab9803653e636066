"""What is read of a body: the adapter, about how long its prompt is, and digests of its beginnings."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.router.needs import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_TEXT_VALUES,
    MAX_VALUES,
    adapters_named,
    needs_of,
    tenant_of,
)
from loraplex.server.api_error import ApiError
from loraplex.server.auth import KeyRing


def read(authorization: str = "", **fields: Any) -> Any:
    return needs_of(json.dumps(fields).encode(), authorization, {"base"})


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"model": "sql"}, "sql"),
        ({"model": "base", "lora_path": "sql"}, "sql"),
        ({"model": "base"}, None),
        ({"model": "base:sql"}, "sql"),
        ({"model": "other:sql"}, "other:sql"),
        ({"model": 3}, None),
        ({"model": "x" * 1000}, None),
        ({"model": ""}, None),
        ({}, None),
    ],
)
def test_the_adapter(fields: dict[str, Any], adapter: str | None) -> None:
    assert read(**fields).adapter == adapter


def test_the_length_of_a_prompt() -> None:
    assert read(prompt="x" * 398).num_prompt_tokens == 100
    assert read(prompt=[1, 2, 3]).num_prompt_tokens == 3
    assert read(messages=[{"role": "user", "content": "x" * 1000}]).num_prompt_tokens > 250
    assert read(input="x" * 398).num_prompt_tokens == 100
    assert (
        read(system="x" * 400, messages=[]).num_prompt_tokens
        == read(instructions="x" * 400, input="").num_prompt_tokens
    )
    assert read().num_prompt_tokens == 0


def test_prompts_that_begin_alike_share_their_first_digests() -> None:
    one = read(model="sql", prompt="a" * 2000 + "b" * 2000).prefix_digests
    two = read(model="sql", prompt="a" * 2000 + "c" * 2000).prefix_digests
    shared = sum(first == second for first, second in zip(one, two, strict=True))
    assert shared == 2000 // BLOCK_BYTES
    assert len(read(prompt="a" * 10**6).prefix_digests) == MAX_BLOCKS


def test_another_adapter_or_another_key_shares_none() -> None:
    digests = read(model="sql", prompt="a" * 2000).prefix_digests
    assert not set(digests) & set(read(model="chat", prompt="a" * 2000).prefix_digests)
    assert not set(digests) & set(read("Bearer key", model="sql", prompt="a" * 2000).prefix_digests)


def test_a_tenant_is_its_key_but_does_not_tell_it() -> None:
    assert tenant_of("") is None
    assert tenant_of("Bearer secret") == tenant_of("Bearer secret") != tenant_of("Bearer other")
    assert "secret" not in str(tenant_of("Bearer secret"))


@pytest.mark.parametrize("spelling", ["bearer secret", "BEARER  secret", "Bearer secret\t", "bEaReR \xa0secret"])
def test_a_key_is_one_tenant_however_it_is_spelled(spelling: str) -> None:
    """As replicas take it: each spelling was a client of its own, with turns and a place among the known keys."""
    assert KeyRing(["secret"]).caller_of(spelling) is not None
    assert tenant_of(spelling) == tenant_of("Bearer secret")
    assert tenant_of("Basic secret") not in (tenant_of("basic secret"), tenant_of("Bearer secret"))


NOT_MADE = {
    "lists": b"[" + b"[]," * 5000 + b"[]]",
    "objects": b"[" + b'{"a":0},' * 5000 + b"{}]",
    "nested": b"[" + (b"[" * 50 + b"]" * 50 + b",") * 100 + b"[]]",
    "text": b'"' + b"x" * 100_000 + b'"',
    "numbers": b"[" + b"1," * 5000 + b"1]",
}


@pytest.mark.parametrize("field", ["model", "lora_path", "prompt", "messages", "other"])
@pytest.mark.parametrize("value", list(NOT_MADE.values()), ids=list(NOT_MADE))
def test_no_value_of_a_body_is_made(field: str, value: bytes) -> None:
    """The model's name was made of any JSON: 16 MiB of lists held the interpreter for seconds."""
    body = b'{"%s":%s}' % (field.encode(), value)
    needs_of(body, "")
    tracemalloc.start()
    try:
        needs = needs_of(body, "")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert needs.adapter is None
    assert peak < 2 * len(body) + 20_000, "of values more than ten times as much"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt":[' + b"[" * MAX_VALUES + b"]" * MAX_VALUES + b"]}", "too_many_values"),
        (b'{"prompt":[' + b"1e5," * 2000 + b"1]}", "too_many_long_numbers"),
        (b"{" + b'"model":"x",' * MAX_TEXT_VALUES + b'"a":1}', "too_many_values"),
    ],
)
def test_values_are_counted_before_the_decoder_sees_them(body: bytes, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        needs_of(body, "")
    assert refused.value.code == code


def test_quotes_in_a_text_are_no_values() -> None:
    text = b'\\"' * (2 * MAX_TEXT_VALUES + 2)
    assert needs_of(b'{"model":"sql","prompt":"' + text + b'"}', "").adapter == "sql"


@pytest.mark.parametrize("name", ["a\\u0062c", "\\ud83d\\ude00" * 256, "\\n"])
def test_a_name_may_be_written_in_escapes(name: str) -> None:
    assert needs_of(b'{"model":  "%s"  }' % name.encode(), "").adapter == json.loads(f'"{name}"')


def test_what_a_verb_names() -> None:
    body = json.dumps({"old": "sql", "new": "chat", "name": 3, "new_name": "x" * 257, "old_name": ["sql"]}).encode()
    assert adapters_named(body, ("old", "old_name", "new", "new_name", "name")) == ["sql", "chat"]
    for wrong in (b"[]", b"{", b'{"old":"\xff"}'):
        with pytest.raises(ApiError):
            adapters_named(wrong, ("old",))


@settings(deadline=None)
@given(st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        needs = needs_of(body, "")
    except ApiError as error:
        status = error.status
    else:
        status = 200 if needs.num_prompt_tokens >= 0 else 500
    assert 200 <= status < 500


def test_what_sglangs_and_loraxs_bodies_name() -> None:
    assert read(lora_path="sql", text="x" * 398).adapter == "sql"
    assert read(parameters={"adapter_id": "sql"}, inputs="x" * 398).adapter == "sql"
    assert read(lora_path="sql", text="x" * 398).num_prompt_tokens == 100
    assert read(parameters={}, inputs="x" * 398).num_prompt_tokens == 100
    assert read(input_ids=[1, 2, 3]).num_prompt_tokens == 3
    for none in (
        {},
        {"adapter_id": None},
        {"adapter_id": ""},
        {"adapter_id": "__base_model__"},
        7,
        "x",
        ["adapter_id"],
    ):
        assert read(parameters=none, inputs="hi").adapter is None
