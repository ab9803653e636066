"""New versions of adapters from tensors that a client sends, as a trainer does after each of its steps.

receive   safetensors, piece by piece, into a folder that nothing reads yet (sources/uploads.py); with a configuration
          and texts beside them it is a whole adapter, and takes nothing over from the version that is loaded
open      configuration: what the file's metadata have under `adapter_config`, else that of the version that is loaded;
          then all that a directory passes: names, shapes, kinds, finite numbers, digest
publish   as a reload in place: requests that run keep the version that they began with

The folder is there as long as a registered version has it. What fails leaves nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from loraplex.adapters.files import CONFIG_NAME, SAFETENSORS_NAME, AdapterFolder, metadata_of
from loraplex.adapters.registry import (
    AdapterText,
    CheckAnswer,
    LoadResult,
    LoRARef,
    LoRARegistry,
    OpenedAdapter,
    any_answer,
)
from loraplex.adapters.sources.uploads import UPLOAD_PREFIX, Upload, UploadStore
from loraplex.core import AdapterSpec
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterConflictError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterNotFoundError,
    ConfigError,
    InvalidRequestError,
    shown,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONFIG_FIELD = "adapter_config"
"""Of the metadata of a safetensors file: the text of an adapter_config.json."""


class ReceivedOpener(Protocol):
    """What an `AdapterOpener` does with files that a client sent."""

    def open_received(self, directory: str, adapter_name: str, loaded: AdapterText | None) -> OpenedAdapter: ...

    def open_uploaded(self, directory: str, adapter_name: str) -> OpenedAdapter: ...

    def config_of(self, spec: AdapterSpec) -> bytes: ...


def any_version(loaded: LoRARef | None) -> None:
    """Whatever is loaded is replaced."""


@dataclass(frozen=True, slots=True)
class UpdateWish:
    """sha256: of the body, in hexadecimal digits; None: not said. check_loaded: is given what the name has, None for a
    new one, and raises where it is not what the caller expects. check_size: as in `LoRARegistry.load`, of all files;
    check_answer: as there."""

    sha256: str | None = None
    check_loaded: Callable[[LoRARef | None], None] = any_version
    check_size: Callable[[int], None] | None = None
    is_pinned: bool = False
    check_answer: CheckAnswer = any_answer


class AdapterUpdates:
    """`update` runs in any thread; `turn` belongs to one event loop."""

    def __init__(self, uploads: UploadStore, opener: ReceivedOpener) -> None:
        self.uploads = uploads
        self._opener = opener
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Updates of one name take effect in the order in which their tensors were complete."""
        lock = self._turns.setdefault(name, asyncio.Lock())
        async with lock:
            yield

    def update(self, registry: LoRARegistry, name: str, upload: Upload, wish: UpdateWish) -> LoadResult:
        """Make `name` resolve to what was received, or leave all as it is; the upload is over in any case.

        Raises InvalidRequestError for another sha256, AdapterNotFoundError for a name that is not loaded where the
        tensors bring no configuration, and what validation, `wish` and a load raise.
        """
        upload.take()
        try:
            self.check_can_update(registry)
            digest = upload.sha256(SAFETENSORS_NAME)
            if wish.sha256 not in (None, digest):
                text = f"the body has sha256 {digest}, and {shown(wish.sha256)} was expected; send it again"
                raise InvalidRequestError(text, param="sha256")
            received, check_size = partial(self._open, name, upload, wish), None
            if wish.check_size is not None:
                check_size = partial(self._check_size, upload, wish.check_size)
            source, began_s = f"{UPLOAD_PREFIX}{digest}", time.monotonic()
            result = registry.receive(
                name,
                source,
                received,
                is_pinned=wish.is_pinned,
                check_size=check_size,
                check_answer=wish.check_answer,
            )
            seconds, version = time.monotonic() - began_s, result.ref.adapter_version
            logger.info("adapter %r: %s from tensors in %.3f s (%d)", name, result.status.value, seconds, version)
            return result
        finally:
            if str(upload.folder) not in {spec.path for spec in registry.specs()}:
                upload.discard()

    def _check_size(self, upload: Upload, check: Callable[[int], None], nbytes: int) -> None:
        check(max(nbytes, self.uploads.size_of(str(upload.folder))))

    @asynccontextmanager
    async def abandoning(self, upload: Upload) -> AsyncIterator[None]:
        """An error in the block, or its cancellation, removes an upload that `update` has not taken."""
        try:
            yield
        except BaseException:
            asyncio.get_running_loop().run_in_executor(None, upload.abandon)  # a thread may still write
            raise

    @staticmethod
    def check_can_update(registry: LoRARegistry) -> None:
        """Raises ConfigError where other servers have the same names: what one was sent, the others do not have."""
        if registry.is_shared:
            raise ConfigError(
                "tensors that are sent to one server are not at the others that share its names (--database-url): "
                "write them to storage that all of them read, and load them from there"
            )

    def _open(
        self, name: str, upload: Upload, wish: UpdateWish, loaded: LoRARef | None, spec: AdapterSpec | None
    ) -> OpenedAdapter:
        wish.check_loaded(loaded)
        if upload.has(CONFIG_NAME):
            return self._opener.open_uploaded(str(upload.keep(upload.sha256(SAFETENSORS_NAME))), name)
        config = metadata_of(AdapterFolder(upload.folder, name)).get(CONFIG_FIELD)
        if config is not None and not isinstance(config, str):
            text = f"{CONFIG_FIELD} in its metadata is not a string; give the text of an {CONFIG_NAME}"
            raise AdapterFileFormatError(f"adapter {name!r}: {text}")
        upload.write(CONFIG_NAME, self._config_of(name, spec) if config is None else config.encode(errors="replace"))
        folder = upload.keep(upload.sha256(SAFETENSORS_NAME))
        return self._opener.open_received(str(folder), name, None if loaded is None else loaded.text)

    def _config_of(self, name: str, spec: AdapterSpec | None) -> bytes:
        remedy = f"send its configuration as {CONFIG_FIELD} in the metadata of the file"
        if spec is None:
            raise AdapterNotFoundError(f"adapter {shown(name)} is not loaded; load it first, or {remedy}")
        try:
            return self._opener.config_of(spec)
        except AdapterLoadError as error:
            text = f"the configuration of the version that is loaded cannot be read ({error}); {remedy}"
            raise AdapterConfigMissingError(f"adapter {name!r}: {text}") from error

    def close(self) -> None:
        self.uploads.close()

    # ------------------------------------------------------------------------------------------- for callers in Python

    def receive(self, tensors: Mapping[str, torch.Tensor] | bytes, adapter_config: Mapping[str, Any] | None) -> Upload:
        """Tensors of this process, by their names in peft, or bytes of a safetensors file. Raises InvalidRequestError
        for what is no safetensors file, and what `Upload.write` raises."""
        if not isinstance(tensors, bytes):
            tensors = _saved(tensors, adapter_config)
        elif adapter_config is not None:
            text = f"bytes of a file have their configuration as {CONFIG_FIELD} in their metadata; leave it out"
            raise InvalidRequestError(text, param="adapter_config")
        upload = self.uploads.receive()
        try:
            upload.write(SAFETENSORS_NAME, tensors)
        except BaseException:
            upload.discard()
            raise
        return upload


def expecting(name: str, version: int | None) -> UpdateWish:
    """An update of this version alone, or (None) of any. It raises AdapterConflictError."""

    def check(loaded: LoRARef | None) -> None:
        if version is not None and (loaded is None or loaded.adapter_version != version):
            found = "is not loaded" if loaded is None else f"has version {loaded.adapter_version}"
            raise AdapterConflictError(f"adapter {name!r} {found}, and {version} was expected", param="version")

    return UpdateWish(check_loaded=check)


def _saved(tensors: Mapping[str, torch.Tensor], adapter_config: Mapping[str, Any] | None) -> bytes:
    from safetensors.torch import save

    metadata = {} if adapter_config is None else {CONFIG_FIELD: _config_text(adapter_config)}
    try:
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return save(on_cpu, metadata)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"these tensors are no safetensors file: {error}", param="tensors") from error


def _config_text(adapter_config: Mapping[str, Any]) -> str:
    """`LoraConfig.to_dict()` of peft has sets."""
    try:
        return json.dumps(dict(adapter_config), default=sorted)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"adapter_config is no JSON: {error}", param="adapter_config") from error
