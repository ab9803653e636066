"""Merges the adapter that dominates into a copy of the linears that it changes, while steps run, and lets it go again.

    dominant for long enough        a thread makes the copy (models/merged_layers.py), in small pieces with rests
    the copy is there               steps through this content alone run it, all others as without it
    another content dominates       its copy is made once this one's memory is back
    few steps of the content        the copy goes; also with the last adapter of the content, when its results were
                                    odd, and when memory runs short

There is one copy at most. Contents are digests: names and clones of one content share it. The engine's thread calls all
of this; the thread of a copy touches nothing but its job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from loraplex.adapters.merging.dominance import GAIN, MIN_GAIN, Dominance, DominanceRule
from loraplex.adapters.weights import LoRAModel
from loraplex.events import Detail, EventKind
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.step_batch import LayersForward
from loraplex.memory.care.monitor import has_room
from loraplex.metrics import MemoryReport, TierReport
from loraplex.models.decoder import Decoder
from loraplex.models.merged_layers import MergedLayers, MergePlan

RESTS_FOR_WORK = 9
"""Seconds of rest for a second of work, while steps run: a tenth of a core is what they lose."""

WORK_S = 0.001
"""Between two rests; a piece that takes longer has its rest behind it."""

LONGEST_REST_S = 0.5

IDLE_S = 2.0
"""Without a step for so long, the engine is idle, and the work goes on without rests."""

RETRY_S = 60.0
"""After memory ran short, or would have."""

CLOSE_S = 5.0

OnSeconds = Callable[[str, float], None]


class Contents(Protocol):
    """What is known of adapters by digest (LoRAModelManager)."""

    def read_content(self, digest: str) -> LoRAModel:
        """The weights, from a source that has them; in any thread. Raises what that raises."""
        ...

    def tell(self, kind: EventKind, digest: str, text: str, **details: Detail) -> None: ...

    def ids_of(self, digest: str) -> tuple[int, ...]:
        """The adapters with this content."""
        ...


class NotMergedError(Exception):
    """Why no copy is made. is_for_good: as long as an adapter has the content."""

    def __init__(self, reason: str, is_for_good: bool = True) -> None:
        super().__init__(reason)
        self.is_for_good = is_for_good


class _CancelledError(Exception):
    pass


class _Job:
    """One copy in the making."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.began_s = time.monotonic()
        self.nbytes = 0
        self.result: MergedLayers | None = None
        self.error: Exception | None = None
        self.is_done = threading.Event()
        self._is_cancelled = threading.Event()
        self._work_began_s = 0.0

    def cancel(self) -> None:
        self._is_cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled.is_set()

    @property
    def has_nothing(self) -> bool:
        """Whether it ended without a copy."""
        return self.is_done.is_set() and self.result is None

    def run(self, make: Callable[[_Job], MergedLayers], held: list[object], leaving: threading.Thread | None) -> None:
        """In its thread. held: what goes first, since to give much memory back takes a while. leaving: what still gives
        memory back."""
        held.clear()
        if leaving is not None:
            leaving.join()
        torch.set_num_threads(1)
        self._work_began_s = time.thread_time()
        try:
            with torch.inference_mode():
                self.result = make(self)
        except _CancelledError:
            pass
        except Exception as error:
            self.error = error.with_traceback(None)  # frames hold the copy
        self.is_done.set()

    def rest(self, are_steps_running: bool) -> None:
        """Between two pieces."""
        if self.is_cancelled:
            raise _CancelledError
        work_s = time.thread_time() - self._work_began_s
        if are_steps_running and work_s >= WORK_S:
            self._is_cancelled.wait(min(RESTS_FOR_WORK * work_s, LONGEST_REST_S))
        if work_s >= WORK_S:
            self._work_began_s = time.thread_time()


class DominantMerger:
    """max_bytes: of a copy. max_pressure: of the machine's memory with it."""

    def __init__(
        self,
        model: Decoder,
        ops: KernelBackend,
        contents: Contents,
        max_bytes: int,
        max_pressure: float,
        rule: DominanceRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._ops = ops
        self._contents = contents
        self._max_bytes = max_bytes
        self._max_pressure = max_pressure
        self._clock = clock
        rule = rule or DominanceRule()
        self._needed_s = rule.needed_s(_num_bytes(model, ops))
        self._dominance = Dominance(rule)
        self._job: _Job | None = None
        self._leaving: threading.Thread | None = None
        self._merged: MergedLayers | None = None
        self._forward: LayersForward | None = None
        self._on_seconds: OnSeconds | None = None
        self._refused: dict[str, bool] = {}  # whether for good
        self._not_before_s = self._last_step_s = clock()
        self.num_merges = 0
        self.num_steps = 0

    # ---------------------------------------------------------------------------------------------------------- steps

    def layers_for(self, content: str) -> LayersForward | None:
        """For the step that is launched next, through `content` alone; "": through several, a mix or the base. None:
        the layers of the model."""
        self._last_step_s = self._clock()
        self._dominance.saw(content, self._last_step_s)
        if self._job is not None:
            self._look_at(self._job)
        elif self._merged is not None and self._dominance.has_left(self._merged.digest):
            self._drop("other requests came")
        elif self._is_due:
            self._begin(self._dominance.dominant)
        if self._merged is None or content != self._merged.digest:
            return None
        self.num_steps += 1
        return self._forward

    @property
    def _is_due(self) -> bool:
        """Whether a copy of the dominant content is to be made now."""
        content = self._dominance.dominant
        if not content or self._dominance.dominant_s < self._needed_s or self._last_step_s < self._not_before_s:
            return False
        return not self._refused.get(content) and (self._merged is None or content != self._merged.digest)

    def _begin(self, content: str) -> None:
        held, job = self._take_merged("another adapter dominates"), _Job(content)
        if _run_beside(job.run, self._make, held, self._leaving):
            self._job, self._leaving = job, None
        else:
            held.clear()
            self._not_before_s = self._clock() + RETRY_S

    def _make(self, job: _Job) -> MergedLayers:
        """In the job's thread."""
        plan = MergePlan(self._model, self._ops, self._contents.read_content(job.digest))
        if plan.share * GAIN < MIN_GAIN:
            raise NotMergedError(f"it changes {plan.share:.0%} of the linears, which is too few to gain much")
        if plan.nbytes > self._max_bytes:
            text = f"its copy would take {plan.nbytes} bytes, and merged_memory_bytes is {self._max_bytes}"
            raise NotMergedError(text)
        if not has_room(plan.nbytes, self._max_pressure):
            text = f"the machine's memory has no room for a copy of {plan.nbytes} bytes"
            raise NotMergedError(text, is_for_good=False)
        job.nbytes = plan.nbytes
        return plan.write(lambda: job.rest(self._clock() - self._last_step_s < IDLE_S))

    def _look_at(self, job: _Job) -> None:
        if job.digest != self._dominance.dominant:
            job.cancel()
        if not job.is_done.is_set():
            return
        self._job = None
        if job.error is not None:
            self._refuse(job.digest, job.error)
        elif job.result is not None and job.is_cancelled:
            held: list[object] = [job.result]
            job.result = None
            self._clear_beside(held)
        elif job.result is not None:
            self._merged, self._forward = job.result, job.result.captured(self._model, self._on_seconds)
            self.num_merges += 1
            seconds = time.monotonic() - job.began_s
            text = f"is merged into a copy of the weights that it changes, of {job.nbytes} bytes"
            self._contents.tell(EventKind.MERGE, job.digest, text, nbytes=job.nbytes, seconds=seconds)

    def _refuse(self, digest: str, error: Exception) -> None:
        """Said once, as long as an adapter has the content."""
        if digest not in self._refused:
            self._contents.tell(EventKind.MERGE, digest, f"is not merged: {error}")
        is_for_good = not isinstance(error, NotMergedError) or error.is_for_good
        self._refused[digest] = is_for_good
        if not is_for_good:
            self._not_before_s = self._clock() + RETRY_S

    def measure_operators(self, on_seconds: OnSeconds | None) -> None:
        """As `Decoder.measure_operators`, of merged steps."""
        self._on_seconds = on_seconds
        if self._merged is not None:
            self._forward = self._merged.captured(self._model, on_seconds)

    # ---------------------------------------------------------------------------------------------------- letting it go

    def forget(self, content: str) -> None:
        """No adapter has this content any more, or it is in quarantine."""
        is_gone = not self._contents.ids_of(content)
        if is_gone:
            self._refused.pop(content, None)
        self._let_go_of(content, "no adapter has its content" if is_gone else "it is in quarantine")

    def suspect(self, content: str) -> None:
        """A step through this content gave odd results: if they were merged, it is served unmerged from now on."""
        if self._merged is not None and content == self._merged.digest:
            self._let_go_of(content, "a result was not finite")
            self._refused[content] = True

    def release(self) -> int:
        """Memory runs short; returns the bytes of the copy, which a thread gives back."""
        nbytes, self._not_before_s = self.nbytes, self._clock() + RETRY_S
        for content in {each.digest for each in (self._job, self._merged) if each is not None}:
            self._let_go_of(content, "memory runs short")
        return nbytes

    def close(self) -> None:
        """The thread of a copy ends after its piece."""
        if self._job is not None:
            self._job.cancel()
            self._job.is_done.wait(CLOSE_S)

    def _let_go_of(self, content: str, reason: str) -> None:
        if self._job is not None and self._job.digest == content:
            self._job.cancel()
        if self._merged is not None and self._merged.digest == content:
            self._drop(reason)

    def _drop(self, reason: str) -> None:
        self._clear_beside(self._take_merged(reason))

    def _clear_beside(self, held: list[object]) -> None:
        """The memory goes back beside the steps."""
        self._leaving = _run_beside(held.clear)
        if self._leaving is None:
            held.clear()

    def _take_merged(self, reason: str) -> list[object]:
        """All that holds the copy's memory: to give it back takes milliseconds."""
        merged = self._merged
        held: list[object] = [merged, self._forward]
        self._merged = self._forward = None
        if merged is not None:
            text = f"is no longer merged: {reason}"
            self._contents.tell(EventKind.MERGE, merged.digest, text, nbytes=merged.nbytes)
        return held

    # ------------------------------------------------------------------------------------------------------------ views

    @property
    def nbytes(self) -> int:
        """Of the copy, or of the one in the making."""
        in_the_making = 0 if self._job is None or self._job.has_nothing else self._job.nbytes
        return in_the_making + (0 if self._merged is None else self._merged.nbytes)

    def report(self, memory: MemoryReport) -> MemoryReport:
        """`memory` with the copy as a tier."""
        merged = () if self._merged is None else self._contents.ids_of(self._merged.digest)
        tier = TierReport("merged", self.nbytes, self._max_bytes, int(self._merged is not None), 0.0)
        counters = {**memory.counters, "merges": self.num_merges, "merged_steps": self.num_steps}
        return replace(memory, tiers=(*memory.tiers, tier), merged=merged, counters=counters)


def _num_bytes(model: Decoder, ops: KernelBackend) -> int:
    return sum(tensor.nbytes for linear in model.linears for tensor in ops.linear_tensors(linear.weight).values())


def _run_beside(run: Callable[..., None], *arguments: Any) -> threading.Thread | None:
    """None where the system has no thread: no step fails for that."""
    thread = threading.Thread(target=run, args=arguments, name="loraplex-merge", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
