"""A profile's report as one HTML file that needs nothing else: findings first, then charts and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from loraplex.performance.histogram import Quantiles
from loraplex.performance.report import AdapterPerformance, Finding, LoraPerformanceReport, MixPerformance
from loraplex.views.charts import Bar, bars, line, strip

MAX_CHARTED = 20
MAX_ROWS = 100

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #666; --line: #ddd; --bar: #4269d0; --paper: #fff;
  --warning: #b3261e; --advice: #8a5a00; --info: #2f6b3a; --free: #e4e4e4; --adapters: #3ca36a; --fenced: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --soft: #aaa; --line: #444; --bar: #7d9bf0; --paper: #161616;
  --warning: #ff8a80; --advice: #f0b95a; --info: #86c995; --free: #333; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
p, li { max-width: 60rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.soft, .soft { color: var(--soft); margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .8rem; } .wide { overflow-x: auto; }
th, td { text-align: right; padding: .2rem .4rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; max-width: 16rem; overflow: hidden; text-overflow: ellipsis;
  position: sticky; left: 0; background: var(--paper); }
@media (max-width: 40rem) { th:first-child, td:first-child { max-width: 8rem; } }
@media print { .wide { overflow: visible; } }
ul.findings { list-style: none; padding: 0; }
ul.findings li { border-left: 4px solid; padding: .1rem .8rem; margin: .6rem 0; }
li b { text-transform: uppercase; font-size: .75rem; letter-spacing: .05em; }
li span { color: var(--ink); display: block; }
.warning { color: var(--warning); } .advice { color: var(--advice); } .info { color: var(--info); }
svg { max-width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--ink); dominant-baseline: middle; }
.label, .end { text-anchor: end; } .bar { fill: var(--bar); } .line { fill: none; stroke: var(--bar); stroke-width: 2; }
.axis { stroke: var(--line); } .owner-kv { fill: var(--bar); } .owner-adapters { fill: var(--adapters); }
.owner-free { fill: var(--free); } .owner-fenced { fill: var(--fenced); }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
"""


def html_report(report: LoraPerformanceReport, source: str) -> str:
    """The page. `source`: what was profiled, a URL or a model."""
    began = datetime.fromtimestamp(report.begun_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    head = f"{escape(source)}, {began}, {report.seconds:.1f} s, {escape(report.backend_description or report.backend)}"
    sections = [
        _section("Findings", _findings(report.findings)),
        _section("Requests", _requests(report) + _timeline(report)),
        _section("Latency by adapter", _adapters(report)),
        _section("Loading and switching", _switching(report)),
        _section("Adapters mixed in a step", _mixes(report)),
        _section("Where the time of a step goes", _parts(report)),
        _section("Kernels", _kernels(report)),
        _section("Memory", _memory(report)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>LoRA profile of {escape(source)}</title><style>{STYLE}</style></head><body>"
        f'<h1>LoRA profile</h1><p class="soft">{head}</p>{"".join(sections)}</body></html>\n'
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body or _soft('Nothing was recorded.')}</section>"


def _findings(findings: Sequence[Finding]) -> str:
    items = [
        f'<li class="{escape(each.severity)}"><b>{escape(each.severity)}</b><span>{escape(each.text)}</span>'
        f'<span class="soft">{escape(each.remedy)}</span></li>'
        for each in findings
    ]
    return f'<ul class="findings">{"".join(items)}</ul>' if items else ""


def _requests(report: LoraPerformanceReport) -> str:
    requests, seconds = report.requests, max(report.seconds, 1e-9)
    rows = [
        _quantile_row("first token", requests.first_token),
        _quantile_row("between tokens", requests.inter_token),
        _quantile_row("end to end", requests.end_to_end),
    ]
    text = (
        f"{requests.num_requests} requests began, {requests.num_finished} finished, {requests.num_failed} failed; "
        f"{requests.num_tokens / seconds:,.1f} tokens/s, {requests.num_finished / seconds:,.2f} requests/s. "
        f"Targets: first token {_ms(report.targets.first_token_s)}, between tokens "
        f"{_ms(report.targets.inter_token_s)}; {_percent(requests.share_in_both)} of finished requests kept both. "
        f"{_device(report)} in {report.num_steps} steps."
    )
    return _soft(text) + _table(("", "count", "mean", "p50", "p95", "p99", "max"), rows)


def _device(report: LoraPerformanceReport) -> str:
    if report.device_share is None:
        return "The device's time was not measured,"
    return f"The device computed {_percent(report.device_share)} of the time,"


def _timeline(report: LoraPerformanceReport) -> str:
    timeline = report.timeline
    rates = [count / timeline.stretch_s for count in timeline.num_tokens]
    chart = line(rates, f"{len(rates) * timeline.stretch_s:.0f} s", "tokens a second over time")
    return f"{_soft('Tokens a second over time')}{chart}" if chart else ""


def _adapters(report: LoraPerformanceReport) -> str:
    used = [each for each in report.adapters if each.num_requests]
    charted = [
        Bar(_name(each), each.first_token.p95_s, _ms(each.first_token.p95_s))
        for each in used[:MAX_CHARTED]
        if each.first_token.count
    ]
    rows = [_adapter_row(each) for each in used[:MAX_ROWS]]
    first = ("adapter", "requests", "tokens", "first p50", "first p95", "first p99")
    heading = (*first, "between p50", "between p99", "e2e p50", "e2e p99", "in target", "rank", "tier")
    chart = bars(charted, "95th percentile of the first token by adapter")
    label = _soft(f"95 % of first tokens within; the {len(charted)} adapters with most requests") if chart else ""
    more = _soft(f"{len(used) - MAX_ROWS} more are in the JSON.") if len(used) > MAX_ROWS else ""
    return label + chart + _table(heading, rows) + more


def _adapter_row(each: AdapterPerformance) -> tuple[str, ...]:
    first, between, whole = each.first_token, each.inter_token, each.end_to_end
    return (
        _name(each),
        str(each.num_requests),
        str(each.num_tokens),
        *(_ms(seconds) for seconds in (first.p50_s, first.p95_s, first.p99_s, between.p50_s, between.p99_s)),
        *(_ms(seconds) for seconds in (whole.p50_s, whole.p99_s)),
        _percent(each.share_in_both) if each.num_finished else "-",
        str(each.rank or "-"),
        each.tier or "-",
    )


def _switching(report: LoraPerformanceReport) -> str:
    cost = report.switch_cost
    rows = [_quantile_row("load to host", cost.load), _quantile_row("switch of names", cost.switch)]
    copies = f"{cost.num_copies} by copying, {_ms(cost.promote_mean_s)} each" if cost.num_copies else "table writes"
    return (
        _counted("Where requests found their adapter", report.served_from)
        + _counted("What of their adapter requests waited for", report.admitted)
        + _counted("Loads, by what asked for them", report.loads)
        + _counted("Evictions, by cause", report.evictions)
        + _soft(f"{cost.num_promotions} promotions to the device ({copies}); {report.num_load_failures} failed loads.")
        + _table(("", "count", "mean", "p50", "p95", "p99", "max"), rows)
    )


def _mixes(report: LoraPerformanceReport) -> str:
    """Decode steps alone: a prompt in a step says nothing of adapters."""
    if not report.mixes:
        return ""
    charted = [Bar(_mix_name(mix), mix.step.mean_s, _ms(mix.step.mean_s)) for mix in report.mixes]
    rows = [
        (
            _mix_name(mix),
            str(mix.num_steps),
            f"{mix.mean_rows:.1f}",
            f"{mix.tokens_per_s:,.0f}",
            _ms(mix.step.p50_s),
            _ms(mix.step.p99_s),
            "-" if mix.lora_share is None else _percent(mix.lora_share),
            "-" if mix.slowdown is None else f"{mix.slowdown:.2f} x",
        )
        for mix in report.mixes
    ]
    heading = ("adapters", "steps", "rows", "tokens/s", "step p50", "step p99", "LoRA", "against base")
    chart = bars(charted, "mean decode step by number of distinct adapters")
    return _soft("Mean decode step, by distinct adapters in it") + chart + _table(heading, rows)


def _parts(report: LoraPerformanceReport) -> str:
    steps = max(1, report.num_steps)
    parts = [Bar(part, seconds, f"{_ms(seconds / steps)} a step") for part, seconds in report.part_seconds.items()]
    operators = [
        Bar(part, seconds, f"{_ms(seconds / steps)} a step") for part, seconds in report.operator_seconds.items()
    ]
    if not report.num_steps:
        return ""
    inside = (
        _soft("Inside forward, by operator") + bars(operators, "operators of forward")
        if operators
        else _soft("These kernels do not tell where the time of forward goes.")
    )
    return bars(parts, "parts of a step") + inside


def _kernels(report: LoraPerformanceReport) -> str:
    speedups = [
        (each.op, f"{each.speedup:.2f} x", _us(each.kernel_s), _us(each.fallback_s), each.shape)
        for each in report.kernel_speedups
    ]
    heading = (
        "kernel",
        f"against {report.kernel_speedups[0].fallback}" if speedups else "",
        "kernel",
        "fallback",
        "on",
    )
    return (
        _soft(report.backend_description or report.backend)
        + _counted("Calls that stock torch ran, by operator and reason", report.kernel_fallbacks)
        + _table(heading, speedups)
    )


def _memory(report: LoraPerformanceReport) -> str:
    memory = report.memory
    tiers = [
        (each.tier, _bytes(each.used_bytes), _bytes(each.max_bytes), str(each.num_adapters), _percent(each.pressure))
        for each in memory.tiers
    ]
    largest = sorted(report.adapters, key=lambda each: -each.nbytes)[:MAX_CHARTED]
    charted = [Bar(_name(each), each.nbytes, _bytes(each.nbytes)) for each in largest if each.nbytes]
    chunks = strip([(run.owner, run.num_chunks) for run in memory.chunks], "chunks of the arena by owner")
    keys = "".join(
        f'<svg class="key" viewBox="0 0 1 1"><rect width="1" height="1" class="owner-{owner}"/></svg>{owner}'
        for owner in ("kv", "adapters", "free", "fenced")
    )
    text = (
        f"Mode {memory.mode.value}; fragmentation {_percent(memory.fragmentation)}, "
        f"{_percent(report.fragmentation_before)} at the start; KV blocks "
        f"{memory.num_kv_blocks - memory.num_free_kv_blocks} of {memory.num_kv_blocks} in use; {report.num_adapters} "
        f"adapters, {len(memory.quarantined)} in quarantine."
    )
    return (
        _soft(text)
        + _table(("tier", "used", "budget", "adapters", "pressure"), tiers)
        + (f"{_soft(f'Chunks of {_bytes(memory.chunk_bytes)}')}{chunks}<p>{keys}</p>" if chunks else "")
        + (_soft("Bytes by adapter") + bars(charted, "bytes by adapter") if charted else "")
    )


# ------------------------------------------------------------------------------------------------------------- pieces


def _counted(title: str, counts: Mapping[str, int]) -> str:
    rows = [Bar(key, count, f"{count:,}") for key, count in counts.items() if count]
    return _soft(title) + bars(rows, title) if rows else ""


def _quantile_row(label: str, times: Quantiles) -> tuple[str, ...]:
    values = (times.mean_s, times.p50_s, times.p95_s, times.p99_s, times.max_s)
    return (label, str(times.count), *(_ms(seconds) if times.count else "-" for seconds in values))


def _table(heading: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """As wide as its cells; a narrower page scrolls it beside the first column, whose whole text is its hint."""
    lines = ["".join(_cells(row)) for row in rows]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>' if lines else ""
    )


def _cells(row: Sequence[str]) -> Iterable[str]:
    yield from (f'<td title="{escape(cell)}">{escape(cell)}</td>' for cell in row[:1])
    yield from (f"<td>{escape(cell)}</td>" for cell in row[1:])


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _name(adapter: AdapterPerformance) -> str:
    return "(base model)" if adapter.name is None else adapter.name


def _mix_name(mix: MixPerformance) -> str:
    least = mix.least_adapters
    return str(least) if least < 2 else f"{least} to {2 * least - 1}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    """In seconds where milliseconds would be long: a column stays as narrow as its heading."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
