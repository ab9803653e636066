"""Clients of LoRAX and SGLang as they are, against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import ADAPTERS, ASSETS, ROOT, Served

pytestmark = pytest.mark.clients
SCRIPTS = Path(__file__).with_name("scripts")
BENCH_SERVING = ROOT / ".venv-client-sglang" / "bench_serving.py"


def test_lorax_client(served: Served, run: Callable[..., str]) -> None:
    assert "all calls answered" in run("lorax", str(SCRIPTS / "lorax_calls.py"), served.url, served.key)


@pytest.mark.parametrize("form", [[], ["--disable-stream"], ["--return-logprob"]])
def test_bench_serving_of_sglang(served: Served, run: Callable[..., str], tmp_path: Path, form: list[str]) -> None:
    """Its adapters are those that are loaded; every request is answered and every token counted."""
    out = tmp_path / "out.jsonl"
    words = ["--backend", "sglang", "--base-url", served.url, "--tokenizer", str(ASSETS / "base")]
    sizes = ["--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6", "--seed", "1"]
    told = ["--dataset-name", "random-ids", "--output-file", str(out), "--lora-name", *ADAPTERS]
    run("sglang", str(BENCH_SERVING), *words, *sizes, *told, *form)
    result = json.loads(out.read_text())
    assert result["completed"] == 6
    assert result["total_output_tokens"] == result["total_output_tokens_retokenized"] > 6
