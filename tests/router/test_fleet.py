"""What the replicas of a router say of each other."""

from __future__ import annotations

import pytest

from loraplex.router.fleet import Fleet
from loraplex.router.names import Card
from loraplex.router.replica import Replica
from loraplex.router.settings import RouteSettings
from loraplex.routing import Snapshot


def test_what_a_replica_is_to_have_is_looked_up_at_others_that_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of each replica was made for each name: with 10,000 names the event loop stood still."""
    fleet = Fleet([f"http://127.0.0.1:{port}" for port in (1, 2, 3)], RouteSettings())
    back, *others = fleet.replicas
    for each in others:
        each.is_ready = True
        each.breaker.succeed()
        each.names.learn("others", {f"a{number}": Card(f"a{number}", "/new", "new") for number in range(50)})
    back.names.to_do = {f"a{number}": Card(f"a{number}", "/old", "old") for number in range(100)}
    snapshots: list[str] = []
    snapshot = Replica.snapshot

    def counted(replica: Replica) -> Snapshot:
        snapshots.append(replica.name)
        return snapshot(replica)

    monkeypatch.setattr(Replica, "snapshot", counted)
    fleet.agree_on(back)
    assert snapshots == [each.name for each in others]
    assert [name for name, card in back.names.to_do.items() if card and card.digest == "new"] == [
        f"a{number}" for number in range(50)
    ]
