"""Runs one plan: batch tensors, the decoder, the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loraplex.core import BASE_SLOT, Request
from loraplex.engine.batch import BatchBuilder, BuiltStep
from loraplex.engine.decode_graphs import DecodeGraphs
from loraplex.engine.sampler import Sampler, SamplingRow, SamplingState
from loraplex.engine.schedule_plan import RequestState, SampledToken, ScheduledSequence, SchedulePlan
from loraplex.errors import AdapterFaultError, EngineError
from loraplex.kernels.profiled import PART_OF
from loraplex.models.decoder import Decoder
from loraplex.profiler import Profiler


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step. `result` gives one token per sampled sequence, by request_id."""

    _tokens: Mapping[str, SampledToken]

    def result(self) -> Mapping[str, SampledToken]:
        return self._tokens


class ModelRunner:
    """The decoder with its KV memory and its sampler. `graphs`: captured decode steps; None where every step runs kernel by kernel."""

    def __init__(
        self,
        model: Decoder,
        kv: torch.Tensor,
        builder: BatchBuilder,
        sampler: Sampler,
        profiler: Profiler,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._builder = builder
        self._sampler = sampler
        self._profiler = profiler
        self.graphs = graphs

    @property
    def kv_block_bytes(self) -> int:
        return self._kv[0].nbytes

    @property
    def workspace_nbytes(self) -> int:
        return self._model.workspace_nbytes

    def release_workspace(self) -> int:
        """Give scratch memory back; returns its bytes. None is while there are graphs, which would write to it."""
        return 0 if self.graphs is not None and self.graphs.num_graphs else self._model.release_workspace()

    def move_kv_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the KV of blocks to other blocks, between two steps."""
        moved = self._kv.index_select(0, torch.tensor(sources, device=self._kv.device))
        self._kv.index_copy_(0, torch.tensor(targets, device=self._kv.device), moved)

    def measure_operators(self, is_on: bool) -> None:
        """Add the seconds of each operator to the profiler from now on, or no more; where the backend can tell."""
        self._model.measure_operators(self._add_operator if is_on else None)
        if self.graphs is not None:
            self.graphs.measure(is_on)

    def _add_operator(self, operator: str, seconds: float) -> None:
        self._profiler.add(PART_OF[operator], seconds)

    @torch.inference_mode()
    def launch(self, plan: SchedulePlan) -> StepHandle:
        """Run the plan. On a CPU the tokens are there when this returns."""
        if not plan.sequences:
            return StepHandle({})
        with self._profiler.part("build"):
            step = self._builder.build(plan, None if self.graphs is None else self.graphs.padded_size(plan))
        with self._profiler.part("forward"):
            logits = self._logits(step)
        if logits is None:
            return StepHandle({})
        with self._profiler.part("sample"):
            self._take_prompt_logprobs(step, logits)
            return StepHandle(self._sample(step, logits))

    def _logits(self, step: BuiltStep) -> torch.Tensor | None:
        """Float32, a row for each of the step's logits_indices but those of padding; by its graph if it has one. None: no rows."""
        if step.padded_size is not None:
            assert self.graphs is not None
            return self.graphs.replay(step)
        hidden = self._model.forward(step.batch, self._kv)
        if len(step.batch.logits_indices) == 0:
            return None
        return self._model.compute_logits(hidden[step.batch.logits_indices])

    @torch.inference_mode()
    def answer(self, request: Request, lora_slot: int) -> tuple[int, ...] | None:
        """The likeliest next token after each token of a prompt whose KV blocks are reserved; None when logits are not finite."""
        token_ids = list(request.prompt_token_ids)
        state = RequestState(request, -1, token_ids, lora_slot=None if lora_slot == BASE_SLOT else lora_slot)
        plan = SchedulePlan(-1, (ScheduledSequence(state, 0, len(token_ids), is_sampled=True),))
        logits = self._model.compute_logits(self._model.forward(self._builder.build(plan).batch, self._kv))
        return tuple(logits.argmax(-1).tolist()) if bool(logits.isfinite().all()) else None

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
