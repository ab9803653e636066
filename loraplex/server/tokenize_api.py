"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import ApiError
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import TextSurface, TokenizerSurface, tokenizer_of
from loraplex.server.generation import Prompt
from loraplex.server.openapi import operation
from loraplex.server.responses import AnswerRoom, Detokenized, Tokenized, decoded, encode, written_text
from loraplex.server.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

FEW_IDS = 4096
"""More become text, or text of their own, in a thread."""


class TokenizeRoutes:
    """Without `model` it is the base model's text: an adapter may have tokens and a chat template of its own."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tokenizer"], route_class=StrictRoute)
        schema = operation(TokenizeTextRequest, TokenizeChatRequest, replies=(Tokenized,), errors=(404,))
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], openapi_extra=schema)
        schema = operation(DetokenizeRequest, replies=(Detokenized,), errors=(404,))
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], openapi_extra=schema)
        return router

    @requires(Access.KEY)
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text (`prompt`), or of a chat (`messages`) as the chat route would render it."""
        context = self._context
        body = await context.bodies.read_one_of(request, _kind_of, TokenizeTextRequest.limits)
        text = await self._text_of(body.model, request)
        if isinstance(body, TokenizeChatRequest):
            prompt = await context.prompts.from_chat(body, text, request, context.prompts.max_counted_ids(text))
        else:
            prompt = await context.prompts.from_text(body.prompt, text, body.add_special_tokens, request)
        reply = partial(self._reply, prompt, text, body.return_token_strs)
        return reply() if len(prompt.token_ids) <= FEW_IDS else await context.answers.run_for(request, reply, 0)

    @requires(Access.KEY)
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        context = self._context
        body = await context.bodies.read(request, DetokenizeRequest)
        text = await self._text_of(body.model, request)
        vocab_size = text.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise ApiError(f"token id {max(body.tokens)} is not in the vocabulary, 0..{vocab_size - 1}", param="tokens")
        reply = partial(_detokenized, body.tokens, tokenizer_of(text))
        return reply() if len(body.tokens) <= FEW_IDS else await context.answers.run_for(request, reply, 0)

    async def _text_of(self, model: str | None, request: Request) -> TextSurface:
        """A name that is sent must exist."""
        adapter = None if model is None else await self._context.names.resolve(request, model)
        held = self._context.engine.hold_adapters(adapter)
        held.close()  # the text stays, and no version answers
        return await self._context.text_of(held.refs, request)

    def _reply(self, prompt: Prompt, text: TextSurface, wants_strings: bool) -> Response:
        ids, tokenizer = list(prompt.token_ids), tokenizer_of(text)
        strings = [tokenizer.token_text(each) for each in ids] if wants_strings else None
        reply = Tokenized(len(ids), self._context.prompts.max_model_len(text), ids, strings)
        return Response(encode(reply), media_type="application/json")


def _kind_of(fields: dict[str, Any]) -> type[TokenizeTextRequest] | type[TokenizeChatRequest]:
    return TokenizeChatRequest if fields.get("messages") is not None else TokenizeTextRequest


def _detokenized(ids: Sequence[int], tokenizer: TokenizerSurface) -> Response:
    room = AnswerRoom()
    words = written_text(decoded(ids, tokenizer, room), room)
    return Response(encode(Detokenized(words)), media_type="application/json")
