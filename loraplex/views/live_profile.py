"""`loraplex profile --url`: how the adapters of a running server fare, and where a report goes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console

from loraplex import interrupt
from loraplex.errors import LoraplexError
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.settings import ProfileSettings
from loraplex.views.html_report import html_report
from loraplex.views.remote import RemoteServer

STOP_TIMEOUT_S = 120.0


def profile_server(url: str, settings: ProfileSettings) -> int:
    """Profile a running server for some seconds and print what was found. Ctrl-C ends it earlier, with a report."""
    server, targets = RemoteServer(url), settings.targets
    body = {"first_token_s": targets.first_token_s, "inter_token_s": targets.inter_token_s}
    try:
        server.post("/v1/profile/start", body)
        _wait(settings.duration_s)
        answer = server.post("/v1/profile/stop", timeout_s=STOP_TIMEOUT_S)
    except OSError as error:
        raise LoraplexError(f"{server.url} does not answer: {error}") from error
    report = msgspec.json.decode(answer, type=LoraPerformanceReport)
    if not settings.json:
        print_findings(report)
    give_report(report, server.url, settings)
    return 0


def give_report(report: LoraPerformanceReport, source: str, settings: ProfileSettings) -> None:
    """To where the settings say: an HTML file, JSON on stdout, both or neither."""
    if settings.report is not None:
        Path(settings.report).write_text(html_report(report, source), encoding="utf-8")
    if settings.json:
        print(msgspec.json.encode(report).decode())
    elif settings.report is not None:
        print(f"report: {settings.report}")


def _wait(seconds: float) -> None:
    with suppress(KeyboardInterrupt), interrupt.raised():
        time.sleep(seconds)


def print_findings(report: LoraPerformanceReport) -> None:
    requests = report.requests
    console = Console()
    console.print(
        f"{requests.num_finished} requests and {requests.num_tokens} tokens in {report.seconds:.1f} s; first token "
        f"{1e3 * requests.first_token.p50_s:.1f} ms (p99 {1e3 * requests.first_token.p99_s:.1f}), between tokens "
        f"{1e3 * requests.inter_token.p50_s:.1f} ms (p99 {1e3 * requests.inter_token.p99_s:.1f})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for finding in report.findings:
        text = f"{finding.severity}: {finding.text} {finding.remedy}".rstrip()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
