"""Which names and numbers there are, what answers for each, and which other versions are kept or still run.

    answering(name)   = current[aliases.resolve(name)]
    answering(name@N) = version N of name itself, current, kept or running; never redirected

An alias is a name that was switched to another: it keeps its own version in `current` (evicted, ready to be switched
back) while requests that name it go elsewhere. An alias never points to an alias. When the adapter that answers is
unloaded, its aliases resolve to nothing: a request is refused rather than served by weights that its operator had
switched away from.

A version that is replaced stays registered (`kept`), so that the name can go back to it, as long as not more than
`max_versions_kept` are: then the one that has not answered for longest is dropped. `history` has what a name answered
with before, switches too.

Single-threaded: it is called under the lock of `SharedTable`, so nothing here may block. No store, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from dataclasses import replace

from loraplex.adapters.registry.adapter_name import address_text, is_one_version, split_address
from loraplex.adapters.registry.adapter_numbers import AdapterNumbers
from loraplex.adapters.registry.aliases import Aliases
from loraplex.adapters.registry.records import Answer, NameChange, NameRecord, NameUsage
from loraplex.adapters.registry.verbs import LoadWish, Verb
from loraplex.adapters.registry.version import AdapterVersion, AfterDrain, PendingDrain
from loraplex.errors import (
    AdapterConflictError,
    AdapterMemoryError,
    AdapterNotFoundError,
    AdapterUnloadedError,
    shown,
)

MAX_OTHERS = 8
"""Other adapters remembered for one name, which may be switched to a new one every hour."""


class AnswerHistory:
    """What each name answered with before what answers now, so that a rollback knows the way back.

    The last to answer stands last, each once:

    v1, v2, rollback             v1 answers   earlier: v2
    switch to `other`            `other`      earlier: v2, v1
    rollback                     v1           earlier: v2, `other`
    """

    def __init__(self) -> None:
        self._earlier: dict[str, tuple[Answer, ...]] = {}

    @property
    def names(self) -> KeysView[str]:
        return self._earlier.keys()

    def of(self, name: str) -> tuple[Answer, ...]:
        return self._earlier.get(name, ())

    def note(self, name: str, before: Answer | None, now: Answer) -> None:
        """`name` answered with `before` (None: it was not there) and answers with `now`."""
        if before is not None and before != now:
            self.put(name, [*(each for each in self.of(name) if each not in (before, now)), before])

    def put(self, name: str, earlier: Iterable[Answer]) -> None:
        answers = tuple(earlier)
        others = [each for each in answers if isinstance(each, str)]
        dropped = others[: max(0, len(others) - MAX_OTHERS)]
        self._earlier[name] = tuple(each for each in answers if each not in dropped)

    def drop_version(self, name: str, number: int) -> None:
        """The name can no longer go back to that version."""
        self.put(name, (each for each in self.of(name) if each != number))

    def forget(self, name: str) -> None:
        self._earlier.pop(name, None)

    def numbers(self, name: str) -> list[int]:
        """Versions of its own among the earlier answers."""
        return [each for each in self.of(name) if isinstance(each, int)]


class NameTable:
    """current: name to its own version; kept: to earlier ones that it may go back to, the last to answer last;
    draining: to those that go with their last request; verbs: to the slow verb that runs on it.
    """

    def __init__(self, max_loaded_loras: int | None, max_versions_kept: int) -> None:
        self._max_loaded_loras = max_loaded_loras
        self.max_versions_kept = max_versions_kept
        self.current: dict[str, AdapterVersion] = {}
        self.kept: dict[str, list[AdapterVersion]] = {}
        self.aliases = Aliases()
        self.history = AnswerHistory()
        self.draining: dict[str, list[AdapterVersion]] = {}
        self.verbs: dict[str, Verb] = {}
        self._by_id: dict[int, AdapterVersion] = {}
        self.numbers = AdapterNumbers()
        self.last_numbers: dict[str, int] = {}
        self._usage: dict[str, NameUsage] = {}
        self._changed: dict[str, None] = {}
        self._used: set[str] = set()

    # --------------------------------------------------------------------------------------------------- look things up

    def answering(self, name: str) -> AdapterVersion:
        """The version that serves requests for `name`, or for `name@N`; raises AdapterNotFoundError."""
        version = self.current.get(self.aliases.resolve(name))
        if version is None and name not in self.current:
            version = self._addressed(name)
        if version is None:
            raise self._not_found(name)
        version.check_ready()
        return version

    def _addressed(self, address: str) -> AdapterVersion | None:
        parts = split_address(address)
        if parts is None:
            return None
        name, number = parts
        return next((version for version in self.versions_of(name) if version.number == number), None)

    def versions_of(self, name: str) -> Iterator[AdapterVersion]:
        """Every version that `name@N` addresses: the current one, the kept ones, those that still run."""
        if name in self.current:
            yield self.current[name]
        yield from reversed(self.kept.get(name, ()))
        yield from (version for version in self.draining.get(name, ()) if not version.is_unloaded)

    def earlier(self, name: str, number: int | None, may_answer: Callable[[str], bool]) -> AdapterVersion:
        """Version `number` of `name`, or (None) what answered for it before what does now, and may: also the adapter
        that the name was switched to. Raises AdapterNotFoundError."""
        self.own(name)
        answers = reversed(self.history.of(name)) if number is None else (number,)
        known = filter(None, (self._registered(name, answer) for answer in answers))
        found = next((each for each in known if may_answer(each.ref.adapter_name)), None)
        if found is None:
            raise self._has_not_kept(name, "an earlier version" if number is None else f"version {number}")
        found.check_ready()
        return found

    def _has_not_kept(self, name: str, what: str) -> AdapterNotFoundError:
        listed = ", ".join(map(str, sorted(version.number for version in self.versions_of(name))))
        text = f"adapter {name!r} has not kept {what}; it has {listed} (max_versions_kept is {self.max_versions_kept})"
        return AdapterNotFoundError(text)

    def _registered(self, name: str, answer: Answer) -> AdapterVersion | None:
        """What `answer` of `name` stands for now; None when that is unloaded, or another name that answers already.

        A name that was switched on meanwhile stands for the adapter that answers for it, unless that is `name` itself.
        """
        if isinstance(answer, int):
            versions = (self.current[name], *self.kept.get(name, ()))
            return next((version for version in versions if version.number == answer), None)
        target = self.aliases.resolve(answer)
        return None if target == self.aliases.get(name) else self.current.get(answer if target == name else target)

    def _answer(self, name: str) -> Answer | None:
        version = self.current.get(name)
        return None if version is None else self.aliases.get(name) or version.number

    def own(self, name: str) -> AdapterVersion:
        """The version loaded under `name` itself, alias or not.

        Raises AdapterNotFoundError, and InvalidRequestError for NAME@N.
        """
        version = self.current.get(name)
        if version is None and self._addressed(name) is not None:
            raise is_one_version(name)
        if version is None:
            raise self._not_found(name)
        return version

    def address_of(self, adapter_id: int) -> str | None:
        """What a client writes for a version now: NAME if that means it, else NAME@N; None: it is not loaded."""
        version = self._by_id.get(adapter_id)
        if version is None:
            return None
        name = version.ref.adapter_name
        return name if self.current.get(self.aliases.resolve(name)) is version else address_text(name, version.number)

    def find(self, adapter_id: int) -> AdapterVersion | None:
        return self._by_id.get(adapter_id)

    def in_use(self, adapter_id: int) -> AdapterVersion:
        """The version behind a reference that is held, current or draining."""
        version = self._by_id.get(adapter_id)
        assert version is not None, f"adapter_id {adapter_id} is not loaded: released once too often?"
        assert version.num_references > 0, f"adapter_id {adapter_id} has no references: released once too often?"
        return version

    def versions(self) -> list[AdapterVersion]:
        """Everything that the store holds: current and kept versions, and those that still run."""
        return list(self._by_id.values())

    def has(self, version: AdapterVersion) -> bool:
        """Whether a version is current, or drains still."""
        return version.adapter_id in self._by_id

    def name_of(self, lora_int_id: int) -> str:
        name = self.numbers.owner(lora_int_id)
        if name is None or name not in self.current:
            raise AdapterNotFoundError(f"no adapter has lora_int_id {lora_int_id}; load one with that number first")
        return name

    def lora_int_ids(self) -> dict[int, str]:
        return {number: name for number, name in self.numbers.items() if name in self.current}

    def _not_found(self, name: str) -> AdapterNotFoundError:
        if name in self.aliases:
            target = self.aliases[name]
            return AdapterNotFoundError(
                f"adapter {name!r} was switched to {target!r}, which is unloaded; "
                f"load {target!r}, or switch or reload {name!r}"
            )
        if self.load_under_way(name) is not None:
            return AdapterNotFoundError(f"adapter {name!r} is still being loaded; try again when its load has ended")
        address = split_address(name)
        if address is not None and address[0] in self.current:
            return self._has_not_kept(address[0], f"version {address[1]}")
        return AdapterNotFoundError(f"adapter {shown(name)} is not loaded; load it first")

    # ------------------------------------------------------------------------------------------------------------- load

    def loaded(self, wish: LoadWish) -> AdapterVersion | None:
        """What answers, when the adapter is there as wished; None when there is something to load.

        Raises AdapterConflictError.
        """
        self.numbers.check(wish.name, wish.lora_int_id)
        version = self.current.get(wish.name)
        if version is None or wish.load_inplace:
            return None
        if version.ref.lora_path != wish.path:
            given = (
                shown(wish.path) if wish.content is None else "what was to be cloned"
            )  # whose path is not its client's
            text = f"adapter {wish.name!r} is loaded from another source than {given}"
            text += "; unload it first, or set load_inplace to replace it"
            raise AdapterConflictError(text, param="path")
        answering = self.answering(wish.name)
        self._adopt(version, wish.lora_int_id)
        return answering

    def found_as_wished(self, wish: LoadWish) -> AdapterVersion | None:
        """As `loaded` finds it, where that changes nothing."""
        version = self.current.get(wish.name)
        if version is None or wish.load_inplace or version.ref.lora_path != wish.path:
            return None
        is_numbered = wish.lora_int_id in (None, self.numbers.of(wish.name))
        return self.answering(wish.name) if is_numbered else None

    def load_under_way(self, name: str) -> Verb | None:
        verb = self.verbs.get(name)
        return verb if verb is not None and verb.wish is not None else None

    def begin_load(self, wish: LoadWish) -> Verb:
        """Keep room and number for a load; raises AdapterMemoryError when `max_loaded_loras` names are taken."""
        assert wish.name not in self.verbs, f"two verbs run on {wish.name!r}"
        if wish.name not in self.current:
            self._check_room(wish.name)
        verb = self.verbs[wish.name] = Verb(wish, brought_number=self.numbers.bind(wish.name, wish.lora_int_id))
        return verb

    def call_off(self, verb: Verb) -> None:
        """A load failed, or is no longer wanted: nothing of it stays."""
        assert verb.wish is not None
        name = verb.wish.name
        if self.verbs.get(name) is verb:
            del self.verbs[name]
            if verb.brought_number:
                self.numbers.unbind(name)
                self.touch(name)

    def publish(self, version: AdapterVersion, verb: Verb) -> tuple[PendingDrain, ...]:
        """The name resolves to `version` from now on; what it replaces, and what is no longer kept, is to drain."""
        name = version.ref.adapter_name
        if self.verbs.get(name) is verb:
            self._check_among_servers(name, verb)
        self._end_load(name, verb)
        previous = self.current.get(name)
        self.history.note(name, self._answer(name), version.number)
        version.ref = replace(version.ref, lora_int_id=self.numbers.of(name))
        self.current[name] = self._by_id[version.adapter_id] = version
        self.aliases.pop(name)
        self.last_numbers[name] = version.number
        usage = self._usage.get(name, NameUsage(name))
        self._usage[name] = replace(usage, num_loads=usage.num_loads + 1)
        self.touch(name)
        return () if previous is None else self._shelve(previous)

    def _check_among_servers(self, name: str, verb: Verb) -> None:
        """A load at another server may have taken the last room, or the number, while this one went on."""
        number, limit = None if verb.wish is None else verb.wish.lora_int_id, self._max_loaded_loras
        if limit is not None and name not in self.current and len(self.current) >= limit:
            raise AdapterMemoryError(
                f"adapter {name!r} is refused: another server has loaded one meanwhile, and max_loaded_loras is "
                f"{limit}; unload one, or raise the limit"
            )
        if number is not None and self.numbers.of(name) != number:
            self.numbers.check(name, number)
            self.numbers.bind(name, number)

    def keep(self, verb: Verb) -> AdapterVersion:
        """A load found what is there already: that stays, answers for itself, and has the number that was wished."""
        assert verb.wish is not None
        name = verb.wish.name
        self._end_load(name, verb)
        version = self.current[name]
        version.ref = replace(version.ref, lora_int_id=self.numbers.of(name))
        self._answer_for_itself(name)
        return version

    def _answer_for_itself(self, name: str) -> None:
        self.history.note(name, self._answer(name), self.current[name].number)
        self.aliases.pop(name)
        self.touch(name)

    def _end_load(self, name: str, verb: Verb) -> None:
        if self.verbs.get(name) is not verb:
            raise AdapterUnloadedError(f"adapter {name!r} was unloaded while it was being loaded; load it again")
        del self.verbs[name]

    def move(self, name: str, version: AdapterVersion) -> tuple[PendingDrain, ...]:
        """`name` answers with `version`, which `earlier` found, from now on; what answered until now is to drain."""
        if version.ref.adapter_name != name:
            return self.redirect(name, version)
        version.cancel_drain()
        previous = self.current[name]
        if version is previous:
            self._answer_for_itself(name)
            return ()
        self.history.note(name, self._answer(name), version.number)
        self.aliases.pop(name)
        self.touch(name)
        self.kept[name].remove(version)
        version.ref = replace(version.ref, lora_int_id=self.numbers.of(name))
        version.is_pinned = previous.is_pinned
        self.current[name] = version
        return self._shelve(previous)

    def next_version(self, name: str) -> int:
        """One more than any version that the name has had, or that still runs, so that no number is ambiguous."""
        numbers = [version.number for version in self.draining.get(name, ())]
        return 1 + max(*numbers, self.last_numbers.get(name, 0), 0)

    def _check_room(self, name: str) -> None:
        limit, num_loaded = self._max_loaded_loras, len(self.current)
        num_loading = sum(verb.wish is not None and loading not in self.current for loading, verb in self.verbs.items())
        if limit is not None and num_loaded + num_loading >= limit:
            raise AdapterMemoryError(
                f"adapter {name!r} is refused: {num_loaded} adapters are loaded and {num_loading} are being loaded, "
                f"max_loaded_loras is {limit}; unload one, or raise the limit"
            )

    def _adopt(self, version: AdapterVersion, lora_int_id: int | None) -> None:
        """Give a loaded adapter its number if it has none."""
        if lora_int_id is None:
            return
        name = version.ref.adapter_name
        if self.numbers.bind(name, lora_int_id):
            self.touch(name)
        version.ref = replace(version.ref, lora_int_id=lora_int_id)
        if name in self.verbs:
            self.verbs[name].brought_number = False  # it stays, even when that load fails

    # --------------------------------------------------------------------------------------------------- unload, switch

    def remove(self, name: str) -> AdapterVersion | None:
        """The name resolves to nothing from now on, its number is free, and a load of it under way is called off.

        None when there was only such a load; raises AdapterNotFoundError when there was nothing.
        """
        verb = self.load_under_way(name)
        version = self.current.get(name) if verb is not None else self.own(name)
        if verb is not None:
            self.call_off(verb)
        self.numbers.unbind(name)
        self.aliases.pop(name)
        if version is None:
            return None
        del self.current[name], self.last_numbers[name], self._usage[name]
        self.history.forget(name)
        for each in (version, *self.kept.pop(name, ())):
            self._retire(each)
        for each in self.draining[name]:
            each.is_unloaded = True
        self.touch(name)
        return version

    def redirect(self, old: str, version: AdapterVersion) -> tuple[PendingDrain, ...]:
        """Requests for `old`, and for names switched to it, go to `version` (its name answers for itself again).

        What `old` answered with is to drain; nothing, when it is not loaded. Raises AdapterNotFoundError when `version`
        was unloaded meanwhile.
        """
        new = version.ref.adapter_name
        if self.current.get(new) is not version:
            raise AdapterNotFoundError(f"adapter {new!r} was unloaded while {old!r} was being switched to it")
        if new in self.aliases:
            self._answer_for_itself(new)
        version.cancel_drain()
        leaving = self.current.get(old)
        if leaving is None:
            return ()
        for name in (old, *self.aliases.of(old)):
            self.history.note(name, self._answer(name), new)
            self.aliases[name] = new
            self.touch(name)
        return (leaving.start_drain(AfterDrain.EVICT),)

    def is_content_answering(self, version: AdapterVersion) -> bool:
        """Whether what answers for the version's name now has the very same content, so that the two share memory."""
        name = version.ref.adapter_name
        answering = self.current.get(self.aliases.resolve(name))
        return answering is not None and answering.ref.adapter_digest == version.ref.adapter_digest

    def is_content_named(self, version: AdapterVersion) -> bool:
        """Whether another name has the very same content, so that the two share memory."""
        digest = version.ref.adapter_digest
        return any(each.ref.adapter_digest == digest for each in self.current.values() if each is not version)

    def pending_drains(self, name: str) -> tuple[PendingDrain, ...]:
        """Of all versions of `name` that drain."""
        return tuple(each.pending_drain for each in self.draining.get(name, ()) if each.pending_drain is not None)

    def take(self, drain: PendingDrain) -> bool:
        """Whether a drain is complete and no other thread took it; the caller carries out what is due."""
        version = drain.version
        if version.pending_drain is not drain or version.num_references:
            return False
        version.pending_drain = None
        if drain.then is AfterDrain.DROP:
            self._forget(version)
        return True

    def _shelve(self, version: AdapterVersion) -> tuple[PendingDrain, ...]:
        """Keep a version that was replaced, and drop those that are too many then.

        Its pin has passed to the new one.
        """
        version.is_pinned = False
        name = version.ref.adapter_name
        kept = [*self.kept.pop(name, ()), version]
        num_over = max(0, len(kept) - (self.max_versions_kept - 1))
        if kept[num_over:]:
            self.kept[name] = kept[num_over:]
        for each in kept[:num_over]:
            self.history.drop_version(name, each.number)
        dropped = [self._retire(each) for each in kept[:num_over]]
        return (*dropped, *([] if num_over == len(kept) else [version.start_drain(AfterDrain.SHELVE)]))

    def _retire(self, version: AdapterVersion) -> PendingDrain:
        self.draining.setdefault(version.ref.adapter_name, []).append(version)
        return version.start_drain(AfterDrain.DROP)

    def _forget(self, version: AdapterVersion) -> None:
        del self._by_id[version.adapter_id]
        name = version.ref.adapter_name
        self.draining[name].remove(version)
        if not self.draining[name]:
            del self.draining[name]

    # ------------------------------------------------------------------------------------------------ usage and records

    def use(self, version: AdapterVersion, now: float) -> None:
        """One more request."""
        version.num_references += 1
        version.last_used_time = now
        name = version.ref.adapter_name
        usage = self._usage.get(name)
        if usage is not None and not version.is_unloaded:
            self._usage[name] = NameUsage(name, usage.num_loads, usage.num_requests + 1, now)
            self._used.add(name)

    def usage(self, name: str) -> NameUsage:
        return self._usage.get(name, NameUsage(name))

    def take_usage(self) -> list[NameUsage]:
        """The counters that changed since the last call."""
        used, self._used = self._used, set()
        return [self._usage[name] for name in used if name in self._usage]

    def touch(self, name: str) -> None:
        """What the journal has of `name` is out of date."""
        self._changed[name] = None

    def take_changed(self) -> tuple[str, ...]:
        names = tuple(self._changed)
        self._changed.clear()
        return names

    def change_of(self, name: str) -> NameChange:
        version = self.current.get(name)
        if version is None:
            return NameChange(name, None)
        versions = (version, *reversed(self.kept.get(name, ())))
        records = tuple(each.record() for each in versions)
        number, alias_of = self.numbers.of(name), self.aliases.get(name)
        last_number, history = self.last_numbers[name], self.history.of(name)
        return NameChange(name, NameRecord(number, alias_of, last_number, records, self.usage(name), history))

    def restore(self, name: str, record: NameRecord) -> None:
        """Put back what a journal has of a name, as far as that many versions are kept now.

        The table must not have it.
        """
        versions = record.versions[: self.max_versions_kept]
        self._put(name, record, [AdapterVersion.from_record(name, each, record) for each in versions])
        self._usage[name] = record.usage

    def _put(self, name: str, record: NameRecord, versions: Sequence[AdapterVersion]) -> None:
        current, *kept = versions
        self.current[name] = current
        if kept:
            self.kept[name] = kept[::-1]
        for version in (current, *kept):
            self._by_id[version.adapter_id] = version
        self.numbers.bind(name, record.lora_int_id)
        if record.alias_of is not None:
            self.aliases[name] = record.alias_of
        own = [each.number for each in (*kept[::-1], *(() if record.alias_of is None else (current,)))]
        known = [each for each in record.history if isinstance(each, str) or each in own]
        self.history.put(name, (*(each for each in own if each not in known), *known))
        self.last_numbers[name] = record.last_number

    # ------------------------------------------------------------------------------------------- what other servers did

    def follow(self, name: str, record: NameRecord | None, versions: Sequence[AdapterVersion]) -> None:
        """Make a name what another server made it; what it no longer has is to drain.

        versions: of the record, as many as are kept; those that the table has are the same objects.
        """
        if record is None:
            self._follow_unload(name)
            return
        current_before, alias_before = self.current.get(name), self.aliases.pop(name)
        had = [*filter(None, [current_before]), *self.kept.get(name, ())]
        usage = self._usage.get(name, record.usage)
        self.kept.pop(name, None)
        self.numbers.unbind(name)
        owner = None if record.lora_int_id is None else self.numbers.owner(record.lora_int_id)
        if owner is not None:
            self.numbers.unbind(owner)  # of a load under way here, which is refused when it ends
        for each in versions:
            self._revive(each)
        for each in had:
            if each not in versions:
                self._retire(each)
        self._drop_again(name)
        self._put(name, record, versions)
        for each, new in zip(versions, record.versions, strict=False):
            each.is_pinned = new.is_pinned
            each.ref = replace(each.ref, lora_int_id=record.lora_int_id)
        current, *kept = versions
        if record.alias_of is None:
            current.cancel_drain()
        elif current is not current_before or record.alias_of != alias_before:
            current.start_drain(AfterDrain.EVICT)
        if current_before in kept:
            current_before.start_drain(AfterDrain.SHELVE)
        last_used = max(usage.last_used_time, record.usage.last_used_time)
        self._usage[name] = replace(usage, num_loads=record.usage.num_loads, last_used_time=last_used)

    def _follow_unload(self, name: str) -> None:
        if name in self.current:
            self.remove(name)
            self._changed.pop(name, None)
        for each in self.draining.get(name, ()):
            each.is_unloaded = True
        self._drop_again(name)

    def _drop_again(self, name: str) -> None:
        """What `call_off_drains` kept, and the servers do not have."""
        for each in self.draining.get(name, ()):
            if each.pending_drain is None:
                each.start_drain(AfterDrain.DROP)

    def _revive(self, version: AdapterVersion) -> None:
        """A version was unloaded here, and still is what the servers have."""
        name = version.ref.adapter_name
        if version in self.draining.get(name, ()):
            version.cancel_drain()
            version.is_unloaded = False
            self.draining[name].remove(version)
            if not self.draining[name]:
                del self.draining[name]

    def call_off_drains(self, names: Iterable[str]) -> None:
        """It is not known whether a verb on these names took effect: nothing of theirs is dropped until it is."""
        for name in names:
            for version in (*self.versions_of(name), *self.draining.get(name, ())):
                version.cancel_drain()
