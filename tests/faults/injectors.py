"""Faults, put into the objects of a running engine: bytes that flip, files that end early, allocations, copies and
loads that fail.

Functions change something once and say what; context managers make something fail while they last, in every thread of
the process. What is injected into weights goes through the manager's lock, so that no adapter moves away under the
injector's hands.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from loraplex.core import Tier
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import POISON, Arena, Extent, Owner
from loraplex.memory.space.pool import LoRAMemoryPool
from loraplex.memory.weights import copies, loading

# ----------------------------------------------------------------------------------------------------- bytes of weights


def flip_host_bytes(manager: LoRAModelManager, adapter_id: int, rng: Random, num_bytes: int = 1) -> list[int]:
    """Flip one bit in each of `num_bytes` bytes of the adapter's host copy; their offsets in the arena, [] when there
    is no copy."""
    return _flip_bytes(manager, adapter_id, Tier.HOST, rng, num_bytes)


def flip_device_bytes(manager: LoRAModelManager, adapter_id: int, rng: Random, num_bytes: int = 1) -> list[int]:
    """The same in what kernels read; on a CPU that is the host copy of an adapter that has a lora_slot."""
    return _flip_bytes(manager, adapter_id, Tier.DEVICE, rng, num_bytes)


def poison_with_nan(manager: LoRAModelManager, adapter_id: int) -> bool:
    """Fill what kernels read of the adapter with NaN: its logits become NaN. False when it is not on the device."""
    with manager._residency.held():
        pool, extents = _memory_of(manager, adapter_id, Tier.DEVICE)
        for extent in extents:
            pool.view(extent).fill_(POISON)
        return bool(extents)


def _flip_bytes(manager: LoRAModelManager, adapter_id: int, tier: Tier, rng: Random, num_bytes: int) -> list[int]:
    with manager._residency.held():
        pool, extents = _memory_of(manager, adapter_id, tier)
        if not extents:
            return []
        chosen = (rng.choice(extents) for _ in range(num_bytes))
        offsets = sorted({rng.randrange(extent.offset, extent.end) for extent in chosen})
        for offset in offsets:
            pool.arena.memory[offset] ^= 1 << rng.randrange(8)
        return offsets


def _memory_of(manager: LoRAModelManager, adapter_id: int, tier: Tier) -> tuple[LoRAMemoryPool, tuple[Extent, ...]]:
    """The extents that hold the adapter in a tier, and their pool; none while they are being written. Lock held."""
    store = manager._residency
    adapter = manager._residency.adapters.get(adapter_id)
    weights = None if adapter is None else adapter.weights
    if weights is None or weights.layout is None or weights.job is not None:
        return store.tiers.host.pool, ()
    if tier is Tier.DEVICE and not weights.is_on_device:
        return store.tiers.host.pool, ()
    is_apart = tier is Tier.DEVICE and store.tiers.device.pool is not None
    place = weights.device if is_apart else weights.host
    pool = store.tiers.device.pool if is_apart else store.tiers.host.pool
    assert pool is not None
    return pool, () if place is None else place.extents


# ---------------------------------------------------------------------------------------------------------------- files


def flip_file_bytes(path: Path, rng: Random, num_bytes: int = 1) -> list[int]:
    """Flip one bit in each of `num_bytes` bytes of a file, in place; their offsets. An empty file stays as it is."""
    size = path.stat().st_size
    offsets = sorted({rng.randrange(size) for _ in range(num_bytes)}) if size else []
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0] ^ (1 << rng.randrange(8))
            file.seek(offset)
            file.write(bytes([byte]))
    return offsets


def truncate_file(path: Path, rng: Random) -> int:
    """Cut a file off at random, in place; the bytes that are left, always fewer than before."""
    size = rng.randrange(path.stat().st_size)
    os.truncate(path, size)
    return size


# ----------------------------------------------------------------------------------- what fails as long as it is wished


@contextlib.contextmanager
def failing_allocations(manager: LoRAModelManager, error: BaseException | None = None) -> Iterator[None]:
    """No pool of the adapters has an extent to give: `allocate_all` says None, or raises `error`."""
    store = manager._residency
    pools = {id(pool): pool for pool in (store.tiers.host.pool, store.tiers.device.pool) if pool is not None}.values()
    with contextlib.ExitStack() as stack:
        for pool in pools:
            stack.enter_context(mock.patch.object(pool, "allocate_all", _failing(error)))
        yield


@contextlib.contextmanager
def failing_lends(arena: Arena, owner: Owner) -> Iterator[None]:
    """The arena has no chunk left for `owner`."""
    lend = arena.lend

    def refuse(asks: Owner, num_chunks: int = 1) -> range | None:
        return None if asks is owner else lend(asks, num_chunks)

    with mock.patch.object(arena, "lend", refuse):
        yield


@contextlib.contextmanager
def failing_copies(error: BaseException) -> Iterator[None]:
    """No copy from host to device can be begun: `error` is raised. (On a CPU nothing is copied.)"""
    with contextlib.ExitStack() as stack:
        for engine in (copies.SynchronousCopies, copies.CudaCopies):
            stack.enter_context(mock.patch.object(engine, "copy", _failing(error)))
        yield


@contextlib.contextmanager
def failing_reads(error: Exception) -> Iterator[None]:
    """Loads are killed: whatever reads a source raises `error`."""
    with mock.patch.object(loading, "read_weights", _failing(error)):
        yield


@contextlib.contextmanager
def hanging_reads(patience_s: float = 60.0) -> Iterator[threading.Event]:
    """Loads hang before they read their source, until the event is set; at the end it is."""
    may_go_on, read_weights = threading.Event(), loading.read_weights

    def wait_and_read(*arguments: Any) -> Any:
        assert may_go_on.wait(patience_s), "the load was never let go on"
        return read_weights(*arguments)

    with mock.patch.object(loading, "read_weights", wait_and_read):
        try:
            yield may_go_on
        finally:
            may_go_on.set()


def _failing(error: BaseException | None) -> Callable[..., None]:
    def fail(*_arguments: Any, **_options: Any) -> None:
        if error is not None:
            raise error

    return fail
