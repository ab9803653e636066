"""Verbs that wait (a hub that does not answer, a drain of a day) take threads of their own, and nothing else's."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from loraplex.frontend.adapter_verbs import NUM_VERB_THREADS, AdapterVerbs
from loraplex.frontend.async_engine import AsyncEngine


async def test_an_engine_gets_its_adapters_again_while_every_verb_thread_waits() -> None:
    """It stayed 503 until a verb ended: its adapters waited for a thread behind 128 loads."""
    engine, release, restored = cast(Any, object.__new__(AsyncEngine)), threading.Event(), threading.Event()
    AdapterVerbs.__init__(engine)
    engine._profile, engine._front = None, SimpleNamespace(registry=SimpleNamespace(restore=restored.set))
    for _ in range(NUM_VERB_THREADS):
        engine._verbs.submit(release.wait)
    try:
        await asyncio.wait_for(engine._restore(), 5)
    finally:
        release.set()
    assert restored.is_set()
