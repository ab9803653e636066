"""Ctrl-C at any moment: the program ends with 130, whatever imports what."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loraplex.demo.tasks import adapter_path, assets_path
from tests.conftest import ROOT

BASE, UPPER = str(assets_path() / "base"), str(adapter_path("upper"))

SWALLOWED = """
import os, signal, sys

WHERE = sys.argv.pop(1)

class Interrupted:
    \"\"\"Ctrl-C when a module is looked for, in code that goes on whatever happens.\"\"\"

    def find_spec(self, name, path=None, target=None):
        if name == WHERE:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass

sys.meta_path.insert(0, Interrupted())
from loraplex.__main__ import run
run()
"""


def python(code: str, *arguments: str) -> tuple[int, str, str]:
    """With the signal as a terminal's programs have it (conftest.py)."""
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("module", "command"),
    [
        *(("cyclopts", name) for name in ("serve", "generate", "demo", "bench", "profile", "top", "adapter", "doctor")),
        ("uvicorn", f"serve {BASE}"),
        ("torch", f"generate {BASE} banana="),
        ("torch", "demo"),
        ("numpy", "demo"),
        ("torch", f"bench {BASE}"),
        ("torch", f"profile {BASE}"),
        ("rich", "top --once"),
        ("torch", f"adapter inspect {UPPER} --base {BASE}"),
        ("torch", "doctor"),
    ],
    ids=lambda value: value.split()[0],
)
def test_ctrl_c_in_an_import_is_not_swallowed(module: str, command: str) -> None:
    assert python(SWALLOWED, module, *command.split()) == (130, "", "")


def test_where_a_command_has_another_use_for_it() -> None:
    code = (
        "import os, signal\n"
        "from loraplex import interrupt\n"
        "interrupt.end_at_once()\n"
        "try:\n"
        "    with interrupt.raised():\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    print('report')\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('never')\n"
    )
    assert python(code) == (130, "report\n", "")


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda number, frame: None"])
def test_another_handler_stays(handler: str) -> None:
    code = (
        "import signal\n"
        "from loraplex import interrupt\n"
        f"signal.signal(signal.SIGINT, handler := {handler})\n"
        "interrupt.end_at_once()\n"
        "with interrupt.raised():\n"
        "    assert signal.getsignal(signal.SIGINT) is handler or signal.getsignal(signal.SIGINT) == handler\n"
    )
    assert python(code) == (0, "", "")


def test_tests_in_a_background_job_have_the_usual_signal() -> None:
    """A shell's script starts it with SIGINT ignored, and so would every program of these tests."""
    code = "import signal\nimport tests.conftest\nprint(signal.getsignal(signal.SIGINT))"
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert "default_int_handler" in ended.stdout


def test_a_program_in_a_background_job_leaves_the_signal_ignored() -> None:
    code = (
        "import os, signal\n"
        "from loraplex import interrupt\n"
        "interrupt.end_at_once()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print('on')\n"
    )
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "on\n")
