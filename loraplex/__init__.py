"""Loraplex: one base model in memory, thousands of LoRA adapters, any mix of them in one batch.

    from loraplex import LLM, LoRARequest, SamplingParams

Importing this package imports no torch: the names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.config import EngineConfig, LoRAConfig
    from loraplex.core import CompletionOutput, LoRARequest, RequestOutput, SamplingParams
    from loraplex.errors import LoraplexError
    from loraplex.frontend.async_engine import AsyncEngine
    from loraplex.frontend.llm import LLM
    from loraplex.structured.params import StructuredOutputsParams

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": "loraplex.frontend.llm",
    "AsyncEngine": "loraplex.frontend.async_engine",
    "SamplingParams": "loraplex.core",
    "LoRARequest": "loraplex.core",
    "RequestOutput": "loraplex.core",
    "CompletionOutput": "loraplex.core",
    "EngineConfig": "loraplex.config",
    "LoRAConfig": "loraplex.config",
    "LoraplexError": "loraplex.errors",
    "StructuredOutputsParams": "loraplex.structured.params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "LoRAConfig",
    "LoRARequest",
    "LoraplexError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
