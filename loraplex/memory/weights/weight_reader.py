"""Packed weights into host memory, from the nearest place that has them: a compressed copy, the disk tier, the source.

What was read from a source is written to the disk tier at once, while it is in the processor's cache: then leaving the host costs nothing,
and coming back is one read. Runs without any lock, in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from loraplex.adapters.weights import LoRAModel
from loraplex.core import Tier
from loraplex.memory.residency.compressed_copies import CompressedCopies
from loraplex.memory.residency.records import LoadJob
from loraplex.memory.residency.tiers import HostCache, Place
from loraplex.memory.weights.disk_cache import DiskCache, DiskRead
from loraplex.memory.weights.loading import ReadSlots, read_weights
from loraplex.memory.weights.packing import PackedLayout, Packer

COMPRESSED = "compressed"

Reserve = Callable[[tuple[int, ...]], Place | None]
"""Host memory in pieces of these sizes, for the job under way. None: there is no room and it may not wait. Raises AdapterMemoryError."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What a load brought. checksums: of the extents; origin: what was read, `compressed`, `disk` or `source`.

    is_placed: False when there was no room, so that only the layout was learnt.
    """

    layout: PackedLayout
    checksums: tuple[int, ...]
    origin: str
    is_placed: bool = True


class WeightReader:
    """At most `max_concurrent` reads at once; neither waiting for memory nor a read that hangs counts."""

    def __init__(
        self,
        packer: Packer,
        host: HostCache,
        disk: DiskCache | None,
        compressed: CompressedCopies | None,
        max_concurrent: int,
    ) -> None:
        self._packer = packer
        self._host = host
        self._disk = disk
        self._compressed = compressed
        self._busy = ReadSlots(max_concurrent)

    def read(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        """Raises what the sources answer when the disk tier has nothing (loading.read_weights), and what `reserve` raises."""
        digest = job.weights.digest
        loaded = None
        if self._compressed is not None and self._compressed.get(digest) is not None:
            loaded = self._from_compressed(self._compressed, digest, reserve)
            job.damaged_copies += [COMPRESSED] if loaded is None else []
        if loaded is None and self._disk is not None and self._disk.has(digest):
            loaded = self._from_disk(self._disk, digest, reserve)
            job.damaged_copies += [Tier.DISK.value] if loaded is None else []
        return loaded or self._from_source(job, reserve)

    def _from_compressed(self, copies: CompressedCopies, digest: str, reserve: Reserve) -> LoadedWeights | None:
        kept = copies.get(digest)
        if kept is None:
            return None
        views = self._views(reserve(kept.layout.sizes))
        if views is None:
            return LoadedWeights(kept.layout, (), COMPRESSED, is_placed=False)
        with self._busy:
            copies.compression.restore(kept.copy, kept.layout, views)
            checksums = self._packer.checksums(views)
        copies.drop(digest)
        if kept.checksums not in (None, checksums):
            return None
        return LoadedWeights(kept.layout, checksums, COMPRESSED)

    def _from_disk(self, disk: DiskCache, digest: str, reserve: Reserve) -> LoadedWeights | None:
        stored = disk.read_layout(
            digest
        )  # not what is known: a copy that came back from a lossy compression has other checksums
        if stored is None:
            return None
        views = self._views(reserve(stored.layout.sizes))
        if views is None:
            return LoadedWeights(stored.layout, (), Tier.DISK.value, is_placed=False)
        with self._busy:
            outcome = disk.read_into(digest, views)
        return LoadedWeights(stored.layout, stored.checksums, Tier.DISK.value) if outcome is DiskRead.DONE else None

    def _from_source(self, job: LoadJob, reserve: Reserve) -> LoadedWeights:
        with self._busy:
            model: LoRAModel = read_weights(job.weights, job.sources)
            plan = self._packer.plan(model)
        views = self._views(reserve(plan.sizes))
        if views is None:
            return LoadedWeights(plan.layout, (), Tier.SOURCE.value, is_placed=False)
        with self._busy:
            layout = plan.write(views)
            checksums = self._packer.checksums(views)
            if self._disk is not None:
                self._disk.write(job.weights.digest, layout, views, checksums)
        return LoadedWeights(layout, checksums, Tier.SOURCE.value)

    def _views(self, place: Place | None) -> list[torch.Tensor] | None:
        return None if place is None else [self._host.pool.view(extent) for extent in place.extents]
