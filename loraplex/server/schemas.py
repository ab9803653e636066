"""What clients may send to the OpenAI routes and to /tokenize: one model per route. docs/http.md lists every field.

Fields that both generation routes share are in `SamplingFields`, which turns itself into `core.SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from loraplex.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, SamplingParams
from loraplex.server.api_error import ApiError
from loraplex.server.request_model import FreeJson, FreeObject, RequestModel, shown, unsupported

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_ID_CHARS = 128
MAX_SALT_CHARS = 1024
MAX_TIMEOUT_S = 7 * 86400

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Label = Annotated[str, Field(max_length=512)]


def _shape(value: Any) -> str | None:
    """`<text>`, `<ids>`, `<texts>` or `<id_lists>`: told by the first item, so that an error names one place, not four."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    if value and isinstance(value[0], list):
        return "<id_lists>"
    return "<texts>" if value and isinstance(value[0], str) else "<ids>"


PromptField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TokenId], Field(min_length=1), Tag("<ids>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Tag("<id_lists>")],
    Discriminator(
        _shape,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids, or a list of such lists",
    ),
]

TextOrTexts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<texts>")],
    Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<texts>" if isinstance(value, list) else None,
        custom_error_type="text_type",
        custom_error_message="must be a string or a list of strings",
    ),
]


NameOrNames = Annotated[
    Annotated[Label, Tag("<name>")] | Annotated[list[Label | None], Tag("<names>")],
    Discriminator(
        lambda value: "<name>" if isinstance(value, str) else "<names>" if isinstance(value, list) else None,
        custom_error_type="name_type",
        custom_error_message="must be a string, or a list of strings and nulls",
    ),
]


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    @model_validator(mode="after")
    def _check_options(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ApiError("continuous_usage_stats needs include_usage=true", param="stream_options")
        return self


class SamplingFields(RequestModel):
    """Fields of both generation routes. Defaults are OpenAI's; the names after `logit_bias` are vLLM's."""

    model: Label | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: TextOrTexts = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    user: Label | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    request_id: Annotated[str, Field(pattern=rf"^[A-Za-z0-9._:\-]{{1,{MAX_ID_CHARS}}}$")] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (),
        "bad_words": ([],),
        "early_stopping": (False,),
        "ec_transfer_params": ({},),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": ({},),
        "length_penalty": (1,),
        "logprob_token_ids": (),
        "metadata": ({},),
        "priority": (0,),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "session_id": (),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "stream_interval": (1,),
        "structured_outputs": (),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
    }

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs are not available with stream=true: remove one", param="prompt_logprobs")
        return self

    @property
    def label(self) -> str | None:
        """Whom the client names as its user: it goes into the log and nowhere else."""
        return self.user

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Raises InvalidRequestError with all reasons when a value is out of its range."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
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
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(f"logit_bias: {key[:20]!r} is not a token id", param="logit_bias")
    return int(key)


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. `lora_path` (SGLang) names an adapter for all prompts, or one (or null: the base) for each."""

    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True
    lora_path: NameOrNames | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.neutral,
        "prompt_embeds": (),
        "suffix": ("",),
    }

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", f"best_of={self.best_of} with n={self.n} is not supported: remove it")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens must be at least 1, got 0 (0 is for echo=true)", param="max_tokens")
        return self

    @property
    def is_echo_only(self) -> bool:
        """`max_tokens=0`: the prompt and its logprobs are asked, and no new token."""
        return self.max_tokens == 0

    def to_sampling_params(self) -> SamplingParams:
        prompt_logprobs = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return self.sampling_params(max(self.max_tokens, 1), self.logprobs, prompt_logprobs)


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
        Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(min_length=1), Tag("<parts>")],
        Discriminator(
            lambda value: "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None,
            custom_error_type="content_type",
            custom_error_message="must be a string or a list of parts",
        ),
    ] = ""
    name: Label | None = None
    tool_calls: list[FreeObject] = Field(default_factory=list)
    tool_call_id: Label | None = None
    reasoning_content: str | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": (),
    }

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        """As in OpenAI's schema: only an assistant that calls tools may have no content."""
        is_silent = "content" not in self.model_fields_set
        if is_silent and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise ApiError(
                f"a message with role {self.role!r} has no content: send a string, which may be empty", param="messages"
            )
        return self


class ChatFields(RequestModel):
    """How messages become a prompt; shared by /v1/chat/completions and /tokenize."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[FreeObject] = Field(default_factory=list)
    documents: list[FreeObject] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: FreeObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_prompt_ending(self) -> ChatFields:
        explicit = "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and explicit:
            raise ApiError(
                "continue_final_message and add_generation_prompt exclude each other: set one to false",
                param="continue_final_message",
            )
        return self


class ChatCompletionRequest(SamplingFields, ChatFields):
    """`POST /v1/chat/completions`. Tools reach the template with `tool_choice="none"`; calls are not parsed from the output."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    tool_choice: FreeJson = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Label | None = None
    lora_path: Label | None = None

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
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "return_prompt_text": (False,),
        "thinking_token_budget": (-1,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs=true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError("max_tokens and max_completion_tokens differ: send one of them", param="max_tokens")
        if self.tools and self.tool_choice != "none":
            raise unsupported("tools", 'tool calls are not supported: remove tools, or send tool_choice="none"')
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", "tool_choice needs tool calls, which are not supported: remove it")
        return self

    @property
    def label(self) -> str | None:
        return self.user if self.safety_identifier is None else self.safety_identifier

    def to_sampling_params(self) -> SamplingParams:
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling_params(limit, self.top_logprobs if self.logprobs else None, self.prompt_logprobs)


class TokenizeTextRequest(RequestModel):
    """`POST /tokenize` with `prompt`."""

    prompt: str
    model: Label | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatFields):
    """`POST /tokenize` with `messages`: the prompt that the chat route would make of them."""

    model: Label | None = None
    return_token_strs: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": (), "mm_processor_kwargs": ({},)}


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    tokens: list[TokenId]
    model: Label | None = None
