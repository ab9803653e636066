"""Any sequence of verbs and requests against a model of what the names mean, on a store that may fail at any call."""

from __future__ import annotations

from dataclasses import dataclass, field
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

from loraplex.adapters.registry import LoadStatus, LoRARef
from loraplex.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterMemoryError,
    AdapterNoRoomError,
    AdapterNotFoundError,
    AdapterTooLargeError,
)
from tests.adapters.fake_store import Bench

NAMES = st.sampled_from("abcd")
PATHS = st.sampled_from(["/x", "/y"])
NUMBERS = st.sampled_from([None, None, 1, 2])
MAX_LOADED = 3


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


@dataclass
class Model:
    names: dict[str, Named] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=lambda: {"/x": "x0", "/y": "y0"})

    def answering(self, name: str) -> Named | None:
        own = self.names.get(name)
        return None if own is None else self.names.get(own.alias_of or name)

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
        self.bench = Bench(max_loaded_loras=MAX_LOADED)
        self.bench.forbid_calls_under_lock()
        self.registry = self.bench.registry
        self.model = Model()
        self.bench.sources.digests = self.model.digests
        self.held_refs: list[LoRARef] = []
        self.known_ids: set[int] = set()

    def is_in_use(self, named: Named) -> bool:
        return any(ref.adapter_id == named.ref.adapter_id for ref in self.held_refs)

    # ------------------------------------------------------------------------------------------------------------- verbs

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
        self.model.names[name] = Named(result.ref, path, digest, number, is_pinned, is_on_device=is_pinned)

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
    def start_the_engine_again(self) -> None:
        self.run_jobs()
        self.bench.store.start_again()
        self.registry.restore()
        self.bench.run_jobs()
        for named in self.model.names.values():
            named.is_on_device = named.is_pinned

    # ---------------------------------------------------------------------------------------------------------- requests

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

    @rule(ref=consumes(held))
    def release(self, ref: LoRARef) -> None:
        self.held_refs.remove(ref)
        self.registry.release(ref)

    @rule()
    def run_jobs(self) -> None:
        self.bench.run_jobs()
        for name in self.model.names:
            self.see_off_if_idle(name)

    # --------------------------------------------------------------------------------------------------------- invariants

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
            return  # a farewell is under way
        named_ids = {named.ref.adapter_id for named in self.model.names.values()}
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

    def teardown(self) -> None:
        for ref in self.held_refs:
            self.registry.release(ref)
        self.bench.check_idle()
        for name in self.model.names:
            self.registry.unload(name)
        assert self.bench.store.adapters == {}


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
