"""The commands `loraplex generate | bench | profile`. What they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from loraplex.cli_help import Flat, Listed, group_fields
from loraplex.commands.settings import engine_config
from loraplex.config import EngineSettings, LoRAConfig
from loraplex.errors import ConfigError
from loraplex.performance.settings import ProfileSettings

group_fields(ProfileSettings, "Profile")


def generate(
    model: str,
    prompts: Annotated[tuple[str, ...], Parameter(negative=())],
    /,
    *,
    adapter: str | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    enable_lora: bool = True,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
) -> int:
    """Complete prompts with a model and, if given, an adapter, without a server.

    Parameters
    ----------
    model
        Directory or hub id of the base model.
    prompts
        One or more prompts; they run in one batch.
    adapter
        Directory or hub id of the adapter.
    max_tokens
        Maximum tokens of each completion.
    temperature
        Randomness of sampling; 0: always the likeliest token.
    top_p
        Share of the probability from which tokens are drawn, likeliest first.
    enable_lora
        Support for adapters; off: they are refused.
    """
    from loraplex.core import LoRARequest, SamplingParams
    from loraplex.frontend.llm import LLM

    config = engine_config(model, engine, lora, enable_lora)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=config.seed)
    request = None if adapter is None else LoRARequest(Path(adapter).name or adapter, 1, adapter)
    with LLM.from_config(config) as llm:
        for output in llm.generate(list(prompts), params, lora_request=request):
            print(f"{output.prompt}{output.outputs[0].text}")
    return 0


def bench(
    model: str,
    adapters: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    /,
    *,
    patterns: Annotated[tuple[str, ...], Listed] = ("base",),
    requests: int = 16,
    prompt_len: int = 64,
    output_len: int = 64,
    runs: int = 3,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
) -> int:
    """Measure the offline engine on a closed batch of random prompts. Prefix caching is on unless you turn it off.

    Parameters
    ----------
    model
        Directory or hub id of the base model.
    adapters
        Directories of adapters.
    patterns
        Choice of adapters for the requests: base, identical, distinct, uniform, skewed.
    requests
        Requests in a batch.
    prompt_len
        Tokens of each prompt.
    output_len
        Tokens of each completion.
    runs
        Runs of each pattern after a warm-up; the median is shown.
    """
    from loraplex.bench import Workload, run_bench

    workload = Workload(requests, prompt_len, output_len)
    return run_bench(
        engine_config(model, engine, lora, True), [Path(path) for path in adapters], workload, patterns, runs
    )


def profile(
    model: str | None = None,
    adapters: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    /,
    *,
    pattern: str = "base",
    requests: int = 16,
    prompt_len: int = 64,
    output_len: int = 64,
    settings: Annotated[ProfileSettings | None, Flat] = None,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
) -> int:
    """Say where the time of a step goes: schedule, build, GEMM, LoRA, attention; or, with --url, how a running server's
    adapters fare.

    Parameters
    ----------
    model
        Directory or hub id of the base model, to run here.
    adapters
        Directories of adapters.
    pattern
        Choice of adapters for the requests: base, identical, distinct, uniform or skewed.
    requests
        Requests of a batch.
    prompt_len
        Tokens of each prompt.
    output_len
        Tokens of each completion.
    """
    settings = settings or ProfileSettings()
    if model is None and settings.url is None:
        raise ConfigError("give a model to run here, or the --url of a running server")
    if model is not None and settings.url is not None:
        raise ConfigError(f"give a model to run here, or the --url of a running server, not both: leave out {model!r}")
    if settings.url is not None:
        if (
            engine is not None
            or lora is not None
            or (pattern, requests, prompt_len, output_len) != ("base", 16, 64, 64)
        ):
            raise ConfigError("a running server has its own settings and requests: leave them out")
        from loraplex.views.live_profile import profile_server

        return profile_server(settings.url, settings)
    from loraplex.bench import Workload
    from loraplex.profile import run_profile

    assert model is not None
    workload, paths = Workload(requests, prompt_len, output_len), [Path(path) for path in adapters]
    return run_profile(engine_config(model, engine, lora, True), paths, workload, pattern, settings)
