"""Two hundred schemas through the base and its adapters in one batch: every answer is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from loraplex import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from loraplex.demo.tasks import TASKS, adapter_path
from tests.frontend.processes import demo_config, stretched_base
from tests.structured.schemas import schema_of

pytestmark = pytest.mark.slow

NUM_SCHEMAS = 200
MODELS = (None, *(LoRARequest(task.name, i + 1, str(adapter_path(task.name))) for i, task in enumerate(TASKS)))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM.from_config(demo_config(model=stretched_base(tmp_path_factory.mktemp("m") / "base"))) as llm:
        yield llm


def check(text: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_every_answer_is_valid(llm: LLM) -> None:
    schemas = [schema_of(number) for number in range(NUM_SCHEMAS)]
    params = [
        SamplingParams(
            temperature=1.0 if number % 2 else 0,
            seed=number,
            max_tokens=2000,
            structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=number % 8 != 0),
        )
        for number, schema in enumerate(schemas)
    ]
    models = [MODELS[number % len(MODELS)] for number in range(NUM_SCHEMAS)]
    outputs = llm.generate(["banana bread="] * NUM_SCHEMAS, params, lora_request=models)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    for output, schema in zip(outputs, schemas, strict=True):
        check(output.outputs[0].text, schema)
    assert len({output.outputs[0].text for output in outputs}) > NUM_SCHEMAS // 2
    llm.engine.check_integrity()
