"""Libraries that applications call models with, as they are: answers, streams, forms, tools, errors and retries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.conftest import SCRIPTS

pytestmark = pytest.mark.clients
DONE = "all calls answered"


@pytest.mark.parametrize(
    ("environment", "script"),
    [
        ("openai", "openai_calls.py"),
        ("litellm", "litellm_calls.py"),
        ("langchain", "langchain_calls.py"),
        ("instructor", "instructor_calls.py"),
        ("js", "openai_calls.cjs"),
        ("js", "ai_sdk_calls.cjs"),
    ],
)
def test_calls_of(environment: str, script: str, run: Callable[..., str]) -> None:
    program = "node" if script.endswith(".cjs") else "python"
    assert DONE in run(environment, program, str(SCRIPTS / script))
