"""What LoRAX's clients may send: POST /generate, /generate_stream and /. docs/http.md has the fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from pydantic.json_schema import JsonSchemaValue

from loraplex.errors import LoraplexError
from loraplex.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.request_model import BodyLimits, FreeJson, RequestModel, has, shown, unsupported
from loraplex.server.schemas import (
    COMPLETION_LIMITS,
    INT32_MAX,
    INT64_MAX,
    CompletionRequest,
    Label,
    MergedAdapters,
    Penalty,
    StopText,
    documented,
)
from loraplex.server.wires.completion_fields import OpenEndedCompletion, completion_of

BASE_MODEL = "__base_model__"
"""LoRAX's name for no adapter."""

NAME_ALONE = (None, "", "local")


class LoraxResponseFormat(RequestModel):
    """`type` with the schema beside it; without one, `json_object` is any object."""

    type: Annotated[str, Field(max_length=64), documented(enum=["text", "json_object", "json_schema"])]
    schema_: Annotated[FreeJson, Field(alias="schema")] = None

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        return name != "schema" and super()._is_neutral(name, value)

    def fields(self) -> dict[str, Any]:
        """Of a completion."""
        if self.type not in ("text", "json_object", "json_schema"):
            text = f"response_format.type={shown(self.type)} is not supported: send text, json_object or json_schema"
            raise unsupported("response_format", text)
        if self.type == "text":
            return {}
        if self.schema_ is not None:
            return {"guided_json": self.schema_}
        if self.type == "json_schema":
            raise ApiError("response_format of type json_schema needs schema", param="response_format")
        return {"response_format": {"type": "json_object"}}


def in_words_of_local(path: str | None, error: LoraplexError) -> LoraplexError:
    """path: `LoraxParameters.local_path`, which no request loads here: a verb gives it a name."""
    if path is None or not (isinstance(error, ApiError) and error.code == "model_not_found"):
        return error
    return ApiError(
        f"adapter_source local: adapter {clipped(path)!r} is no name of this server, and requests load no paths: load "
        "it once with PUT /v1/adapters/NAME and the path, inside --adapter-root, and send adapter_id NAME; or have the "
        "server start with --adapter-source NAME=DIR, and send NAME/FOLDER",
        param="adapter_id",
    )


class LoraxParameters(RequestModel):
    """`parameters`. Without any of do_sample, temperature, top_k and top_p, the likeliest token is taken."""

    adapter_id: Label | None = None
    adapter_source: Label | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Annotated[str, Field(max_length=4096)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    do_sample: bool = False
    temperature: Annotated[float, documented(minimum=0, maximum=100)] | None = None
    top_k: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[float, documented(minimum=0.001, maximum=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    stop: Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] = Field(default_factory=list)
    ignore_eos_token: bool = False
    return_full_text: bool = False
    details: bool = False
    decoder_input_details: bool = False
    return_k_alternatives: Annotated[int, Field(ge=1, le=MAX_LOGPROBS)] | None = None
    response_format: LoraxResponseFormat | None = None

    aliases: ClassVar[Mapping[str, str]] = {
        "lora_path": "adapter_id",
        "model": "adapter_id",
        "max_tokens": "max_new_tokens",
        "stop_sequences": "stop",
        "top_n_tokens": "return_k_alternatives",
        "ignore_eos": "ignore_eos_token",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "apply_chat_template": (False,),
        "best_of": (1,),
        "truncate": (),
        "typical_p": (),
        "watermark": (False,),
    }

    @model_validator(mode="after")
    def _check_adapter(self) -> LoraxParameters:
        if self.adapter_id and self.merged_adapters is not None:
            text = "one request names adapters twice: send adapter_id or merged_adapters"
            raise ApiError(text, param="merged_adapters")
        return self

    @property
    def source(self) -> str | None:
        """Which of the operator's sources has the adapter; None: its name says it."""
        is_base = self.adapter_id in (None, "", BASE_MODEL) and self.merged_adapters is None
        return None if is_base or self.adapter_source in NAME_ALONE else self.adapter_source

    @property
    def local_path(self) -> str | None:
        """For LoRAX `local` says that adapter_id is a path."""
        is_path = self.adapter_source == "local" and "/" in (self.adapter_id or "")
        return self.adapter_id if is_path else None

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample and self.temperature is None and self.top_k is None and self.top_p is None

    def fields(self) -> dict[str, Any]:
        """Of a completion."""
        is_base = self.adapter_id in (None, "", BASE_MODEL)
        return {
            "lora_path": None if is_base else self.adapter_id,
            "merged_adapters": None if self.merged_adapters is None else self.merged_adapters.model_dump(),
            "max_tokens": self.max_new_tokens,
            "temperature": 0.0 if self.is_greedy else self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "seed": self.seed,
            "stop": self.stop,
            "include_stop_str_in_output": True,
            "ignore_eos": self.ignore_eos_token,
            **({} if self.response_format is None else self.response_format.fields()),
        }


class LoraxGenerateRequest(RequestModel):
    """LoRAX's `POST /generate`, `/generate_stream` and `/`. `stream` is for `/`; the others are what they are."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: LoraxParameters = Field(default_factory=LoraxParameters)
    stream: bool = False

    limits: ClassVar[BodyLimits] = COMPLETION_LIMITS
    aliases: ClassVar[Mapping[str, str]] = {
        "prompt": "inputs",
        "text": "inputs",
        "adapter_id": "parameters",
        "max_new_tokens": "parameters",
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (has(inputs={"type": "string", "minLength": 1}),)
    names: ClassVar[Mapping[str, str]] = {
        "prompt": "inputs",
        "lora_path": "adapter_id",
        "model": "adapter_id",
        "max_tokens": "max_new_tokens",
        "ignore_eos": "ignore_eos_token",
        "guided_json": "response_format",
        "logprobs": "return_k_alternatives",
        "prompt_logprobs": "decoder_input_details",
    }
    """Of fields of a completion, what LoRAX calls them."""

    @model_validator(mode="after")
    def _check_generation(self) -> LoraxGenerateRequest:
        assert self.completion.prompt, "made here, where the body is checked: a schema may be long"
        return self

    @classmethod
    def refuse_hints(cls, fields: Mapping[str, Any]) -> None:
        """`api_token` is for a source that a request would load from."""
        parameters = fields.get("parameters")
        if isinstance(parameters, dict) and parameters.get("api_token") not in (None, ""):
            text = "api_token has no effect here, and this server refuses such fields (--strict-fields)"
            raise unsupported("api_token", text)

    def check_stream(self, is_stream: bool) -> None:
        """Raises ApiError for `stream` where the route says otherwise, and for what only a whole answer has."""
        if "stream" in self.model_fields_set and self.stream is not is_stream:
            other = "/generate_stream is" if self.stream else "/generate is not"
            raise ApiError(f"stream: this route has one kind of answer; leave it out: {other} a stream", param="stream")
        if is_stream and self.parameters.decoder_input_details:
            text = "decoder_input_details are not available in a stream: leave them out"
            raise ApiError(text, param="decoder_input_details")

    @cached_property
    def completion(self) -> CompletionRequest:
        """What it asks of /v1/completions."""
        wanted = self.parameters
        fields = {
            **wanted.fields(),
            "logprobs": wanted.return_k_alternatives or 0,
            "prompt_logprobs": 0 if wanted.decoder_input_details else None,
        }
        return completion_of(OpenEndedCompletion, fields, self.inputs, self.names)
