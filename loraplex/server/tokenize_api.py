"""vLLM's /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from loraplex.server.access import Access, requires
from loraplex.server.api_error import ApiError
from loraplex.server.body import check_model, read_model, read_object
from loraplex.server.context import ServerContext
from loraplex.server.generation import Prompt
from loraplex.server.openapi import request_schema
from loraplex.server.responses import Detokenized, Tokenized, encode
from loraplex.server.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from loraplex.server.strict_route import StrictRoute


class TokenizeRoutes:
    """`model` may be left out: adapters share the base model's tokenizer. A name that is sent must exist."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tokenizer"], route_class=StrictRoute)
        schema = request_schema(TokenizeTextRequest, TokenizeChatRequest)
        router.add_api_route("/tokenize", self.tokenize, methods=["POST"], openapi_extra=schema)
        schema = request_schema(DetokenizeRequest)
        router.add_api_route("/detokenize", self.detokenize, methods=["POST"], openapi_extra=schema)
        return router

    @requires(Access.KEY)
    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text (`prompt`), or of a chat (`messages`) as the chat route would render it."""
        context = self._context
        fields = await read_object(request, context.config.max_body_bytes)
        if "messages" in fields:
            chat = check_model(fields, TokenizeChatRequest)
            self._check_name(chat.model)
            return self._reply(await context.prompts.from_chat(chat), chat.return_token_strs)
        body = check_model(fields, TokenizeTextRequest)
        self._check_name(body.model)
        return self._reply(
            await context.prompts.from_text(body.prompt, body.add_special_tokens), body.return_token_strs
        )

    @requires(Access.KEY)
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        context = self._context
        body = await read_model(request, DetokenizeRequest, context.config.max_body_bytes)
        self._check_name(body.model)
        vocab_size = context.engine.model_info.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise ApiError(f"token id {max(body.tokens)} is not in the vocabulary, 0..{vocab_size - 1}", param="tokens")
        text = context.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return Response(encode(Detokenized(text)), media_type="application/json")

    def _check_name(self, model: str | None) -> None:
        if model is not None:
            self._context.names.adapter_of(model)

    def _reply(self, prompt: Prompt, wants_strings: bool) -> Response:
        ids = list(prompt.token_ids)
        strings = [self._context.tokenizer.token_text(each) for each in ids] if wants_strings else None
        reply = Tokenized(len(ids), self._context.engine.model_info.max_model_len, ids, strings)
        return Response(encode(reply), media_type="application/json")
