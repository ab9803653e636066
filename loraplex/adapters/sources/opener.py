"""From a path or hub id to an adapter that can be registered: where its source, its weights and its text meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from weakref import WeakValueDictionary

from loraplex.adapter_store import AdapterContent, LongContext
from loraplex.adapters.files import CONFIG_NAME, MAX_CONFIG_BYTES, AdapterFolder
from loraplex.adapters.registry import AdapterText, OpenedAdapter
from loraplex.adapters.remote.fetched import FetchedFiles, MakeRoom
from loraplex.adapters.source import AdapterSource
from loraplex.core import AdapterSpec
from loraplex.errors import AdapterValidationError, shortened
from loraplex.processes.fair_turns import FairTurns, own_tenant

NUM_OPENS, NUM_OPENS_OF_A_CLIENT = 8, 4
"""At a time."""

_OF_WEIGHTS = {"vocab_size", "invocation_tokens", *(each.name for each in fields(LongContext))}
"""What the document of a text has of weights and configuration."""

ReadContent = Callable[[str, str, str, tuple[str, ...]], AdapterContent]
"""Reads and validates the adapter in a directory; its name is for errors, the tenant for turns; the roots are where its
files must lie, () as the reader knows them."""

ReadText = Callable[[AdapterFolder, int | None], AdapterText | None]
"""What an adapter's directory says about text, by its folder and where its vocabulary ends."""


def no_text(folder: AdapterFolder, vocab_size: int | None) -> AdapterText | None:
    """Nothing but where the vocabulary ends."""
    return None if vocab_size is None else AdapterText.of({"vocab_size": vocab_size})


@dataclass(frozen=True)
class AdapterOpener:
    """Opens adapters for the base model that `read_content` knows. Raises AdapterLoadError and its kin."""

    source: AdapterSource
    read_content: ReadContent
    read_text: ReadText = no_text
    _turns: FairTurns = field(default_factory=lambda: FairTurns(NUM_OPENS, NUM_OPENS_OF_A_CLIENT), repr=False)
    _texts: WeakValueDictionary[str, AdapterText] = field(default_factory=WeakValueDictionary, repr=False)

    def open(self, path_or_id: str, called: str = "") -> OpenedAdapter:
        """Fetch, read and validate. called: as in `AdapterSource.fetch`."""
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
        roots = tuple(map(str, self.source.roots_of(Path(directory)) or ()))
        with self._turns.own():
            content = self.read_content(directory, name, own_tenant(), roots)
        text = _with_context(text_of(content.vocab_size), content.long_context)
        if content.invocation_tokens:
            text = AdapterText.activated(text, content.invocation_tokens)
        if text is not None:  # one object for all names of a content
            text = self._texts.setdefault(text.digest, text)
        return OpenedAdapter(directory, content.adapter_digest, content.nbytes, content.rank, text)


def _with_context(text: AdapterText | None, context: LongContext | None) -> AdapterText | None:
    """The context is an adapter's limit of its requests, as its vocabulary is."""
    return text if context is None else AdapterText.of({**({} if text is None else text.document), **asdict(context)})
