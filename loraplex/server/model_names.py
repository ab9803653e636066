"""Which adapter a request means. An unknown name is 404 and never the base model.

With an adapter merged into the base weights, its name is that of the "base model" below; the base's own are refused.

"base"           the base model, under any of its served names
"sql"            the adapter named sql
"sql@2"          version 2 of it, while that is kept
"base:sql"       the same (SGLang); an adapter's own name wins when it has a colon
lora_path="sql"  the same beside model="base" (SGLang)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from loraplex.adapters.registry import LoRARef, LoRARegistry, NameQuery
from loraplex.errors import AdapterNotFoundError, LoraDisabledError
from loraplex.server.api_error import ApiError, clipped
from loraplex.server.engine_surface import EngineSurface
from loraplex.server.responses import ModelCard


class ModelNames:
    """Names of the base model and of the adapters. `created` is when the server started, in Unix seconds.

    merged_into: names of a base model that is served no longer, since an adapter is merged into it.
    """

    def __init__(
        self, engine: EngineSurface, served_model_names: Sequence[str], created: int, merged_into: Sequence[str] = ()
    ) -> None:
        self._engine = engine
        self._created = created
        self._merged_into = tuple(merged_into)
        self.served = tuple(served_model_names) or (engine.model_info.served_model_name,)

    def adapter_of(self, model: str | None, lora_path: str | None = None) -> str | None:
        """The adapter's name, None for the base. Raises ApiError (400 no model, 404 unknown) and LoraDisabledError."""
        if model is None and lora_path is None:
            raise ApiError(
                "model is missing: name the base model or an adapter (GET /v1/models lists them)", param="model"
            )
        named = None if model is None else self._by_model(model)
        if lora_path is None:
            return named
        self._require_adapter(lora_path, lora_path, "lora_path")
        if named is not None and named != lora_path:
            raise ApiError(
                f"model names adapter {clipped(named)!r} and lora_path {clipped(lora_path)!r}: send one of them",
                param="lora_path",
            )
        return lora_path

    def answer_name(self, model: str | None, adapter_name: str | None) -> str:
        """What the answer says in `model`: the adapter's name, or the base's as the client wrote it."""
        return adapter_name or model or self.served[0]

    def _by_model(self, model: str) -> str | None:
        if model in self.served:
            return None
        if self._merged_into:
            raise self._merged_away(model, "model")
        if has_adapter(self._engine.registry, model):
            return model
        for served in self.served:
            if model.startswith(served + ":"):
                return self._require_adapter(model.removeprefix(served + ":"), model, "model")
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

    def _require_adapter(self, adapter_name: str, model: str, param: str) -> str:
        if self._merged_into:
            raise self._merged_away(adapter_name, param)
        if self._engine.registry is None:
            raise lora_is_off(f"adapter {clipped(adapter_name)!r} was asked for")
        if not has_adapter(self._engine.registry, adapter_name):
            raise unknown_model(model, param)
        return adapter_name

    def cards(self, query: NameQuery, *, has_paths: bool = True) -> Iterator[tuple[str, ModelCard]]:
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
        refs = {} if self._engine.registry is None else self._engine.registry.refs()
        for name in query.of(refs):
            yield name, self._adapter_card(name, refs[name], has_paths)

    def _base_card(self, name: str, has_paths: bool) -> ModelCard:
        info = self._engine.model_info
        return ModelCard(name, self._created, info.root if has_paths else name, None, info.max_model_len)

    def _adapter_card(self, name: str, ref: LoRARef, has_paths: bool) -> ModelCard:
        root = ref.lora_path if has_paths else name
        return ModelCard(name, self._created, root, self.served[0], self._engine.model_info.max_model_len)

    def card(self, model: str, *, has_paths: bool = True) -> ModelCard:
        adapter_name, registry = self.adapter_of(model), self._engine.registry
        if adapter_name is None or registry is None:
            return self._base_card(model, has_paths)
        return self._adapter_card(adapter_name, registry.resolve(adapter_name), has_paths)


def has_adapter(registry: LoRARegistry | None, name: str) -> bool:
    """Whether requests for a name, or for `name@N`, are answered."""
    if registry is None:
        return False
    try:
        registry.resolve(name)
    except AdapterNotFoundError:
        return False
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
