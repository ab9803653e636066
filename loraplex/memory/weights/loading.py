"""Loads beside the step loop: where packed weights are read from, and what errors mean.

Weights come to host memory from the nearest place that has them: a compressed copy, the disk tier, the source. What was
read from a source is written to the disk tier at once, while it is in the processor's cache: then leaving the host
costs nothing, and coming back is one read. Reads run without any lock, in any thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from loraplex.adapters.source_reader import check_content
from loraplex.adapters.weights import LoRAModel
from loraplex.core import Tier
from loraplex.errors import (
    AdapterBeyondQuotaError,
    AdapterConfigMissingError,
    AdapterContentChangedError,
    AdapterError,
    AdapterFetchError,
    AdapterFetchTimeoutError,
    AdapterLoadError,
    AdapterNoRoomError,
    AdapterPathForbiddenError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterQuotaError,
    AdapterUnavailableError,
    AdapterValidationError,
    AdapterWeightsMissingError,
    EngineShutdownError,
    LoraplexError,
    error_from_payload,
)
from loraplex.memory.residency.records import LoadJob, Place, StoredAdapter, StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.weights.compression import CompressedCopies, CompressedCopy
from loraplex.memory.weights.disk_cache import DiskCache, DiskRead
from loraplex.memory.weights.packing import PackedLayout, Packer, UnfitWeightsError
from loraplex.processes.fair_turns import STUCK_S
from loraplex.processes.loader_threads import ReadSlots

_log = logging.getLogger(__name__)

HEDGE_S = 1.0
"""After which a source that has not answered has company: the next one's."""

MAX_HEDGED = 4
"""Sources of a content that are read at a time."""

_SOURCE_GONE = (
    AdapterPathNotFoundError,
    AdapterConfigMissingError,
    AdapterWeightsMissingError,
    AdapterPermissionError,
    AdapterPathForbiddenError,
    AdapterFetchError,
    AdapterFetchTimeoutError,
    OSError,
)


@dataclass(frozen=True, slots=True)
class JobRun:
    """What a loader is given for a load or a copy: `run` of `job`. A loader may look at the job."""

    run: Callable[[LoadJob], None]
    job: LoadJob

    def __call__(self) -> None:
        self.run(self.job)


class Loader(Protocol):
    """Runs jobs in the background, those of a tenant in order. Jobs do not raise. Those of loads and copies are
    `JobRun`s."""

    def submit(self, job: Callable[[], None], tenant: str = "") -> None: ...

    def close(self) -> None:
        """Finish the jobs that run, forget those that do not."""
        ...


def read_weights(weights: StoredWeights, adapters: Sequence[StoredAdapter]) -> LoRAModel:
    """The content of a digest, from the first source that still has it: the last adapter's, then the newest one's of
    each other tenant. One that does not answer within HEDGE_S keeps no other one waiting: it may be a tenant's that
    hangs or is slow.

    Raises SourcesFailedError with what each adapter's own source answered: on a first load the error itself; later
    AdapterUnavailableError when it is gone and AdapterContentChangedError when it answers with anything else than the
    content that was loaded.
    """
    answers: queue.SimpleQueue[tuple[StoredAdapter, LoRAModel | Exception]] = queue.SimpleQueue()

    def read(adapter: StoredAdapter) -> None:
        try:
            answers.put((adapter, _read_source(adapter)))
        except Exception as error:
            answers.put((adapter, error))

    waiting = deque(_in_turns(adapters))
    asked, num_running = adapters[-1].adapter_id, 0
    errors: dict[int, LoraplexError] = {}
    while waiting or num_running:
        may_begin = bool(waiting) and num_running < MAX_HEDGED
        if may_begin:
            adapter, num_running = waiting.popleft(), num_running + 1
            has_others = bool(waiting) or num_running > 1
            if not (has_others and _is_begun(partial(read, adapter))):
                read(adapter)
            may_begin = bool(waiting) and num_running < MAX_HEDGED
        try:
            adapter, answer = answers.get(timeout=HEDGE_S if may_begin else STUCK_S if asked in errors else None)
        except queue.Empty:
            if may_begin:
                continue
            break
        num_running -= 1
        if isinstance(answer, LoRAModel):
            return answer
        is_reload = weights.layout is not None or adapter.is_attached
        errors[adapter.adapter_id] = _explained(answer, adapter, is_reload)
    raise SourcesFailedError(errors)


def _is_begun(read: Callable[[], None]) -> bool:
    """In a thread of its own; False where the system has none."""
    try:
        threading.Thread(target=read, name="loraplex-source", daemon=True).start()
    except RuntimeError as error:
        _log.warning("no thread for a source: %s", error)
        return False
    return True


def _in_turns(adapters: Sequence[StoredAdapter]) -> list[StoredAdapter]:
    """From the last one: the first of each tenant before all others."""
    first = {adapter.spec.tenant: adapter for adapter in adapters}.values()
    ids = {adapter.adapter_id for adapter in first}
    newest = reversed(adapters)
    return sorted(newest, key=lambda adapter: adapter.adapter_id not in ids)


class SourcesFailedError(Exception):
    """No source of a content could be read. `errors` by adapter_id, since adapters of one content may be different
    tenants': each is told of its own source and of no other.
    """

    def __init__(self, errors: Mapping[int, LoraplexError]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors = errors


def errors_of(error: BaseException, adapters: Sequence[StoredAdapter]) -> dict[int, LoraplexError]:
    """What a failed load is to each of the adapters that it was for, by adapter_id; the last one asked. The limit of
    its tenant is nothing to those of others: they are not in it, and load for themselves.
    """
    if isinstance(error, SourcesFailedError):
        return dict(error.errors)
    if isinstance(error, AdapterBeyondQuotaError | AdapterQuotaError) and error.tenant == adapters[-1].spec.tenant:
        adapters = [each for each in adapters if each.spec.tenant == error.tenant]
    return {adapter.adapter_id: as_adapter_error(error, adapter.name) for adapter in adapters}


def _read_source(adapter: StoredAdapter) -> LoRAModel:
    model = adapter.open_weights()
    check_content(adapter.spec, model.adapter_digest)
    return model


def _explained(error: Exception, adapter: StoredAdapter, is_reload: bool) -> LoraplexError:
    name = adapter.spec.adapter_name
    if is_reload and isinstance(error, _SOURCE_GONE):
        return AdapterUnavailableError(
            f"adapter {name!r}: no copy of it is in memory and its source cannot be read "
            f"({error}); bring it back, or unload the adapter"
        )
    if is_reload and isinstance(error, AdapterLoadError):
        # What the source has now may be anything, a link to another file too: the log is for the operator, the answer
        # for a client.
        _log.warning("adapter %r: its source is refused now: %s", name, error)
        return AdapterContentChangedError(
            f"adapter {name!r}: the content of its source has changed since it was loaded, and is refused now; reload "
            "it"
        )
    return as_adapter_error(error, name)


def as_adapter_error(error: BaseException, adapter_name: str) -> LoraplexError:
    """`error` when it is an AdapterError (or the engine's end); AdapterValidationError for weights that do not fit the
    base; AdapterNoRoomError without memory; else AdapterLoadError."""
    if isinstance(error, AdapterError | EngineShutdownError):
        return error
    if isinstance(error, UnfitWeightsError):
        return AdapterValidationError.from_reasons(adapter_name, [str(error)])
    if is_out_of_memory(error):
        return AdapterNoRoomError(f"adapter {adapter_name!r} could not be loaded for lack of memory; try again later")
    return AdapterLoadError(f"adapter {adapter_name!r} could not be loaded: {type(error).__name__}: {error}")


def raise_again(error: LoraplexError) -> None:
    """Raise an equal error: one object raised in several threads would collect all their tracebacks."""
    raise error_from_payload(error.to_payload()) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )


def is_device_lost(error: BaseException) -> bool:
    """Whether the process cannot use the device after such a CUDA error. What a capture refuses is none."""
    text = str(error)
    is_harmless = "out of memory" in text or "captur" in text
    return isinstance(error, RuntimeError) and "CUDA error" in text and not is_harmless


# ------------------------------------------------------------------------------------------------------- weight reader


COMPRESSED = "compressed"

Reserve = Callable[[tuple[int, ...]], Place | None]
"""Host memory in pieces of these sizes, for the job. None: no room, and it may not wait. AdapterMemoryError."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load brought. checksums: of the extents; origin: what was read, `compressed`, `disk` or `source`.

    is_placed: False when there was no room, so that only the layout was learnt.
    """

    layout: PackedLayout
    checksums: tuple[int, ...]
    origin: str
    is_placed: bool = True


class Reader(Protocol):
    """Brings weights to host memory."""

    def read(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        """In any thread. Raises what the sources answer, and what `reserve` raises."""
        ...


class WeightReader:
    """Reads from the nearest place that has the weights. At most `max_concurrent` pack or read copies at once; neither
    reading a source nor waiting for memory counts, nor what hangs. has_tenants: whether there are several now; each
    leaves a place to the others then.
    """

    def __init__(self, packer: Packer, tiers: Tiers, max_concurrent: int, has_tenants: Callable[[], bool]) -> None:
        self._packer = packer
        self._tiers = tiers
        self._busy = ReadSlots(max_concurrent, is_shared=has_tenants)

    def read(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        """Raises what the sources answer when nothing else has the weights, and what `reserve` raises."""
        digest, compressed, disk = job.weights.digest, self._tiers.compressed, self._tiers.disk
        loaded = None
        if compressed is not None and (kept := compressed.get(digest)) is not None:
            loaded = self._from_compressed(job, compressed, kept, reserve)
            job.damaged_copies += [COMPRESSED] if loaded is None else []
        if loaded is None and disk is not None and disk.has(digest):
            loaded = self._from_disk(job, disk, reserve)
        return loaded or self._from_source(job, reserve)

    def _from_compressed(
        self, job: LoadJob, copies: CompressedCopies, kept: CompressedCopy, reserve: Reserve
    ) -> LoadedWeights | None:
        views = self._views(reserve(kept.layout.sizes))
        if views is None:
            return LoadedWeights(kept.layout, (), COMPRESSED, is_placed=False)
        with self._turn(job):
            copies.compression.restore(kept, views)
            checksums = self._packer.checksums(views)
        copies.drop(job.weights.digest)
        if kept.checksums not in (None, checksums):
            return None
        return LoadedWeights(kept.layout, checksums, COMPRESSED)

    def _from_disk(self, job: LoadJob, disk: DiskCache, reserve: Reserve) -> LoadedWeights | None:
        """None without a good file: other writers may delete one for room at any moment, which is no damage."""
        digest, on_damage = job.weights.digest, partial(job.damaged_copies.append, Tier.DISK.value)
        # Not what is known: what came back from a lossy copy has other checksums.
        stored = disk.read_layout(digest, on_damage)
        if stored is None:
            return None
        views = self._views(reserve(stored.layout.sizes))
        if views is None:
            return LoadedWeights(stored.layout, (), Tier.DISK.value, is_placed=False)
        with self._turn(job):
            outcome = disk.read_into(digest, views)
        if outcome is DiskRead.DAMAGED:
            on_damage()
        return LoadedWeights(stored.layout, stored.checksums, Tier.DISK.value) if outcome is DiskRead.DONE else None

    def _from_source(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        model = read_weights(job.weights, job.sources)
        with self._turn(job):
            layout = self._packer.lay_out(model)
        views = self._views(reserve(layout.sizes))
        if views is None:
            return LoadedWeights(layout, (), Tier.SOURCE.value, is_placed=False)
        with self._turn(job):
            self._packer.write(model, layout, views)
            checksums = self._packer.checksums(views)
            if self._tiers.disk is not None:
                self._tiers.disk.write(job.weights.digest, layout, views, checksums)
        return LoadedWeights(layout, checksums, Tier.SOURCE.value)

    def _turn(self, job: LoadJob) -> AbstractContextManager[None]:
        return self._busy.of(job.sources[-1].spec.tenant)

    def _views(self, place: Place | None) -> list[torch.Tensor] | None:
        return None if place is None else [self._tiers.host.pool.view(extent) for extent in place.extents]
