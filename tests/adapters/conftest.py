"""A saved adapter named 'sql', and copies of it that a test may damage."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.adapters.peft_oracle import PeftAdapter


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    from tests.adapters.peft_oracle import make_adapter  # transformers and peft take seconds to import

    directory = tmp_path_factory.mktemp("saved") / "sql"
    return make_adapter(directory, target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=6)


@pytest.fixture
def adapter(saved: PeftAdapter, tmp_path: Path) -> PeftAdapter:
    shutil.copytree(saved.path, tmp_path / "sql")
    return replace(saved, path=tmp_path / "sql")
