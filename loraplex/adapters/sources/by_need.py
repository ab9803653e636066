"""Loads that requests bring about, of adapters in sources that the operator named.

What they fetch goes to a folder that is bounded in bytes (adapters/remote/fetched.py), and what they raise names the
adapter as its client did: neither a path of this server nor a place on the hub or in a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loraplex.adapters.registry import LoadResult, LoRARegistry, OpenedAdapter, VersionRecord
from loraplex.adapters.remote.fetched import Evict, FetchedFiles, MakeRoom
from loraplex.adapters.remote.wanted import MAX_NOT_WEIGHTS_BYTES
from loraplex.adapters.source import AdapterSource, narrowed_to
from loraplex.adapters.sources.named import ORIGIN
from loraplex.errors import LoraplexError

_log = logging.getLogger(__name__)


class NeedOpener(Protocol):
    """What an `AdapterOpener` does for a request."""

    @property
    def source(self) -> AdapterSource: ...

    def open_needed(self, path: str, called: str, files: FetchedFiles, make_room: MakeRoom) -> OpenedAdapter: ...


@dataclass(frozen=True, slots=True)
class NeededAdapter:
    """path: what it is loaded from; called: as its client wrote it; source: the name of the operator's source; inside:
    where its files must lie, too."""

    name: str
    path: str
    called: str
    source: str
    inside: tuple[Path, ...] | None = None


class LoadsByNeed:
    """Thread-safe."""

    def __init__(self, files: FetchedFiles, opener: NeedOpener) -> None:
        self.files = files
        self._opener = opener

    def load(
        self,
        registry: LoRARegistry,
        needed: NeededAdapter,
        evict: Evict,
        check_size: Callable[[int], None] | None = None,
        check_least: Callable[[int], None] | None = None,
    ) -> LoadResult:
        """As `LoRARegistry.load`. evict: takes away names that came so, where their files have to go. check_least: as
        check_size, before anything leaves or is downloaded, of bytes that the tensors have at least."""
        try:
            loading = self.files.loading(lambda: [spec.path for spec in registry.specs()], evict)
            with narrowed_to(needed.inside), loading as make:

                def make_room(adapter: object, directory: Path, nbytes: int) -> None:
                    if check_least is not None and nbytes > MAX_NOT_WEIGHTS_BYTES:
                        check_least(nbytes - MAX_NOT_WEIGHTS_BYTES)
                    make(adapter, directory, nbytes)

                return registry.load(
                    needed.name,
                    needed.path,
                    origin=ORIGIN + needed.source,
                    check_size=check_size,
                    open_adapter=lambda: self._opener.open_needed(needed.path, needed.called, self.files, make_room),
                )
        except LoraplexError as error:
            _log.warning("adapter %.200r could not be loaded from %r: %.1000s", needed.name, needed.path, error)
            raise

    def locate(self, registry: LoRARegistry | None, record: VersionRecord, may_fetch: bool) -> str | None:
        """As `AdapterSource.locate`, of a version that another server may have loaded by need."""
        source = self._opener.source
        if registry is None or not record.origin.startswith(ORIGIN) or "://" not in record.lora_path:
            return source.locate(record, may_fetch)
        with self.files.loading(lambda: [spec.path for spec in registry.specs()], lambda *_: False) as make_room:
            return source.into(self.files, make_room).locate(record, may_fetch)

    def close(self) -> None:
        self.files.close()
