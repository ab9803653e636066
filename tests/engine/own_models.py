"""Adapters with weights of their own as objects, and transformers' model with the same weights: no file takes part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from loraplex.adapters.weights import LoRALayerWeights, LoRAModel
from loraplex.core import AdapterId, Request, SamplingParams, TokenLogprobs, TokenOutput
from loraplex.engine.engine import EngineCore
from tests.fixtures import VOCAB_SIZE, Oracle

RANK, SCALING, ADDED, CUT = 4, 0.5, 200, 100
EMBEDDING, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"


@dataclass(frozen=True)
class OwnModel:
    """What the engine gets, and what transformers says with the same weights."""

    model: LoRAModel
    oracle: Oracle

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size or VOCAB_SIZE


class Maker:
    """Draws adapters for one base model; each is another digest."""

    def __init__(self, base: torch.nn.Module, seed: int = 0) -> None:
        self._base: Any = base
        self._generator = torch.Generator().manual_seed(seed)
        self._num_made = 0

    def make(self, *layers: str, vocab_size: int | None = None) -> OwnModel:
        """layers: of `KINDS`."""
        self._num_made += 1
        oracle = copy.deepcopy(self._base)
        _untie(oracle)
        made: dict[str, LoRALayerWeights] = {}
        if vocab_size is not None:
            _resize(oracle, vocab_size, self._draw)
        for name in layers:
            for layer in KINDS[name](oracle, self._draw):
                known = made.get(layer.module_name)
                made[layer.module_name] = layer if known is None else _together(known, layer)
        rank = max(layer.rank for layer in made.values())
        model = LoRAModel(f"{self._num_made:064x}", rank, made, self._num_made, vocab_size=vocab_size)
        return OwnModel(model, Oracle(oracle))

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)


def _together(first: LoRALayerWeights, second: LoRALayerWeights) -> LoRALayerWeights:
    tensors = {**first.tensors, **second.tensors}
    return replace(first if first.rank else second, module_name=first.module_name).with_tensors(tensors)


def _untie(model: Any) -> None:
    head = model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _resize(model: Any, vocab_size: int, draw: Callable[..., Tensor]) -> None:
    for module in (model.model.embed_tokens, model.lm_head):
        old = module.weight.detach()
        added = draw(max(0, vocab_size - len(old)), old.shape[1]) * old.std()
        module.weight = torch.nn.Parameter(torch.cat([old[:vocab_size], added]))


Draw = Callable[..., Tensor]


def _lora(model: Any, name: str, draw: Draw, *, is_embedding: bool = False) -> LoRALayerWeights:
    """LoRA whose update is a half of the weight, which is changed."""
    module = model.get_submodule(name)
    out_features, in_features = module.weight.shape
    strength = 0.5 * module.weight.detach().std().item() / SCALING / RANK**0.5
    with torch.no_grad():
        if is_embedding:
            a, b = draw(RANK, out_features), strength * draw(in_features, RANK)
            module.weight += SCALING * a.T @ b.T
        else:
            a, b = draw(RANK, in_features), strength * draw(out_features, RANK)
            module.weight += SCALING * b @ a
    return LoRALayerWeights(name, RANK, 1.0, a, b, scaling=SCALING)


def _rows(model: Any, name: str, row_ids: Tensor, draw: Draw) -> LoRALayerWeights:
    module = model.get_submodule(name)
    with torch.no_grad():
        module.weight[row_ids] += 0.5 * module.weight.std() * draw(len(row_ids), module.weight.shape[1])
    return LoRALayerWeights(name, 0, 1.0, None, None, weight=module.weight.detach()[row_ids].clone(), row_ids=row_ids)


def _whole(model: Any, name: str, draw: Draw, strength: float = 0.5) -> LoRALayerWeights:
    module = model.get_submodule(name)
    with torch.no_grad():
        module.weight += strength * module.weight.std() * draw(*module.weight.shape)
    return LoRALayerWeights(name, 0, 1.0, None, None, weight=module.weight.detach().clone())


def _resized(model: Any, name: str, _draw: Draw) -> LoRALayerWeights:
    return LoRALayerWeights(name, 0, 1.0, None, None, weight=model.get_submodule(name).weight.detach().clone())


def _norms(model: Any, draw: Draw) -> list[LoRALayerWeights]:
    made = []
    for name, module in model.named_modules():
        if "norm" in name.rsplit(".", 1)[-1]:
            with torch.no_grad():
                module.weight *= 1 + 0.3 * draw(*module.weight.shape)
            made.append(LoRALayerWeights(name, 0, 1.0, None, None, weight=module.weight.detach().clone()))
    return made


SOME = torch.arange(5, VOCAB_SIZE, 3)
LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj")

KINDS: Mapping[str, Callable[[Any, Draw], Sequence[LoRALayerWeights]]] = {
    "linear": lambda model, draw: [_lora(model, LINEARS[0], draw)],
    "embedding": lambda model, draw: [_lora(model, EMBEDDING, draw, is_embedding=True)],
    "head": lambda model, draw: [_lora(model, HEAD, draw)],
    "rows of the embedding": lambda model, draw: [_rows(model, EMBEDDING, SOME, draw)],
    "rows of the head": lambda model, draw: [_rows(model, HEAD, SOME, draw)],
    "whole embedding": lambda model, draw: [_whole(model, EMBEDDING, draw)],
    "whole head": lambda model, draw: [_whole(model, HEAD, draw)],
    "resized": lambda model, draw: [_resized(model, EMBEDDING, draw), _resized(model, HEAD, draw)],
    "norms": _norms,
    "linears": lambda model, draw: [_whole(model, name, draw) for name in LINEARS],
}


@dataclass(frozen=True)
class Said:
    """What a request drew, and with what log probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[dict[int, float], ...] = ()


def ask(
    engine: EngineCore, cases: Sequence[tuple[LoRAModel | None, Sequence[int]]], max_tokens: int, **params: Any
) -> list[Said]:
    """All in one batch as far as there is room; greedy unless `params` say otherwise. No request may fail."""
    outputs: dict[str, list[TokenOutput]] = {}
    options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    for index, (model, prompt) in enumerate(cases):
        request = request_of(f"r{index}", model, prompt, SamplingParams(**options), max_tokens)
        outputs[request.request_id] = []
        assert engine.add_request(request) == []
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
        if engine.is_stalled and engine.has_unfinished:
            engine.adapters.wait_for_change(0.05)
    return [_said(each) for each in outputs.values()]


def request_of(
    request_id: str, model: LoRAModel | None, prompt: Sequence[int], params: SamplingParams, max_tokens: int = 1
) -> Request:
    adapter_id, digest = (None, "") if model is None else (model.adapter_id, model.adapter_digest)
    return Request(
        request_id,
        tuple(prompt),
        params,
        max_tokens,
        7,
        adapter_id=adapter_id and AdapterId(adapter_id),
        adapter_digest=digest,
    )


def _said(outputs: Sequence[TokenOutput]) -> Said:
    return Said(
        tuple(token for each in outputs for token in each.token_ids),
        tuple(_floats(entry) for each in outputs for entry in each.logprobs or ()),
        tuple(_floats(entry) for each in outputs for entry in each.prompt_logprobs or ()),
    )


def _floats(entries: TokenLogprobs) -> dict[int, float]:
    return {token_id: entry.logprob for token_id, entry in entries.items()}
