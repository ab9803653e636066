"""Session fixtures. Tests are single-threaded, use no network, and share what costs seconds to make."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import zlib
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("LORAPLEX_DEBUG", "1")  # each step of each engine checks its mapping
os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported; with a GPU, set it to 0
if os.environ["TRITON_INTERPRET"] != "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # device `auto` is the CPU on every machine
os.environ["LORAPLEX_CACHE"] = "none"  # no test leaves packed weights in the user's cache

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import loraplex
from loraplex.logs import PatientHandler
from tests import postgres
from tests.fixtures import ModelZoo

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)

# No test times anything, on a busy machine neither. Each run draws other examples: those of many runs add up.
settings.register_profile("untimed", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a job that a script started in the background; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """An editable install of another checkout goes before this one, even before PYTHONPATH: it would be tested."""
    found = Path(loraplex.__file__).resolve()
    if ROOT not in found.parents:
        raise pytest.UsageError(
            f"loraplex is {found.parent}, not this checkout's; make an environment here: make env-dev"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """TEST_PART=1/3: the files of the first of three parts, which are equal in number but for chance."""
    part, _, num_parts = os.environ.get("TEST_PART", "").partition("/")
    if not part:
        return
    kept, left = [], []
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        (kept if zlib.crc32(file.encode()) % int(num_parts) == int(part) - 1 else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(autouse=True)
def loggers_as_imported() -> None:
    """A server that a test of this process started has taken the package's logger and the root's for itself.

    `caplog` sees nothing then, and the root's handler writes to the standard error of a test that is over.
    """
    package, root = logging.getLogger("loraplex"), logging.getLogger()
    package.propagate = True
    package.setLevel(logging.NOTSET)
    package.handlers.clear()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, PatientHandler)]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Tiny base models, adapters and their oracles, each made once per session (tests/fixtures.py)."""
    return ModelZoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[postgres.Cluster]:
    """A test that stops it starts it again."""
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(postgres.cluster())
        except RuntimeError as error:
            pytest.skip(str(error))
        yield running
