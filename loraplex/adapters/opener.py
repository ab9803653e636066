"""From a path or hub id to validated weights: where source, format and the base model's targets meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.checked_reader import AdapterContent, CheckedReader
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.registry import OpenedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import LoRAModel, is_converted
from loraplex.core import AdapterSpec
from loraplex.errors import shortened


@dataclass(frozen=True)
class AdapterOpener:
    """Opens adapters for one base model, whose reader it has. Raises AdapterLoadError and its kin."""

    source: AdapterSource
    reader: CheckedReader

    def open(self, path_or_id: str) -> OpenedAdapter:
        """Fetch, read and validate; the weights are let go again: the engine reads them for itself."""
        directory, config = str(self.source.fetch(path_or_id)), self.reader.lora_config
        name = shortened(path_or_id)
        content = read_adapter(directory, name, self.source, self.reader)
        nbytes = content.nbytes
        if is_converted(config):  # whose values must fit
            nbytes = LoRAModel.from_content(content, config, name).nbytes
        return OpenedAdapter(directory, content.adapter_digest, nbytes, content.rank)


def read_adapter(path: str, adapter_name: str, source: AdapterSource, reader: CheckedReader) -> AdapterContent:
    """Of a directory that was fetched: its files must lie where the source allows it when they are opened, too."""
    roots = source.roots_of(Path(path))
    return reader.read(Path(path), PEFTHelper.from_local_dir(path, adapter_name, roots), roots)


def read_spec(spec: AdapterSpec, source: AdapterSource, reader: CheckedReader) -> LoRAModel:
    """The weights of a registered version, read from its local directory."""
    content = read_adapter(spec.path, spec.adapter_name, source, reader)
    return LoRAModel.from_content(content, reader.lora_config, spec.adapter_name, spec.adapter_id)
