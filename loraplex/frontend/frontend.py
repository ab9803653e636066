"""What stands in front of an engine, in the offline `LLM` and the server alike: tokenizer, checks, adapter names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.registry import Journal, LoRARef, LoRARegistry, OnChange
from loraplex.adapters.registry.registry import ABORT_GRACE_S
from loraplex.adapters.source import AdapterSource
from loraplex.config import EngineConfig
from loraplex.core import AdapterStore, EngineInfo, LoRARequest
from loraplex.errors import InvalidRequestError, LoraDisabledError
from loraplex.text.processor import AdapterRef, InputProcessor, ModelLimits, OutputProcessor
from loraplex.text.tokenizer import Tokenizer, read_eos_token_ids

logger = logging.getLogger(__name__)

RunLater = Callable[[Callable[[], None]], object]


@dataclass(frozen=True)
class Front:
    """`tokenizer` is None for a model without tokenizer.json, `registry` when LoRA is off. merged: what is merged into
    the base weights."""

    served_model_name: str
    tokenizer: Tokenizer | None
    inputs: InputProcessor
    outputs: OutputProcessor
    registry: LoRARegistry | None
    merged: str | None = None

    def registry_or_refuse(self) -> LoRARegistry:
        if self.merged is not None:
            text = f"merge_adapter {self.merged!r} is merged into the base weights, and no other adapter is served"
            raise LoraDisabledError(f"{text}: send requests without an adapter, or start without merge_adapter")
        if self.registry is None:
            raise LoraDisabledError("LoRA is off here: start with enable_lora (the default) to use adapters")
        return self.registry

    def check_lora_request(self, request: LoRARequest) -> None:
        """Raises LoraDisabledError without LoRA, InvalidRequestError when the adapter was made for another base."""
        self.registry_or_refuse()
        name = request.base_model_name
        if name is not None and name != self.served_model_name:
            raise InvalidRequestError(
                f"LoRARequest {request.lora_name!r}: base_model_name is {name!r}, this engine serves "
                f"{self.served_model_name!r}"
            )


def adapter_ref(ref: LoRARef | None) -> AdapterRef | None:
    return None if ref is None else AdapterRef(ref.adapter_id, ref.adapter_digest)


def make_front(
    config: EngineConfig,
    info: EngineInfo,
    store: AdapterStore | None,
    run_later: RunLater,
    *,
    served_model_name: str,
    base_names: Iterable[str] = (),
    journal: Journal | None = None,
    on_change: OnChange = lambda kind, name, text, details: None,
    abort_grace_s: float = ABORT_GRACE_S,
) -> Front:
    """Put a front before a started engine; `store` is None when LoRA is off. Roots in the config have no links.

    journal, on_change, abort_grace_s: as in `LoRARegistry`.
    """
    # These bring in torch: a second, spent while an engine process starts.
    from loraplex.adapters.opener import AdapterOpener
    from loraplex.adapters.weights import CheckedReader

    tokenizer, eos_token_ids = open_tokenizer(config.tokenizer or info.model_path)
    registry = None
    if config.lora is not None and store is not None:
        opener = AdapterOpener(AdapterSource(config.root_paths), CheckedReader(info.targets, config.lora))
        names = {served_model_name, *base_names}
        registry = LoRARegistry(
            store,
            opener.open,
            config.lora.max_loaded_loras,
            names,
            run_later=run_later,
            max_versions_kept=config.lora.max_versions_kept,
            max_lora_rank=config.lora.max_lora_rank,
            journal=journal,
            on_change=on_change,
            abort_grace_s=abort_grace_s,
        )
    return Front(
        served_model_name,
        tokenizer,
        InputProcessor(tokenizer, ModelLimits(info.vocab_size, info.max_model_len), eos_token_ids),
        OutputProcessor(tokenizer),
        registry,
        config.merge_adapter,
    )


def open_tokenizer(path: str | Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of a model directory and its end tokens. Without tokenizer.json, prompts must be token ids."""
    if not (Path(path) / "tokenizer.json").exists():
        logger.warning("%s has no tokenizer.json: prompts must be token ids and outputs are token ids", path)
        return None, read_eos_token_ids(path)
    tokenizer = Tokenizer.from_dir(path)
    return tokenizer, tuple(tokenizer.eos_token_ids)
