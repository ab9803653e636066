"""`loraplex tenant` and `loraplex key` as they are called, on a state directory and on a database."""

from __future__ import annotations

import os
import re
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
    assert made[:2] == (0, "acme\n")
    code, secret, about = run("key", "create", "acme", "--label", "the app", *place)
    assert code == 0
    key_id = key_digest(secret.strip()).hex()[:8]
    audit, kept = about.splitlines()
    assert kept == f"id {key_id}, role tenant: keep the key, it is not shown again"
    assert "loraplex key create on tenant 'acme' on key" in audit
    assert run("key", "create", "--role", "admin", *place)[0] == 0
    _, keys, _ = run("key", "list", "acme", *place)
    assert keys.split("\t")[:3] == [key_id, "acme", "tenant"]
    assert "valid\tthe app" in keys
    assert secret.strip() not in keys
    assert len(run("key", "list", *place)[1].splitlines()) == 2
    assert run("key", "revoke", key_id, *place)[:2] == (0, f"{key_id}\n")
    assert "revoked\tthe app" in run("key", "list", *place)[1]
    assert run("tenant", "share", "sql", "acme", "--public", *place)[:2] == (0, "sql: * acme\n")
    assert run("tenant", "shares", *place)[1] == "sql\t*\nsql\tacme\n"
    assert run("tenant", "share", "sql", *place)[:2] == (0, "sql: -\n")
    assert run("tenant", "change", "acme", "--pins", "3", "--adapter-bytes", "1GiB", *place)[0] == 0
    _, tenants, _ = run("tenant", "list", *place)
    assert tenants.startswith("acme\t")
    assert tenants.endswith("\tadapter_bytes=1073741824 pins=3 requests_per_s=20\t/srv/acme\n")
    assert run("tenant", "change", "acme", "--weight", "2.5", "--itl-target-ms", "40", *place)[0] == 0
    assert "pins=3 requests_per_s=20 weight=2.5 itl_target_ms=40\t" in run("tenant", "list", *place)[1]
    assert (
        run(
            "tenant",
            "change",
            "acme",
            "--device-bytes",
            "1KiB",
            "--unset",
            "adapter-bytes",
            "--unset",
            "requests_per_s",
            *place,
        )[0]
        == 0
    )
    assert run("tenant", "change", "acme", "--pins", "4", "--unset", "itl_target_ms", *place)[0] == 0
    kept = "\tpins=4 device_bytes=1024 weight=2.5\t", "\tdevice_bytes=1024 pins=4 weight=2.5\t"
    assert any(each in run("tenant", "list", *place)[1] for each in kept), "what is not given stays"
    assert run("tenant", "delete", "acme", *place)[:2] == (0, "acme\n")
    assert run("tenant", "list", *place)[1] == ""


def test_errors_are_a_line(run: Run, place: list[str]) -> None:
    for arguments, text in (
        (("tenant", "create", "Acme"), "a name has 1 to 63"),
        (("tenant", "create", "acme", "--concurrency", "0"), "concurrency must be > 0"),
        (("tenant", "create", "acme", "--weight", "0"), "weight must be 0.001 to 1000, got 0"),
        (("tenant", "delete", "acme"), "there is no tenant 'acme'"),
        (("tenant", "change", "acme", "--pins", "3"), "there is no tenant 'acme'"),
        (("tenant", "change", "acme", "--unset", "colour"), "'colour' is no limit"),
        (("key", "create"), "belongs to a tenant"),
        (("key", "create", "--role", "emperor"), "role 'emperor' is not known"),
        (("key", "create", "--role", "inference"), "is that of --api-key"),
        (("key", "revoke", "00000000"), "there is no key '00000000'"),
    ):
        code, out, error = run(*arguments, *place)
        assert (code, out) == (1, ""), arguments
        *audit, line = error.splitlines()
        assert text in line
        assert [f"INFO loraplex.audit: loraplex {' '.join(arguments[:2])}" in each for each in audit] in ([], [True])


def test_a_verb_leaves_an_audit_record(run: Run, state_dir: Path) -> None:
    """As a verb over HTTP does, and one that was refused, too; what only reads leaves none."""
    place = ["--state-dir", str(state_dir)]
    user = rf"by user \S+ \(uid {os.getuid()}\)"
    key_id = ""
    for words, about in (
        (("tenant", "create", "acme"), "tenant create on tenant 'acme'"),
        (("tenant", "change", "acme", "--pins", "3"), "tenant change on tenant 'acme'"),
        (("tenant", "share", "sql", "acme"), "tenant share on adapter 'sql'"),
        (("key", "create", "acme"), r"key create on tenant 'acme' on key '[0-9a-f]{8}'"),
        (("key", "revoke", "KEY"), "key revoke on key 'KEY'"),
        (("tenant", "delete", "acme"), "tenant delete on tenant 'acme'"),
    ):
        code, _, error = run(*(key_id if word == "KEY" else word for word in words), *place)
        assert code == 0
        found = re.search(
            rf"^\S+Z INFO loraplex\.audit: loraplex {about.replace('KEY', key_id)} in '{state_dir}' {user}: done$",
            error,
            re.MULTILINE,
        )
        assert found, error
        key_id = found[0].split("on key '")[-1][:8] if words[:2] == ("key", "create") else key_id
    code, _, error = run("tenant", "delete", "a\nb", *place)
    assert code == 1
    refused = r"INFO loraplex\.audit: loraplex tenant delete on tenant 'a\\nb' .*: refused, TenantNotFoundError$"
    assert re.search(refused, error, re.MULTILINE)
    for words in (("tenant", "list"), ("key", "list"), ("tenant", "shares")):
        assert run(*words, *place)[2] == ""


def test_a_record_of_a_database_has_no_password(run: Run, database_url: str) -> None:
    error = run("tenant", "create", "acme", "--database-url", database_url)[2]
    assert re.search(r" on tenant 'acme' in the database by user ", error)
    assert database_url not in error


def test_a_repair_leaves_an_audit_record(run: Run, state_dir: Path) -> None:
    assert run("state", "check", str(state_dir))[2] == ""
    assert f"loraplex.audit: loraplex state repair in '{state_dir}' by" in run("state", "repair", str(state_dir))[2]
    code, _, error = run("state", "repair", str(state_dir / "none"))
    assert code == 1
    assert "refused, ConfigError" in error


def test_the_database_may_be_in_the_environment(run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", database_url)
    assert run("tenant", "create", "acme")[0] == 0
    monkeypatch.delenv("LORAPLEX_DATABASE_URL")
    code, _, error = run("tenant", "list")
    assert (code, "give the --state-dir or the --database-url" in error) == (1, True)


def test_a_directory_without_a_journal(run: Run, tmp_path: Path) -> None:
    code, _, error = run("tenant", "list", "--state-dir", str(tmp_path))
    assert (code, "start a server with this --state-dir once" in error) == (1, True)


def test_revoke_is_another_word_for_the_end_of_a_tenant(run: Run, state_dir: Path) -> None:
    place = ["--state-dir", str(state_dir)]
    run("tenant", "create", "acme", *place)
    assert run("tenant", "revoke", "acme", *place)[:2] == (0, "acme\n")
    assert run("tenant", "list", *place)[1] == ""


def test_what_is_given_is_what_is_stored(run: Run, state_dir: Path) -> None:
    place = ["--state-dir", str(state_dir)]
    limits = {
        "--adapters": "7",
        "--adapter-bytes": "2MiB",
        "--host-bytes": "1GiB",
        "--device-bytes": "64MiB",
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
            host_bytes=2**30,
            device_bytes=2**26,
            pins=1,
            requests_per_s=0.5,
            tokens_per_minute=9,
            concurrency=3,
            max_context=4,
            connections=5,
        )
        assert [key.role for key in store.keys_of("acme")] == [Role.READ_ONLY]
