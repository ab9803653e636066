"""The registry's store over an engine in the same process."""

from __future__ import annotations

from collections.abc import Callable

from loraplex.core import TokenOutput
from loraplex.engine.engine import EngineCore


class InProcessStore:
    """`AdapterStore`: the memory's own verbs, and the engine's abort, whose outputs go to `aborted`."""

    def __init__(self, engine: EngineCore, aborted: list[TokenOutput]) -> None:
        adapters = engine.adapters
        self.add_adapter = adapters.add_adapter
        self.attach_adapters = adapters.attach_adapters
        self.drop_adapter = adapters.drop_adapter
        self.promote_adapter = adapters.promote_adapter
        self.evict_adapter = adapters.evict_adapter
        self.pin_adapter = adapters.pin_adapter
        self.unpin_adapter = adapters.unpin_adapter
        self.list_adapters = adapters.list_adapters
        self._engine = engine
        self._aborted = aborted

    def abort_adapter(self, adapter_id: int) -> int:
        outputs = self._engine.abort_adapter(adapter_id)
        self._aborted += outputs
        return len(outputs)


def run_now(job: Callable[[], None]) -> None:
    """The last release of an unloaded adapter drops it on the spot: nobody else waits in an offline engine."""
    job()
