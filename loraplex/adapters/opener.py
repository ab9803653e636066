"""From a path or hub id to validated weights: where source, format and the base model's targets meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from loraplex.adapters.files import AdapterFolder
from loraplex.adapters.format import LongContext, PEFTHelper
from loraplex.adapters.registry import AdapterText, OpenedAdapter
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.core import AdapterSpec
from loraplex.errors import shortened


def no_text(folder: AdapterFolder, vocab_size: int | None) -> AdapterText | None:
    """Nothing but where the vocabulary ends."""
    return None if vocab_size is None else AdapterText.of({"vocab_size": vocab_size})


@dataclass(frozen=True)
class AdapterOpener:
    """Opens adapters for one base model, whose reader it has. Raises AdapterLoadError and its kin.

    read_text: what an adapter's directory says about text, by its folder and where its vocabulary ends.
    """

    source: AdapterSource
    reader: CheckedReader
    read_text: Callable[[AdapterFolder, int | None], AdapterText | None] = no_text

    def open(self, path_or_id: str) -> OpenedAdapter:
        """Fetch, read and validate; the weights are let go again: the engine reads them for itself."""
        directory = str(self.source.fetch(path_or_id))
        name = shortened(path_or_id)
        model = read_adapter(directory, name, self.source, self.reader)
        folder = AdapterFolder(Path(directory), name, self.source.roots_of(Path(directory)))
        text = _with_context(self.read_text(folder, model.vocab_size), model.long_context)
        if model.invocation_tokens:
            text = AdapterText.activated(text, model.invocation_tokens)
        return OpenedAdapter(directory, model.adapter_digest, model.nbytes, model.rank, text)


def _with_context(text: AdapterText | None, context: LongContext | None) -> AdapterText | None:
    """The context is an adapter's limit of its requests, as its vocabulary is."""
    return text if context is None else AdapterText.of({**({} if text is None else text.document), **asdict(context)})


def read_adapter(path: str, adapter_name: str, source: AdapterSource, reader: CheckedReader) -> LoRAModel:
    """Of a directory that was fetched: its files must lie where the source allows it when they are opened, too."""
    roots = source.roots_of(Path(path))
    return reader.read(Path(path), PEFTHelper.from_local_dir(path, adapter_name, roots), roots)


def read_spec(spec: AdapterSpec, source: AdapterSource, reader: CheckedReader) -> LoRAModel:
    """The weights of a registered version, read from its local directory."""
    return read_adapter(spec.path, spec.adapter_name, source, reader).clone(spec.adapter_id)
