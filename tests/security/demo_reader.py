"""The demo's base model, as what adapters are checked against."""

from __future__ import annotations

import functools

from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import SourceReader
from loraplex.adapters.sources.opener import AdapterOpener
from loraplex.adapters.weights import CheckedReader
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.demo.tasks import assets_path
from loraplex.doctor import targets_of


@functools.cache
def demo_targets() -> tuple[LoraTarget, ...]:
    return targets_of(str(assets_path() / "base"))


def demo_reader(lora_config: LoRAConfig | None = None) -> CheckedReader:
    return CheckedReader(demo_targets(), lora_config or LoRAConfig())


def demo_opener(source: AdapterSource) -> AdapterOpener:
    """Reads in this process, as an engine does."""
    return AdapterOpener(source, SourceReader(source, demo_reader()).open)
