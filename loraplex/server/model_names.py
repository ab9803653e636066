"""Which adapter a request means. An unknown name is 404 and never the base model.

With an adapter merged into the base weights, its name is that of the "base model" below; the base's own are refused.

"base"           the base model, under any of its served names
"sql"            the adapter named sql
"sql@2"          version 2 of it, while that is kept
"base:sql"       the same (SGLang); an adapter's own name wins when it has a colon
"a:0.7,b:0.3"    a mix of adapters with weights; an adapter of that very name wins
"hub/sql"        the adapter sql of the source hub, where the operator named one (sources/resolver.py)
lora_path="sql"  the same as "sql" beside model="base" (SGLang)
merged_adapters  a mix beside model="base" (LoRAX)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import Request

from loraplex.adapters.registry import HeldAdapters, LoRARef, LoRARegistry, NameQuery
from loraplex.core import AdapterChoice, AdapterMix
from loraplex.errors import AdapterNotFoundError, AdapterUnavailableError, LoraDisabledError
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.auth import caller_of
from loraplex.server.engine_surface import EngineSurface, TextSurface
from loraplex.server.responses import ModelCard
from loraplex.server.sources.resolver import AdapterResolver
from loraplex.tenants.records import EVERYTHING, Scope

_WEIGHTED = re.compile(r"(?P<name>[^,]+):(?P<weight>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)")


def split_mix(model: str) -> AdapterMix | None:
    """The mix of `a:0.7,b:0.3`, two adapters or more; None for another form.

    Names with a comma have no place in it. Raises InvalidRequestError for too many adapters, or too large a weight.
    """
    found = [_WEIGHTED.fullmatch(part) for part in model.split(",")]
    parts = tuple((match["name"], float(match["weight"])) for match in found if match is not None)
    return AdapterMix(parts) if len(parts) == len(found) > 1 else None


@dataclass(frozen=True, slots=True)
class Target:
    """What a prompt is for. A mix of several is read and written as the base is.

    address: what the engine is asked for; where an adapter has a text of its own, the version whose text makes the
    prompt. held: that version, until the engine has it, so that no other one reads the prompt.
    """

    adapter: AdapterChoice
    address: AdapterChoice
    text: TextSurface
    held: HeldAdapters = field(default_factory=HeldAdapters)


class ModelNames:
    """Names of the base model and of the adapters. `created` is when the server started, in Unix seconds: the base
    model's; an adapter's is when it was registered.

    merged_into: names of a base model that is served no longer, since an adapter is merged into it. resolver: of names
    that are not registered; None: there is no source of any.
    """

    def __init__(
        self,
        engine: EngineSurface,
        served_model_names: Sequence[str],
        created: int,
        merged_into: Sequence[str] = (),
        resolver: AdapterResolver | None = None,
    ) -> None:
        self._engine = engine
        self._resolver = resolver
        self._created = created
        self._merged_into = tuple(merged_into)
        self.served = tuple(served_model_names) or (engine.model_info.served_model_name,)

    async def resolve(
        self,
        request: Request,
        model: str | None,
        lora_path: str | None = None,
        merged: AdapterMix | None = None,
        source: str | None = None,
    ) -> AdapterChoice:
        """`choice_of` the caller of a request, whose body has been read. Names that are not registered are loaded from
        the operator's sources first.

        source: the name or the kind (`local`, `hub`, `s3`) of the one that has the adapters which the other fields
        name; None or "": they are names as in `model`. Raises what `choice_of` and the load raise.
        """
        scope = caller_of(request).scope
        if source:
            prefix = self._prefix_of(source, scope)
            model = prefix + model if model is not None and lora_path is None and merged is None else model
            lora_path = None if lora_path is None else prefix + lora_path
            merged = merged and AdapterMix(tuple((prefix + name, weight) for name, weight in merged.parts))
        if self._resolver is not None and self._engine.registry is not None:
            for name in self._unregistered(model, lora_path, merged, scope):
                await self._resolver.load(request, name)
        choice = self.choice_of(model, lora_path, merged, scope)
        self.hide_targets(request, choice)
        return choice

    def _prefix_of(self, source: str, scope: Scope) -> str:
        found = None if self._resolver is None else self._resolver.sources.named(source, scope.tenant or "")
        if found is None:
            text = f"adapter source {clipped(source)!r} is not one of this server; leave it out, or ask its operator"
            raise ApiError(text, param="adapter_source")
        return f"{found.name}/"

    def _unregistered(
        self, model: str | None, lora_path: str | None, merged: AdapterMix | None, scope: Scope
    ) -> Iterator[str]:
        """What is neither the base model nor registered of the names in a request."""
        names = [name for name in (model, lora_path) if name is not None]
        if merged is None and model is not None and "," in model and not self._is_known(model, scope):
            merged = split_mix(model)
            names = names[1:] if merged else names
        for name in dict.fromkeys([*names, *(part for part, _ in (merged.parts if merged else ()))]):
            if not self._is_known(name, scope):
                base = next((served for served in self.served if name.startswith(served + ":")), None)
                bare = name if base is None else name.removeprefix(base + ":")
                if not self._is_known(bare, scope):
                    yield bare

    def adapter_of(self, model: str | None, lora_path: str | None = None, scope: Scope = EVERYTHING) -> str | None:
        """The adapter's registered name, None for the base. scope: what the caller may see.

        Raises ApiError (400 no model, 404 unknown) and LoraDisabledError.
        """
        if model is None and lora_path is None:
            raise ApiError(
                "model is missing: name the base model or an adapter (GET /v1/models lists them)", param="model"
            )
        named = None if model is None else self._by_model(model, scope)
        if lora_path is None:
            return named
        meant = self._require_adapter(lora_path, lora_path, "lora_path", scope)
        if named is not None and named != meant:
            raise ApiError(
                f"model names adapter {clipped(scope.shown(named))!r} and lora_path {clipped(lora_path)!r}: send one "
                "of them",
                param="lora_path",
            )
        return meant

    def choice_of(
        self,
        model: str | None,
        lora_path: str | None = None,
        merged: AdapterMix | None = None,
        scope: Scope = EVERYTHING,
    ) -> AdapterChoice:
        """`adapter_of`, and mixes: of `model`, or `merged_adapters`, beside which only the base may be named."""
        mix = merged
        if mix is None and model is not None and "," in model and not self._is_known(model, scope):
            mix = split_mix(model)
        if mix is None:
            return self.adapter_of(model, lora_path, scope)
        if lora_path is not None or (merged and model is not None and self.adapter_of(model, None, scope) is not None):
            raise ApiError(
                "one request names adapters twice: send a mix, or one adapter in model or lora_path",
                param="lora_path" if merged is None else "merged_adapters",
            )
        param = "model" if merged is None else "merged_adapters"
        return AdapterMix(tuple((self._part(name, param, scope), weight) for name, weight in mix.parts))

    def find(self, name: str, scope: Scope = EVERYTHING) -> str | None:
        """Under which a name, or `name@N`, of a caller is registered; None: nothing that it may see answers."""
        registry = self._engine.registry
        return None if registry is None else scope.find(name, partial(has_adapter, registry), registry.is_registered)

    def hide_targets(self, request: Request, choice: AdapterChoice) -> None:
        """Keep from errors of a tenant's request what answers for a name of it since a switch, and is not its to see:
        what does now, and what does when the error is told."""
        if caller_of(request).scope.tenant is not None and choice is not None:
            names = {name for name, _ in choice.parts} if isinstance(choice, AdapterMix) else {choice}
            state = request.state
            state.named, state.hidden = getattr(state, "named", set()), getattr(state, "hidden", set())
            state.named |= names
            state.hidden |= self._hidden(request, names)

    def hidden_from(self, request: Request) -> Set[str]:
        """Registered names that errors of a tenant's request do not tell."""
        hidden: Set[str] = getattr(request.state, "hidden", set())
        return hidden | self._hidden(request, getattr(request.state, "named", set()))

    def _hidden(self, request: Request, names: Set[str]) -> Set[str]:
        """A target need not be loaded still."""
        scope, registry = caller_of(request).scope, self._engine.registry
        targets = () if registry is None else map(registry.target_of, names)
        return {target for target in targets if not scope.may_see(target)}

    def _is_known(self, model: str, scope: Scope) -> bool:
        return model in self.served or self.find(model, scope) is not None

    def _part(self, name: str, param: str, scope: Scope) -> str:
        """The adapter's registered name of a part of a mix, which may be `base:sql` too."""
        if (found := self.find(name, scope)) is not None:
            return found
        bases = (served + ":" for served in self.served)
        prefix = next((base for base in bases if name.startswith(base)), "")
        return self._require_adapter(name.removeprefix(prefix), name, param, scope)

    def answer_name(self, model: str | None, choice: AdapterChoice, scope: Scope = EVERYTHING) -> str:
        """What the answer says in `model`: the adapter's name, a mix, or the base's name as the client wrote it."""
        if isinstance(choice, AdapterMix):
            return str(AdapterMix(tuple((scope.shown(name), weight) for name, weight in choice.parts)))
        return model or self.served[0] if choice is None else scope.shown(choice)

    def _by_model(self, model: str, scope: Scope) -> str | None:
        if model in self.served:
            return None
        if self._merged_into:
            raise self._merged_away(model, "model")
        if (found := self.find(model, scope)) is not None:
            return found
        for served in self.served:
            if model.startswith(served + ":"):
                return self._require_adapter(model.removeprefix(served + ":"), model, "model", scope)
        raise unknown_model(model)

    def _merged_away(self, model: str, param: str) -> ApiError:
        what = "is the base model" if model in self._merged_into else "is not served"
        return ApiError(
            f"The model `{clipped(model)}` {what}: this server has {self.served[0]!r} merged into the base weights "
            "(--merge-adapter) and serves nothing beside it.",
            status=404,
            kind="not_found_error",
            code="model_not_found",
            param=param,
        )

    def _require_adapter(self, adapter_name: str, model: str, param: str, scope: Scope) -> str:
        if self._merged_into:
            raise self._merged_away(adapter_name, param)
        if self._engine.registry is None:
            raise lora_is_off(f"adapter {clipped(adapter_name)!r} was asked for")
        if (found := self.find(adapter_name, scope)) is None:
            raise unknown_model(model, param)
        return found

    def cards(
        self, query: NameQuery, *, has_paths: bool = True, scope: Scope = EVERYTHING
    ) -> Iterator[tuple[str, ModelCard]]:
        """Of the base model under each of its names, then of adapters. Without paths, `root` is the name again: where
        models lie is the operator's business. `query.after` may be a name of either kind.
        """
        served = self.served
        if query.after in served:
            served = served[served.index(query.after) + 1 :]
            query = replace(query, after="")
        elif query.after:
            served = ()
        for name in replace(query, is_sorted=False).of(served):
            yield name, self._base_card(name, has_paths)
        if self._engine.registry is None:
            return
        registered, refs = self._engine.registry.registered(), self._engine.registry.refs()
        for name in scope.query(query).of(registered):
            if name in refs:
                shown_name = scope.shown(name)
                yield shown_name, self._adapter_card(shown_name, refs[name], has_paths, scope)

    def _base_card(self, name: str, has_paths: bool) -> ModelCard:
        info = self._engine.model_info
        return ModelCard(name, self._created, info.root if has_paths else name, None, info.max_model_len)

    def _adapter_card(self, name: str, ref: LoRARef, has_paths: bool, scope: Scope) -> ModelCard:
        """Of what answers for a name since a switch and is not the caller's to see, it says nothing."""
        if not scope.may_see(ref.adapter_name):
            return ModelCard(name, self._created, name, self.served[0], self._engine.model_info.max_model_len)
        root = ref.lora_path if has_paths else name
        max_model_len = (None if ref.text is None else ref.text.max_model_len) or self._engine.model_info.max_model_len
        return ModelCard(name, int(ref.loaded_time), root, self.served[0], max_model_len)

    def card(self, request: Request, model: str) -> ModelCard:
        """As the caller may see it. Raises what `adapter_of` raises, and AdapterUnavailableError."""
        caller = caller_of(request)
        adapter_name, registry = self.adapter_of(model, None, caller.scope), self._engine.registry
        if adapter_name is None or registry is None:
            return self._base_card(model, caller.is_admin)
        self.hide_targets(request, adapter_name)
        name, ref = caller.scope.shown(adapter_name), registry.resolve(adapter_name)
        return self._adapter_card(name, ref, caller.is_admin, caller.scope)


def has_adapter(registry: LoRARegistry | None, name: str) -> bool:
    """Whether requests for a name, or for `name@N`, are answered, now or when the files of its adapter are here."""
    if registry is None:
        return False
    try:
        registry.resolve(name)
    except AdapterNotFoundError:
        return False
    except AdapterUnavailableError:
        return True
    return True


def unknown_model(model: str, param: str = "model") -> ApiError:
    return ApiError(
        f"The model `{clipped(model)}` does not exist. GET /v1/models lists what this server has.",
        status=404,
        kind="not_found_error",
        code="model_not_found",
        param=param,
    )


def lora_is_off(what: str, is_merged: bool = False) -> LoraDisabledError:
    if is_merged:
        text = "an adapter is merged into the base weights (--merge-adapter) and none is served beside it"
        return LoraDisabledError(f"{what}, but {text}: start the server without it")
    return LoraDisabledError(f"{what}, but this server runs without LoRA: start it with LoRA enabled")
