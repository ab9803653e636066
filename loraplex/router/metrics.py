"""GET /metrics of the router: requests by replica and status, what was sent again or lost, how the replicas are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from loraplex.router.replica import Replica
from loraplex.routing.breaker import BreakerState
from loraplex.server.connections import Connections


class RouterMetrics:
    def __init__(
        self, replicas: Collection[Replica], connections: Connections, num_differing: Callable[[], int]
    ) -> None:
        self._replicas = replicas
        self._num_differing = num_differing
        self._connections = connections
        self._requests: Counter[tuple[str, str]] = Counter()
        self._retries: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    def count_request(self, replica: str, status: int) -> None:
        self._requests[replica, str(status)] += 1

    def count_retry(self, replica: str) -> None:
        self._retries[replica] += 1

    def count_lost(self, replica: str) -> None:
        self._lost[replica] += 1

    def render(self) -> bytes:
        page: bytes = generate_latest(_Page(self.families()))
        return page

    def families(self) -> Iterator[Metric]:
        text = "Answers of replicas, by status."
        requests = CounterMetricFamily("loraplex:router_requests", text, labels=["replica", "status"])
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        yield _by_replica("loraplex:router_retries", "Requests that went elsewhere after this replica.", self._retries)
        yield _by_replica("loraplex:router_lost", "Answers that broke off in the middle.", self._lost)
        in_flight = GaugeMetricFamily("loraplex:router_in_flight", "Requests at a replica.", labels=["replica"])
        is_open = GaugeMetricFamily("loraplex:router_replica_up", "1 while it gets requests.", labels=["replica"])
        breaker = GaugeMetricFamily(
            "loraplex:router_breaker", "1 for the state of its circuit breaker.", labels=["replica", "state"]
        )
        running = GaugeMetricFamily("loraplex:router_replica_running", "Requests in its batch.", labels=["replica"])
        waiting = GaugeMetricFamily("loraplex:router_replica_waiting", "Requests that wait there.", labels=["replica"])
        text = "Adapters that it is to have again."
        restoring = GaugeMetricFamily("loraplex:router_replica_restoring", text, labels=["replica"])
        for replica in self._replicas:
            running.add_metric([replica.name], replica.load.num_running)
            waiting.add_metric([replica.name], replica.load.num_waiting)
            restoring.add_metric([replica.name], len(replica.names.to_do))
            in_flight.add_metric([replica.name], replica.num_in_flight)
            is_open.add_metric([replica.name], float(replica.snapshot().is_open))
            for state in BreakerState:
                breaker.add_metric([replica.name, state.value], float(replica.breaker.state is state))
        yield from (in_flight, is_open, breaker, running, waiting, restoring)
        text = "Names of adapters that do not mean the same at all replicas that take requests."
        differing = GaugeMetricFamily("loraplex:router_adapters_differing", text)
        differing.add_metric([], self._num_differing())
        yield differing
        connections = GaugeMetricFamily("loraplex:http_connections", "Open connections.")
        connections.add_metric([], self._connections.num_open)
        yield connections
        refused = CounterMetricFamily(
            "loraplex:http_connections_refused", "Connections refused or closed, by reason.", labels=["reason"]
        )
        for reason, count in self._connections.refused.items():
            refused.add_metric([reason], count)
        yield refused


class _Page:
    """What `generate_latest` asks for families."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def _by_replica(name: str, text: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["replica"])
    for replica, count in counts.items():
        family.add_metric([replica], count)
    return family
