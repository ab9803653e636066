"""The kernels of arm64, compiled by a cross compiler and run by an emulator: every call of the self-test has the bits
that it has here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.kernels.native.library import ISAS_OF, SIGNATURES
from tests.kernels.native.machine import library_or_skip
from tests.kernels.native.recording import ISA

ROOT = Path(__file__).parents[3]
EMULATOR = "qemu-aarch64"
LIMIT_S = 1500
NUM_FUNCTIONS = len(SIGNATURES) - 1
"""All but loraplex_team_stats, which computes nothing."""

pytestmark = [pytest.mark.timeout(LIMIT_S), pytest.mark.compile]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What scripts/arm64 made, and what it printed."""
    library_or_skip(ISA)
    for command, package in (("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed (Debian's {package})")
    folder = tmp_path_factory.mktemp("arm64")
    environment = Path(sys.executable).parent.parent
    result = subprocess.run(
        [ROOT / "scripts/arm64", environment, folder], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout.splitlines()


@pytest.mark.parametrize(("isa", "best"), [("neon", "neon"), ("neon_dotprod", "neon_dotprod")])
def test_every_function_has_the_bits_of_avx2(built: tuple[Path, list[str]], isa: str, best: str) -> None:
    (line,) = (line for line in built[1] if line.startswith(f"{isa} on a processor with {best}: "))
    assert line.endswith(f" calls of {NUM_FUNCTIONS} functions, 0 with other bits")


def test_every_library_of_the_architecture_is_built(built: tuple[Path, list[str]]) -> None:
    names = {path.name for path in built[0].glob("*.so")}
    assert names == {f"libloraplex_{isa}.so" for isa in ISAS_OF["aarch64"]}


def test_other_bits_are_found(built: tuple[Path, list[str]]) -> None:
    """The library of portable C++ has panels of another width, which a recorded delta does not fit."""
    folder, _ = built
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", folder / "replay", folder / "libloraplex_portable.so"]
    result = subprocess.run([*command, folder / "calls"], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode == 1
    assert "loraplex_pack_lora: " in result.stdout
