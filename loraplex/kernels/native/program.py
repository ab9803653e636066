"""All layers of a model as one native call: what a captured graph is on a GPU.

The first step runs the layers' Python once with a `Recorder` in place of the kernels: each operator is written down
with its addresses and gives a tensor of a workspace. Every later step replays the list (csrc/program.cpp). What depends
on the step is an argument of the replay: the number of rows, the angles, the KV slots, the attention, the segments. So
one list serves any batch, prefill and decode alike. It saves what Python does between kernels, about a tenth of a
decode step of a small model (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.core import LoraSlice
from loraplex.kernels.experts import ExpertLora, Experts
from loraplex.kernels.native.attention import NO_WINDOW, attention_step, kv_layout_gap, rotary_call, sinks_address
from loraplex.kernels.native.board import RankBoard
from loraplex.kernels.native.experts import experts_call, scratch_width
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.native.linear import PanelWeight
from loraplex.kernels.native.lora import TableRows, segments_of, table_rows
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.slices import ALIGNMENT, align
from loraplex.kernels.step_batch import LayersForward, StepBatch

OPERATORS = (
    *("linear", "add_lora", "rms_norm", "add_rms_norm", "rotary_write_kv", "paged_attention", "silu_mul"),
    *("scale_input", "sum_ranks", "layer_norm", "add_scaled", "gelu", "experts", "add_gated"),
    "rms_norm_ranks",
)
"""By number, as in csrc/api.h."""

LEAST_ROWS = 64
"""Rows that a workspace has room for when no limit of a step is given; it grows by doubling."""

OnSeconds = Callable[[str, float], None]


class ProgramCall(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        ("op", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("at", ctypes.c_void_p * 6),
        ("size", ctypes.c_int64 * 4),
    )


class ProgramStep(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "kv_slots", "attention", "segments")),
    )


class Workspace:
    """Scratch tensors [rows, width], float32. One without references is given out again."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._buffers: list[NDArray[np.uint8]] = []
        self._free: dict[int, list[int]] = defaultdict(list)

    def empty(self, width: int) -> torch.Tensor:
        free = self._free[width]
        address = free.pop() if free else self._allocate(width)
        # The holder lives as long as the storage over it, which every view shares.
        holder: Any = _holder_type(self.num_rows * width).from_address(address)
        weakref.finalize(holder, free.append, address).atexit = False
        return torch.frombuffer(holder, dtype=torch.float32).view(self.num_rows, width)

    def _allocate(self, width: int) -> int:
        buffer = np.empty(
            4 * self.num_rows * width + ALIGNMENT, np.uint8
        )  # pages of rows that no step has cost nothing
        self._buffers.append(buffer)
        return align(buffer.ctypes.data)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def has(self, address: int) -> bool:
        """Whether this is memory of a tensor given out."""
        return any(0 <= address - buffer.ctypes.data < buffer.nbytes for buffer in self._buffers)


def _holder_type(num_floats: int) -> Any:
    return type("_Holder", (ctypes.c_float * num_floats,), {})  # a subclass, which can be referred to weakly


class Recorder:
    """The operators of a step as NativeBackend has them; none is run.

    Every tensor between them has to be a view of one that an operator gave: what torch computes here is not there in a
    replay.
    """

    def __init__(self, workspace: Workspace, num_threads: int) -> None:
        self.calls: list[ProgramCall] = []
        self.table: SlotTable | None = None
        self.has_input_gains = False
        """Of the table, before the first operator that depends on it was written down."""
        self.first_attention: tuple[torch.Tensor, torch.Tensor, float, float | None] | None = None
        self.board: RankBoard | None = None
        """Of the ranks that have a share of the step."""
        self._workspace = workspace
        self._num_threads = num_threads
        self._alive: list[Any] = []

    def _add(self, operator: str, *at: int, size: tuple[int, ...] = (), eps: float = 0.0, scale: float = 1.0) -> None:
        call = ProgramCall(OPERATORS.index(operator), self._num_threads, eps, scale)
        call.at[: len(at)], call.size[: len(size)] = at, size
        self.calls.append(call)

    def _scratch(self, tensor: torch.Tensor) -> int:
        """Its address."""
        address = tensor.data_ptr()
        assert self._workspace.has(address), "a tensor between native operators is not of the workspace"
        return address

    def linear(self, x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._workspace.empty(weight.out_features)
        self._alive += weight, bias
        self._add(
            "linear",
            *(
                self._scratch(x),
                weight.address,
                weight.scale_address,
                0 if bias is None else bias.data_ptr(),
                y.data_ptr(),
            ),
            size=(x.stride(0), weight.in_features, weight.out_features, weight.format),
        )
        return y

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, table: SlotTable, first_row: int, slices: tuple[LoraSlice, ...]
    ) -> None:
        rows = self._rows_of(table, first_row, x.shape[1], slices)
        last = self.calls[-1]
        if last.op == OPERATORS.index("linear") and (last.at[0], last.at[4]) == (x.data_ptr(), y.data_ptr()):
            last.at[5] = rows.address  # one parallel region, and the product prefetches the adapters
            return
        self._add("add_lora", rows.address, self._scratch(x), self._scratch(y), size=(x.stride(0), y.stride(0)))

    def scale_input(self, x: torch.Tensor, table: SlotTable, first_row: int) -> None:
        rows = self._rows_of(table, first_row, x.shape[1], table.target_at(first_row).slices)
        self._add("scale_input", rows.address, self._scratch(x), size=(x.stride(0),))

    def _rows_of(self, table: SlotTable, first_row: int, in_features: int, slices: tuple[LoraSlice, ...]) -> TableRows:
        self._take_table(table)
        rows = table_rows(table, first_row, in_features, slices)
        self._alive.append(rows)
        return rows

    def _take_table(self, table: SlotTable) -> None:
        if self.table is None:
            self.table, self.has_input_gains = table, table.has_input_gains
        assert self.table is table

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.stride(-1) == 1
        per_token, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        y = self._workspace.empty(per_token * x.shape[-1])
        self._alive.append(weight)
        self._add(
            "rms_norm",
            *(self._scratch(x), weight.data_ptr(), y.data_ptr()),
            size=(x.stride(0), per_token, inner_stride, x.shape[-1]),
            eps=eps,
        )
        return y.view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._alive.append(weight)
        self._add(
            "add_rms_norm",
            *(self._scratch(x), self._scratch(residual), weight.data_ptr()),
            size=(x.stride(0), residual.stride(0), x.shape[1]),
            eps=eps,
            scale=scale,
        )
        return x, residual

    def add_scaled(self, x: torch.Tensor, residual: torch.Tensor, scale: float) -> torch.Tensor:
        size = x.stride(0), residual.stride(0), x.shape[1]
        self._add("add_scaled", self._scratch(x), self._scratch(residual), size=size, scale=scale)
        return residual

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        assert x.stride(1) == 1
        y = self._workspace.empty(x.shape[1])
        self._alive += weight, bias
        self._add(
            "layer_norm",
            *(self._scratch(x), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()),
            size=(x.stride(0), x.shape[1]),
            eps=eps,
        )
        return y

    def experts(self, x: torch.Tensor, logits: torch.Tensor, layer: Experts, lora: ExpertLora | None) -> torch.Tensor:
        call = experts_call(layer, None if lora is None else lora.table, self._num_threads)
        if lora is not None:
            self._take_table(lora.table)
        scratch, y = self._workspace.empty(scratch_width(layer)), self._workspace.empty(x.shape[1])
        self._alive.append(call)
        self._add(
            "experts",
            *(call.address, self._scratch(x), self._scratch(logits), scratch.data_ptr(), y.data_ptr()),
            size=(x.stride(0), logits.stride(0)),
        )
        return y

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        size = x.stride(0), gate.stride(0), y.stride(0), y.shape[1]
        self._add("add_gated", self._scratch(x), self._scratch(gate), self._scratch(y), size=size)
        return y

    def gelu(self, x: torch.Tensor, is_tanh: bool, has_up: bool) -> torch.Tensor:
        width = x.shape[1] // 2 if has_up else x.shape[1]
        y = self._workspace.empty(width)
        self._add("gelu", self._scratch(x), y.data_ptr(), size=(x.stride(0), width, is_tanh, has_up))
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        inner = gate_up.shape[1] // 2
        y = self._workspace.empty(inner)
        self._add("silu_mul", self._scratch(gate_up), y.data_ptr(), size=(gate_up.stride(0), inner))
        return y

    def sum_ranks(self, part: torch.Tensor, board: RankBoard) -> torch.Tensor:
        assert part.is_contiguous()
        self._take_board(board)
        self._add("sum_ranks", board.address, self._scratch(part), size=(part.shape[1],))
        return part

    def rms_norm_ranks(self, x: torch.Tensor, weight: torch.Tensor, eps: float, board: RankBoard) -> torch.Tensor:
        assert x.stride(1) == 1
        self._take_board(board)
        self._alive.append(weight)
        sums, y = self._workspace.empty(1), self._workspace.empty(x.shape[1])
        self._add(
            "rms_norm_ranks",
            *(board.address, self._scratch(x), weight.data_ptr(), sums.data_ptr(), y.data_ptr()),
            size=(x.stride(0), x.shape[1]),
            eps=eps,
        )
        return y

    def _take_board(self, board: RankBoard) -> None:
        assert self.board in (None, board)
        self.board = board

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        kv_layer: torch.Tensor,
        is_interleaved: bool,
    ) -> torch.Tensor:
        """cos: the layer's columns of the step's."""
        assert all(self._scratch(tensor) for tensor in (q, k, v))
        call = rotary_call(q, k, v, cos, kv_layer, self._num_threads, is_interleaved)
        self._alive.append(call)
        self._add("rotary_write_kv", ctypes.addressof(call), size=(int(cos.storage_offset()),))
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.first_attention is None:
            self.first_attention = q, kv_layer, scale, softcap
        first_q, first_kv, *first_rule = self.first_attention
        assert (first_q.shape, first_kv.stride(), *first_rule) == (q.shape, kv_layer.stride(), scale, softcap)
        out = self._workspace.empty(q.shape[1] * q.shape[2])
        self._add(
            "paged_attention",
            *(self._scratch(q), kv_layer.data_ptr(), out.data_ptr(), sinks_address(sinks, q) or 0),
            size=(q.stride(0), sliding_window or NO_WINDOW),
        )
        self._alive.append(sinks)
        return out.view(q.shape)


@dataclass(frozen=True, slots=True)
class _Program:
    """A recorded list, its input and its output [rows, hidden]."""

    calls: ctypes.Array[ProgramCall]
    recorder: Recorder
    x: torch.Tensor
    output: torch.Tensor

    @property
    def is_current(self) -> bool:
        """Whether the table has had no first input gain since: without one, `scale_input` is not written down."""
        table = self.recorder.table
        return table is None or table.has_input_gains == self.recorder.has_input_gains


@dataclass(frozen=True, slots=True)
class _Key:
    """What a recording depends on."""

    has_adapters: bool
    kv_address: int
    kv_shape: torch.Size


class StepProgram:
    """`forward`, recorded when it is first called and replayed from then on.

    When the KV memory moves, or the slot table gets its first input gain, a new recording is made; weights, biases and
    the slot table have to stay where they are. A cache in a layout that is not native is left to `forward` itself.
    recording(recorder): within it the operators are the recorder's.
    """

    def __init__(
        self,
        library: NativeLibrary,
        num_threads: int,
        recording: Callable[[Recorder], AbstractContextManager[None]],
        forward: LayersForward,
        on_seconds: OnSeconds | None,
        num_rows: int = LEAST_ROWS,
    ) -> None:
        self._library = library
        self._num_threads = num_threads
        self._recording = recording
        self._forward = forward
        self._on_seconds = on_seconds
        self._num_rows = num_rows
        self._workspace = Workspace(num_rows)
        self._programs: dict[_Key, _Program] = {}

    @torch.inference_mode()
    def __call__(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], kv: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], as `forward`."""
        if kv_layout_gap(kv[:, 0]) is not None:
            return self._forward(x, rope, kv, batch)
        if len(x) > self._workspace.num_rows:
            self.reserve(1 << (len(x) - 1).bit_length())
        key = _Key(batch.lora is not None and batch.lora.num_segments > 0, kv.data_ptr(), kv.shape)
        program = self._programs.get(key)
        if program is None or not program.is_current:
            program = self._programs[key] = self._record(x, rope, kv, batch)
        program.x[: len(x)] = x
        self._run(program, rope, batch, len(x))
        return program.output[: len(x)].clone()

    def reserve(self, num_rows: int) -> None:
        """A workspace for `num_rows` rows, if it has fewer; steps are recorded again then."""
        if num_rows > self._workspace.num_rows:
            self._num_rows = num_rows
            self.release()

    def release(self) -> int:
        """Let recordings and scratch memory go; returns its bytes."""
        nbytes = self._workspace.nbytes
        self._programs.clear()
        self._workspace = Workspace(self._num_rows)
        return nbytes

    @property
    def workspace_nbytes(self) -> int:
        return self._workspace.nbytes

    def _record(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], kv: torch.Tensor, batch: StepBatch
    ) -> _Program:
        recorder = Recorder(self._workspace, self._num_threads)
        start = self._workspace.empty(x.shape[1])
        with self._recording(recorder):
            output = self._forward(start, rope, kv, batch)
        has_adapters = batch.lora is not None and batch.lora.num_segments > 0
        assert (recorder.table is not None) == has_adapters, (
            "adapters were not recorded: their backend is not the layers'"
        )
        return _Program((ProgramCall * len(recorder.calls))(*recorder.calls), recorder, start, output)

    def _run(self, program: _Program, rope: tuple[torch.Tensor, torch.Tensor], batch: StepBatch, num_rows: int) -> None:
        cos, sin = rope
        kv_slots = batch.attention.kv_slot_mapping
        assert cos.dtype == sin.dtype == torch.float32
        assert kv_slots.dtype == torch.int64
        assert cos.is_contiguous() and sin.is_contiguous() and kv_slots.is_contiguous()  # noqa: PT018
        assert cos.shape == sin.shape
        assert len(cos) == len(kv_slots) == num_rows
        assert cos.storage_offset() == 0, "the columns of a layer were written down as offsets in the storage"
        assert program.recorder.first_attention is not None
        q, kv_layer, scale, softcap = program.recorder.first_attention
        attention = attention_step(q[:num_rows], kv_layer, batch.attention, scale, softcap, self._num_threads)
        segments = None
        if program.recorder.table is not None:
            assert batch.lora is not None
            segments = segments_of(batch.lora, program.recorder.table)
        step = ProgramStep(
            num_rows,
            *(cos.data_ptr(), sin.data_ptr(), kv_slots.data_ptr(), attention.address),
            None if segments is None else segments.address,
        )
        seconds = None if self._on_seconds is None else (ctypes.c_double * len(OPERATORS))()
        self._library.functions.loraplex_run_program(
            ctypes.addressof(program.calls), len(program.calls), ctypes.addressof(step), seconds
        )
        if seconds is not None and self._on_seconds is not None:
            for operator, spent in zip(OPERATORS, seconds, strict=True):
                self._on_seconds(operator, spent)
        if program.recorder.board is not None:
            program.recorder.board.check()
