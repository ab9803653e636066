"""The adapters of an engine process, as the registry's threads see them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from loraplex.core import AdapterResidency, AdapterSpec, AddOutcome
from loraplex.errors import EngineDeadError, EngineShutdownError
from loraplex.frontend import messages as msg

logger = logging.getLogger(__name__)


class RemoteStore:
    """`AdapterStore` over an engine process, for the registry's worker threads. Never called on the event loop."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine_of = call
        self._loop = loop
        self._is_closed = False

    def close(self) -> None:
        """From now on calls raise EngineShutdownError: a loop that ends would leave them waiting for ever."""
        self._is_closed = True

    def _call(self, message_type: type, *values: Any) -> Any:
        if self._is_closed:
            raise EngineShutdownError("the engine is shutting down")
        return asyncio.run_coroutine_threadsafe(self._coroutine_of(message_type, *values), self._loop).result()

    def add_adapter(self, spec: AdapterSpec) -> AddOutcome:
        outcome: AddOutcome = self._call(msg.AddAdapter, spec)
        return outcome

    def attach_adapters(self, specs: Sequence[AdapterSpec]) -> None:
        self._call(msg.AttachAdapters, tuple(specs))

    def drop_adapter(self, adapter_id: int) -> None:
        try:
            self._call(msg.DropAdapter, adapter_id)
        except (EngineDeadError, EngineShutdownError):
            logger.info("adapter %d went with the engine process", adapter_id)

    def promote_adapter(self, adapter_id: int) -> AddOutcome:
        outcome: AddOutcome = self._call(msg.PromoteAdapter, adapter_id)
        return outcome

    def evict_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.EvictAdapter, adapter_id))

    def pin_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.PinAdapter, adapter_id))

    def unpin_adapter(self, adapter_id: int) -> bool:
        return bool(self._call(msg.UnpinAdapter, adapter_id))

    def abort_adapter(self, adapter_id: int) -> int:
        return int(self._call(msg.AbortAdapter, adapter_id))

    def list_adapters(self, adapter_ids: Sequence[int] | None = None) -> Sequence[AdapterResidency]:
        asked = None if adapter_ids is None else tuple(adapter_ids)
        residencies: tuple[AdapterResidency, ...] = self._call(msg.ListAdapters, asked)
        return residencies
