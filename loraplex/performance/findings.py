"""Rules that say in words what a report shows: each a number, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loraplex.performance.report import AdapterPerformance, Finding, LoraPerformanceReport

FEW_REQUESTS = 20
NOTABLE_WAIT = 0.05
NOTABLE_CHURN = 0.5
NOTABLE_FRAGMENTATION = 0.3
NOTABLE_PREEMPTIONS = 0.02
NOTABLE_BUILD = 0.1
NOTABLE_LORA = 0.25
NOTABLE_SLOWDOWN = 1.3
NOTABLE_TAIL = 4.0
SLOW_ADAPTER = 5.0
GOOD_SERVICE = 0.99
IDLE_DEVICE = 0.5
NOTABLE_CONTENTION = 0.1
SLOW_KERNEL = 0.8
BUSY = 0.02
"""Threads that wanted a core for less of the time had nothing to wait for: an idle engine."""


def find(report: LoraPerformanceReport) -> tuple[Finding, ...]:
    """Warnings first, then advice, then what is only to be known."""
    order = ("warning", "advice", "info")
    found = [finding for rule in RULES for finding in rule(report)]
    if all(finding.severity == "info" and finding.name != "few_requests" for finding in found):
        found.append(Finding("nothing", "info", "Nothing stands out."))
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _few_requests(report: LoraPerformanceReport) -> Iterator[Finding]:
    count = report.requests.num_finished
    if count < FEW_REQUESTS:
        text = f"Only {count} requests finished: shares and quantiles say little."
        yield Finding("few_requests", "info", text, "Profile for longer, or under load.")


def _faults(report: LoraPerformanceReport) -> Iterator[Finding]:
    if report.num_restarts:
        text = (
            f"The engine process was restarted {_times(report.num_restarts)}; what it recorded before is missing here."
        )
        yield Finding("restarted", "warning", text, "See the FAULT events in the log for why it died.")
    faults = report.num_faults - report.num_restarts
    if faults > 0:
        yield Finding("faults", "warning", f"{faults} faults were found.", "See the events of kind fault and recovery.")
    if report.memory.quarantined:
        text = f"{len(report.memory.quarantined)} adapters are in quarantine and not served."
        yield Finding("quarantined", "warning", text, "GET /v1/memory says why; reload them, or wait for the retry.")
    if report.requests.num_failed:
        text = f"{report.requests.num_failed} of {report.requests.num_requests} requests failed."
        yield Finding("failed", "warning", text, "See the log; events of kind fault and load_failed name adapters.")
    if report.num_load_failures:
        text = f"{report.num_load_failures} loads of adapters failed."
        yield Finding("load_failures", "warning", text, "Events of kind load_failed say which and why.")


def _service(report: LoraPerformanceReport) -> Iterator[Finding]:
    requests, targets = report.requests, report.targets
    if not requests.num_finished:
        return
    severity = "info" if requests.share_in_both >= GOOD_SERVICE else "warning"
    text = (
        f"{_percent(requests.share_in_both)} of requests kept both targets: {_percent(requests.share_in_first_token)} "
        f"had their first token within {targets.first_token_s:g} s, {_percent(requests.share_in_inter_token)} their "
        f"tokens at most {_ms(targets.inter_token_s)} apart."
    )
    is_first_worse = requests.share_in_first_token < requests.share_in_inter_token
    first = "First tokens wait: see what requests waited for, or raise max_num_seqs, or add servers."
    between = "Steps are long: lower max_num_seqs or max_num_batched_tokens, or use int8 weights."
    if _is_contended(report):
        first = between = "Steps are long because cores are taken; smaller batches would not help."
    yield Finding("service", severity, text, "" if severity == "info" else first if is_first_worse else between)


def _contention(report: LoraPerformanceReport) -> Iterator[Finding]:
    cpu = report.cpu
    if _is_contended(report):
        text = (
            f"The engine's threads had no core in {_percent(cpu.missing_share)} of the time that they wanted one: "
            f"{cpu.cpu_s:.1f} s of processor time, {cpu.wait_s:.1f} s of waiting for a core, {cpu.left_out_s:.1f} s "
            f"of threads that were left out, {cpu.num_preemptions} involuntary context switches."
        )
        remedy = (
            "Other processes use the cores: give the engine cores of its own (taskset, a cpuset), move what runs "
            "beside it, or lower num_threads to the cores that are free."
        )
        yield Finding("cpu_contention", "warning", text, remedy)


def _is_contended(report: LoraPerformanceReport) -> bool:
    return report.cpu.wanted_s >= BUSY * report.seconds and report.cpu.missing_share > NOTABLE_CONTENTION


def _waiting(report: LoraPerformanceReport) -> Iterator[Finding]:
    share = report.share_that_waited_for("load")
    if share > NOTABLE_WAIT:
        left_host = sum(count for cause, count in report.evictions.items() if cause.startswith("host"))
        median = _ms(report.switch_cost.load.p50_s)
        text = f"{_percent(share)} of requests waited for a load of their adapter; the median load took {median}."
        remedy = (
            f"{left_host} adapters had been evicted from host memory: raise host_memory_bytes."
            if left_host
            else "Preload or pin the adapters that are asked for most."
        )
        yield Finding("waited_for_load", "warning", text, remedy)
    share = report.share_that_waited_for("room")
    if share > NOTABLE_WAIT:
        text = f"{_percent(share)} of requests waited for room on the device for their adapter."
        yield Finding("waited_for_room", "warning", text, "Raise adapter_memory_bytes, or unpin adapters.")


def _churn(report: LoraPerformanceReport) -> Iterator[Finding]:
    evicted = report.evictions.get("device_room", 0)
    churn = evicted / max(1, report.num_admitted)
    if churn > NOTABLE_CHURN:
        text = f"{evicted} adapters left the device to make room, {churn:.1f} for each request."
        yield Finding(
            "churn", "advice", text, "Raise adapter_memory_bytes: the device holds fewer adapters than are used."
        )


def _memory(report: LoraPerformanceReport) -> Iterator[Finding]:
    memory = report.memory
    if memory.mode != "normal":
        text = "The engine ended in low-memory mode: admission is throttled."
        yield Finding("low_memory", "warning", text, "Give it more memory, or fewer adapters that are pinned.")
    if memory.fragmentation > NOTABLE_FRAGMENTATION:
        text = (
            f"{_percent(memory.fragmentation)} of the adapters' chunks could be given back "
            f"(at the start {_percent(report.fragmentation_before)})."
        )
        yield Finding("fragmentation", "advice", text, "Compaction does it when the monitor runs; see GET /v1/memory.")
    share = report.num_preemptions / max(1, report.requests.num_requests)
    if share > NOTABLE_PREEMPTIONS:
        text = f"{report.num_preemptions} requests were preempted and computed again ({_percent(share)} of requests)."
        yield Finding("preemptions", "advice", text, "Raise kv_cache_memory_bytes, or lower max_num_seqs.")


def _kernels(report: LoraPerformanceReport) -> Iterator[Finding]:
    text = f"Kernels: {report.backend_description or report.backend}."
    if report.backend == "native" or report.device != "cpu":
        yield Finding("kernels", "info", text)
    else:
        remedy = "`loraplex doctor` says what is missing; the native kernels need a C++ compiler at installation."
        yield Finding("fallback", "advice", f"The native kernels did not run. {text}", remedy)


def _kernel_fallbacks(report: LoraPerformanceReport) -> Iterator[Finding]:
    most = sorted(report.kernel_fallbacks.items(), key=lambda item: -item[1])
    if most:
        (operator, count), others = most[0], len(most) - 1
        more = f" ({others} other operator{'s' if others > 1 else ''} too)" if others else ""
        text = f"Stock torch ran {count} calls of an operator that has a kernel{more}: {operator}."
        remedy = "The reason says what the kernels do not cover; kernel_fallbacks of the report has all of them."
        yield Finding("kernel_fallbacks", "advice", text, remedy)


def _kernel_speedups(report: LoraPerformanceReport) -> Iterator[Finding]:
    measured = sorted(report.kernel_speedups, key=lambda each: each.speedup)
    if not measured:
        return
    first, last = measured[-1], measured[0]
    text = (
        f"{len(measured)} kernels were timed beside their fallback on this model's shapes: {first.op} is "
        f"{first.speedup:.1f} times as fast, the least is {last.op} with {last.speedup:.1f}."
    )
    slow = [each.op for each in measured if each.speedup < SLOW_KERNEL]
    remedy = f"Slower than stock torch here: {', '.join(slow)}. Measure on a quiet machine, then report it."
    yield Finding("kernel_speedups", "advice" if slow else "info", text, remedy if slow else "")


def _cost_of_lora(report: LoraPerformanceReport) -> Iterator[Finding]:
    operators = sum(report.operator_seconds.values())
    if operators:
        share = report.operator_seconds.get("lora", 0.0) / operators
        text = f"LoRA is {_percent(share)} of the operators' time."
        severity = "advice" if share > NOTABLE_LORA else "info"
        remedy = "Fewer distinct adapters in a step or lower ranks cost less." if severity == "advice" else ""
        yield Finding("lora_share", severity, text, remedy)
    if report.slowdown is not None:
        text = f"Decode steps with adapters took {report.slowdown:.2f} times those of the base model with as many rows."
        severity = "advice" if report.slowdown > NOTABLE_SLOWDOWN else "info"
        yield Finding(
            "slowdown", severity, text, "Check ranks and the kernels that run." if severity == "advice" else ""
        )


def _steps(report: LoraPerformanceReport) -> Iterator[Finding]:
    step_s = report.step_seconds
    if not step_s:
        return
    share = report.part_seconds.get("build", 0.0) / step_s
    if share > NOTABLE_BUILD:
        text = f"Building indices and block tables is {_percent(share)} of a step."
        yield Finding("build", "advice", text, "It is a cost for each step: larger batches (max_num_seqs) spread it.")
    between = report.requests.inter_token
    if between.p50_s and between.p99_s > NOTABLE_TAIL * between.p50_s and report.num_prefill_tokens:
        times = between.p99_s / between.p50_s
        text = f"The slowest 1 % of tokens came after {_ms(between.p99_s)}, {times:.0f} times the median."
        prompts, cores = (
            "Prompts run between them: lower max_num_batched_tokens.",
            "Threads wait for cores: see cpu_contention.",
        )
        yield Finding("tail", "advice", text, cores if _is_contended(report) else prompts)
    if report.device_share is not None and report.device_share < IDLE_DEVICE:
        text = f"The device computed {_percent(report.device_share)} of the time."
        yield Finding("idle", "info", text, "There was room for more load, or requests waited for something else.")


def _slow_adapters(report: LoraPerformanceReport) -> Iterator[Finding]:
    usual = report.requests.first_token.p50_s
    slow = [each for each in report.adapters if usual and _is_slow(each, usual)]
    if slow:
        worst = max(slow, key=lambda each: each.first_token.p50_s)
        others = f" ({len(slow) - 1} others are slow too)" if len(slow) > 1 else ""
        median = _ms(worst.first_token.p50_s)
        text = f"Adapter {worst.name!r} has a median first token after {median}, all requests {_ms(usual)}{others}."
        yield Finding(
            "slow_adapter", "advice", text, f"It is {worst.tier or 'unknown'} at the end: pin it if that matters."
        )


def _is_slow(adapter: AdapterPerformance, usual_s: float) -> bool:
    return (
        adapter.name is not None
        and adapter.first_token.count >= 5
        and adapter.first_token.p50_s > SLOW_ADAPTER * usual_s
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share == 0 or 0.01 <= share <= 0.99 or share == 1 else f"{100 * share:.1f} %"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


Rule = Callable[[LoraPerformanceReport], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    _faults,
    _contention,
    _service,
    _waiting,
    _churn,
    _memory,
    _cost_of_lora,
    _steps,
    _slow_adapters,
    _kernels,
    _kernel_fallbacks,
    _kernel_speedups,
    _few_requests,
)
