"""Runs one plan: batch tensors, the decoder, the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from loraplex.core import BASE_SLOT, Request, TokenLogprobs
from loraplex.cpu import CpuMeter, CpuUse, cpu_limit
from loraplex.engine.batch import BatchBuilder, BuiltStep, PromptLogitRows, logit_segments, route_of, sole_content
from loraplex.engine.decode_graphs import DecodeGraphs
from loraplex.engine.sampler import DrawnTokens, Sampler, SamplingRow, SamplingState
from loraplex.engine.sampling_batch import KnownPrompts
from loraplex.engine.schedule_plan import RequestState, SampledToken, ScheduledSequence, SchedulePlan
from loraplex.engine.speculation import verified
from loraplex.errors import AdapterFaultError, EngineError, InvalidRequestError, LoraplexError
from loraplex.kernels.device_copies import upload
from loraplex.kernels.plan import LoraSegment
from loraplex.kernels.profiled import PART_OF
from loraplex.kernels.step_batch import LayersForward, StepBatch
from loraplex.memory.weights.copies import StepGate
from loraplex.metrics import KernelSpeedup
from loraplex.models.decoder import Decoder
from loraplex.models.dominant import DominantMerger
from loraplex.performance.profiler import DEVICE_PART, Profiler
from loraplex.structured.grammars import GrammarCompiler, GrammarState, StepMasks


@dataclass(frozen=True, slots=True)
class _PromptLogprobs:
    """Log probabilities of some prompt positions, on their way: those of `state` from `first` on."""

    state: RequestState
    first: int
    parts: Sequence[Callable[[], tuple[TokenLogprobs, ...]]]


@dataclass(frozen=True, slots=True)
class _Arriving:
    """The adapters of a step that were arriving when it was launched, and the lora_slots of each of its requests."""

    gate: StepGate
    slots: Mapping[str, tuple[int, ...]]

    def errors(self) -> Mapping[str, LoraplexError]:
        """By request_id, of those of whose adapters one did not arrive."""
        errors = self.gate.errors()
        found = ((request_id, slot) for request_id, slots in self.slots.items() for slot in slots)
        return {request_id: errors[slot] for request_id, slot in found if slot in errors}


@dataclass(frozen=True, slots=True)
class _Masks:
    """Of a step's sampled rows, being made. is_alone: no other rows are in the step."""

    masks: StepMasks
    states: Sequence[GrammarState | None]
    is_alone: bool

    def taken(self, rows: Sequence[SamplingRow]) -> tuple[list[SamplingRow], list[int]]:
        """The rows with their masks, and those whose masks are late."""
        made = self.masks.take(self.is_alone)
        late = [row for row, state in enumerate(self.states) if state is not None and made[row] is None]
        return [replace(row, mask=mask) for row, mask in zip(rows, made, strict=True)], late


@dataclass(frozen=True, slots=True)
class _DeviceTime:
    """The events around a step on a device that runs beside the host."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    profiler: Profiler

    def add(self) -> None:
        """To the profiler, once the step has ended."""
        self.ended.synchronize()
        self.profiler.add(DEVICE_PART, 1e-3 * self.began.elapsed_time(self.ended))


class StepHandle:
    """A launched step. On a CPU it is done; on another device the host goes on until it asks for the result."""

    def __init__(
        self,
        sampled: Sequence[ScheduledSequence] = (),
        drawn: DrawnTokens | None = None,
        prompt_logprobs: Sequence[_PromptLogprobs] = (),
        arriving: _Arriving | None = None,
        device_time: _DeviceTime | None = None,
        late_rows: Sequence[int] = (),
    ) -> None:
        """late_rows: those of `sampled` whose masks were not there."""
        self._late_rows = late_rows
        self._device_time = device_time
        self._sampled = sampled
        self._drawn = drawn
        self._prompt_logprobs = prompt_logprobs
        self._arriving = arriving

    def result(self) -> Mapping[str, SampledToken]:
        """One token per sampled sequence, by request_id, with those behind a draft that held. Prompt logprobs go to
        their requests. Waits for this step.

        Tokens through adapters that did not arrive are errors instead.
        """
        for each in self._prompt_logprobs:
            each.state.prompt_logprobs[each.first :] = [entry for finish in each.parts for entry in finish()]
        output = None if self._drawn is None else self._drawn.result()
        if self._device_time is not None:
            self._device_time.add()
        if output is None:
            return {}
        token_ids: Sequence[int] = output.token_ids.tolist()
        drawn = [SampledToken(token_id, output.logprobs[row]) for row, token_id in enumerate(token_ids)]
        for row in self._late_rows:
            drawn[row] = SampledToken(0, is_late=True)
        for row in output.failed_rows:
            drawn[row] = _odd_token(self._sampled[row])
        for row in set(output.barred_rows).difference(self._late_rows):
            drawn[row] = _no_token_left(self._sampled[row].state)
        tokens = verified(self._sampled, drawn)
        errors = {} if self._arriving is None else self._arriving.errors()
        return tokens | {each: SampledToken(0, error=error) for each, error in errors.items() if each in tokens}


@dataclass(frozen=True, slots=True)
class _LastTokens:
    """The tokens that the last launched step draws, on the device, and whose row is which."""

    token_ids: torch.Tensor
    row_of: Mapping[RequestState, int]


class ModelRunner:
    """The decoder with its KV memory and its sampler.

    prepare_adapters: makes adapters ready for a step (WeightStore.prepare); None in an engine without LoRA. graphs:
    captured decode steps; None where every step runs kernel by kernel. merger: of the dominant adapter, None where it
    stays unmerged. grammars: makes the masks of outputs with a form.
    """

    def __init__(
        self,
        model: Decoder,
        kv: torch.Tensor,
        builder: BatchBuilder,
        sampler: Sampler,
        profiler: Profiler,
        prepare_adapters: Callable[[Iterable[int]], StepGate | None] | None = None,
        graphs: DecodeGraphs | None = None,
        merger: DominantMerger | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._kv = kv
        self._builder = builder
        self._sampler = sampler
        self._profiler = profiler
        self._last = _LastTokens(torch.zeros(0, dtype=torch.int64), {})
        self._prompts = KnownPrompts()
        self._prepare_adapters = prepare_adapters
        self.graphs = graphs
        self.merger = merger
        self._is_timing_device = False
        self._cpu = CpuMeter()
        self._has_own_threads = model.cpu_use(CpuUse()).num_threads > 0
        is_beside_host = kv.device.type != "cpu"
        self._leaves_core_free = is_beside_host or torch.get_num_threads() < cpu_limit().num_threads

    @property
    def device(self) -> torch.device:
        return self._kv.device

    @property
    def kv_block_bytes(self) -> int:
        return self._kv[0].nbytes

    @property
    def workspace_nbytes(self) -> int:
        return self._model.workspace_nbytes

    @property
    def kernel_fallbacks(self) -> Mapping[str, int]:
        return self._model.kernel_fallbacks

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Within the block torch has one thread where kernels have their own: torch's spin after each operation."""
        before = torch.get_num_threads()
        torch.set_num_threads(1 if self._has_own_threads else before)  # half a microsecond
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def cpu_use(self) -> CpuUse:
        """What the threads of the kernels, and the one that made the runner, got of the processor."""
        return self._model.cpu_use(self._cpu.read())

    def release_workspace(self) -> int:
        """Give scratch memory back, and a merged copy; returns the bytes. None is while there are graphs, which would
        write to it."""
        if self.graphs is not None and self.graphs.num_graphs:
            return 0
        return self._model.release_workspace() + (0 if self.merger is None else self.merger.release())

    def close(self) -> None:
        """End the thread of a copy, and the processes that have a share of the model."""
        if self.merger is not None:
            self.merger.close()
        self._model.close()

    def check_ranks(self) -> None:
        """Raises DeviceLostError when a process that has a share of the model has ended."""
        self._model.check_ranks()

    def recover(self) -> None:
        """After a step that failed, on its way perhaps: wait for all that was launched; the next step may come."""
        self.wait()
        self._model.reset_workspace()

    def wait(self) -> None:
        """Until the device has done all that was launched, also of a launch that failed halfway."""
        if self._kv.device.type == "cuda":
            torch.cuda.synchronize(self._kv.device)

    def move_kv_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the KV of blocks to other blocks, between two steps; nothing waits for it."""
        from_blocks, to_blocks = upload(np.array((sources, targets), np.int64), self._kv.device)
        self._kv.index_copy_(0, to_blocks, self._kv.index_select(0, from_blocks))

    def measure_operators(self, is_on: bool) -> None:
        """Add the seconds of each operator to the profiler from now on, or no more; where the backend can tell. Those
        of each step on a GPU too."""
        self._is_timing_device = is_on and self._kv.device.type == "cuda"
        on_seconds = self._add_operator if is_on else None
        self._model.measure_operators(on_seconds)
        if self.merger is not None:
            self.merger.measure_operators(on_seconds)

    def _add_operator(self, operator: str, seconds: float) -> None:
        self._profiler.add(PART_OF[operator], seconds)

    @torch.inference_mode()
    def launch(self, plan: SchedulePlan) -> StepHandle:
        """Run the plan, or have the device do so: nothing here waits for it. Tokens that the step before draws are
        taken from there."""
        with self._profiler.part("build"):
            arriving = self._prepare(plan)
            step = self._builder.build(plan, None if self.graphs is None else self.graphs.padded_size(plan))
            self._take_pending(step)
            merged = None if self.merger is None else self.merger.layers_for(sole_content(plan))
        masks = self._begin_masks(plan, step.sampled)
        with self._profiler.part("forward"):
            began = self._timed_event()
            hidden, logits = self._forward(step, arriving, merged)
        with self._profiler.part("sample"):
            return self._sample(step, hidden, logits, arriving, began, masks)

    def _timed_event(self) -> torch.cuda.Event | None:
        """Recorded now, while a profile wants the device's time."""
        if not self._is_timing_device:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _take_pending(self, step: BuiltStep) -> None:
        """Write the tokens that the last step draws into this one's batch; what it did not draw belongs to requests
        that have ended."""
        row_of = self._last.row_of
        pairs = [(row, row_of[state]) for row, state in step.pending if state in row_of]
        if pairs:
            token_ids = step.batch.token_ids
            rows, sources = upload(np.array(pairs, np.int64).T.copy(), token_ids.device)
            token_ids.index_copy_(0, rows, self._last.token_ids.index_select(0, sources))

    def _forward(
        self, step: BuiltStep, arriving: _Arriving | None, merged: LayersForward | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Hidden states of the step's logits_indices, if it has prompt_rows; float32 logits of what it samples.

        Logits come from its graph, if it has one. None: no such rows.
        Prompts can have thousands of them, so their logits are not made at once.
        A graph begins when all of an arriving adapter is there: most steps that run one follow its prompt, which has
        waited for that.
        """
        if step.padded_size is not None:
            assert self.graphs is not None
            if arriving is not None:
                arriving.gate.wait_for_all()
            return None, self.graphs.replay(step)
        if step.sampled and not step.prompt_rows:
            self._model.expect_logits(step.batch.logits_indices, self._logit_segments(step.sampled))
        hidden = self._model.forward(_gated(step.batch, arriving), self._kv, merged)
        hidden = hidden[step.batch.logits_indices]
        if not step.sampled:
            return hidden if step.prompt_rows else None, None
        if not step.prompt_rows:
            return None, self._logits(hidden, step.sampled)
        sampled = upload(np.array(step.sampled_rows, np.int64), hidden.device)
        return hidden, self._logits(hidden[sampled], step.sampled)

    def _logits(self, hidden: torch.Tensor, sampled: Sequence[ScheduledSequence]) -> torch.Tensor:
        """Of the rows of sampled sequences."""
        return self._model.compute_logits(hidden, self._logit_segments(sampled))

    def _logit_segments(self, sampled: Sequence[ScheduledSequence]) -> Sequence[LoraSegment]:
        return logit_segments([each.state for each in sampled]) if self._model.has_own_heads else ()

    def _logits_of(self, hidden: torch.Tensor, state: RequestState) -> torch.Tensor:
        """Of rows of one request, up to the end of its adapter's vocabulary."""
        if state.lora_slot is None or not self._model.has_own_heads:
            return self._model.compute_logits(hidden)
        logits = self._model.compute_logits(hidden, logit_segments([state], len(hidden)))
        return logits[:, : self._model.vocab_size_of(state.lora_slot)]

    @torch.inference_mode()
    def answer(self, request: Request, lora_slot: int) -> tuple[int, ...] | None:
        """The likeliest next token after each token of a prompt with KV blocks; None: logits are not finite."""
        token_ids = list(request.prompt_token_ids)
        state = RequestState(request, -1, token_ids, lora_slot=None if lora_slot == BASE_SLOT else lora_slot)
        plan = SchedulePlan(-1, (ScheduledSequence(state, 0, len(token_ids), is_sampled=True),))
        batch = _gated(self._builder.build(plan).batch, self._prepare(plan))
        logits = self._logits_of(self._model.forward(batch, self._kv), state)
        return tuple(logits.argmax(-1).tolist()) if bool(logits.isfinite().all()) else None

    @torch.inference_mode()
    def rehearse(self, plan: SchedulePlan) -> None:
        """Run a plan kernel by kernel, and forget what comes of it."""
        step, arriving = self._builder.build(plan), self._prepare(plan)
        hidden, logits = self._forward(step, arriving)
        self._sample(step, hidden, logits, arriving).result()

    def _prepare(self, plan: SchedulePlan) -> _Arriving | None:
        if self._prepare_adapters is None:
            return None
        states = [each.state for each in plan.sequences]
        lora_slots = {each.lora_slot for each in states if each.lora_slot is not None}
        gate = self._prepare_adapters(lora_slots.union(*(each.mix_slots for each in states if each.mix_slots)))
        if gate is None:
            return None
        slots = {each.request.request_id: tuple(slot for slot, _ in route_of(each)) for each in states}
        return _Arriving(gate, slots)

    def _sample(
        self,
        step: BuiltStep,
        hidden: torch.Tensor | None,
        logits: torch.Tensor | None,
        arriving: _Arriving | None,
        began: torch.cuda.Event | None = None,
        masks: _Masks | None = None,
    ) -> StepHandle:
        drawn: DrawnTokens | None = None
        late_rows: Sequence[int] = ()
        if logits is not None:
            rows = [_sampling_row(sequence, self._prompts) for sequence in step.sampled]
            if masks is not None:
                rows, late_rows = masks.taken(rows)
            drawn = self._draw(logits, step.sampled, rows)
            self._last = _LastTokens(drawn.token_ids, {each.state: row for row, each in enumerate(step.sampled)})
        scored = [] if hidden is None else [self._score_prompt(rows, hidden) for rows in step.prompt_rows]
        ended = self._timed_event()
        device_time = None if began is None or ended is None else _DeviceTime(began, ended, self._profiler)
        return StepHandle(step.sampled, drawn, scored, arriving, device_time, late_rows)

    def _begin_masks(self, plan: SchedulePlan, sampled: Sequence[ScheduledSequence]) -> _Masks | None:
        """Beside the forward pass: a thread makes them, without the interpreter's lock."""
        found = [each.state.grammar for each in sampled]
        if self._grammars is None or not any(found):
            return None
        states = [each if isinstance(each, GrammarState) else None for each in found]
        is_alone = len(plan.sequences) == len(states) - states.count(None)
        return _Masks(self._grammars.begin_masks(states, is_core_free=self._leaves_core_free), states, is_alone)

    def _draw(
        self, logits: torch.Tensor, sampled: Sequence[ScheduledSequence], rows: Sequence[SamplingRow]
    ) -> DrawnTokens:
        if logits.shape[1] == self._sampler.vocab_size:
            return self._sampler.launch(logits, rows)
        slots = [BASE_SLOT if each.state.lora_slot is None else each.state.lora_slot for each in sampled]
        return self._sampler.launch_by_vocabulary(logits, rows, [self._model.vocab_size_of(slot) for slot in slots])

    @torch.inference_mode()
    def measure_kernels(self, dtype_name: str) -> tuple[KernelSpeedup, ...]:
        """Each kernel beside its fallback, on this model's shapes: about half a second, between steps.
        dtype_name: of the weights."""
        self.wait()
        with self.threads():
            return self._model.measure_kernels(getattr(torch, dtype_name), self._kv.device, self._builder.block_size)

    def _score_prompt(self, rows: PromptLogitRows, hidden: torch.Tensor) -> _PromptLogprobs:
        """A few rows of logits at a time: all of a prompt's chunk would be gigabytes for a large vocabulary."""
        count = rows.state.request.sampling_params.prompt_logprobs
        assert count is not None
        parts = []
        for begin in range(0, len(rows.next_ids), self._sampler.rows_at_once):
            next_ids = rows.next_ids[begin : begin + self._sampler.rows_at_once]
            logits = self._logits_of(hidden[rows.start + begin :][: len(next_ids)], rows.state)
            parts.append(self._sampler.launch_prompt_logprobs(logits, next_ids, count))
        return _PromptLogprobs(rows.state, len(rows.state.prompt_logprobs), parts)


def _gated(batch: StepBatch, arriving: _Arriving | None) -> StepBatch:
    return batch if arriving is None else replace(batch, gate=arriving.gate)


def _sampling_row(sequence: ScheduledSequence, prompts: KnownPrompts) -> SamplingRow:
    state, request = sequence.state, sequence.state.request
    params = request.sampling_params
    stop_ids = (*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids)
    row = SamplingRow(
        params=params,
        seed=request.seed,
        position=sequence.end - state.num_prompt_tokens,
        stop_ids_for_min_tokens=stop_ids,
        state=state.sampling_state if isinstance(state.sampling_state, SamplingState) else None,
    )
    if not row.needs_state():
        return row
    counts = row.state
    if counts is None:
        prompt = prompts.distinct_tokens(request.prompt_token_ids if params.repetition_penalty != 1 else ())
        counts = SamplingState(params, prompt, state.token_ids[state.num_prompt_tokens :], stop_ids)
        state.sampling_state = counts
    is_counted = params.has_penalties and sequence.draft
    return replace(row, state=counts.followed_by(sequence.draft) if is_counted else counts)


def _odd_token(sequence: ScheduledSequence) -> SampledToken:
    text = "gave logits with NaN or without a finite maximum; the request ends"
    if sequence.state.request.adapter_id is None:
        return SampledToken(0, error=EngineError(f"the base model {text}"), has_odd_logits=True)
    whose = "mix of adapters" if sequence.state.request.mix else "adapter"
    error = AdapterFaultError(f"the request's {whose} {text} and the {whose} is checked; try again")
    return SampledToken(0, error=error, has_odd_logits=True)


def _no_token_left(state: RequestState) -> SampledToken:
    grammar = state.grammar
    if isinstance(grammar, GrammarState) and grammar.error is not None:
        return SampledToken(0, error=grammar.error)
    if grammar is not None and state.num_output_tokens >= state.request.sampling_params.min_tokens:
        text = "structured_outputs: the grammar allows no token of this model's vocabulary here"
        return SampledToken(0, error=InvalidRequestError(text, param="structured_outputs"))
    text = "min_tokens forbids every token that the model allows here: give fewer stop_token_ids"
    return SampledToken(0, error=InvalidRequestError(text, param="min_tokens"))
