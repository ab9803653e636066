"""An adapter in host memory: `delta(module) = scaling * lora_b @ lora_a`, `[out, in]`.

lora_a [rank, in], lora_b [out, rank] as PEFT stores them; `scaling` is kept apart. lora_bias [out] is added, scaled:
`y += scaling * (x A^T B^T + lora_bias)`. bias [out] replaces the base's bias of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.checked_reader import AdapterContent, Blueprint, CheckedReader
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.tensor_names import PARTS
from loraplex.adapters.tensors import is_finite
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterValidationError


@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """One module's share of an adapter. `lora_a` and `lora_b` are None when only the bias is replaced (bias "all")."""

    module_name: str
    rank: int
    lora_alpha: float
    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    lora_bias: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scaling: float = 1.0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is there, by field name."""
        return {field: tensor for field in PARTS if (tensor := getattr(self, field)) is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> LoRALayerWeights:
        """The same layer with these tensors, by field name; those not given are None."""
        fields: dict[str, Any] = {field: tensors.get(field) for field in PARTS}
        return replace(self, **fields)


@dataclass(frozen=True, eq=False)
class LoRAModel:
    """All layers of one adapter. `adapter_digest` identifies the content; `adapter_id` is 0 until `clone` gives one.

    blueprint: models that have the same one differ in nothing but their numbers.
    """

    adapter_digest: str
    rank: int
    layers: Mapping[str, LoRALayerWeights]
    adapter_id: int = 0
    warnings: tuple[str, ...] = ()
    blueprint: Blueprint | None = None

    @property
    def id(self) -> int:
        """vLLM's name for `adapter_id`."""
        return self.adapter_id

    @cached_property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def __iter__(self) -> Iterator[LoRALayerWeights]:
        return iter(self.layers.values())

    def get_lora(self, module_name: str) -> LoRALayerWeights | None:
        return self.layers.get(module_name)

    def check_lora_name(self, module_name: str) -> bool:
        return module_name in self.layers

    def clone(self, adapter_id: int) -> LoRAModel:
        """The same tensors under another id."""
        return replace(self, adapter_id=adapter_id)

    @classmethod
    def from_local_checkpoint(
        cls,
        directory: str | Path,
        peft_helper: PEFTHelper,
        targets: Sequence[LoraTarget],
        lora_config: LoRAConfig,
        adapter_id: int = 0,
    ) -> LoRAModel:
        """Read and validate the adapter in `directory` against the base model that publishes `targets`.

        Raises what `CheckedReader.read` and `from_content` raise.
        """
        content = CheckedReader(targets, lora_config).read(Path(directory), peft_helper)
        return cls.from_content(content, lora_config, peft_helper.adapter, adapter_id)

    @classmethod
    def from_content(
        cls, content: AdapterContent, lora_config: LoRAConfig, adapter: str, adapter_id: int = 0
    ) -> LoRAModel:
        """Cut what was read into layers, in `lora_dtype`. Raises AdapterValidationError for values that do not fit."""
        layers, digest = _convert(_layers(content), lora_config, adapter), content.adapter_digest
        return cls(digest, content.rank, layers, adapter_id, content.warnings, content.blueprint)


def _layers(content: AdapterContent) -> dict[str, LoRALayerWeights]:
    tensors = content.blueprint.plan.tensors(content.block)
    layers = {}
    for plan in content.blueprint.layers:
        a, b, lora_bias, bias = (None if part is None else tensors[part] for part in plan.parts)
        layers[plan.module_name] = LoRALayerWeights(
            plan.module_name, plan.rank, plan.lora_alpha, a, b, lora_bias, bias, plan.scaling
        )
    return layers


def is_converted(lora_config: LoRAConfig) -> bool:
    """Whether tensors get another dtype when they are read."""
    return lora_config.lora_dtype not in ("auto", "int8")


def _convert(layers: dict[str, LoRALayerWeights], lora_config: LoRAConfig, adapter: str) -> dict[str, LoRALayerWeights]:
    """The layers in `lora_dtype`, unless it is `auto`, or `int8`, which they become when they are packed.

    A value that does not fit is a reason to refuse.
    """
    if not is_converted(lora_config):
        return layers
    dtype: torch.dtype = getattr(torch, lora_config.lora_dtype)
    converted = {
        name: layer.with_tensors({field: tensor.to(dtype) for field, tensor in layer.tensors.items()})
        for name, layer in layers.items()
    }
    reasons = [
        f"{name}: {field} does not fit in lora_dtype={lora_config.lora_dtype!r}; use auto, bfloat16 or float32"
        for name, layer in converted.items()
        for field, tensor in layer.tensors.items()
        if not is_finite(tensor)
    ]
    if reasons:
        raise AdapterValidationError.from_reasons(adapter, reasons)
    return converted
