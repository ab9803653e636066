"""Adapters that give wrong results or lie in damaged memory: quarantined, restored, served again.

    odd result -> in doubt, in its turn diagnosed where it lies --(answers rightly)--> no doubt
                                                      `--(wrong)--> quarantined
    quarantined, read again, diagnosed at once --(answers rightly)--> served again
                  ^                        `--(still wrong)--> quarantined for 5, 10, 20, 40, 80 s,
                                                               then until it is loaded again

A doubt ends no request: what one prompt makes of an adapter says little about the others, and may be done on purpose.
Cases are kept by content digest: two names with one content are ill together.

The engine calls this between steps. It ends the requests of the adapters that it is told to end, and runs the
diagnoses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from loraplex.core import Tier
from loraplex.errors import AdapterFaultError, LoraplexError
from loraplex.events import EventKind
from loraplex.memory.care.damage import DamageControl, Residents, damage_error
from loraplex.memory.residency.records import StoredWeights
from loraplex.memory.residency.tiers import Tiers
from loraplex.memory.stats import MemoryLog
from loraplex.memory.weights.loading import Loader

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class AdapterHealth:
    """Thread-safe. let_damaged_go_locked: lets copies whose bytes have changed go (Transfers.let_damaged_go_locked)."""

    _residents: Residents
    _tiers: Tiers
    _damage: DamageControl
    _loader: Loader
    _log: MemoryLog
    _recovery: Recovery
    _let_damaged_go_locked: Callable[[StoredWeights], None]
    _last_scrubbed: str = ""
    _ahead_bytes: int = 0
    _is_scrubbing: bool = False

    # ------------------------------------------------------------------------------------------------- wrong results

    def quarantine(self, adapter_id: int, reason: str) -> list[int]:
        """Serve a content no more until a diagnosis clears it; returns its adapters, whose requests must end."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is None:
                return []
            if self._recovery.open(weights.digest, reason):
                self._log.counters.num_quarantined += 1
                self._residents.suspect_locked(weights)
                self._log.tell(EventKind.FAULT, weights, f"is quarantined: {reason}", cause="results")
            return list(weights.adapters)

    def doubt(self, adapter_id: int) -> None:
        """A result of this adapter was odd. It is served on; `next_doubt` tells when to look at it."""
        self._note(adapter_id, self._recovery.doubt)

    def next_doubt(self) -> int | None:
        """An adapter of a content in doubt, to be looked at now (`scrub_one`, `lent`); None until one is due.

        The content that waits longest; the others of its tenants wait behind those of all other tenants then.
        """
        with self._residents.held():
            contents, due = self._residents.contents_locked(), self._recovery.due_doubts()
            for digest in due:
                weights = contents.get(digest)
                if weights is None or not weights.adapters or not weights.is_on_device:
                    self._recovery.trust(digest)
                elif weights.is_at_rest:
                    tenants = weights.tenants
                    theirs = {each for each in due if each in contents and contents[each].tenants & tenants}
                    self._recovery.look(digest, theirs)
                    return next(iter(weights.adapters))
            return None

    def refusal(self, adapter_id: int) -> AdapterFaultError | None:
        """The error for a request of a quarantined adapter; None for one that is well or unknown."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is None:
                return None
            return self._recovery.refusal(weights.digest, weights.adapters[adapter_id].name)

    def quarantined(self) -> dict[int, str]:
        """adapter_id -> why."""
        with self._residents.held():
            cases = {case.digest: self._recovery.state_of(case.digest) for case in self._recovery}
            return {
                adapter_id: text
                for adapter_id, adapter in self._residents.known_locked().items()
                if (text := cases.get(adapter.weights.digest)) is not None
            }

    @property
    def is_diagnosis_due(self) -> bool:
        """Whether `next_diagnosis` has something to do."""
        return self._recovery.is_due

    def next_diagnosis(self) -> int | None:
        """An adapter whose diagnosis is due, its copies in memory gone: what is diagnosed is read again.

        From the second try on copies on disk or compressed are not trusted either. Cases of contents that are gone are
        closed.
        """
        with self._residents.held():
            contents = self._residents.contents_locked()
            for gone in [case.digest for case in self._recovery if case.digest not in contents]:
                self._recovery.close(gone)
            case = self._recovery.due()
            if case is None:
                return None
            weights = contents[case.digest]
            if not weights.adapters or weights.num_running or not weights.is_at_rest:
                self._recovery.postpone(case.digest)
                return None
            self._residents.leave_locked(weights, Tier.DISK if case.num_tries > 1 else Tier.HOST)
            weights.is_restoring = weights.num_pinned > 0
            return next(iter(weights.adapters))

    def borrowed(self, is_wanted: Callable[[str], bool]) -> AbstractContextManager[tuple[str, int] | None]:
        """(digest, lora_slot) of an adapter that stays on the device within the block; None: none `is_wanted`.

        It counts as no use: the order of eviction and the hit rate stay as they are.
        """
        return self._lend(lambda weights: self._is_lendable(weights, is_wanted))

    def lent(self, adapter_id: int) -> AbstractContextManager[tuple[str, int] | None]:
        """`borrowed` of one adapter, whatever runs on it; None when it is not on the device."""
        return self._lend(lambda weights: adapter_id in weights.adapters and weights.is_on_device)

    @contextmanager
    def _lend(self, is_meant: Callable[[StoredWeights], bool]) -> Iterator[tuple[str, int] | None]:
        with self._residents.held():
            found = next(filter(is_meant, self._residents.contents_locked().values()), None)
            adapter = None if found is None else next(iter(found.adapters.values()))
            if found is not None and adapter is not None:
                adapter.count_running(1)
                found.is_lent = True
        try:
            if found is None or found.lora_slot is None:
                yield None
            else:
                yield found.digest, found.lora_slot
        finally:
            if found is not None and adapter is not None:
                with self._residents.held():
                    found.is_lent = False
                    self._residents.release_locked(adapter)

    def _is_lendable(self, weights: StoredWeights, is_wanted: Callable[[str], bool]) -> bool:
        is_there = weights.is_on_device and weights.is_at_rest and bool(weights.adapters) and weights.num_running == 0
        is_well = self._recovery.state_of(weights.digest) is None
        has_home = not any(adapter.is_removed for adapter in weights.adapters.values())
        return is_there and is_well and has_home and is_wanted(weights.digest)

    def cleared(self, adapter_id: int) -> None:
        """The diagnosis found the adapter well."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is not None and self._recovery.close(weights.digest) is not None:
                self._log.counters.num_recovered += 1
                self._log.tell(EventKind.RECOVERY, weights, "answers rightly and is served again")

    def postpone(self, adapter_id: int) -> None:
        """The diagnosis could not be made: it is due again soon."""
        self._note(adapter_id, self._recovery.postpone)

    def still_ill(self, adapter_id: int, reason: str) -> None:
        """The diagnosis failed; the next one is later, or never."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is not None:
                self._recovery.failed(weights.digest, reason)
                state = self._recovery.state_of(weights.digest)
                self._log.tell(EventKind.FAULT, weights, f"is {state}", cause="diagnosis")

    # ------------------------------------------------------------------------------------------------ damaged memory

    def scrub(self, max_bytes: int) -> dict[int, str]:
        """Check about `max_bytes` of weights, after those checked last; ids and names of adapters on damaged ones.

        Weights are checked whole: what was beyond `max_bytes` is taken off the next calls.

        What is idle is let go at once. The others go by `restore`, once their requests have ended. Where copies are
        asynchronous a loader's thread does it beside the steps, and those that run are told by `take_faults`.
        """
        with self._residents.held():
            if self._is_scrubbing:
                return {}
            chosen = self._after_last_locked(max_bytes - self._ahead_bytes)
            self._ahead_bytes = max(0, self._ahead_bytes + sum(weights.nbytes for weights in chosen) - max_bytes)
            for weights in chosen:
                self._last_scrubbed = weights.digest
            return self._scrub_locked(chosen)

    def scrub_one(self, adapter_id: int) -> dict[int, str]:
        """As `scrub`, of one adapter at once; not while others are checked beside the steps."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            is_free = weights is not None and weights.is_at_rest and not self._is_scrubbing
            return self._scrub_locked([weights]) if weights is not None and is_free else {}

    def _scrub_locked(self, chosen: list[StoredWeights]) -> dict[int, str]:
        in_use: dict[int, str] = {}
        self._log.counters.scrubbed_bytes += sum(weights.nbytes for weights in chosen)
        if self._tiers.copies.is_asynchronous:
            self._scrub_beside_locked(chosen)
            return {}
        for weights in chosen:
            if any(self._tiers.changed(weights, tier) for tier in self._tiers.in_memory):
                in_use |= self._discard_or_name_locked(weights)
        return in_use

    def _scrub_beside_locked(self, chosen: list[StoredWeights]) -> None:
        """What comes nearer meanwhile is not looked at: only tiers that have the weights now."""
        self._is_scrubbing = True
        found = [
            (each, [tier for tier in self._tiers.in_memory if self._tiers.place_of(each, tier) is not None])
            for each in chosen
        ]
        for weights in chosen:
            weights.num_readers += 1
        self._loader.submit(partial(self._check_all, found))

    def _check_all(self, found: list[tuple[StoredWeights, list[Tier]]]) -> None:
        """Without the lock, in a loader's thread: they neither move nor leave as long as they are read."""
        try:
            for weights, tiers in found:
                is_damaged = False
                try:
                    is_damaged = any(self._tiers.changed(weights, tier) for tier in tiers)
                except Exception as error:  # of the device, or no memory for it: nothing is known of the weights
                    _log.warning("weights in memory could not be checked: %r", error)
                    self._damage.look_for_loss(error)
                with self._residents.held():
                    self._residents.end_reading_locked(weights)
                    if is_damaged and weights.adapters and self._discard_or_name_locked(weights):
                        self._damage.spoil_locked(weights, damage_error(next(iter(weights.adapters.values())).name))
        finally:
            self._is_scrubbing = False

    def take_faults(self) -> dict[int, LoraplexError]:
        """Adapters whose requests must end, whose weights are damaged or did not arrive; `restore` them then."""
        return self._damage.take_faults()

    def restore(self, adapter_id: int) -> None:
        """Let the damaged copies of an adapter go, now that its requests have ended."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is not None and weights.is_at_rest and not weights.num_running:
                self._discard_or_name_locked(weights)

    def _after_last_locked(self, max_bytes: int) -> list[StoredWeights]:
        contents = self._residents.contents_locked().values()
        chosen: list[StoredWeights] = []
        for each in sorted(contents, key=lambda each: (each.digest <= self._last_scrubbed, each.digest)):
            is_resident = each.host is not None or each.device is not None
            if is_resident and each.is_at_rest and each.layout is not None and max_bytes > 0:
                chosen.append(each)
                max_bytes -= each.nbytes
        return chosen

    def _discard_or_name_locked(self, weights: StoredWeights) -> dict[int, str]:
        if weights.num_running or not weights.is_at_rest:
            return {adapter.adapter_id: adapter.name for adapter in weights.adapters.values()}
        self._let_damaged_go_locked(weights)
        return {}

    def _note(self, adapter_id: int, note: Callable[[str], None]) -> None:
        """Tell the open cases of the adapter's content, if it is still there."""
        with self._residents.held():
            weights = self._weights_locked(adapter_id)
            if weights is not None:
                note(weights.digest)

    def _weights_locked(self, adapter_id: int) -> StoredWeights | None:
        adapter = self._residents.known_locked().get(adapter_id)
        return None if adapter is None else adapter.weights


# ------------------------------------------------------------------------------------------------------------ recovery


BACKOFF_S = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds before each further try to restore a content."""

DOUBT_INTERVAL_S = 1.0
"""Between two looks at contents in doubt: what clients that cause them can cost the others."""

DIAGNOSIS_S = 1.0
"""What a client is told to wait while a diagnosis runs."""


@dataclass(slots=True)
class Case:
    """One content that is ill. retry_at_s: when its next diagnosis is due; None: one runs, or no try is left."""

    digest: str
    reason: str
    num_tries: int = 0
    retry_at_s: float | None = 0.0
    is_running: bool = False

    @property
    def is_given_up(self) -> bool:
        return self.num_tries > len(BACKOFF_S) and not self.is_running


class Recovery:
    """The open cases. Pure bookkeeping, not thread-safe: called with the residency's lock held."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cases: dict[str, Case] = {}
        self._doubts: dict[str, None] = {}  # digests, the next one first
        self._last_look_s = -math.inf

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def doubt(self, digest: str) -> None:
        """A result was odd: look at the content soon, and serve it meanwhile."""
        if digest not in self._cases:
            self._doubts.setdefault(digest)

    def due_doubts(self) -> list[str]:
        """Contents in their turn, of which one is to be looked at now: `look` says which."""
        return list(self._doubts) if self._clock() - self._last_look_s >= DOUBT_INTERVAL_S else []

    def look(self, digest: str, last: Collection[str]) -> None:
        """One is looked at, and the next one an interval later, those in `last` after the others."""
        self._last_look_s = self._clock()
        self.trust(digest)
        self._doubts = dict.fromkeys(sorted(self._doubts, key=last.__contains__))

    def trust(self, digest: str) -> None:
        """No doubt is left of a content."""
        self._doubts.pop(digest, None)

    def open(self, digest: str, reason: str) -> bool:
        """Quarantine a content; False when it is already."""
        self.trust(digest)
        if digest in self._cases:
            return False
        self._cases[digest] = Case(digest, reason, retry_at_s=self._clock())
        return True

    def close(self, digest: str) -> Case | None:
        """It is well again, or gone; None when there was no case."""
        return self._cases.pop(digest, None)

    @property
    def is_due(self) -> bool:
        """Whether the diagnosis of a case or of a doubt is due."""
        is_case_due = bool(self._cases) and self._next_due() is not None
        return is_case_due or (bool(self._doubts) and bool(self.due_doubts()))

    def due(self) -> Case | None:
        """A case whose diagnosis is due; from now on it counts as running, until `close` or `failed`."""
        case = self._next_due()
        if case is not None:
            case.retry_at_s, case.is_running = None, True
            case.num_tries += 1
        return case

    def _next_due(self) -> Case | None:
        now_s = self._clock()
        due = (each for each in self._cases.values() if each.retry_at_s is not None and each.retry_at_s <= now_s)
        return next(due, None)

    def postpone(self, digest: str) -> None:
        """The diagnosis could not begin: it is due again soon, and was no try."""
        case = self._cases.get(digest)
        if case is None:
            return
        case.num_tries -= 1
        case.retry_at_s, case.is_running = self._clock() + DIAGNOSIS_S, False

    def forgive(self, digest: str) -> None:
        """It is loaded again: a content that was given up is served again, and judged again."""
        case = self._cases.get(digest)
        if case is not None and case.is_given_up:
            del self._cases[digest]

    def failed(self, digest: str, reason: str) -> None:
        """The diagnosis failed: the next one is later, or never."""
        case = self._cases.get(digest)
        if case is None:
            return
        case.reason, case.is_running = reason, False
        case.retry_at_s = None if case.is_given_up else self._clock() + BACKOFF_S[case.num_tries - 1]

    def state_of(self, digest: str) -> str | None:
        """In words, for the API; None for a content that is well."""
        case = self._cases.get(digest)
        if case is None:
            return None
        if case.is_given_up:
            return f"quarantined until it is loaded again: {case.reason}"
        return f"quarantined, try {case.num_tries + 1} of {1 + len(BACKOFF_S)} to restore it is pending: {case.reason}"

    def refusal(self, digest: str, adapter_name: str) -> AdapterFaultError | None:
        """What a request for an ill content is told."""
        case = self._cases.get(digest)
        if case is None:
            return None
        if case.is_given_up:
            advice, wait_s = "it stays quarantined; load it again", BACKOFF_S[-1]
        else:
            wait_s = DIAGNOSIS_S if case.retry_at_s is None else max(DIAGNOSIS_S, case.retry_at_s - self._clock())
            advice = f"it is being restored; try again in {wait_s:.0f} s"
        return AdapterFaultError(f"adapter {adapter_name!r} is quarantined ({case.reason}); {advice}", wait_s)
