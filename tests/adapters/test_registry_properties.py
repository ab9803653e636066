"""Any sequence of verbs and requests against a model of what the names mean, on a store that may fail at any call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from loraplex.adapters.registry import LoadStatus, LoRARef, NameRecord, NameUsage
from loraplex.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterMemoryError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterTooLargeError,
)
from tests.adapters.fake_store import Bench, FakeStore, MemoryJournal

NAMES = st.sampled_from("abcd")
PATHS = st.sampled_from(["/x", "/y"])
NUMBERS = st.sampled_from([None, None, 1, 2])
VERSIONS = st.sampled_from([None, 1, 2, 3, 4])
MAX_LOADED = 3
MAX_KEPT = 3


@dataclass
class Named:
    """What the model knows of one name."""

    ref: LoRARef
    path: str
    digest: str
    number: int | None
    is_pinned: bool
    is_on_device: bool = False
    is_leaving: bool = False
    alias_of: str | None = None
    kept: list[tuple[LoRARef, str, str]] = field(default_factory=list)
    answers: list[int | str] = field(default_factory=list)
    """All that it ever answered with: versions of its own, names that it was switched to."""

    @property
    def answer(self) -> int | str:
        return self.alias_of or self.ref.adapter_version

    def keep(self, version: tuple[LoRARef, str, str]) -> None:
        """One more that a rollback can go back to; the eldest goes when they are too many."""
        self.kept = [*self.kept, version][1 - MAX_KEPT :]

    @property
    def version(self) -> tuple[LoRARef, str, str]:
        return self.ref, self.path, self.digest


@dataclass
class Model:
    names: dict[str, Named] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=lambda: {"/x": "x0", "/y": "y0"})

    def answering(self, name: str) -> Named | None:
        own = self.names.get(name)
        return None if own is None else self.names.get(own.alias_of or name)

    def earlier(self, name: str) -> int | str | None:
        """The last answer that there is still, and that is another than now."""
        named = self.names[name]
        for answer in reversed(named.answers):
            if isinstance(answer, int):
                if answer != named.answer and answer in {
                    ref.adapter_version for ref, _, _ in (named.version, *named.kept)
                }:
                    return answer
                continue
            target = self.names[answer].alias_of or answer if answer in self.names else answer
            other = answer if target == name else target
            if target != named.alias_of and other in self.names:
                return other
        return None

    def note_answers(self) -> None:
        for named in self.names.values():
            if named.answers[-1:] != [named.answer]:
                named.answers.append(named.answer)

    def redirect(self, old: str, new: str) -> None:
        self.names[new].alias_of = None
        self.names[new].is_leaving = False
        if old in self.names:
            for named in self.names.values():
                named.alias_of = new if named.alias_of == old else named.alias_of
            self.names[old].alias_of = new
            self.names[old].is_leaving = True

    def refusal(self, name: str, path: str, number: int | None, load_inplace: bool) -> type[AdapterError] | None:
        owner = next(
            (other for other, named in self.names.items() if number is not None and named.number == number), name
        )
        named = self.names.get(name)
        if owner != name:
            return AdapterConflictError
        if named is None:
            return AdapterMemoryError if len(self.names) >= MAX_LOADED else None
        if None not in (number, named.number) and number != named.number:
            return AdapterConflictError
        if not load_inplace and named.path != path:
            return AdapterConflictError
        if not load_inplace and self.answering(name) is None:
            return AdapterNotFoundError
        return None


class RegistryMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.journal = MemoryJournal()
        self.bench = Bench(max_loaded_loras=MAX_LOADED, max_versions_kept=MAX_KEPT, journal=self.journal)
        self.bench.forbid_calls_under_lock()
        self.registry = self.bench.registry
        self.model = Model()
        self.bench.sources.digests = self.model.digests
        self.held_refs: list[LoRARef] = []
        self.known_ids: set[int] = set()

    def is_in_use(self, named: Named) -> bool:
        return any(ref.adapter_id == named.ref.adapter_id for ref in self.held_refs)

    @invariant()
    def answers_are_remembered(self) -> None:
        self.model.note_answers()

    # ------------------------------------------------------------------------------------------------------------ verbs

    @initialize(names=st.sets(NAMES, max_size=MAX_LOADED))
    def begin(self, names: set[str]) -> None:
        for name in sorted(names):
            self.load(name, "/x", None, False, False)

    @rule(name=NAMES, path=PATHS, number=NUMBERS, load_inplace=st.booleans(), is_pinned=st.booleans())
    def load(self, name: str, path: str, number: int | None, load_inplace: bool, is_pinned: bool) -> None:
        load = partial(
            self.registry.load, name, path, lora_int_id=number, load_inplace=load_inplace, is_pinned=is_pinned
        )
        refusal = self.model.refusal(name, path, number, load_inplace)
        if refusal is not None:
            with pytest.raises(refusal):
                load()
            return
        result, known = load(), self.model.names.get(name)
        if known is not None and not load_inplace:
            answering = self.model.answering(name)
            assert answering is not None
            assert result.status is LoadStatus.ALREADY_LOADED
            known.number = known.number or number
            answering.is_pinned |= is_pinned
            answering.is_on_device |= is_pinned
            return
        assert result.status is (LoadStatus.LOADED if known is None else LoadStatus.RELOADED)
        assert result.ref.adapter_id not in self.known_ids
        self.known_ids.add(result.ref.adapter_id)
        number = number if known is None else number or known.number
        is_pinned |= known is not None and known.is_pinned
        digest = self.model.digests[path]
        self.model.names[name] = named = Named(result.ref, path, digest, number, is_pinned, is_on_device=is_pinned)
        if known is not None:
            assert result.ref.adapter_version > max(ref.adapter_version for ref, _, _ in (known.version, *known.kept))
            named.kept, named.answers = known.kept, known.answers
            named.keep(known.version)

    @rule(name=NAMES, number=VERSIONS, fails=st.booleans())
    def move(self, name: str, number: int | None, fails: bool) -> None:
        named = self.model.names.get(name)
        versions = {} if named is None else {each[0].adapter_version: each for each in (*named.kept, named.version)}
        if number is None and named is not None:
            earlier = self.model.earlier(name)
            if isinstance(earlier, str):
                self.roll_back_to_adapter(name, earlier, fails)
                return
            asked, number = None, earlier
        else:
            asked = number
        if named is None or number not in versions:
            with pytest.raises(AdapterNotFoundError):
                self.registry.move(name, asked)
            return
        chosen = versions[number]
        is_there = chosen == named.version
        if is_there and named.alias_of is None:
            assert self.registry.move(name, asked).status is LoadStatus.ALREADY_LOADED
            return
        if fails:
            self.bench.store.faults.errors["promote"] = AdapterTooLargeError("injected")
            self.bench.store.faults.errors["pin"] = AdapterTooLargeError("injected")
            with pytest.raises(AdapterTooLargeError, match="injected"):
                self.registry.move(name, asked)
            self.bench.store.faults.errors.clear()
            return
        result = self.registry.move(name, asked)
        assert (result.status, result.ref.adapter_id) == (LoadStatus.MOVED, chosen[0].adapter_id)
        if not is_there:
            named.kept.remove(chosen)
            named.keep(named.version)
            named.ref, named.path, named.digest = chosen
        named.alias_of, named.is_leaving, named.is_on_device = None, False, True

    def roll_back_to_adapter(self, name: str, other: str, fails: bool) -> None:
        if fails:
            self.bench.store.faults.errors["promote"] = AdapterTooLargeError("injected")
            with pytest.raises(AdapterTooLargeError, match="injected"):
                self.registry.move(name)
            return
        result = self.registry.move(name)
        assert (result.status, result.ref.adapter_id) == (LoadStatus.MOVED, self.model.names[other].ref.adapter_id)
        self.model.redirect(name, other)
        self.model.names[other].is_on_device = True
        self.see_off_if_idle(name)

    @rule(name=NAMES, path=PATHS, load_inplace=st.booleans(), verb=st.sampled_from(["open", "add", "pin"]))
    def load_that_fails(self, name: str, path: str, load_inplace: bool, verb: str) -> None:
        """Nothing changes, whatever was there."""
        known = self.model.names.get(name)
        if self.model.refusal(name, path, None, load_inplace) or (known is not None and not load_inplace):
            return
        faults = self.bench.sources.faults if verb == "open" else self.bench.store.faults
        faults.errors[verb] = AdapterNoRoomError("injected")
        with pytest.raises(AdapterNoRoomError, match="injected"):
            self.registry.load(name, path, load_inplace=load_inplace, is_pinned=True)

    @rule(path=PATHS, number=st.integers(1, 3))
    def change_content(self, path: str, number: int) -> None:
        self.model.digests[path] = f"{path[1]}{number}"

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        named = self.model.names.pop(name, None)
        if named is None:
            with pytest.raises(AdapterNotFoundError):
                self.registry.unload(name)
            return
        result = self.registry.unload(name)
        assert result.ref is not None
        assert result.ref.adapter_id == named.ref.adapter_id

    @rule(pair=st.sampled_from(list(permutations("abcd", 2))), fails=st.booleans())
    def switch(self, pair: tuple[str, str], fails: bool) -> None:
        old, new = pair
        if new not in self.model.names:
            with pytest.raises(AdapterNotFoundError):
                self.registry.switch(old, new)
        elif fails:
            self.bench.store.faults.errors["promote"] = AdapterTooLargeError("injected")
            with pytest.raises(AdapterTooLargeError, match="injected"):
                self.registry.switch(old, new)
        else:
            assert self.registry.switch(old, new).ref.adapter_name == new
            self.model.redirect(old, new)
            self.model.names[new].is_on_device = True
            self.see_off_if_idle(old)

    def see_off_if_idle(self, name: str) -> None:
        """What was switched away leaves the device when idle, unless what answers has the very same content."""
        named = self.model.names.get(name)
        if named is not None and named.is_leaving and not self.is_in_use(named):
            answering = self.model.answering(name)
            is_shared = answering is not None and answering.digest == named.digest
            named.is_pinned = named.is_leaving = False
            named.is_on_device &= is_shared

    @rule(name=NAMES, verb=st.sampled_from(["pin", "unpin", "evict", "preload"]))
    def change_residency(self, name: str, verb: str) -> None:
        answering = self.model.answering(name)
        method = getattr(self.registry, verb)
        if answering is None:
            with pytest.raises(AdapterNotFoundError):
                method(name)
            return
        method(name)
        if verb != "preload":
            answering.is_pinned = verb == "pin"
        if verb != "unpin":
            answering.is_on_device = verb != "evict"

    @rule()
    def start_the_server_again(self) -> None:
        """A new registry on the same records: all is as it was, but that nothing runs."""
        for ref in self.held_refs:
            self.registry.release(ref)
        self.held_refs.clear()
        self.run_jobs()
        self.bench.store = FakeStore()
        self.bench.__post_init__()
        self.bench.forbid_calls_under_lock()
        self.registry = self.bench.registry
        self.registry.resume(self.journal.names, self.journal.last_adapter_id)
        assert self.bench.store.count("add") == 0
        self.bench.run_jobs()
        for named in self.model.names.values():
            named.is_on_device = named.is_pinned
            named.is_leaving = False

    @rule()
    def start_the_engine_again(self) -> None:
        self.run_jobs()
        self.bench.store.start_again()
        self.registry.restore()
        self.bench.run_jobs()
        for named in self.model.names.values():
            named.is_on_device = named.is_pinned

    # --------------------------------------------------------------------------------------------------------- requests

    @rule(target=held, name=NAMES)
    def acquire(self, name: str) -> LoRARef | MultipleResults[LoRARef]:
        answering = self.model.answering(name)
        if answering is None:
            with pytest.raises(AdapterNotFoundError):
                self.registry.acquire(name)
            return multiple()
        ref = self.registry.acquire(name)
        assert (ref.adapter_id, ref.adapter_digest) == (answering.ref.adapter_id, answering.digest)
        self.held_refs.append(ref)
        return ref

    @rule(target=held, name=NAMES, number=st.integers(1, 5))
    def acquire_version(self, name: str, number: int) -> LoRARef | MultipleResults[LoRARef]:
        """What is current or kept is there; others may still run, but never after an unload."""
        named = self.model.names.get(name)
        versions = [] if named is None else [each[0] for each in (*named.kept, named.version)]
        expected = [ref.adapter_id for ref in versions if ref.adapter_version == number]
        try:
            ref = self.registry.acquire(f"{name}@{number}")
        except AdapterNotFoundError:
            assert not expected
            return multiple()
        assert (ref.adapter_name, ref.adapter_version) == (name, number)
        assert named is not None
        assert not expected or expected == [ref.adapter_id]
        self.held_refs.append(ref)
        return ref

    @rule(ref=consumes(held))
    def release(self, ref: LoRARef) -> None:
        if ref not in self.held_refs:
            return  # it ended with the server
        self.held_refs.remove(ref)
        self.registry.release(ref)

    @rule()
    def run_jobs(self) -> None:
        self.bench.run_jobs()
        for name in self.model.names:
            self.see_off_if_idle(name)

    # ------------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def names_and_numbers_mean_what_they_should(self) -> None:
        self.registry.check_integrity()
        answering = {name: self.model.answering(name) for name in self.model.names}
        expected = {name: named.digest for name, named in answering.items() if named is not None}
        assert {name: ref.adapter_digest for name, ref in self.registry.refs().items()} == expected
        numbers = {named.number: name for name, named in self.model.names.items() if named.number is not None}
        assert self.registry.lora_int_ids() == numbers
        assert self.registry.num_references == len(self.held_refs)

    @invariant()
    def the_store_holds_what_is_named_or_in_use(self) -> None:
        if self.bench.jobs:
            return  # a drain is under way
        named_ids = {ref.adapter_id for each in self.model.names.values() for ref, _, _ in (each.version, *each.kept)}
        in_use_ids = {ref.adapter_id for ref in self.held_refs}
        assert named_ids <= set(self.bench.store.adapters) <= named_ids | in_use_ids
        assert {spec.adapter_id for spec in self.registry.specs()} == named_ids | in_use_ids

    @invariant()
    def aliases_pins_and_tiers_are_told(self) -> None:
        infos = {info.ref.adapter_name: info for info in self.registry.list_adapters()}
        assert infos.keys() == self.model.names.keys()
        for name, named in self.model.names.items():
            assert (infos[name].alias_of, infos[name].is_pinned) == (named.alias_of, named.is_pinned)
            assert named.is_pinned == (named.ref.adapter_id in self.bench.store.pinned())
            assert named.is_on_device == (named.ref.adapter_id in self.bench.store.on_device())

    @invariant()
    def the_journal_has_it_all(self) -> None:
        table = self.registry._table
        records = {name: table.change_of(name).record for name in self.model.names}
        assert {name: _timeless(record) for name, record in self.journal.names.items()} == {
            name: _timeless(record) for name, record in records.items() if record is not None
        }

    def teardown(self) -> None:
        for ref in self.held_refs:
            self.registry.release(ref)
        self.bench.check_idle()
        for name in self.model.names:
            self.registry.unload(name)
        assert self.bench.store.adapters == {}


def _timeless(record: NameRecord) -> NameRecord:
    """Without the counters, which are written now and then."""
    return replace(record, usage=NameUsage(record.usage.name))


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
