"""What the offline `LLM` is called with: its settings, prompts, what goes with each prompt, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, cast

from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import LoRAMix, LoRARequest, SamplingParams
from loraplex.errors import ConfigError, InvalidRequestError
from loraplex.frontend.frontend import choice_of
from loraplex.memory.eviction.custom import place_of
from loraplex.text.tokenizer import Tokenizer

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
PromptInput = str | Sequence[int] | Mapping[str, Any]
"""A string, token ids, `{"prompt_token_ids": [...]}` or `{"prompt": "..."}`."""

LoRAInput = LoRARequest | Sequence[tuple[LoRARequest, float]] | None
"""An adapter, or a mix of several: pairs of a LoRARequest and its weight. None is the base model."""

MakeBar = Callable[..., Any]
"""`tqdm`, or what takes its `total` and `desc` and returns what has its `update(n)` and `close()`."""

PromptMaker = Callable[[Tokenizer | None], str]
"""What makes a prompt with the tokenizer of its adapter."""

Asked = tuple[str | Sequence[int] | PromptMaker, SamplingParams | None, LoRARequest | LoRAMix | None, bool]
"""A prompt; how to sample, None: by the defaults of its adapter; adapter or mix; whether special tokens are added."""

FIXED_SETTINGS: Mapping[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "no code of a model's repository is run, its architecture must be one of Loraplex's"),
}
"""vLLM's settings that have one value here, and why."""


def config_of(model: str, enable_lora: bool, settings: Mapping[str, Any]) -> EngineConfig:
    """Keywords to configs; one that is neither's field is refused by name."""
    settings = dict(settings)
    for name, (only, why) in FIXED_SETTINGS.items():
        given = settings.pop(name, only)
        if type(given) is not type(only) or given != only:
            raise ConfigError(f"{name}={given!r} is not supported: {why}; give {only!r}, or leave it out")
    engine_names = {field.name for field in fields(EngineConfig)} - {"model", "lora"}
    lora_names = {field.name for field in fields(LoRAConfig)}
    unknown = sorted(set(settings) - engine_names - lora_names)
    if unknown:
        raise ConfigError(
            f"LLM has no setting {', '.join(unknown)}; the settings are the fields of EngineConfig and LoRAConfig"
        )
    lora_settings = {name: value for name, value in settings.items() if name in lora_names}
    if lora_settings.get("eviction_policy") is not None:
        lora_settings["eviction_policy"] = place_of(lora_settings["eviction_policy"])
    if lora_settings and not enable_lora:
        raise ConfigError(f"enable_lora=False, but settings of LoRA are given: {', '.join(sorted(lora_settings))}")
    engine_settings = {name: value for name, value in settings.items() if name in engine_names}
    return EngineConfig(model=model, lora=LoRAConfig(**lora_settings) if enable_lora else None, **engine_settings)


# -------------------------------------------------------------------------------------- prompts and what goes with them


def listed_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[str | Sequence[int]]:
    if not isinstance(prompts, str | Mapping | Sequence):
        raise InvalidRequestError(f"prompts are strings or token ids, got {type(prompts).__name__}")
    if isinstance(prompts, str | Mapping) or (prompts and all(isinstance(token, int) for token in prompts)):
        return [single_prompt(cast(PromptInput, prompts))]
    return [single_prompt(cast(PromptInput, prompt)) for prompt in prompts]


def single_prompt(prompt: PromptInput) -> str | Sequence[int]:
    """A string, or token ids."""
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & set(prompt)
        if len(prompt) != 1 or not known:
            raise InvalidRequestError(
                f"a prompt has one of prompt and prompt_token_ids, got the keys {sorted(map(str, prompt))}"
            )
        prompt = prompt[known.pop()]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(type(token) is int for token in prompt):
        return cast(Sequence[int], prompt)
    raise InvalidRequestError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")


def rendered_chat(
    messages: Messages, add_generation_prompt: bool, variables: Mapping[str, Any], tokenizer: Tokenizer | None
) -> str:
    """The prompt of one conversation."""
    if tokenizer is None:
        raise InvalidRequestError("chat needs a tokenizer with a chat template, and this model has none")
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, template_kwargs=variables
    )


def one_each(given: T | Sequence[T | None] | None, count: int, name: str, kind: type[T]) -> list[T | None]:
    """One for all, or one per prompt. Raises InvalidRequestError (a ValueError) when the lengths differ."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidRequestError(f"{name} is a {type(given).__name__}; it takes {kind.__name__}, or a list of them")
    listed: list[T | None] = list(given)
    if len(listed) != count:
        raise InvalidRequestError(f"{name} has {len(listed)} entries for {count} prompts: give one, or one for each")
    wrong = next((one for one in listed if one is not None and not isinstance(one, kind)), None)
    if wrong is not None:
        raise InvalidRequestError(f"{name} has a {type(wrong).__name__}; it takes {kind.__name__}")
    return listed


def adapters_for(given: LoRAInput | Sequence[LoRAInput], count: int) -> list[LoRARequest | LoRAMix | None]:
    """An adapter or a mix for all prompts, or a list with one for each. A list of pairs is always one mix."""
    if not isinstance(given, Sequence) or _is_mix(given):
        return [adapter_or_mix(given)] * count
    if len(given) != count:
        raise InvalidRequestError(
            f"lora_request has {len(given)} entries for {count} prompts: give one, or one for each"
        )
    return [adapter_or_mix(each) for each in given]


def adapter_or_mix(given: Any) -> LoRARequest | LoRAMix | None:
    """What one prompt goes through. Raises InvalidRequestError for what is neither, or no mix that can be."""
    if given is None or isinstance(given, LoRARequest):
        return given
    if not _is_mix(given):
        raise InvalidRequestError(
            f"lora_request has a {type(given).__name__}; it takes LoRARequest, or a mix: [(LoRARequest, weight)]"
        )
    mix = tuple((request, float(weight)) for request, weight in given)
    choice_of(mix)
    return mix


def _is_mix(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) > 0 and all(map(_is_weighted, given))


def _is_weighted(given: Any) -> bool:
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    return is_pair and isinstance(given[0], LoRARequest) and type(given[1]) in (int, float)


def asked_for(
    prompts: Sequence[str | Sequence[int] | PromptMaker],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    lora_request: LoRAInput | Sequence[LoRAInput],
    add_special_tokens: bool,
) -> list[Asked]:
    """Raises InvalidRequestError when the lengths differ."""
    params = one_each(sampling_params, len(prompts), "sampling_params", SamplingParams)
    adapters = adapters_for(lora_request, len(prompts))
    requests = zip(prompts, params, adapters, strict=True)
    return [(prompt, chosen, adapter, add_special_tokens) for prompt, chosen, adapter in requests]


# ------------------------------------------------------------------------------------------------------- a progress bar


@contextmanager
def progress_bar(use_tqdm: bool | MakeBar, num_prompts: int) -> Iterator[Callable[[int], Any]]:
    """What to call with the number of prompts that are done: nothing (False), a bar of rich on the standard error
    output (True), or the bar that `use_tqdm` makes, called as vLLM calls it. Raises ConfigError."""
    text = "Processed prompts"
    if callable(use_tqdm):
        bar = use_tqdm(total=num_prompts, desc=text, dynamic_ncols=True)
        try:
            yield bar.update
        finally:
            bar.close()
    elif use_tqdm is True:
        try:
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress
        except ImportError:
            raise ConfigError(
                "use_tqdm=True shows a bar of rich, which is not installed: install it, or give use_tqdm=tqdm"
            ) from None
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield partial(progress.advance, progress.add_task(text, total=num_prompts))
    elif use_tqdm is False:
        yield lambda num_done: None
    else:
        raise ConfigError(f"use_tqdm must be True, False or what makes a bar (such as tqdm), got {use_tqdm!r}")
