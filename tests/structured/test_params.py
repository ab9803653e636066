"""What a request may ask is bounded before anything parses it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loraplex import SamplingParams, StructuredOutputsParams
from loraplex.errors import InvalidRequestError
from loraplex.frontend import messages as msg
from loraplex.structured import params
from loraplex.structured.params import MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH
from tests.frontend.test_messages import REQUEST


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "none of them"),
        ({"json": "{}", "regex": "a"}, "json, regex"),
        ({"json_object": False}, "none of them"),
        ({"json_object": 1}, "json_object must be"),
        ({"json": "{"}, "no JSON schema"),
        ({"json": "[" * 10_000}, "no JSON schema"),
        ({"json": "3"}, "an object"),
        ({"json": {"const": float("nan")}}, "a number of the JSON schema"),
        ({"json": {"const": {1}}}, "no JSON schema"),
        ({"json": nested(MAX_SCHEMA_DEPTH)}, "deeper than"),
        ({"json": {"enum": list(range(10_000))}}, "more than 8192 values"),
        ({"json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "more than 32768 bytes"),
        ({"json": {"multipleOf": 1000003}}, "multipleOf"),
        ({"json": {"items": [{"multipleOf": 1.000003}]}}, "multipleOf"),
        ({"json": {"multipleOf": 1e300}}, "multipleOf"),
        ({"json": {"anyOf": [{"multipleOf": 997 - i} for i in range(20)]}}, "multipleOf"),
        ({"regex": "x" * 2049}, "more than 2048 bytes"),
        ({"regex": "\u2605" * 683}, "more than 2048 bytes"),
        ({"regex": 7}, "regex must be a text"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"choice": []}, "choice must be"),
        ({"choice": "ab"}, "choice must be"),
        ({"choice": ["a", ""]}, "choice must be"),
        ({"choice": ["a", 1]}, "choice must be"),
        ({"regex": "a", "disable_any_whitespace": 1}, "true or false"),
    ],
)
def test_refusals(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        StructuredOutputsParams(**fields)
    assert refused.value.param == "structured_outputs"


LONG = "\u00e9" * (MAX_GRAMMAR_BYTES + 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"description": LONG},
        {"items": {LONG: 1}},
        {"pattern": LONG},
        {"patternProperties": {LONG: {}}},
        {"anyOf": [{"const": LONG}]},
        {"properties": {str(number): None for number in range(MAX_GRAMMAR_BYTES + 1)}},
    ],
)
@pytest.mark.parametrize("kind", ["json", "calls"])
def test_a_long_schema_is_refused_before_it_is_written(
    kind: str, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write a text of 16 MiB as JSON is one call of 70 ms, in which no other thread runs."""
    monkeypatch.setattr(params.json, "dumps", lambda *arguments, **named: pytest.fail("written"))
    with pytest.raises(InvalidRequestError, match=r"bytes: make|values: make"):
        StructuredOutputsParams(**{kind: schema})


def test_fields_by_name() -> None:
    assert StructuredOutputsParams.of({"regex": "a", "json": None, "backend": None}).kind == "regex"
    with pytest.raises(InvalidRequestError, match="'structural_tag' is not supported"):
        StructuredOutputsParams.of({"structural_tag": "x"})


def test_equal_ones_have_one_digest() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "\u2605"}}}
    one, other = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema, indent=2))
    assert one == other
    assert one.digest == other.digest
    assert StructuredOutputsParams(json=schema, disable_any_whitespace=True).digest != one.digest
    assert StructuredOutputsParams(choice=["a|b"]).digest != StructuredOutputsParams(choice=["a", "b"]).digest


def test_they_cross_to_the_engine_once_for_all_completions() -> None:
    wanted = StructuredOutputsParams(json={"enum": ["x" * 1000]})
    params = SamplingParams(seed=1, n=64, structured_outputs=wanted)
    requests = [replace(REQUEST, sampling_params=params.child(index)) for index in range(64)]
    data = msg.encode(msg.AddRequests.of(requests))
    assert len(data) < 64 * 1000
    message = msg.decode_to_engine(data)
    assert isinstance(message, msg.AddRequests)
    assert {request.sampling_params.structured_outputs for request in message.with_prompt()} == {wanted}


def test_sampling_params_take_no_other_type() -> None:
    with pytest.raises(InvalidRequestError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": ".?" * 1100}, "regex has more than 2048 bytes"),
        ({"json": {"allOf": [{"pattern": "a?" * 600}, {"pattern": "b?" * 600}]}}, "patterns of the JSON schema"),
        ({"json": {"patternProperties": {"a?" * 1100: {}}}}, "patterns of the JSON schema"),
        ({"calls": {"f": {"properties": {"x": {"pattern": "a?" * 1100}}}}}, "patterns of the JSON schema"),
        ({"json": {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]}}, "multipleOf has too many"),
    ],
)
def test_what_compiling_would_take_gigabytes_for_is_refused_by_its_size(form: dict[str, Any], reason: str) -> None:
    """32 KB of `.?` took 4 GB, and three numbers of two digits 340 MB and ten seconds."""
    with pytest.raises(InvalidRequestError, match=reason):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize("number", [-(2**63), 2**63, 2**53 + 1, -1e19, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("place", [lambda n: {"const": n}, lambda n: {"enum": [[n]]}, lambda n: {"const": {"a": [n]}}])
def test_numbers_of_a_schema_are_bounded(number: float, place: Any) -> None:
    """150 bytes with the least number of 64 bits ended the server: the library recursed until its stack was full."""
    for form in ({"json": place(number)}, {"calls": {"f": {"properties": {"x": place(number)}}}}):
        with pytest.raises(InvalidRequestError, match=r"a number of the JSON schema|no JSON schema"):
            StructuredOutputsParams(**form)
    assert StructuredOutputsParams(json=place(-(2**53))).kind == "json"


def test_properties_may_have_the_names_of_keywords() -> None:
    properties = {"pattern": {"type": "string"}, "patternProperties": {"type": "string"}, "multipleOf": {"enum": [7]}}
    schema = {"properties": {**properties, "a": {"multipleOf": 0.01}, "b": {"multipleOf": 0.01, "pattern": "a+"}}}
    assert StructuredOutputsParams(json=schema).kind == "json"
