"""The adapters of an engine as the registry sees them (adapter_store.py), in this process or in another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from loraplex.adapter_store import AdapterStore
from loraplex.core import TokenOutput
from loraplex.errors import EngineDeadError, EngineShutdownError

if TYPE_CHECKING:
    from loraplex.engine.engine import EngineCore

logger = logging.getLogger(__name__)

STORE_METHODS = frozenset(name for name in vars(AdapterStore) if not name.startswith("_"))
"""All that an engine can be asked to do with its adapters, in this process or by a message."""


def store_methods(engine: EngineCore, end: Callable[[list[TokenOutput]], None]) -> dict[str, Callable[..., Any]]:
    """STORE_METHODS of an engine: its memory's own verbs, and the engine's abort, whose outputs go to `end`.

    Raises LoraDisabledError in an engine without LoRA.
    """

    def abort_adapter(adapter_id: int) -> int:
        outputs = engine.abort_adapter(adapter_id)
        end(outputs)
        return len(outputs)

    own = {"abort_adapter": abort_adapter}
    return {name: own.get(name) or getattr(engine.adapters, name) for name in STORE_METHODS}


def store_of(engine: EngineCore, end: Callable[[list[TokenOutput]], None]) -> AdapterStore:
    """The store of an engine in this process."""
    return cast(AdapterStore, SimpleNamespace(**store_methods(engine, end)))


class RemoteStore:
    """`AdapterStore` over an engine process, for the registry's worker threads. Never called on the event loop.

    `call(method, arguments)` asks the process.
    """

    def __init__(
        self, call: Callable[[str, tuple[Any, ...]], Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._coroutine_of = call
        self._loop = loop
        self._is_closed = False

    def close(self) -> None:
        """From now on calls raise EngineShutdownError: a loop that ends would leave them waiting."""
        self._is_closed = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in STORE_METHODS:
            raise AttributeError(f"AdapterStore has no {name!r}")
        return partial(self._call, name)

    def drop_adapter(self, adapter_id: int) -> None:
        try:
            self._call("drop_adapter", adapter_id)
        except (EngineDeadError, EngineShutdownError):
            logger.info("adapter %d went with the engine process", adapter_id)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._is_closed:
            raise EngineShutdownError("the engine is shutting down")
        bound = signature(getattr(AdapterStore, method)).bind(self, *args, **kwargs)
        bound.apply_defaults()  # the engine is sent every argument
        return asyncio.run_coroutine_threadsafe(self._coroutine_of(method, bound.args[1:]), self._loop).result()
