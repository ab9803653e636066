"""A trainer that sends tensors to `loraplex serve`: two runners, a state directory, and a server that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save

from loraplex.demo.tasks import adapter_path
from tests.test_openai_end_to_end import PATIENCE_S, REPOSITORY, Server


def put(http: httpx.Client, task: str, **params: str) -> httpx.Response:
    """Each task's adapter has a rank of its own, so each brings its configuration."""
    folder = adapter_path(task)
    config = (folder / "adapter_config.json").read_text()
    body = save(load_file(folder / "adapter_model.safetensors"), {"adapter_config": config})
    return http.put("/v1/adapters/policy/tensors", content=body, params=params)


def ask(http: httpx.Client, model: str = "policy") -> str:
    body = {"model": model, "prompt": "banana=", "temperature": 0}
    text: str = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_updates_reach_all_runners_and_outlive_the_server(tmp_path: Path) -> None:
    state = tmp_path / "state"
    flags = ("--state-dir", str(state), "--data-parallel-size", "2", "--placement", "spread")
    adapters = ("--lora-modules", f"policy={adapter_path('upper')}")
    with Server(tmp_path, *flags, *adapters) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert ask(http) == "BANANA"
        for version, (task, answer) in enumerate((("sort", "aaabnn"), ("reverse", "ananab"), ("sort", "aaabnn")), 2):
            updated = put(http, task)
            assert updated.status_code == 200, updated.text
            assert updated.json()["version"] == version
            assert [ask(http) for _ in range(4)] == [answer] * 4
        assert put(http, "upper", expected_version="2").status_code == 409
        assert [ask(http, "policy@3"), ask(http)] == ["ananab", "aaabnn"]
        assert len(list((state / "uploads").iterdir())) == 2
        server.process.send_signal(signal.SIGKILL)
        server.end()
    abandoned = state / "uploads" / ".receiving-01234567"
    abandoned.mkdir()
    with Server(tmp_path, *flags) as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert not abandoned.exists()
        assert [ask(http), ask(http, "policy@3")] == ["aaabnn", "ananab"]
        assert put(http, "upper").json()["version"] == 5
        assert ask(http) == "BANANA"
        assert http.delete("/v1/adapters/policy").status_code == 200
        assert not list((state / "uploads").iterdir())
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0


def test_the_loop_of_the_guide_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = (REPOSITORY / "docs" / "guides" / "trainers.md").read_text()
    loop = guide.split("```py\n", 1)[1].split("```", 1)[0]
    assert len(loop.strip().splitlines()) <= 11
    with Server(tmp_path, "--lora-modules", f"upper={adapter_path('upper')}") as server:
        exec(loop.replace("http://localhost:8000", server.url), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "3", "4"]
