"""Adapters made while a server runs: merges as background jobs, and exports. They are written under one folder.

start     the merge is planned and bounded (adapters/merging), then waits for its turn; or it is refused
run       computed and written in a process of the least priority (merge_process.py), then loaded as any other adapter
cancel    at once; a job that was cancelled or has failed leaves no file behind

Belongs to one event loop. No torch until there is something to make.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.adapters.merging.part_folder import folder_name, remove_abandoned, remove_parts
from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.registry import HeldAdapters, LoadResult, LoRARef, LoRARegistry
from loraplex.adapters.source import AdapterSource
from loraplex.errors import (
    AdapterBusyError,
    AdapterConflictError,
    AdapterNotFoundError,
    ConfigError,
    LoraplexError,
    RequestAbortedError,
)
from loraplex.frontend.merge_process import MergeProcess
from loraplex.private_folder import private_folder

if TYPE_CHECKING:
    from loraplex.adapters.merging.merge import MergePlan
    from loraplex.adapters.merging.outline import Origin

logger = logging.getLogger(__name__)

MAX_WAITING = 16
"""Merges that wait for their turn."""

MAX_EXPORTS = 16
"""That run or wait for their turn."""

MAX_REMEMBERED = 64
"""Jobs that have ended."""

OnRegistry = Callable[..., Any]
Loading = Callable[[str], AbstractAsyncContextManager[None]]


class JobState(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (JobState.WAITING, JobState.RUNNING)


@dataclass(eq=False, slots=True)
class MergeJob:
    """One merge. done, total: adapters that were read and modules that were made. nbytes: of the result, at most."""

    job_id: str
    name: str
    wish: MergeWish
    nbytes: int
    total: int
    is_pinned: bool
    created_time: float
    state: JobState = JobState.WAITING
    done: int = 0
    error: LoraplexError | None = None
    result: LoadResult | None = None
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def note_progress(self, done: int, _total: int) -> None:
        self.done = done


@dataclass(frozen=True, slots=True)
class Exported:
    name: str
    path: str
    adapter_digest: str
    nbytes: int


class AdapterMaker:
    """registry, on_registry: those of an `AsyncEngine`; the registry is None when LoRA is off. loading: around the load
    of a new name.

    folder: where made adapters are written, one folder each; None: nowhere.

    max_bytes: of memory, for one merge or export. roots: where the files of served adapters lie.
    """

    def __init__(
        self,
        registry: LoRARegistry | None,
        on_registry: OnRegistry,
        loading: Loading,
        folder: Path | None,
        max_bytes: int,
        roots: tuple[Path, ...] | None = None,
    ) -> None:
        self._registry = registry
        self._on_registry = on_registry
        self._loading = loading
        self.folder = folder
        if folder is not None:
            remove_abandoned(folder)
        self._max_bytes = max_bytes
        self._source = AdapterSource(roots)
        self._turns = asyncio.Lock()
        self._process = MergeProcess()
        self._merging = ThreadPoolExecutor(1, "merge")
        self._exporting = ThreadPoolExecutor(1, "export", _use_one_thread)
        self._jobs: dict[str, MergeJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._num_planned = self._num_exports = 0

    # ----------------------------------------------------------------------------------------------------------- merges

    async def start(self, name: str, wish: MergeWish, is_pinned: bool = False) -> MergeJob:
        """Plan a merge and queue it. Raises AdapterConflictError for a name that is there or is being made,
        AdapterBusyError when MAX_WAITING wait, and what planning raises; then nothing has been made."""
        self._check_can_start(name)
        held = self._hold([each for each, _ in wish.adapters])
        self._num_planned += 1
        try:
            plan = await self._on_registry(_plan, name, wish, held.refs, self._source, self._max_bytes)
            self._check_name(name)
        except BaseException:
            held.close()
            raise
        finally:
            self._num_planned -= 1
        total = len(plan.outlines) + len(plan.modules)
        job = MergeJob(f"merge-{next(self._numbers)}", name, wish, plan.nbytes, total, is_pinned, time.time())
        self._jobs[job.job_id] = job
        task = asyncio.create_task(self._run(job, plan))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: held.close())
        return job

    def _hold(self, names: Sequence[str]) -> HeldAdapters:
        """What answers for these names stays, with its files, until that is closed. Raises AdapterNotFoundError."""
        assert self._registry is not None
        refs: list[LoRARef] = []
        try:
            for name in names:
                refs.append(self._registry.hold(name))
        except LoraplexError:
            HeldAdapters(self._registry, tuple(refs)).close()
            raise
        return HeldAdapters(self._registry, tuple(refs))

    def _check_can_start(self, name: str) -> None:
        self._check_name(name)
        waiting = sum(not job.state.is_over for job in self._jobs.values()) + self._num_planned
        if waiting > MAX_WAITING:
            raise AdapterBusyError(f"{waiting} merges run or wait; start this one when some have ended")

    def _check_name(self, name: str) -> None:
        if any(job.name == name and not job.state.is_over for job in self._jobs.values()):
            raise AdapterConflictError(f"adapter {name!r} is being made by another merge", param="name")

    async def _run(self, job: MergeJob, plan: MergePlan) -> None:
        try:
            async with self._turns:
                if job.is_cancelled.is_set():  # while it waited; at the end of the server there are no threads for it
                    raise RequestAbortedError("the merge was cancelled")
                job.state = JobState.RUNNING
                await self._make_and_load(job, plan)
            job.state = JobState.DONE
            logger.info("adapter %r was merged: %s", job.name, job.wish.combination)
        except LoraplexError as error:
            job.error = error
            job.state = JobState.CANCELLED if isinstance(error, RequestAbortedError) else JobState.FAILED
            logger.warning("adapter %r could not be merged: %.1000s", job.name, error)
        except Exception:
            logger.exception("adapter %r could not be merged", job.name)
            job.error = LoraplexError("the merge failed by a mistake of the server; its log says which")
            job.state = JobState.FAILED
        self._forget_old()

    async def _make_and_load(self, job: MergeJob, plan: MergePlan) -> None:
        assert self.folder is not None
        loop, folder = asyncio.get_running_loop(), self.folder / folder_name(job.name)
        try:
            await loop.run_in_executor(self._merging, _make, self._process, job, plan, folder, self._max_bytes)
            async with self._loading(job.name):
                wish = LoRARegistry.load, job.name, str(folder)
                job.result = await self._on_registry(*wish, is_pinned=job.is_pinned)
        except BaseException:
            assert self._registry is not None
            await asyncio.to_thread(_remove_unless_loaded, self._registry, job.name, folder)
            raise

    def _forget_old(self) -> None:
        over = [job_id for job_id, job in self._jobs.items() if job.state.is_over]
        for job_id in over[: max(0, len(over) - MAX_REMEMBERED)]:
            del self._jobs[job_id]

    @property
    def jobs(self) -> tuple[MergeJob, ...]:
        """Those that wait, run, or have ended lately, oldest first."""
        return tuple(self._jobs.values())

    def job(self, job_id: str) -> MergeJob:
        found = self._jobs.get(job_id)
        if found is None:
            raise AdapterNotFoundError(f"there is no merge {job_id!r}; the last {MAX_REMEMBERED} that ended are kept")
        return found

    def cancel(self, job_id: str) -> MergeJob:
        """End a merge. One that has ended is left as it is."""
        job = self.job(job_id)
        job.is_cancelled.set()
        if job.state is JobState.RUNNING:
            self._process.kill()
        return job

    # ---------------------------------------------------------------------------------------------------------- exports

    async def export(self, name: str) -> Exported:
        """Write what is served under a name, or under `name@N`. Cancelled, it ends before its next step.

        Raises AdapterBusyError when MAX_EXPORTS run or wait, and what exporting raises.
        """
        assert self.folder is not None
        if self._num_exports >= MAX_EXPORTS:
            raise AdapterBusyError(f"{self._num_exports} exports run or wait; ask for this one when some have ended")
        is_cancelled, held = threading.Event(), self._hold([name])
        self._num_exports += 1
        try:
            origin = await self._on_registry(_origin, name, held.refs[0], self._source)
            work = partial(_export, origin, self.folder, self._max_bytes, is_cancelled.is_set)
            return await asyncio.get_running_loop().run_in_executor(self._exporting, work)
        finally:
            is_cancelled.set()
            held.close()
            self._num_exports -= 1

    def close(self) -> None:
        """Cancel what runs and waits."""
        for job in self._jobs.values():
            job.is_cancelled.set()
        self._process.end()
        for threads in (self._merging, self._exporting):
            threads.shutdown(wait=False, cancel_futures=True)


def _use_one_thread() -> None:
    """Of torch: the engine's kernels need the cores."""
    import torch

    torch.set_num_threads(1)


def _origin(registry: LoRARegistry, name: str, ref: LoRARef, source: AdapterSource) -> Origin:
    from loraplex.adapters.merging.outline import Origin

    spec = registry.spec_of(ref)
    return Origin(name, spec.path, source, spec.adapter_digest)


def _plan(
    registry: LoRARegistry,
    name: str,
    wish: MergeWish,
    refs: Sequence[LoRARef],
    source: AdapterSource,
    max_bytes: int,
) -> MergePlan:
    from loraplex.adapters.merging.merge import plan_merge

    registry.check_new_name(name)
    origins = [_origin(registry, each, ref, source) for (each, _), ref in zip(wish.adapters, refs, strict=True)]
    return plan_merge(origins, wish, max_bytes, registry.max_lora_rank)


def _check_folder(folder: Path) -> None:
    """As at the start: made if it was removed. Raises LoraplexError for one that others may write to by now."""
    try:
        private_folder(folder, "the folder of made adapters", "start the server with another --adapter-output-dir")
    except ConfigError as error:
        raise LoraplexError(str(error)) from error


def _make(process: MergeProcess, job: MergeJob, plan: MergePlan, folder: Path, max_bytes: int) -> None:
    from loraplex.adapters.merging.written import check_disk

    _check_folder(folder.parent)
    remove_abandoned(folder.parent)
    check_disk(folder.parent, plan.nbytes)
    if not job.is_cancelled.is_set():
        process.make(plan, folder, max_bytes, job.note_progress, job.is_cancelled.is_set)
    if job.is_cancelled.is_set():
        raise RequestAbortedError("the merge was cancelled")


def _remove_unless_loaded(registry: LoRARegistry, name: str, folder: Path) -> None:
    """A load whose journal could not be written has taken place all the same."""
    remove_parts(folder)
    ref = registry.find(name)
    if ref is None or ref.lora_path != str(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _export(origin: Origin, folder: Path, max_bytes: int, is_cancelled: Callable[[], bool]) -> Exported:
    from loraplex.adapters.merging.export import export_adapter
    from loraplex.adapters.merging.written import write_directory

    _check_folder(folder)
    made, digest = export_adapter(origin, max_bytes, is_cancelled)
    path = folder / folder_name(origin.name)
    write_directory(made, path)
    return Exported(origin.name, str(path), digest, made.nbytes)
