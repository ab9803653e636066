"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import ApiError
from loraplex.server.context import ServerContext
from loraplex.server.generation import Prompt
from loraplex.server.off_loop import client_of
from loraplex.server.openapi import operation
from loraplex.server.responses import Detokenized, Tokenized, encode
from loraplex.server.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest

FEW_IDS = 4096
"""More become text, or text of their own, in a thread."""


class TokenizeRoutes:
    """`model` may be left out: adapters share the base model's tokenizer. A name that is sent must exist."""

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
        client = client_of(request)
        body = await context.bodies.read_one_of(request, _kind_of, TokenizeTextRequest.limits)
        self._check_name(body.model)
        if isinstance(body, TokenizeChatRequest):
            prompt = await context.prompts.from_chat(body, client, context.prompts.max_counted_ids)
        else:
            prompt = await context.prompts.from_text(body.prompt, body.add_special_tokens, client)
        if len(prompt.token_ids) <= FEW_IDS:
            return self._reply(prompt, body.return_token_strs)
        return await context.answers.run(client, partial(self._reply, prompt, body.return_token_strs), 0)

    @requires(Access.KEY)
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        context = self._context
        body = await context.bodies.read(request, DetokenizeRequest)
        self._check_name(body.model)
        vocab_size = context.engine.model_info.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise ApiError(f"token id {max(body.tokens)} is not in the vocabulary, 0..{vocab_size - 1}", param="tokens")
        decode = partial(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = decode() if len(body.tokens) <= FEW_IDS else await context.answers.run(client_of(request), decode, 0)
        return Response(encode(Detokenized(text)), media_type="application/json")

    def _check_name(self, model: str | None) -> None:
        if model is not None:
            self._context.names.choice_of(model)

    def _reply(self, prompt: Prompt, wants_strings: bool) -> Response:
        ids = list(prompt.token_ids)
        strings = [self._context.tokenizer.token_text(each) for each in ids] if wants_strings else None
        reply = Tokenized(len(ids), self._context.engine.model_info.max_model_len, ids, strings)
        return Response(encode(reply), media_type="application/json")


def _kind_of(fields: dict[str, Any]) -> type[TokenizeTextRequest] | type[TokenizeChatRequest]:
    return TokenizeChatRequest if fields.get("messages") is not None else TokenizeTextRequest
