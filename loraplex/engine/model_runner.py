"""Runs one plan: batch tensors, the decoder, the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loraplex.core import BASE_SLOT, Request
from loraplex.engine.batch import BatchBuilder, BuiltStep
from loraplex.engine.sampler import Sampler, SamplingRow, SamplingState
from loraplex.engine.schedule_plan import RequestState, SampledToken, ScheduledSequence, SchedulePlan
from loraplex.errors import AdapterFaultError, EngineError
from loraplex.kernels.profiled import PART_OF
from loraplex.memory.arrivals import StepGate
from loraplex.memory.steps import StepPreparation
from loraplex.models.decoder import Decoder
from loraplex.profiler import Profiler


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step. `result` gives one token per sampled sequence, by request_id.

    _gate: of adapters that were arriving; tokens of those that did not arrive are errors instead.
    """

    _tokens: Mapping[str, SampledToken]
    _sequences: tuple[ScheduledSequence, ...] = ()
    _gate: StepGate | None = None

    def result(self) -> Mapping[str, SampledToken]:
        errors = {} if self._gate is None else self._gate.errors()
        if not errors:
            return self._tokens
        slots = {each.state.request.request_id: each.state.lora_slot for each in self._sequences}
        return {
            request_id: token
            if (error := errors.get(_slot(slots[request_id]))) is None
            else SampledToken(0, error=error)
            for request_id, token in self._tokens.items()
        }


class ModelRunner:
    """The decoder with its KV memory and its sampler. adapters: None in an engine without LoRA."""

    def __init__(
        self,
        model: Decoder,
        kv: torch.Tensor,
        builder: BatchBuilder,
        sampler: Sampler,
        profiler: Profiler,
        adapters: StepPreparation | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._builder = builder
        self._sampler = sampler
        self._profiler = profiler
        self._adapters = adapters

    @property
    def kv_block_bytes(self) -> int:
        return self._kv[0].nbytes

    @property
    def workspace_nbytes(self) -> int:
        return self._model.workspace_nbytes

    def move_kv_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the KV of blocks to other blocks, between two steps."""
        moved = self._kv.index_select(0, torch.tensor(sources, device=self._kv.device))
        self._kv.index_copy_(0, torch.tensor(targets, device=self._kv.device), moved)

    def measure_operators(self, is_on: bool) -> None:
        """Add the seconds of each operator to the profiler from now on, or no more; where the backend can tell."""
        self._model.measure_operators(self._add_operator if is_on else None)

    def _add_operator(self, operator: str, seconds: float) -> None:
        self._profiler.add(PART_OF[operator], seconds)

    @torch.inference_mode()
    def launch(self, plan: SchedulePlan) -> StepHandle:
        """Run the plan. On a CPU the tokens are there when this returns."""
        if not plan.sequences:
            return StepHandle({})
        with self._profiler.part("build"):
            step = self._builder.build(plan)
            gate = self._prepare(plan)
            batch = step.batch if gate is None else replace(step.batch, gate=gate)
        with self._profiler.part("forward"):
            hidden = self._model.forward(batch, self._kv)
            if len(step.batch.logits_indices) == 0:
                return StepHandle({})
            logits = self._model.compute_logits(hidden[step.batch.logits_indices])
        with self._profiler.part("sample"):
            self._take_prompt_logprobs(step, logits)
            return StepHandle(self._sample(step, logits), step.sampled, gate)

    @torch.inference_mode()
    def answer(self, request: Request, lora_slot: int) -> tuple[int, ...] | None:
        """The likeliest next token after each token of a prompt whose KV blocks are reserved; None when logits are not finite."""
        token_ids = list(request.prompt_token_ids)
        state = RequestState(request, -1, token_ids, lora_slot=None if lora_slot == BASE_SLOT else lora_slot)
        plan = SchedulePlan(-1, (ScheduledSequence(state, 0, len(token_ids), is_sampled=True),))
        batch = replace(self._builder.build(plan).batch, gate=self._prepare(plan))
        logits = self._model.compute_logits(self._model.forward(batch, self._kv))
        return tuple(logits.argmax(-1).tolist()) if bool(logits.isfinite().all()) else None

    def _prepare(self, plan: SchedulePlan) -> StepGate | None:
        if self._adapters is None:
            return None
        slots = {each.state.lora_slot for each in plan.sequences if each.state.lora_slot is not None}
        return self._adapters.prepare(slots)

    def _take_prompt_logprobs(self, step: BuiltStep, logits: torch.Tensor) -> None:
        for rows in step.prompt_rows:
            count = rows.state.request.sampling_params.prompt_logprobs
            assert count is not None
            rows_of_prompt = logits[rows.start : rows.start + len(rows.next_ids)]
            rows.state.prompt_logprobs += self._sampler.prompt_logprobs(rows_of_prompt, rows.next_ids, count)

    def _sample(self, step: BuiltStep, logits: torch.Tensor) -> dict[str, SampledToken]:
        if not step.sampled:
            return {}
        if step.prompt_rows:
            logits = logits[torch.tensor(step.sampled_rows, device=logits.device)]
        output = self._sampler.sample(logits, [_sampling_row(sequence.state) for sequence in step.sampled])
        failed = set(output.failed_rows)
        token_ids: Sequence[int] = output.token_ids.tolist()
        return {
            sequence.state.request.request_id: _failed_token(sequence)
            if row in failed
            else SampledToken(token_ids[row], output.logprobs[row])
            for row, sequence in enumerate(step.sampled)
        }


def _slot(lora_slot: int | None) -> int:
    return BASE_SLOT if lora_slot is None else lora_slot


def _sampling_row(state: RequestState) -> SamplingRow:
    request = state.request
    params = request.sampling_params
    stop_ids = (*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids)
    row = SamplingRow(
        params=params,
        seed=request.seed,
        position=state.num_output_tokens,
        stop_ids_for_min_tokens=stop_ids,
        state=state.sampling_state if isinstance(state.sampling_state, SamplingState) else None,
    )
    if not row.needs_state() or row.state is not None:
        return row
    state.sampling_state = SamplingState(params, request.prompt_token_ids, state.token_ids[state.num_prompt_tokens :])
    return _sampling_row(state)


def _failed_token(sequence: ScheduledSequence) -> SampledToken:
    text = "gave logits with NaN or without a finite maximum; the request ends"
    if sequence.state.request.adapter_id is None:
        return SampledToken(0, error=EngineError(f"the base model {text}"))
    return SampledToken(
        0, error=AdapterFaultError(f"the request's adapter {text} and the adapter is checked; try again")
    )
