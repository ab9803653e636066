"""Load generators and benchmarks, as they are: every request is answered, and counted as they count it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import ADAPTERS, ROOT, SCRIPTS, TIMEOUT_S, Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(TIMEOUT_S + 300)]
BENCH_SERVING = ROOT / ".venv-client-sglang" / "bench_serving.py"


@pytest.mark.parametrize("form", [[], ["--disable-stream"], ["--return-logprob"]])
def test_bench_serving_of_sglang(
    served: Served, run: Callable[..., str], model: str, tmp_path: Path, form: list[str]
) -> None:
    """Its adapters are those that are loaded; every request is answered and every token counted."""
    out = tmp_path / "out.jsonl"
    words = ["--backend", "sglang", "--base-url", served.url, "--tokenizer", model]
    sizes = ["--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6", "--seed", "1"]
    told = ["--dataset-name", "random-ids", "--output-file", str(out), "--lora-name", *ADAPTERS]
    run("sglang", "python", str(BENCH_SERVING), *words, *sizes, *told, *form)
    result = json.loads(out.read_text())
    assert result["completed"] == 6
    assert result["total_output_tokens"] == result["total_output_tokens_retokenized"] > 6


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_of_vllm(served: Served, run: Callable[..., str], model: str, tmp_path: Path, backend: str) -> None:
    """Each request goes to one of the adapters."""
    route = "/v1/chat/completions" if backend == "openai-chat" else "/v1/completions"
    words = ["--backend", backend, "--base-url", served.url, "--endpoint", route, "--model", "demo"]
    words += ["--tokenizer", model, "--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8"]
    words += ["--num-prompts", "6", "--ignore-eos", "--lora-modules", *ADAPTERS, "--disable-tqdm"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "out.json"]
    run("vllm", "python", str(SCRIPTS / "vllm_bench.py"), *words)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 48)
    assert result["output_lens"] == [8] * 6
    assert set(result["errors"]) == {""}
    assert min(result["input_lens"]) > 8


def test_locust(served: Served, run: Callable[..., str]) -> None:
    """Three kinds of users; a wrong answer is a failure of theirs."""
    words = ["-f", str(SCRIPTS / "locustfile.py"), "--headless", "--users", "6", "--spawn-rate", "6", "--json"]
    found = run("locust", "locust", *words, "--host", served.url, "--exit-code-on-error", "1")
    rows = json.loads(found)
    assert {row["name"] for row in rows} >= {"/v1/completions", "/v1/chat/completions"}
    assert sum(row["num_requests"] for row in rows) >= 60
    assert [row for row in rows if row["num_failures"]] == []


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(served: Served, run: Callable[..., str], model: str, tmp_path: Path, route: str) -> None:
    out = tmp_path / "out.json"
    where = f"kind=openai_http,target={served.url},model=reverse,api_key={served.key},request_format={route}"
    words = ["--backend", where, "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=8"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={model}", "--output", f"kind=json,path={out}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8", "--disable-console"]
    run("guidellm", "guidellm", "run", *words)
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == 64
    assert benchmark["metrics"]["prompt_token_count"]["successful"]["min"] >= 16


@pytest.mark.parametrize("form", [["chat", "--streaming"], ["completions", "--streaming"], ["chat"], ["responses"]])
def test_aiperf(served: Served, run: Callable[..., str], model: str, tmp_path: Path, form: list[str]) -> None:
    words = ["--model", "reverse", "--url", served.url, "--api-key", served.key, "--endpoint-type", *form]
    words += ["--tokenizer", model, "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "8"]
    words += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none"]
    words += ["--request-count", "8", "--concurrency", "2", "--output-artifact-dir", str(tmp_path)]
    run("aiperf", "aiperf", "profile", *words)
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"], found["was_cancelled"]) == (8, [], False)
    assert found.get("error_request_count") is None
    assert found["total_usage_completion_tokens"]["avg"] == 64
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 8
    assert found["usage_prompt_tokens"]["min"] >= 24
    assert ("time_to_first_token" in found) == ("--streaming" in form)
