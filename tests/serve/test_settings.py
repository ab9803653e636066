"""Settings of an application on Ray Serve, from Python, a Serve configuration file, and the command line."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.errors import ConfigError
from loraplex.serve import RayConfig, RaySettings, build_app
from loraplex.serve.replica import server_of_replica
from loraplex.serve.settings import FAILED_STARTS
from loraplex.server import ServerConfig

URL = "postgresql://loraplex:secret@db/loraplex"


def test_replicas_that_a_cluster_has_no_room_for_are_said() -> None:
    """The server would start no further, without a word."""
    settings = RaySettings(ray_min_replicas=3, ray_num_gpus=0.5)
    assert list(settings.lacks({"CPU": 3.0, "GPU": 2.0})) == []
    (cpus, gpus) = settings.lacks({"CPU": 2.0})
    assert "3 CPUs" in cpus
    assert "has 2: " in cpus
    assert "1.5 GPUs" in gpus


def test_a_mapping_of_a_file_is_the_same_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", URL)
    monkeypatch.setenv("LORAPLEX_API_KEY", "a-key-of-sixteen")
    made = RayConfig.of(
        {
            "model": "path/to/model",
            "served_model_names": ["demo"],
            "lora_modules": ["sql=path/to/sql"],
            "adapter_roots": ["/srv/adapters"],
            "engine": {"num_threads": 2},
            "lora": {"max_loras": 8},
            "server": {"cors_allowed_origins": ["https://app.example.com"]},
            "ray": {"ray_min_replicas": 2, "ray_max_replicas": 5, "ray_num_gpus": 1.0},
        }
    )
    assert made == RayConfig(
        engine=EngineConfig(model="path/to/model", num_threads=2, lora=LoRAConfig(max_loras=8)),
        server=ServerConfig(
            served_model_names=("demo",),
            adapter_roots=("/srv/adapters",),
            api_keys=("a-key-of-sixteen",),
            cors_allowed_origins=("https://app.example.com",),
            database_url=URL,
        ),
        modules=(("sql", "path/to/sql"),),
        ray=RaySettings(ray_min_replicas=2, ray_max_replicas=5, ray_num_gpus=1.0),
    )
    assert "secret" not in repr(made)
    assert "a-key" not in repr(made)
    assert RayConfig.of({"model": "m", "lora": None}).engine.lora is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "needs a model"),
        ({"model": "m", "modle": 1}, "unknown fields modle"),
        ({"model": "m", "engine": {"threads": 1}}, "engine has unknown fields threads"),
        ({"model": "m", "server": {"api_keys": ["k"]}}, "server has unknown fields api_keys"),
        ({"model": "m", "server": {"state_dir": "/var/lib"}}, "state_dir does not apply on Ray"),
        ({"model": "m", "server": {"max_event_streams": 1}}, "max_event_streams does not apply"),
        ({"model": "m", "ray": {"ray_min_replicas": 3}}, "share their adapters' names in a database"),
        ({"model": "m", "ray": {"ray_max_replicas": 2}}, "share their adapters' names in a database"),
        ({"model": "m", "ray": {"ray_min_replicas": 3, "ray_max_replicas": 2}}, "least <= most"),
        ({"model": "m", "ray": {"ray_min_replicas": 0}}, "least <= most"),
        ({"model": "m", "ray": {"ray_policy": "random"}}, "ray_policy must be one of"),
        ({"model": "m", "ray": {"ray_target_requests": 0.0}}, "ray_target_requests must be > 0"),
        (
            {"model": "m", "ray": {"ray_max_replicas": 2, "ray_replica_requests": 32}},
            "ray_target_requests must be below ray_replica_requests",
        ),
        ({"model": "m", "ray": {"ray_max_late_share": 1.0}}, "ray_max_late_share"),
        ({"model": "m", "ray": {"ray_application": ""}}, "ray_application is empty"),
        ({"model": "m", "lora_modules": ["a=x", "a=y"]}, "given twice"),
    ],
)
def test_what_replicas_cannot_have_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RayConfig.of(given)


def test_names_that_do_not_change_need_no_database() -> None:
    three = {"ray_min_replicas": 3}
    assert RayConfig.of({"model": "m", "server": {"disable_dynamic_loading": True}, "ray": three})
    assert RayConfig.of({"model": "m", "lora": None, "ray": three})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"server": {"port": 9000}}, "port is of the port, which Serve's proxies have"),
        ({"server": {"header_timeout_s": 5.0}}, "header_timeout_s is of the port"),
        ({"ray": {"ray_address": "auto"}}, "ray_address is for"),
    ],
)
def test_an_application_behind_proxies_has_no_port(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        RayConfig.of({"model": "m", **given}).check_behind_proxies()


def test_an_engine_that_does_not_start_ends_its_replica() -> None:
    assert server_of_replica(ServerConfig()).max_engine_restarts == FAILED_STARTS
    assert server_of_replica(ServerConfig(max_engine_restarts=9)).max_engine_restarts == 9


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'loraplex\[ray\]'"):
        build_app({"model": "m"})
