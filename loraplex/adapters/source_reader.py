"""Weights of an adapter from the files of a directory, for an engine: validated, with the registered content."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraplex.adapter_store import AdapterContent
from loraplex.adapters.files import TEXT_NAMES, AdapterFolder, read_files
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.regular_file import Roots
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
    shown,
)
from loraplex.processes.fair_turns import ByteBudget, working_for

_log = logging.getLogger(__name__)

REFUSED_S, MAX_REFUSED = 30.0, 256
"""How long files that were refused are not read again unless they change, and of how many adapters that is known."""

MAX_READ_BYTES = 2**30
"""Of files that are opened at a time, apart from those that requests wait for. One alone may have more."""

SMALL_READ_BYTES = 2**27
"""An open of so few bytes waits for no other: turns bound how many there are."""

KEPT_OPEN_S, MAX_OPEN_BYTES = 2.0, 512 * 2**20
"""How long weights that were opened wait for the verb that adds them, and of how many bytes."""

_OF_CONTENT = (
    AdapterBaseMismatchError,
    AdapterContentChangedError,
    AdapterFileFormatError,
    AdapterTooLargeError,
    AdapterTruncatedError,
    AdapterValidationError,
)
"""What the content of files is refused with; another try may end otherwise after all other errors."""


def read_adapter(
    path: str,
    adapter_name: str,
    source: AdapterSource,
    reader: CheckedReader,
    budget: ByteBudget | None = None,
    roots: Roots = None,
) -> LoRAModel:
    """Of a directory that was fetched: its files must lie in `roots`, or where the source allows it, when they are
    opened, too. budget: as in `CheckedReader.read`."""
    roots = roots or source.roots_of(Path(path))
    return reader.read(Path(path), PEFTHelper.from_local_dir(path, adapter_name, roots), roots, budget)


def content_of(model: LoRAModel) -> AdapterContent:
    return AdapterContent(
        model.adapter_digest,
        model.nbytes,
        model.rank,
        model.vocab_size,
        model.invocation_tokens,
        model.long_context,
    )


def read_spec(spec: AdapterSpec, source: AdapterSource, reader: CheckedReader) -> LoRAModel:
    """The weights of a registered version, read from its local directory. What its content is refused with says that it
    has changed: it was good, and may be a link to another tenant's files by now, which no message shows."""
    try:
        return read_adapter(spec.path, spec.adapter_name, source, reader).clone(spec.adapter_id)
    except _OF_CONTENT as error:
        _log.warning("adapter %s cannot be read again: %s", shown(spec.adapter_name), error)
        if isinstance(error, AdapterTooLargeError):  # a budget is another one now
            text = f"adapter {spec.adapter_name!r} is larger than the host memory that this server has for adapters"
            raise AdapterTooLargeError(text) from error
        raise _changed(spec) from error


def check_content(spec: AdapterSpec, digest: str) -> None:
    """Raise AdapterContentChangedError for another content than the one that was registered."""
    if digest != spec.adapter_digest:
        raise _changed(spec)


def _changed(spec: AdapterSpec) -> AdapterContentChangedError:
    text = f"the content of its source has changed since it was loaded (digest {spec.adapter_digest[:12]}); reload it"
    return AdapterContentChangedError(f"adapter {spec.adapter_name!r}: {text}")


class OpenedModels:
    """Weights that were opened a moment ago and are about to be added: the most recent ones, for KEPT_OPEN_S.

    Any thread may call it. They are few: what adds them takes them away, and a larger adapter is read again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._models: OrderedDict[tuple[str, str], tuple[float, LoRAModel]] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def put(self, path: str, model: LoRAModel) -> None:
        if model.nbytes > self._max_bytes:
            return
        with self._lock:
            self._pop((path, model.adapter_digest))
            self._models[path, model.adapter_digest] = time.monotonic() + KEPT_OPEN_S, model
            self._nbytes += model.nbytes
            while self._nbytes > self._max_bytes:
                self._pop(next(iter(self._models)))
            if self._timer is None:
                self._start_timer()

    def take(self, path: str, digest: str) -> LoRAModel | None:
        with self._lock:
            return self._pop((path, digest))

    def _pop(self, key: tuple[str, str]) -> LoRAModel | None:
        _, model = self._models.pop(key, (0.0, None))
        self._nbytes -= 0 if model is None else model.nbytes
        return model

    def _start_timer(self) -> None:
        """Where the system has no thread for it, what was opened is read again."""
        timer = threading.Timer(KEPT_OPEN_S, self._drop_old)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as error:
            _log.warning("no thread lets go of weights that were opened, so that none are kept: %s", error)
            self._models.clear()
            self._nbytes = 0
        else:
            self._timer = timer

    def _drop_old(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            for key in [key for key, (until_s, _) in self._models.items() if until_s <= now_s]:
                self._pop(key)
            self._timer = None
            if self._models:
                self._start_timer()


class SourceReader:
    """Reads adapters for an engine. Each request for one that is in no memory asks, so files that were refused are
    refused again unread, for REFUSED_S and while what the file system says of them is the same."""

    def __init__(
        self, source: AdapterSource, reader: CheckedReader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._reader = reader
        self._clock = clock
        self._refused: OrderedDict[AdapterSpec, tuple[object, float, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._open_budget = ByteBudget(MAX_READ_BYTES, SMALL_READ_BYTES)
        self._opened = OpenedModels(MAX_OPEN_BYTES)

    def open(self, path: str, adapter_name: str, tenant: str = "", roots: tuple[str, ...] = ()) -> AdapterContent:
        """Raises what `read_adapter` raises. What it read is there for the next `read` of it. tenant: whose turns at
        what is costly it takes. roots: where the files must lie; (): where the source says."""
        inside = tuple(map(Path, roots))
        with working_for(tenant):
            model = read_adapter(path, adapter_name, self._source, self._reader, self._open_budget, inside)
        self._opened.put(path, model)
        return content_of(model)

    def read(self, spec: AdapterSpec) -> LoRAModel:
        """What `read_spec` reads and raises, and what `check_content` raises."""
        opened = self._opened.take(spec.path, spec.adapter_digest)
        if opened is not None:
            return opened.clone(spec.adapter_id)
        stamps = _stamps_of(AdapterFolder(Path(spec.path), spec.adapter_name))
        with self._lock:
            known, until_s, refusal = self._refused.get(spec, (None, 0.0, {}))
        if stamps is not None and stamps == known and self._clock() < until_s:
            raise error_from_payload(refusal)
        try:
            with working_for(spec.tenant):
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
