"""The verbs of adapters by name for an event loop: each runs in a thread, since it may wait for a fetch, a load or another verb."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from loraplex.adapters.registry import (
    AdapterInfo,
    LoadResult,
    LoadStatus,
    LoRARegistry,
    SwitchResult,
    UnloadResult,
)
from loraplex.core import AddOutcome
from loraplex.errors import LoraplexError

logger = logging.getLogger(__name__)

NUM_VERB_THREADS = 128  # made when needed; nearly all of them wait, for a fetch or for one another
NUM_VIEW_THREADS = 2

T = TypeVar("T")


class AdapterVerbs(ABC):
    """The part of AsyncEngine that clients of adapters see. Errors are the caller's alone."""

    def __init__(self) -> None:
        self._verbs = ThreadPoolExecutor(NUM_VERB_THREADS, thread_name_prefix="adapter-verb")
        self._views = ThreadPoolExecutor(NUM_VIEW_THREADS, thread_name_prefix="adapter-view")
        self._restores = ThreadPoolExecutor(1, thread_name_prefix="adapter-restore")  # never behind verbs that wait

    @property
    @abstractmethod
    def registry(self) -> LoRARegistry | None:
        """None when LoRA is off."""

    @abstractmethod
    def _registry_or_refuse(self) -> LoRARegistry:
        """Raises LoraDisabledError when LoRA is off."""

    @abstractmethod
    def check_can_serve(self) -> None:
        """Raises EngineError when the engine is gone, or is being started again."""

    def has_adapter(self, name: str) -> bool:
        return self.registry is not None and name in self.registry.names()

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        lora_int_id: int | None = None,
        load_inplace: bool = False,
        is_pinned: bool = False,
        keeps_equal: bool = False,
    ) -> LoadResult:
        load = partial(
            self._registry_or_refuse().load,
            name,
            path,
            lora_int_id=lora_int_id,
            load_inplace=load_inplace,
            is_pinned=is_pinned,
            keeps_equal=keeps_equal,
        )
        began_s = time.monotonic()
        try:
            result = await self._in_verb_thread(load)
        except LoraplexError as error:
            logger.warning("adapter %r could not be loaded from %r: %.1000s", name, path, error)
            raise
        if result.status is not LoadStatus.ALREADY_LOADED:
            _log_load(result, path, time.monotonic() - began_s)
        return result

    async def move_adapter(self, name: str, version: int | None = None) -> LoadResult:
        """To a kept version of the name; None is the one that answered before."""
        return await self._in_verb_thread(partial(self._registry_or_refuse().move, name, version))

    async def unload_adapter(self, name: str, deadline_s: float | None = None, force: bool = False) -> UnloadResult:
        registry = self._registry_or_refuse()
        return await self._in_verb_thread(partial(registry.unload, name, deadline_s=deadline_s, force=force))

    async def switch_adapter(
        self,
        old: str,
        new: str,
        new_path: str | None = None,
        deadline_s: float | None = None,
        force: bool = False,
    ) -> SwitchResult:
        registry = self._registry_or_refuse()
        switch = partial(registry.switch, old, new, new_path=new_path, deadline_s=deadline_s, force=force)
        return await self._in_verb_thread(switch)

    async def pin_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._registry_or_refuse().pin, name))

    async def unpin_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._registry_or_refuse().unpin, name))

    async def evict_adapter(self, name: str) -> bool:
        return await self._in_verb_thread(partial(self._registry_or_refuse().evict, name))

    async def preload_adapter(self, name: str) -> AddOutcome:
        return await self._in_verb_thread(partial(self._registry_or_refuse().preload, name))

    async def describe_adapter(self, name: str) -> AdapterInfo:
        return await self._in_thread(self._views, partial(self._registry_or_refuse().describe, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.registry is None else await self._in_thread(self._views, self.registry.list_adapters)

    async def _in_verb_thread(self, verb: Callable[[], T]) -> T:
        return await self._in_thread(self._verbs, verb)

    async def _in_thread(self, threads: ThreadPoolExecutor, verb: Callable[[], T]) -> T:
        """Not while the engine is being restarted: it would meet its adapters half restored."""
        self.check_can_serve()
        return await asyncio.get_running_loop().run_in_executor(threads, verb)


def _log_load(result: LoadResult, path: str, seconds: float) -> None:
    ref = result.ref
    what = f"version {ref.adapter_version}, rank {ref.max_rank}"
    logger.info("adapter %r: %s from %r in %.3f s (%s)", ref.adapter_name, result.status.value, path, seconds, what)
