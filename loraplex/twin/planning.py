"""How many devices, and which budgets, a service level takes: simulations, and a search among them.

    1. devices    1, 2, 4, ... until the level holds, then the least number by halving; with room for all adapters, or
                  for as many as the device has
    2. adapters   with so many devices: the least of ADAPTER_SHARES of that room with which it still holds
    3. KV cache   what the requests used at most, and a quarter more; a last simulation has all three

More devices and more memory are taken to be no worse, which placement and chance may break by a little: the answer is a
size that was simulated and holds, and the next smaller one that was simulated does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from loraplex.errors import ConfigError
from loraplex.twin.calibration import Calibration
from loraplex.twin.results import SimulationResult
from loraplex.twin.settings import ServiceLevel, TwinSettings
from loraplex.twin.simulation import Simulation
from loraplex.twin.workload import Workload

ADAPTER_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.17, 0.12, 0.08, 0.05)
KV_SPARE = 1.25
MIB = 1 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Option:
    """A size that was simulated. step: of the search, `devices`, `adapters` or `all`."""

    step: str
    devices: int
    adapter_memory_bytes: int
    kv_cache_memory_bytes: int
    holds: bool
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class Plan:
    """chosen: None where no size that may be looked at holds."""

    level: ServiceLevel
    options: tuple[Option, ...]
    chosen: Option | None

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        listed = [{**asdict(option), "result": option.result.figures()} for option in self.options]
        chosen = None if self.chosen is None else listed[self.options.index(self.chosen)]
        return {"service_level": asdict(self.level), "chosen": chosen, "options": listed}

    def table(self) -> Table:
        title = f"P99: first token within {self.level.first_token_s:g} s, {self.level.inter_token_s:g} s between tokens"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
        headings = "devices", "adapters", "KV cache", "tok/s", "first ms", "gap ms", "wait ms", "misses", "busy", ""
        for heading in headings:
            table.add_column(heading, justify="right")
        for option in self.options:
            table.add_row(*_cells(option, is_chosen=option is self.chosen))
        return table

    def sentence(self) -> str:
        """The answer in words."""
        best = self.chosen
        if best is None:
            return f"no number of devices up to {self.level.max_devices} holds this service level"
        result = best.result
        return (
            f"{best.devices} device{'s' if best.devices > 1 else ''}, each with --adapter-memory-bytes "
            f"{_mib(best.adapter_memory_bytes)} and --kv-cache-memory-bytes {_mib(best.kv_cache_memory_bytes)}: "
            f"requests wait {1000 * result.waiting_s.mean:.0f} ms on average, {1000 * result.waiting_s.p99:.0f} ms in "
            f"99 % of the cases; {100 * (1 - result.hit_rate):.1f} % do not find their adapter on the device"
        )

    def plot(self, path: Path) -> None:
        """First tokens and gaps by devices, first tokens and misses by adapter memory; lines: the service level."""
        check_plotting()
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        devices = sorted((each for each in self.options if each.step == "devices"), key=lambda each: each.devices)
        counts = [each.devices for each in devices]
        left.plot(counts, [each.result.first_token_s.p99 for each in devices], marker="o", label="first token, P99")
        gaps = [0.0 if each.result.inter_token_s is None else each.result.inter_token_s.p99 for each in devices]
        left.plot(counts, gaps, marker="s", label="between tokens, P99")
        left.axhline(self.level.first_token_s, linestyle="dashed", linewidth=1, color="C0")
        left.axhline(self.level.inter_token_s, linestyle="dashed", linewidth=1, color="C1")
        left.set(xlabel="devices", ylabel="s", yscale="log", xticks=counts)
        left.legend(fontsize="small")
        chosen = None if self.chosen is None else self.chosen.devices
        sized = [each for each in self.options if each.devices == chosen and each.step != "all"]
        sized.sort(key=lambda each: each.adapter_memory_bytes)
        sizes = [each.adapter_memory_bytes / MIB for each in sized]
        right.plot(sizes, [each.result.first_token_s.p99 for each in sized], marker="o", label="first token, P99")
        right.axhline(self.level.first_token_s, linestyle="dashed", linewidth=1, color="C0")
        right.set(xlabel="adapter memory of a device, MiB", ylabel="s", yscale="log")
        misses = right.twinx()
        misses.plot(sizes, [100 * (1 - each.result.hit_rate) for each in sized], marker="s", color="C1")
        misses.set(ylabel="adapter not on the device, %", ylim=(0, None))
        right.legend(fontsize="small")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.savefig(path, dpi=150)


def check_plotting() -> None:
    """Raises ConfigError where there is no matplotlib: before a search, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'loraplex[bench]', or leave out --plot") from error


def make_plan(
    calibration: Calibration,
    settings: TwinSettings,
    workload: Workload,
    level: ServiceLevel,
    tell: Tell = lambda what: None,
) -> Plan:
    """settings: what is not looked for. Raises ConfigError where a device cannot hold one adapter and one request."""
    return _Search(calibration, settings, workload, level, tell).run()


class _Search:
    def __init__(
        self,
        calibration: Calibration,
        settings: TwinSettings,
        workload: Workload,
        level: ServiceLevel,
        tell: Tell,
    ) -> None:
        self._calibration = calibration
        self._settings = settings
        self._workload = workload
        self._level = level
        self._tell = tell
        self._options: list[Option] = []
        arrivals = workload.arrivals()
        sizes = [calibration.nbytes_of(workload.rank_of(each)) for each in range(arrivals.num_adapters)]
        self._largest = max(sizes, default=MIB)
        self._all_adapters = max(sum(sizes), self._largest)
        self._kv_bytes = settings.kv_cache_memory_bytes
        one_request = math.ceil(calibration.max_model_len / calibration.block_size) * calibration.block_bytes
        self._least_kv = one_request
        if level.memory_bytes is not None and level.memory_bytes < one_request + self._largest:
            raise ConfigError(
                f"memory_bytes {level.memory_bytes} hold no request of {calibration.max_model_len} tokens "
                f"({one_request} bytes of KV) beside the largest adapter ({self._largest}); raise it"
            )

    def run(self) -> Plan:
        room = self._room(self._kv_bytes)
        best = self._fewest_devices(room)
        if best is None:
            return Plan(self._level, tuple(self._options), None)
        best = self._least_adapters(best)
        kv_bytes = max(self._least_kv, math.ceil(best.result.kv_bytes * KV_SPARE / MIB) * MIB)
        if kv_bytes < best.kv_cache_memory_bytes:
            trimmed = self._try("all", best.devices, best.adapter_memory_bytes, kv_bytes)
            best = trimmed if trimmed.holds else best
        return Plan(self._level, tuple(self._options), best)

    def _room(self, kv_bytes: int) -> int:
        """For adapters, as far as they need it; where the KV cache would leave none, it gets the rest."""
        if self._level.memory_bytes is None:
            return self._all_adapters
        self._kv_bytes = min(kv_bytes, max(self._least_kv, self._level.memory_bytes // 2))
        return max(self._largest, min(self._all_adapters, self._level.memory_bytes - self._kv_bytes))

    def _fewest_devices(self, room: int) -> Option | None:
        below, count = 0, 1
        while True:
            option = self._try("devices", count, room, self._kv_bytes)
            if option.holds:
                break
            if count == self._level.max_devices:
                return None
            below, count = count, min(2 * count, self._level.max_devices)
        while count - below > 1:
            middle = (below + count) // 2
            tried = self._try("devices", middle, room, self._kv_bytes)
            if tried.holds:
                option, count = tried, middle
            else:
                below = middle
        return option

    def _least_adapters(self, best: Option) -> Option:
        room = best.adapter_memory_bytes
        for share in ADAPTER_SHARES[1:]:
            nbytes = math.ceil(room * share / MIB) * MIB
            if nbytes < self._largest or nbytes >= best.adapter_memory_bytes:
                break
            tried = self._try("adapters", best.devices, nbytes, self._kv_bytes)
            if not tried.holds:
                break
            best = tried
        return best

    def _try(self, step: str, devices: int, adapter_bytes: int, kv_bytes: int) -> Option:
        self._tell(f"{devices} devices, adapters {_mib(adapter_bytes)}, KV cache {_mib(kv_bytes)}")
        host = adapter_bytes if self._calibration.has_one_memory else self._settings.host_memory_bytes
        sized = replace(
            self._settings,
            runners=devices,
            adapter_memory_bytes=adapter_bytes,
            host_memory_bytes=max(host, adapter_bytes),
            kv_cache_memory_bytes=kv_bytes,
        )
        result = Simulation(self._calibration, sized, self._workload).run()
        option = Option(step, devices, adapter_bytes, kv_bytes, self._holds(result), result)
        self._options.append(option)
        return option

    def _holds(self, result: SimulationResult) -> bool:
        gap_s = 0.0 if result.inter_token_s is None else result.inter_token_s.p99
        is_fast = result.first_token_s.p99 <= self._level.first_token_s and gap_s <= self._level.inter_token_s
        return is_fast and result.num_failed == 0


def _cells(option: Option, is_chosen: bool) -> tuple[str, ...]:
    result = option.result
    gap = 0.0 if result.inter_token_s is None else result.inter_token_s.p99
    return (
        str(option.devices),
        _mib(option.adapter_memory_bytes),
        _mib(option.kv_cache_memory_bytes),
        f"{result.tokens_per_s:.0f}",
        f"{1000 * result.first_token_s.p99:.0f}",
        f"{1000 * gap:.0f}",
        f"{1000 * result.waiting_s.p99:.0f}",
        f"{100 * (1 - result.hit_rate):.0f} %",
        f"{100 * result.mean_utilization:.0f} %",
        "best" if is_chosen else "ok" if option.holds else "",
    )


def _mib(nbytes: int) -> str:
    return f"{math.ceil(nbytes / MIB)}MiB"
