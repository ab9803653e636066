"""Adapters as the command line names them: `name=path`, or vLLM's JSON; whether they can be served together; loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from json import loads as from_json
from typing import TYPE_CHECKING

from loraplex.errors import ConfigError, EngineError, JournalError, LoraplexError, shown

if TYPE_CHECKING:
    from loraplex.adapters.registry import LoadTurn, LoRARef
    from loraplex.config import EngineConfig
    from loraplex.frontend.adapter_verbs import AdapterVerbs
    from loraplex.frontend.async_engine import AsyncEngine
    from loraplex.processes.engine_child import EngineChild
    from loraplex.server.config import ServerConfig

_log = logging.getLogger("loraplex.server")

OPTIONS = "--lora-modules or --lora-paths"


def parse_lora_modules(
    given: Iterable[str], *, base_names: Sequence[str] = (), is_name_optional: bool = False
) -> tuple[tuple[str, str], ...]:
    """(name, path) of each `name=path` or `{"name": ..., "path": ...}`; a path alone, where it may be, is its own name.

    `base_model_name` in JSON must be one of `base_names`. Raises ConfigError.
    """
    return tuple(
        _lora_module_of_json(text, base_names)
        if text.lstrip().startswith("{")
        else _lora_module(text, is_name_optional)
        for text in given
    )


def check_lora_modules(modules: Iterable[tuple[str, str]], base_names: Sequence[str], options: str = OPTIONS) -> None:
    """Raises ConfigError for a name of two adapters, and for one that the registry would refuse. options: what gave
    them."""
    from loraplex.adapters.registry.adapter_name import check_adapter_name

    path_of: dict[str, str] = {}
    for name, path in modules:
        try:
            check_adapter_name(name, base_names)
        except LoraplexError as error:
            raise ConfigError(f"{options}, path {path!r}: {error}") from error
        first = path_of.setdefault(name, path)
        if first.rstrip("/") != path.rstrip("/"):
            raise ConfigError(
                f"{options}: adapter {name!r} is given twice, as {first!r} and as {path!r}; give each a name of its own"
            )


def _lora_module_of_json(text: str, base_names: Sequence[str]) -> tuple[str, str]:
    try:
        fields = from_json(text)
        name, path = fields.pop("name"), fields.pop("path")
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(f"adapter {shown(text)}: not JSON with name and path ({error})") from error
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise ConfigError(f"adapter {text!r}: name and path must be texts that are not empty")
    base_name = fields.pop("base_model_name", None)
    if base_name not in (None, *base_names):
        raise ConfigError(
            f"adapter {name!r}: base_model_name is {base_name!r}, this base model is {', '.join(base_names)}"
        )
    if fields:
        raise ConfigError(f"adapter {name!r}: unknown keys {', '.join(sorted(fields))}")
    return name, path


def _lora_module(text: str, is_name_optional: bool) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if equals and name and path:
        return name, path
    if is_name_optional and not equals:
        return text.rstrip("/") or text, text
    raise ConfigError(f"adapter {text!r}: write name=path, or JSON with name and path")


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
    import asyncio

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


async def start_engine(
    config: EngineConfig, server: ServerConfig, modules: Sequence[tuple[str, str]], child: EngineChild | None = None
) -> AsyncEngine:
    """Start the engine and load the operator's adapters, with a progress bar where a person looks on. child: its
    process, which was made already; the caller ends it where this raises."""
    from loraplex.frontend.async_engine import AsyncEngine
    from loraplex.frontend.supervisor import Supervision
    from loraplex.progress import StartProgress
    from loraplex.server.config import output_folder, registry_database

    roots, made = server.local_adapter_roots, output_folder(server)
    for missing in (root for root in roots or () if not root.is_dir()):
        _log.warning("--adapter-root %s is no directory: no adapter can be loaded from there", missing)
    if roots is not None:
        own = *(path for _, path in modules), *(() if made is None else (str(made),)), *server.sources.directories
        config = replace(config, adapter_roots=(*map(str, roots), *own))
    with StartProgress() as progress:
        engine = await AsyncEngine.start(
            config,
            served_model_name=server.served_model_names[0],
            base_names=server.served_model_names,
            on_progress=progress.update,
            state_dir=server.state_dir,
            upload_limits=server.upload_limits,
            max_fetched_bytes=server.max_fetched_bytes,
            database=registry_database(server),
            supervision=Supervision(
                server.engine_timeout_s, server.standby_engine, server.max_engine_restarts, child=child
            ),
            runners=server.runners,
        )
        try:
            num_at_once = 1 if config.lora is None else config.lora.num_loader_threads
            show, is_skipping = partial(progress.update, "adapters"), server.on_bad_adapter == "skip"
            await load_modules(engine, modules, num_at_once, is_skipping, show)
        except BaseException:
            await engine.shutdown()
            raise
    return engine


def _warn_of_another_path(resumed: LoRARef, name: str, path: str) -> None:
    """What the state directory has of a name is newer than the flag that loaded it first."""
    if resumed.lora_path != path.rstrip("/"):
        _log.warning("adapter %r stays as the state directory has it: %s", name, resumed.lora_path)
