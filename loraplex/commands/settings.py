"""The engine's settings, as several commands have them, and how a command says an error of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import reduce
from importlib import import_module
from operator import getitem

from loraplex.cli_help import group_engine_fields, with_options
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig
from loraplex.errors import ConfigError, LoraplexError

group_engine_fields()


def engine_config(
    model: str,
    engine: EngineSettings | None,
    lora: LoRAConfig | None,
    enable_lora: bool,
    merge_adapter: str | None = None,
) -> EngineConfig:
    if lora is not None and not enable_lora:
        raise ConfigError("settings of LoRA are given, but LoRA is off: leave them out, or --no-enable-lora")
    lora_config = (lora or LoRAConfig()) if enable_lora else None
    settings = asdict(engine or EngineSettings())
    return EngineConfig(**settings, model=model, lora=lora_config, merge_adapter=merge_adapter)


def in_options_of(*command: str) -> Callable[[LoraplexError], str]:
    """How a command says an error: one of settings names options."""
    # the application imports this module, by its name
    app = import_module("loraplex.cli").app
    return lambda error: with_options(str(error), reduce(getitem, command, app))
