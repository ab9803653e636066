"""The command `loraplex`: serve, route, generate, demo, bench, profile, calibrate, simulate, plan, and some more.

Flags, defaults and help come from the fields of the config dataclasses. Sizes may be written 512MiB, 2GiB or 4GB. What
a command needs is imported when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from json import dumps as to_json
from operator import getitem
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import App, CycloptsError, Parameter

from loraplex import __version__
from loraplex.adapters.merging.wish import MAX_MERGE_BYTES
from loraplex.cli_help import Flat, Listed, explain, group_fields, in_group, parse_sizes, shown_default, with_options
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig
from loraplex.errors import ConfigError, LoraplexError
from loraplex.lora_modules import check_lora_modules, parse_lora_modules, start_engine
from loraplex.models.commands import model_app
from loraplex.performance.settings import ProfileSettings
from loraplex.router.settings import RouteSettings
from loraplex.serve.settings import RayConfig, RaySettings, with_database
from loraplex.server.api_keys import KeySettings
from loraplex.server.config import ServerConfig, ServerSettings
from loraplex.tenants.commands import key_app, tenant_app
from loraplex.twin.commands import calibrate, plan, simulate

app = App(
    name="loraplex",
    version=__version__,
    help="One base model in memory, thousands of LoRA adapters, any mix of them in one batch.",
    help_format="plaintext",
    default_parameter=Parameter(negative_iterable=(), show_default=shown_default),
)
group_fields(KeySettings, "Security")
group_fields(ServerSettings, "Server")
group_fields(RouteSettings, "Server")
group_fields(EngineSettings, "Model files")
group_fields(LoRAConfig, "Adapter memory")
group_fields(ProfileSettings, "Profile")
group_fields(RaySettings, "Ray Serve")
adapter_app = App(name="adapter", help="Look at adapters, and make new ones of them.")
app.command(adapter_app)
state_app = App(name="state", help="Check and repair the directory of --state-dir.")
app.command(state_app)
for command in (calibrate, simulate, plan, tenant_app, key_app, model_app):
    app.command(command)

ModelsGroup = in_group("Model and adapters")
SecurityGroup = in_group("Security")


# ----------------------------------------------------------------------------------------------------------- commands


@app.command
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
    engine_config = _engine_config(model, engine, lora, enable_lora and merged is None, merged)
    return _serve(engine_config, config, modules, ray or RaySettings())


@app.command
def route(
    *,
    replica: Annotated[tuple[str, ...], Parameter(negative=())],
    settings: Annotated[RouteSettings | None, Flat] = None,
) -> int:
    """One address in front of several servers of the same base model: each request goes to one, verbs to all.

    Parameters
    ----------
    replica
        Address of a server: http://host:port or host:port; may be given several times. The key of an admin, to read
        their memory and events, is in the variable LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    """
    from loraplex.router.run import run_router

    return run_router(replica, settings or RouteSettings(), _in_options_of("route"))


@app.command
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

    config = _engine_config(model, engine, lora, enable_lora)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=config.seed)
    request = None if adapter is None else LoRARequest(Path(adapter).name or adapter, 1, adapter)
    with LLM.from_config(config) as llm:
        for output in llm.generate(list(prompts), params, lora_request=request):
            print(f"{output.prompt}{output.outputs[0].text}")
    return 0


@app.command
def demo(*, serve: bool = False, each: int = 2, seed: int = 0, port: int = 8000) -> int:
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
    """
    if serve:
        return _serve_demo(port)
    from loraplex.demo.tasks import ADAPTERS, checkable_word_phrases

    most = len(checkable_word_phrases()) // (len(ADAPTERS) + 1)
    if not 1 <= each <= most:
        raise ConfigError(f"each must be 1..{most}, got {each}: there are no more phrases to ask")
    from loraplex.demo.run import run_demo

    return run_demo(each, seed)


@app.command
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
        _engine_config(model, engine, lora, True), [Path(path) for path in adapters], workload, patterns, runs
    )


@app.command
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
    return run_profile(_engine_config(model, engine, lora, True), paths, workload, pattern, settings)


@app.command
def top(url: str = "http://127.0.0.1:8000", /, *, interval: float = 1.0, once: bool = False) -> int:
    """Watch a running server: throughput, latency, tiers, chunks, adapters, events. Ctrl-C ends it.

    Parameters
    ----------
    url
        Address of the server: http://host:port or host:port. Its key is in the variable LORAPLEX_ADMIN_API_KEY or
        LORAPLEX_API_KEY.
    interval
        Seconds between two frames.
    once
        One frame on standard output, and the end.
    """
    from loraplex.views.top import run_top

    return run_top(url, interval, once)


@adapter_app.command
def inspect(
    path: str, /, *, base: str | None = None, json: bool = False, lora: Annotated[LoRAConfig | None, Flat] = None
) -> int:
    """Say what of an adapter would be honoured or refused, and why. Exit code 1 when it would be refused.

    Parameters
    ----------
    path
        Directory or hub id of the adapter.
    base
        Directory or hub id of the base model, to check names and shapes against.
    json
        Output as JSON.
    """
    from loraplex.doctor import report_on

    report = report_on(path, base, lora or LoRAConfig())
    print(to_json(asdict(report), indent=2) if json else report.describe())
    return 0 if report.is_honoured else 1


@adapter_app.command
def merge(
    adapters: Annotated[tuple[str, ...], Parameter(negative=())],
    /,
    *,
    output: Path,
    combination_type: Annotated[str | None, Parameter(name=("--combination-type", "--combination"))] = None,
    density: float | None = None,
    majority_sign_method: str | None = None,
    svd_rank: int | None = None,
    svd_clamp: float | None = None,
    seed: int | None = None,
    max_merge_bytes: int = MAX_MERGE_BYTES,
) -> int:
    """Make a new adapter of several, as peft's add_weighted_adapter does. A server merges by POST /v1/adapters/merge.

    Parameters
    ----------
    adapters
        PATH=WEIGHT of each: a directory or hub id of a LoRA, and a number.
    output
        Directory of the new adapter, which must not exist.
    combination_type
        linear, cat, svd, ties, ties_svd, dare_linear, dare_linear_svd, dare_ties, dare_ties_svd, magnitude_prune or
        magnitude_prune_svd (default: svd, of one adapter linear).
    density
        Share of the numbers that ties, dare and magnitude_prune keep, above 0 and at most 1.
    majority_sign_method
        Election of signs by ties and dare_ties: total (default) or frequency.
    svd_rank
        Rank of a result of svd (default: the highest of the adapters).
    svd_clamp
        Quantile beyond which the factors of an svd are cut off, above 0 and at most 1.
    seed
        Seed of what dare draws (default: 0).
    max_merge_bytes
        Most memory of the merge; a larger one is refused.
    """
    from loraplex.adapters.merging.merge import merge_directories
    from loraplex.adapters.merging.wish import MergeWish, parse_weighted

    wish = MergeWish(
        adapters=tuple(map(parse_weighted, adapters)),
        combination_type=combination_type,
        density=density,
        majority_sign_method=majority_sign_method,
        svd_rank=svd_rank,
        svd_clamp=svd_clamp,
        seed=seed,
    )
    made = merge_directories(wish, output, max_merge_bytes)
    rank = f"rank {made.config['r']}, " if "r" in made.config else ""
    print(f"{output}: {made.origin}, {rank}{made.nbytes} bytes")
    return 0


@adapter_app.command
def export(
    adapter: str,
    /,
    *,
    output: Path | None = None,
    url: str | None = None,
    max_merge_bytes: int = MAX_MERGE_BYTES,
) -> int:
    """Write an adapter as it is served, as a PEFT directory: converted kinds as the LoRA that they became.

    Parameters
    ----------
    adapter
        Directory or hub id of the adapter; with --url its name on the server.
    output
        Directory of the copy, which must not exist.
    url
        Address of a server, which writes the copy into its own --adapter-output-dir. Its key is in the variable
        LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    max_merge_bytes
        Most memory of the export; a larger one is refused.
    """
    if (output is None) == (url is None):
        raise ConfigError("give --output, or the --url of a server, which writes into its own folder")
    if url is not None:
        return _ask_server(url, adapter, "export", {})
    from loraplex.adapters.merging.export import export_directory

    assert output is not None
    made = export_directory(adapter, output, max_merge_bytes)
    print(f"{output}: {made.origin}, {made.nbytes} bytes")
    return 0


@adapter_app.command
def clone(adapter: str, name: str, /, *, url: str = "http://127.0.0.1:8000") -> int:
    """Give an adapter of a running server a further name. Both share memory, and are reloaded and unloaded apart.

    Parameters
    ----------
    adapter
        Name of the adapter.
    name
        Name of the copy.
    url
        Address of the server. Its key is in the variable LORAPLEX_ADMIN_API_KEY or LORAPLEX_API_KEY.
    """
    return _ask_server(url, adapter, "clone", {"name": name})


def _ask_server(url: str, adapter: str, verb: str, body: dict[str, str]) -> int:
    """A verb of a running server, whose answer is printed."""
    from loraplex.views.remote import RemoteServer

    try:
        answer = RemoteServer(url).post(f"/v1/adapters/{quote(adapter)}/{verb}", body or None)
    except OSError as error:
        raise LoraplexError(f"{url} did not answer: {error}") from error
    print(answer.decode())
    return 0


@state_app.command(name="check")
def check_state(directory: Path, /) -> int:
    """Check the journal of a state directory, and say what a repair would do. Exit code 1 when something is damaged.

    Parameters
    ----------
    directory
        The --state-dir of a server that does not run now.
    """
    from loraplex.adapters.journal import repair

    report = repair.check_state(directory)
    print(report.describe())
    return 0 if report.is_whole else 1


@state_app.command(name="repair")
def repair_state(directory: Path, /) -> int:
    """Make a whole journal of what can be used of a state directory and its copies. What it replaces is kept in
    DIR/damaged.

    Parameters
    ----------
    directory
        The --state-dir of a server that does not run now.
    """
    from loraplex.adapters.journal import repair

    report = repair.repair_state(directory)
    print(report.describe())
    if report.is_whole:
        return 0
    print("repaired" if report.base_model is not None else "not repaired")
    return 0 if report.base_model is not None else 1


@app.command
def doctor(*, url: str | None = None) -> int:
    """Say what is installed, which kernels run here and why, and in which form a running server has its model.

    Parameters
    ----------
    url
        Address of a server: http://host:port or host:port.
    """
    from loraplex.doctor import print_doctor

    print_doctor(url)
    return 0


# ------------------------------------------------------------------------------------------------------------ parsing


def _engine_config(
    model: str,
    engine: EngineSettings | None,
    lora: LoRAConfig | None,
    enable_lora: bool,
    merge_adapter: str | None = None,
) -> EngineConfig:
    if lora is not None and not enable_lora:
        raise ConfigError("settings of LoRA are given, but LoRA is off: leave them out, or --no-enable-lora")
    lora_config = (lora or LoRAConfig()) if enable_lora else None
    settings = asdict(engine or EngineSettings())
    return EngineConfig(**settings, model=model, lora=lora_config, merge_adapter=merge_adapter)


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
        return run_on_ray(config, _in_options_of("serve"))
    if ray != RaySettings():
        raise ConfigError("settings of Ray Serve are given, but it is off: leave them out, or give --ray")
    from loraplex.server.run import run_server

    return run_server(lambda: start_engine(engine, server, modules), server, _in_options_of("serve"))


def _serve_demo(port: int) -> int:
    from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path

    server, modules = ServerSettings(port=port), tuple(f"{task.name}={adapter_path(task.name)}" for task in ADAPTERS)
    return serve(str(assets_path() / "base"), served_model_name=("demo",), lora_modules=modules, server=server)


def _in_options_of(*command: str) -> Callable[[LoraplexError], str]:
    """How a command says an error: one of settings names options."""
    return lambda error: with_options(str(error), reduce(getitem, command, app))


def main() -> None:
    """Entry point: the exit code of the command. An error is a line on stderr, without a traceback, and exit code 1."""
    try:
        sys.exit(app(parse_sizes(sys.argv[1:]), exit_on_error=False, print_error=False))
    except (CycloptsError, OSError) as error:
        text = explain(error, app)
    except LoraplexError as error:
        text = _in_options_of(*app.parse_commands(sys.argv[1:])[0])(error)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"error: {text}", file=sys.stderr)
    sys.exit(1)
