"""The replicas, and which of them takes a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from loraplex.errors import ConfigError
from loraplex.router.replica import Replica
from loraplex.router.settings import RouteSettings, replica_urls
from loraplex.router.watching import Watcher
from loraplex.routing import POLICIES, Needs, place
from loraplex.server.api_error import clipped


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
        self._watchers = [Watcher(replica, settings, clock) for replica in self._replicas.values()]
        self._watching: list[asyncio.Task[None]] = []

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
        self._watching = [asyncio.ensure_future(watcher.run()) for watcher in self._watchers]

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for replica in self.replicas:
            replica.close()

    def choose(self, needs: Needs, tried: Collection[Replica] = ()) -> Replica | None:
        """Not one of those that were tried; None where no other one is open."""
        left = [replica.snapshot() for replica in self.replicas if replica not in tried]
        name = place(needs, left, self._policy, self._clock())
        return None if name is None else self._replicas[name]

    def named(self, names: Sequence[str]) -> list[Replica]:
        """Raises ConfigError for a name that no replica has."""
        unknown = [name for name in names if name not in self._replicas]
        if unknown:
            raise ConfigError(
                f"{clipped(unknown[0])!r} is no replica of this router: they are {', '.join(self._replicas)}"
            )
        return [self._replicas[name] for name in dict.fromkeys(names)]
