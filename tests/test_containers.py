"""The container files: what a linter would ask, that metrics exist; their commands, behind the marker `container`.

No container tool is needed: the RUN lines of the build stage run in a copy of the tree, and then the start command and
the health check.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplex.metrics import EngineStats, RunnerReport
from loraplex.router.metrics import RouterMetrics
from loraplex.server.config import ServerConfig
from loraplex.server.connections import Connections
from loraplex.server.metrics_page import MetricsPage
from loraplex.server.telemetry.series import RequestSeries

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("Dockerfile.*"))


@dataclass(frozen=True)
class Instruction:
    name: str
    value: str


def instructions(path: Path) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last(path: Path, name: str) -> str:
    return [each.value for each in instructions(path) if each.name == name][-1]


def test_there_are_a_cpu_and_a_gpu_image() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_keys_beside_the_code_do_not_get_into_an_image() -> None:
    """`COPY . .` took those that docs/security.md makes in the working directory."""
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {"**/*.keys", "**/*.key", "**/*.pem", "**/.env*"} <= set(left_out)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
class TestImage:
    def test_it_runs_as_a_user_without_rights_and_is_watched(self, path: Path) -> None:
        assert int(last(path, "USER")) > 0
        assert "/health" in last(path, "HEALTHCHECK")
        names = [each.name for each in instructions(path)]
        assert names.index("USER") < names.index("ENTRYPOINT")

    def test_what_is_installed_is_pinned_and_cleaned_up(self, path: Path) -> None:
        for each in instructions(path):
            if each.name == "FROM":
                assert re.fullmatch(r"\S+:[\w.-]+( AS \w+)?", each.value)
                assert ":latest" not in each.value
            if "apt-get install" in each.value:
                packages = re.search(r"--no-install-recommends (.*?) &&", each.value)
                assert packages is not None
                assert all("=" in package for package in packages[1].split())
                assert "rm -rf /var/lib/apt/lists/*" in each.value

    def test_no_secret_and_no_rights_are_built_in(self, path: Path) -> None:
        assert re.search(r"(?i)(api[_-]?key|token|password|secret)\s*=", path.read_text()) is None
        assert "sudo" not in path.read_text()

    def test_the_start_command_is_one_of_the_command_line(self, path: Path) -> None:
        from loraplex.cli import app

        words = [*json.loads(last(path, "ENTRYPOINT")), *json.loads(last(path, "CMD"))]
        assert words[0] == "loraplex"
        function, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
        assert function.__name__ == "serve"
        for word in words:
            place = re.search(r"/app/(\S+)", word)
            assert place is None or (ROOT / place[1]).exists(), word
        assert bound.arguments


# ------------------------------------------------------------------------------------------------ compose and dashboard


def test_compose_names_files_that_exist() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    build = services["loraplex"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).exists()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DOCKER / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to this machine alone"


TARGETS_LABELS = {"instance", "job"}
"""What Prometheus itself adds."""

ALERTS = ROOT / "deploy" / "helm" / "loraplex" / "files" / "alerts.yaml"
DASHBOARD = DOCKER / "grafana" / "loraplex.json"


@cache
def served_labels() -> dict[str, set[str]]:
    """By the name of a sample of a server or a router: the labels that it has."""
    connections = Connections(ServerConfig(), max_open=1)
    reports = [RunnerReport("0", "cpu", stats=EngineStats()), RunnerReport("1", "cpu")]
    page = MetricsPage("m", connections, series=RequestSeries(1, 1))
    families = [*page.families(EngineStats(), {}, reports=reports), *RouterMetrics((), connections, int).families()]
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    served: dict[str, set[str]] = {}
    for family in families:
        for ending in endings.get(family.type, ("",)):
            labels = {*getattr(family, "_labelnames", ()), *(["le"] if ending == "_bucket" else [])}
            served.setdefault(family.name + ending, set()).update(labels)
    return served


def served_metrics() -> set[str]:
    return set(served_labels())


def named_metrics(text: str) -> set[str]:
    return set(re.findall(r"(?:vllm|loraplex):\w+", text))


def fault_of(query: str) -> str | None:
    """A query of Prometheus that asks for what no page has."""
    names = named_metrics(query)
    if not names or names - served_metrics():
        return f"{sorted(names - served_metrics())} are not served"
    for name, matchers in re.findall(r"((?:vllm|loraplex):\w+)\{([^}]*)\}", query):
        unknown = set(re.findall(r"(\w+)\s*[=!]", matchers)) - served_labels()[name] - TARGETS_LABELS
        if unknown:
            return f"{name} has no {sorted(unknown)}"
    for listed in re.findall(r"by \(([^)]*)\)", query):
        for name in names:
            unknown = set(re.findall(r"\w+", listed)) - served_labels()[name] - TARGETS_LABELS
            if unknown:
                return f"{name} has no {sorted(unknown)}"
    for function, name in re.findall(r"(\w+)\(((?:vllm|loraplex):\w+)", query):
        if (function in ("rate", "increase")) != name.endswith(("_total", "_bucket", "_sum", "_count")):
            return f"{function} of {name}"
    return None


@pytest.mark.parametrize(
    "query",
    [
        "loraplex:no_such_metric",
        "loraplex:adapter_requests",
        'loraplex:memory_chunks{tier="x"}',
        "sum by (tenant) (rate(loraplex:adapter_requests_total[5m]))",
        "sum by (le) (rate(vllm:request_queue_time_seconds_sum[5m]))",
        "rate(loraplex:engine_up[5m])",
        "up",
    ],
)
def test_queries_that_no_page_answers_are_found(query: str) -> None:
    assert fault_of(query) is not None


def test_every_query_of_the_dashboard_is_answered() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            assert fault_of(target["expr"]) is None, target["expr"]
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            (labels, *_) = (served_labels()[name] for name in named_metrics(target["expr"]))
            assert shown <= labels, target


def test_every_alert_can_fire() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) > 5
    for rule in group["rules"]:
        assert fault_of(rule["expr"]) is None, rule["expr"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        (labels, *_) = (served_labels()[name] for name in named_metrics(rule["expr"]))
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        left = set(re.findall(r"\w+", kept[0])) if kept else labels | TARGETS_LABELS
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= left, rule["alert"]


def test_metrics_that_the_guide_names_are_served() -> None:
    named = named_metrics((ROOT / "docs" / "guides" / "observability.md").read_text())
    assert len(named) > 3
    assert named <= served_metrics() | {each.removesuffix("_total") for each in served_metrics()}


def test_prometheus_reads_the_rules() -> None:
    rules = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["rule_files"]
    mounted = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    (source,) = [volume.split(":")[0] for volume in mounted if volume.split(":")[1] in rules]
    assert (DOCKER / source).resolve() == ALERTS


def test_the_dashboard_uses_the_provisioned_source() -> None:
    dashboard: dict[str, Any] = json.loads((DOCKER / "grafana" / "loraplex.json").read_text())
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    uids = {panel["datasource"]["uid"] for panel in dashboard["panels"]}
    assert uids == {source["uid"] for source in sources}


# --------------------------------------------------------------------------------------------------------- the commands


@pytest.mark.container
@pytest.mark.timeout(1200)
def test_the_commands_of_the_cpu_image_run(tmp_path: Path) -> None:
    path = DOCKER / "Dockerfile.cpu"
    app = tmp_path / "app"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, app / name)
    environment = {**os.environ, "PATH": f"{app}/.venv/bin{os.pathsep}{os.environ['PATH']}", "LORAPLEX_CACHE": "none"}
    ran = 0
    for each in instructions(path):
        if each.name == "RUN" and "apt-get" not in each.value:  # packages of the system are the machine's own here
            command = each.value.replace("/app/", f"{app}/")
            subprocess.run(["bash", "-c", command], cwd=app, env=environment, check=True)
            ran += 1
    assert ran == 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [
        word.replace("/app/", f"{app}/")
        for word in (*json.loads(last(path, "ENTRYPOINT")), *json.loads(last(path, "CMD")))
    ]
    server = subprocess.Popen([*words, "--port", port], cwd=tmp_path, env=environment)
    try:
        check = json.loads(last(path, "HEALTHCHECK").split("CMD")[1])
        command = shlex.join(check).replace(":8000", f":{port}")
        deadline = time.monotonic() + 120
        while subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=False).returncode:
            assert server.poll() is None
            assert time.monotonic() < deadline, "the health check never passed"
            time.sleep(0.5)
    finally:
        server.send_signal(getattr(signal, last(path, "STOPSIGNAL")))
        assert server.wait(timeout=60) == 0
