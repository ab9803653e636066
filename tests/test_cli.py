"""The command line: its surface, its parsing, its errors, and what each command does.

tests/cli_surface.txt has every command with its flags and defaults: what scripts of others rely on. After a change that
is meant, write it again with `python -m tests.test_cli` and look at the difference.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
import torch
from cyclopts import App, Argument
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import loraplex
from loraplex import cli, doctor, lora_modules
from loraplex.adapters.registry import LoadTurn, OpenedAdapter
from loraplex.cli import app, parse_sizes
from loraplex.cli_help import GROUPS, command_paths, group_fields, shown_default, with_options
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig, setting
from loraplex.demo import run as demo_run
from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path
from loraplex.errors import (
    AdapterPathNotFoundError,
    ConfigError,
    EngineShutdownError,
    InvalidRequestError,
    JournalError,
    LoraplexError,
    ModelNotFoundError,
)
from loraplex.frontend.async_engine import AsyncEngine
from loraplex.frontend.supervisor import Supervision
from loraplex.kernels.native.choice import NoLibrary, open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.lora_modules import load_modules, parse_lora_modules
from loraplex.processes.engine_child import EngineChild
from loraplex.serve import RaySettings
from loraplex.server import run as server_run
from loraplex.server.app import create_app
from loraplex.server.config import ServerConfig, ServerSettings
from loraplex.testing import FakeAsyncEngine
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention
from tests.server.live_server import LiveServer

REPOSITORY = Path(__file__).parents[1]
SURFACE = Path(__file__).with_name("cli_surface.txt")
BASE = str(assets_path() / "base")
UPPER = str(adapter_path("upper"))


# ---------------------------------------------------------------------------------------------------------- the surface


def commands() -> Iterator[tuple[tuple[str, ...], App]]:
    """Every command that does something, with the words that call it."""
    for path in command_paths(app):
        yield path, reduce(lambda parent, name: parent[name], path, app)


def arguments_of(command: App) -> list[Argument]:
    """Without the dataclasses that only bundle others."""
    collection = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    return [argument for argument in collection if argument.show]


def surface() -> str:
    lines = []
    for path, command in commands():
        lines.append(" ".join(("loraplex", *path)))
        for argument in arguments_of(command):
            hint = getattr(argument.hint, "__name__", None) if isinstance(argument.hint, type) else None
            default = "" if argument.required else f" = {argument.field_info.default!r}"
            lines.append(f"    {' '.join(argument.names)}: {hint or argument.hint}{default}")
        lines.append("")
    return "\n".join(lines)


def test_the_surface_is_frozen() -> None:
    assert surface() == SURFACE.read_text(), (
        "the command line has changed: if that is meant, run `python -m tests.test_cli` and look at the difference; "
        "a flag that went or has another default breaks the scripts of others and belongs in CHANGELOG.md"
    )


def test_commands_are_those_of_the_docs() -> None:
    assert [" ".join(path) for path, _ in commands()] == [
        "adapter inspect",
        "adapter merge",
        "adapter export",
        "adapter clone",
        "state check",
        "state repair",
        "calibrate",
        "simulate",
        "plan",
        *(f"tenant {verb}" for verb in ("create", "change", "list", "delete", "revoke", "share", "shares")),
        *(f"key {verb}" for verb in ("create", "list", "revoke")),
        "model inspect",
        "serve",
        "route",
        "generate",
        "demo",
        "bench",
        "profile",
        "top",
        "doctor",
    ]


NOT_FOR_HELP = ("torch", "fastapi", "pydantic", "numpy", "transformers", "sqlalchemy", "huggingface_hub", "uvicorn")


@pytest.mark.parametrize("words", [(), *(each for each, _ in commands())], ids=" ".join)
def test_help_imports_no_engine_and_no_server(words: tuple[str, ...]) -> None:
    """And that of all commands none of their modules."""
    code = (
        "import sys\n"
        "from loraplex.cli import app\n"
        f"app([*{words!r}, '--help'], exit_on_error=False, result_action='return_value')\n"
        "print('IMPORTED', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    imported = done.stdout.partition("IMPORTED")[2].split()
    assert not {name.partition(".")[0] for name in imported} & set(NOT_FOR_HELP)
    if not words:
        own = {name for name in imported if name.startswith("loraplex.")}
        assert own == {"loraplex.cli", "loraplex.cli_help", "loraplex.errors"}


def test_the_help_of_all_commands_is_that_of_each() -> None:
    for name, place, text in cli.COMMANDS:
        module, _, attribute = place.partition(":")
        target = getattr(importlib.import_module(module), attribute)
        own = target.help if isinstance(target, App) else inspect.cleandoc(target.__doc__).partition("\n\n")[0]
        assert text == " ".join(own.split()), name


Capture = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the entry point with arguments, in this process: (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["loraplex", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0 if code is None else 1, captured.out, captured.err

    return call


@pytest.mark.parametrize(("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()])
def test_every_command_has_help(run: Run, path: tuple[str, ...], command: App) -> None:
    code, out, err = run(*path, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: loraplex {' '.join(path)}" in out
    words = re.sub(r"[\s│]+", " ", out)
    for argument in arguments_of(command):
        assert argument.name in words
        assert argument.parameter.help, f"{argument.name} of {' '.join(path)} has no help text"


def headings(out: str) -> list[str]:
    return re.findall(r"^╭─ (.+?) ─+╮$", out, re.MULTILINE)


def test_help_of_serve_has_groups(run: Run) -> None:
    """Every flag has a group that is meant, in the order of `cli_help.GROUPS`; none is long."""
    out = run("serve", "--help")[1]
    others = {"Profile", "Workload", "Fleet", "Service level"}
    assert headings(out) == ["Arguments", *(group for group in GROUPS if group not in others)]
    for panel in out.split("╭─ ")[1:]:
        assert len(re.findall(r"^│ --", panel, re.MULTILINE)) <= 20, panel.partition(" ─")[0]


@pytest.mark.parametrize("path", [path for path, _ in commands()], ids=" ".join)
def test_flags_of_settings_are_in_a_group(run: Run, path: tuple[str, ...]) -> None:
    """What is a command's own may stand under "Parameters"."""
    out = run(*path, "--help")[1]
    assert set(headings(out)) <= {"Arguments", "Parameters", *GROUPS}
    assert path in (("serve",), ("route",)) or "Server" not in headings(out)


def test_a_field_is_in_the_group_of_the_one_before_it() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        first: int = setting(1, "a")
        second: int = setting(2, "b", group="Limits", flag="--other")
        third: int = setting(3, "c")

    group_fields(Settings, "Server")
    marks = [hint.__metadata__[0] for hint in get_type_hints(Settings, include_extras=True).values()]
    assert [mark.group[0].name for mark in marks] == ["Server", "Limits", "Limits"]
    assert [mark.name for mark in marks] == [(), ("--other",), ()]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, None), ((), None), (True, "on"), (0, "0"), (2**20, "1MiB"), (3 << 30, "3GiB"), (2**20 + 1, "1048577")],
)
def test_defaults_are_shown_as_they_are_written(value: object, shown: str | None) -> None:
    assert shown_default(value) == shown


@pytest.mark.parametrize(("path", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()])
def test_no_flag_has_two_meanings(path: tuple[str, ...], command: App) -> None:
    flags = Counter(name for argument in arguments_of(command) for name in argument.names)
    assert [name for name, count in flags.items() if count > 1] == []


@pytest.mark.parametrize("arguments", [(), ("--help",), ("adapter",), ("adapter", "--help")])
def test_help_without_a_command(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "Usage: loraplex" in out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"{loraplex.__version__}\n", "")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], 'Command "serve" parameter MODEL requires an argument.'),
        (["nope"], 'Unknown command "nope".'),
        (["sevre"], 'Did you mean "serve"?'),
        (["inspect", UPPER], 'Unknown command "inspect". Did you mean "adapter inspect" or "model inspect"?'),
        (["repair"], 'Unknown command "repair". Did you mean "state repair"?'),
        (["adapter", "inspct", UPPER], 'Did you mean "inspect"?'),
        (["serve", BASE, "--nope"], "Unknown option: --nope."),
        (["serve", BASE, "--port", "abc"], 'unable to convert "abc" into int'),
        (["serve", BASE, "--port", "99999"], "error: --port must be 0..65535, got 99999"),
        (["serve", BASE, "--max-num-seqs", "0"], "error: --max-num-seqs must be >= 1, got 0"),
        (["serve", BASE, "--max-lora-rank", "0"], "error: --max-lora-rank must be 1..4096, got 0"),
        (["serve", BASE, "--max-loras", "3", "--max-cpu-loras", "2"], "--max-cpu-loras (2) must be >= --max-loras (3)"),
        (["serve", BASE, "--adapter-floor", "1GiB"], "error: --adapter-floor needs --device-memory: without it"),
        (["serve", BASE, "--host", ""], "error: --host is empty"),
        (["serve", BASE, "--port", "0", "--ssl-keyfile", "/x"], "--ssl-certfile"),
        (["serve", BASE, "--lora-modules", "x"], "adapter 'x': write name=path"),
        (["serve", BASE, "--lora-modules", "x=/a", "x=/b"], "adapter 'x' is given twice, as '/a' and as '/b'"),
        (["serve", BASE, "--lora-modules", "/a=/b", "--lora-paths", "/a"], "--lora-modules or --lora-paths"),
        (["serve", BASE, "--served-model-name", "b", "--lora-modules", "b=/a"], "would select the base model 'b'"),
        (["serve", BASE, "--lora-modules", "x@2=/a"], "--lora-modules or --lora-paths, path '/a': adapter name 'x@2'"),
        (["serve", BASE, "--lora-modules", " x=/a"], "has control or invisible characters, or a space at an end"),
        (["serve", BASE, "--no-enable-lora", "--lora-modules", "x=y"], "adapters are given, but LoRA is off"),
        (["serve", BASE, "--no-enable-lora", "--max-loras", "2"], "settings of LoRA are given, but LoRA is off"),
        (["serve", BASE, "--api-key", "two words"], "an API key is empty or has a character"),
        (["serve", BASE, "--kv-cache-memory-bytes", "2XiB"], 'unable to convert "2XiB" into int'),
        (["generate", "/nowhere", "hi"], "model '/nowhere': there is no such directory"),
        (["generate", BASE], "parameter PROMPTS requires an argument"),
        (["generate", BASE, "hi", "--adapter", "/nowhere"], "adapter '/nowhere': no such directory"),
        (["generate", BASE, "hi", "--adapter", UPPER, "--no-enable-lora"], "LoRA is off"),
        (["generate", BASE, "hi", "--temperature", "-1"], "temperature must be in [0, 100], got -1.0"),
        (["generate", BASE, "x" * 999], "the prompt has 1000 tokens and the model's length is"),
        (["bench", BASE, "--patterns", "zipf"], "pattern 'zipf' is unknown"),
        (["bench", BASE, "--runs", "0"], "error: --runs must be >= 1, got 0"),
        (["profile"], "give a model to run here, or the --url of a running server"),
        (["profile", BASE, "--url", "http://127.0.0.1:1"], "not both: leave out "),
        (["profile", BASE, "--seconds", "3"], "--seconds is for a running server"),
        (["profile", BASE, "--report", "/nowhere/x.html"], "there is no directory '/nowhere'"),
        (["profile", "--url", "http://127.0.0.1:1", "--pattern", "skewed"], "a running server has its own settings"),
        (["profile", "--url", "http://127.0.0.1:1", "--dtype", "float32"], "a running server has its own settings"),
        (["profile", "--url", "http://127.0.0.1:1", "--seconds", "0"], "error: --seconds must be > 0"),
        (["profile", "--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer: Connection refused"),
        (
            ["profile", "--url", "nowhere"],
            "error: --url must be like http://127.0.0.1:8000 or 127.0.0.1:8000, got 'nowhere'",
        ),
        (["top", "http://127.0.0.1:1", "--once"], "http://127.0.0.1:1 does not answer: Connection refused"),
        (["top", "--interval", "0"], "error: --interval must be 0.1 to 3600 seconds, got 0.0"),
        (["demo", "--each", "0"], "error: --each must be 1..28, got 0"),
        (["demo", "--each", "29"], "each must be 1..28, got 29: there are no more phrases"),
        (["generate", f"/{'x' * 300}", "hi"], "xxx': File name too long"),
        (["serve", BASE, "--port", "0", "--adapter-root", f"/{'x' * 300}"], "xxx': File name too long"),
        (["state", "check", f"/{'x' * 300}"], "xxx': File name too long"),
        (["adapter", "inspect", UPPER, "--base", f"/{'x' * 300}"], "xxx': File name too long"),
        (["adapter", "inspect", "/nowhere"], "adapter '/nowhere': no such directory"),
        (["adapter", "inspect", UPPER, "--base", "/nowhere"], "model '/nowhere': there is no such directory"),
    ],
    ids=lambda value: " ".join(value).replace(str(assets_path()), "")[:60] if isinstance(value, list) else "",
)
def test_an_error_is_one_line_on_stderr_with_exit_code_1(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["adapter 'max_loras': no", "max_loras.json", "/max_loras/x", "x_max_loras", "a port is taken"]
)
def test_only_fields_become_options(text: str) -> None:
    assert with_options(text, app["serve"]) == text


def test_an_error_of_the_start_names_options() -> None:
    """A server finds some only when it binds: they are printed elsewhere."""
    command = [sys.executable, "-m", "loraplex", "serve", BASE, "--port", "0", "--max-connections", "99999999"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr.startswith("error: --max-connections ")) == (1, True), ended.stderr


def test_the_same_as_a_program() -> None:
    """The way in through `python -m loraplex`, with the real streams."""
    ended = subprocess.run(
        [sys.executable, "-m", "loraplex", "serve"], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == 'error: Command "serve" parameter MODEL requires an argument.\n'


def test_a_name_that_the_streams_cannot_say_is_escaped(tmp_path: Path) -> None:
    """A server with `--served-model-name módel` ended when it was ready."""
    folder = tmp_path / "mó\udcff"
    shutil.copytree(UPPER, folder)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    for path, code in ((folder, 0), (tmp_path / "ó", 1)):
        ended = subprocess.run(
            [sys.executable, "-m", "loraplex", "adapter", "inspect", str(path)],
            capture_output=True,
            timeout=120,
            check=False,
            env=environment,
        )
        assert ended.returncode == code, ended.stderr
        assert b"Traceback" not in ended.stderr
        assert b"\\xf3" in (ended.stderr if code else ended.stdout)


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("command", [("adapter", "inspect", UPPER, "--json"), ("--version",), ("bench", "--help")])
def test_a_reader_that_is_gone_is_no_traceback(command: tuple[str, ...], unbuffered: str) -> None:
    """`loraplex bench --help | head -1`: met while printing, by rich while it prints, or at the end."""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "loraplex", *command],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_what_an_adapter_says_is_not_obeyed_by_the_terminal(run: Run, tmp_path: Path) -> None:
    """Names of its tensors are in the refusal."""
    save_file({"\x1b[2Jx.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    code, _, err = run("adapter", "export", str(tmp_path), "--output", str(tmp_path / "out"))
    assert code == 1
    assert "\x1b" not in err
    assert "\\x1b[2Jx" in err


def test_ctrl_c_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(each: int, seed: int, device: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "run_demo", interrupted)
    assert run("demo") == (130, "", "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["serve", "/nowhere", "--port", "0"], 1)])
def test_streams_may_be_closed(closed: str, arguments: list[str], code: int) -> None:
    """A socket that got the number of one would end the process: libuv closes nothing below 3."""
    script = f'exec "$@" {closed}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "loraplex", *arguments]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr.count("error: ")) == (code, code), ended.stderr
    assert "Traceback" not in ended.stderr


# -------------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("16k", 16_000),
        ("16Ki", 2**14),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_sizes(["serve", "--kv-cache-memory-bytes", text]) == [
        "serve",
        "--kv-cache-memory-bytes",
        str(num_bytes),
    ]
    assert parse_sizes([f"--host-memory-bytes={text}"]) == [f"--host-memory-bytes={num_bytes}"]


@pytest.mark.parametrize("text", ["1024", "2XiB", "-1GiB", "GiB", "", "1e9", "1GiB extra"])
def test_what_is_no_size_stays(text: str) -> None:
    """A plain number is bytes; the rest is refused by the command."""
    assert parse_sizes(["--kv-cache-memory-bytes", text]) == ["--kv-cache-memory-bytes", text]


def test_only_flags_of_bytes_have_sizes() -> None:
    """A prompt or a name that looks like a size is one."""
    arguments = ["generate", "2GiB", "--seed", "4GB", "--adapter", "1MiB", "max-body-bytes", "1MiB"]
    assert parse_sizes(arguments) == arguments


@given(st.lists(st.text(st.characters(blacklist_characters="=", codec="utf-8"), max_size=8)))
def test_arguments_without_sizes_are_left_alone(arguments: list[str]) -> None:
    arguments = [argument for argument in arguments if not argument.endswith("-bytes")]
    assert parse_sizes(arguments) == arguments


def test_lora_modules() -> None:
    given = ["sql=/adapters/sql", '{"name": "chat", "path": "org/chat"}', ' {"path": "/a=b", "name": "c"}', "x=/p=q"]
    assert parse_lora_modules(given) == (
        ("sql", "/adapters/sql"),
        ("chat", "org/chat"),
        ("c", "/a=b"),
        ("x", "/p=q"),
    )
    assert parse_lora_modules([]) == ()


def test_a_path_alone_is_its_own_name_where_sglang_writes_it() -> None:
    assert parse_lora_modules(["/adapters/sql", "a=b"], is_name_optional=True) == (
        ("/adapters/sql", "/adapters/sql"),
        ("a", "b"),
    )


def test_the_base_of_a_lora_module_is_checked() -> None:
    text = '{"name": "sql", "path": "/sql", "base_model_name": "llama"}'
    assert parse_lora_modules([text], base_names=("base", "llama")) == (("sql", "/sql"),)
    with pytest.raises(ConfigError, match="adapter 'sql': base_model_name is 'llama', this base model is base"):
        parse_lora_modules([text], base_names=("base",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", "write name=path"),
        ("=path", "write name=path"),
        ("sql=", "write name=path"),
        ("", "write name=path"),
        ("{", "not JSON with name and path"),
        pytest.param('{"a":' * 20_000 + "1" + "}" * 20_000, "not JSON with name and path", id="deep"),
        ('{"name": "sql"}', "not JSON with name and path"),
        ('{"name": "sql", "path": 3}', "name and path must be texts"),
        ('{"name": "", "path": "/sql"}', "name and path must be texts"),
        ('{"name": "sql", "path": "/sql", "rank": 8, "alpha": 1}', "adapter 'sql': unknown keys alpha, rank"),
    ],
)
def test_lora_modules_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_lora_modules([text])


def test_a_name_without_a_path_is_refused_where_a_path_alone_is_not() -> None:
    with pytest.raises(ConfigError, match="write name=path"):
        parse_lora_modules(["sql="], is_name_optional=True)


# ---------------------------------------------------------------------------------------------------------------- serve


class Served:
    """What `serve` would have started: the settings of server and engine, and the adapters loaded at the start."""

    def __init__(self) -> None:
        self.server: ServerConfig
        self.engine: EngineConfig
        self.arguments: dict[str, Any] = {}
        self.loaded: list[tuple[str, str]] = []
        self.is_shut_down = False
        self.registry = None

    async def load_adapter(self, name: str, path: str, turn: LoadTurn) -> None:
        if path == "/bad":
            raise ModelNotFoundError("bad")
        self.loaded.append((name, path))

    async def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    seen = Served()

    async def start(config: EngineConfig, **arguments: Any) -> Served:
        seen.engine, seen.arguments = config, arguments
        return seen

    def run_server(
        start_engine: Callable[[], Any], config: ServerConfig, say: Callable[..., str], child: EngineChild
    ) -> int:
        child.end()
        seen.server = config
        asyncio.run(start_engine())
        return 7

    monkeypatch.delenv("LORAPLEX_API_KEY", raising=False)
    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setattr(server_run, "run_server", run_server)
    return seen


def test_serve_with_defaults(run: Run, served: Served) -> None:
    assert run("serve", "/models/llama/") == (7, "", "")
    assert served.engine == EngineConfig(model="/models/llama/")
    assert served.server == ServerConfig(served_model_names=("/models/llama",))
    assert served.engine.adapter_roots is None  # on loopback the load routes may read anything
    assert served.loaded == []


def test_serve_passes_everything_on(run: Run, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_API_KEY", "k2,,k3")
    run(
        *("serve", "org/model", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k4"),
        *("--lora-modules", "x=/x", '{"name": "y", "path": "/y", "base_model_name": "b"}', "--lora-paths", "/z"),
        *("--adapter-root", "/roots", "--host", "0.0.0.0", "--port", "0", "--max-num-seqs", "3", "--no-access-log"),
        *("--kv-cache-memory-bytes", "1MiB", "--adapter-memory-bytes=2MB", "--max-lora-rank", "8"),
        *("--engine-timeout-s", "90", "--no-standby-engine", "--max-engine-restarts", "4"),
    )
    assert served.server == ServerConfig(
        host="0.0.0.0",
        port=0,
        access_log=False,
        served_model_names=("a", "b"),
        api_keys=("k1", "k4", "k2", "k3"),
        adapter_roots=("/roots",),
        engine_timeout_s=90.0,
        standby_engine=False,
        max_engine_restarts=4,
    )
    assert replace(served.arguments["supervision"], child=None) == Supervision(90.0, has_standby=False, max_restarts=4)
    assert served.engine == EngineConfig(
        model="org/model",
        max_num_seqs=3,
        kv_cache_memory_bytes=2**20,
        lora=LoRAConfig(adapter_memory_bytes=2 * 10**6, max_lora_rank=8),
        adapter_roots=("/roots", "/x", "/y", "/z"),
    )
    assert served.arguments["served_model_name"] == "a"
    assert served.arguments["base_names"] == ("a", "b")
    assert served.loaded == [("x", "/x"), ("y", "/y"), ("/z", "/z")]


def test_serve_without_lora(run: Run, served: Served) -> None:
    run("serve", "/model", "--no-enable-lora")
    assert served.engine.lora is None


@pytest.mark.parametrize(("given", "name", "path"), [("x=/x", "x", "/x"), ("/y/", "/y", "/y/")])
def test_a_merged_adapter_has_the_place_of_the_base_model(
    run: Run, served: Served, given: str, name: str, path: str
) -> None:
    assert run("serve", "/m", "--served-model-name", "a", "b", "--merge-adapter", given)[0] == 7
    assert served.engine == EngineConfig(model="/m", lora=None, merge_adapter=path)
    assert served.server == ServerConfig(served_model_names=(name,), merged_into=("a", "b"))
    assert served.arguments["served_model_name"] == name


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--merge-adapter", "x=/x", "--lora-modules", "y=/y"], "--merge-adapter serves one adapter alone"),
        (["--merge-adapter", "x=/x", "--max-loras", "3"], "--merge-adapter serves one adapter alone"),
        (["--merge-adapter", "/m=/x"], "would select the base model '/m'"),
        (["--merge-adapter", ""], "must be a non-empty string"),
    ],
    ids=str,
)
def test_a_merged_adapter_that_cannot_be(run: Run, served: Served, flags: list[str], error: str) -> None:
    code, out, err = run("serve", "/m", *flags)
    assert (code, out) == (1, "")
    assert error in err


def test_made_adapters_may_be_read_where_roots_are_bounded(run: Run, served: Served, tmp_path: Path) -> None:
    made = tmp_path / "made"
    run("serve", "/m", "--adapter-root", "/roots", "--lora-modules", "x=/x", "--adapter-output-dir", str(made))
    assert served.engine is not None
    assert served.engine.adapter_roots == ("/roots", "/x", str(made))
    assert made.is_dir()


def test_an_adapter_that_fails_at_the_start_ends_the_engine(run: Run, served: Served) -> None:
    code, _, err = run("serve", "/model", "--lora-modules", "x=/x", "y=/bad")
    assert (code, err.splitlines()[-1]) == (1, "error: adapter 'y' of --lora-modules or --lora-paths: bad")
    assert served.is_shut_down


# ------------------------------------------------------------------------------------------- the adapters of the start


BAD = AdapterPathNotFoundError("/bad is not\nthere")


class SlowSources:
    """An engine whose sources are opened when a test says so; `opening` are those that are being opened, in order."""

    def __init__(self, **errors: LoraplexError) -> None:
        self.engine = FakeAsyncEngine(errors_by_path={f"/{name}": error for name, error in errors.items()})
        assert self.engine.registry is not None
        self.registry = self.engine.registry
        self.gates = {f"/{name}": threading.Event() for name in "abcdef"}
        self.opening: list[str] = []
        self.progress: list[tuple[int, int]] = []
        loader = self.registry._loader
        open_adapter = loader._open_adapter

        def slowly(path: str) -> OpenedAdapter:
            self.opening.append(path)
            assert self.gates[path].wait(60)
            return open_adapter(path)

        loader._open_adapter = slowly

    def load(self, names: str, num_at_once: int, is_skipping: bool = False) -> asyncio.Task[None]:
        modules = [(name, f"/{name}") for name in names]
        on_progress = lambda done, total: self.progress.append((done, total))  # noqa: E731
        return asyncio.ensure_future(load_modules(self.engine, modules, num_at_once, is_skipping, on_progress))

    async def until_opening(self, *paths: str) -> None:
        while set(self.opening) != set(paths):
            await asyncio.sleep(0.001)


async def test_adapters_of_the_start_are_loaded_side_by_side_and_listed_in_their_order() -> None:
    slow = SlowSources()
    loads = slow.load("fbdace", num_at_once=3)
    await slow.until_opening("/f", "/b", "/d")
    for path in ("/d", "/b", "/a", "/c", "/e"):
        slow.gates[path].set()
    await asyncio.sleep(0.05)
    assert slow.registry.names() == (), "they come after the first"
    assert len(slow.opening) == 3, "three at a time"
    slow.gates["/f"].set()
    await loads
    assert slow.registry.names() == tuple("fbdace")
    ids = [ref.adapter_id for ref in slow.registry.refs().values()]
    assert ids == sorted(ids)
    assert slow.progress == [(done, 6) for done in range(1, 7)]


async def test_the_first_bad_adapter_of_the_list_is_the_error_and_no_further_load_begins() -> None:
    slow = SlowSources(b=BAD, c=InvalidRequestError("also bad"))
    loads = slow.load("abcdef", num_at_once=3)
    await slow.until_opening("/a", "/b", "/c")
    for path in ("/c", "/b", "/a"):
        slow.gates[path].set()
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError, match="adapter 'b' of --lora-modules or --lora-paths: /bad is not"):
        await loads
    assert set(slow.opening) == {"/a", "/b", "/c"}


async def test_bad_adapters_are_skipped_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowSources(b=BAD, e=BAD)
    for gate in slow.gates.values():
        gate.set()
    await slow.load("abcde", num_at_once=2, is_skipping=True)
    assert slow.registry.names() == ("a", "c", "d")
    assert slow.registry.skipped == {"b": str(BAD), "e": str(BAD)}
    skipped = [each.getMessage() for each in caplog.records if "skipped" in each.getMessage()]
    assert skipped == [
        f"adapter {name!r} of --lora-modules or --lora-paths is skipped: /bad is not there" for name in "be"
    ]
    transport = httpx.ASGITransport(create_app(slow.engine, ServerConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert 'loraplex:adapters_skipped{engine="0",model_name="base"} 2.0' in (await client.get("/metrics")).text
        slow.engine.errors_by_path.clear()
        assert (await client.post("/v1/adapters", json={"name": "b", "path": "/b"})).is_success
    assert list(slow.registry.skipped) == ["e"]


@pytest.mark.parametrize("error", [EngineShutdownError("over"), JournalError("disk full")])
async def test_an_error_of_the_engine_is_no_bad_adapter(error: LoraplexError) -> None:
    slow = SlowSources(a=error)
    slow.gates["/a"].set()
    with pytest.raises(ConfigError, match="adapter 'a' of"):
        await slow.load("a", num_at_once=2, is_skipping=True)
    assert slow.registry.skipped == {}


def test_on_bad_adapter_is_passed_on(run: Run, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []

    async def load(_engine: Any, _modules: Any, num_at_once: int, is_skipping: bool, _on_progress: Any) -> None:
        seen.append((num_at_once, is_skipping))

    monkeypatch.setattr(lora_modules, "load_modules", load)
    run("serve", "/model", "--lora-modules", "x=/x")
    run("serve", "/model", "--lora-modules", "x=/x", "--on-bad-adapter", "skip", "--num-loader-threads", "5")
    assert seen == [(2, False), (5, True)]
    code, _, err = run("serve", "/model", "--on-bad-adapter", "ignore")
    assert (code, "--on-bad-adapter must be one of ('refuse', 'skip'), got 'ignore'" in err) == (1, True)


def test_every_option_of_a_server_is_in_the_documentation() -> None:
    """As it is written, or with `--no-`. The page that is made of all options does not count."""
    docs = REPOSITORY / "docs"
    pages = [REPOSITORY / "README.md", *docs.glob("*.md"), *(docs / "guides").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    missing = [
        each.names[0] for each in arguments_of(app["serve"]) if each.name.startswith("--") and not named & {*each.names}
    ]
    assert missing == []


def test_every_setting_is_a_flag() -> None:
    """A field of the settings that no flag sets could never be used."""
    given = {
        "serve": (ServerSettings, EngineSettings, LoRAConfig, RaySettings),
        "generate": (EngineSettings, LoRAConfig),
    }
    for name, kinds in given.items():
        flags = {argument.name for argument in app[name].assemble_argument_collection()}
        for kind in kinds:
            named = {each.metadata.get("flag") or "--" + each.name.replace("_", "-") for each in fields(kind)}
            assert named <= flags


# ------------------------------------------------------------------------------------------------------------- generate


def test_generate(run: Run) -> None:
    code, out, err = run("generate", BASE, "banana=", "tiger=", "--adapter", UPPER, "--num-threads", "1")
    assert (code, out, err) == (0, "banana=BANANA\ntiger=TIGER\n", "")


def test_generate_without_an_adapter(run: Run) -> None:
    """The demo's base model copies."""
    assert run("generate", BASE, "banana=", "--no-enable-lora", "--num-threads", "1") == (0, "banana=banana\n", "")


def test_generate_draws_the_same_with_the_same_seed(run: Run) -> None:
    arguments = ("generate", BASE, "banana=", "--temperature", "3", "--max-tokens", "12", "--num-threads", "1")
    first, same, other = (run(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == same != other


# ----------------------------------------------------------------------------------------------------------------- demo


def test_the_demo_is_right(run: Run) -> None:
    code, out, err = run("demo", "--each", "1")
    assert (code, err) == (0, "")
    assert "12 of 12 right" in out
    assert "WRONG" not in out
    for task in ADAPTERS:
        assert task.description in out


def test_the_demo_says_what_is_wrong(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one adapter under all names, all but three of twelve answers are another task's."""
    monkeypatch.setattr(demo_run, "adapter_path", lambda name: adapter_path("reverse"))
    code, out, _ = run("demo", "--each", "1")
    assert code == 1
    assert "3 of 12 right" in out
    assert out.count("WRONG") == 9


def test_the_demo_takes_a_device(run: Run) -> None:
    code, _, err = run("demo", "--each", "1", "--device", "elsewhere")
    assert code == 1
    assert "device 'elsewhere' cannot be used here" in err


def test_the_demo_as_a_server(run: Run, served: Served) -> None:
    assert run("demo", "--serve", "--port", "0", "--device", "cpu") == (7, "", "")
    assert served.engine.device == "cpu"
    assert served.server.served_model_names == ("demo",)
    assert served.server.port == 0
    assert served.engine.model == BASE
    assert served.loaded == [(task.name, str(adapter_path(task.name))) for task in ADAPTERS]


# ---------------------------------------------------------------------------------------------------------------- bench


def test_bench(run: Run) -> None:
    sizes = ("--requests", "2", "--prompt-len", "4", "--output-len", "2", "--runs", "1", "--num-threads", "1")
    code, out, err = run("bench", BASE, UPPER, str(adapter_path("sort")), "--patterns", "base", "distinct", *sizes)
    assert (code, err) == (0, "")
    assert "2 requests of 4+2 tokens" in out
    assert "distinct" in out


# -------------------------------------------------------------------------------------------------------------- profile


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with LiveServer(FakeAsyncEngine({"sql": "/adapters/sql"})) as server:
        yield server


def test_a_profile_of_a_running_server(run: Run, live: LiveServer, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    code, out, err = run("profile", "--url", live.url, "--seconds", "0.01", "--report", str(page))
    assert (code, err) == (0, "")
    assert "0 requests and 0 tokens in" in out
    assert "info: Only 0 requests finished" in out
    assert out.endswith(f"report: {page}\n")
    assert "<h2>Findings</h2>" in page.read_text()


def test_a_profile_as_json(run: Run, live: LiveServer) -> None:
    flags = ("--seconds", "0.01", "--json", "--first-token-s", "0.5")
    code, out, err = run("profile", "--url", live.url, *flags)
    report = json.loads(out)
    assert (code, err, report["targets"]) == (0, "", {"first_token_s": 0.5, "inter_token_s": 0.1})
    assert [adapter["name"] for adapter in report["adapters"]] == ["sql"]


def test_ctrl_c_ends_a_profile_with_its_report(run: Run, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loraplex.views.live_profile.time.sleep", interrupted)
    code, out, _ = run("profile", "--url", live.url, "--seconds", "3600", "--json")
    assert (code, json.loads(out)["requests"]["num_requests"]) == (0, 0)


def test_a_second_profile_is_an_error(run: Run, live: LiveServer) -> None:
    httpx.post(live.url + "/v1/profile/start", json={})
    code, out, err = run("profile", "--url", live.url, "--seconds", "0.01")
    assert (code, out) == (1, "")
    assert "409: a profile runs already" in err


def test_a_profile_of_a_model_has_a_report_too(run: Run, tmp_path: Path) -> None:
    sizes = ("--requests", "2", "--prompt-len", "4", "--output-len", "3", "--num-threads", "1")
    page = tmp_path / "out.html"
    code, out, err = run("profile", BASE, UPPER, "--pattern", "uniform", *sizes, "--json", "--report", str(page))
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert [adapter["name"] for adapter in report["adapters"]] == ["1-upper"]
    assert "1-upper" in page.read_text()


def test_top(run: Run, live: LiveServer) -> None:
    code, out, err = run("top", live.url, "--once")
    assert (code, err) == (0, "")
    assert "loraplex top" in out
    assert "sql" in out


# ------------------------------------------------------------------------------------------------------ adapter inspect


@pytest.fixture
def copy_of_upper(tmp_path: Path) -> Path:
    return Path(shutil.copytree(UPPER, tmp_path / "copy"))


def change_config(adapter: Path, **fields: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_inspect_a_good_adapter(run: Run) -> None:
    code, out, err = run("adapter", "inspect", UPPER)
    assert (code, err) == (0, "")
    assert out.startswith(f"{UPPER}: would be loaded (not checked against a base model; give one with --base)\n")
    code, out, err = run("adapter", "inspect", UPPER, "--base", BASE)
    assert (code, err) == (0, "")
    assert out.startswith(f"{UPPER}: would be loaded\n")
    assert "honoured r = " in out


def test_inspect_checks_the_text_as_a_load_does(run: Run, copy_of_upper: Path) -> None:
    """The reasons are those of the server; a base is needed, and --no-adapter-text leaves the files alone."""
    template = copy_of_upper / "chat_template.jinja"
    template.write_text("{{ messages")
    tokenizer = json.loads((Path(BASE) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copy_of_upper / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, out, _ = run("adapter", "inspect", str(copy_of_upper), "--base", BASE)
    assert code == 1
    assert f"refused: token {first!r} of its tokenizer has id {vocabulary[first]}" in out
    (copy_of_upper / "tokenizer.json").unlink()
    code, out, _ = run("adapter", "inspect", str(copy_of_upper), "--base", BASE)
    assert code == 1
    assert "is refused" in out
    assert "refused: chat template 'default': the chat template is wrong at line 1: " in out
    assert run("adapter", "inspect", str(copy_of_upper))[0] == 0
    assert run("adapter", "inspect", str(copy_of_upper), "--base", BASE, "--no-adapter-text")[0] == 0
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    code, out, err = run("adapter", "inspect", str(copy_of_upper), "--base", BASE)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("task", ADAPTERS, ids=lambda task: task.name)
def test_the_demos_adapters_fit_their_base(run: Run, task: Any) -> None:
    assert run("adapter", "inspect", str(adapter_path(task.name)), "--base", BASE)[0] == 0


def test_merge_and_export_write_adapters_that_fit_the_base(run: Run, tmp_path: Path) -> None:
    pair = [f"{adapter_path('upper')}=0.7", f"{adapter_path('reverse')}=-0.3"]
    merged = tmp_path / "both"
    code, out, err = run(
        "adapter", "merge", *pair, "--output", str(merged), "--combination", "ties_svd", "--density", "0.5"
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"{merged}: ties_svd, density=0.5: 0.7 * ")
    assert run("adapter", "inspect", str(merged), "--base", BASE)[0] == 0
    code, out, err = run("adapter", "export", str(merged), "--output", str(tmp_path / "copy"))
    assert (code, err) == (0, "")
    digests = [run("adapter", "inspect", str(path), "--json")[1] for path in (merged, tmp_path / "copy")]
    first, second = (json.loads(text)["adapter_digest"] for text in digests)
    assert first == second


def test_a_merge_says_the_rank_where_there_is_one(run: Run, tmp_path: Path) -> None:
    out = run("adapter", "merge", f"{UPPER}=1", "--output", str(tmp_path / "lora"))[1]
    rank = json.loads((tmp_path / "lora/adapter_config.json").read_text())["r"]
    assert f", rank {rank}, " in out
    config = {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        tensors = {"base_model.model.model.layers.0.self_attn.k_proj.ia3_l": torch.ones(8, 1)}
        save_file(tensors, tmp_path / name / "adapter_model.safetensors")
    merged = tmp_path / "both"
    code, out, err = run(
        "adapter", "merge", f"{tmp_path / 'one'}=0.5", f"{tmp_path / 'two'}=0.5", "--output", str(merged)
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"{merged}: linear: 0.5 * ")
    assert ", rank " not in out
    assert out.endswith(", 32 bytes\n")
    assert (merged / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["merge", UPPER, "--output", "out"], "write PATH=WEIGHT"),
        (["merge", f"{UPPER}=1", "--output", BASE], "is there already"),
        (["merge", f"{UPPER}=1", "--output", "/nowhere/out"], "/nowhere is no directory"),
        (["merge", "/nowhere=1", "--output", "out"], "adapter '/nowhere': no such directory"),
        (["merge", f"{UPPER}=1", "--output", "out", "--density", "0.5"], "--density is of no use with linear"),
        (["merge", f"{UPPER}=1", "--output", "out", "--max-merge-bytes", "1KiB"], "1024 are the limit"),
        (["export", UPPER], "give --output, or the --url"),
        (["export", UPPER, "--output", "out", "--url", "localhost:1"], "give --output, or the --url"),
        (["export", "sql", "--url", "http://127.0.0.1:9"], "did not answer"),
        (["clone", "sql", "copy", "--url", "http://127.0.0.1:9"], "did not answer"),
    ],
    ids=str,
)
def test_errors_of_merge_export_and_clone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("adapter", *arguments)
    assert (code, out) == (1, "")
    assert error in err
    assert list(tmp_path.iterdir()) == []


def test_clone_on_a_running_server(run: Run, live: LiveServer) -> None:
    code, out, err = run("adapter", "clone", "sql", "copy", "--url", live.url)
    assert (code, err) == (0, "")
    assert json.loads(out)["name"] == "copy"
    code, out, err = run("adapter", "export", "sql", "--url", live.url)
    assert code == 1
    assert "--adapter-output-dir" in err


def test_inspect_says_every_reason(run: Run, copy_of_upper: Path) -> None:
    change_config(copy_of_upper, use_qalora=True, lora_alpha=-1)
    code, out, err = run("adapter", "inspect", str(copy_of_upper))
    assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith(f"{copy_of_upper}: is refused")
    refused = [line for line in out.splitlines() if line.startswith("  refused: ")]
    assert any("use_qalora" in line for line in refused)
    assert any("lora_alpha" in line for line in refused)
    assert "refused  use_qalora = True" in out


def test_inspect_against_a_base_that_does_not_fit(run: Run, copy_of_upper: Path, tmp_path: Path) -> None:
    """Without a base nothing is wrong with it; a base of another width refuses it with both shapes."""
    base = Path(shutil.copytree(BASE, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    width = config["hidden_size"]
    (base / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * width}))
    assert run("adapter", "inspect", str(copy_of_upper))[0] == 0
    code, out, _ = run("adapter", "inspect", str(copy_of_upper), "--base", str(base))
    assert code == 1
    assert str(width) in out
    assert str(2 * width) in out


def test_inspect_a_broken_file(run: Run, copy_of_upper: Path) -> None:
    weights = copy_of_upper / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    code, out, err = run("adapter", "inspect", str(copy_of_upper))
    assert (code, err) == (1, "")
    assert "  refused: " in out


def test_inspect_without_a_config(run: Run, copy_of_upper: Path) -> None:
    (copy_of_upper / "adapter_config.json").unlink()
    code, out, err = run("adapter", "inspect", str(copy_of_upper))
    assert (code, out) == (1, "")
    assert "adapter_config.json" in err
    assert err.count("\n") == 1


def test_inspect_with_a_limit(run: Run) -> None:
    code, out, _ = run("adapter", "inspect", UPPER, "--max-lora-rank", "1")
    assert code == 1
    assert "max_lora_rank" in out


def test_inspect_as_json(run: Run, copy_of_upper: Path) -> None:
    code, out, _ = run("adapter", "inspect", UPPER, "--json")
    report = json.loads(out)
    assert (code, report["reasons"]) == (0, [])
    assert report["adapter_digest"]
    assert report["is_checked_against_base"] is False
    assert {"name", "value", "verdict", "reason"} <= set(report["fields"][0])
    change_config(copy_of_upper, use_dora=True)
    code, out, _ = run("adapter", "inspect", str(copy_of_upper), "--json", "--base", BASE)
    report = json.loads(out)
    assert code == 1
    assert report["reasons"]
    assert report["is_checked_against_base"] is True


# --------------------------------------------------------------------------------------------------------------- doctor


def test_doctor(run: Run) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert f"loraplex {loraplex.__version__} on Python" in out
    for word in ("torch", "pyzmq", "CPU:", "kernels on cpu: ", "GPU:"):
        assert word in out
    assert "not installed" not in out


def test_doctor_asks_a_server_for_the_form_of_its_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reply: Any = {"version": "1.2", "backend": "native", "model": "llama; weights: int8, of bfloat16\x1b[31m"}
    monkeypatch.setattr("loraplex.views.remote.RemoteServer.get_json", lambda self, path: reply)
    code, out, _ = run("doctor", "--url", "127.0.0.1:1")
    assert code == 0
    assert (
        "127.0.0.1:1: loraplex 1.2\n    model: llama; weights: int8, of bfloat16\\x1b[31m\n    kernels: native" in out
    )
    reply = {"version": "1.2"}
    code, _, err = run("doctor", "--url", "127.0.0.1:1")
    assert (code, "is no server of Loraplex of this version" in err) == (1, True)


def test_doctor_without_an_answer(run: Run) -> None:
    code, _, err = run("doctor", "--url", "127.0.0.1:1")
    assert code == 1
    assert "127.0.0.1:1 did not answer" in err


def test_doctor_says_which_kernels_run_and_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = NoLibrary("they are not built; install g++")
    monkeypatch.setattr("loraplex.kernels.native.choice.open_library", lambda: nothing)

    def doctor() -> str:
        return run("doctor")[1].replace("\n", " ")

    assert "kernels on cpu: stock torch (they are not built; install g++)" in doctor()
    library = open_library()
    if isinstance(library, NativeLibrary):
        monkeypatch.setattr("loraplex.kernels.native.choice.open_library", lambda: library)
        assert f"kernels on cpu: native {library.isa}, " in doctor()
        assert f"libloraplex_{library.isa}.so" in doctor().replace(" ", "")


def test_doctor_says_of_flash_attention_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert doctor._flash_attention((9, 0)) == []
    FakeFlashAttention().install(monkeypatch)
    assert "for prompts" in doctor._flash_attention((9, 0))[0]
    assert "not 8.0" in doctor._flash_attention((8, 0))[0]


def test_doctor_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of FlashAttention 3, which runs beside Triton alone."""
    monkeypatch.setitem(sys.modules, "loraplex.kernels.triton.backend", None)
    FakeFlashAttention().install(monkeypatch)
    for name, value in (("is_available", True), ("get_device_name", "H100"), ("get_device_capability", (9, 0))):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    *_, last = doctor._hardware()
    assert last.startswith("GPU: H100, kernels: stock torch (Triton is not installed: ")


def test_doctor_prints_reasons_and_paths_in_one_piece(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not broken at 80 columns, where a path could not be copied, and nothing in brackets taken for markup."""
    nothing = NoLibrary(f"/opt/[env]/{'x' * 100}/libloraplex_portable.so is damaged")
    monkeypatch.setattr("loraplex.kernels.native.choice.open_library", lambda: nothing)
    assert f"kernels on cpu: stock torch ({nothing.reason})\n" in run("doctor")[1]


def test_doctor_says_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.doctor.OPTIONAL", ("no-such-package",))
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search(r"no-such-package\W+not installed", out)


if __name__ == "__main__":
    SURFACE.write_text(surface())
    print(f"wrote {SURFACE}")
