"""A device that captures on a CPU, and kernels that may be captured: what a GPU does to a decode step, without one.

`TapeDevice` writes down every operator of torch with the tensors that it got and gave. A replay runs the operators
again on those tensors and nothing else: no Python of the model, so what the host knew is what it knew at the capture,
as in a CUDA graph. Before each replay, tensors that the capture made are filled with NaN and -1 and so is what
`poisoned` names. What reads the host, or waits for the device, cannot be captured.

`MaskedBackend` computes decode attention and LoRA from tensors of the device alone: it covers fixed sizes and masks
what is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.core import LoraSlice
from loraplex.errors import EngineError
from loraplex.kernels.plan import LoraPlan, SlotTable
from loraplex.kernels.reference import rotated
from loraplex.kernels.step_batch import AttentionPlan
from loraplex.kernels.torch_ops import TorchBackend

FORBIDDEN = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::lift_fresh",
    "aten::is_nonzero",
)
"""They read the device, or memory of the host that is gone at the replay."""


class TapeDevice:
    """A GraphDevice. `fails_at`: the number of the capture that fails with `error`, out of memory by default."""

    def __init__(self, fails_at: int | None = None, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.tape: Tape | None = None
        """Of the capture that is under way."""
        self.poisoned: list[Tensor] = []
        self._fails_at = fails_at
        self._error = error or torch.OutOfMemoryError("CUDA out of memory")

    def capture(self, run: Callable[[], None]) -> TapeGraph:
        self.log.append("warm-up")
        run()
        if self.log.count("warm-up") - 1 == self._fails_at:
            raise self._error
        self.log.append("capture")
        self.tape = tape = Tape()
        try:
            with tape:
                run()
        finally:
            self.tape = None
        return TapeGraph(self, tape.calls)

    def release(self) -> None:
        self.log.append("release")


class Call(Protocol):
    """`poison` what it gave; `run` it again."""

    def poison(self) -> None: ...

    def run(self) -> None: ...


class _Operator:
    """One operator with its arguments, and what it gave; `is_in_place`: it wrote to its arguments."""

    def __init__(self, operator: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        self._operator, self._args, self._kwargs = operator, args, kwargs
        storages = {_storage(t) for t in _tensors((args, list(kwargs.values())))}
        self._results = [t for t in _tensors(result) if _storage(t) not in storages]
        self._is_in_place = operator._schema.is_mutable

    def poison(self) -> None:
        for tensor in self._results:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype is not torch.bool:
                tensor.fill_(-1)

    def run(self) -> None:
        if self._is_in_place:
            self._operator(*self._args, **self._kwargs)
        elif self._results and not self._operator.name().startswith("aten::empty"):
            again = _tensors(self._operator(*self._args, **self._kwargs))
            for tensor, value in zip(self._results, again, strict=True):
                tensor.copy_(value)


class Tape(TorchDispatchMode):
    """Calls in their order. What torch does not dispatch, a launch of a kernel say, is added by who does it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in FORBIDDEN:
            raise EngineError(f"operation not permitted when a stream is capturing: {func.name()}")
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Operator(func, args, kwargs or {}, result))
        return result


class TapeGraph:
    def __init__(self, device: TapeDevice, calls: list[Call]) -> None:
        self._device, self._calls = device, calls

    @torch.inference_mode()
    def replay(self) -> None:
        self._device.log.append("replay")
        for block in self._device.poisoned:
            block.fill_(0xFF)
        for call in self._calls:
            call.poison()
        for call in self._calls:
            call.run()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _storage(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


class MaskedBackend(TorchBackend):
    """Decode steps of float32 models, with adapters of rank `max_rank` and less; the rest is TorchBackend.

    Its kernels are made for the least power of two that covers the ranks that the table ever had.
    """

    name = "masked"
    is_capturable = True

    def __init__(self, max_rank: int = 64) -> None:
        super().__init__()
        self._max_rank = max_rank
        self._rank_capacity = 1

    def expect_adapters(self, table: SlotTable, compute_dtype: torch.dtype, max_rank: int) -> None:
        self._rank_capacity = max(1, max_rank)

    def rank_capacity(self, table: SlotTable) -> int:
        largest = min(self._max_rank, table.largest_rank(range(table.capacity)))
        while self._rank_capacity < largest:
            self._rank_capacity *= 2
        return self._rank_capacity

    def may_replay(self, table: SlotTable) -> bool:
        return table.largest_rank(range(table.capacity)) <= self._max_rank

    def prepare_linear(self, weight: Tensor, quantization: str | None = None) -> Tensor:
        return weight

    def add_lora(
        self, y: Tensor, x: Tensor, plan: LoraPlan, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        if plan.segments and not self.may_replay(table):
            return super().add_lora(y, x, plan, table, first_row, slices)
        assert len(x) == plan.num_tokens
        rows = torch.arange(len(x))[:, None]
        is_in = (plan.seg_starts <= rows) & (rows < plan.seg_ends) & (plan.seg_slots >= 0)
        has_adapter, segment = is_in.any(1), is_in.int().argmax(1)
        slots = torch.where(has_adapter, plan.seg_slots[segment], 0).long()
        for row, s in enumerate(slices, first_row):
            part = y[:, s.out_offset : s.out_offset + s.out_features]
            delta = self._delta(x, s.out_features, table, row, slots)
            part.copy_(torch.where(has_adapter[:, None], part + plan.seg_weights[segment][:, None] * delta, part))

    def _delta(self, x: Tensor, out_features: int, table: SlotTable, row: int, slots: Tensor) -> Tensor:
        rank, width = table.rank[row][slots].long(), x.shape[1]
        ranks = torch.arange(self.rank_capacity(table))
        is_there = ranks < rank[:, None]
        inner = ranks[:, None] * width + torch.arange(width)
        a = _gather(table, table.a_addr[row][slots], inner.expand(len(x), -1, -1), is_there[:, :, None])
        outer = torch.arange(out_features)[:, None] * rank[:, None, None] + ranks
        b = _gather(table, table.b_addr[row][slots], outer, is_there[:, None, :])
        bias_addr = table.bias_addr[row][slots]
        columns = torch.arange(out_features).expand(len(x), -1)
        bias = _gather(table, bias_addr, columns, (bias_addr != 0)[:, None])
        shrunk = (a * x[:, None, :]).sum(-1)
        return table.scale[row][slots][:, None] * (b * shrunk[:, None, :]).sum(-1) + bias

    def rotary_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_layer: Tensor,
        kv_slot_mapping: Tensor,
        is_interleaved: bool = False,
    ) -> Tensor:
        """A row of padding does what the first row does; where that is one too, it writes what is there."""
        block_size = kv_layer.shape[3]
        source = torch.where(kv_slot_mapping < 0, 0, torch.arange(len(q)))
        places = kv_slot_mapping[source].clamp(min=0)
        block, offset, is_real = (
            places // block_size,
            places % block_size,
            (kv_slot_mapping[source] >= 0)[:, None, None],
        )
        k = rotated(k, cos, sin, is_interleaved)[source]
        kv_layer[block, 0, :, offset] = torch.where(is_real, k, kv_layer[block, 0, :, offset])
        kv_layer[block, 1, :, offset] = torch.where(is_real, v[source], kv_layer[block, 1, :, offset])
        return rotated(q, cos, sin, is_interleaved)

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_sequences, width = plan.block_tables.shape
        if len(q) != num_sequences:
            return super().paged_attention(q, kv_layer, plan, scale, sliding_window, softcap, sinks)
        _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
        contexts, keys = plan.context_lens[:, None], torch.arange(width * block_size)
        is_seen = keys < contexts
        if sliding_window is not None:
            is_seen = is_seen & (keys >= contexts - sliding_window)
        gathered = kv_layer[plan.block_tables.long()]  # [B, W, 2, KH, block_size, D]
        kv = gathered.permute(2, 0, 3, 1, 4, 5).reshape(2, num_sequences, num_kv_heads, -1, head_dim)
        kv = torch.where(is_seen[:, None, :, None], kv, 0.0)
        grouped = q.reshape(num_sequences, num_kv_heads, -1, head_dim)
        mask = torch.where(is_seen, 0.0, -torch.inf)[:, None, None, :]
        scores = grouped @ kv[0].transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask
        if sinks is not None:  # a column of no key
            column = sinks.view(num_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
        out = F.softmax(scores, dim=-1)[..., : len(keys)] @ kv[1]
        out = torch.where(contexts[:, :, None, None] > 0, out, 0.0)
        return out.reshape(q.shape)


def _gather(table: SlotTable, address: Tensor, index: Tensor, is_there: Tensor) -> Tensor:
    """Numbers `index` [T, ...] of the float32 parts at `address` [T]; 0 where there is none."""
    numbers = table.buffer.view(torch.float32)
    first = (address - table.buffer.data_ptr()) // 4
    places = first.view(-1, *(1,) * (index.dim() - 1)) + index
    return torch.where(is_there, numbers[torch.where(is_there, places, 0)], 0.0)
