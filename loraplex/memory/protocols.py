"""What the manager needs of objects that belong to other parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class HasAdapterId(Protocol):
    """A LoRARequest, an AdapterSpec, a LoRAModel: anything that names one adapter."""

    @property
    def adapter_id(self) -> int: ...


class AdapterMapping(Protocol):
    """What the manager needs of engine.batch.LoRAMapping: lora_slot per token and per prompt, -1 the base model."""

    @property
    def index_mapping(self) -> Any: ...

    @property
    def prompt_mapping(self) -> Any: ...

    def validate(
        self, num_tokens: int, num_prompts: int, num_slots: int, is_resident: Callable[[int], bool] | None = None
    ) -> None: ...
