"""Routes for adapters: vLLM's two, and Loraplex's own, which tell what happened."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from loraplex.adapters.registry import AdapterInfo, Draining, LoadResult, LoadStatus, LoRARegistry, SwitchResult
from loraplex.errors import LoraplexError
from loraplex.frontend.async_engine import NUM_VERB_THREADS
from loraplex.server.access import Access, StrictRoute, requires
from loraplex.server.adapter_roots import AdapterRoots
from loraplex.server.adapter_schemas import (
    AdapterCard,
    BriefAdapterCard,
    CloneAdapterRequest,
    ExportReply,
    LoadAdapterRequest,
    LoadLoraAdapterRequest,
    LoadReply,
    MergeAdaptersRequest,
    MergeCard,
    PutAdapterRequest,
    ResidencyReply,
    SourceAdapterCard,
    SwitchAdapterRequest,
    SwitchReply,
    UnloadLoraAdapterRequest,
    UnloadReply,
)
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.audit import name_adapters
from loraplex.server.auth import caller_of, client_of
from loraplex.server.browser_guard import JSON_TYPE, media_type_of
from loraplex.server.context import ServerContext
from loraplex.server.listing import MAX_SOURCE_PAGE, AdapterQuery, encode_list
from loraplex.server.model_names import has_adapter, lora_is_off
from loraplex.server.off_loop import OffLoop
from loraplex.server.openapi import OF_ADAPTERS, operation
from loraplex.server.responses import ListReply, encode
from loraplex.server.sources.receiver import UploadReceiver
from loraplex.server.sources.resolver import MAX_LOADS as MAX_LOADS_BY_NEED
from loraplex.server.sources.upload_route import FORM_TYPE, UploadRoute
from loraplex.server.streaming import until_disconnect
from loraplex.server.tenants.callers_names import CallersNames, check_number, in_roots, roots_of
from loraplex.server.tensors_api import TensorRoute, TensorsQuery
from loraplex.server.verb_turns import DrainWaits, VerbTurns
from loraplex.server.wires.sglang_loading import SGLangLoading

LISTS = ListReply[AdapterCard], ListReply[BriefAdapterCard], ListReply[SourceAdapterCard]

P = ParamSpec("P")
T = TypeVar("T")

STATUS_HEADER = "X-Loraplex-Load-Status"
"""vLLM's route answers in plain words; this header says whether it was loaded, reloaded or loaded_with_eviction."""

MAX_LOADS, MAX_LOADS_OF_A_CLIENT = 96, 32
"""At a time. They read files, and may hang with a file system; all other verbs have places of their own."""

NUM_LIST_THREADS = 2
"""For lists of sources that are directories, each of which is gone over in Python, and as many for those of a store,
which may be slow. They are apart from others: a directory may hang."""

MAX_VERBS, MAX_VERBS_OF_A_CLIENT = 32, 24
assert MAX_LOADS + MAX_LOADS_BY_NEED + MAX_VERBS <= NUM_VERB_THREADS


class UnloadQuery(BaseModel):
    """Query of `DELETE /v1/adapters/{name}`: wait up to `deadline_s` for its requests; `force`: abort the rest."""

    model_config = ConfigDict(extra="forbid")

    deadline_s: Annotated[float, Field(ge=0, le=86400)] | None = None
    force: bool = False


class AdapterRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._engine = context.engine
        self._names = CallersNames(context.names, context.engine)
        self._quota = context.quota
        self._roots = AdapterRoots.of(context.config)
        self._loads = VerbTurns("loads", MAX_LOADS, MAX_LOADS_OF_A_CLIENT)
        self._verbs = VerbTurns("verbs", MAX_VERBS, MAX_VERBS_OF_A_CLIENT)
        self._drains = DrainWaits()
        receiver = UploadReceiver(context)
        self._tensors = TensorRoute(context, self._names, self._loads, receiver)
        self._upload = UploadRoute(context, self._names, self._loads, receiver)
        self._path_checks = ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="path-check")
        self._source_lists, self._remote_lists = OffLoop(NUM_LIST_THREADS), OffLoop(NUM_LIST_THREADS)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["adapters"], route_class=StrictRoute)

        def add(
            method: str, path: str, route: Callable[..., Any], body: type[BaseModel] | None = None, *replies: Any
        ) -> None:
            text_type = None if replies else "text/plain"
            extra = operation(*filter(None, [body]), replies=replies, text_type=text_type, errors=OF_ADAPTERS)
            response_class = JSONResponse if replies else PlainTextResponse
            router.add_api_route(path, route, methods=[method], openapi_extra=extra, response_class=response_class)

        add("POST", "/v1/load_lora_adapter", self.load_lora_adapter, LoadLoraAdapterRequest)
        add("POST", "/v1/unload_lora_adapter", self.unload_lora_adapter, UnloadLoraAdapterRequest)
        extra = operation(LoadAdapterRequest, replies=(LoadReply,), errors=OF_ADAPTERS)
        extra["requestBody"]["content"] |= UploadRoute.described()
        router.add_api_route("/v1/adapters", self.load, methods=["POST"], openapi_extra=extra)
        add("POST", "/v1/adapters/switch", self.switch, SwitchAdapterRequest, SwitchReply)
        merge = operation(MergeAdaptersRequest, replies=(MergeCard,), statuses=(202,), errors=OF_ADAPTERS)
        router.add_api_route(
            "/v1/adapters/merge", self.start_merge, methods=["POST"], status_code=202, openapi_extra=merge
        )
        add("GET", "/v1/merges", self.list_merges, None, ListReply[MergeCard])
        add("GET", "/v1/merges/{merge_id}", self.show_merge, None, MergeCard)
        add("DELETE", "/v1/merges/{merge_id}", self.cancel_merge, None, MergeCard)
        add("POST", "/v1/adapters/{name:path}/clone", self.clone, CloneAdapterRequest, LoadReply)
        add("POST", "/v1/adapters/{name:path}/export", self.export, None, ExportReply)
        for verb in (self.pin, self.unpin, self.evict, self.preload):
            add("POST", f"/v1/adapters/{{name:path}}/{verb.__name__}", verb, None, ResidencyReply)
        add("POST", "/v1/adapters/{name:path}/rollback", self.rollback, None, LoadReply)
        tensors = "/v1/adapters/{name:path}/tensors"
        extra = self._tensors.described()
        router.add_api_route(tensors, self.put_tensors, methods=["PUT"], openapi_extra=extra)
        extra = operation(PutAdapterRequest, replies=(LoadReply,), statuses=(200, 201), errors=OF_ADAPTERS)
        router.add_api_route("/v1/adapters/{name:path}", self.put, methods=["PUT"], openapi_extra=extra)
        add("GET", "/v1/adapters", self.list_all, None, *LISTS)
        add("GET", "/v1/adapters/{name:path}", self.show, None, AdapterCard, BriefAdapterCard)
        add("DELETE", "/v1/adapters/{name:path}", self.unload, None, UnloadReply)
        SGLangLoading(self._context, self).add_to(router)
        return router

    # ---------------------------------------------------------------------------------------------------- vLLM's routes

    @requires(Access.OWN_LOADING)
    async def load_lora_adapter(self, request: Request) -> Response:
        """Load an adapter under a name, as in vLLM."""
        body = await self._context.bodies.read(request, LoadLoraAdapterRequest)
        name_adapters(request, body.lora_name)
        if not body.lora_name or not body.lora_path:
            raise _invalid_input(
                "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if body.lora_name else "lora_name"
            )
        duplicate = _invalid_input(
            f"The lora adapter '{clipped(body.lora_name)}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True.",
            "lora_name",
        )
        result = await self.load_new(request, body.lora_name, body.lora_path, duplicate, load_inplace=body.load_inplace)
        headers = {STATUS_HEADER: LoadReply.of(result, caller_of(request).scope).status}
        return Response(
            f"Success: LoRA adapter '{body.lora_name}' added successfully.", headers=headers, media_type="text/plain"
        )

    @requires(Access.OWN_LOADING)
    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unload an adapter, as in vLLM. Requests that run on it finish."""
        body = await self._context.bodies.read(request, UnloadLoraAdapterRequest)
        name_adapters(request, body.lora_name)
        if not body.lora_name:
            raise _invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
        await self.unload_known(request, body.lora_name, body.lora_int_id)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    # ------------------------------------------------------------------------------- what other servers' routes do, too

    async def load_new(
        self,
        request: Request,
        lora_name: str,
        lora_path: str,
        duplicate: LoraplexError,
        *,
        load_inplace: bool = False,
        is_pinned: bool = False,
    ) -> LoadResult:
        """Load an adapter under a name that is free, or in place. Raises `duplicate` where it is taken."""
        registry = self._registry(f"adapter {clipped(lora_name)!r} was to be loaded")
        name = self._names.new(request, lora_name, "lora_name")
        if not load_inplace and has_adapter(registry, name):
            raise duplicate
        with _vllm_names():
            async with self._loading(request, is_pinned):
                result = await self._load(request, name, lora_path, load_inplace=load_inplace, is_pinned=is_pinned)
        if result.status is LoadStatus.ALREADY_LOADED:
            raise duplicate
        return result

    async def unload_known(self, request: Request, lora_name: str, lora_int_id: int | None = None) -> None:
        """Unload the adapter of a name. lora_int_id: its number, if not None."""
        registry = self._registry(f"adapter {clipped(lora_name)!r} was to be unloaded")
        name = self._names.find(request, lora_name) or ""
        ref = registry.find(name)
        if ref is None and has_adapter(registry, name):  # a version by its address: refused, and told how
            await self._verb(request, LoRARegistry.unload, name)
        if ref is None:
            raise ApiError(
                f"The lora adapter '{clipped(lora_name)}' cannot be found.",
                status=404,
                kind="NotFoundError",
                code="adapter_not_found",
                param="lora_name",
            )
        if lora_int_id not in (None, ref.lora_int_id):
            raise _invalid_input(
                f"The lora adapter '{clipped(lora_name)}' does not have lora_int_id {lora_int_id}.",
                "lora_int_id",
            )
        self._names.check_own(request, name)
        await self._verb(request, LoRARegistry.unload, name)

    # ------------------------------------------------------------------------------------------------------- own routes

    @requires(Access.READ)
    async def list_all(self, request: Request, query: Annotated[AdapterQuery, Query()]) -> Response:
        """Every adapter, or those that are asked for: place, bytes, rank, references, version and last use."""
        card, registry, scope = _card_for(request), self._engine.registry, caller_of(request).scope
        if query.source:
            return await self._list_source(request, query)
        if query.operators_field is not None and not caller_of(request).is_admin:
            raise ApiError(
                f"{query.operators_field}: where adapters are is for admin keys of this server (--admin-api-key)",
                status=403,
                kind="permission_error",
                code="admin_key_required",
                param=query.operators_field,
            )

        def listed() -> bytes:
            found = () if registry is None else filter(query.has, registry.infos(scope.query(query.names)))
            infos = query.ordered(found)
            return encode_list(((scope.shown(info.ref.adapter_name), card(info)) for info in infos), query)

        return await self._view(request, listed)

    async def _list_source(self, request: Request, query: AdapterQuery) -> Response:
        """A page of what a source has. One that the caller may not use is as if it were not there."""
        if query.operators_field is not None:
            text = f"{query.operators_field} is of registered adapters: leave it out, or leave out source"
            raise ApiError(text, param=query.operators_field)
        sources = self._context.sources.of(caller_of(request).scope.tenant or "")
        source = next((each for each in sources if each.name == query.source), None)
        if source is None:
            text = f"source {clipped(query.source)!r} is not one of this server"
            raise ApiError(text, status=404, kind="not_found_error", code="source_not_found", param="source")
        limit = min(query.limit or MAX_SOURCE_PAGE, MAX_SOURCE_PAGE)

        def listed() -> bytes:
            names = source.names(query.names_in(source.name), limit + 1)
            cards = (
                (f"{source.name}/{each}", SourceAdapterCard(f"{source.name}/{each}", source.name)) for each in names
            )
            return encode_list(cards, query.model_copy(update={"limit": limit}))

        lists = self._source_lists if source.is_directory else self._remote_lists
        body = await lists.run_for(request, listed, 0)
        return Response(body, media_type="application/json")

    @requires(Access.READ)
    async def show(self, name: str, request: Request) -> Response:
        registry = self._registry(f"adapter {clipped(name)!r} was asked for")
        card, registered = _card_for(request), self._names.visible(request, name)
        return await self._view(request, lambda: encode(card(registry.describe(registered))))

    async def _view(self, request: Request, view: Callable[[], bytes]) -> Response:
        """It asks the engine and may be long: in a thread, and in the client's turn."""
        self._engine.check_can_serve()
        return Response(await self._context.views.run_for(request, view, 0), media_type="application/json")

    @requires(Access.OWN_LOADING)
    async def load(self, request: Request) -> Response:
        """Load an adapter under a name, of a path or of files in a form. A known name with the same path is a no-op
        that says so."""
        if media_type_of(request.headers) == FORM_TYPE:
            return await self._upload.post(request)
        body = await self._context.bodies.read(request, LoadAdapterRequest)
        name_adapters(request, body.name)
        self._registry(f"adapter {clipped(body.name)!r} was to be loaded")
        name = self._names.new(request, body.name)
        check_number(request, body.lora_int_id)
        async with self._loading(request, body.is_pinned):
            result = await self._load(
                request,
                name,
                body.path,
                lora_int_id=body.lora_int_id,
                load_inplace=body.load_inplace,
                is_pinned=body.is_pinned,
            )
        return _json(LoadReply.of(result, caller_of(request).scope))

    @requires(Access.OWN_LOADING)
    async def put(self, name: str, request: Request) -> Response:
        """Say what an adapter is to be; sent twice, it changes nothing. 201 when the name is new."""
        body = await self._context.bodies.read(request, PutAdapterRequest)
        self._registry(f"adapter {clipped(name)!r} was to be changed")
        check_number(request, body.lora_int_id)
        name = self._names.own(request, name) if body.path is None else self._names.new(request, name)
        is_held = bool(body.is_pinned or body.alias_of is not None)
        turn = self._verbs.of(client_of(request)) if body.path is None else self._loading(request, is_held)
        async with turn:
            result = await self._put(request, name, body)
        is_done = body.alias_of is not None or (body.is_pinned and body.path is not None)
        if body.is_pinned is not None and not is_done:
            await self._pin(request, name, body.is_pinned)
        is_new = result.status in (LoadStatus.LOADED, LoadStatus.LOADED_WITH_EVICTION)
        return _json(LoadReply.of(result, caller_of(request).scope), 201 if is_new else 200)

    @requires(Access.OWN_LOADING)
    async def put_tensors(self, name: str, request: Request, query: Annotated[TensorsQuery, Query()]) -> Response:
        """Make a new version of an adapter from a safetensors file. 201 when the name is new."""
        if media_type_of(request.headers) == JSON_TYPE:  # of an operator, for a tenant's adapter `tensors`
            return await self.put(f"{name}/tensors", request)
        return await self._tensors.put(name, request, query)

    async def _put(self, request: Request, name: str, body: PutAdapterRequest) -> LoadResult:
        if body.path is not None:
            return await self._load(
                request,
                name,
                body.path,
                lora_int_id=body.lora_int_id,
                load_inplace=True,
                is_pinned=bool(body.is_pinned),
                keeps_equal=True,
                digests=body.digests,
                alias_of=None if body.alias_of is None else self._names.own(request, body.alias_of),
            )
        result = None if body.version is None else await self._engine.on_registry(LoRARegistry.move, name, body.version)
        if result is not None and body.lora_int_id is None:
            return result
        numbered = await self._engine.on_registry(LoRARegistry.give_number, name, body.lora_int_id)
        return numbered if result is None else replace(result, ref=numbered.ref)

    @requires(Access.OWN_LOADING)
    async def rollback(self, name: str, request: Request) -> Response:
        """What answered before answers again, a version or another adapter; a second rollback goes forward."""
        self._registry(f"adapter {clipped(name)!r} was named")
        name, scope = self._names.own(request, name), caller_of(request).scope
        async with (
            self._quota.turn(request, is_held=True),
            self._verbs.of(client_of(request)),
            self._quota.changing(request, name),
        ):
            result = await self._engine.on_registry(
                LoRARegistry.move,
                name,
                may_answer=scope.may_change,
                check_answer=self._quota.held_check(request, name),
            )
        return _json(LoadReply.of(result, scope))

    @requires(Access.OWN_LOADING)
    async def unload(self, name: str, request: Request, query: Annotated[UnloadQuery, Query()]) -> Response:
        """The name resolves to nothing at once; requests that run on it finish, or are aborted with `force`."""
        self._registry(f"adapter {clipped(name)!r} was to be unloaded")
        name = self._names.own(request, name)
        begin = partial(self._verb, request, LoRARegistry.begin_unload, name, query.deadline_s, query.force)
        result = await self._drains.run(client_of(request), query.deadline_s, begin)
        return _json(UnloadReply.of(result, caller_of(request).scope))

    @requires(Access.OWN_LOADING)
    async def switch(self, request: Request) -> Response:
        """Send the requests for `old` to `new`; `old` is evicted after its last one."""
        body = await self._context.bodies.read(request, SwitchAdapterRequest)
        name_adapters(request, body.old, body.new)
        self._registry(f"adapter {clipped(body.old)!r} was to be switched")
        old = self._names.own(request, body.old)
        own_name = self._names.own if body.new_path is None else self._names.new
        new = own_name(request, body.new, "new")

        async def begin() -> Draining[SwitchResult]:
            is_load = body.new_path is not None
            turns = self._loads if is_load else self._verbs
            async with (
                self._quota.turn(request, is_load=is_load, is_held=True),
                turns.of(client_of(request)),
                self._quota.changing(request, new, is_load=is_load, switched=old) as check_size,
            ):
                if body.new_path is not None:
                    await self._check_path(request, body.new_path, "new_path")
                verb = partial(LoRARegistry.begin_switch, check_size=check_size)
                with in_roots(request):
                    return await self._engine.on_registry(verb, old, new, body.new_path, body.deadline_s, body.force)

        result = await self._drains.run(client_of(request), body.deadline_s, begin)
        return _json(SwitchReply.of(result, caller_of(request).scope))

    # -------------------------------------------------------------------------------------------- adapters of adapters

    @requires(Access.OWN_LOADING)
    async def clone(self, name: str, request: Request) -> Response:
        """The same weights under a further name: both share memory and KV, and are reloaded and unloaded apart."""
        body = await self._context.bodies.read(request, CloneAdapterRequest)
        registry = self._registry(f"adapter {clipped(name)!r} was to be cloned")
        check_number(request, body.lora_int_id)
        name, new_name = self._names.answering(request, name), self._names.new(request, body.name)
        async with (
            self._loading(request, is_held=True),  # a source may be read
            self._quota.changing(
                request,
                new_name,
                is_load=True,
                is_pin=body.is_pinned,
                cloned=registry.resolve(name).adapter_name,
            ) as check_size,
        ):
            result = await self._engine.on_registry(
                LoRARegistry.clone,
                name,
                new_name,
                lora_int_id=body.lora_int_id,
                is_pinned=body.is_pinned,
                check_size=check_size,
                check_answer=self._names.answer_check(request, new_name),
                check_source=self._names.answer_check(request, name),
            )
        return _json(LoadReply.of(result, caller_of(request).scope))

    @requires(Access.LOADING)
    async def start_merge(self, request: Request) -> Response:
        """Make a new adapter of several, in the background. 202 when all is checked that can be before it is made."""
        body = await self._context.bodies.read(request, MergeAdaptersRequest)
        name_adapters(request, body.name, *(each.name for each in body.adapters))
        self._registry(f"adapter {clipped(body.name)!r} was to be made")
        wish = body.wish
        name = self._names.new(request, body.name)
        self._check_can_write()
        async with self._loads.of(client_of(request)):
            job = await self._context.maker.start(name, wish, body.is_pinned)
        return _json(MergeCard.of(job), 202)

    @requires(Access.ADMIN)
    async def list_merges(self, request: Request) -> Response:
        """Merges that wait, run, or have ended lately; the oldest first."""
        return _json(ListReply([MergeCard.of(job) for job in self._context.maker.jobs]))

    @requires(Access.ADMIN)
    async def show_merge(self, merge_id: str, request: Request) -> Response:
        return _json(MergeCard.of(self._context.maker.job(merge_id)))

    @requires(Access.LOADING)
    async def cancel_merge(self, merge_id: str, request: Request) -> Response:
        """End a merge at its next module; nothing of it stays. One that has ended is left as it is."""
        job = self._context.maker.cancel(merge_id)
        name_adapters(request, job.name)
        return _json(MergeCard.of(job))

    @requires(Access.VERB)
    async def export(self, name: str, request: Request) -> Response:
        """Write what is served to a new folder in the directory of --adapter-output-dir, as peft reads it. It ends with
        its client's connection."""
        self._registry(f"adapter {clipped(name)!r} was to be exported")
        self._check_can_write()
        async with self._loads.of(client_of(request)):
            return _json(ExportReply.of(await until_disconnect(request, self._context.maker.export(name))))

    def _check_can_write(self) -> None:
        if self._context.maker.folder is None:
            raise ApiError(
                "this server writes no adapters: start it with --adapter-output-dir DIR", code="no_adapter_output_dir"
            )

    @requires(Access.OWN_VERB)
    async def pin(self, name: str, request: Request) -> Response:
        """Promote, and exempt from eviction."""
        return await self._change(request, name, partial(self._pin, is_pinned=True))

    @requires(Access.OWN_VERB)
    async def unpin(self, name: str, request: Request) -> Response:
        return await self._change(request, name, partial(self._pin, is_pinned=False))

    @requires(Access.OWN_VERB)
    async def evict(self, name: str, request: Request) -> Response:
        """One tier down. The name still resolves."""
        return await self._change(request, name, self._evict)

    @requires(Access.OWN_VERB)
    async def preload(self, name: str, request: Request) -> Response:
        """Promote now rather than with the first request."""
        self._registry(f"adapter {clipped(name)!r} was named")
        name, scope = self._names.answering(request, name), caller_of(request).scope
        outcome = await self._verb(request, LoRARegistry.preload, name, self._names.answer_check(request, name))
        return _json(ResidencyReply(scope.shown(name), outcome.is_new, scope.visible(outcome.evicted)))

    async def _change(self, request: Request, name: str, change: Callable[[Request, str], Awaitable[bool]]) -> Response:
        self._registry(f"adapter {clipped(name)!r} was named")
        name = self._names.answering(request, name)
        has_changed = await change(request, name)
        return _json(ResidencyReply(caller_of(request).scope.shown(name), has_changed))

    async def _pin(self, request: Request, name: str, is_pinned: bool) -> bool:
        registry = self._registry(f"adapter {clipped(name)!r} was named")
        verb = LoRARegistry.pin if is_pinned else LoRARegistry.unpin
        async with (
            self._quota.turn(request, is_held=is_pinned),
            self._verbs.of(client_of(request)),
            self._quota.changing(request, registry.resolve(name).adapter_name, is_pin=is_pinned),
        ):
            return await self._engine.on_registry(verb, name, self._names.answer_check(request, name))

    async def _evict(self, request: Request, name: str) -> bool:
        return await self._verb(request, LoRARegistry.evict, name, self._names.answer_check(request, name))

    async def _verb(
        self, request: Request, verb: Callable[Concatenate[LoRARegistry, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """A verb that reads no file, in its client's turn."""
        async with self._verbs.of(client_of(request)):
            return await self._engine.on_registry(verb, *args, **kwargs)

    @contextlib.asynccontextmanager
    async def _loading(self, request: Request, is_held: bool = False) -> AsyncIterator[None]:
        """The turns of a load, in order."""
        async with (
            self._quota.turn(request, is_load=True, is_held=is_held),
            self._loads.of(client_of(request)),
        ):
            yield

    async def _load(self, request: Request, name: str, path: str, **wishes: Any) -> LoadResult:
        is_pinned, switched = wishes.get("is_pinned", False), wishes.get("alias_of") or ""
        changing = self._quota.changing(request, name, is_load=True, is_pin=is_pinned, switched=switched)
        async with changing as check_size:
            await self._check_path(request, path)
            with in_roots(request):
                wishes |= {"check_size": check_size, "check_answer": self._names.answer_check(request, name)}
                return await self._engine.on_registry(LoRARegistry.load, name, path, **wishes)

    async def _check_path(self, request: Request, path: str, field: str = "path") -> None:
        """Within `changing`, by what is known of the caller by then. In threads of its own: to resolve a link may hang,
        too, also one of a root."""
        is_tenants, roots = caller_of(request).scope.tenant is not None, roots_of(request)

        def check() -> None:
            self._roots.check(path, field)
            if is_tenants:
                AdapterRoots.of_tenant(roots).check(path, field)

        await asyncio.get_running_loop().run_in_executor(self._path_checks, check)

    def _registry(self, what: str) -> LoRARegistry:
        if self._engine.registry is None:
            raise lora_is_off(what, bool(self._context.config.merged_into))
        return self._engine.registry


def _card_for(request: Request) -> Callable[[AdapterInfo], AdapterCard | BriefAdapterCard]:
    """What the caller may see of an adapter: paths, places and use are the operator's."""
    caller = caller_of(request)
    return AdapterCard.of if caller.is_admin else partial(BriefAdapterCard.of, scope=caller.scope)


def _invalid_input(message: str, field: str) -> ApiError:
    return ApiError(message, kind="InvalidUserInput", code="invalid_user_input", param=field)


@contextlib.contextmanager
def _vllm_names() -> Iterator[None]:
    """Errors name fields as vLLM's routes do."""
    try:
        yield
    except LoraplexError as error:
        error.param = {"name": "lora_name", "path": "lora_path"}.get(error.param or "", error.param)
        raise


def _json(reply: Any, status: int = 200) -> Response:
    return Response(encode(reply), status, media_type="application/json")
