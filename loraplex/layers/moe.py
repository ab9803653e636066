"""A mixture of experts in place of an MLP: a router, its experts, and for some families an expert that all rows share.

    y = sum over the chosen experts e of p_e * down_e(silu(gate_e(x)) * up_e(x))  [+ sigmoid(g(x)) * shared(x)]

A family may have biases in the router and the experts, and another gate (kernels/experts.py's ClampedGate); factors
that multiply what experts read; and a shared expert without a factor.

p are the softmax of the router's logits in float32 (kernels/experts.py). Each expert is two linears of its own, with
the names of the checkpoint: weights, quantisation, shares of ranks and adapters are those of any linear. The products
of all experts of a layer are one operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from loraplex.kernels.experts import ClampedGate, ExpertLinear, ExpertLora, Experts
from loraplex.kernels.plan import LoraPlan
from loraplex.layers.common import LayerSetup
from loraplex.layers.linear import MergedColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from loraplex.layers.lora import BaseLayerWithLoRA

Linear = ParallelLinear | BaseLayerWithLoRA


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Of one layer. normalizes: the factors of the chosen experts are divided by their sum. shared_size: of the shared
    expert; 0: there is none. has_bias: router and experts have biases. clamp: of experts' gates; None: they are SiLU's.
    scales_inputs: as kernels/experts.py's Experts has it.
    """

    num_experts: int
    top_k: int
    inner_size: int
    normalizes: bool
    shared_size: int = 0
    has_bias: bool = False
    clamp: ClampedGate | None = None
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """In the checkpoint, below a layer: the block, and in it an expert's gate, up and down, the router, and the gate of
    the shared expert ("": it has none).

    parameters: the block in which transformers keeps all experts in one tensor each. is_transposed: these are
    [experts, in, out]. takes_turns: outputs of gate and up take turns in it. swaps_factors: peft takes it for [experts,
    out, in] all the same, as LoraTarget has it.
    """

    block: str = "mlp"
    modules: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    parameters: str = "mlp"
    is_transposed: bool = False
    takes_turns: bool = False
    swaps_factors: bool = False
    shared_gate: str = "shared_expert_gate"


class SharedExpert(Protocol):
    """An MLP, of which a rank has a share."""

    def partial(self, x: Tensor, lora: LoraPlan | None) -> Tensor: ...


class LinearList(Protocol):
    """Where a model notes its linears."""

    def add(self, linear: ParallelLinear) -> Linear: ...


class SparseMLP:
    """The block of one layer; x [T, hidden] -> [T, hidden]."""

    def __init__(
        self,
        name: str,
        layer: int,
        hidden_size: int,
        sizes: ExpertSizes,
        names: ExpertNames,
        setup: LayerSetup,
        linears: LinearList,
        shared: SharedExpert | None,
    ) -> None:
        block = f"{name}.{names.block}"
        self.sizes, self.ops, self.ranks = sizes, setup.ops, setup.ranks
        router = f"{block}.{names.router}", layer, hidden_size, sizes.num_experts, sizes.has_bias, setup
        gate = ReplicatedLinear(*router)
        gate.target = replace(gate.target, parameter=f"{name}.{names.parameters}.{names.router}.weight")
        self.gate = linears.add(gate)
        stacked = f"{name}.{names.parameters}.experts"
        self.gate_up: list[Linear] = []
        self.down: list[Linear] = []
        for index in range(sizes.num_experts):
            of_gate, of_up, of_down = (f"{block}.experts.{index}.{each}" for each in names.modules)
            first = MergedColumnParallelLinear(
                f"{block}.experts.{index}.gate_up_proj",
                *(layer, hidden_size, [(of_gate, sizes.inner_size), (of_up, sizes.inner_size)]),
                *(sizes.has_bias, setup),
            )
            last = RowParallelLinear(of_down, layer, sizes.inner_size, hidden_size, sizes.has_bias, setup)
            for linear, parameter, into in (
                (first, f"{stacked}.gate_up_proj", self.gate_up),
                (last, f"{stacked}.down_proj", self.down),
            ):
                linear.target = replace(
                    linear.target,
                    expert=(index, sizes.num_experts),
                    parameter=parameter,
                    takes_turns=names.takes_turns,
                    swaps_factors=names.swaps_factors,
                )
                into.append(linears.add(linear))
        self.shared = shared
        self.shared_gate: Linear | None = None
        if shared is not None and names.shared_gate:
            self.shared_gate = linears.add(
                ReplicatedLinear(f"{block}.{names.shared_gate}", layer, hidden_size, 1, False, setup)
            )

    def forward(self, x: Tensor, lora: LoraPlan | None) -> Tensor:
        """One sum over ranks: every one has a part of each expert."""
        logits = self.gate.forward(x, lora)
        y = self.ops.experts(x, logits, self._experts(), self._adapters(lora))
        if self.shared is not None and self.shared_gate is not None:
            y = self.ops.add_gated(y, self.shared.partial(x, lora), self.shared_gate.forward(x, lora))
        elif self.shared is not None:
            y = self.ops.add_scaled(self.shared.partial(x, lora), y, 1.0)
        return self.ops.sum_ranks(y, self.ranks)

    def bare(self, bare_block: Callable[[Any], Any], replaced: Callable[[Any], Any]) -> SparseMLP:
        """A copy over the same weights, but for linears that are replaced; bare_block: does that to an MLP."""
        other = copy.copy(self)
        other.shared = None if self.shared is None else bare_block(self.shared)
        other.gate = replaced(self.gate)
        other.gate_up, other.down = [*map(replaced, self.gate_up)], [*map(replaced, self.down)]
        other.shared_gate = None if self.shared_gate is None else replaced(self.shared_gate)
        return other

    def _experts(self) -> Experts:
        gate_up, down = (tuple(map(_expert_linear, linears)) for linears in (self.gate_up, self.down))
        sizes = self.sizes
        return Experts(gate_up, down, sizes.top_k, sizes.normalizes, sizes.clamp, sizes.scales_inputs)

    def _adapters(self, lora: LoraPlan | None) -> ExpertLora | None:
        if lora is None or not lora.num_segments:
            return None
        first = self.gate_up[0]
        table = first.table if isinstance(first, BaseLayerWithLoRA) else None
        assert table is not None, "experts without LoRA got a plan with adapters"
        return ExpertLora(lora, table)


def _expert_linear(linear: Linear) -> ExpertLinear:
    base = linear.base_layer if isinstance(linear, BaseLayerWithLoRA) else linear
    assert isinstance(base, ParallelLinear)
    first_row = linear.first_row if isinstance(linear, BaseLayerWithLoRA) else -1
    return ExpertLinear(base.weight, base.bias, base.target.slices, first_row)
