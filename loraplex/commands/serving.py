"""The commands `loraplex serve | demo`. What they need is imported when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from loraplex.cli_help import Flat, Listed, group_fields, in_group
from loraplex.commands.settings import engine_config, in_options_of
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig
from loraplex.errors import ConfigError
from loraplex.lora_modules import check_lora_modules, parse_lora_modules, start_engine
from loraplex.processes.engine_child import EngineChild
from loraplex.serve.settings import RayConfig, RaySettings, with_database
from loraplex.server.api_keys import KeySettings
from loraplex.server.config import ServerConfig, ServerSettings

group_fields(KeySettings, "Security")
group_fields(ServerSettings, "Server")
group_fields(RaySettings, "Ray Serve")

ModelsGroup = in_group("Model and adapters")
SecurityGroup = in_group("Security")


def serve(
    model: str,
    /,
    *,
    served_model_name: Annotated[tuple[str, ...], Listed, ModelsGroup] = (),
    lora_modules: Annotated[tuple[str, ...], Listed, ModelsGroup] = (),
    lora_paths: Annotated[tuple[str, ...], Listed, ModelsGroup] = (),
    enable_lora: Annotated[bool, ModelsGroup] = True,
    merge_adapter: Annotated[str | None, ModelsGroup] = None,
    adapter_root: Annotated[tuple[str, ...], SecurityGroup] = (),
    keys: Annotated[KeySettings | None, Flat] = None,
    server: Annotated[ServerSettings | None, Flat] = None,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
    ray: Annotated[RaySettings | None, Flat] = None,
) -> int:
    """Serve a model and its adapters over HTTP, as OpenAI's and vLLM's clients expect.

    Parameters
    ----------
    model
        Directory or hub id of the base model.
    served_model_name
        Names of the base model in the API; answers have the first one.
    lora_modules
        Adapters to load at start: name=path, or JSON {"name": ..., "path": ...}.
    lora_paths
        Adapters to load at start, in SGLang's form: name=path or a path alone.
    enable_lora
        Support for adapters; off: they are refused, and layers have no LoRA code.
    merge_adapter
        The one adapter to serve, name=path, merged into the base weights; the base and others are refused then.
    adapter_root
        A directory that load requests may read, hf://ORG or s3://BUCKET/PREFIX; may be given several times.
    """
    names = served_model_name or (model.rstrip("/"),)
    modules = (
        *parse_lora_modules(lora_modules, base_names=names),
        *parse_lora_modules(lora_paths, base_names=names, is_name_optional=True),
    )
    if modules and not enable_lora:
        raise ConfigError("adapters are given, but LoRA is off: leave out --no-enable-lora")
    check_lora_modules(modules, names)
    merged_name, merged = _merged_module(merge_adapter, names, is_alone=not modules and lora is None)
    config = ServerConfig(
        **asdict(server or ServerSettings()),
        served_model_names=names if merged_name is None else (merged_name,),
        merged_into=() if merged_name is None else names,
        api_keys=(keys or KeySettings()).inference_keys(),
        admin_api_keys=(keys or KeySettings()).admin_keys(),
        adapter_roots=adapter_root or None,
    )
    of_engine = engine_config(model, engine, lora, enable_lora and merged is None, merged)
    return _serve(of_engine, config, modules, ray or RaySettings())


def demo(*, serve: bool = False, each: int = 2, seed: int = 0, port: int = 8000, device: str = "auto") -> int:
    """Answer a mixed batch with one base model and eleven adapters, and check every answer.

    Parameters
    ----------
    serve
        Server with the demo's model and adapters instead.
    each
        Phrases for each adapter and the base.
    seed
        Seed of the choice of phrases.
    port
        Port of --serve.
    device
        torch device to run on, such as cpu or cuda; auto: a GPU where torch has one, else the CPU.
    """
    if serve:
        return _serve_demo(port, device)
    from loraplex.demo.tasks import ADAPTERS, checkable_word_phrases

    most = len(checkable_word_phrases()) // (len(ADAPTERS) + 1)
    if not 1 <= each <= most:
        raise ConfigError(f"each must be 1..{most}, got {each}: there are no more phrases to ask")
    from loraplex.demo.run import run_demo

    return run_demo(each, seed, device)


def _merged_module(given: str | None, base_names: Sequence[str], is_alone: bool) -> tuple[str | None, str | None]:
    """(name, path) of --merge-adapter."""
    if given is None:
        return None, None
    if not is_alone:
        raise ConfigError("merge_adapter serves one adapter alone: leave other adapters and their settings out")
    (module,) = parse_lora_modules((given,), base_names=base_names, is_name_optional=True)
    check_lora_modules([module], base_names, "--merge-adapter")
    return module


def _serve(engine: EngineConfig, server: ServerConfig, modules: tuple[tuple[str, str], ...], ray: RaySettings) -> int:
    if ray.ray:
        from loraplex.serve.ray_run import run_on_ray

        config = RayConfig(engine=engine, server=with_database(server), modules=modules, ray=ray)
        return run_on_ray(config, in_options_of("serve"))
    if ray != RaySettings():
        raise ConfigError("settings of Ray Serve are given, but it is off: leave them out, or give --ray")
    from loraplex.server.run import run_server

    child = EngineChild()
    return run_server(lambda: start_engine(engine, server, modules, child), server, in_options_of("serve"), child)


def _serve_demo(port: int, device: str) -> int:
    from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path

    modules = tuple(f"{task.name}={adapter_path(task.name)}" for task in ADAPTERS)
    server, engine = ServerSettings(port=port), EngineSettings(device=device)
    base = str(assets_path() / "base")
    return serve(base, served_model_name=("demo",), lora_modules=modules, server=server, engine=engine)
