"""Checkpoints that have one tensor for all experts of a layer, as transformers has them in memory, by the usual names.

<layer>.mlp.experts.gate_up_proj [experts, 2 inner, hidden]   a gate and an up of each expert, the gate's rows first
<layer>.mlp.experts.down_proj    [experts, hidden, inner]
<layer>.mlp.gate.weight                                       the router, in whichever block files have it

Llama 4 has them as [experts, in, out], in the block `feed_forward`. So has gpt-oss in `mlp`, outputs of gate and up in
turns, with more beside them. In MXFP4 (mxfp4.py):

<layer>.mlp.experts.gate_up_proj_blocks [experts, 2 inner, hidden / 32, 16], ..._scales [experts, 2 inner, hidden / 32]
<layer>.mlp.experts.gate_up_proj_bias   [experts, 2 inner]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraplex.layers.moe import ExpertNames

MAX_EXPERTS = 4096
"""Of a layer. Models have some hundreds."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Of a stack's tensors: how the name of one expert's ends; dimensions of a stack, which of them is outputs."""

    ending: str
    num_dims: int
    outputs: int = 1


_PLAIN = {"": _Kind("weight", 3)}
_TRANSPOSED = {
    "": _Kind("weight", 3, outputs=2),
    "_bias": _Kind("bias", 2),
    "_blocks": _Kind("blocks", 4),
    "_scales": _Kind("scales", 3),
}
"""By what the name of a stack ends with."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A file of one tensor: some outputs of one expert's part of a stack. It is read when it is asked for."""

    file: Any
    stack: str
    expert: int
    outputs: slice
    is_transposed: bool

    def get_tensor(self, _name: str) -> Tensor:
        stack = self.file.get_slice(self.stack)
        if self.is_transposed:
            inputs: Tensor = stack[self.expert, :, self.outputs]
            return inputs.t()
        tensor: Tensor = stack[self.expert, self.outputs]
        return tensor


@dataclass(frozen=True, slots=True)
class _Renamed:
    """A file of one tensor, which has another name in the file."""

    file: Any
    stored: str

    def get_tensor(self, _name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.stored)
        return tensor


def split(where: Mapping[str, Any], names: ExpertNames) -> dict[str, Any]:
    """`where` (the opened file of each tensor) with a tensor for each expert in place of stacks."""
    block, kinds = re.escape(names.parameters), _TRANSPOSED if names.is_transposed else _PLAIN
    stack = re.compile(
        rf"(?P<layer>.*\.layers\.\d+)\.{block}\.experts\.(?P<part>gate_up_proj|down_proj)(?P<kind>{'|'.join(kinds)})"
    )
    router = re.compile(rf"(?P<layer>.*\.layers\.\d+)\.{block}\.{re.escape(names.router)}\.weight")
    found: dict[str, Any] = {}
    for name, file in where.items():
        if match := router.fullmatch(name):
            found[f"{match['layer']}.{names.block}.{names.router}.weight"] = _Renamed(file, name)
        elif match := stack.fullmatch(name):
            experts, kind = f"{match['layer']}.{names.block}.experts", kinds[match["kind"]]
            found |= dict(_parts(experts, match["part"], name, file, kind, names)) or {name: file}
        else:
            found[name] = file
    return found


def _parts(
    experts: str, part: str, stack: str, file: Any, kind: _Kind, names: ExpertNames
) -> Iterator[tuple[str, _Part]]:
    """Nothing for what is no stack; the loader says then what is wrong."""
    shape = tuple(file.get_slice(stack).get_shape())
    gate, up, down = names.modules
    leaves = (gate, up) if part == "gate_up_proj" else (down,)
    if len(shape) != kind.num_dims or 0 in shape or shape[0] > MAX_EXPERTS or shape[kind.outputs] % len(leaves):
        return
    outputs, count = shape[kind.outputs], len(leaves)
    for expert in range(shape[0]):
        for turn, leaf in enumerate(leaves):
            own = slice(turn * outputs // count, (turn + 1) * outputs // count)
            if names.takes_turns:
                own = slice(turn, outputs, count)
            place = _Part(file, stack, expert, own, kind.outputs == 2)
            yield f"{experts}.{expert}.{leaf}.{kind.ending}", place
