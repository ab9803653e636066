"""Every script in examples/ runs, and says what its page promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HELPERS = {"demo_server.py"}

SAYS = {
    "offline.py": [
        "base     good morning= good morning",
        "upper    good morning= GOOD MORNING",
        "after an eviction 2 adapters are on the device, 3 in host memory",
    ],
    "openai_client.py": ["reverse  gninrom doog", "rot13    tbbq zbeavat", "`no-such-adapter` does not exist"],
    "hot_swap.py": [
        "production is version 2",
        "from before the change: GOOD MORNING",
        "after the change:       gninrom doog",
        "after the rollback:     GOOD MORNING",
    ],
    "custom_eviction_policy.py": ["lru                24 promotions", "most_recent_first  16 promotions"],
    "load_test.py": ["40 requests in", "of 11 adapters on the device"],
}
ARGUMENTS = {"load_test.py": ["--clients", "4", "--requests", "40"]}


def test_each_script_is_tested_and_in_the_readme() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - HELPERS
    assert scripts == SAYS.keys()
    page = (EXAMPLES / "README.md").read_text()
    assert {name for name in scripts if f"| `{name}` |" not in page} == set()


@pytest.mark.commands
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    missing = [line for line in SAYS[name] if line not in result.stdout]
    assert missing == [], result.stdout
