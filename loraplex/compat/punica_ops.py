"""Punica's and vLLM's operators under their own names and argument order, on the kernels of the product.

    shrink: output[t, :rank] = scaling * inputs[t] A[i_t]^T       A [slots, rank, in]  (or [slots, 1, rank, in])
    expand: output[t, :n] (+)= inputs[t] B[i_t]^T                 B [slots, out, rank] (or [slots, 1, out, rank])

`bgmv` takes an index per row, i_t = lora_indices_tensor[t]. `sgmv` takes one per sequence: sequence j is rows
[b_seq_start_loc[j], b_seq_start_loc[j] + seq_len_tensor[j]), where b_seq_start_loc[j] := sum(seq_len_tensor[:j]).
Weights and inputs are cast to the output's dtype. A row with index -1 stays as it was, whether or not `add_inputs`. A
single result row is written to all output rows. Everything else that does not match raises ValueError.

A call makes a plan and a slot table that last for this call: rows are put into adapter order, the adapters that they
name are the slots, and the table has the addresses of the caller's weights, which the kernels read where they lie.
Native kernels have a product for such rows. Triton's `add_lora` is y += scale * (x A^T) B^T: there the other matrix is
the identity, products with which are exact (an adapter with infinite weights makes its rows NaN as a whole). Other
dtypes and devices run on stock torch.

`backend`: a kernel backend; by default the best one for the device of the output. On a GPU the indices are read on the
host, so a call waits for them, and calls on one backend belong on one stream.

Source: Punica, https://arxiv.org/abs/2310.18547; argument order of vLLM 0.6 (vllm/lora/ops).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.core import BASE_SLOT, LoraSlice, LoraTarget
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.lora import add_rows
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.slices import DTYPE_CODES

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ADDRESS_ALIGNMENT = 16
"""Bytes to which Triton's kernels believe weights to be aligned."""

Host = NDArray[np.int64]

# -------------------------------------------------------------------------------------------------------- the operators


def sgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    scaling: float,
    *,
    backend: KernelBackend | None = None,
) -> None:
    rows = _rows_of(b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums)
    _shrink(inputs, lora_a_weights, output_tensor, rows, scaling, backend)


def sgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    add_inputs: bool = False,
    *,
    backend: KernelBackend | None = None,
) -> None:
    rows = _rows_of(b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums)
    _expand(inputs, lora_b_weights, output_tensor, rows, add_inputs, backend)


def sgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = False,
    *,
    backend: KernelBackend | None = None,
) -> None:
    rows = _rows_of(b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums)
    _expand_slice(inputs, lora_b_weights, output_tensor, rows, slice_offset, slice_size, add_inputs, backend)


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
    *,
    backend: KernelBackend | None = None,
) -> None:
    _shrink(inputs, lora_a_weights, output_tensor, _host(lora_indices_tensor), scaling, backend)


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
    *,
    backend: KernelBackend | None = None,
) -> None:
    _expand(inputs, lora_b_weights, output_tensor, _host(lora_indices_tensor), add_inputs, backend)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
    *,
    backend: KernelBackend | None = None,
) -> None:
    rows = _host(lora_indices_tensor)
    _expand_slice(inputs, lora_b_weights, output_tensor, rows, slice_offset, slice_size, add_inputs, backend)


def _shrink(
    inputs: torch.Tensor,
    lora_a_weights: torch.Tensor,
    output: torch.Tensor,
    rows: Host,
    scaling: float,
    backend: KernelBackend | None,
) -> None:
    a = _matrices(lora_a_weights, "lora_a_weights", output)
    rank = a.shape[1]
    if output.shape[1] < rank:
        raise ValueError(f"output_tensor has {output.shape[1]} columns, the rank of lora_a_weights is {rank}")
    call = _Call.of(inputs, a, output[:, :rank], rows, scaling, is_shrink=True)
    call.run(backend or _default(output), add_inputs=False)


def _expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output: torch.Tensor,
    rows: Host,
    add_inputs: bool,
    backend: KernelBackend | None,
) -> None:
    b = _matrices(lora_b_weights, "lora_b_weights", output)
    columns = min(b.shape[1], output.shape[1])  # the two may be padded differently
    call = _Call.of(inputs, b[:, :columns], output[:, :columns], rows, 1.0, is_shrink=False)
    call.run(backend or _default(output), add_inputs)


def _expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output: torch.Tensor,
    rows: Host,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool,
    backend: KernelBackend | None,
) -> None:
    b = _matrices(lora_b_weights, "lora_b_weights", output)
    end = slice_offset + slice_size
    if not 0 <= slice_offset <= end <= output.shape[1]:
        raise ValueError(f"slice [{slice_offset}, {end}) is outside the {output.shape[1]} columns of output_tensor")
    if b.shape[1] != slice_size:
        raise ValueError(f"slice_size is {slice_size}, lora_b_weights have {b.shape[1]} output features")
    call = _Call.of(inputs, b, output[:, slice_offset:end], rows, 1.0, is_shrink=False)
    call.run(backend or _default(output), add_inputs)


@functools.cache
def _backend_for(device: torch.device, num_threads: int) -> KernelBackend:
    """CPU kernels run on as many threads as torch has when they are made."""
    return get_backend("auto", device)


def _default(output: torch.Tensor) -> KernelBackend:
    return _backend_for(output.device, torch.get_num_threads())


# ------------------------------------------------------------------------------------------------------------ arguments


def _matrices(weights: torch.Tensor, name: str, output: torch.Tensor) -> torch.Tensor:
    """[slots, m, n] from [slots, m, n] or [slots, 1, m, n], which is checked beside the output."""
    if weights.dim() == 4 and weights.shape[1] == 1:
        weights = weights[:, 0]
    if weights.dim() != 3:
        raise ValueError(f"{name} must be [slots, m, n] or [slots, 1, m, n], got {tuple(weights.shape)}")
    if output.dim() != 2:
        raise ValueError(f"output_tensor must be a matrix, got {tuple(output.shape)}")
    return weights


def _host(indices: torch.Tensor) -> Host:
    if indices.dtype.is_floating_point or indices.dim() != 1:
        raise ValueError(f"indices must be whole numbers in one dimension, got {indices.dtype} {tuple(indices.shape)}")
    return indices.cpu().numpy().astype(np.int64)


def _rows_of(
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
) -> Host:
    """One index per token row: lora_indices_tensor[j] repeated seq_len_tensor[j] times."""
    starts, lens, indices = _host(b_seq_start_loc), _host(seq_len_tensor), _host(lora_indices_tensor)
    sizes = {len(starts), len(lens), len(indices)}
    if sizes != {batches}:
        raise ValueError(f"batches is {batches}, the metadata tensors have {sorted(sizes)} entries")
    if lens.min(initial=0) < 0 or lens.max(initial=0) > max_seq_length:
        raise ValueError(
            f"sequence lengths {lens.min()} to {lens.max()} do not fit in 0..max_seq_length = {max_seq_length}"
        )
    ends = np.cumsum(lens)
    if not np.array_equal(starts, ends - lens):
        wrong = int(np.flatnonzero(starts != ends - lens)[0])
        raise ValueError(
            f"b_seq_start_loc[{wrong}] is {starts[wrong]}, the lengths before it say {ends[wrong] - lens[wrong]}"
        )
    if lens.sum() != token_nums:
        raise ValueError(f"token_nums is {token_nums}, the sequences have {lens.sum()} tokens")
    return np.repeat(indices, lens)


# ------------------------------------------------------------------------------------------------------------- the call


@dataclass(frozen=True, eq=False)
class _Call:
    """output[rows] (+)= scaling * inputs[rows] W^T, with the rows in adapter order.

    order: rows with an adapter; None: all of them, and they lie in order. used: the adapters; ends: behind the last row
    of each.
    """

    inputs: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor
    scaling: float
    is_shrink: bool
    order: torch.Tensor | None
    used: Host
    ends: Host

    @classmethod
    def of(
        cls,
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        rows: Host,
        scaling: float,
        is_shrink: bool,
    ) -> _Call:
        _check(inputs, weights, output, rows)
        order = np.argsort(rows, kind="stable")
        order = order[np.searchsorted(rows[order], 0) :]
        slots = rows[order]
        lasts = np.flatnonzero(np.diff(slots, append=slots[-1:] + 1))
        is_whole = np.array_equal(order, np.arange(len(rows)))
        on_device = None if is_whole else torch.from_numpy(order).to(output.device)
        return cls(inputs, weights, output, scaling, is_shrink, on_device, slots[lasts], lasts + 1)

    def run(self, backend: KernelBackend, add_inputs: bool) -> None:
        if not len(self.used):
            return
        dtype, order = self.output.dtype, self.order
        x = (self.inputs if order is None else self.inputs[order]).to(dtype)
        if len(self.inputs) == 1 != len(self.output):
            result = self._added(backend, x, self.output.new_zeros(1, self.output.shape[1]))
            self.output.copy_(self.output + result if add_inputs else result.expand_as(self.output))
            return
        if add_inputs:
            y = self._added(backend, x, self.output if order is None else self.output[order])
        else:
            y = self._added(backend, x, self.output.new_zeros(len(x), self.output.shape[1]))
        if order is not None:
            self.output[order] = y
        elif y is not self.output:
            self.output.copy_(y)

    def _added(self, backend: KernelBackend, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y + the products, in place where the kernels' dtype is that of y."""
        if 0 in self.weights.shape or not _has_kernels(backend, y.dtype):
            sizes = np.diff(self.ends, prepend=0).tolist()
            for rows, part, slot in zip(
                x.split_with_sizes(sizes), y.split_with_sizes(sizes), self.used.tolist(), strict=True
            ):
                part.addmm_(rows, self.weights[slot].to(y.dtype).T, alpha=self.scaling)
            return y
        dtype = backend.activation_dtype(y.dtype)
        wide = y.to(dtype) if y.stride(1) == 1 else y.to(dtype).contiguous()
        starts = np.concatenate([[0], self.ends[:-1]])
        segments = [
            LoraSegment(*each) for each in zip(starts.tolist(), self.ends.tolist(), range(len(starts)), strict=True)
        ]
        plan = LoraPlan.build(segments, len(x), len(segments), x.device)
        table, x = SlotTable((self._target,), len(segments), self._buffer), x.to(dtype).contiguous()
        weights, used = _readable(self.weights, self.used, y.dtype)
        table.scale[0], table.dtype[0] = self.scaling, DTYPE_CODES[y.dtype]
        if isinstance(backend, NativeBackend):
            table.a_addr[0], table.rank[0] = _addresses(weights, used), weights.shape[1]
            add_rows(backend.library, wide, x, plan, table, backend.num_threads)
        else:
            rank = weights.shape[1 if self.is_shrink else 2]
            identity = torch.eye(rank, dtype=y.dtype, device=y.device)
            a_addr, b_addr = (table.a_addr, table.b_addr) if self.is_shrink else (table.b_addr, table.a_addr)
            a_addr[0], b_addr[0], table.rank[0] = _addresses(weights, used), identity.data_ptr(), rank
            table.expect(rank, (y.dtype,))
            backend.add_lora(wide, x, plan, table, 0, table.targets[0].slices)
        return wide if wide.dtype == y.dtype else wide.to(y.dtype)

    @property
    def _target(self) -> LoraTarget:
        """The product as a linear of one slice."""
        _, m, n = self.weights.shape
        return LoraTarget("", 0, n, n, (LoraSlice("", 0, m, m),))

    @property
    def _buffer(self) -> torch.Tensor:
        """A buffer for the table, whose addresses are of other memory."""
        return torch.empty(1, dtype=torch.uint8, device=self.output.device)


def _check(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, rows: Host) -> None:
    """Raises ValueError when shapes, dtypes or devices do not match, or an index is outside the weights."""
    if inputs.dim() != 2:
        raise ValueError(f"inputs must be a matrix, got {tuple(inputs.shape)}")
    if inputs.shape[1] != weights.shape[2]:
        raise ValueError(f"inputs have {inputs.shape[1]} columns, the weights take {weights.shape[2]}")
    if len(rows) != len(inputs):
        raise ValueError(f"inputs have {len(inputs)} rows, there are {len(rows)} indices")
    if len(inputs) not in (1, len(output)):
        raise ValueError(f"{len(inputs)} result rows do not fit the {len(output)} rows of output_tensor")
    wrong = rows[(rows < BASE_SLOT) | (rows >= len(weights))]
    if len(wrong):
        raise ValueError(f"lora index {wrong[0]} is outside -1..{len(weights) - 1}")
    tensors = {"inputs": inputs, "weights": weights, "output_tensor": output}
    if not all(t.dtype.is_floating_point for t in tensors.values()):
        raise ValueError(
            f"tensors must be floating point, got {', '.join(f'{n} {t.dtype}' for n, t in tensors.items())}"
        )
    if len({t.device for t in tensors.values()}) > 1:
        raise ValueError(
            f"tensors must be on one device, got {', '.join(f'{n} {t.device}' for n, t in tensors.items())}"
        )


def _has_kernels(backend: KernelBackend, dtype: torch.dtype) -> bool:
    if backend.name == "triton":
        from loraplex.kernels.triton.backend import TritonBackend

        return isinstance(backend, TritonBackend) and backend.lora_gap({dtype}) is None
    return isinstance(backend, NativeBackend) and dtype in KERNEL_DTYPES


def _readable(weights: torch.Tensor, used: Host, dtype: torch.dtype) -> tuple[torch.Tensor, Host]:
    """Weights that kernels can read by address, in `dtype`, and where the used ones are in them: a copy of these only
    where it must be.
    """
    _, m, n = weights.shape
    starts = weights.data_ptr() | weights.stride(0) * weights.itemsize
    if weights.dtype == dtype and weights.stride()[1:] == (n, 1) and starts % ADDRESS_ALIGNMENT == 0:
        return weights, used
    room = -(-m * n * dtype.itemsize // ADDRESS_ALIGNMENT) * ADDRESS_ALIGNMENT // dtype.itemsize
    memory = torch.empty(len(used), room, dtype=dtype, device=weights.device)
    copy = memory.as_strided((len(used), m, n), (room, n, 1))
    return copy.copy_(weights[torch.from_numpy(used).to(weights.device)]), np.arange(len(used))


def _addresses(weights: torch.Tensor, used: Host) -> torch.Tensor:
    return torch.from_numpy(weights.data_ptr() + used * (weights.stride(0) * weights.itemsize)).to(weights.device)
