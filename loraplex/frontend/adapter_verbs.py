"""The verbs of adapters by name, for Python callers of an engine on an event loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from loraplex.adapters.registry import AdapterInfo, LoRARegistry

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

    async def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.registry is None else await self.on_registry(LoRARegistry.list_adapters)

    def has_adapter(self, name: str) -> bool:
        return self.registry is not None and name in self.registry.names()
