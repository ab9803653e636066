"""Punica's and vLLM's operators under their own names and argument order. Every backend inherits them.

shrink: output[t, :rank] = scaling * inputs[t] A[i_t]^T          A [slots, rank, in]  (or [slots, 1, rank, in])
expand: output[t, :n] (+)= inputs[t] B[i_t]^T                     B [slots, out, rank] (or [slots, 1, out, rank])

`bgmv` takes an index per row, i_t = lora_indices_tensor[t]. `sgmv` takes one per sequence: sequence j is rows
[b_seq_start_loc[j], b_seq_start_loc[j] + seq_len_tensor[j]), where b_seq_start_loc[j] := sum(seq_len_tensor[:j]).
Weights and inputs are cast to the output's dtype. A row with index -1 stays as it was, whether or not `add_inputs`.
A single result row is written to all output rows. Everything else that does not match raises ValueError.

Source: Punica, https://arxiv.org/abs/2310.18547; argument order of vLLM 0.6 (vllm/lora/ops).
The engine itself uses `add_lora`, which equals shrink, expand and the addition (tests/kernels/test_operators.py).
"""

from __future__ import annotations

import torch

from loraplex.core import BASE_SLOT


class LoraOperators:
    """The six operators; they need nothing of a backend."""

    def sgmv_shrink(
        self,
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
    ) -> None:
        indices = _row_indices(
            b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums
        )
        self.bgmv_shrink(inputs, lora_a_weights, output_tensor, indices, scaling)

    def sgmv_expand(
        self,
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
    ) -> None:
        indices = _row_indices(
            b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums
        )
        self.bgmv_expand(inputs, lora_b_weights, output_tensor, indices, add_inputs)

    def sgmv_expand_slice(
        self,
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
    ) -> None:
        indices = _row_indices(
            b_seq_start_loc, seq_len_tensor, lora_indices_tensor, batches, max_seq_length, token_nums
        )
        self.bgmv_expand_slice(inputs, lora_b_weights, output_tensor, indices, slice_offset, slice_size, add_inputs)

    def bgmv_shrink(
        self,
        inputs: torch.Tensor,
        lora_a_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        weights = _matrices(lora_a_weights, "lora_a_weights")
        rank = weights.shape[1]
        if output_tensor.shape[1] < rank:
            raise ValueError(f"output has {output_tensor.shape[1]} columns, the rank is {rank}")
        _apply(inputs, weights, output_tensor[:, :rank], lora_indices_tensor, scaling, add_inputs=False)

    def bgmv_expand(
        self,
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        add_inputs: bool = True,
    ) -> None:
        weights = _matrices(lora_b_weights, "lora_b_weights")
        columns = min(weights.shape[1], output_tensor.shape[1])  # the two may be padded differently
        _apply(inputs, weights[:, :columns], output_tensor[:, :columns], lora_indices_tensor, 1.0, add_inputs)

    def bgmv_expand_slice(
        self,
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        slice_offset: int,
        slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        weights = _matrices(lora_b_weights, "lora_b_weights")
        end = slice_offset + slice_size
        if not 0 <= slice_offset <= end <= output_tensor.shape[1]:
            raise ValueError(f"slice [{slice_offset}, {end}) is outside the output's {output_tensor.shape[1]} columns")
        if weights.shape[1] != slice_size:
            raise ValueError(f"slice_size is {slice_size}, the weights have {weights.shape[1]} output features")
        _apply(inputs, weights, output_tensor[:, slice_offset:end], lora_indices_tensor, 1.0, add_inputs)


def _matrices(weights: torch.Tensor, name: str) -> torch.Tensor:
    """[slots, m, n] from [slots, m, n] or [slots, 1, m, n]."""
    if weights.dim() == 4 and weights.shape[1] == 1:
        return weights[:, 0]
    if weights.dim() != 3:
        raise ValueError(f"{name} must be [slots, m, n] or [slots, 1, m, n], got {tuple(weights.shape)}")
    return weights


def _row_indices(
    b_seq_start_loc: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    batches: int,
    max_seq_length: int,
    token_nums: int,
) -> torch.Tensor:
    """One index per token row: lora_indices_tensor[j] repeated seq_len_tensor[j] times."""
    lens = seq_len_tensor.tolist()
    sizes = {len(lens), lora_indices_tensor.numel(), b_seq_start_loc.numel()}
    if sizes != {batches}:
        raise ValueError(f"batches is {batches}, the metadata tensors have {sorted(sizes)} entries")
    starts = [sum(lens[:j]) for j in range(batches)]
    if b_seq_start_loc.tolist() != starts:
        raise ValueError(f"b_seq_start_loc is {b_seq_start_loc.tolist()}, the lengths say {starts}")
    if sum(lens) != token_nums:
        raise ValueError(f"token_nums is {token_nums}, the sequences have {sum(lens)} tokens")
    if max(lens, default=0) > max_seq_length or min(lens, default=0) < 0:
        raise ValueError(f"sequence lengths {lens} do not fit in 0..max_seq_length = {max_seq_length}")
    return torch.repeat_interleave(lora_indices_tensor, seq_len_tensor.to(torch.int64))


def _apply(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    scaling: float,
    add_inputs: bool,
) -> None:
    """output[t] (+)= scaling * inputs[t] weights[indices[t]]^T, row groups of one index together."""
    host = _check(inputs, weights, output, indices)
    is_broadcast = inputs.shape[0] == 1
    for index in sorted(set(host) - {BASE_SLOT}):
        rows = [t for t, i in enumerate(host) if i == index]
        x = inputs[rows].to(output.dtype)
        result = scaling * (x @ weights[index].to(output.dtype).T)
        target: list[int] | slice = slice(None) if is_broadcast else rows
        output[target] = output[target] + result if add_inputs else result


def _check(inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor) -> list[int]:
    """The row indices on the host; ValueError when shapes do not match or an index is outside the weights."""
    if inputs.dim() != 2 or output.dim() != 2:
        raise ValueError(f"inputs and output must be matrices, got {tuple(inputs.shape)} and {tuple(output.shape)}")
    if inputs.shape[1] != weights.shape[2]:
        raise ValueError(f"inputs have {inputs.shape[1]} columns, the weights take {weights.shape[2]}")
    if indices.shape != inputs.shape[:1]:
        raise ValueError(f"inputs have {inputs.shape[0]} rows, there are {tuple(indices.shape)} indices")
    if inputs.shape[0] not in (1, output.shape[0]):
        raise ValueError(f"{inputs.shape[0]} result rows do not fit the output's {output.shape[0]} rows")
    host: list[int] = indices.tolist()
    wrong = [i for i in host if not BASE_SLOT <= i < weights.shape[0]]
    if wrong:
        raise ValueError(f"lora indices {wrong} are outside -1..{weights.shape[0] - 1}")
    return host
