"""The verbs of adapters by name, for Python callers of an engine on an event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from loraplex.adapters.registry import AdapterInfo, LoadResult, LoadStatus, LoRARegistry
from loraplex.errors import LoraplexError
from loraplex.frontend.adapter_updates import AdapterUpdates, expecting

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _method(verb: Callable[Concatenate[LoRARegistry, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A verb of the registry as a method of the engine."""

    @wraps(verb)
    async def method(self: AdapterVerbs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.on_registry(verb, *args, **kwargs)

    return method


class AdapterVerbs(ABC):
    """Verbs of an engine's clients: `await engine.pin_adapter("sql")` is `LoRARegistry.pin`, run by `on_registry`."""

    @property
    @abstractmethod
    def registry(self) -> LoRARegistry | None:
        """None when LoRA is off."""

    @property
    @abstractmethod
    def updates(self) -> AdapterUpdates:
        """What makes new versions of tensors. Raises LoraDisabledError."""

    @abstractmethod
    async def on_registry(
        self, verb: Callable[Concatenate[LoRARegistry, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a verb of the registry where it may wait: `await engine.on_registry(LoRARegistry.pin, "sql")`. Raises
        what it raises.

        LoraDisabledError when LoRA is off; EngineError when the engine is unavailable or is being restarted.
        """

    load_adapter = _method(LoRARegistry.load)
    clone_adapter = _method(LoRARegistry.clone)
    move_adapter = _method(LoRARegistry.move)
    unload_adapter = _method(LoRARegistry.unload)
    switch_adapter = _method(LoRARegistry.switch)
    pin_adapter = _method(LoRARegistry.pin)
    unpin_adapter = _method(LoRARegistry.unpin)
    evict_adapter = _method(LoRARegistry.evict)
    preload_adapter = _method(LoRARegistry.preload)
    describe_adapter = _method(LoRARegistry.describe)

    async def update_adapter_tensors(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor] | bytes,
        adapter_config: Mapping[str, Any] | None = None,
        *,
        expected_version: int | None = None,
    ) -> LoadResult:
        """Make a new version of an adapter from tensors in memory, as a trainer does after each step.

        tensors: all of them, by their names in peft (`get_peft_model_state_dict`), or the bytes of a safetensors file.
        adapter_config: as in adapter_config.json; None: that of the version that is loaded. expected_version: the
        version that is to be replaced. Requests that run keep their version; equal tensors are no new version.

        Raises AdapterNotFoundError for a name that is not loaded without a configuration, AdapterConflictError for
        another version, and what validation raises: then the adapter is what it was.
        """
        upload = await asyncio.to_thread(self.updates.receive, tensors, adapter_config)
        async with self.updates.abandoning(upload), self.updates.turn(name):
            return await self.on_registry(self.updates.update, name, upload, expecting(name, expected_version))

    async def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.registry is None else await self.on_registry(LoRARegistry.list_adapters)

    def has_adapter(self, name: str) -> bool:
        return self.registry is not None and self.registry.find(name) is not None


def logged_load(registry: LoRARegistry, name: str, path: str, **wishes: Any) -> LoadResult:
    """`LoRARegistry.load`, and a line in the log of what became of it."""
    began_s = time.monotonic()
    try:
        result = registry.load(name, path, **wishes)
    except LoraplexError as error:
        logger.warning("adapter %r could not be loaded from %r: %.1000s", name, path, error)
        raise
    if result.status is not LoadStatus.ALREADY_LOADED:
        ref, seconds = result.ref, time.monotonic() - began_s
        what = f"version {ref.adapter_version}, rank {ref.max_rank}"
        logger.info("adapter %r: %s from %r in %.3f s (%s)", ref.adapter_name, result.status.value, path, seconds, what)
    return result
