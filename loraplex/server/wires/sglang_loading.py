"""SGLang's POST /load_lora_adapter and /unload_lora_adapter: vLLM's verbs, whose answers say what is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from loraplex.errors import LoraplexError
from loraplex.server.access import Access, clean_error, requires
from loraplex.server.api_error import ApiError, clipped, error_body, error_response
from loraplex.server.audit import name_adapters
from loraplex.server.auth import caller_of
from loraplex.server.context import ServerContext
from loraplex.server.listing import PageQuery
from loraplex.server.openapi import OF_ADAPTERS, operation
from loraplex.server.responses import encode
from loraplex.server.wires.native_forms import LoraUpdateReply
from loraplex.server.wires.sglang_fields import SGLangLoadRequest, SGLangUnloadRequest

MAX_LISTED = 1000
"""Of `loaded_adapters`, the one that was named among them; GET /v1/adapters has pages of all."""


class Loading(Protocol):
    """`AdapterRoutes`: its verbs have their turns, checks of paths and quotas."""

    async def load_new(
        self, request: Request, lora_name: str, lora_path: str, duplicate: LoraplexError, *, is_pinned: bool
    ) -> Any: ...

    async def unload_known(self, request: Request, lora_name: str) -> None: ...


class SGLangLoading:
    def __init__(self, context: ServerContext, loading: Loading) -> None:
        self._context = context
        self._loading = loading

    def add_to(self, router: APIRouter) -> None:
        for path, route, body in (
            ("/load_lora_adapter", self.load_lora_adapter, SGLangLoadRequest),
            ("/unload_lora_adapter", self.unload_lora_adapter, SGLangUnloadRequest),
        ):
            extra = operation(body, replies=(LoraUpdateReply,), errors=OF_ADAPTERS)
            name = f"sglang_{path[1:]}"
            router.add_api_route(path, route, methods=["POST"], operation_id=name, openapi_extra=extra)

    @requires(Access.OWN_LOADING)
    async def load_lora_adapter(self, request: Request) -> Response:
        """Load an adapter under a name, as in SGLang."""
        body = await self._context.bodies.read(request, SGLangLoadRequest)
        name_adapters(request, body.lora_name)
        text = f"The LoRA adapter {clipped(body.lora_name)!r} has already been loaded: unload it first"
        taken = ApiError(text, code="invalid_user_input", param="lora_name")
        doing = self._loading.load_new(request, body.lora_name, body.lora_path, taken, is_pinned=body.pinned)
        return await self._answer(request, body.lora_name, doing)

    @requires(Access.OWN_LOADING)
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unload an adapter, as in SGLang. Requests that run on it finish."""
        body = await self._context.bodies.read(request, SGLangUnloadRequest)
        name_adapters(request, body.lora_name)
        return await self._answer(request, body.lora_name, self._loading.unload_known(request, body.lora_name))

    async def _answer(self, request: Request, lora_name: str, verb: Awaitable[Any]) -> Response:
        try:
            await verb
        except LoraplexError as error:
            clean_error(error, request)
            reply = LoraUpdateReply(False, error_body(error).message, await self._loaded(request, lora_name))
            return error_response(error, body=encode(reply))
        reply = LoraUpdateReply(True, None, await self._loaded(request, lora_name))
        return Response(encode(reply), media_type="application/json")

    async def _loaded(self, request: Request, lora_name: str) -> dict[str, str]:
        caller, names = caller_of(request), self._context.names

        def found() -> dict[str, str]:
            cards = names.cards(PageQuery().names, has_paths=caller.is_admin, scope=caller.scope)
            adapters = ((name, card.root) for name, card in cards if card.parent is not None)
            listed = dict(itertools.islice(adapters, MAX_LISTED))
            registered = names.find(lora_name, caller.scope)
            if registered is not None and len(listed) == MAX_LISTED and lora_name not in listed:
                listed.popitem()
                listed[lora_name] = names.card(request, lora_name).root
            return listed

        return await self._context.views.run_for(request, found, 0)
