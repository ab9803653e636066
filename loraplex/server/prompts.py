"""Prompts of a request: texts and messages become token ids, checked against the model's length and vocabulary."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from loraplex.errors import PromptTooLongError
from loraplex.server.api_error import ApiError
from loraplex.server.engine_surface import ModelInfoSurface, TokenizerSurface
from loraplex.server.generation import Prompt
from loraplex.server.schemas import ChatFields, ChatMessage

T = TypeVar("T")

LONG_TEXT_CHARS = 8192
"""A longer text is rendered and tokenized in a thread, so that streams of others do not stop meanwhile."""

MAX_CHARS_PER_TOKEN = 256
"""More characters than this per token of the model's length cannot fit: refused before the work of tokenizing."""


class PromptEncoder:
    def __init__(self, tokenizer: TokenizerSurface, model_info: ModelInfoSurface) -> None:
        self._tokenizer = tokenizer
        self._model_info = model_info

    async def from_field(self, field: str | Sequence[Any], add_special_tokens: bool) -> list[Prompt]:
        """The prompts of /v1/completions: a text, token ids, or a list of either. Raises ApiError for an empty list."""
        if isinstance(field, str) or (field and isinstance(field[0], int)):
            field = [field]
        if not field:
            raise ApiError("prompt is an empty list: send at least one prompt", param="prompt")
        return [
            await self.from_text(item, add_special_tokens) if isinstance(item, str) else Prompt(tuple(item))
            for item in field
        ]

    async def from_text(self, text: str, add_special_tokens: bool, field: str = "prompt") -> Prompt:
        """`field` is what the client sent it in: errors name it."""
        longest = MAX_CHARS_PER_TOKEN * self._model_info.max_model_len
        if len(text) > longest:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, more than {longest}: shorten it", param=field
            )
        encode = functools.partial(self._tokenizer.encode, text, add_special_tokens)
        token_ids = await _run(encode, len(text))
        return Prompt(tuple(token_ids), text)

    async def from_chat(self, chat: ChatFields) -> Prompt:
        """Messages through the model's chat template. Raises InvalidRequestError when there is none or it refuses them."""
        messages = [_template_message(message) for message in chat.messages]
        render = functools.partial(
            self._tokenizer.apply_chat_template,
            messages,
            chat.tools or None,
            chat.add_generation_prompt and not chat.continue_final_message,
            chat.chat_template_kwargs,
            documents=chat.documents or None,
            continue_final_message=chat.continue_final_message,
        )
        text = await _run(render, sum(len(message["content"]) for message in messages))
        return await self.from_text(text, chat.add_special_tokens, "messages")

    def check(
        self, prompt: Prompt, max_tokens: int | None, field: str = "prompt", limit_field: str = "max_tokens"
    ) -> None:
        """Raises PromptTooLongError and ApiError with the value, the limit and the field: that of the prompt or of `max_tokens`."""
        num_prompt, limit = len(prompt.token_ids), self._model_info.max_model_len
        if not num_prompt:
            raise ApiError("the prompt is empty: it must have at least one token", param=field)
        if num_prompt + (max_tokens or 1) > limit:
            raise PromptTooLongError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + (max_tokens or 1)} tokens ({num_prompt} in the prompt, {max_tokens or 1} in the completion). "
                "Please reduce the length of the prompt or of the completion.",
                param=field if num_prompt >= limit else limit_field,
            )
        largest = max(prompt.token_ids)
        if largest >= self._model_info.vocab_size:
            raise ApiError(
                f"token id {largest} is not in the vocabulary, 0..{self._model_info.vocab_size - 1}", param=field
            )


async def _run(work: Callable[[], T], num_chars: int) -> T:
    return await asyncio.to_thread(work) if num_chars > LONG_TEXT_CHARS else work()


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


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.MsgspecError, RecursionError):
        raise ApiError("the arguments of a tool call are not valid JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
