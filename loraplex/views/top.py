"""`loraplex top`: a running server in a terminal, looked at again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loraplex import interrupt
from loraplex.errors import ConfigError, LoraplexError
from loraplex.views.remote import RemoteServer

NUM_ADAPTERS = 15
NUM_EVENTS = 8
BAR_CELLS = 30
STRIP_CELLS = 100
MAX_NAME_CELLS = 40
WIDE = 72
"""Columns of a terminal from which adapters are shown with all that is known of them."""
TIER_CELLS = 52
ADAPTER_CELLS = 40
"""What the other columns of a table take."""
MIN_EVENTS = 3
HEADINGS = ("last used adapters", "adapter", "recent events")
"""Lines of the lower part that are neither an adapter nor an event."""
OWNER_STYLE = {"kv": "blue", "adapters": "green", "free": "bright_black", "fenced": "red"}
MEMORY_PATH = f"/v1/memory?adapters=true&order=last_used&top={NUM_ADAPTERS}"

Samples = Mapping[str, Mapping[str, float]]
"""Of /metrics: name -> value of the label that tells its samples apart ("" when none does) -> number."""


def run_top(url: str, interval_s: float, is_once: bool) -> int:
    """Draw until Ctrl-C. A server that is away is waited for, unless it is to be looked at once."""
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError(f"interval must be 0.1 to 3600 seconds, got {interval_s}")
    watcher = Watcher(RemoteServer(url))
    if is_once:
        try:
            Console().print(Frame(watcher.look()))
        except OSError as error:
            raise LoraplexError(f"{watcher.url} does not answer: {error}") from error
        return 0
    try:
        with (
            interrupt.raised(),
            Live(Text(f"waiting for {watcher.url}"), console=Console(), screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.update(view(watcher, live.console.height), refresh=True)
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def view(watcher: Watcher, height: int | None = None) -> RenderableType:
    """A frame, or why there is none."""
    try:
        return Frame(watcher.look(), height)
    except (OSError, LoraplexError) as error:
        return Text(f"waiting for {watcher.url}: {shown(error)}", style="yellow")


# ------------------------------------------------------------------------------------------------------------- looking


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server. seconds: since the look before it, whose counters are in `before` (empty at the first)."""

    url: str
    samples: Samples
    before: Samples
    seconds: float
    memory: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    now_s: float = field(default_factory=time.time)

    def number(self, name: str, label: str = "") -> float:
        return self.samples.get(name, {}).get(label, 0.0)

    def rate(self, name: str) -> float | None:
        """Of a counter, a second; None at the first look and after a restart."""
        grown = self.number(name) - self.before.get(name, {}).get("", 0.0)
        return grown / self.seconds if name in self.before and self.seconds > 0 and grown >= 0 else None

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, seconds: since the look before, or since the start when there was nothing new."""
        now, before = self.samples.get(f"{name}_bucket", {}), self.before.get(f"{name}_bucket", {})
        grown = {bound: count - before.get(bound, 0.0) for bound, count in now.items()}
        counts = grown if grown.get("+Inf", 0.0) > 0 else now
        total = counts.get("+Inf", 0.0)
        bounds = sorted((float(bound), count) for bound, count in counts.items())
        return next((bound for bound, count in bounds if count >= share * total), None) if total else None


class Watcher:
    """Looks at one server, and remembers what it needs of the look before."""

    def __init__(self, server: RemoteServer) -> None:
        self.url = server.url
        self._server = server
        self._before: Samples = {}
        self._before_s = 0.0
        self._events: deque[Mapping[str, Any]] = deque(maxlen=NUM_EVENTS)
        self._last_id = 0

    def look(self) -> Look:
        """Raises OSError without an answer, LoraplexError when the server or its engine cannot."""
        samples, now_s = read_samples(self._server.get("/metrics").decode()), time.monotonic()
        memory = self._server.get_json(MEMORY_PATH)
        self._read_events()
        look = Look(self.url, samples, self._before, now_s - self._before_s, memory, tuple(self._events))
        self._before, self._before_s = samples, now_s
        return look

    def _read_events(self) -> None:
        page = self._server.get_json(f"/v1/events?stream=false&last_id={self._last_id}")
        if page["last_id"] < self._last_id:
            self._events.clear()  # another server's
        self._events.extend(page["data"])
        self._last_id = page["last_id"]


def read_samples(text: str) -> Samples:
    """Samples of one engine: the labels that all of them have tell nothing."""
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
            samples.setdefault(sample.name, {})[own[0] if len(own) == 1 else ""] = sample.value
    return samples


# ------------------------------------------------------------------------------------------------------------- drawing


class Frame:
    """A look as it fits: tables become narrower with the terminal, and a low one shows fewer rows and says so.

    height: lines of the terminal; None where all may be printed.
    """

    def __init__(self, look: Look, height: int | None = None) -> None:
        self._look = look
        self._height = height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look, width = self._look, options.max_width
        head = Group(_engine(look), *_runners(look), Text(), _tiers(look, width), _chunks(look, width), Text())
        yield head
        adapters, events = list(look.memory["top_adapters"] or ()), list(look.events)
        if self._height is None:
            yield from (_adapters(look, adapters, width), Text(), _events(events))
            return
        room = self._height - len(console.render_lines(head, options.update(height=None))) - len(HEADINGS)
        num_events = min(len(events), max(MIN_EVENTS, room // 3))
        num_adapters = max(0, min(len(adapters), room - num_events - 1))
        if num_adapters:
            yield _adapters(look, adapters[:num_adapters], width)
        hidden = [(len(adapters) - num_adapters, "adapters"), (len(events) - num_events, "events")]
        more = ", ".join(f"{count} more {what}" for count, what in hidden if count)
        yield Text(
            f"{more} in a taller window" if more else "", style="bright_black", no_wrap=True, overflow="ellipsis"
        )
        yield _events(events[len(events) - num_events :], is_cut=True)


def _engine(look: Look) -> RenderableType:
    causes = look.samples.get("loraplex:requests_waiting_by_cause", {})
    waiting = ", ".join(f"{count:.0f} for {cause}" for cause, count in causes.items() if count)
    rate = look.rate("vllm:generation_tokens_total")
    merged = ", ".join(shown(each["adapter"]) for each in look.memory.get("merged", ()) if each["adapter"])
    serving = look.samples.get("loraplex:runner_up", {})
    runners = f"  runners {sum(serving.values()):.0f} of {len(serving)}" if serving else ""
    lines = Text.assemble(
        ("loraplex top ", "bold"),
        f"{shown(look.url)}  mode ",
        (str(look.memory["mode"]), "green" if look.memory["mode"] == "normal" else "bold red"),
        f"  adapters {look.number('loraplex:adapters'):.0f}",
        f"  quarantined {len(look.memory['quarantined'])}{runners}\n",
        f"{'-' if rate is None else f'{rate:.1f}'} tokens/s",
        f"  running {look.number('vllm:num_requests_running'):.0f}",
        f"  waiting {look.number('vllm:num_requests_waiting'):.0f}{f' ({waiting})' if waiting else ''}",
        f"  KV {100 * look.number('vllm:kv_cache_usage_perc'):.0f} %{f'  merged {merged}' if merged else ''}\n",
        f"first token {_latency(look, 'vllm:time_to_first_token_seconds')}",
        f"  between tokens {_latency(look, 'vllm:inter_token_latency_seconds')}",
        f"  hits {look.number('loraplex:adapter_hits_total'):.0f}",
        f"  misses {look.number('loraplex:adapter_misses_total'):.0f}",
    )
    return lines


def _latency(look: Look, name: str) -> str:
    """Upper bounds of the histogram's buckets."""
    p50, p99 = look.quantile(name, 0.5), look.quantile(name, 0.99)
    return "-" if p50 is None or p99 is None else f"p50 <= {1e3 * p50:g} ms, p99 <= {1e3 * p99:g} ms"


def _runners(look: Look) -> list[RenderableType]:
    """A line of each, where there are several."""
    lines: list[RenderableType] = []
    for each in look.memory.get("runners") or ():
        what = f"runner {shown(each['runner'])} {shown(each['device'])}  "
        if each["kv"] is not None:
            share = each["kv"]["used_bytes"] / max(1, each["kv"]["max_bytes"])
            figures = f"running {each['running']}  waiting {each['waiting']}  KV {100 * share:.0f} %"
        else:
            figures = shown(each["message"] or "no answer")
        lines.append(Text(what + figures, style="" if each["kv"] else "yellow", no_wrap=True, overflow="ellipsis"))
    return lines


def _tiers(look: Look, width: int) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for heading in ("tier", "", "used", "budget", "adapters", "pressure"):
        table.add_column(heading, justify="left" if heading in ("tier", "") else "right", no_wrap=True)
    cells_of_bar = min(BAR_CELLS, max(4, width - TIER_CELLS))
    for tier in look.memory["tiers"]:
        share, pressure = tier["used_bytes"] / max(1, tier["max_bytes"]), tier["pressure"]
        style = "red" if pressure > 0.9 else "yellow" if pressure > 0.7 else ""
        cells = (size(tier["used_bytes"]), size(tier["max_bytes"]), str(tier["adapters"]))
        table.add_row(tier["tier"], bar(share, cells_of_bar), *cells, Text(f"{100 * pressure:.0f} %", style=style))
    kv = look.memory["kv"]
    share = kv["used_bytes"] / max(1, kv["max_bytes"])
    table.add_row("kv", bar(share, cells_of_bar), size(kv["used_bytes"]), size(kv["max_bytes"]), "", "")
    return table


def _chunks(look: Look, width: int) -> RenderableType:
    owners = look.memory["chunks_by_owner"]
    legend = Text("  ").join(
        Text.assemble(("█", OWNER_STYLE.get(owner, "")), f" {owner} {count}") for owner, count in owners.items()
    )
    fragmentation = f"  fragmentation {100 * look.memory['fragmentation']:.0f} %"
    strip = chunk_strip(look.memory["chunks"], min(STRIP_CELLS, width))
    return Group(strip, Text.assemble(legend, fragmentation)) if owners else Text()


def chunk_strip(runs: Sequence[Mapping[str, Any]], num_cells: int = STRIP_CELLS) -> Text:
    """The arena from left to right; a cell has the colour of the chunk in its middle."""
    total = sum(run["chunks"] for run in runs)
    ends, owners = list(accumulate(run["chunks"] for run in runs)), [run["owner"] for run in runs]
    strip, index = Text(no_wrap=True, overflow="crop"), 0
    for cell in range(min(num_cells, total)):
        middle = (cell + 0.5) * total / min(num_cells, total)
        while ends[index] <= middle:
            index += 1
        strip.append("░" if owners[index] == "free" else "█", OWNER_STYLE.get(owners[index], ""))
    return strip


def _adapters(look: Look, adapters: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """One line for each; a narrow terminal has fewer columns."""
    table = Table(box=None, pad_edge=False, title=HEADINGS[0], title_justify="left")
    is_wide = width >= WIDE
    for heading in (
        "adapter",
        "tier",
        "size",
        *(("rank",) if is_wide else ()),
        "running",
        *(("pinned",) if is_wide else ()),
        "last use",
    ):
        table.add_column(heading, justify="left" if heading in ("adapter", "tier") else "right", no_wrap=True)
    for each in adapters:
        tier = "loading" if each["is_loading"] else each["tier"]
        ago_s = max(0.0, look.now_s - each["last_used_time"])
        name = Text(shown(each["name"]), style="red" if each["error"] else "")
        name.truncate(min(MAX_NAME_CELLS, max(8, width - ADAPTER_CELLS)), overflow="ellipsis")
        table.add_row(
            name,
            tier,
            size(each["bytes"]),
            *((str(each["rank"]),) if is_wide else ()),
            str(each["references"]),
            *(("yes" if each["is_pinned"] else "",) if is_wide else ()),
            _ago(ago_s),
        )
    return table


def _events(events: Sequence[Mapping[str, Any]], *, is_cut: bool = False) -> RenderableType:
    """is_cut: each on one line, however long."""
    lines = Text(HEADINGS[-1], style="italic", no_wrap=is_cut, overflow="ellipsis" if is_cut else None)
    for event in events:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        style = "red" if event["kind"] in ("fault", "load_failed") else ""
        lines.append_text(Text(f"\n{clock} {event['kind']:12} {shown(event['text'])}", style=style))
    return lines


def bar(share: float, num_cells: int = BAR_CELLS) -> Text:
    full = round(num_cells * min(1.0, max(0.0, share)))
    return Text("█" * full + "░" * (num_cells - full))


def shown(value: object) -> str:
    """On one line, and nothing in it that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 3600 else f"{seconds / 3600:.0f} h ago"
