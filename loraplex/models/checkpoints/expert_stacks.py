"""Checkpoints that have one tensor for all experts of a layer, as transformers has them in memory, by the usual names.

<layer>.mlp.experts.gate_up_proj [experts, 2 inner, hidden]   a gate and an up of each expert, the gate's rows first
<layer>.mlp.experts.down_proj    [experts, hidden, inner]
<layer>.mlp.gate.weight                                       the router, in whichever block files have it
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
class _Part:
    """A file of one tensor: rows [first, last) of one expert's of a stack. It is read when it is asked for."""

    file: Any
    stack: str
    expert: int
    first: int
    last: int

    def get_tensor(self, _name: str) -> Tensor:
        tensor: Tensor = self.file.get_slice(self.stack)[self.expert, self.first : self.last]
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
    block = re.escape(names.parameters)
    stack = re.compile(rf"(?P<layer>.*\.layers\.\d+)\.{block}\.experts\.(?P<part>gate_up_proj|down_proj)")
    router = re.compile(rf"(?P<layer>.*\.layers\.\d+)\.{block}\.gate\.weight")
    found: dict[str, Any] = {}
    for name, file in where.items():
        if match := router.fullmatch(name):
            found[f"{match['layer']}.{names.block}.gate.weight"] = _Renamed(file, name)
        elif match := stack.fullmatch(name):
            shape = tuple(file.get_slice(name).get_shape())
            found |= _parts(f"{match['layer']}.{names.block}", match["part"], name, file, shape, names) or {name: file}
        else:
            found[name] = file
    return found


def _parts(block: str, part: str, name: str, file: Any, shape: tuple[int, ...], names: ExpertNames) -> dict[str, _Part]:
    """Empty for what is no stack; the loader says then what is wrong."""
    gate, up, down = names.modules
    leaves = (gate, up) if part == "gate_up_proj" else (down,)
    if len(shape) != 3 or 0 in shape or shape[0] > MAX_EXPERTS or shape[1] % len(leaves):
        return {}
    size = shape[1] // len(leaves)
    return dict(_each(block, leaves, name, file, shape[0], size))


def _each(
    block: str, leaves: tuple[str, ...], name: str, file: Any, count: int, size: int
) -> Iterator[tuple[str, _Part]]:
    for expert in range(count):
        for index, leaf in enumerate(leaves):
            place = _Part(file, name, expert, index * size, (index + 1) * size)
            yield f"{block}.experts.{expert}.{leaf}.weight", place
