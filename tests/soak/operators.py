"""Workers that operate: every verb on names of their own, good, bad and killed loads, sources that change.

Each operator alone changes its names and their sources, so it knows what a name stands for after each verb, and says so
in the ledger; the registry must agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from loraplex.adapters.registry import LoadResult
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterLoadError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    EngineDeadError,
    LoraplexError,
)
from loraplex.frontend.async_engine import AsyncEngine
from tests.soak.askers import LOAD_MARGIN_S, SOURCE_ERRORS
from tests.soak.held_sources import ENGINE_MARKER, FRONT_MARKER, held
from tests.soak.ledger import Ledger
from tests.soak.names import Names
from tests.soak.world import BROKEN, Content, Source, World

KINDS = {
    "load": 10,
    "reload": 8,
    "reload what is there": 3,
    "change source": 4,
    "lose source": 2,
    "unload": 5,
    "pin for a while": 2,
    "evict": 8,
    "preload": 4,
    "switch": 4,
    "bad load": 6,
    "bad reload": 3,
    "unload while loading": 3,
    "cancel a load": 3,
    "ten loads at once": 2,
    "replace while loading": 3,
    "look": 3,
}
Errors = tuple[type[LoraplexError], ...]


class Operator:
    """Owns `names`; name i is of family `families[i]`. Its n-th action is drawn from the seed, its name and n alone."""

    def __init__(
        self,
        worker: str,
        seed: int,
        engine: AsyncEngine,
        world: World,
        ledger: Ledger,
        folder: Path,
        families: dict[str, int],
    ) -> None:
        self.worker = worker
        self._seed = seed
        self._engine = engine
        self._world = world
        self._ledger = ledger
        self._folder = folder
        self._families = families
        self._sources = {name: Source(folder / name) for name in families}
        self._names = Names()
        assert engine.registry is not None
        self._registry = engine.registry
        ledger.add_names(families)

    async def prepare(self) -> None:
        """Every name is loaded once, so that there is something to ask for."""
        for name in self._families:
            await self._load(name, self._version(name, 0))

    async def act(self, number: int) -> None:
        rng = Random(f"{self._seed}/{self.worker}/{number}")
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        name, other = rng.sample(list(self._families), 2)
        content = self._version(name, rng.randrange(100))
        self._ledger.actions[kind] += 1
        self._ledger.note(f"{self.worker} #{number} {kind} {name} ({other}, {content.digest[:12]})")
        match kind:
            case "load":
                await self._load(name, content)
            case "reload":
                self._write(name, content)
                await self._reload(name)
            case "reload what is there":
                await self._reload(name)
            case "change source":
                self._write(name, content)
            case "lose source":
                await self._lose_source(name, content, rng.uniform(0, 0.5))
            case "unload":
                await self._unload(name, rng.choice([{}, {}, {"deadline_s": 0.2}, {"force": True}]))
            case "pin for a while":
                await self._pin_for_a_while(name, rng.uniform(0, 0.5), rng.choice(["unpin", "evict"]))
            case "evict" | "preload":
                await self._move(kind, name)
            case "switch":
                await self._switch(name, other, rng.choice([{}, {"deadline_s": 0.2}, {"force": True}]))
            case "bad load":
                await self._bad_load(rng.choice(BROKEN), content)
            case "bad reload":
                await self._bad_reload(name, rng.choice(BROKEN), content)
            case "unload while loading":
                marker = rng.choice([FRONT_MARKER, ENGINE_MARKER])
                await self._unload_while_loading(name, content, marker, rng.uniform(0, 0.2))
            case "cancel a load":
                await self._cancel_a_load(name, content, rng.choice([0.0, 0.001, 0.01, 0.1]))
            case "ten loads at once":
                await self._ten_loads_at_once(name, content)
            case "replace while loading":
                marker = rng.choice([FRONT_MARKER, ENGINE_MARKER])
                await self._replace_while_loading(name, content, self._version(name, rng.randrange(100)), marker)
            case "look":
                await self._look(name)
            case _:
                raise AssertionError(kind)

    def _version(self, name: str, number: int) -> Content:
        versions = self._world.versions(self._families[name])
        return versions[number % len(versions)]

    # ---------------------------------------------------------------------------------------------------------- sources

    def _path(self, name: str) -> str:
        return str(self._sources[name].path)

    def _holds(self, name: str) -> str | None:
        """The digest of what is in the source of a name now; None: nothing good."""
        (digest,) = self._ledger.names[name].source.now
        return digest

    def _write(self, name: str, content: Content) -> None:
        source = self._ledger.names[name].source
        source.set(source.now | {None, content.digest})
        self._sources[name].write(content)
        source.set(frozenset([content.digest]))

    def _spoil(self, name: str, how: str, content: Content) -> None:
        source = self._ledger.names[name].source
        source.set(source.now | {None, content.digest})
        self._sources[name].spoil(how, content)
        source.set(frozenset([None]))

    async def _lose_source(self, name: str, content: Content, seconds: float) -> None:
        """It vanishes for a while."""
        self._spoil(name, "missing", content)
        await asyncio.sleep(seconds)
        self._write(name, content)

    def _source_errors(self, name: str) -> Errors:
        """Errors that are in order because the source of what answers for `name` has, or had, something else."""
        answering = self._names.aliases.get(name, name)
        digest = self._names.content(name)
        record = self._ledger.names[answering]
        is_missed = digest is not None and record.was_elsewhere_since(time.monotonic() - LOAD_MARGIN_S, digest)
        return SOURCE_ERRORS if is_missed else ()

    # ------------------------------------------------------------------------------------------------------------ loads

    async def _load(self, name: str, content: Content) -> None:
        """Of what the source has; only an empty one is filled first."""
        if self._holds(name) is None:
            self._write(name, content)
        await self._load_once(name, load_inplace=False)

    async def _reload(self, name: str) -> None:
        await self._load_once(name, load_inplace=True)

    async def _load_once(self, name: str, load_inplace: bool) -> None:
        digest = self._holds(name)
        expected: Errors = (AdapterNoRoomError,)
        if name in self._names.loaded and not load_inplace and self._names.content(name) is None:
            expected += (AdapterNotFoundError,)
        if digest is None:
            expected += (AdapterLoadError,)
        afters = [] if digest is None else [self._names.with_load(name, digest)]
        if name in self._names.loaded and not load_inplace:
            afters.append(self._names)
        call = self._engine.load_adapter(name, self._path(name), load_inplace=load_inplace)
        await self._verb("load", call, expected, afters)

    async def _bad_load(self, how: str, content: Content) -> None:
        """It is refused, whatever is wrong with it, and nothing of it stays."""
        name, source = f"bad-{self.worker}", Source(self._folder / f"bad-{self.worker}")
        source.spoil(how, content)
        call = self._engine.load_adapter(name, str(source.path))
        if await self._verb("bad load", call, (AdapterLoadError,), None) is not None:
            self._ledger.find(f"{self.worker}: a source with {how} was loaded")
            await self._engine.unload_adapter(name)
        if self._engine.has_adapter(name):
            self._ledger.find(f"{self.worker}: a bad load ({how}) left its name")

    async def _bad_reload(self, name: str, how: str, content: Content) -> None:
        """What answered before answers on."""
        self._spoil(name, how, content)
        await self._reload(name)
        self._write(name, content)

    async def _unload_while_loading(self, name: str, content: Content, marker: str, after_s: float) -> None:
        self._write(name, content)
        loaded, unloaded = self._names.with_load(name, content.digest), self._names.with_unload(name)
        self._claim([loaded, unloaded])
        began_s = time.monotonic()
        with self._aborting(name), held(self._sources[name].path, marker):
            load = asyncio.create_task(self._engine.load_adapter(name, self._path(name), load_inplace=True))
            await asyncio.sleep(after_s)
            with self._outcome("unload while loading", (AdapterNotFoundError,)):
                await self._engine.unload_adapter(name, force=True)
        with self._outcome("unloaded load", (AdapterConflictError, AdapterNoRoomError, AdapterNotFoundError), began_s):
            await load
        await self._settle([loaded, unloaded, self._names])

    async def _cancel_a_load(self, name: str, content: Content, after_s: float) -> None:
        """The caller leaves; the load may go on without him, and the next one is as good as any."""
        self._write(name, content)
        loaded = self._names.with_load(name, content.digest)
        self._claim([loaded])
        load = asyncio.create_task(self._engine.load_adapter(name, self._path(name), load_inplace=True))
        await asyncio.sleep(after_s)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError), self._outcome("cancelled load", (AdapterNoRoomError,)):
            await load
        is_over = False
        while not is_over:  # an engine that is down refuses at once, while the first load may still go on
            with self._outcome("load after a cancelled one", (AdapterNoRoomError,)):
                await self._engine.load_adapter(name, self._path(name), load_inplace=True)
            is_over = not self._ledger.is_down.now
            await asyncio.sleep(0 if is_over else 0.05)
        await self._settle([loaded, self._names])

    async def _ten_loads_at_once(self, name: str, content: Content) -> None:
        """All of them get the same version."""
        self._write(name, content)
        await self._unload(name, {"force": True})
        if name in self._names.loaded:
            return  # the engine died meanwhile
        calls = [self._engine.load_adapter(name, self._path(name)) for _ in range(10)]
        loaded = self._names.with_load(name, content.digest)
        self._claim([loaded])
        results = await asyncio.gather(*calls, return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                with self._outcome("ten loads", (AdapterNoRoomError,)):
                    raise error
        adapter_ids = {result.ref.adapter_id for result in results if isinstance(result, LoadResult)}
        is_disturbed = any(isinstance(result, BaseException) for result in results)
        if len(adapter_ids) > 1 and not is_disturbed:
            self._ledger.find(f"{name}: ten loads at once made versions {adapter_ids}")
        await self._settle([loaded, self._names])

    async def _replace_while_loading(self, name: str, first: Content, second: Content, marker: str) -> None:
        """Whichever was read was read as a whole."""
        self._write(name, first)
        afters = [self._names.with_load(name, content.digest) for content in (first, second)]
        self._claim(afters)
        with held(self._sources[name].path, marker):
            load = asyncio.create_task(self._engine.load_adapter(name, self._path(name), load_inplace=True))
            await asyncio.sleep(0.02)
            self._write(name, second)
        with self._outcome("replaced load", (AdapterNoRoomError, AdapterContentChangedError, AdapterLoadError)):
            await load
        await self._settle([*afters, self._names])

    # ------------------------------------------------------------------------------------------------------ other verbs

    async def _unload(self, name: str, options: dict[str, Any]) -> None:
        expected: Errors = () if name in self._names.loaded else (AdapterNotFoundError,)
        afters = [self._names.with_unload(name)] if name in self._names.loaded else []
        with self._aborting(name if options.get("force") else None):
            result = await self._verb("unload", self._engine.unload_adapter(name, **options), expected, afters)
        if result is not None:
            self._ledger.set_pinned(name, False)
            if options.get("force") and not result.is_drained:
                self._ledger.find(f"{name}: a forced unload left {result.num_references} references")

    async def _pin_for_a_while(self, name: str, seconds: float, end: str) -> None:
        pinned = self._names.aliases.get(name, name)
        self._ledger.set_pinned(pinned, True)
        if await self._move("pin", name) is not None:
            await asyncio.sleep(seconds)
        while await self._move(end, name) is None and name in self._names.loaded and not self._ledger.has_enough:
            if self._names.content(name) is None or self._source_errors(name):
                break
            await asyncio.sleep(0.05)
        version = self._registry._table.current.get(pinned)
        self._ledger.set_pinned(
            pinned, version is not None and version.is_pinned
        )  # it stays when the verb could not lift it

    async def _move(self, verb: str, name: str) -> Any:
        expected: Errors = () if self._names.content(name) is not None else (AdapterNotFoundError,)
        if verb in ("pin", "preload"):
            expected += (AdapterNoRoomError,)
        call = getattr(self._engine, f"{verb}_adapter")(name)
        return await self._verb(verb, call, expected + self._source_errors(name), None)

    async def _switch(self, old: str, new: str, options: dict[str, Any]) -> None:
        is_there = new in self._names.loaded
        expected: Errors = (AdapterNoRoomError,) if is_there else (AdapterNotFoundError,)
        afters = [self._names.with_switch(old, new)] if is_there else []
        own = Names(self._names.loaded)  # a switch promotes what is loaded under `new` itself
        record, digest = self._ledger.names[new], own.content(new)
        if digest is not None and record.was_elsewhere_since(time.monotonic() - LOAD_MARGIN_S, digest):
            expected += SOURCE_ERRORS
        with self._aborting(old if options.get("force") else None):
            await self._verb("switch", self._engine.switch_adapter(old, new, **options), expected, afters)

    async def _look(self, name: str) -> None:
        """Views and invariants while everything moves."""
        await self._verb("check", self._engine.check_integrity(), (), None)
        await self._verb("list", self._engine.list_adapters(), (), None)
        expected: Errors = () if name in self._names.loaded else (AdapterNotFoundError,)
        await self._verb("describe", self._engine.describe_adapter(name), expected, None)

    # -------------------------------------------------------------------------------------------------------- judgement

    async def _verb(self, what: str, call: Awaitable[Any], expected: Errors, afters: Sequence[Names] | None) -> Any:
        """The result of a verb that turns the names into one of `afters` (None: it changes none); None: an error."""
        if afters is not None:
            self._claim(afters)
        result = None
        with self._outcome(what, expected):
            result = await call
        if afters is not None:
            await self._settle([*afters, self._names] if result is None else afters)
        return result

    @contextlib.contextmanager
    def _outcome(self, what: str, expected: Errors, began_s: float | None = None) -> Any:
        """Count how a verb ends, which began now or at `began_s`; an unexpected error is a finding. None goes
        further."""
        began_s = time.monotonic() if began_s is None else began_s
        try:
            yield
        except LoraplexError as error:
            self._ledger.count(what, type(error).__name__)
            is_death = isinstance(error, EngineDeadError) and self._ledger.was_down_since(began_s)
            is_fine = isinstance(error, expected) or is_death or self._ledger.is_excused_by_faults(error, began_s)
            if not is_fine:
                self._ledger.find(f"{self.worker}: {what} failed: {type(error).__name__}: {error}")
        except AssertionError as error:
            self._ledger.find(f"{self.worker}: {what}: {error}")
        else:
            self._ledger.count(what, "done")

    def _claim(self, afters: Sequence[Names]) -> None:
        """From now on the names may stand for what they do in any of `afters`."""
        for name in self._families:
            stands = self._ledger.names[name].stands
            stands.set(stands.now | {after.content(name) for after in afters})

    async def _settle(self, possible: Sequence[Names]) -> None:
        """The names stand for what the registry says, which must be possible."""
        actual = Names.in_registry(self._registry, self._families)
        if actual not in possible:
            self._ledger.find(f"{self.worker}: the names are {actual}, not any of {possible}")
        self._names = actual
        for name in self._families:
            self._ledger.names[name].stands.set(frozenset([actual.content(name)]))

    @contextlib.contextmanager
    def _aborting(self, name: str | None) -> Any:
        """Requests that run on `name` meanwhile may be aborted."""
        if name is None:
            yield
            return
        aborted = self._ledger.names[name].aborted
        aborted.set(True)
        try:
            yield
        finally:
            aborted.set(False)

    @property
    def families(self) -> dict[str, int]:
        return self._families
