"""`loraplex tenant` and `loraplex key` as they are called, on a state directory and on a database."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from loraplex import cli
from loraplex.tenants.limits import Limits
from loraplex.tenants.records import Role, key_digest
from loraplex.tenants.store import open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> list[str]:
    """The options that say where."""
    if request.param == "sqlite":
        return ["--state-dir", str(request.getfixturevalue("state_dir"))]
    return ["--database-url", request.getfixturevalue("database_url")]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return called


def test_the_life_of_a_tenant(run: Run, place: list[str]) -> None:
    made = run("tenant", "create", "acme", "--adapter-root", "/srv/acme", "--requests-per-s", "20", *place)
    assert made == (0, "acme\n", "")
    code, secret, about = run("key", "create", "acme", "--label", "the app", *place)
    assert code == 0
    key_id = key_digest(secret.strip()).hex()[:8]
    assert about == f"id {key_id}, role tenant: keep the key, it is not shown again\n"
    assert run("key", "create", "--role", "admin", *place)[0] == 0
    _, keys, _ = run("key", "list", "acme", *place)
    assert keys.split("\t")[:3] == [key_id, "acme", "tenant"]
    assert "valid\tthe app" in keys
    assert secret.strip() not in keys
    assert len(run("key", "list", *place)[1].splitlines()) == 2
    assert run("key", "revoke", key_id, *place) == (0, f"{key_id}\n", "")
    assert "revoked\tthe app" in run("key", "list", *place)[1]
    assert run("tenant", "share", "sql", "acme", "--public", *place) == (0, "sql: * acme\n", "")
    assert run("tenant", "shares", *place)[1] == "sql\t*\nsql\tacme\n"
    assert run("tenant", "share", "sql", *place) == (0, "sql: -\n", "")
    assert run("tenant", "change", "acme", "--pins", "3", "--adapter-bytes", "1GiB", *place)[0] == 0
    _, tenants, _ = run("tenant", "list", *place)
    assert tenants.startswith("acme\t")
    assert tenants.endswith("\tadapter_bytes=1.07374e+09 pins=3\t/srv/acme\n")
    assert run("tenant", "change", "acme", "--weight", "2.5", "--itl-target-ms", "40", *place)[0] == 0
    assert "pins=3 weight=2.5 itl_target_ms=40\t" in run("tenant", "list", *place)[1]
    assert run("tenant", "delete", "acme", *place) == (0, "acme\n", "")
    assert run("tenant", "list", *place)[1] == ""


def test_errors_are_a_line(run: Run, place: list[str]) -> None:
    for arguments, text in (
        (("tenant", "create", "Acme"), "a name has 1 to 63"),
        (("tenant", "create", "acme", "--concurrency", "0"), "concurrency must be > 0"),
        (("tenant", "create", "acme", "--weight", "0"), "weight must be 0.001 to 1000, got 0"),
        (("tenant", "delete", "acme"), "there is no tenant 'acme'"),
        (("key", "create"), "belongs to a tenant"),
        (("key", "create", "--role", "emperor"), "role 'emperor' is not known"),
        (("key", "create", "--role", "inference"), "is that of --api-key"),
        (("key", "revoke", "00000000"), "there is no key '00000000'"),
    ):
        code, out, error = run(*arguments, *place)
        assert (code, out) == (1, ""), arguments
        assert text in error
        assert error.count("\n") == 1


def test_the_database_may_be_in_the_environment(run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", database_url)
    assert run("tenant", "create", "acme")[0] == 0
    monkeypatch.delenv("LORAPLEX_DATABASE_URL")
    code, _, error = run("tenant", "list")
    assert (code, "give the --state-dir or the --database-url" in error) == (1, True)


def test_a_directory_without_a_journal(run: Run, tmp_path: Path) -> None:
    code, _, error = run("tenant", "list", "--state-dir", str(tmp_path))
    assert (code, "start a server with this --state-dir once" in error) == (1, True)


def test_what_is_given_is_what_is_stored(run: Run, state_dir: Path) -> None:
    place = ["--state-dir", str(state_dir)]
    limits = {
        "--adapters": "7",
        "--adapter-bytes": "2MiB",
        "--pins": "1",
        "--requests-per-s": "0.5",
        "--tokens-per-minute": "9",
        "--concurrency": "3",
        "--max-context": "4",
        "--connections": "5",
    }
    assert run("tenant", "create", "acme", *(word for pair in limits.items() for word in pair), *place)[0] == 0
    assert run("key", "create", "acme", "--role", "read-only", *place)[0] == 0
    with closing(open_store(state_dir, None)) as store:
        assert store.tenant("acme").limits == Limits(
            adapters=7,
            adapter_bytes=2**21,
            pins=1,
            requests_per_s=0.5,
            tokens_per_minute=9,
            concurrency=3,
            max_context=4,
            connections=5,
        )
        assert [key.role for key in store.keys_of("acme")] == [Role.READ_ONLY]
