"""What SGLang's clients may send: POST /generate, and the loading of adapters. docs/http.md has the fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue

from loraplex.errors import InvalidRequestError, shown
from loraplex.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_TOKEN_IDS
from loraplex.server.adapter_schemas import MAX_PATH_CHARS
from loraplex.server.api_error import ApiError
from loraplex.server.request_model import BodyLimits, RequestModel, SmallObject, has, one_or_list
from loraplex.server.schemas import (
    COMPLETION_LIMITS,
    ID_PATTERN,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_PROMPTS,
    MAX_SALT_CHARS,
    CompletionRequest,
    Label,
    NameOrNames,
    Penalty,
    Share,
    StopField,
    TokenIds,
    documented,
)
from loraplex.server.wires.completion_fields import OneForAll, OpenEndedCompletion, completion_of

MAX_EBNF_BYTES, MAX_EBNF_LINES = 8192, 256
"""The library that rewrites it takes time with the product of both."""

BIASES = {
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "include_stop_str_in_output": "no_stop_trim",
    "request_id": "rid",
    "return_token_ids": "return_prompt_token_ids",
}
"""Of fields of a completion, what SGLang calls them."""

TextField = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")],
    one_or_list("<text>", "<texts>", "text_type", "must be a string or a list of strings"),
]
SomeIds = Annotated[TokenIds, Field(min_length=1)]
IdsField = Annotated[
    Annotated[SomeIds, Tag("<ids>")]
    | Annotated[list[SomeIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("<id_lists>")],
    Discriminator(
        lambda value: (
            None if not isinstance(value, list) else "<id_lists>" if value and isinstance(value[0], list) else "<ids>"
        ),
        custom_error_type="ids_type",
        custom_error_message="must be a list of token ids, or a list of such lists",
    ),
]
Flag = Annotated[bool, OneForAll]
EmptyIsUnset = BeforeValidator(lambda value: None if value == "" else value)


class SGLangCompletion(OpenEndedCompletion):
    """128 tokens are SGLang's default, or what is left of the context."""

    usual_max_tokens: ClassVar[int | None] = 128


class SGLangSampling(RequestModel):
    """`sampling_params`. Defaults are SGLang's, unless a generation_config.json has others."""

    max_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    temperature: Annotated[float, documented(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, documented(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, documented(minimum=0.001, maximum=10)] | None = None
    stop: StopField = Field(default_factory=list)
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: Annotated[SmallObject, documented(**BIASES)] | None = None
    sampling_seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    json_schema: Annotated[str | None, EmptyIsUnset] = None
    regex: Annotated[str | None, EmptyIsUnset] = None
    ebnf: Annotated[str | None, EmptyIsUnset] = None

    aliases: ClassVar[Mapping[str, str]] = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "guided_json": "json_schema",
        "guided_regex": "regex",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "beam_width": (1,),
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
        "stop_regex": ("", []),
        "stream_interval": (1,),
        "structural_tag": ("",),
        "watermark": (),
    }

    def fields(self) -> dict[str, Any]:
        """Of a completion. `ebnf` is not among them: it has to be rewritten first."""
        return {
            "max_tokens": self.max_new_tokens,
            "min_tokens": self.min_new_tokens,
            "echo": self.max_new_tokens == 0,
            "include_stop_str_in_output": self.no_stop_trim,
            "seed": self.sampling_seed,
            "guided_json": self.json_schema,
            "guided_regex": self.regex,
            **{name: getattr(self, name) for name in _SAME},
        }


_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "logit_bias",
)


class SGLangGenerateRequest(RequestModel):
    """SGLang's `POST /generate`: a prompt, or a batch of them."""

    text: TextField | None = None
    input_ids: IdsField | None = None
    sampling_params: Annotated[SGLangSampling, OneForAll] = Field(default_factory=SGLangSampling)
    lora_path: NameOrNames | None = None
    stream: bool = False
    rid: NameOrNames | None = None
    return_logprob: Flag = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT32_MAX), OneForAll] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), OneForAll] = 0
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, OneForAll, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: SmallObject | None = None
    conversation_id: Label | None = None
    routing_key: Label | None = None
    session_id: Label | None = None
    external_trace_header: SmallObject | None = None

    limits: ClassVar[BodyLimits] = COMPLETION_LIMITS
    hints: ClassVar[frozenset[str]] = frozenset(
        ("no_logs", "custom_labels", "conversation_id", "routing_key", "session_id", "external_trace_header")
    )
    aliases: ClassVar[Mapping[str, str]] = {
        "prompt": "text",
        "messages": "text",
        "adapter_id": "lora_path",
        "model": "lora_path",
        "max_new_tokens": "sampling_params",
        "max_tokens": "sampling_params",
        "temperature": "sampling_params",
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio_data": (),
        "background": (False,),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "data_parallel_rank": (),
        "extra_key": (),
        "image_data": (),
        "input_embeds": (),
        "modalities": ([], ["text"]),
        "require_reasoning": (False,),
        "return_bytes": (False,),
        "return_entropy": (False,),
        "return_flat_raw_output_top_logprobs": (False,),
        "return_flat_raw_top_logprobs": (False,),
        "return_hidden_states": (False,),
        "return_indexer_topk": (False,),
        "return_routed_experts": (False,),
        "return_sampling_mask": (False,),
        "routed_dp_rank": (),
        "routed_experts_start_len": (0,),
        "session_params": (),
        "token_ids_logprob": ([],),
        "use_audio_in_video": (False,),
        "video_data": (),
        "watermark": (),
    }
    rules: ClassVar[tuple[JsonSchemaValue, ...]] = (
        {"properties": {"rid": {"pattern": ID_PATTERN}}},
        {"oneOf": [has(text={"type": ["string", "array"]}), has(input_ids={"type": "array"})]},
    )

    @model_validator(mode="after")
    def _check_generation(self) -> SGLangGenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("send text, or input_ids, and not both", param="text")
        if isinstance(self.rid, list) and (len(self.rid) != self.num_prompts or not all(self.rid) or not self.is_batch):
            raise ApiError(f"rid has {len(self.rid)} entries for {self.num_prompts} prompts", param="rid")
        if self.logprob_start_len >= 0 and self.return_logprob and self.stream:
            text = "logprob_start_len is for answers that are not streamed: send -1, or stream=false"
            raise ApiError(text, param="logprob_start_len")
        ebnf = self.sampling_params.ebnf
        if ebnf is not None and (len(ebnf.encode()) > MAX_EBNF_BYTES or ebnf.count("\n") >= MAX_EBNF_LINES):
            text = f"ebnf has more than {MAX_EBNF_BYTES} bytes or {MAX_EBNF_LINES} lines"
            raise ApiError(text, param="ebnf")
        assert self.completion is not None, "made here, where the body is checked: a schema may be long"
        return self

    @property
    def prompts(self) -> Any:
        return self.input_ids if self.text is None else self.text

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list, with one entry for each prompt and completion."""
        is_one = isinstance(self.prompts, str) or isinstance(self.prompts[0], int)
        return not is_one or self.sampling_params.n > 1

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompts, str) or isinstance(self.prompts[0], int) else len(self.prompts)

    @property
    def names(self) -> dict[str, str]:
        """Of fields of a completion, what this client calls them."""
        return {**NAMES, "prompt": "input_ids" if self.text is None else "text"}

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @cached_property
    def completion(self) -> CompletionRequest:
        """What it asks of /v1/completions."""
        return self.completion_with(None)

    def completion_with(self, grammar: str | None) -> CompletionRequest:
        """grammar: of `ebnf`, in Lark's notation. Raises ApiError."""
        top = self.top_logprobs_num if self.return_logprob else None
        paths = self.lora_path
        fields = {
            **self.sampling_params.fields(),
            "guided_grammar": grammar,
            "logprobs": top,
            "prompt_logprobs": top if self.wants_prompt_logprobs else None,
            "stream": self.stream,
            "return_token_ids": self.return_prompt_token_ids,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "request_id": self.rid if isinstance(self.rid, str) else None,
            "lora_path": [each or None for each in paths] if isinstance(paths, list) else paths or None,
        }
        return completion_of(SGLangCompletion, fields, self.prompts, self.names)


class SGLangLoadRequest(RequestModel):
    """SGLang's `POST /load_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    pinned: bool = False

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"added_tokens_config": (), "lora_id": (), "rid": ()}


class SGLangUnloadRequest(RequestModel):
    """SGLang's `POST /unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lora_id": (), "rid": ()}


def lark_of(ebnf: str) -> str:
    """A grammar in SGLang's EBNF (`root ::= ...`) in Lark's notation, from `start`, as llguidance's rewriting has it.

    Raises InvalidRequestError for a text that is no such grammar.
    """
    from llguidance.gbnf_to_lark import any_to_lark  # few servers need it

    if "::=" not in ebnf:
        raise InvalidRequestError("ebnf has no rule: write root ::= ...", param="ebnf")
    try:
        grammar: str = any_to_lark(ebnf)
    except RecursionError:
        raise InvalidRequestError("ebnf is nested too deeply", param="ebnf") from None
    except Exception as error:  # the library has no class of its own for all of them
        raise InvalidRequestError(f"ebnf is no grammar: {shown(str(error))}", param="ebnf") from None
    return grammar.removeprefix("%llguidance {}").lstrip()
