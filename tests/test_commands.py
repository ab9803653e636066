"""Every command of the README and of docs/ runs as it is written, on the demo's model and adapters.

Commands are the lines of `sh` blocks, the lines after `$` in `console` blocks, and indented lines that begin with a
program of this project. They run page by page, in order, in a folder where `path/to/model` and the like lie; a page's
requests go to one server with the adapters that pages name, on a free port instead of 8000. What cannot run here is in
NOT_RUN with the reason.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.demo.tasks import adapter_path, assets_path
from tests.twin.parts import calibration

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PROGRAMS = ("loraplex", "curl", "python", "make", "pip", "scripts/", "docker", "openssl", "lm_eval")
PARSED = tuple(f"loraplex {name} " for name in ("serve", "route", "calibrate", "plan", "simulate"))
START_TIMEOUT_S = 120.0
SMALL = ("--num-threads", "1", "--log-level", "warning", "--no-access-log", "--no-standby-engine")
NAMES = {
    "upper": "upper",
    "reverse": "reverse",
    "sql": "upper",
    "support": "reverse",
    "chat": "upper",
    "sql-green": "sort",
}

NOT_RUN = (
    (r"make (demo|test|soak|docs|lint)\b", ".ci/run calls these"),
    (r"scripts/clients", "makes environments of packages that are fetched"),
    (r"pip install\b", "the environment is made by `make`; tests/test_containers.py installs from nothing"),
    (r"docker ", "no container tool here; tests/test_containers.py runs what the files say"),
    (r"loraplex (tenant|key) ", "is about a state directory of a server; tests/tenants/test_commands.py runs them"),
    (r"loraplex serve .*--admin-api-key-file", "needs a key file; tests/server/test_tenant_processes.py has one"),
    (r"lm_eval ", "is another project's program, with a data set to be fetched"),
    (r"python -m benchmarks\.", "take minutes; tests/benchmarks runs their code"),
    (r"loraplex serve .*--devices? cuda", "needs a GPU"),
    (
        r"loraplex serve .*--tensor-parallel-size",
        "the demo's vocabulary, 107, has no halves; tests/ranks serves others",
    ),
    (
        r"loraplex (route|serve .*--port 800[12])|curl localhost:800[12]/",
        "several programs: tests/router/test_processes.py and tests/server/test_shared_registry.py run them",
    ),
    (r"loraplex serve .*--ray|X-Loraplex-Replica", "needs Ray, of an extra: tests/serve runs it"),
    (r"loraplex calibrate ", "takes two minutes; tests/twin/test_commands.py measures for five seconds"),
    (r"loraplex plan .*--plot", "needs matplotlib, of an extra; tests/twin/test_planning.py draws where it is"),
    (r"loraplex simulate .*--replicas 1000", "takes minutes; tests/twin/test_commands.py has five replicas"),
    (
        r"loraplex serve .*(--ssl-certfile|16GiB|9GiB|12GiB)",
        "needs a certificate, or the memory of a server: only its options are read",
    ),
)


# ------------------------------------------------------------------------------------------------------- what pages say


def blocks(page: Path, language: str) -> Iterator[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    yield from re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """In the order of the page, continuation lines joined."""
    text = page.read_text()
    found: list[tuple[int, str]] = []
    for language, strip in (("sh", ""), ("console", "$ ")):
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = match[1].replace("\\\n", " ").splitlines()
            # the body of a request may stand on the next line of a console block without a backslash
            found += [
                (match.start(), line.removeprefix(strip)) for line in lines if line.strip() and line.startswith(strip)
            ]
    for match in re.finditer(r"(?:^ {4}\S.*\n)+", text, re.MULTILINE):
        lines = match[0].replace("\\\n", " ").splitlines()
        found += [(match.start(), line.strip()) for line in lines if line.strip().startswith(PROGRAMS)]
    return [command for _, command in sorted(found, key=lambda each: each[0]) if not command.lstrip().startswith("#")]


def reason_not_to_run(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN if re.match(pattern, command)), None)


@functools.cache
def pages_with_commands() -> tuple[Path, ...]:
    return tuple(page for page in PAGES if any(reason_not_to_run(command) is None for command in commands(page)))


# ------------------------------------------------------------------------------------------------------- where they run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`path/to/model`, `path/to/sql-adapter` and so on, and the program on the path."""
    root = tmp_path_factory.mktemp("commands")
    (root / "path" / "to").mkdir(parents=True)
    places = {
        **{place: assets_path() / "base" for place in ("path/to/model", "base")},
        **{f"path/to/{name}-adapter": adapter_path(NAMES[name]) for name in ("sql", "support")},
    }
    for place, target in places.items():
        shutil.copytree(target, root / place)
    for name, task in {**NAMES, "x": "rot13", "sql-new": "sort"}.items():
        shutil.copytree(adapter_path(task), root / "adapters" / name)
    shutil.copytree(root / "adapters", root / "path" / "to" / "adapters")
    shutil.copytree(adapter_path("rot13"), root / "path" / "to" / "adapter")
    shutil.copy(ROOT / "examples" / "custom_eviction_policy.py", root / "my_policies.py")
    calibration().write(root / "calibration.json")
    (root / "arrivals.jsonl").write_text('{"at_s": 0.5, "adapter": "sql", "prompt_tokens": 212, "output_tokens": 64}')
    return root


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """`loraplex serve ...` in the background, as a shell's `&` would run it."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.port = free_port()
        self._log = folder / f"server-{self.port}.log"
        command = [sys.executable, "-m", "loraplex", *arguments, "--port", str(self.port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment())
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.1)
        self.stop()
        raise AssertionError(f"not healthy in {START_TIMEOUT_S} s: {self._log.read_text()}")

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=60)


def environment() -> dict[str, str]:
    programs = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )


# ---------------------------------------------------------------------------------------------------------- the tests


def test_there_are_commands() -> None:
    assert len(pages_with_commands()) >= 10
    assert sum(len(commands(page)) for page in PAGES) >= 60


def test_every_reason_is_still_needed() -> None:
    everything = [command for page in PAGES for command in commands(page)]
    assert [pattern for pattern, _ in NOT_RUN if not any(re.match(pattern, command) for command in everything)] == []


@pytest.mark.commands
@pytest.mark.parametrize("page", pages_with_commands(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of(page: Path, folder: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    server: Server | None = None
    try:
        for command in commands(page):
            if reason_not_to_run(command) is not None:
                continue
            if command.startswith("loraplex serve") or command.startswith("loraplex demo --serve"):
                check_server(command, folder)
                continue
            if server is None and re.search(r"localhost:8000|127\.0\.0\.1:8000", command):
                server = Server(folder, page_server())
            check(command, folder, server)
    finally:
        if server is not None:
            assert server.stop() == 0


def page_server() -> list[str]:
    adapters = [f"{name}={adapter_path(task)}" for name, task in NAMES.items()]
    return [
        "serve",
        "base",
        "--served-model-name",
        "demo",
        "--served-model-name",
        "base",
        *SMALL,
        "--adapter-output-dir",
        "made",
        "--lora-modules",
        *adapters,
    ]


def check_server(command: str, folder: Path) -> None:
    """It starts, is healthy, and ends with 0."""
    words = shlex.split(command)[1:]
    extra = [] if words[0] == "demo" else [word for word in SMALL if word not in words]
    assert Server(folder, [*words, *extra]).stop() == 0, command


def check(command: str, folder: Path, server: Server | None) -> None:
    for place in ("/path/to/", "/adapters/"):
        command = command.replace(f'"{place}', f'"{folder}{place}')
    if server is not None:
        command = command.replace("localhost:8000", f"localhost:{server.port}").replace(
            "127.0.0.1:8000", f"127.0.0.1:{server.port}"
        )
    may_be_cut = False
    if command.startswith("curl"):
        may_be_cut = "curl -N" in command  # a stream without end
        limit = 2 if may_be_cut else 60
        command = command.replace("curl", f"curl --silent --show-error --fail-with-body --max-time {limit}", 1)
    elif command.startswith("loraplex top"):
        command += " --once"
    command = re.sub(r"--seconds \d+", "--seconds 1", command)
    result = run(command, folder)
    assert result.returncode == 0 or (may_be_cut and result.returncode == 28), (
        f"{command}\n{result.stdout}{result.stderr}"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_commands_that_do_not_run(page: Path) -> None:
    """`loraplex` parses them, with each option that a page names."""
    from loraplex.cli import app

    for command in commands(page):
        if command.startswith(PARSED) and reason_not_to_run(command) is not None:
            words = [word for word in shlex.split(command)[1:] if word != "..."]
            function, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
            assert function.__name__ == words[0]
            assert bound.arguments


PRINTED = {
    "speculative-decoding.md": r"40 tokens in 1?\d steps",
    "structured-output.md": r"count \d",
    "tools.md": r'double\{\s*"n"\s*:\s*\d+\s*\}',
}
"""What the Python of a page prints, where it is no answer of the adapter `upper`."""

PYTHON_BLOCKS = [(page, number, code) for page in PAGES for number, code in enumerate(blocks(page, "python"))]


@pytest.mark.commands
@pytest.mark.parametrize(
    ("page", "code"),
    [(page, code) for page, _, code in PYTHON_BLOCKS],
    ids=[f"{page.name}-{n}" for page, n, _ in PYTHON_BLOCKS],
)
def test_python_of(page: Path, code: str, folder: Path) -> None:
    if page.name == "adapters.md":
        pytest.skip("a fragment: tests/adapters/test_weights.py has it whole")
    server = Server(folder, page_server()) if "localhost:8000" in code else None
    try:
        code = code.replace("localhost:8000", f"localhost:{server.port}") if server else code
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert re.search(PRINTED.get(page.name, "GOOD MORNING"), result.stdout), result.stdout
    finally:
        if server is not None:
            server.stop()
