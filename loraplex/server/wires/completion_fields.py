"""What wires over the path of prompts share: fields as those of a completion, and errors in the client's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from loraplex.sampling_params import SamplingParams
from loraplex.server.api_error import in_words_of
from loraplex.server.body import check_model
from loraplex.server.schemas import NO_DEFAULTS, CompletionRequest


class OpenEndedCompletion(CompletionRequest):
    """A completion that ends with the context, or after `usual_max_tokens`, where no `max_tokens` was sent."""

    usual_max_tokens: ClassVar[int | None] = None

    def limit(self, defaults: Mapping[str, Any]) -> int | None:
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    def to_sampling_params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        return super().to_sampling_params({"max_tokens": self.usual_max_tokens, **defaults})


def completion_of(
    kind: type[CompletionRequest], fields: Mapping[str, Any], prompt: Any, names: Mapping[str, str]
) -> CompletionRequest:
    """The completion of fields that were sent (None: were not), whose prompt has been checked, and is not again.

    names: of its fields, what the client calls them. Raises ApiError in its words.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    with in_words_of(names):
        return check_model({**given, "prompt": ""}, kind).model_copy(update={"prompt": prompt})


def _one_for_all(value: Any) -> Any:
    """Values of a batch, one for each prompt, as the one that they all are."""
    if not isinstance(value, list):
        return value
    if not value or any(type(each) is not type(value[0]) or each != value[0] for each in value):
        text = "has other values for some of the prompts: send these in a request of their own"
        raise PydanticCustomError("differs", text)
    return value[0]


OneForAll = BeforeValidator(_one_for_all)
"""Of a field that a client may send once, or for each prompt."""
