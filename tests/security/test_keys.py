"""Keys and tokens: how they come in, and that they come out nowhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.commands.serving import serve
from loraplex.demo.tasks import adapter_path, assets_path
from loraplex.errors import ConfigError
from loraplex.processes.environment import child_environment
from loraplex.server import ServerConfig
from loraplex.server import run as server_run
from loraplex.server.api_keys import KeySettings, fingerprint, read_keys

SENTINEL = "sEnTiNeL"
KEY, ADMIN, FILE_KEY = (f"{SENTINEL}-{kind}-0123456789" for kind in ("inference", "admin", "file"))
REPOSITORY = Path(__file__).parents[2]

SECRETS = {
    "HF_TOKEN": f"{SENTINEL}-hf",
    "HUGGING_FACE_HUB_TOKEN": f"{SENTINEL}-hub",
    "OPENAI_API_KEY": f"{SENTINEL}-openai",
    "AWS_SECRET_ACCESS_KEY": f"{SENTINEL}-aws",
    "AWS_ACCESS_KEY_ID": f"{SENTINEL}-aws-id",
    "AWS_SESSION_TOKEN": f"{SENTINEL}-aws-session",
    "GITHUBTOKEN": f"{SENTINEL}-forge",
    "MY_DB_PASSWORD": f"{SENTINEL}-password",
    "PGPASSWORD": f"{SENTINEL}-pg",
    "DATABASE_URL": f"postgres://user:{SENTINEL}@db/x",
    "HTTPS_PROXY": f"http://user:{SENTINEL}@127.0.0.1:1",
    "wandb_api_key": f"{SENTINEL}-lower",
    "GOOGLE_APPLICATION_CREDENTIALS": f"/{SENTINEL}",
    "AZURE_CLIENT_ID": f"{SENTINEL}-azure",
    "NPM_AUTH": f"{SENTINEL}-npm",
    "FSSPEC_S3": f'{{"key": "x", "secret": "{SENTINEL}-fsspec"}}',
    "SENTRY_DSN": f"https://{SENTINEL}@sentry/1",
}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/root",
    "LD_LIBRARY_PATH": "/lib",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": "/hf",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "LORAPLEX_CACHE": "none",
    "PYTHONPATH": "/a:/b",
    "PWD": "/work",
    "LANG": "C.UTF-8",
    "HTTP_PROXY": "http://proxy:3128",
    "TRITON_CACHE_DIR": "/triton",
}


@pytest.mark.parametrize("value", ["", ",,", " , "])
def test_a_variable_without_a_key_is_refused(value: str) -> None:
    """A secret that was not filled in must not open the server."""
    with pytest.raises(ConfigError, match="X is set and has no key; unset it"):
        read_keys((), (), "X", {"X": value})
    assert read_keys((), (), "X", {}) == ()


def test_child_processes_get_no_secret() -> None:
    assert (
        child_environment({**SECRETS, **HARMLESS, "LORAPLEX_API_KEY": KEY, "LORAPLEX_ADMIN_API_KEY": ADMIN}) == HARMLESS
    )


# ------------------------------------------------------------------------------------------------------------ key files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


def test_a_file_has_a_key_a_line(file: Path) -> None:
    file.write_text(f"# operators\n{KEY}\r\n\n  {ADMIN}  \n#{FILE_KEY}\n{KEY}\n")
    environment = {"X": f"{FILE_KEY}, ,{KEY}"}
    assert read_keys(["given"], [str(file)], "X", environment) == ("given", KEY, ADMIN, FILE_KEY)
    assert environment == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no key"),
        (b"\n# only words\n", "has no key"),
        (f"fine-key\n{KEY} and more\n".encode(), "line 2 of the key file"),
        (f"{KEY}\x00\n".encode(), "line 1 of the key file"),
        (b"\xff\xfe\xfd" + KEY.encode(), "line 1 of the key file"),
        (KEY.encode() * 100_000, "is longer than"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_and_not_quoted(file: Path, content: bytes, message: str) -> None:
    """An emptied file, above all, does not open the server to everybody."""
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        KeySettings(api_key_file=(str(file),)).inference_keys()
    assert SENTINEL not in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("path", ["/nowhere/keys", "/tmp"])
def test_a_file_that_is_none(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KeySettings(admin_api_key_file=(path,)).admin_keys()


def test_a_file_that_others_may_change_is_refused(file: Path) -> None:
    file.write_text(KEY)
    file.chmod(0o602)
    with pytest.raises(ConfigError, match="can be changed by every user"):
        read_keys((), [str(file)], "X", {})


def test_a_file_that_others_may_read_is_warned_of(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused it is not: secrets of orchestrators are mounted so."""
    file.write_text(KEY)
    file.chmod(0o644)
    assert read_keys((), [str(file)], "X", {}) == (KEY,)
    err = capsys.readouterr().err
    assert err == f"warning: the key file {file} can be read by every user of this machine; chmod 600 it\n"
    file.chmod(0o640)
    assert read_keys((), [str(file)], "X", {}) == (KEY,)
    assert capsys.readouterr().err == ""


def test_a_pipe_may_hold_keys(tmp_path: Path) -> None:
    """As in `--api-key-file <(pass show keys)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    writer = threading.Thread(target=lambda: pipe.write_text(KEY + "\n"))
    writer.start()
    assert read_keys((), [str(pipe)], "X", {}) == (KEY,)
    writer.join()


# ------------------------------------------------------------------------------------------------------------- settings


def test_keys_are_in_no_text_of_the_settings() -> None:
    config = ServerConfig(api_keys=(KEY,), admin_api_keys=(ADMIN,))
    assert SENTINEL not in repr(config) + str(config) + repr(KeySettings(api_key=(KEY,), admin_api_key=(ADMIN,)))


@pytest.mark.parametrize(
    "keys",
    [
        {"api_keys": (KEY,), "admin_api_keys": (KEY,)},
        {"admin_api_keys": (f"{SENTINEL} x",)},
        {"api_keys": tuple(f"{SENTINEL}-{number}" for number in range(1001))},
    ],
)
def test_keys_that_cannot_be_are_refused_and_not_quoted(keys: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"(?i)key") as refused:
        ServerConfig(**keys)  # type: ignore[arg-type]
    assert SENTINEL not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({}, []),
        ({"host": "0.0.0.0"}, ["there is no API key"]),
        ({"host": "0.0.0.0", "disable_dynamic_loading": True}, ["there is no API key"]),
        ({"host": "0.0.0.0", "api_keys": (KEY,)}, ["every API key may load, replace and unload adapters"]),
        ({"host": "0.0.0.0", "api_keys": (KEY,), "disable_dynamic_loading": True}, []),
        ({"host": "0.0.0.0", "api_keys": (KEY,), "admin_api_keys": (ADMIN,)}, []),
        ({"host": "0.0.0.0", "admin_api_keys": (ADMIN,)}, []),
        ({"api_keys": ("short", KEY)}, [f"the API key with fingerprint {fingerprint('short')} has fewer than 16"]),
    ],
)
def test_what_an_operator_is_warned_of(settings: dict[str, object], warnings: list[str]) -> None:
    found = ServerConfig(**settings).warnings  # type: ignore[arg-type]
    assert len(found) == len(warnings)
    assert all(text in warning for text, warning in zip(warnings, found, strict=True))
    assert "short" not in "".join(found).replace("shorter", "")


def test_the_command_line_takes_keys_from_everywhere(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the environment that child processes inherit has them no longer."""
    seen: list[ServerConfig] = []
    monkeypatch.setattr(
        server_run, "run_server", lambda start, config, say, child: seen.append(config) or child.end() or 0
    )
    monkeypatch.setenv("LORAPLEX_API_KEY", KEY)
    monkeypatch.setenv("LORAPLEX_ADMIN_API_KEY", ADMIN)
    file.write_text(FILE_KEY)
    serve("/model", keys=KeySettings(api_key=("flag-key",), admin_api_key_file=(str(file),)))
    assert (seen[0].api_keys, seen[0].admin_api_keys) == (("flag-key", KEY), (FILE_KEY, ADMIN))
    assert not any(name.startswith("LORAPLEX_") and "KEY" in name for name in os.environ)


# ----------------------------------------------------------------------------------- a server from its start to its end


class KeyedServer:
    """`loraplex serve` with secrets in its environment, at the loudest log level."""

    def __init__(self, folder: Path) -> None:
        self.state, self._log = folder / "state", folder / "log"
        keys = folder / "keys"
        keys.write_text(f"# comment\n{FILE_KEY}\n")
        keys.chmod(0o600)
        flags = ("--num-threads", "1", "--kv-cache-memory-bytes", "64MiB", "--port", "0", "--log-level", "debug")
        environment = {
            **os.environ,
            **SECRETS,
            "LORAPLEX_API_KEY": KEY,
            "LORAPLEX_ADMIN_API_KEY": ADMIN,
            "LORAPLEX_TEST": "harmless",
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "loraplex", "serve", str(assets_path() / "base"), *flags),
                    *("--served-model-name", "demo", "--lora-modules", f"upper={adapter_path('upper')}"),
                    *("--state-dir", str(self.state), "--api-key-file", str(keys), "--no-standby-engine"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env=environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match is not None, line + self.log
        self.url = match[0]

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "loraplex.frontend.process" in child.cmdline())

    def ask(self, method: str, path: str, key: str, body: object = None) -> httpx.Response:
        return httpx.request(method, self.url + path, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=60)

    def end(self) -> str:
        """What it printed after the ready line, and its log."""
        self.process.terminate()
        out, _ = self.process.communicate(timeout=60)
        return out + self.log


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyedServer]:
    server = KeyedServer(tmp_path)
    yield server
    server.process.kill()
    server.process.communicate()


def test_no_secret_leaves_the_server(server: KeyedServer) -> None:
    environ = server.engine.environ()
    assert environ["LORAPLEX_TEST"] == "harmless"
    seen = [" ".join(server.engine.cmdline()), json.dumps(environ)]
    for key in (KEY, FILE_KEY, ADMIN, f"{SENTINEL}-wrong"):
        for method, path, body in REQUESTS:
            answer = server.ask(method, path, key, body)
            seen += [answer.text, repr(answer.headers)]
    assert server.ask("POST", "/v1/adapters/upper/pin", ADMIN).status_code == 200
    assert server.ask("POST", "/v1/adapters/upper/unpin", FILE_KEY).status_code == 403
    events = server.ask("GET", "/v1/events?stream=false&kind=audit", ADMIN).text
    assert fingerprint(ADMIN) in events
    log = server.end()
    assert f"with key {fingerprint(ADMIN)}: 200" in log
    assert f"with key {fingerprint(FILE_KEY)}: 403" in log  # of refusals, one a second is an event
    journal = b"".join(path.read_bytes() for path in server.state.rglob("*") if path.is_file())
    assert b"upper" in journal
    for text in (*seen, events, log, journal.decode("latin-1")):
        assert SENTINEL not in text


REQUESTS = [
    ("POST", "/v1/completions", {"model": "upper", "prompt": "banana=", "max_tokens": 4}),
    ("POST", "/v1/completions", {"model": "none", "prompt": "x"}),
    ("POST", "/v1/chat/completions", {"model": "demo", "messages": []}),
    ("POST", "/v1/adapters", {"name": "x", "path": "/nowhere"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/adapters", None),
    ("GET", "/v1/events?stream=false", None),
    ("GET", "/v1/memory?adapters=true", None),
    ("GET", "/openapi.json", None),
    ("GET", "/metrics", None),
    ("GET", "/health", None),
    ("PUT", "/v1/adapters/upper", {"is_pinned": False}),
]
