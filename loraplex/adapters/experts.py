"""Adapters of mixtures of experts: how one pair of tensors in a file is an A and a B of each expert.

peft has two forms. In files of older versions each expert is a module (`mlp.experts.3.gate_proj`), as any linear is.
Since transformers keeps one linear of all experts in one tensor [experts, out, in], peft's `target_parameters` names
that, and a file has of a layer, with E experts and rank r:

    <block>.experts.lora_A.weight [E r, in],  lora_B.weight [out, r E]            of one of the two parameters
    <block>.experts.base_layer.lora_A.weight, ...base_layer.lora_B.weight         with both: of gate_up_proj, and those
                                                                                  without base_layer of down_proj

    A_e = A[e r : (e + 1) r]        B_e[o, i] = B[o, i E + e]        delta_e = scaling * B_e A_e

Rows of gate_up_proj are those of the gate, then of up, or both take turns (gpt-oss): both have A_e, and each its rows
of B_e. Where transformers has a parameter as [experts, in, out] and says so to peft, its A and B are the same. Where it
does not say so (Llama 4), peft takes `in` for the outputs, and a delta is that of the transpose:

    lora_A.weight [E r, out],  lora_B.weight [in, r E]          A_e = B[:, e :: E]^T        B_e = A[e r : (e + 1) r]^T

A router's weight is a plain matrix, and so are its A and B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from loraplex.adapters.kinds import TensorName
from loraplex.core import LoraTarget

WRAPPED = ".base_layer"
"""What peft puts before the parts of a parameter, for each other parameter of the module that was wrapped after it."""

STACK_PARTS = ("lora_A.weight", "lora_B.weight")
"""All that a file has of a stack."""


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """What of a stack's A and B is one module's: expert `index` of `count`, rows first, first + step, ... of the
    parameter's outputs, before `last`. is_swapped: the stack's factors are those of the transpose."""

    index: int
    count: int
    first: int
    last: int
    step: int = 1
    is_swapped: bool = False

    def of(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """lora_a [rank, in] and lora_b [rows, rank] as views of lora_a [count rank, in] and lora_b."""
        a, b = parts["lora_a"], parts["lora_b"]
        rank = len(a) // self.count
        own_a, own_b = a[self.index * rank : (self.index + 1) * rank], b[:, self.index :: self.count]
        if self.is_swapped:
            own_a, own_b = own_b.t(), own_a.t()
        return {"lora_a": own_a, "lora_b": own_b[self.first : self.last : self.step]}


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A parameter of transformers with one linear of all experts of a layer, and the modules of the base that it is."""

    parameter: str
    in_features: int
    out_features: int
    count: int
    modules: tuple[tuple[str, ExpertCut], ...]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Of its tensors in a file."""
        widths = self.in_features, self.out_features
        of_a, of_b = reversed(widths) if self.modules[0][1].is_swapped else widths
        shapes = (self.count * rank, of_a), (of_b, rank * self.count)
        return dict(zip(STACK_PARTS, shapes, strict=True))


@dataclass(frozen=True)
class ExpertBase:
    """What the base model has of experts. stacks: by parameter, gate_up_proj of a block before its down_proj.

    parameters: module -> what target_parameters calls its weight, where that is not `<module>.weight`; renamed: the
    other way round, without `.weight`.
    """

    stacks: Mapping[str, ExpertStack]
    parameters: Mapping[str, str]
    renamed: Mapping[str, str]

    @classmethod
    def of(cls, targets: Iterable[LoraTarget]) -> ExpertBase:
        found: dict[str, list[tuple[str, ExpertCut]]] = {}
        sizes: dict[str, tuple[int, int, int]] = {}
        parameters: dict[str, str] = {}
        for target in targets:
            if target.expert is None:
                if target.parameter:
                    parameters[target.slices[0].module_name] = target.parameter
                continue
            (index, count), first = target.expert, 0
            outputs = sum(s.full_out_features for s in target.slices)
            for turn, s in enumerate(target.slices):
                rows = first, first + s.full_out_features
                if target.takes_turns:
                    rows = turn, outputs
                step = len(target.slices) if target.takes_turns else 1
                cut = ExpertCut(index, count, *rows, step, target.swaps_factors)
                found.setdefault(target.parameter, []).append((s.module_name, cut))
                first += s.full_out_features
            sizes[target.parameter] = target.full_in_features, outputs, count
        stacks = {name: ExpertStack(name, *sizes[name], tuple(modules)) for name, modules in found.items()}
        return cls(stacks, parameters, {name.removesuffix(".weight"): module for module, name in parameters.items()})

    @property
    def blocks(self) -> frozenset[str]:
        """The modules under whose names files have tensors of stacks, and where both are wrapped."""
        found = {name.rpartition(".")[0] for name in self.stacks}
        return frozenset(found | {block + WRAPPED for block in found})

    def parameter_of(self, module: str) -> str:
        return self.parameters.get(module, f"{module}.weight")

    def places(self, targeted: frozenset[str]) -> dict[str, str]:
        """Module in a file's names of tensors -> parameter, of the stacks that are targeted."""
        blocks: dict[str, list[str]] = {}
        for name in self.stacks:
            if name in targeted:
                blocks.setdefault(name.rpartition(".")[0], []).append(name)
        return {
            block + WRAPPED * (len(names) - 1 - index): name
            for block, names in blocks.items()
            for index, name in enumerate(names)
        }

    def named(self, names: Iterable[TensorName], targeted: frozenset[str]) -> Iterator[tuple[TensorName, TensorName]]:
        """(name in the file, what it is called here) of those that are called otherwise here."""
        places = self.places(targeted)
        for name in names:
            module = places.get(name.module) or self.renamed.get(name.module)
            if module is not None:
                yield name, TensorName(module, name.part)


NO_EXPERTS = ExpertBase({}, {}, {})
