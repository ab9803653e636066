"""Eviction policies against traces: who would have been there when a request came, and what loading the others takes.

    python -m benchmarks.eviction                      every policy, every trace, equal and mixed sizes: under a minute
    python -m benchmarks.eviction --traces bursty --room 0.2 --seeds 10

A simulation of one tier, with the classes that the engine uses (loraplex/memory/eviction/policies.py) and a clock that
is the trace's. A request for an adapter that is not there loads it at once, and others leave until it fits; nothing is
pinned, queued or running. Figures are counts and modelled seconds, so they do not depend on the machine. Traces:

    zipf      popularity rank ** -0.9 all the time, Poisson arrivals
    uniform   every adapter alike
    shifting  zipf, but which adapters are popular drifts: all ranks change hands about once in 20 minutes
    bursty    as functions in a cloud: heavy-tailed popularity, each adapter on for a minute or two and off for long,
              arrivals within a burst Gamma with a cv of 4, one adapter in twenty by day only
    periodic  each adapter at its own interval, 30 s to 30 minutes, give or take 5 %

`belady` knows the future. With equal sizes it evicts what is needed last, which is optimal (exact). With mixed sizes
the optimum is not computable; it evicts the largest bytes x time to the next use (a heuristic: an online policy may
beat it in a column).
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.progress import track
from rich.table import Table

from benchmarks.arguments import listed_of, positive
from benchmarks.report import wide_console
from loraplex.memory.eviction.policies import POLICIES, READ_BYTES_PER_S, EvictionPolicy, get_policy

BYTES_PER_RANK = 600_000  # about those of a model of 0.5B parameters in 16 bits, all linears
RANKS = (8, 16, 32, 64)
EQUAL_RANK = 16
OPEN_S = 0.005  # to open and check an adapter, whatever its size
REMOTE_FACTOR = 10  # how much longer a load takes from a source that is not local
ZIPF_ALPHA = 0.9
DRIFT_S = 1200.0
BURST_S = 90.0
BURST_RATE = 0.03
BURST_CV = 4.0
DIURNAL_SHARE = 0.05
SHORTEST_PERIOD_S, LONGEST_PERIOD_S, PERIOD_JITTER = 30.0, 1800.0, 0.05
ONLINE = tuple(name for name in POLICIES if name != "none")
BELADY = "belady"
NEVER = math.inf


@dataclass(frozen=True)
class Request:
    """Of adapter number `adapter`, at `now_s`."""

    now_s: float
    adapter: int


@dataclass(frozen=True)
class World:
    """The adapters: bytes and seconds to load each; room_bytes of memory for them."""

    sizes: str
    nbytes: tuple[int, ...]
    reload_s: tuple[float, ...]
    room_bytes: int


@dataclass
class Count:
    """What one policy did with one trace, or with several."""

    num_requests: int = 0
    num_hits: int = 0
    asked_bytes: int = 0
    hit_bytes: int = 0
    reload_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_requests

    @property
    def byte_hit_rate(self) -> float:
        return self.hit_bytes / self.asked_bytes

    def add(self, other: Count) -> None:
        self.num_requests += other.num_requests
        self.num_hits += other.num_hits
        self.asked_bytes += other.asked_bytes
        self.hit_bytes += other.hit_bytes
        self.reload_s += other.reload_s


def make_world(sizes: str, num_adapters: int, room: float, remote_share: float, seed: int) -> World:
    """`sizes` equal or mixed (ranks 8 to 64); `room` is the share of all bytes that fits; some adapters are far
    away."""
    draw = np.random.default_rng(seed)
    ranks = draw.choice(RANKS, num_adapters) if sizes == "mixed" else np.full(num_adapters, EQUAL_RANK)
    nbytes = [int(rank) * BYTES_PER_RANK for rank in ranks]
    factors = np.where(draw.random(num_adapters) < remote_share, REMOTE_FACTOR, 1)
    reload_s = [(OPEN_S + size / READ_BYTES_PER_S) * int(factor) for size, factor in zip(nbytes, factors, strict=True)]
    return World(sizes, tuple(nbytes), tuple(reload_s), max(int(room * sum(nbytes)), max(nbytes)))


# --------------------------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True)
class Shape:
    """How long a trace is and over how many adapters: `num_requests` at `rate` a second on average."""

    num_adapters: int
    num_requests: int
    rate: float

    @property
    def length_s(self) -> float:
        return self.num_requests / self.rate


def zipf_weights(num_adapters: int, draw: np.random.Generator, alpha: float = ZIPF_ALPHA) -> np.ndarray:
    """Shares that add up to 1; which adapters are popular is a matter of chance."""
    weights = np.arange(1, num_adapters + 1, dtype=float) ** -alpha
    return draw.permutation(weights / weights.sum())


def _poisson(shape: Shape, draw: np.random.Generator) -> np.ndarray:
    return np.cumsum(draw.exponential(1 / shape.rate, shape.num_requests))


def _independent(shape: Shape, weights: np.ndarray, draw: np.random.Generator) -> list[Request]:
    times = _poisson(shape, draw)
    chosen = draw.choice(shape.num_adapters, shape.num_requests, p=weights)
    return [Request(float(now_s), int(adapter)) for now_s, adapter in zip(times, chosen, strict=True)]


def zipf(shape: Shape, draw: np.random.Generator) -> list[Request]:
    return _independent(shape, zipf_weights(shape.num_adapters, draw), draw)


def uniform(shape: Shape, draw: np.random.Generator) -> list[Request]:
    return _independent(shape, np.full(shape.num_adapters, 1 / shape.num_adapters), draw)


def shifting(shape: Shape, draw: np.random.Generator) -> list[Request]:
    """Two adapters, drawn each time, change their ranks so often that each has changed about once in DRIFT_S."""
    weights = zipf_weights(shape.num_adapters, draw, ZIPF_ALPHA)
    by_rank = np.argsort(-weights)
    ranks = draw.choice(shape.num_adapters, shape.num_requests, p=np.sort(weights)[::-1])
    every_s, next_s, requests = 2 * DRIFT_S / shape.num_adapters, 0.0, []
    for now_s, rank in zip(_poisson(shape, draw), ranks, strict=True):
        while next_s <= now_s:
            one, two = draw.integers(shape.num_adapters, size=2)
            by_rank[one], by_rank[two] = by_rank[two], by_rank[one]
            next_s += every_s
        requests.append(Request(float(now_s), int(by_rank[rank])))
    return requests


def bursty(shape: Shape, draw: np.random.Generator) -> list[Request]:
    weights = draw.pareto(1.1, shape.num_adapters) + 0.05
    rates = shape.rate * weights / weights.sum()
    requests = [
        Request(now_s, adapter)
        for adapter, rate in enumerate(rates)
        for now_s in _bursts(float(rate), shape.length_s, draw.random() < DIURNAL_SHARE, draw)
    ]
    return _in_order(requests, shape)


def _bursts(rate: float, length_s: float, is_diurnal: bool, draw: np.random.Generator) -> Iterator[float]:
    """Arrivals of one adapter: bursts with at least BURST_RATE requests a second on average, silence in between."""
    rate_within = max(1.5 * rate, BURST_RATE)
    shape_of_gamma = BURST_CV**-2
    now_s = float(draw.uniform(0, BURST_S * rate_within / rate)) - BURST_S
    while now_s < length_s:
        on_s = float(draw.exponential(BURST_S))
        end_s = now_s + on_s
        is_asleep = is_diurnal and now_s % length_s < length_s / 2  # the trace is a day
        while now_s < min(end_s, length_s):
            if now_s >= 0 and not is_asleep:
                yield now_s
            now_s += float(draw.gamma(shape_of_gamma, 1 / (rate_within * shape_of_gamma)))
        now_s = max(now_s, end_s) + float(draw.exponential(on_s * (rate_within / rate - 1)))


def periodic(shape: Shape, draw: np.random.Generator) -> list[Request]:
    """Intervals evenly over their logarithm; the number of adapters and the intervals alone make the rate."""
    requests = []
    for adapter in range(shape.num_adapters):
        period_s = math.exp(draw.uniform(math.log(SHORTEST_PERIOD_S), math.log(LONGEST_PERIOD_S)))
        now_s = float(draw.uniform(0, period_s))
        while now_s < shape.length_s:
            requests.append(Request(now_s, adapter))
            now_s += period_s * float(draw.normal(1, PERIOD_JITTER))
    return _in_order(requests, shape)


def _in_order(requests: list[Request], shape: Shape) -> list[Request]:
    return sorted(requests, key=lambda request: request.now_s)[: shape.num_requests]


TRACES: Mapping[str, Callable[[Shape, np.random.Generator], list[Request]]] = {
    "zipf": zipf,
    "uniform": uniform,
    "shifting": shifting,
    "bursty": bursty,
    "periodic": periodic,
}

# --------------------------------------------------------------------------------------------------------------- replay


class TraceClock:
    """The time of the request that is replayed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replay(trace: Sequence[Request], world: World, policy: EvictionPolicy, clock: TraceClock) -> Count:
    """What `policy`, made with `clock`, does with the trace."""
    count, held_bytes, names = Count(), 0, [str(adapter) for adapter in range(len(world.nbytes))]
    held: set[int] = set()
    for request in trace:
        clock.now_s, adapter = request.now_s, request.adapter
        is_hit, nbytes = adapter in held, world.nbytes[adapter]
        _tally(count, world, adapter, is_hit)
        if not is_hit:
            while held_bytes + nbytes > world.room_bytes:
                victim = next(policy.order())
                policy.evict(victim)
                held.remove(int(victim))
                held_bytes -= world.nbytes[int(victim)]
            policy.enter(names[adapter], nbytes, world.reload_s[adapter])
            held.add(adapter)
            held_bytes += nbytes
        policy.use(names[adapter])
    return count


def replay_belady(trace: Sequence[Request], world: World) -> Count:
    """The future known: of equal sizes, what is needed last goes; of mixed ones, the largest bytes x time till then."""
    next_uses = _next_uses(trace)
    count, held_bytes, is_equal = Count(), 0, len(set(world.nbytes)) == 1
    needed_at: dict[int, float] = {}  # of those that are held
    latest: list[tuple[float, int]] = []  # a heap of (-time, adapter), with entries that are out of date
    for request, next_s in zip(trace, next_uses, strict=True):
        adapter, nbytes = request.adapter, world.nbytes[request.adapter]
        is_hit = adapter in needed_at
        _tally(count, world, adapter, is_hit)
        while not is_hit and held_bytes + nbytes > world.room_bytes:
            victim = _pop_latest(latest, needed_at) if is_equal else _heaviest(needed_at, world, request.now_s)
            del needed_at[victim]
            held_bytes -= world.nbytes[victim]
        held_bytes += 0 if is_hit else nbytes
        needed_at[adapter] = next_s
        heapq.heappush(latest, (-next_s, adapter))
    return count


def _next_uses(trace: Sequence[Request]) -> list[float]:
    """When the adapter of each request is asked for again; NEVER if it is not."""
    following: dict[int, float] = {}
    next_uses = []
    for request in reversed(trace):
        next_uses.append(following.get(request.adapter, NEVER))
        following[request.adapter] = request.now_s
    return next_uses[::-1]


def _pop_latest(latest: list[tuple[float, int]], needed_at: Mapping[int, float]) -> int:
    while True:
        negative_s, adapter = heapq.heappop(latest)
        if needed_at.get(adapter) == -negative_s:
            return adapter


def _heaviest(needed_at: Mapping[int, float], world: World, now_s: float) -> int:
    return max(needed_at, key=lambda adapter: (needed_at[adapter] - now_s) * world.nbytes[adapter])


def _tally(count: Count, world: World, adapter: int, is_hit: bool) -> None:
    nbytes = world.nbytes[adapter]
    count.num_requests += 1
    count.asked_bytes += nbytes
    count.num_hits += is_hit
    count.hit_bytes += nbytes * is_hit
    count.reload_s += 0.0 if is_hit else world.reload_s[adapter]


# -------------------------------------------------------------------------------------------------------------- results

Results = dict[tuple[str, str, str], Count]


def simulate(args: argparse.Namespace) -> Results:
    """(trace, sizes, policy) -> the sum over all seeds."""
    shape = Shape(args.adapters, args.requests, args.rate)
    results: Results = {}
    cases = [(trace, sizes, seed) for trace in args.traces for sizes in args.sizes for seed in range(args.seeds)]
    for trace_name, sizes, seed in track(cases, "replaying", transient=True):
        world = make_world(sizes, args.adapters, args.room, args.remote_share, seed)
        trace = TRACES[trace_name](shape, np.random.default_rng(1000 + seed))
        for name in (*args.policies, BELADY):
            clock = TraceClock()
            counted = (
                replay_belady(trace, world) if name == BELADY else replay(trace, world, get_policy(name, clock), clock)
            )
            results.setdefault((trace_name, sizes, name), Count()).add(counted)
    return results


def totals(results: Results) -> dict[str, Count]:
    """policy -> the sum over everything."""
    sums: dict[str, Count] = {}
    for (_, _, name), count in results.items():
        sums.setdefault(name, Count()).add(count)
    return sums


def table_of(results: Results, title: str) -> Table:
    """A section per trace and sizes, and one for the sum."""
    table = Table(title=title, title_justify="left")
    for heading in ("trace", "sizes", "policy"):
        table.add_column(heading)
    for heading in ("requests", "hits", "hit rate", "byte hit rate", "reload s"):
        table.add_column(heading, justify="right")
    before = None
    for (trace, sizes, name), count in results.items():
        if before not in (None, (trace, sizes)):
            table.add_section()
        before = (trace, sizes)
        table.add_row(trace, sizes, _shown(name, sizes), *_cells(count))
    table.add_section()
    for name, count in totals(results).items():
        table.add_row("all", "all", name, *_cells(count))
    return table


def _shown(name: str, sizes: str) -> str:
    if name != BELADY:
        return name
    return "belady (exact)" if sizes == "equal" else "belady by size (heuristic)"


def _cells(count: Count) -> list[str]:
    return [
        str(count.num_requests),
        str(count.num_hits),
        f"{100 * count.hit_rate:.1f} %",
        f"{100 * count.byte_hit_rate:.1f} %",
        f"{count.reload_s:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    results = simulate(args)
    title = (
        f"{args.adapters} adapters, room for {100 * args.room:g} % of their bytes, at most {args.requests} requests "
        f"at {args.rate:g}/s, {args.seeds} seeds"
    )
    wide_console().print(table_of(results, title))
    if args.json:
        rows = [
            {"trace": trace, "sizes": sizes, "policy": name, "hit_rate": count.hit_rate}
            | {"byte_hit_rate": count.byte_hit_rate}
            | asdict(count)
            for (trace, sizes, name), count in results.items()
        ]
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"title": title, "results": rows}, indent=1))
    return 0


def _rate(text: str) -> float:
    """More than 0."""
    if not 0 < (rate := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be > 0, got {text}")
    return rate


def _share(text: str) -> float:
    """From 0 to 1."""
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"must be 0..1, got {text}")
    return share


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--policies", type=listed_of(ONLINE), default=list(ONLINE), help=f"of {', '.join(ONLINE)}")
    new.add_argument("--traces", type=listed_of(list(TRACES)), default=list(TRACES), help=f"of {', '.join(TRACES)}")
    new.add_argument("--sizes", type=listed_of(["equal", "mixed"]), default=["equal", "mixed"], help="equal, mixed")
    new.add_argument("--adapters", type=positive, default=500, help="default: 500")
    new.add_argument("--room", type=_share, default=0.1, help="share of all adapters' bytes that fits (default: 0.1)")
    new.add_argument("--requests", type=positive, default=20_000, help="of a trace, at most (default: 20000)")
    new.add_argument("--rate", type=_rate, default=5.0, help="requests a second (default: 5; periodic: its own)")
    new.add_argument(
        "--remote-share", type=_share, default=0.1, help="of adapters that take 10 x as long to load (default: 0.1)"
    )
    new.add_argument("--seeds", type=positive, default=5, help="traces of each kind (default: 5)")
    new.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return new


if __name__ == "__main__":
    raise SystemExit(main())
