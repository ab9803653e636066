"""Which weights answer for which name: `LoRARegistry`, what it hands out and what its verbs return."""

from loraplex.adapters.registry.adapter_name import check_clients_name
from loraplex.adapters.registry.following import OnChange
from loraplex.adapters.registry.records import (
    AdapterText,
    DatabaseHealth,
    DatabaseState,
    Journal,
    NameChange,
    NameRecord,
    NameUsage,
    SharedJournal,
    VersionRecord,
)
from loraplex.adapters.registry.registry import HeldAdapters, LoRARegistry, start_thread
from loraplex.adapters.registry.verbs import LoadResult, LoadStatus, LoadTurn, SwitchResult, UnloadResult
from loraplex.adapters.registry.version import LoRARef, OpenedAdapter
from loraplex.adapters.registry.views import AdapterInfo, LoadedName, NameQuery, VersionInfo, VersionState

__all__ = [
    "AdapterInfo",
    "AdapterText",
    "DatabaseHealth",
    "DatabaseState",
    "HeldAdapters",
    "Journal",
    "LoRARef",
    "LoRARegistry",
    "LoadResult",
    "LoadStatus",
    "LoadTurn",
    "LoadedName",
    "NameChange",
    "NameQuery",
    "NameRecord",
    "NameUsage",
    "OnChange",
    "OpenedAdapter",
    "SharedJournal",
    "SwitchResult",
    "UnloadResult",
    "VersionInfo",
    "VersionRecord",
    "VersionState",
    "check_clients_name",
    "start_thread",
]
