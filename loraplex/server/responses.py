"""What the OpenAI routes answer, as msgspec structs: OpenAI's fields, then vLLM's extras where they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.core import RequestOutput
from loraplex.errors import InvalidRequestError

if TYPE_CHECKING:
    from loraplex.server.engine_surface import TokenizerSurface
    from loraplex.server.schemas import StreamOptions

Card = TypeVar("Card")
_ENCODER = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


MAX_WRITTEN_BYTES = 2**25

TEXT_PIECE_CHARS = 2**18
"""That are encoded in one call, which holds the interpreter's lock: about 2 ms where each is an escape."""


class AnswerRoom:
    """What texts and log probabilities of one answer may take, or of what a stream sends of a choice at a time. Tokens
    are counted elsewhere, but each may be long. times: that the answer says them again, each in one piece."""

    def __init__(self, times: int = 1) -> None:
        self._most = self._num_left = MAX_WRITTEN_BYTES // times

    @property
    def num_taken(self) -> int:
        return self._most - self._num_left

    def take(self, nbytes: int, param: str | None = None) -> None:
        """Raises InvalidRequestError when they are too many in all."""
        self.check(nbytes, param)
        self._num_left -= nbytes

    def check(self, nbytes: int, param: str | None = None) -> None:
        """Raises what `take` would raise."""
        if nbytes > self._num_left:
            what = "texts" if param is None else "log probabilities"
            raise InvalidRequestError(
                f"the {what} of this answer take more than {self._most} bytes: ask for fewer, or for fewer "
                "prompts or completions",
                param=param,
            )


def decoded(token_ids: Sequence[int], tokenizer: TokenizerSurface, room: AnswerRoom) -> str:
    """Special tokens included. A text that is too long for the room is refused before it is made."""
    counts = Counter(token_ids)
    room.check(sum(len(tokenizer.token_bytes(token_id)) * count for token_id, count in counts.items()))
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def written_text(text: str, room: AnswerRoom) -> str:
    """As its JSON, in the place of a text in an answer, encoded in pieces."""
    pieces = []
    for begin in range(0, len(text), TEXT_PIECE_CHARS):
        piece = encode(text[begin : begin + TEXT_PIECE_CHARS])[1:-1]
        room.take(len(piece))
        pieces.append(piece)
    return cast("str", msgspec.Raw(b'"%s"' % b"".join(pieces)))


def written(value: Card, room: AnswerRoom | None = None) -> Card:
    """As its JSON, in the place of `value` in an answer. To encode all positions of a long answer in one call would
    keep the event loop waiting for tens of milliseconds: the interpreter's lock is held that long.

    room: of an answer that is kept until it is whole; raises what that raises.
    """
    data = encode(value)
    if room is not None:
        room.take(len(data), "logprobs")
    return cast("Card", msgspec.Raw(data))


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class UsageCounter:
    """The tokens of one request, over all its prompts and completions.

    `add` may be called with each cumulative output: the last one of a prompt counts.
    """

    def __init__(self, is_echo_only: bool = False, *, shows_cached: bool = True) -> None:
        self._is_echo_only = is_echo_only
        self._shows_cached = shows_cached
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        num_output = 0 if self._is_echo_only else sum(len(each.token_ids) for each in output.outputs)
        self._prompts[prompt_index] = (len(output.prompt_token_ids), num_output, output.num_cached_tokens)

    def usage(self) -> Usage:
        counts = self._prompts.values()
        num_prompt, num_output, num_cached = (sum(each[i] for each in counts) for i in range(3))
        details = PromptTokensDetails(num_cached) if self._shows_cached else None
        return Usage(num_prompt, num_output, num_prompt + num_output, details)

    def in_chunk(self, options: StreamOptions) -> Usage | UnsetType | None:
        """Of a chunk before the last one."""
        if options.continuous_usage_stats and options.include_usage:
            return self.usage()
        return None if options.include_usage else UNSET


class PromptLogprob(msgspec.Struct, frozen=True, gc=False):
    """vLLM's form of one candidate of one prompt position, keyed by its token id."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry a token. `text_offset` is the length of all `tokens` before it, as strings."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """A whole answer of /v1/completions, or one chunk of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionReply(msgspec.Struct, frozen=True):
    """Of a call; in a stream the name comes once."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallReply(msgspec.Struct, frozen=True):
    id: str
    function: FunctionReply
    type: str = "function"


class ToolCallDelta(msgspec.Struct, frozen=True):
    """`id` and `type` come with the first piece of a call."""

    index: int
    function: FunctionReply
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessageReply(msgspec.Struct, frozen=True):
    """`content` is null where there are calls alone. reasoning_content: with --reasoning-parser."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """The base model (`parent` null) or an adapter (`parent`: the base's name)."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int
    object: str = "model"
    owned_by: str = "loraplex"


class ListReply(msgspec.Struct, Generic[Card], frozen=True):
    """`first_id`, `last_id` and `has_more` when a page or a part was asked for; `after=last_id` is the next page."""

    data: list[Card]
    object: str = "list"
    first_id: str | UnsetType | None = UNSET
    last_id: str | UnsetType | None = UNSET
    has_more: bool | UnsetType = UNSET


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str
