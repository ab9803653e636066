"""Settings of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex.config import RegistryDatabase
from loraplex.errors import ConfigError
from loraplex.server import ServerConfig, ServerSettings
from loraplex.server.config import registry_database

KEY = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"host": ""}, "host"),
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"served_model_names": ("a", "")}, "served_model_names"),
        ({"served_model_names": ("a", "a")}, "served_model_names"),
        ({"adapter_roots": ("",)}, "adapter_roots"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
        ({"max_sequences_per_request": 0}, "max_sequences_per_request"),
        ({"shutdown_grace_s": -1}, "shutdown_grace_s"),
        ({"shutdown_grace_s": float("nan")}, "shutdown_grace_s"),
        ({"keep_alive_s": 0}, "keep_alive_s"),
        ({"log_level": "loud"}, "log_level"),
        ({"database_url": ""}, "database_url"),
        ({"database_patience_s": 0.1}, "database_patience_s"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**fields)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, is_loopback: bool) -> None:
    config = ServerConfig(host=host)
    assert config.is_loopback == is_loopback
    assert config.allowed_adapter_roots == (None if is_loopback else ())


def test_roots_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    config = ServerConfig(adapter_roots=(str(tmp_path / "link"), "hf://org"))
    assert config.local_adapter_roots == ((tmp_path / "real").resolve(),)


def test_the_url_of_a_database_comes_from_the_variable_and_is_in_no_repr() -> None:
    environment = {"LORAPLEX_DATABASE_URL": "postgresql://x:SECRET@host/of_variable"}
    assert registry_database(ServerConfig(), environment) == RegistryDatabase(
        "postgresql://x:SECRET@host/of_variable", 3.0
    )
    assert environment == {}, "child processes inherit it"
    config = ServerConfig(database_url="postgresql://x:SECRET@host/flag", database_patience_s=5.0)
    database = registry_database(config, {})
    assert database == RegistryDatabase("postgresql://x:SECRET@host/flag", 5.0)
    assert "SECRET" not in repr(config) + repr(database)
    assert registry_database(ServerConfig(state_dir="/state"), {}) is None
    with pytest.raises(ConfigError, match="two places for the same names"):
        registry_database(ServerConfig(state_dir="/state", database_url="postgresql://host/x"), {})
    with pytest.raises(ConfigError, match="LORAPLEX_DATABASE_URL is set and empty"):
        registry_database(ServerConfig(), {"LORAPLEX_DATABASE_URL": ""})


def test_every_setting_has_its_help() -> None:
    for cls in (ServerSettings, ServerConfig):
        assert all(field.metadata["help"] for field in cls.__dataclass_fields__.values())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"host": "0.0.0.0"}, "there is no API key"),
        ({"host": "0.0.0.0", "api_keys": (KEY,)}, "every API key may load"),
        ({"api_keys": ("short",)}, "fewer than"),
        ({"guard_metrics": True}, "--guard-metrics changes nothing"),
    ],
)
def test_what_an_operator_hears_before_the_server_listens(settings: dict[str, Any], text: str) -> None:
    (warning,) = ServerConfig(**settings).warnings
    assert text in warning
    assert "short" not in warning


def test_a_guarded_server_hears_nothing() -> None:
    keys = {"api_keys": (KEY,), "admin_api_keys": (KEY[::-1],)}
    assert ServerConfig(host="0.0.0.0", guard_metrics=True, **keys).warnings == ()
