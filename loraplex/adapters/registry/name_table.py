"""Which names and numbers there are, what answers for each, and which old versions still run. No locks, no store, no files.

    answering(name) = current[aliases.get(name, name)]

An alias is a name that was switched to another: it keeps its own version in `current` (evicted, ready to be switched back)
while requests that name it go elsewhere. An alias never points to an alias. When the adapter that answers is unloaded, its
aliases resolve to nothing: a request is refused rather than served by weights that its operator had switched away from.

Single-threaded: `LoRARegistry` calls it under its lock, so nothing here may block.
"""

from __future__ import annotations

from dataclasses import replace

from loraplex.adapters.registry.verb import LoadWish, Verb
from loraplex.adapters.registry.version import AdapterVersion, Farewell, Parting
from loraplex.errors import AdapterConflictError, AdapterMemoryError, AdapterNotFoundError


class NameTable:
    """current: name to its own version; draining: name to its unnamed versions in use; verbs: name to the slow verb that runs on it."""

    def __init__(self, max_loaded_loras: int | None) -> None:
        self._max_loaded_loras = max_loaded_loras
        self.current: dict[str, AdapterVersion] = {}
        self.aliases: dict[str, str] = {}
        self.draining: dict[str, list[AdapterVersion]] = {}
        self.verbs: dict[str, Verb] = {}
        self._by_id: dict[int, AdapterVersion] = {}
        self._numbers: dict[str, int] = {}
        self._numbered: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------------------ look things up

    def answering(self, name: str) -> AdapterVersion:
        """The version that serves requests for `name`; raises AdapterNotFoundError."""
        version = self.current.get(self.aliases.get(name, name))
        if version is None:
            raise self._not_found(name)
        return version

    def own(self, name: str) -> AdapterVersion:
        """The version loaded under `name` itself, whoever answers for it; raises AdapterNotFoundError."""
        version = self.current.get(name)
        if version is None:
            raise self._not_found(name)
        return version

    def in_use(self, adapter_id: int) -> AdapterVersion:
        """The version behind a reference that is held, current or draining."""
        version = self._by_id.get(adapter_id)
        assert version is not None, f"adapter_id {adapter_id} is not loaded: released once too often?"
        assert version.num_references > 0, f"adapter_id {adapter_id} has no references: released once too often?"
        return version

    def versions(self) -> list[AdapterVersion]:
        """Everything that the store holds: current versions and those that still run."""
        return list(self._by_id.values())

    def has(self, version: AdapterVersion) -> bool:
        """Whether a version is current, or drains still."""
        return version.adapter_id in self._by_id

    def aliases_of(self) -> dict[str, tuple[str, ...]]:
        """The inverse of `aliases`."""
        inverse: dict[str, tuple[str, ...]] = {}
        for alias, target in self.aliases.items():
            inverse[target] = (*inverse.get(target, ()), alias)
        return inverse

    def name_of(self, lora_int_id: int) -> str:
        name = self._numbered.get(lora_int_id)
        if name is None or name not in self.current:
            raise AdapterNotFoundError(f"no adapter has lora_int_id {lora_int_id}; load one with that number first")
        return name

    def lora_int_ids(self) -> dict[int, str]:
        return {number: name for number, name in self._numbered.items() if name in self.current}

    def _not_found(self, name: str) -> AdapterNotFoundError:
        if name in self.aliases:
            target = self.aliases[name]
            return AdapterNotFoundError(
                f"adapter {name!r} was switched to {target!r}, which is unloaded; load {target!r}, or switch or reload {name!r}"
            )
        if self.load_under_way(name) is not None:
            return AdapterNotFoundError(f"adapter {name!r} is still being loaded; try again when its load has ended")
        return AdapterNotFoundError(f"adapter {name!r} is not loaded; load it first")

    # --------------------------------------------------------------------------------------------------------------- load

    def loaded(self, wish: LoadWish) -> AdapterVersion | None:
        """What answers, when the adapter is there as wished; None when there is something to load; AdapterConflictError."""
        self._check_number(wish.name, wish.lora_int_id)
        version = self.current.get(wish.name)
        if version is None or wish.load_inplace:
            return None
        if version.ref.lora_path != wish.path:
            raise AdapterConflictError(
                f"adapter {wish.name!r} is loaded from {version.ref.lora_path!r}, not from {wish.path!r}; "
                "unload it first, or set load_inplace to replace it"
            )
        if version.error is not None:
            return None
        answering = self.answering(wish.name)
        self._adopt(version, wish.lora_int_id)
        return answering

    def load_under_way(self, name: str) -> Verb | None:
        verb = self.verbs.get(name)
        return verb if verb is not None and verb.wish is not None else None

    def begin_load(self, wish: LoadWish) -> Verb:
        """Keep room and number for a load; raises AdapterMemoryError when `max_loaded_loras` names are taken."""
        assert wish.name not in self.verbs, f"two verbs run on {wish.name!r}"
        if wish.name not in self.current:
            self._check_room(wish.name)
        verb = self.verbs[wish.name] = Verb(wish, brought_number=self._bind(wish.name, wish.lora_int_id))
        return verb

    def call_off(self, verb: Verb) -> None:
        """A load failed, or is not wanted any more: nothing of it stays."""
        assert verb.wish is not None
        name = verb.wish.name
        if self.verbs.get(name) is verb:
            del self.verbs[name]
            if verb.brought_number:
                self._unbind(name)

    def publish(self, version: AdapterVersion, verb: Verb) -> Parting | None:
        """The name resolves to `version` from now on; returns the parting of the version that it replaces."""
        name = version.ref.adapter_name
        if self.verbs.get(name) is not verb:
            raise AdapterConflictError(f"adapter {name!r} was unloaded while it was being loaded; load it again")
        del self.verbs[name]
        previous = self.current.get(name)
        version.ref = replace(version.ref, lora_int_id=self._numbers.get(name))
        self.current[name] = self._by_id[version.adapter_id] = version
        self.aliases.pop(name, None)
        return None if previous is None else self._retire(previous)

    def next_version(self, name: str) -> int:
        """One more than any version of `name` that is still there, so that a version number is never ambiguous."""
        known = list(self.draining.get(name, ()))
        if name in self.current:
            known.append(self.current[name])
        return 1 + max((version.ref.adapter_version for version in known), default=0)

    def _check_room(self, name: str) -> None:
        limit, num_loaded = self._max_loaded_loras, len(self.current)
        num_loading = sum(verb.wish is not None and loading not in self.current for loading, verb in self.verbs.items())
        if limit is not None and num_loaded + num_loading >= limit:
            raise AdapterMemoryError(
                f"adapter {name!r} is refused: {num_loaded} adapters are loaded and {num_loading} are being loaded, "
                f"max_loaded_loras is {limit}; unload one, or raise the limit"
            )

    # ------------------------------------------------------------------------------------------------------------- numbers

    def _check_number(self, name: str, lora_int_id: int | None) -> None:
        """A number belongs to one name, and a name has one number."""
        if lora_int_id is None:
            return
        owner = self._numbered.get(lora_int_id, name)
        if owner != name:
            raise AdapterConflictError(
                f"lora_int_id {lora_int_id} belongs to adapter {owner!r}, not to {name!r}; use another number"
            )
        number = self._numbers.get(name, lora_int_id)
        if number != lora_int_id:
            raise AdapterConflictError(f"adapter {name!r} has lora_int_id {number}, not {lora_int_id}; use that number")

    def _adopt(self, version: AdapterVersion, lora_int_id: int | None) -> None:
        """Give a loaded adapter its number if it has none."""
        if lora_int_id is None:
            return
        name = version.ref.adapter_name
        self._bind(name, lora_int_id)
        version.ref = replace(version.ref, lora_int_id=lora_int_id)
        if name in self.verbs:
            self.verbs[name].brought_number = False  # it stays, whatever becomes of that load

    def _bind(self, name: str, lora_int_id: int | None) -> bool:
        if lora_int_id is None or name in self._numbers:
            return False
        self._numbers[name] = lora_int_id
        self._numbered[lora_int_id] = name
        return True

    def _unbind(self, name: str) -> None:
        number = self._numbers.pop(name, None)
        if number is not None:
            del self._numbered[number]

    # ------------------------------------------------------------------------------------------------------ unload, switch

    def remove(self, name: str) -> AdapterVersion | None:
        """The name resolves to nothing from now on, its number is free, and a load of it that is under way is called off.

        None when there was only such a load; raises AdapterNotFoundError when there was nothing.
        """
        verb = self.load_under_way(name)
        version = self.current.get(name) if verb is not None else self.own(name)
        if verb is not None:
            self.call_off(verb)
        self._unbind(name)
        self.aliases.pop(name, None)
        if version is not None:
            del self.current[name]
            self._retire(version)
        return version

    def redirect(self, old: str, version: AdapterVersion) -> Parting | None:
        """Requests for `old`, and for names that were switched to it, go to `version` (its name answers for itself again).

        None when `old` is not loaded; raises AdapterNotFoundError when `version` was unloaded meanwhile.
        """
        new = version.ref.adapter_name
        if self.current.get(new) is not version:
            raise AdapterNotFoundError(f"adapter {new!r} was unloaded while {old!r} was being switched to it")
        self.aliases.pop(new, None)
        version.stay()
        leaving = self.current.get(old)
        if leaving is None:
            return None
        self.aliases.update({name: new for name, target in self.aliases.items() if target == old})
        self.aliases[old] = new
        return leaving.part_with(Farewell.EVICT)

    def is_content_answering(self, version: AdapterVersion) -> bool:
        """Whether what answers for the version's name now has the very same content, so that the two share memory."""
        name = version.ref.adapter_name
        answering = self.current.get(self.aliases.get(name, name))
        return answering is not None and answering.ref.adapter_digest == version.ref.adapter_digest

    def partings(self, name: str) -> tuple[Parting, ...]:
        """Of all versions of `name` that drain."""
        return tuple(version.parting for version in self.draining.get(name, ()) if version.parting is not None)

    def take(self, parting: Parting) -> bool:
        """Whether a farewell is due now; it is the caller's from then on, and nobody else's."""
        version = parting.version
        if version.parting is not parting or version.num_references:
            return False
        version.parting = None
        if parting.farewell is Farewell.DROP:
            self._forget(version)
        return True

    def _retire(self, version: AdapterVersion) -> Parting:
        self.draining.setdefault(version.ref.adapter_name, []).append(version)
        return version.part_with(Farewell.DROP)

    def _forget(self, version: AdapterVersion) -> None:
        del self._by_id[version.adapter_id]
        name = version.ref.adapter_name
        self.draining[name].remove(version)
        if not self.draining[name]:
            del self.draining[name]

    # ---------------------------------------------------------------------------------------------------------- invariants

    def check_integrity(self) -> None:
        current, draining = self.current, [version for versions in self.draining.values() for version in versions]
        ids = [version.adapter_id for version in (*current.values(), *draining)]
        _check(len(ids) == len(set(ids)), "a version is there twice")
        _check(set(ids) == self._by_id.keys(), "the versions by id are not the current and draining ones")
        _check(
            all(name == version.ref.adapter_name for name, version in current.items()), "a name has another's version"
        )
        _check(
            all(version.num_references >= 0 for version in self._by_id.values()), "a count of references is negative"
        )
        _check(all(_is_leaving(version) for version in draining), "a draining version would never be dropped")
        _check(not any(_is_leaving(version) for version in current.values()), "a current version would be dropped")
        _check(self.aliases.keys() <= current.keys(), "an alias has no version of its own")
        _check(not self.aliases.keys() & set(self.aliases.values()), "an alias points to an alias")
        _check({number: name for name, number in self._numbers.items()} == self._numbered, "numbers do not match names")
        _check(self._numbers.keys() <= current.keys() | self.verbs.keys(), "a number has no adapter")
        _check(all(self._is_numbered_right(version) for version in current.values()), "a version has another number")

    def _is_numbered_right(self, version: AdapterVersion) -> bool:
        name = version.ref.adapter_name
        verb = self.verbs.get(name)
        return (verb is not None and verb.brought_number) or version.ref.lora_int_id == self._numbers.get(name)


def _is_leaving(version: AdapterVersion) -> bool:
    return version.parting is not None and version.parting.farewell is Farewell.DROP


def _check(is_fine: bool, what: str) -> None:
    assert is_fine, f"the table of adapter names is broken: {what}"
