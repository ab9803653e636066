"""Linear layers of the base model, each this rank's share of what the checkpoint has.

A linear publishes a `LoraTarget` (name, slices, how it is cut) and the parts of the checkpoint that fill it; the
weights of its slices (q, k, v or gate, up) lie under one another in one tensor, so that they are one GEMM. Weights are
shapes on the meta device until `allocate`, when it is the layer's turn to be loaded, and are filled in place. How
tensors are cut is loraplex/distributed.py, the same rule as for adapters; the sum over ranks after a row-parallel layer
is the decoder's, since adapters' deltas come before it.

    column, merged, qkv    y_i = x W_i^T + b_i                   parts side by side = y
                           (k, v replicated when heads are fewer than ranks)
    row                    y_i = x_i W_i^T (+ b on rank 0)       sum over ranks = y
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.core import LoraSlice, LoraTarget, Shard, ShardKind
from loraplex.distributed import own_rows, shard_bias, shard_columns, shard_outputs, shard_rows
from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.protocols import LinearWeight
from loraplex.kernels.quantized_weights import QuantizedSpecification
from loraplex.layers.common import LayerSetup, WeightPart

META = torch.device("meta")
HEAD_QUANTIZATIONS = {"int8": "int8", "int4": "int8", "int4-a16": "int8"}
"""What the output head is quantised to; with fp8 it stays as it is."""


class ParallelLinear:
    """y = x W^T + b for what `target` describes. weight [out, in] and bias [out] hold the slices under one another."""

    def __init__(self, target: LoraTarget, has_bias: bool, setup: LayerSetup) -> None:
        out_features = sum(s.out_features for s in target.slices)
        self.target = target = replace(target, is_fully_sharded=setup.ranks.is_fully_sharded)
        self.name = target.name
        self.ops = setup.ops
        self.quantization = setup.quantization
        self.is_kept = False
        """Whether the weight is in the integers of the checkpoint, which `load_integers` takes."""
        self.device = setup.device
        self.weight: LinearWeight = torch.empty(out_features, target.in_features, dtype=setup.dtype, device=META)
        self.bias = torch.empty(out_features, dtype=setup.activation_dtype, device=setup.device) if has_bias else None

    def forward(self, x: Tensor, plan: LoraPlan | None = None) -> Tensor:
        """x [T, in] -> [T, out]. The call of a layer with LoRA; a plan with adapters is an error here, not ignored."""
        assert plan is None or not plan.num_segments, f"{self.target.name} has no LoRA and got a plan with adapters"
        return self.ops.linear(x, self.weight, self.bias)

    def forward_slice(self, x: Tensor, slice_index: int) -> Tensor:
        """x [T, in] -> [T, out of that slice]: columns of `forward`."""
        s = self.target.slices[slice_index]
        rows = s.out_offset, s.out_offset + s.out_features
        weight = self.ops.linear_rows(self.weight, *rows)
        if weight is None:
            return self.ops.linear(x, self.weight, self.bias)[:, slice(*rows)]
        return self.ops.linear(x, weight, None if self.bias is None else self.bias[slice(*rows)])

    def allocate(self) -> None:
        self.weight = _allocated(self.weight, self.device)

    def keep_integers(self, quantization: str) -> None:
        """The weight will be in the checkpoint's integers of this quantization: `load_integers` stands for `allocate`,
        the weight's parts and `prepare`."""
        self.quantization, self.is_kept = quantization, True

    def load_integers(self, weight: QuantizedSpecification) -> None:
        """This rank's share of all slices, under one another, on the device; in the form that kernels read."""
        kept = self.ops.keep_linear(weight)
        assert kept is not None, self.name
        self.weight = kept

    def prepare(self) -> None:
        self.weight = self.ops.prepare_linear(self.weight, self.quantization)

    def prepared(self) -> dict[str, Tensor]:
        return self.ops.linear_tensors(self.weight) | ({} if self.bias is None else {"bias": self.bias})

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self.bias is not None:
            self.bias = tensors["bias"]
        self.weight = self.ops.restore_linear(tensors, (len(self.weight), self.target.in_features))

    def weight_parts(self) -> Iterator[WeightPart]:
        for index, s in enumerate(self.target.slices):
            full = (s.full_out_features, self.target.full_in_features)
            rows = own_rows(s, self.target.shard) if s.parts else ()
            yield WeightPart(f"{s.module_name}.weight", full, self._rows_of(self.weight, s), self._weight_cut(s), rows)
            if self.bias is not None:
                yield self._bias_part(index, s, self.bias)

    def base_rows(self, first: int, last: int) -> Tensor:
        """Rows [first, last) bit for bit as they were loaded, where the kernels look rows up in this form
        (`embeds_prepared`); any thread may call it."""
        return self.ops.embedding(torch.arange(first, last, device=self.device), self.weight)

    def over(self, weight: LinearWeight, bias: Tensor | None) -> ParallelLinear:
        """This layer with another weight, which is prepared, and another bias."""
        other = copy.copy(self)
        other.weight, other.bias = weight, bias
        return other

    def base_bias(self, module_name: str) -> Tensor | None:
        """This rank's bias of one slice, a view; None when the layer has no biases. KeyError: no such slice."""
        return None if self.bias is None else self._rows_of(self.bias, self._slice(module_name))

    def row_norms(self, module_name: str, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        """||W_n + scaling (B A)_n||_2 of each row n of one slice, in float32, on the host.

        lora_a [rank, in] and lora_b [out, rank] are this rank's. Any thread may call it, while steps run. ValueError
        where a row is cut over ranks: its norm is a sum over them.
        """
        s, shard = self._slice(module_name), self.target.shard
        if self.target.kind is ShardKind.ROW and shard.size > 1:
            raise ValueError(f"the rows of {module_name} are cut over {shard.size} ranks, none has their norms")
        a, b = (tensor.to(self.device, torch.float32) for tensor in (lora_a, lora_b))
        end = s.out_offset + s.out_features
        return self.ops.row_norms(self.weight, s.out_offset, end, a, b, scaling).cpu()

    def _slice(self, module_name: str) -> LoraSlice:
        for s in self.target.slices:
            if s.module_name == module_name:
                return s
        raise KeyError(module_name)

    @staticmethod
    def _rows_of(tensor: Tensor, s: LoraSlice) -> Tensor:
        return tensor[s.out_offset : s.out_offset + s.out_features]

    def _weight_cut(self, s: LoraSlice) -> Callable[[Tensor], Tensor]:
        target = self.target

        def cut(tensor: Tensor) -> Tensor:
            return shard_columns(shard_outputs(tensor, s, target.shard), target.in_features, target.shard)

        return cut

    def _bias_part(self, index: int, s: LoraSlice, bias: Tensor) -> WeightPart:
        def cut(tensor: Tensor) -> Tensor:
            share = shard_bias(self.target, index, tensor)
            return torch.zeros_like(tensor) if share is None else share

        return WeightPart(f"{s.module_name}.bias", (s.full_out_features,), self._rows_of(bias, s), cut)


class ReplicatedLinear(ParallelLinear):
    """One small linear that every rank has whole; no adapter but a LoRA acts on it, for its input is others', too."""

    def __init__(
        self, name: str, layer: int, in_features: int, out_features: int, has_bias: bool, setup: LayerSetup
    ) -> None:
        slices = stack_slices([(name, out_features)], [out_features], has_bias)
        kind = ShardKind.REPLICATED
        parameter = f"{name}.weight"
        target = LoraTarget(name, layer, in_features, in_features, slices, kind, setup.shard, parameter=parameter)
        super().__init__(target, has_bias, replace(setup, quantization=None))


class FusedColumnParallelLinear(ParallelLinear):
    """Several linears that are one module of the checkpoint, the output of each cut over the ranks.

    counts: heads of `width` features of each, in the order of the module's rows; dealt out as kv heads are.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        in_features: int,
        counts: Sequence[int],
        width: int,
        has_bias: bool,
        setup: LayerSetup,
    ) -> None:
        parts = [(width * count, width * kv_heads_of_shard(count, setup.shard)) for count in counts]
        full, here = (sum(each) for each in zip(*parts, strict=True))
        slices = (LoraSlice(name, 0, here, full, has_bias, tuple(parts)),)
        target = LoraTarget(name, layer, in_features, in_features, slices, ShardKind.COLUMN, setup.shard)
        super().__init__(target, has_bias, setup)


class MergedColumnParallelLinear(ParallelLinear):
    """Several linears of one input in one GEMM (gate and up), the output of each cut over the ranks.

    modules: (name in the checkpoint, out_features) in the order of the output's columns.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        in_features: int,
        modules: Sequence[tuple[str, int]],
        has_bias: bool,
        setup: LayerSetup,
    ) -> None:
        slices = stack_slices(modules, [_share(full, setup.shard) for _, full in modules], has_bias)
        target = LoraTarget(name, layer, in_features, in_features, slices, ShardKind.COLUMN, setup.shard)
        super().__init__(target, has_bias, setup)


class QKVParallelLinear(ParallelLinear):
    """q, k and v in one GEMM, cut by heads; several ranks hold a k or v head when heads are fewer than ranks.

    modules: the names of q, k and v in the checkpoint. Output columns: num_heads, num_kv_heads, num_kv_heads heads of
    head_dim.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        in_features: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        modules: tuple[str, str, str],
        has_bias: bool,
        setup: LayerSetup,
    ) -> None:
        heads, kv_heads = _share(num_heads, setup.shard), kv_heads_of_shard(num_kv_heads, setup.shard)
        full = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        here = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        slices = stack_slices(list(zip(modules, full, strict=True)), here, has_bias)
        target = LoraTarget(name, layer, in_features, in_features, slices, ShardKind.QKV, setup.shard)
        super().__init__(target, has_bias, setup)


class RowParallelLinear(ParallelLinear):
    """One linear, its input cut over the ranks; each rank gives a summand of the output, and rank 0's has the bias."""

    def __init__(
        self,
        name: str,
        layer: int,
        in_features: int,
        out_features: int,
        has_bias: bool,
        setup: LayerSetup,
    ) -> None:
        slices = stack_slices([(name, out_features)], [out_features], has_bias)
        target = LoraTarget(
            name, layer, _share(in_features, setup.shard), in_features, slices, ShardKind.ROW, setup.shard
        )
        super().__init__(target, has_bias, setup)


def stack_slices(modules: Sequence[tuple[str, int]], here: Sequence[int], has_bias: bool) -> tuple[LoraSlice, ...]:
    """Slices under one another: offset[i] := sum(here[:i]). modules: (name, full out_features); here: this rank's."""
    return tuple(LoraSlice(module, sum(here[:i]), here[i], full, has_bias) for i, (module, full) in enumerate(modules))


def _share(full: int, shard: Shard) -> int:
    if full % shard.size:
        raise ValueError(f"{full} features or heads cannot be dealt out evenly to {shard.size} ranks")
    return full // shard.size


def kv_heads_of_shard(num_kv_heads: int, shard: Shard) -> int:
    """Key and value heads of one rank: an even share, or one for `shard.size / num_kv_heads` neighbours."""
    if num_kv_heads < shard.size and shard.size % num_kv_heads == 0:
        return 1
    return _share(num_kv_heads, shard)


# ------------------------------------------------------------------------------------------------ the vocabulary's ends


class VocabParallelEmbedding:
    """y[t] = weight[token_ids[t]]; the vocabulary is cut over the ranks and rows of other ranks' tokens are zero: the
    sum is y.

    is_tied: a head has the same weight. Where the kernels can look rows up in the form of a head, there is no other
    (`is_head`).
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, setup: LayerSetup, is_tied: bool = False) -> None:
        self.name = name
        self.shard = setup.shard
        self.ops = setup.ops
        self.full_shape = (vocab_size, hidden_size)
        self.num_rows = _share(vocab_size, setup.shard)
        self.device = setup.device
        self.is_head = is_tied and setup.ops.embeds_prepared(_head_quantization(setup))
        self.weight: LinearWeight = _vocab_share(vocab_size, hidden_size, setup)
        slices = (LoraSlice(name, 0, hidden_size, hidden_size),)
        self.target = LoraTarget(name, -1, self.num_rows, vocab_size, slices, ShardKind.EMBEDDING, setup.shard)
        self.activation_dtype = setup.activation_dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [T] -> [T, hidden]"""
        return self._lookup(token_ids).to(self.activation_dtype)

    @property
    def rows_name(self) -> str:
        """The module of the checkpoint that has the rows."""
        return self.name

    @property
    def has_base_rows(self) -> bool:
        return True

    def base_rows(self, token_ids: Tensor) -> Tensor:
        """Rows [n, hidden] bit for bit as they were loaded; any thread may call it."""
        return self._lookup(token_ids)

    def _lookup(self, token_ids: Tensor) -> Tensor:
        if self.shard.size == 1:
            return self.ops.embedding(token_ids, self.weight)
        local = token_ids - self.shard.rank * self.num_rows
        is_here = (local >= 0) & (local < self.num_rows)
        return self.ops.embedding(local * is_here, self.weight) * is_here[:, None]

    def weight_parts(self) -> Iterator[WeightPart]:
        yield _vocab_part(self.name, self.full_shape, self.weight, self.shard)

    def allocate(self) -> None:
        self.weight = _allocated(self.weight, self.device)

    def prepare(self) -> None:
        if self.is_head:
            self.weight = self.ops.prepare_linear(self.weight)

    def prepared(self) -> dict[str, Tensor]:
        return self.ops.linear_tensors(self.weight) if self.is_head else {"weight": self.weight}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self.is_head:
            self.weight = self.ops.restore_linear(tensors, (self.num_rows, self.full_shape[1]))
        else:
            self.weight = tensors["weight"]


class ParallelLMHead:
    """logits_i = hidden W_i^T in float32, the vocabulary cut over the ranks: parts side by side are the logits.

    `tied_to`: the embedding whose weight this is. It is quantised to int8, and to nothing less: a logit's error is a
    token's.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        setup: LayerSetup,
        tied_to: VocabParallelEmbedding | None = None,
        layer: int = 0,
    ) -> None:
        self.name = name
        self.shard = setup.shard
        self.ops = setup.ops
        self.device = setup.device
        self.quantization = _head_quantization(setup)
        self.tied_to = tied_to
        self.full_shape = (vocab_size, hidden_size)
        self._shared = tied_to if tied_to is not None and tied_to.is_head else None
        self._own: LinearWeight = _vocab_share(vocab_size, hidden_size, setup)
        slices = stack_slices([(name, vocab_size)], [_share(vocab_size, setup.shard)], False)
        self.target = LoraTarget(
            name, layer, hidden_size, hidden_size, slices, ShardKind.HEAD, setup.shard, is_tied=tied_to is not None
        )

    @property
    def weight(self) -> LinearWeight:
        return self._own if self._shared is None else self._shared.weight

    @property
    def has_own_weight(self) -> bool:
        """Whether there is one beside the embedding's, to be loaded and prepared."""
        return self._shared is None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] -> float32 [n, vocab of this rank]; computed in the activations' dtype, then widened."""
        return self.product(hidden).float()

    def product(self, hidden: Tensor) -> Tensor:
        """The same in the activations' dtype."""
        return self.ops.linear(hidden, self.weight, None)

    @property
    def rows_name(self) -> str:
        """The module of the checkpoint that has the rows."""
        return self.name if self.tied_to is None else self.tied_to.name

    @property
    def has_base_rows(self) -> bool:
        """Whether the rows can be known as they were loaded: a head in eight bits says something else."""
        return self.tied_to is not None or self.quantization is None

    def base_rows(self, token_ids: Tensor) -> Tensor | None:
        """Rows [n, hidden] bit for bit as they were loaded; None without `has_base_rows`. Any thread may call it."""
        if self.tied_to is not None:
            return self.tied_to.base_rows(token_ids)
        return self.ops.embedding(token_ids, self.weight) if self.has_base_rows else None

    def row_norms(self, module_name: str, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        """As `ParallelLinear.row_norms`."""
        a, b = (tensor.to(self.device, torch.float32) for tensor in (lora_a, lora_b))
        return self.ops.row_norms(self.weight, 0, self.target.slices[0].out_features, a, b, scaling).cpu()

    def allocate(self) -> None:
        if self.tied_to is None:
            self._own = _allocated(self._own, self.device)

    def prepare(self) -> None:
        """From the embedding's rows where it is tied to one, which has to be loaded before."""
        assert self.has_own_weight
        self._own = self.ops.prepare_linear(
            self._own if self.tied_to is None else self.tied_to.weight, self.quantization
        )

    def prepared(self) -> dict[str, Tensor]:
        return self.ops.linear_tensors(self._own)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.has_own_weight
        self._own = self.ops.restore_linear(tensors, self._own.shape)

    def weight_parts(self) -> Iterator[WeightPart]:
        if self.tied_to is None:
            yield _vocab_part(self.name, self.full_shape, self._own, self.shard)


def _head_quantization(setup: LayerSetup) -> str | None:
    return None if setup.quantization is None else HEAD_QUANTIZATIONS.get(setup.quantization)


def _vocab_share(vocab_size: int, hidden_size: int, setup: LayerSetup) -> Tensor:
    """The shape of this rank's rows."""
    return torch.empty(_share(vocab_size, setup.shard), hidden_size, dtype=setup.dtype, device=META)


def _vocab_part(name: str, full_shape: tuple[int, int], weight: Tensor, shard: Shard) -> WeightPart:
    return WeightPart(f"{name}.weight", full_shape, weight, lambda tensor: shard_rows(tensor, len(weight), shard))


def _allocated(weight: Tensor, device: torch.device) -> Tensor:
    """Memory for a weight that is a shape so far. `empty_like` of a shape would import sympy (0.2 s)."""
    return torch.empty(weight.shape, dtype=weight.dtype, device=device)
