"""The command `loraplex`: serve | generate | demo | bench | profile | top | adapter inspect | state check | doctor.

Flags, defaults and help come from the fields of the config dataclasses. Sizes may be written 512MiB, 2GiB or 4GB. What
a command needs is imported when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial, reduce
from json import dumps as to_json
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from loraplex import __version__
from loraplex.cli_help import explain, group_fields, in_group, shown_default, with_options
from loraplex.config import EngineConfig, EngineSettings, LoRAConfig, parse_bytes
from loraplex.errors import ConfigError, EngineError, JournalError, LoraplexError
from loraplex.lora_modules import OPTIONS, check_lora_modules, parse_lora_modules
from loraplex.performance.settings import ProfileSettings
from loraplex.server.api_keys import KeySettings
from loraplex.server.config import ServerConfig, ServerSettings

if TYPE_CHECKING:
    from loraplex.adapters.registry import LoadTurn, LoRARef
    from loraplex.frontend.adapter_verbs import AdapterVerbs
    from loraplex.frontend.async_engine import AsyncEngine

_log = logging.getLogger("loraplex.server")

app = App(
    name="loraplex",
    version=__version__,
    help="One base model in memory, thousands of LoRA adapters, any mix of them in one batch.",
    default_parameter=Parameter(negative_iterable=(), show_default=shown_default),
)
group_fields(KeySettings, "Security")
group_fields(ServerSettings, "Server")
group_fields(EngineSettings, "Model files")
group_fields(LoRAConfig, "Adapter memory")
group_fields(ProfileSettings, "Profile")
adapter_app = App(name="adapter", help="Look at adapters.")
app.command(adapter_app)
state_app = App(name="state", help="Check and repair the directory of --state-dir.")
app.command(state_app)

Flat = Parameter(name="*")
Engine = Annotated[EngineSettings, Flat]
Lora = Annotated[LoRAConfig, Flat]
Listed = Parameter(consume_multiple=True)
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
    adapter_root: Annotated[tuple[str, ...], SecurityGroup] = (),
    keys: Annotated[KeySettings | None, Flat] = None,
    server: Annotated[ServerSettings | None, Flat] = None,
    engine: Annotated[EngineSettings | None, Flat] = None,
    lora: Annotated[LoRAConfig | None, Flat] = None,
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
    adapter_root
        A directory that load requests may read, or hf://ORG; may be given several times.
    """
    from loraplex.server.run import run_server

    names = served_model_name or (model.rstrip("/"),)
    modules = (
        *parse_lora_modules(lora_modules, base_names=names),
        *parse_lora_modules(lora_paths, base_names=names, is_name_optional=True),
    )
    if modules and not enable_lora:
        raise ConfigError("adapters are given, but LoRA is off: leave out --no-enable-lora")
    check_lora_modules(modules, names)
    keys = keys or KeySettings()
    config = ServerConfig(
        **asdict(server or ServerSettings()),
        served_model_names=names,
        api_keys=keys.inference_keys(),
        admin_api_keys=keys.admin_keys(),
        adapter_roots=adapter_root or None,
    )
    engine_config = _engine_config(model, engine, lora, enable_lora)
    return run_server(lambda: _start_engine(engine_config, config, modules), config, _in_options_of("serve"))


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
def doctor() -> int:
    """Say what is installed, which kernels run here and why."""
    from loraplex.doctor import print_doctor

    print_doctor()
    return 0


# ------------------------------------------------------------------------------------------------------------ parsing


def parse_sizes(arguments: Sequence[str]) -> list[str]:
    """`--x-bytes 2GiB` and `--x-bytes=2GB` with the size as a whole number of bytes; other arguments as they are."""
    parsed: list[str] = []
    is_size = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if is_size:
            parsed.append(_bytes(argument))
        elif equals and flag.startswith("--") and flag.endswith("-bytes"):
            parsed.append(f"{flag}={_bytes(value)}")
        else:
            parsed.append(argument)
        is_size = not equals and argument.startswith("--") and argument.endswith("-bytes")
    return parsed


def _bytes(text: str) -> str:
    size = parse_bytes(text)
    return text if size is None else str(size)


def _engine_config(
    model: str, engine: EngineSettings | None, lora: LoRAConfig | None, enable_lora: bool
) -> EngineConfig:
    if lora is not None and not enable_lora:
        raise ConfigError("settings of LoRA are given, but LoRA is off: leave them out, or --no-enable-lora")
    lora_config = (lora or LoRAConfig()) if enable_lora else None
    return EngineConfig(**asdict(engine or EngineSettings()), model=model, lora=lora_config)


async def _start_engine(config: EngineConfig, server: ServerConfig, modules: Sequence[tuple[str, str]]) -> AsyncEngine:
    """Start the engine and load the operator's adapters, with a progress bar where a person looks on."""
    from loraplex.frontend.async_engine import AsyncEngine
    from loraplex.frontend.supervisor import Supervision
    from loraplex.progress import StartProgress

    roots = server.local_adapter_roots
    for missing in (root for root in roots or () if not root.is_dir()):
        _log.warning("--adapter-root %s is no directory: no adapter can be loaded from there", missing)
    if roots is not None:
        config = replace(config, adapter_roots=(*map(str, roots), *(path for _, path in modules)))
    with StartProgress() as progress:
        engine = await AsyncEngine.start(
            config,
            served_model_name=server.served_model_names[0],
            base_names=server.served_model_names,
            on_progress=progress.update,
            state_dir=server.state_dir,
            supervision=Supervision(server.engine_timeout_s, server.standby_engine, server.max_engine_restarts),
        )
        try:
            num_at_once = 1 if config.lora is None else config.lora.num_loader_threads
            is_skipping = server.on_bad_adapter == "skip"
            await load_modules(engine, modules, num_at_once, is_skipping, partial(progress.update, "adapters"))
        except BaseException:
            await engine.shutdown()
            raise
    return engine


async def load_modules(
    engine: AdapterVerbs,
    modules: Sequence[tuple[str, str]],
    num_at_once: int,
    is_skipping: bool,
    on_progress: Callable[[int, int], None],
) -> None:
    """Load the operator's adapters, so many at a time; names and ids are in the order of the list.

    One that cannot be loaded is logged and noted as skipped, or ends the loads (ConfigError). An error of the engine
    always ends them.
    """
    from loraplex.adapters.registry import LoadTurn

    resumed = {} if engine.registry is None else engine.registry.refs()
    turns: list[LoadTurn] = []
    for _ in modules:
        turns.append(LoadTurn(turns[-1] if turns else None))
    waiting = iter(enumerate(zip(modules, turns, strict=True)))
    errors: dict[int, ConfigError] = {}
    done = 0

    async def load_one(name: str, path: str, turn: LoadTurn) -> None:
        if name in resumed:
            _warn_of_another_path(resumed[name], name, path)
            return
        try:
            await engine.load_adapter(name, path, turn=turn)
        except LoraplexError as error:
            if not is_skipping or isinstance(error, EngineError | JournalError):
                raise ConfigError(f"adapter {name!r} of {OPTIONS}: {error}") from error
            assert engine.registry is not None
            engine.registry.skip(name, str(error))
            _log.error("adapter %r of %s is skipped: %s", name, OPTIONS, " ".join(str(error).split()))

    async def load_some() -> None:
        nonlocal done
        for index, ((name, path), turn) in waiting:
            try:
                await load_one(name, path, turn)
            except ConfigError as error:
                errors[index] = error
            finally:
                turn.end()
            if errors:
                return
            done += 1
            on_progress(done, len(modules))

    await asyncio.gather(*(load_some() for _ in range(min(num_at_once, len(modules)))))
    if errors:
        raise errors[min(errors)]


def _warn_of_another_path(resumed: LoRARef, name: str, path: str) -> None:
    """What the state directory has of a name is newer than the flag that loaded it first."""
    if resumed.lora_path != path.rstrip("/"):
        _log.warning("adapter %r stays as the state directory has it: %s", name, resumed.lora_path)


def _serve_demo(port: int) -> int:
    from loraplex.demo.tasks import ADAPTERS, adapter_path, assets_path

    modules = tuple(f"{task.name}={adapter_path(task.name)}" for task in ADAPTERS)
    settings = ServerSettings(port=port)
    return serve(str(assets_path() / "base"), served_model_name=("demo",), lora_modules=modules, server=settings)


def _in_options_of(*command: str) -> Callable[[LoraplexError], str]:
    """How a command says an error: one of settings names options."""
    return lambda error: with_options(str(error), reduce(getitem, command, app))


def main() -> None:
    """Entry point: the exit code of the command. An error is a line on stderr, without a traceback, and exit code 1."""
    try:
        sys.exit(app(parse_sizes(sys.argv[1:]), exit_on_error=False, print_error=False))
    except CycloptsError as error:
        text = explain(error, app)
    except LoraplexError as error:
        text = _in_options_of(*app.parse_commands(sys.argv[1:])[0])(error)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"error: {text}", file=sys.stderr)
    sys.exit(1)
