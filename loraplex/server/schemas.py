"""What clients may send to the OpenAI routes and to /tokenize: one model per route. docs/http.md lists every field.

Fields that both generation routes share are in `SamplingFields`, which turns itself into `core.SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError

from loraplex.core import MAX_MIX_ADAPTERS, MAX_MIX_WEIGHT, AdapterMix
from loraplex.sampling_params import (
    MAX_COMPLETIONS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from loraplex.server.api_error import ApiError, as_api_errors, clipped
from loraplex.server.request_model import (
    BodyLimits,
    FreeJson,
    FreeObject,
    RequestModel,
    SmallObject,
    any_of,
    has,
    lacks,
    one_or_list,
    shown,
    unsupported,
)
from loraplex.structured.params import FORM_FIELDS, MAX_CHOICES, StructuredOutputsParams, wanted_form
from loraplex.text.tools.wanted import TOOL_SCHEMA, WantedTools, functions_of

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
ID_PATTERN = r"^[A-Za-z0-9._:\-]{1,128}$"
MAX_SALT_CHARS = 1024
MAX_TIMEOUT_S = 7 * 86400
MAX_PROMPTS = 2**14
MAX_MESSAGES = 2**11
MAX_PARTS = 2**10
MAX_TOOLS = 2**10
MAX_DOCUMENTS = 2**12
TRUE = {"const": True}
RESPONSE_FORMAT = {
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
    "additionalProperties": False,
}
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Beside max_tokens: what generation_config.json of a model or an adapter may have another default of."""

NO_DEFAULTS: Mapping[str, Any] = {}
LONGEST_BODY = 2**40
"""As long as the server's `max_body_bytes`."""

COMPLETION_LIMITS = BodyLimits(LONGEST_BODY, 2**18, has_token_ids=True)
CHAT_LIMITS = BodyLimits(LONGEST_BODY, 2**16)
DETOKENIZE_LIMITS = BodyLimits(2**23, 2**16, has_token_ids=True)

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


def documented(**schema: Any) -> Any:
    """Of a field, in /openapi.json alone: `SamplingParams` checks it, with words of its own."""
    return Field(json_schema_extra=schema)


Share = Annotated[float, documented(minimum=0, maximum=1)]
Penalty = Annotated[float, documented(minimum=-2, maximum=2)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=512)]


def _shape(value: Any) -> str | None:
    """`<text>`, `<ids>`, `<texts>` or `<id_lists>`: told by the first item: an error names one place, not four."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    if value and isinstance(value[0], list):
        return "<id_lists>"
    return "<texts>" if value and isinstance(value[0], str) else "<ids>"


PromptField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Field(min_length=1), Tag("<ids>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), documented(minItems=1), Tag("<texts>")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        Tag("<id_lists>"),
    ],
    Discriminator(
        _shape,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]

StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS, json_schema_extra={"minLength": 1})]
StopField = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("<texts>")],
    one_or_list("<text>", "<texts>", "text_type", "must be a string or a list of strings"),
]


def _few_biases(value: Any) -> Any:
    """Counted first: pydantic would check them all, with a reason for each, before it counts them."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_long", "has more than {limit} entries", {"limit": MAX_LOGIT_BIAS})
    return value


NameOrNames = Annotated[
    Annotated[Label, Tag("<name>")]
    | Annotated[list[Label | None], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<names>")],
    one_or_list("<name>", "<names>", "name_type", "must be a string, or a list of strings and nulls"),
]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False

    place: ClassVar[str] = "stream_options."
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (any_of(has(include_usage=TRUE), lacks("continuous_usage_stats")),)

    @model_validator(mode="after")
    def _check_options(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ApiError("continuous_usage_stats needs include_usage=true", param="stream_options")
        return self


MixWeight = Annotated[float, Field(ge=-MAX_MIX_WEIGHT, le=MAX_MIX_WEIGHT)]


class MergedAdapters(RequestModel):
    """LoRAX's `merged_adapters`: a mix of adapters, for this request alone.

    `density` and `majority_sign_method` belong to other strategies; LoRAX's client sends values of no effect.
    """

    ids: Annotated[list[Label], Field(min_length=1, max_length=MAX_MIX_ADAPTERS)]
    weights: Annotated[list[MixWeight], Field(min_length=1, max_length=MAX_MIX_ADAPTERS)]
    merge_strategy: Annotated[str, Field(max_length=64), documented(enum=["linear", None])] = "linear"

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"density": (0, 1), "majority_sign_method": ("total",)}

    @model_validator(mode="after")
    def _check_mix(self) -> MergedAdapters:
        if self.merge_strategy != "linear":
            raise unsupported(
                "merged_adapters",
                f"merge_strategy={shown(self.merge_strategy)} is not for one request: send linear, or make an adapter "
                "of them with POST /v1/adapters/merge",
            )
        if len(self.ids) != len(self.weights):
            raise ApiError(
                f"merged_adapters has {len(self.ids)} ids and {len(self.weights)} weights", param="merged_adapters"
            )
        return self


class SamplingFields(RequestModel):
    """Fields of both generation routes. Defaults are OpenAI's; the names after `logit_bias` are vLLM's."""

    model: Label | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    temperature: Annotated[float, documented(minimum=0, maximum=100)] = 1.0
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] = 1.0
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: StopField = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[str, Annotated[float, documented(minimum=-100, maximum=100)]],
        BeforeValidator(_few_biases),
        Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    ] = Field(default_factory=dict)
    user: Label | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Share = 0.0
    repetition_penalty: Annotated[float, documented(minimum=0.001, maximum=10)] = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    request_id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    metadata: SmallObject | None = None
    store: bool | None = None
    prompt_cache_key: Label | None = None
    session_id: Label | None = None
    chat_id: Label | None = None
    merged_adapters: MergedAdapters | None = None
    response_format: Annotated[FreeObject, documented(**RESPONSE_FORMAT)] | None = None
    structured_outputs: FreeObject | None = None
    guided_json: Annotated[FreeJson, documented(type=["object", "string"])] | None = None
    guided_regex: str | None = None
    guided_choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)
        ]
        | None
    ) = None
    guided_grammar: str | None = None

    hints: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "store", "user", "prompt_cache_key", "session_id", "chat_id", "safety_identifier")
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "adapter_id": "lora_path",
        "adapter": "lora_path",
        "lora": "lora_path",
        "lora_name": "model",
        "lora_request": "lora_path",
        "max_length": "max_tokens",
        "max_new_tokens": "max_tokens",
        "num_return_sequences": "n",
        "random_seed": "seed",
        "stop_sequences": "stop",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": ([],),
        "early_stopping": (False,),
        "ec_transfer_params": ({},),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logprob_token_ids": (),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(
            has(model={"type": "string"}),
            has(lora_path={"type": ["string", "array"]}),
            has(merged_adapters={"type": "object"}),
        ),
        any_of(
            {**has(stream=TRUE), "not": has(prompt_logprobs={"type": "integer"})}, lacks("stream", "stream_options")
        ),
    )

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs are not available with stream=true: remove one", param="prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> SamplingFields:
        with as_api_errors():
            assert self.form is None or self.form.digest, "made here, where the body is checked: a schema may be long"
        return self

    @cached_property
    def form(self) -> StructuredOutputsParams | None:
        """What the output must be; None: any text."""
        return wanted_form({name: getattr(self, name) for name in FORM_FIELDS})

    @property
    def form_field(self) -> str:
        return next((name for name in FORM_FIELDS if getattr(self, name) is not None), "structured_outputs")

    @property
    def label(self) -> str | None:
        """The user that the client names: it goes into the log and nowhere else."""
        return self.user

    @property
    def mix(self) -> AdapterMix | None:
        """Of `merged_adapters`. Raises InvalidRequestError for an adapter that is there twice."""
        merged = self.merged_adapters
        return None if merged is None else AdapterMix(tuple(zip(merged.ids, merged.weights, strict=True)))

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """Raises InvalidRequestError with all reasons when a value is out of its range."""
        told = {name: getattr(self, name) for name in DEFAULTED}
        told |= {name: defaults[name] for name in defaults.keys() & told.keys() - self.model_fields_set}
        return SamplingParams(
            n=self.n,
            **told,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.form,
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(f"logit_bias: {clipped(key)!r} is not a token id", param="logit_bias")
    return int(key)


_BULK_OF_SAMPLING = frozenset({"logit_bias", "stop", "stop_token_ids", "metadata", "merged_adapters", *FORM_FIELDS})


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. `lora_path` (SGLang) names an adapter for all prompts, or one (null: the base) each."""

    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, documented(minimum=1)] | None = None
    add_special_tokens: bool = True
    lora_path: NameOrNames | None = None

    limits: ClassVar[BodyLimits] = COMPLETION_LIMITS
    bulk: ClassVar[frozenset[str]] = _BULK_OF_SAMPLING | {"prompt", "lora_path"}
    aliases: ClassVar[Mapping[str, str]] = {
        **SamplingFields.aliases,
        "inputs": "prompt",
        "messages": "prompt",
        "text": "prompt",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**SamplingFields.neutral, "prompt_embeds": (), "suffix": ("",)}
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        *SamplingFields.rules,
        any_of(has(echo=TRUE), {"not": has(max_tokens={"const": 0})}),
    )

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", f"best_of={shown(self.best_of)} with n={self.n} is not supported: remove it")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens must be at least 1, got 0 (0 is for echo=true)", param="max_tokens")
        return self

    @property
    def is_echo_only(self) -> bool:
        """`max_tokens=0`: the prompt and its logprobs are asked, and no new token."""
        return self.max_tokens == 0

    def limit(self, defaults: Mapping[str, Any]) -> int | None:
        """`max_tokens` that a prompt must leave room for: None for a default of generation_config.json."""
        return None if "max_tokens" in defaults and "max_tokens" not in self.model_fields_set else self.max_tokens

    def to_sampling_params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """defaults: of the adapter, or the base, for fields that are not sent."""
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        limit = self.limit(defaults)
        max_tokens = defaults["max_tokens"] if limit is None else max(limit, 1)
        return self.sampling_params(max_tokens, self.logprobs, prompt_logprobs, defaults)


FreeObjects = Annotated[list[FreeObject], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ContentPart(RequestModel):
    """A part of a message. Images, audio and files are refused: the models here read text."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type", "text") if isinstance(data, dict) else "text"
        if kind != "text":
            raise ApiError(
                f"content parts of type {shown(kind)} are not supported by this server: only those of type text are",
                code="unsupported_field",
                param="messages",
            )
        return data


class ChatMessage(RequestModel):
    """One message as the chat template gets it. `developer` is rendered as `system`, which templates know."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
        one_or_list("<text>", "<parts>", "content_type", "must be a string or a list of parts"),
    ] = ""
    name: Label | None = None
    tool_calls: FreeObjects = Field(default_factory=list)
    tool_call_id: Label | None = None
    reasoning_content: str | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(
            has(content={"type": ["string", "array"]}),
            has(role={"const": "assistant"}, tool_calls={"type": "array", "minItems": 1}),
            has(role={"const": "assistant"}, reasoning_content={"type": "string", "minLength": 1}),
        ),
    )

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        """As in OpenAI's schema: only an assistant that calls tools may have no content."""
        is_silent = "content" not in self.model_fields_set
        if is_silent and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ApiError(
                f"a message with role {clipped(self.role)!r} has no content: send a string, which may be empty",
                param="messages",
            )
        return self


class ChatFields(RequestModel):
    """How messages become a prompt; shared by /v1/chat/completions and /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[FreeObjects, documented(items=TOOL_SCHEMA)] = Field(default_factory=list)
    documents: Annotated[list[FreeObject], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] = Field(
        default_factory=list
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: FreeObject = Field(default_factory=dict)

    limits: ClassVar[BodyLimits] = CHAT_LIMITS
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        any_of(lacks("continue_final_message"), lacks("add_generation_prompt")),
    )

    @model_validator(mode="after")
    def _check_fields(self) -> ChatFields:
        with as_api_errors():
            functions_of(self.tools)
        explicit = "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and explicit:
            raise ApiError(
                "continue_final_message and add_generation_prompt exclude each other: set one to false",
                param="continue_final_message",
            )
        return self


class ChatCompletionRequest(SamplingFields, ChatFields):
    """`POST /v1/chat/completions`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tool_choice: Annotated[
        FreeJson, documented(anyOf=[{"enum": ["none", "auto", "required", None]}, {"type": "object"}])
    ] = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Label | None = None
    lora_path: Label | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True

    limits: ClassVar[BodyLimits] = CHAT_LIMITS
    bulk: ClassVar[frozenset[str]] = _BULK_OF_SAMPLING | {
        "messages",
        "tools",
        "documents",
        "chat_template_kwargs",
        "tool_choice",
    }
    aliases: ClassVar[Mapping[str, str]] = {**SamplingFields.aliases, "prompt": "messages", "inputs": "messages"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.neutral,
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "return_prompt_text": (False,),
        "thinking_token_budget": (-1,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        *SamplingFields.rules,
        any_of(has(logprobs=TRUE), lacks("top_logprobs")),
    )

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ: send one of them", param="max_tokens")
        with as_api_errors():
            tools = self.wanted_tools
        if tools is not None and self.form is not None:
            text = f'{self.form_field} and calls of tools exclude each other: send tool_choice="none", or leave one out'
            raise ApiError(text, param=self.form_field)
        return self

    @cached_property
    def wanted_tools(self) -> WantedTools | None:
        """Tools that the answer may call."""
        return WantedTools.of(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def label(self) -> str | None:
        return self.user if self.safety_identifier is None else self.safety_identifier

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def to_sampling_params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """defaults: of the adapter, or the base, for fields that are not sent."""
        max_tokens = defaults.get("max_tokens") if self.limit is None else self.limit
        logprobs = self.top_logprobs if self.logprobs else None
        return self.sampling_params(max_tokens, logprobs, self.prompt_logprobs, defaults)


class TokenizeTextRequest(RequestModel):
    """`POST /tokenize` with `prompt`."""

    prompt: str
    model: Label | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    limits: ClassVar[BodyLimits] = CHAT_LIMITS


class TokenizeChatRequest(ChatFields):
    """`POST /tokenize` with `messages`: the prompt that the chat route would make of them."""

    model: Label | None = None
    return_token_strs: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": (), "mm_processor_kwargs": ({},)}


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    tokens: TokenIds
    model: Label | None = None

    limits: ClassVar[BodyLimits] = DETOKENIZE_LIMITS
