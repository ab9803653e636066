"""What the tests of several runners share: the stretched base model, and one engine to compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex import LLM
from tests.frontend.processes import demo_config, stretched_base


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stretched_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="package")
def llm(base: str) -> Iterator[LLM]:
    with LLM.from_config(demo_config(model=base)) as llm:
        yield llm
