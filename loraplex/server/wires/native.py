"""POST /generate of SGLang and of LoRAX, which share its path, and what their clients ask of a server beside it.

A body with `inputs` is LoRAX's; any other is SGLang's, whose prompt is `text` or `input_ids`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from loraplex import __version__
from loraplex.errors import InvalidRequestError, LoraplexError
from loraplex.sampling_params import MAX_STOP_STRINGS
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.api_error import in_words_of
from loraplex.server.auth import caller_of
from loraplex.server.context import GRAMMAR_BYTES, ServerContext
from loraplex.server.openai_api import OpenAIRoutes
from loraplex.server.openapi import OF_GENERATION, operation
from loraplex.server.request_model import RequestModel
from loraplex.server.responses import encode
from loraplex.server.schemas import COMPLETION_LIMITS, CompletionRequest
from loraplex.server.streaming import EVENT_STREAM
from loraplex.server.wires.lorax import LoraxAnswer, LoraxReply, lorax_error
from loraplex.server.wires.lorax_fields import LoraxGenerateRequest, in_words_of_local
from loraplex.server.wires.sglang import GenerateReply, SGLangRenderer, SGLangWish
from loraplex.server.wires.sglang_fields import SGLangGenerateRequest, lark_of


class SGLangModelInfo(msgspec.Struct, frozen=True):
    """Of GET /model_info. Paths are the operator's to know: others get the served name in their place."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: str | None = None
    weight_version: str = "default"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class SGLangServerInfo(msgspec.Struct, frozen=True):
    """Of GET /server_info. internal_states: one without entries, in which SGLang's benchmark looks for speculation;
    GET /v1/memory and /metrics have what this server does."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    context_length: int
    version: str
    internal_states: tuple[dict[str, Any], ...] = ({},)


class LoraxInfo(msgspec.Struct, frozen=True):
    """Of GET /info."""

    model_id: str
    model_device_type: str
    max_concurrent_requests: int
    max_input_length: int
    max_total_tokens: int
    version: str
    max_best_of: int = 1
    max_stop_sequences: int = MAX_STOP_STRINGS
    model_sha: str | None = None
    model_pipeline_tag: str = "text-generation"
    docker_label: str | None = None


class NativeRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._prompts = OpenAIRoutes(context)

    def router(self) -> APIRouter:
        router = APIRouter(route_class=StrictRoute)
        both = operation(
            SGLangGenerateRequest,
            LoraxGenerateRequest,
            replies=(GenerateReply, list[GenerateReply], LoraxReply),
            text_type=EVENT_STREAM,
            errors=OF_GENERATION,
        )
        stream = operation(LoraxGenerateRequest, text_type=EVENT_STREAM, errors=OF_GENERATION)
        listed = operation(
            LoraxGenerateRequest, replies=(list[LoraxReply],), text_type=EVENT_STREAM, errors=OF_GENERATION
        )
        add = partial(router.add_api_route, methods=["POST"])
        add("/generate", self.generate, openapi_extra=both, tags=["SGLang", "LoRAX"])
        add(
            "/generate_stream",
            self.generate_stream,
            openapi_extra=stream,
            response_class=StreamingResponse,
            tags=["LoRAX"],
        )
        add("/", self.generate_either, openapi_extra=listed, tags=["LoRAX"])
        for path, show, reply, tag in (
            ("/model_info", self.model_info, SGLangModelInfo, "SGLang"),
            ("/get_model_info", self.model_info, SGLangModelInfo, "SGLang"),
            ("/server_info", self.server_info, SGLangServerInfo, "SGLang"),
            ("/get_server_info", self.server_info, SGLangServerInfo, "SGLang"),
            ("/info", self.info, LoraxInfo, "LoRAX"),
        ):
            extra, name = operation(replies=(reply,)), path[1:]
            router.add_api_route(path, show, methods=["GET"], operation_id=name, openapi_extra=extra, tags=[tag])
        return router

    @requires(Access.KEY)
    async def generate(self, request: Request) -> Response:
        """Continue prompts, as in SGLang (`text` or `input_ids`), or one, as in LoRAX (`inputs`)."""
        arrived_s = self._begin()
        kind: type[RequestModel] = SGLangGenerateRequest

        def choose(fields: dict[str, Any]) -> type[RequestModel]:
            nonlocal kind
            kind = LoraxGenerateRequest if fields.get("inputs") is not None else SGLangGenerateRequest
            return kind

        try:
            body = await self._context.bodies.read_one_of(request, choose, COMPLETION_LIMITS)
        except LoraplexError as error:
            if kind is SGLangGenerateRequest:
                raise
            return lorax_error(error, request)
        if isinstance(body, LoraxGenerateRequest):
            answering = self._lorax(request, body, arrived_s, is_stream=False)
        else:
            assert isinstance(body, SGLangGenerateRequest)
            answering = self._sglang(request, body, arrived_s)
        del body  # no name keeps it while it waits
        return await answering

    @requires(Access.KEY)
    async def generate_stream(self, request: Request) -> Response:
        """Continue a prompt, an event for each token, as in LoRAX."""
        return await self._read_lorax(request, is_stream=True)

    @requires(Access.KEY)
    async def generate_either(self, request: Request) -> Response:
        """Continue a prompt, as in LoRAX: a list of one answer, or with `stream` an event for each token."""
        return await self._read_lorax(request, is_stream=None, is_list=True)

    def _begin(self) -> float:
        arrived_s = time.monotonic()
        self._context.engine.check_can_serve()
        return arrived_s

    async def _read_lorax(self, request: Request, is_stream: bool | None, is_list: bool = False) -> Response:
        """is_stream: None as the body says."""
        arrived_s = self._begin()
        try:
            body = await self._context.bodies.read(request, LoraxGenerateRequest)
        except LoraplexError as error:
            return lorax_error(error, request)
        is_stream = body.stream if is_stream is None else is_stream
        answering = self._lorax(request, body, arrived_s, is_stream=is_stream, is_list=is_list)
        del body  # no name keeps it while it waits
        return await answering

    async def _sglang(self, request: Request, body: SGLangGenerateRequest, arrived_s: float) -> Response:
        wish, names = SGLangWish.of(body), body.names
        completion = await self._with_grammar(request, body)
        answering = self._prompts.answer_completion(
            request,
            self._with_model(completion),
            lambda _, generation: SGLangRenderer(wish, generation),
            "",
            arrived_s,
        )
        del body, completion
        with in_words_of(names):
            return await answering

    async def _with_grammar(self, request: Request, body: SGLangGenerateRequest) -> CompletionRequest:
        ebnf = body.sampling_params.ebnf
        if ebnf is None:
            return body.completion
        self._context.check_grammars_allowed("ebnf")
        try:
            grammar = await self._context.grammars.run_for(request, partial(lark_of, ebnf), GRAMMAR_BYTES)
        except InvalidRequestError as error:
            error.param = "ebnf"
            raise
        return body.completion_with(grammar)

    async def _lorax(
        self, request: Request, body: LoraxGenerateRequest, arrived_s: float, *, is_stream: bool, is_list: bool = False
    ) -> Response:
        names, scope, path = self._context.names, caller_of(request).scope, body.parameters.local_path
        try:
            body.check_stream(is_stream)
            answer = LoraxAnswer.of(body, arrived_s, names.served[0], self._context.engine.model_info.backend, is_list)
            completion = self._with_model(body.completion.model_copy(update={"stream": is_stream}))
            answering = self._prompts.answer_completion(
                request,
                completion,
                lambda _, generation: answer.of_generation(generation, scope),
                "",
                arrived_s,
                body.parameters.source,
            )
            del body, completion
            with in_words_of(LoraxGenerateRequest.names):
                answered = await answering
        except LoraplexError as error:
            return lorax_error(in_words_of_local(path, error), request)
        answered.headers.update(answer.headers)
        return answered

    def _with_model(self, body: CompletionRequest) -> CompletionRequest:
        """For the base model, where none is named: these clients need not name it."""
        is_named = body.model or body.lora_path or body.merged_adapters
        return body if is_named else body.model_copy(update={"model": self._context.names.served[0]})

    @requires(Access.READ)
    async def model_info(self, request: Request) -> Response:
        """The base model, as in SGLang."""
        path, name = self._base_of(request)
        return _json(SGLangModelInfo(path, name, path))

    @requires(Access.READ)
    async def server_info(self, request: Request) -> Response:
        """The server, as in SGLang."""
        path, name = self._base_of(request)
        return _json(SGLangServerInfo(path, name, path, self._context.engine.model_info.max_model_len, __version__))

    @requires(Access.READ)
    async def info(self, request: Request) -> Response:
        """The server and its limits, as in LoRAX."""
        engine, config = self._context.engine, self._context.config
        path, _ = self._base_of(request)
        longest = engine.model_info.max_model_len
        device = engine.devices[0] if engine.devices else "cpu"
        most = min(config.max_sequences_per_request, engine.max_waiting_requests)
        return _json(LoraxInfo(path, device.partition(":")[0], most, longest - 1, longest, __version__))

    def _base_of(self, request: Request) -> tuple[str, str]:
        """Where the base model lies, or its name for a key that may not see that; and its name."""
        name = self._context.names.served[0]
        return (self._context.engine.model_info.root if caller_of(request).is_admin else name), name


def _json(reply: msgspec.Struct) -> Response:
    return Response(encode(reply), media_type="application/json")
