"""From a path or hub id to validated weights: where source, format and the base model's targets meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import AdapterSpec, LoraTarget


@dataclass(frozen=True)
class AdapterOpener:
    """Opens adapters for one base model, which publishes `targets`. Raises AdapterLoadError and its kin."""

    source: AdapterSource
    targets: tuple[LoraTarget, ...]
    lora_config: LoRAConfig

    def open(self, path_or_id: str) -> OpenedAdapter:
        """Fetch, read and validate; the weights are let go again: the engine reads them for itself."""
        directory = self.source.fetch(path_or_id)
        model = read_adapter(str(directory), path_or_id, self.targets, self.lora_config)
        return OpenedAdapter(str(directory), model.adapter_digest, model.nbytes, model.rank)


def read_adapter(path: str, adapter_name: str, targets: Sequence[LoraTarget], lora_config: LoRAConfig) -> LoRAModel:
    return LoRAModel.from_local_checkpoint(path, PEFTHelper.from_local_dir(path, adapter_name), targets, lora_config)


def read_spec(spec: AdapterSpec, targets: Sequence[LoraTarget], lora_config: LoRAConfig) -> LoRAModel:
    """The weights of a registered version, read from its local directory."""
    return read_adapter(spec.path, spec.adapter_name, targets, lora_config).clone(spec.adapter_id)
