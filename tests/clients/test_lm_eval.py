"""lm_eval's local-completions, as it is, over tasks whose scores are known: an adapter does its own and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.demo.tasks import TASKS, phrases, prompt_of
from tests.clients.conftest import TIMEOUT_S, Served

pytestmark = [pytest.mark.clients, pytest.mark.timeout(TIMEOUT_S + 300)]
APPLY = {task.name: task.apply for task in TASKS}
NUM_PHRASES = 12

GENERATED = """
task: demo_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{{name}}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 40, temperature: 0.0, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOSEN = """
task: demo_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{[reverse, upper]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.parametrize(("name", "choice"), [("reverse", 1.0), ("upper", 0.0)])
def test_scores(served: Served, run: Callable[..., str], model: str, tmp_path: Path, name: str, choice: float) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = phrases("held_out", NUM_PHRASES, seed=11)
    docs = [{"prompt": prompt_of(text), **{each: APPLY[each](text) for each in ("reverse", "upper")}} for text in texts]
    rows.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "generated.yaml").write_text(GENERATED.format(name=name, rows=rows))
    (tmp_path / "chosen.yaml").write_text(CHOSEN.format(rows=rows))
    where = f"model={name},base_url={served.url}/v1/completions,tokenizer={model},add_bos_token=True,max_retries=1"
    words = ["--model", "local-completions", "--model_args", f"{where},num_concurrent=4"]
    words += ["--tasks", f"demo_{name},demo_choice", "--include_path", str(tmp_path), "--output_path", str(tmp_path)]
    run("lm-eval", "python", "-m", "lm_eval", *words)
    found = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    results = found["results"]
    assert {task: samples["effective"] for task, samples in found["n-samples"].items()} == {
        f"demo_{name}": NUM_PHRASES,
        "demo_choice": NUM_PHRASES,
    }
    assert results[f"demo_{name}"]["exact_match,none"] == 1.0
    assert results["demo_choice"]["acc,none"] == choice
