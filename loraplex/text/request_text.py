"""What stands between text and token ids for the requests of the base model, or of one version of an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex.adapters.files import GENERATION_CONFIG
from loraplex.bounds.json_size import MAX_LONG_NUMBERS, Excess, excess_of
from loraplex.core import SamplingParams
from loraplex.errors import InvalidRequestError, ModelConfigError, shown
from loraplex.text.tokenizer import Tokenizer, read_json

MAX_JSON_VALUES = 2**17
FIELD_OF = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Of generation_config.json what is read, as vLLM reads it, and the sampling parameter that it is the default of."""


@dataclass(frozen=True, slots=True)
class RequestText:
    """vocab_size: where the vocabulary ends, of prompts and of `logit_bias`.

    defaults: sampling parameters of a request that does not say them. digest: "" unless an adapter brings something of
    its own. renders_apart: the chat template is an adapter's, and runs in a process of its own. max_model_len: of an
    adapter with a longer context; None: the engine's.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    renders_apart: bool = False
    max_model_len: int | None = None

    def default_params(self) -> SamplingParams:
        """Of a request that says nothing."""
        return SamplingParams(**self.defaults)


def generation_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by name. Raises InvalidRequestError for a value that no request may have."""
    defaults = {name: fields[given] for given, name in FIELD_OF.items() if fields.get(given) is not None}
    SamplingParams(**defaults)
    return defaults


def read_generation_defaults(directory: str | Path) -> dict[str, Any]:
    """Of a model's directory. Raises ModelConfigError."""
    try:
        return generation_defaults(read_json(Path(directory) / GENERATION_CONFIG))
    except InvalidRequestError as error:
        raise ModelConfigError(
            f"{GENERATION_CONFIG} in {directory}: {error}; correct it, or start with --generation-config vllm"
        ) from error


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Raises ValueError, with `where` and what is wrong. Values are counted first: parsing is one call."""
    excess = excess_of(data, MAX_JSON_VALUES)
    if excess is not None:
        limit = MAX_JSON_VALUES if excess is Excess.VALUES else MAX_LONG_NUMBERS
        raise ValueError(f"{where} has more than {limit} {excess.value}; none of a real adapter has")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON in UTF-8: {shown(str(error))}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold a JSON object, it holds a {type(content).__name__}")
    return content
