"""From a path or hub id to validated weights: where source, format and the base model's targets meet."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from loraplex.adapters.files import CONFIG_NAME, MAX_CONFIG_BYTES, TEXT_NAMES, AdapterFolder, read_files
from loraplex.adapters.format import LongContext, PEFTHelper
from loraplex.adapters.registry import AdapterText, OpenedAdapter
from loraplex.adapters.remote.fetched import FetchedFiles, MakeRoom
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.core import AdapterSpec
from loraplex.errors import (
    AdapterBaseMismatchError,
    AdapterContentChangedError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterTooLargeError,
    AdapterTruncatedError,
    AdapterValidationError,
    error_from_payload,
    shortened,
)

REFUSED_S, MAX_REFUSED = 30.0, 256
"""How long files that were refused are not read again unless they change, and of how many adapters that is known."""

_OF_CONTENT = (
    AdapterBaseMismatchError,
    AdapterContentChangedError,
    AdapterFileFormatError,
    AdapterTooLargeError,
    AdapterTruncatedError,
    AdapterValidationError,
)
"""What the content of files is refused with; another try may end otherwise after all other errors."""

_OF_WEIGHTS = {"vocab_size", "invocation_tokens", *(each.name for each in fields(LongContext))}
"""What the document of a text has of weights and configuration."""

ReadText = Callable[[AdapterFolder, int | None], AdapterText | None]
"""What an adapter's directory says about text, by its folder and where its vocabulary ends."""


def no_text(folder: AdapterFolder, vocab_size: int | None) -> AdapterText | None:
    """Nothing but where the vocabulary ends."""
    return None if vocab_size is None else AdapterText.of({"vocab_size": vocab_size})


@dataclass(frozen=True)
class AdapterOpener:
    """Opens adapters for one base model, whose reader it has. Raises AdapterLoadError and its kin."""

    source: AdapterSource
    reader: CheckedReader
    read_text: ReadText = no_text

    def open(self, path_or_id: str, called: str = "") -> OpenedAdapter:
        """Fetch, read and validate; the weights are let go again: the engine reads them for itself. called: as in
        `AdapterSource.fetch`."""
        directory = str(self.source.fetch(path_or_id, called=called))
        return self.open_uploaded(directory, shortened(called or path_or_id))

    def open_needed(self, path: str, called: str, files: FetchedFiles, make_room: MakeRoom) -> OpenedAdapter:
        """As `open`, for a request: what has to be fetched goes to `files`."""
        opener = replace(self, source=self.source.into(files, make_room)) if "://" in path else self
        return opener.open(path, called)

    def open_uploaded(self, directory: str, adapter_name: str) -> OpenedAdapter:
        """As `open`, of a directory that is here, and that this process wrote."""
        folder = AdapterFolder(Path(directory), adapter_name, self.source.roots_of(Path(directory)))
        return self._opened(directory, adapter_name, lambda vocab_size: self.read_text(folder, vocab_size))

    def config_of(self, spec: AdapterSpec) -> bytes:
        """The configuration in the directory of a registered version, unread. Raises what opening it raises."""
        path = Path(spec.path)
        return AdapterFolder(path, spec.adapter_name, self.source.roots_of(path)).read(CONFIG_NAME, MAX_CONFIG_BYTES)

    def open_received(self, directory: str, adapter_name: str, loaded: AdapterText | None) -> OpenedAdapter:
        """As `open`, of weights and a configuration that a client sent for an adapter with the text `loaded`, which
        stays. Raises AdapterValidationError where they end its vocabulary elsewhere."""

        def text_of(vocab_size: int | None) -> AdapterText | None:
            document = {} if loaded is None else dict(loaded.document)
            kept = {name: value for name, value in document.items() if name not in _OF_WEIGHTS}
            if kept and vocab_size != document.get("vocab_size"):
                reason = (
                    "its weights end the vocabulary elsewhere than those before: load a directory that has the "
                    "tokenizer for them"
                )
                raise AdapterValidationError.from_reasons(adapter_name, [reason])
            made = kept if vocab_size is None else {**kept, "vocab_size": vocab_size}
            return AdapterText.of(made) if made else None

        return self._opened(directory, adapter_name, text_of)

    def _opened(self, directory: str, name: str, text_of: Callable[[int | None], AdapterText | None]) -> OpenedAdapter:
        model = read_adapter(directory, name, self.source, self.reader)
        text = _with_context(text_of(model.vocab_size), model.long_context)
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


def check_content(spec: AdapterSpec, digest: str) -> None:
    """Raise AdapterContentChangedError for another content than the one that was registered."""
    if digest != spec.adapter_digest:
        raise AdapterContentChangedError(
            f"adapter {spec.adapter_name!r}: the content of its source has changed since it was loaded "
            f"(digest {digest[:12]}, was {spec.adapter_digest[:12]}); reload it"
        )


class SourceReader:
    """Reads registered versions for an engine. Each request for one that is in no memory asks, so files that were
    refused are refused again unread, for REFUSED_S and while what the file system says of them is the same."""

    def __init__(
        self, source: AdapterSource, reader: CheckedReader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._reader = reader
        self._clock = clock
        self._refused: OrderedDict[AdapterSpec, tuple[object, float, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, spec: AdapterSpec) -> LoRAModel:
        """What `read_spec` reads and raises, and what `check_content` raises."""
        stamps = _stamps_of(AdapterFolder(Path(spec.path), spec.adapter_name))
        with self._lock:
            known, until_s, refusal = self._refused.get(spec, (None, 0.0, {}))
        if stamps is not None and stamps == known and self._clock() < until_s:
            raise error_from_payload(refusal)
        try:
            model = read_spec(spec, self._source, self._reader)
            check_content(spec, model.adapter_digest)
        except _OF_CONTENT as error:
            with self._lock:
                self._refused[spec] = stamps, self._clock() + REFUSED_S, error.to_payload()
                self._refused.move_to_end(spec)
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise
        return model


def _stamps_of(folder: AdapterFolder) -> object:
    """What the file system says of an adapter's weights and configuration; None when it cannot say."""
    try:
        return tuple(_stamp_of(path) for path in read_files(folder) if path.name not in TEXT_NAMES)
    except AdapterLoadError:
        return None


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    """The time of change, too: an owner sets that of modification."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
