"""Which weights answer for which name: `LoRARegistry`, what it hands out and what its verbs return.

Its modules are imported when a name is first used: settings of a command line need the rules of names alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.adapters.registry.adapter_name import check_clients_name
    from loraplex.adapters.registry.drain import Draining, start_thread
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
    from loraplex.adapters.registry.registry import HeldAdapters, LoRARegistry
    from loraplex.adapters.registry.verbs import (
        CheckAnswer,
        LoadResult,
        LoadStatus,
        LoadTurn,
        SwitchResult,
        UnloadResult,
        any_answer,
    )
    from loraplex.adapters.registry.version import ContentDigests, LoRARef, OpenedAdapter, text_digest
    from loraplex.adapters.registry.views import AdapterInfo, LoadedName, NameQuery, VersionInfo, VersionState

_MODULES = {
    "adapter_name": ("check_clients_name",),
    "drain": ("Draining", "start_thread"),
    "following": ("OnChange",),
    "records": (
        "AdapterText",
        "DatabaseHealth",
        "DatabaseState",
        "Journal",
        "NameChange",
        "NameRecord",
        "NameUsage",
        "SharedJournal",
        "VersionRecord",
    ),
    "registry": ("HeldAdapters", "LoRARegistry"),
    "verbs": ("CheckAnswer", "LoadResult", "LoadStatus", "LoadTurn", "SwitchResult", "UnloadResult", "any_answer"),
    "version": ("ContentDigests", "LoRARef", "OpenedAdapter", "text_digest"),
    "views": ("AdapterInfo", "LoadedName", "NameQuery", "VersionInfo", "VersionState"),
}
_HOME_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdapterInfo",
    "AdapterText",
    "CheckAnswer",
    "ContentDigests",
    "DatabaseHealth",
    "DatabaseState",
    "Draining",
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
    "any_answer",
    "check_clients_name",
    "start_thread",
    "text_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
