"""Prompts of a request: texts and messages become token ids, checked against the model's length and vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from pydantic_core import PydanticCustomError

from loraplex.errors import PromptTooLongError
from loraplex.server.api_error import ApiError
from loraplex.server.body import check_num_values
from loraplex.server.engine_surface import ModelInfoSurface, TextSurface, tokenizer_of
from loraplex.server.generation import Prompt
from loraplex.server.off_loop import OffLoop
from loraplex.server.request_model import bounded_json
from loraplex.server.schemas import ChatFields, ChatMessage

T = TypeVar("T")

LONG_TEXT_CHARS = 8192
"""A longer text is rendered and tokenized in a thread, so that streams of others do not stop meanwhile."""

CHARS_A_PROMPT = 32
"""What a prompt costs beside its own characters."""

MAX_CHARS_PER_TOKEN = 256
"""More characters than this per token of the model's length cannot fit: refused before the work of tokenizing."""

MAX_CHARS_OF_PROMPTS = 2**22
"""Of all prompts of a request together, if one of them may not have more."""

USUAL_CHARS_PER_TOKEN = 4
PIECE_CHARS = 2**16
"""Texts are tokenized so much at a time, and the client's next turn comes after those of others."""

MAX_COUNTED_IDS = 2**18
"""How long a text /tokenize counts, if that is more than the model's length."""


class PromptEncoder:
    """A long text takes a turn of the client of `request`, and `text` is what the prompt's adapter reads it with.

    Methods raise ClientDisconnect when the client goes away before all is done.

    renders: for chat templates of adapters, which wait for a process; one that costs all it may holds up no other work.
    """

    def __init__(self, model_info: ModelInfoSurface, off_loop: OffLoop, renders: OffLoop) -> None:
        self._model_info = model_info
        self._off_loop = off_loop
        self._renders = renders

    async def from_field(
        self,
        field: str | Sequence[Any],
        texts: Sequence[TextSurface],
        add_special_tokens: bool,
        max_tokens: int | None,
        request: Request,
    ) -> list[Prompt]:
        """The prompts of /v1/completions: a text, token ids, or a list of either, checked as `check` does.

        texts: one for each of them.

        Raises ApiError for an empty list too. Each prompt is checked before the next becomes token ids.
        """
        if isinstance(field, str) or (field and isinstance(field[0], int)):
            field = [field]
        if not field:
            raise ApiError("prompt is an empty list: send at least one prompt", param="prompt")
        self._check_all_chars(sum(len(item) for item in field if isinstance(item, str)))
        prompts: list[Prompt] = []
        for items in _batches(field):
            some = texts[len(prompts) : len(prompts) + len(items)]
            if isinstance(items[0], str) and len(items[0]) > PIECE_CHARS:
                long = await self._encoded(
                    items[0], some[0], add_special_tokens, "prompt", self.max_model_len(some[0]), request
                )
                self.check(long, some[0], max_tokens)
                prompts.append(long)
            else:
                encode = functools.partial(self._prompts, items, some, add_special_tokens, max_tokens)
                prompts += await self._run(encode, sum(map(_size, items)), request)
        return prompts

    def _prompts(
        self, items: Sequence[Any], texts: Sequence[TextSurface], add_special_tokens: bool, max_tokens: int | None
    ) -> list[Prompt]:
        prompts = []
        for item, text in zip(items, texts, strict=True):
            if isinstance(item, str):
                self._check_chars(len(item), text, "prompt")
                prompts.append(_prompt(item, text, add_special_tokens))
            else:
                prompts.append(Prompt(tuple(item)))
            self.check(prompts[-1], text, max_tokens)
        return prompts

    async def from_text(self, words: str, text: TextSurface, add_special_tokens: bool, request: Request) -> Prompt:
        """One text of any length that may be counted."""
        return await self._encoded(words, text, add_special_tokens, "prompt", self.max_counted_ids(text), request)

    async def from_chat(
        self, chat: ChatFields, text: TextSurface, request: Request, max_ids: int | None = None
    ) -> Prompt:
        """Messages through the chat template. Raises InvalidRequestError if there is none or it refuses."""
        num_chars = sum(map(_num_chars, chat.messages))
        self._check_chars(num_chars, text, "messages")
        has_more = chat.tools or chat.documents or chat.chat_template_kwargs
        is_long = has_more or len(chat.messages) > 64 or any(message.tool_calls for message in chat.messages)
        render = functools.partial(_rendered, chat, text)
        if text.renders_apart:
            words = await self._renders.run_for(request, render, num_chars, is_next=True)
        else:
            num_chars = max(num_chars, LONG_TEXT_CHARS + 1) if is_long else num_chars
            words = await self._run(render, num_chars, request, is_next=True)
        max_ids = max_ids or self.max_model_len(text)
        return await self._encoded(words, text, chat.add_special_tokens, "messages", max_ids, request)

    def max_model_len(self, text: TextSurface) -> int:
        """Of prompt and output together."""
        return text.max_model_len or self._model_info.max_model_len

    def max_counted_ids(self, text: TextSurface) -> int:
        return max(MAX_COUNTED_IDS, self.max_model_len(text))

    async def _encoded(
        self, words: str, text: TextSurface, add_special_tokens: bool, field: str, max_ids: int, request: Request
    ) -> Prompt:
        """`field` is what the client sent it in: errors name it."""
        self._check_chars(len(words), text, field)
        if len(words) > max(PIECE_CHARS, USUAL_CHARS_PER_TOKEN * max_ids):
            await self._count_in_pieces(words, text, field, max_ids, request)
        return await self._run(functools.partial(_prompt, words, text, add_special_tokens), len(words), request)

    def _check_chars(self, num_chars: int, text: TextSurface, field: str) -> None:
        longest = MAX_CHARS_PER_TOKEN * self.max_model_len(text)
        if num_chars > longest:
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, more than {longest}: shorten it", param=field
            )

    def _check_all_chars(self, num_chars: int) -> None:
        most = max(MAX_CHARS_OF_PROMPTS, MAX_CHARS_PER_TOKEN * self._model_info.longest_len)
        if num_chars > most:
            raise ApiError(
                f"the prompts have {num_chars} characters, more than {most} together: send several requests",
                code="too_many_characters",
                param="prompt",
            )

    async def _count_in_pieces(self, words: str, text: TextSurface, field: str, max_ids: int, request: Request) -> None:
        """Refuse a text that is far too long as soon as that is certain: a token takes a hundred bytes of memory.

        A cut makes a few tokens more, so twice the limit is certain.
        """
        num_ids, tokenizer = 0, tokenizer_of(text)
        for start in range(0, len(words), PIECE_CHARS):
            encode = functools.partial(tokenizer.encode, words[start : start + PIECE_CHARS], False)
            num_ids += len(await self._run(encode, PIECE_CHARS, request))
            if num_ids > 2 * max_ids:
                raise PromptTooLongError(
                    f"the prompt has more than {num_ids // 2} tokens, and at most {max_ids} are possible: shorten it",
                    param=field,
                )

    async def _run(self, work: Callable[[], T], num_chars: int, request: Request, is_next: bool = False) -> T:
        if num_chars <= LONG_TEXT_CHARS:
            return work()
        return await self._off_loop.run_for(request, work, num_chars, is_next=is_next)

    def check(
        self,
        prompt: Prompt,
        text: TextSurface,
        max_tokens: int | None,
        field: str = "prompt",
        limit_field: str = "max_tokens",
    ) -> None:
        """Raises PromptTooLongError and ApiError with the value, the limit and the field: prompt or `max_tokens`."""
        num_prompt, limit = len(prompt.token_ids), self.max_model_len(text)
        if not num_prompt:
            raise ApiError("the prompt is empty: it must have at least one token", param=field)
        if num_prompt + (max_tokens or 1) > limit:
            raise PromptTooLongError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + (max_tokens or 1)} tokens ({num_prompt} in the prompt, {max_tokens or 1} in the "
                "completion). Please reduce the length of the prompt or of the completion.",
                param=field if num_prompt >= limit else limit_field,
            )
        largest = max(prompt.token_ids)
        if largest >= text.vocab_size:
            raise ApiError(f"token id {largest} is not in the vocabulary, 0..{text.vocab_size - 1}", param=field)


def _prompt(words: str, text: TextSurface, add_special_tokens: bool) -> Prompt:
    return Prompt(tuple(tokenizer_of(text).encode(words, add_special_tokens)), words)


def _rendered(chat: ChatFields, text: TextSurface) -> str:
    _check_arguments(chat)
    return tokenizer_of(text).apply_chat_template(
        [_template_message(message) for message in chat.messages],
        chat.tools or None,
        chat.add_generation_prompt and not chat.continue_final_message,
        chat.chat_template_kwargs,
        documents=chat.documents or None,
        continue_final_message=chat.continue_final_message,
    )


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Prompts in order, of at most PIECE_CHARS characters or ids together; a longer one is alone."""
    begin = size = 0
    for index, item in enumerate(items):
        if index > begin and size + _size(item) > PIECE_CHARS:
            yield items[begin:index]
            begin, size = index, 0
        size += _size(item)
    yield items[begin:]


def _size(prompt: str | Sequence[int]) -> int:
    return len(prompt) + CHARS_A_PROMPT


def _num_chars(message: ChatMessage) -> int:
    content = message.content
    num_chars = len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
    return num_chars + len(message.reasoning_content or "")


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: one text, and arguments of tool calls as objects."""
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    fields: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [_with_parsed_arguments(call) for call in message.tool_calls]
    return fields


def _check_arguments(chat: ChatFields) -> None:
    """Arguments of tool calls are JSON inside of a JSON text, whose values are not counted yet.

    Counted as one: an open string in some of them, which hides what follows, is refused when these are parsed, before
    the rest.
    """
    calls = [call for message in chat.messages for call in message.tool_calls]
    texts = [text for text in map(_arguments_of, calls) if text is not None]
    if texts:
        check_num_values(",".join(texts).encode(), chat.limits.max_values)


def _arguments_of(call: dict[str, Any]) -> str | None:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    text = _arguments_of(call)
    if text is None:
        return call
    try:
        arguments = bounded_json(msgspec.json.decode(text or "{}"))
    except (msgspec.MsgspecError, RecursionError):
        raise ApiError("the arguments of a tool call are not valid JSON", param="messages") from None
    except PydanticCustomError as error:
        raise ApiError(f"the JSON in the arguments of a tool call {error.message()}", param="messages") from None
    return {**call, "function": {**call["function"], "arguments": arguments}}
