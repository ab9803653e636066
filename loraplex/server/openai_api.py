"""OpenAI's routes: completions, chat completions and models. docs/http.md has the fields and an example of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request, Response

from loraplex.core import AdapterChoice, RequestOutput, SamplingParams
from loraplex.errors import LoraplexError
from loraplex.sampling_params import Claim
from loraplex.server.access import Access, StrictRoute, clean_error, requires
from loraplex.server.api_error import ApiError, forget_frames
from loraplex.server.auth import KEYLESS, TENANT_HEADER, caller_of, client_of
from loraplex.server.body import Model
from loraplex.server.chat_completions import ChatRenderer
from loraplex.server.completions import CompletionRenderer
from loraplex.server.context import ServerContext
from loraplex.server.engine_surface import tokenizer_of
from loraplex.server.generation import CHARS_A_TOKEN, Deadline, Generation, GenerationItem, Prompt
from loraplex.server.listing import PageQuery, encode_list
from loraplex.server.model_names import Target
from loraplex.server.openapi import OF_GENERATION, operation
from loraplex.server.request_id import checked_id, new_request_id
from loraplex.server.responses import ChatCompletion, Completion, ListReply, ModelCard, encode
from loraplex.server.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from loraplex.server.streaming import EVENT_STREAM, PIECE_BYTES, EventStream, until_disconnect
from loraplex.server.tenants.metering import limits_of, service_of, within_context
from loraplex.text.tools.answer import WITH_SPECIAL_TOKENS, opens_thoughts, parser_for
from loraplex.text.tools.wanted import AnswerReading

_log = logging.getLogger("loraplex.server")

MANY_LOGPROBS = 512
"""Candidates of log probabilities from which an answer is written in a thread: some 3 ms."""

LONG_TOKEN_CHARS = 64
"""A candidate of log probabilities counts once more for so many characters of the longest added token."""

SOME_LOGPROBS, SOME_TOKENS = 32, 512
"""From which it has a turn of the event loop for itself: sixty answers of a batch may begin or end at one moment."""

MAX_REPEATED_TOKENS = 2**18
"""Of prompts that several choices give back, each choice counted."""

MAX_TOKENS_FIELDS = {"max_tokens", "max_completion_tokens"}

NAMES_A_TURN = 64
"""Of the event loop. A thousand take 10 to 20 ms."""

LONG_ANSWER = 4096
"""Tokens from which an answer is written in a thread: to give prompts back, they may have to become text."""


class Renderer(Protocol):
    """Turns outputs of the engine into the bytes of an answer. work_a_token: of the next one, over what a plain text
    takes. work_at_end: times that a stream's last output has it write the whole prompt and text again.

    failure: what a stream says of an error; end: what its last bytes are, whatever came before.
    """

    end: bytes

    @property
    def work_a_token(self) -> int: ...

    @property
    def work_at_end(self) -> int: ...

    def response(self, outputs: Sequence[RequestOutput]) -> bytes: ...

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]: ...

    def last_chunk(self) -> bytes: ...

    def failure(self, error: Exception) -> bytes: ...


ChatAnswer = Callable[[ChatCompletionRequest, Generation, AnswerReading], Renderer]
"""What becomes of a conversation's outputs: its request without what is bulky, and how its answers are read."""

CompletionAnswer = Callable[[CompletionRequest, Generation], Renderer]
"""The same of prompts."""


class AnswerWriter:
    """Where one client's answers become bytes: the short ones in the event loop, the long ones in a thread."""

    def __init__(self, context: ServerContext, client: str) -> None:
        self._answers, self._turns = context.answers, context.answer_turns
        self._client = client

    async def write(self, render: Callable[[], bytes], num_logprobs: int, size: int) -> bytes:
        """size: tokens that it says, those of prompts that it may give back included (`Generation.prompt_size`)."""
        if num_logprobs > MANY_LOGPROBS or size > LONG_ANSWER:
            return await self._answers.run(self._client, render, 0)
        if num_logprobs > SOME_LOGPROBS or size > SOME_TOKENS:
            await self._turns.next(self._client)
        else:
            await asyncio.sleep(0)  # many outputs may be there already
        return render()


class OpenAIRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["OpenAI"], route_class=StrictRoute)
        extra = operation(CompletionRequest, replies=(Completion,), text_type=EVENT_STREAM, errors=OF_GENERATION)
        router.add_api_route("/v1/completions", self.complete, methods=["POST"], openapi_extra=extra)
        extra = operation(
            ChatCompletionRequest, replies=(ChatCompletion,), text_type=EVENT_STREAM, errors=OF_GENERATION
        )
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], openapi_extra=extra)
        extra = operation(replies=(ListReply[ModelCard],), errors=(429,))
        router.add_api_route("/v1/models", self.list_models, methods=["GET"], openapi_extra=extra)
        extra = operation(replies=(ModelCard,), errors=(404,))
        router.add_api_route("/v1/models/{model:path}", self.show_model, methods=["GET"], openapi_extra=extra)
        return router

    @requires(Access.KEY)
    async def complete(self, request: Request) -> Response:
        """Continue one or more prompts."""
        arrived_s = time.monotonic()
        # before any work: while the engine starts again, failing requests must cost little
        self._context.engine.check_can_serve()
        return await self.answer_completion(  # no name here keeps the body while it waits
            request, await self._context.bodies.read(request, CompletionRequest), CompletionRenderer, "cmpl-", arrived_s
        )

    async def answer_completion(
        self,
        request: Request,
        body: CompletionRequest,
        answer: CompletionAnswer,
        prefix: str,
        arrived_s: float,
        source: str | None = None,
    ) -> Response:
        """As `answer_chat`, of prompts. source: as in `ModelNames.resolve`."""
        context = self._context
        num_prompts = len(body.prompt) if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int) else 1
        self._check_num_sequences(num_prompts, body.n)
        adapters = await self._adapters_of(request, body, num_prompts, source)
        async with context.targets(adapters, request) as targets:
            params = await _sampling_params(body, targets)
            for each in params.values():
                each.check_logprobs(num_prompts * body.n)
            await context.check_form(body.form, body.form_field, request)
            limits = [body.limit(target.text.defaults) for target in targets.values()]
            limit = None if None in limits else limits[0]
            texts = [targets[each].text for each in adapters]
            prompts = await context.prompts.from_field(body.prompt, texts, body.add_special_tokens, limit, request)
            num_written = body.n * sum(len(prompt.token_ids) for prompt in prompts)  # each choice says its prompt again
            next(iter(params.values())).check_prompt_logprobs(num_written)
            if body.echo or body.return_token_ids:
                size = body.n * sum(prompt.size for prompt in prompts)
                _check_repeated("echo" if body.echo else "return_token_ids", body.n, size)
            wanted = [(prompt, targets[each], params[each]) for prompt, each in zip(prompts, adapters, strict=True)]
            body = body.without_bulk()
            generation = self._generation(prefix, request, body, wanted, arrived_s)
            return await self._respond(request, generation, answer(body, generation), body.stream)

    @requires(Access.KEY)
    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self.answer_chat(request, ChatCompletionRequest, lambda body: (body, ChatRenderer), "chatcmpl-")

    async def answer_chat(
        self,
        request: Request,
        model: type[Model],
        converse: Callable[[Model], tuple[ChatCompletionRequest, ChatAnswer]],
        prefix: str,
    ) -> Response:
        """From a body to its answer or stream. converse: makes a conversation of it, and says the form of the answer;
        prefix: of the answer's id."""
        context, arrived_s = self._context, time.monotonic()
        context.engine.check_can_serve()
        body, answer = converse(await context.bodies.read(request, model))
        self._check_num_sequences(1, body.n)
        adapter = await context.names.resolve(request, body.model, body.lora_path, body.mix)
        async with context.targets([adapter], request) as targets:
            target = targets[adapter]
            params, parser = self._with_tools(body, target)
            params.check_logprobs(body.n)
            field = body.form_field if body.wanted_tools is None else "tools"
            await context.check_form(params.structured_outputs, field, request)
            prompt = await context.prompts.from_chat(body, target.text, request)
            limit_field = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
            context.prompts.check(prompt, target.text, body.limit, "messages", limit_field)
            if body.return_token_ids and body.stream:
                _check_repeated("return_token_ids", body.n, body.n * len(prompt.token_ids))
            has_thoughts = context.config.reasoning_parser is not None and body.separate_reasoning
            is_thinking = opens_thoughts(prompt.text or "")
            reading = AnswerReading(body.wanted_tools, parser, has_thoughts, is_thinking)
            body = body.without_bulk()
            generation = self._generation(prefix, request, body, [(prompt, target, params)], arrived_s)
            return await self._respond(request, generation, answer(body, generation, reading), body.stream)

    def _with_tools(self, body: ChatCompletionRequest, target: Target) -> tuple[SamplingParams, str | None]:
        """How to sample, and the parser of calls that the model makes as its chat template asks."""
        params, tools = body.to_sampling_params(target.text.defaults), body.wanted_tools
        if tools is None:
            return params, None
        if tools.form is not None:
            return replace(params, structured_outputs=tools.form), None
        parser: str | None = self._context.config.tool_call_parser
        if parser == "auto":
            parser = parser_for(tokenizer_of(target.text).template_for_tools())
        if parser is None:
            text = "the chat template says not how calls of tools are written: start with --tool-call-parser, or send"
            raise ApiError(f'{text} tool_choice="required"', code="unsupported_field", param="tools")
        needs_special = parser in WITH_SPECIAL_TOKENS
        return (replace(params, skip_special_tokens=False) if needs_special else params), parser

    @requires(Access.READ)
    async def list_models(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """The base model under each of its names, then every adapter; or those that are asked for."""
        caller = caller_of(request)
        cards = self._context.names.cards(query.names, has_paths=caller.is_admin, scope=caller.scope)
        page = await self._context.views.run_for(request, lambda: encode_list(cards, query), 0)
        tenant = caller.scope.tenant
        return _json(page, None if tenant is None else {TENANT_HEADER: tenant})

    @requires(Access.READ)
    async def show_model(self, model: str, request: Request) -> Response:
        return _json(encode(self._context.names.card(request, model)))

    def _check_num_sequences(self, num_prompts: int, n: int) -> None:
        """Refuse what could not even wait on an idle server: coming again would not help."""
        limits = (
            (self._context.config.max_sequences_per_request, "--max-sequences-per-request"),
            (self._context.engine.max_waiting_requests, "--max-waiting-requests"),
        )
        limit, setting = min(limits)
        if num_prompts * n > limit:
            raise ApiError(
                f"{num_prompts} prompts times n={n} are {num_prompts * n} completions, at most {limit} fit in a "
                f"request ({setting}): send several",
                param="prompt" if n == 1 else "n",
            )

    async def _adapters_of(
        self, request: Request, body: CompletionRequest, num_prompts: int, source: str | None
    ) -> list[AdapterChoice]:
        """The adapter or mix of each prompt. With a list in `lora_path`, null is what `model` says."""
        names = self._context.names
        if not isinstance(body.lora_path, list):
            return [await names.resolve(request, body.model, body.lora_path, body.mix, source)] * num_prompts
        if len(body.lora_path) != num_prompts:
            raise ApiError(f"lora_path has {len(body.lora_path)} entries for {num_prompts} prompts", param="lora_path")
        model = body.model or names.served[0]
        found: dict[str | None, AdapterChoice] = dict.fromkeys(body.lora_path)  # each once, however many prompts
        for index, path in enumerate(found, 1):
            found[path] = await names.resolve(request, model, path, body.mix, source)
            if index % NAMES_A_TURN == 0:
                await asyncio.sleep(0)
        return [found[path] for path in body.lora_path]

    def _generation(
        self,
        prefix: str,
        request: Request,
        body: SamplingFields,
        wanted: Sequence[tuple[Prompt, Target, SamplingParams]],
        arrived_s: float,
    ) -> Generation:
        own_id = body.request_id and checked_id(body.request_id, "request_id")
        response_id = f"{prefix}{own_id or request.state.request_id}"
        unique = new_request_id()[:16]
        caller = caller_of(request)
        limits = limits_of(caller)
        is_asked = any(getattr(body, name) is not None for name in body.model_fields_set & MAX_TOKENS_FIELDS)
        items = tuple(
            GenerationItem(
                prompt,
                target,
                f"{response_id}-{unique}-{index}",
                within_context(params, len(prompt.token_ids), limits, is_asked=is_asked),
            )
            for index, (prompt, target, params) in enumerate(wanted)
        )
        choices, accounts = {item.adapter for item in items}, self._context.accounts
        costs = [(item.adapter, len(item.prompt.token_ids), item.params.n) for item in items]
        is_prompt_alone = isinstance(body, CompletionRequest) and body.is_echo_only
        _log.debug("%s: adapters %s, user %r", response_id, choices, body.label)
        return Generation(
            response_id=response_id,
            created=int(time.time()),
            model=self._context.names.answer_name(
                body.model, items[0].adapter if len(choices) == 1 else None, caller.scope
            ),
            items=items,
            cache_salt=caller.owner + (body.cache_salt or ""),
            client=client_of(request),
            claim=self._claim(request, body.priority),
            hides_paths=not caller.is_admin,
            shows_cached_tokens=self._context.keys.shows_cached_tokens,
            clean=partial(clean_error, request=request),
            charge=None if accounts is None else accounts.charge(caller, costs, is_prompt_alone=is_prompt_alone),
            deadline=Deadline.of(arrived_s, body.timeout, self._context.config.max_request_s),
        )

    def _claim(self, request: Request, priority: int) -> Claim:
        """Of the key's tenant; a key without one is a tenant itself, and without keys all requests are of one.

        Raises InvalidRequestError for the priority.
        """
        caller, most = caller_of(request), self._context.config.max_priority
        return service_of(caller).claim("" if caller == KEYLESS else caller.account, priority, most)

    async def _respond(self, request: Request, generation: Generation, renderer: Renderer, is_stream: bool) -> Response:
        """The answer, or its stream. A stream begins with the first output, so earlier errors have their status."""
        generator, writer = self._context.generator, AnswerWriter(self._context, client_of(request))
        if not is_stream:
            outputs = await until_disconnect(request, generator.run_to_end(generation))
            num_logprobs = sum(map(_num_logprobs, outputs, generation.items))
            num_tokens = renderer.work_a_token * sum(map(_num_tokens, outputs))
            size = sum(map(generation.prompt_size, range(len(outputs)), outputs)) + num_tokens
            answer = _json(await writer.write(partial(renderer.response, outputs), num_logprobs, size))
            answer.headers.update(generation.rate_headers)
            return answer
        stream = generator.run(generation)
        try:
            first = await until_disconnect(request, anext(stream))
        except BaseException:
            await stream.aclose()
            raise
        answer = EventStream(_events(first, stream, generation, renderer, writer), stream)
        answer.headers.update(generation.rate_headers)
        return answer


async def _sampling_params(
    body: CompletionRequest, targets: Mapping[AdapterChoice, Target]
) -> dict[AdapterChoice, SamplingParams]:
    """One for all adapters that share their defaults, since it takes up to a millisecond to make."""
    made: dict[int, SamplingParams] = {}
    for target in targets.values():
        defaults = target.text.defaults
        if id(defaults) not in made:
            made[id(defaults)] = body.to_sampling_params(defaults)
            await asyncio.sleep(0)
    return {each: made[id(target.text.defaults)] for each, target in targets.items()}


def _check_repeated(field: str, n: int, num_written: int) -> None:
    """Refuse a request whose choices would say too long a prompt again, each for itself."""
    if n > 1 and num_written > MAX_REPEATED_TOKENS:
        raise ApiError(
            f"{field} with n={n} gives {num_written} tokens of prompts back ({CHARS_A_TOKEN} characters count for "
            f"one), at most {MAX_REPEATED_TOKENS} fit in an answer: send n=1, or less",
            param=field,
        )


def _num_logprobs(output: RequestOutput, item: GenerationItem) -> int:
    """Candidates, of the prompt's positions and of those of all its completions. One counts more where added tokens are
    long: the likeliest are not those that are drawn."""
    num = len(output.prompt_logprobs or ()) * (1 + (item.params.prompt_logprobs or 0))
    num += sum(len(each.logprobs or ()) for each in output.outputs) * (1 + (item.params.logprobs or 0))
    if not num:
        return 0
    return num * (1 + tokenizer_of(item.target.text).longest_added_token // LONG_TOKEN_CHARS)


def _num_tokens(output: RequestOutput) -> int:
    """Or what as many characters count for: tokens of an adapter may have hundreds."""
    return sum(max(len(each.token_ids), each.num_chars // CHARS_A_TOKEN) for each in output.outputs)


async def _events(
    first: tuple[int, RequestOutput],
    stream: AsyncGenerator[tuple[int, RequestOutput], None],
    generation: Generation,
    renderer: Renderer,
    writer: AnswerWriter,
) -> AsyncGenerator[bytes, None]:
    """The chunks; an error becomes an event of its own. The last bytes are always the renderer's `end`."""
    num_seen: dict[int, tuple[int, int]] = {}
    try:
        async for chunk in _chunks(generation, renderer, *first, num_seen, writer):
            yield chunk
        async for prompt_index, output in stream:
            async for chunk in _chunks(generation, renderer, prompt_index, output, num_seen, writer):
                yield chunk
        yield renderer.last_chunk()
    except LoraplexError as error:
        generation.clean(error)
        yield renderer.failure(error)
        forget_frames(error)
    except Exception as error:
        _log.exception("a stream failed")
        yield renderer.failure(error)
        forget_frames(error)
    if renderer.end:
        yield renderer.end


async def _chunks(
    generation: Generation,
    renderer: Renderer,
    prompt_index: int,
    output: RequestOutput,
    num_seen: MutableMapping[int, tuple[int, int]],
    writer: AnswerWriter,
) -> AsyncGenerator[bytes, None]:
    """A slow reader gets all that it has missed, piece by piece: the next one is made when one is sent. `num_seen`: log
    probabilities and tokens that were written, by prompt."""
    prompt_size = generation.prompt_size(prompt_index, output)
    size = 0 if prompt_index in num_seen else prompt_size
    before_logprobs, before_tokens = num_seen.get(prompt_index, (0, 0))
    num_logprobs, num_tokens = _num_logprobs(output, generation.items[prompt_index]), _num_tokens(output)
    num_seen[prompt_index] = num_logprobs, num_tokens
    size += renderer.work_a_token * (num_tokens - before_tokens)
    if output.finished:
        size += renderer.work_at_end * (prompt_size + num_tokens)
    pieces = renderer.chunks(prompt_index, output)
    while piece := await writer.write(partial(next, pieces, b""), num_logprobs - before_logprobs, size):
        yield piece
        if len(piece) < PIECE_BYTES:  # the last one
            break


def _json(data: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, headers=headers, media_type="application/json")
