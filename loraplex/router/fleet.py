"""The replicas, and which of them takes a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from loraplex.errors import ConfigError
from loraplex.router.names import Card, Names, common, differing
from loraplex.router.replica import Replica
from loraplex.router.settings import RouteSettings, replica_urls
from loraplex.router.watching import Watcher
from loraplex.routing import POLICIES, Needs, place
from loraplex.server.api_error import clipped

_log = logging.getLogger("loraplex.router")

COMPARE_EVERY_S = 2.0
NAMES_A_TURN = 5000


class Fleet:
    """`start` looks at all once, and follows them until `close`."""

    def __init__(
        self,
        replicas: Sequence[str],
        settings: RouteSettings,
        key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        urls = replica_urls(replicas)
        self._replicas = {name: Replica(name, url, settings, key, clock) for name, url in urls.items()}
        self._policy = POLICIES[settings.policy]
        self._clock = clock
        self._watchers = [Watcher(replica, settings, clock, self) for replica in self._replicas.values()]
        self._has_started = False
        self._watching: list[asyncio.Task[None]] = []
        self._differing: Sequence[str] = ()
        self._compared: Sequence[object] = ()

    @property
    def replicas(self) -> Collection[Replica]:
        return self._replicas.values()

    @property
    def base_names(self) -> frozenset[str]:
        """What the replicas call their base model."""
        return frozenset().union(*(replica.base_names for replica in self.replicas))

    @property
    def num_open(self) -> int:
        return sum(replica.snapshot().is_open for replica in self.replicas)

    async def start(self) -> None:
        await asyncio.gather(*(watcher.poll() for watcher in self._watchers))
        self._has_started = True
        self._watching = [asyncio.ensure_future(watcher.run()) for watcher in self._watchers]
        self._watching.append(asyncio.ensure_future(self._compare_again_and_again()))

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for replica in self.replicas:
            replica.close()

    def choose(self, needs: Needs, tried: Collection[Replica] = ()) -> Replica | None:
        """Not one of those that were tried; None where no other one is open."""
        left = [replica for replica in self.replicas if replica not in tried]
        if self.is_known(needs.adapter):
            left = [replica for replica in left if not replica.names.lacks(str(needs.adapter))]
        name = place(needs, (replica.snapshot() for replica in left), self._policy, self._clock())
        return None if name is None else self._replicas[name]

    def is_known(self, adapter: str | None) -> bool:
        """Whether a replica has it, or will again: then those without it are not asked."""
        return adapter is not None and any(
            replica.names.has(adapter) or replica.names.is_promised(adapter) for replica in self.replicas
        )

    def is_promised(self, adapter: str | None) -> bool:
        """Whether a replica has lost it, and is to have it again."""
        return adapter is not None and any(replica.names.is_promised(adapter) for replica in self.replicas)

    @property
    def num_restoring(self) -> int:
        """Adapters that replicas are to have again."""
        return sum(len(replica.names.to_do) for replica in self.replicas)

    def shared_with(self, new: Replica) -> Iterable[Card]:
        return common([each.held or {} for each in self._others_of(new)]) if self._has_started else ()

    def agree_on(self, replica: Replica) -> None:
        others = self._others_of(replica)
        for name, card in replica.names.to_do.items():
            found = (each.held[name] for each in others if each.held and each.has(name))
            if card is not None and (now := next(found, None)) is not None and now.meaning != card.meaning:
                replica.names.to_do[name] = now

    def note_gone(self, names: Iterable[str]) -> None:
        away = [replica for replica in self.replicas if not replica.snapshot().is_open]
        for name in names:
            if not any(replica.names.has(name) for replica in self.replicas if replica not in away):
                for replica in away:
                    if replica.names.has(name):
                        replica.names.owe(name, None)

    def _others_of(self, replica: Replica) -> list[Names]:
        """Of those that take requests."""
        return [each.names for each in self.replicas if each is not replica and each.snapshot().is_open]

    @property
    def num_differing(self) -> int:
        """Names that did not mean the same at all open replicas when they were last compared."""
        return len(self._differing)

    async def _compare_again_and_again(self) -> None:
        while True:
            await self._compare()
            await asyncio.sleep(COMPARE_EVERY_S)

    async def _compare(self) -> None:
        """Only where a list is another one than before; in turns of the event loop."""
        open_ones = [each for each in self.replicas if each.snapshot().is_open and each.names.held is not None]
        versions = [version for each in open_ones for version in (each.name, each.names.version, len(each.names.to_do))]
        if versions == self._compared:
            return
        restoring = set().union(*(each.names.to_do for each in open_ones))
        found = []
        for number, name in enumerate(differing([dict(each.names.held or {}) for each in open_ones])):
            if name is not None and name not in restoring:
                found.append(name)
            if number % NAMES_A_TURN == 0:
                await asyncio.sleep(0)
        if set(found) - set(self._differing):
            text = (
                "%d adapters are not the same at all replicas, such as %r: load one at all with PUT /v1/adapters/NAME, "
                "or unload it with DELETE; where that is meant, all is well"
            )
            _log.warning(text, len(found), clipped(min(found)))
        self._compared, self._differing = versions, found

    def named(self, names: Sequence[str]) -> list[Replica]:
        """Raises ConfigError for a name that no replica has."""
        unknown = [name for name in names if name not in self._replicas]
        if unknown:
            raise ConfigError(
                f"{clipped(unknown[0])!r} is no replica of this router: they are {', '.join(self._replicas)}"
            )
        return [self._replicas[name] for name in dict.fromkeys(names)]
