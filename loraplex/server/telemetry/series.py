"""Counts by adapter and by tenant for /metrics: the busiest few by name, all others as one sum.

Every sum only grows, as Prometheus wants of a counter: what a name counts while it is not shown is added to the rest
and stays there. So the rates of all series of a page add up to the rate of all requests, whatever is shown. A name that
is shown has all that it ever counted. Names are known up to MAX_KNOWN, the busiest; a count of tokens fades by half in
HALF_LIFE_S, so that what was busy last week makes room.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loraplex.tenants.usage import Counts, Tab

REST, BASE, NO_TENANT = "//rest", "//base", "//none"
"""No adapter or tenant can be called so: the rest, the base model, and keys without a tenant."""

MAX_KNOWN = 8192
HALF_LIFE_S = 3600.0
ELECTION_S = 30.0
"""How often names that are shown may change."""

LOOK_S = 0.5
"""How often running requests are looked at, however many ask."""

STAYS = 1.25
"""A name that is shown stays until another one has so many times its tokens."""

_MAX_EXPONENT = 256.0


@dataclass(slots=True)
class _Known:
    counts: Counts = field(default_factory=Counts)
    score: float = 0.0


class BusiestSeries:
    """Counts by name. The clock is in seconds and may be any that does not go back."""

    def __init__(self, max_shown: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_shown = max_shown
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._shown: set[str] = set()
        self._began_s = self._elected_s = clock()
        self.rest = Counts()

    def add(self, name: str, counts: Counts) -> None:
        known = self._known.get(name)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._forget()
            known = self._known[name] = _Known()
        if len(self._shown) < self._max_shown:
            self._shown.add(name)
        known.counts.add(counts)
        known.score += (counts.prompt_tokens + counts.generated_tokens) * self._weight()
        if name not in self._shown:
            self.rest.add(counts)

    def of(self, name: str) -> Counts | None:
        """All that was counted; None where nothing was."""
        known = self._known.get(name)
        return None if known is None else known.counts

    def shown(self) -> Mapping[str, Counts]:
        """At most max_shown names, in their order. An election may change them first."""
        if self._clock() - self._elected_s >= ELECTION_S:
            self._elected_s = self._clock()
            self._shown = set(heapq.nlargest(self._max_shown, self._known, key=self._rank))
        return {name: self._known[name].counts for name in sorted(self._shown)}

    def _rank(self, name: str) -> tuple[float, str]:
        return self._known[name].score * (STAYS if name in self._shown else 1.0), name

    def _weight(self) -> float:
        """Of a token now, against one at the beginning: later ones weigh more, so that earlier ones need no look."""
        exponent = (self._clock() - self._began_s) / HALF_LIFE_S
        if exponent > _MAX_EXPONENT:
            for known in self._known.values():
                known.score *= 2.0**-exponent
            self._began_s, exponent = self._clock(), 0.0
        return math.exp2(exponent)

    def _forget(self) -> None:
        """An eighth of the names, those of the fewest tokens; one of them that comes again begins at zero."""
        least = heapq.nsmallest(MAX_KNOWN // 8, self._known.keys() - self._shown, key=self._rank)
        for name in least:
            del self._known[name]


class RequestSeries:
    """What the requests of a server count. Running ones count when a page is made: nothing is added at a token."""

    def __init__(self, max_adapters: int, max_tenants: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_adapters, max_tenants: most that are shown by name."""
        self._adapters = BusiestSeries(max_adapters, clock)
        self._tenants = BusiestSeries(max_tenants, clock)
        self._open: dict[Tab, Counts] = {}
        self._clock = clock
        self._looked_s = -math.inf

    def open(self, tab: Tab) -> None:
        self._open[tab] = Counts()

    def end(self, tab: Tab) -> None:
        """Count what is left of it. A second time it does nothing."""
        if tab in self._open:
            self._count(tab)
            del self._open[tab]

    @property
    def adapters(self) -> BusiestSeries:
        """With all that was drawn until now, or LOOK_S ago. Adapters as registered, BASE, and `OF_MIXES`."""
        self._count_open()
        return self._adapters

    @property
    def tenants(self) -> BusiestSeries:
        """The same by tenant; empty where there are none."""
        self._count_open()
        return self._tenants

    def num_open(self) -> Counter[str]:
        """Prompts that wait or run, by adapter."""
        return Counter(tab.adapter or BASE for tab in self._open)

    def _count_open(self) -> None:
        if self._clock() - self._looked_s < LOOK_S:
            return
        self._looked_s = self._clock()
        for tab, counted in list(self._open.items()):
            if tab.output is not None or not counted.requests:
                self._count(tab)

    def _count(self, tab: Tab) -> None:
        now = tab.now()
        now.requests, now.errors = 1, int(tab.has_failed)  # also of one that the engine has not answered, or refused
        due = now.less(self._open[tab])
        self._open[tab] = now
        if due.is_empty:
            return
        self._adapters.add(tab.adapter or BASE, due)
        if tab.key_id:
            self._tenants.add(tab.tenant or NO_TENANT, due)
