"""Which weights answer for which name: `LoRARegistry`, what it hands out and what its verbs return."""

from loraplex.adapters.registry.outcome import AdapterInfo, LoadResult, LoadStatus, SwitchResult, UnloadResult
from loraplex.adapters.registry.registry import LoRARegistry, start_thread
from loraplex.adapters.registry.version import LoRARef, OpenedAdapter

__all__ = [
    "AdapterInfo",
    "LoRARef",
    "LoRARegistry",
    "LoadResult",
    "LoadStatus",
    "OpenedAdapter",
    "SwitchResult",
    "UnloadResult",
    "start_thread",
]
