"""Session fixtures. Tests are single-threaded, use no network, and share what costs seconds to make."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["LORAPLEX_CACHE"] = "/nonexistent"  # no test leaves packed weights in the user's cache

import pytest
import torch

from tests.fixtures import ModelZoo

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Tiny base models, adapters and their oracles, each made once per session (tests/fixtures.py)."""
    return ModelZoo(tmp_path_factory.mktemp("zoo"))
