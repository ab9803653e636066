"""`loraplex profile --url`: how the adapters of a running server fare, and where a report goes."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from loraplex.errors import ConfigError, LoraplexError
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.remote import RemoteServer
from loraplex.report import html_report

MAX_SECONDS = 86400.0
STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ReportWish:
    """Where a report goes beside or instead of the terminal. path: an HTML file; is_json: the report on stdout, and nothing else."""

    path: Path | None = None
    is_json: bool = False

    def check(self) -> None:
        """Raises ConfigError before a long run, not after it."""
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise ConfigError(f"report {str(self.path)!r}: there is no directory {str(self.path.absolute().parent)!r}")

    def give(self, report: LoraPerformanceReport, source: str) -> None:
        if self.path is not None:
            self.path.write_text(html_report(report, source), encoding="utf-8")
        if self.is_json:
            print(msgspec.json.encode(report).decode())
        elif self.path is not None:
            print(f"report: {self.path}")


def profile_server(url: str, seconds: float, targets: ServiceTargets, wish: ReportWish) -> int:
    """Profile a running server for some seconds and print what was found. Ctrl-C ends it earlier, with a report."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"seconds must be > 0 and at most {MAX_SECONDS}, got {seconds}")
    wish.check()
    server = RemoteServer(url)
    body = {"first_token_s": targets.first_token_s, "inter_token_s": targets.inter_token_s}
    try:
        server.post("/v1/profile/start", body)
        _wait(seconds)
        answer = server.post("/v1/profile/stop", timeout_s=STOP_TIMEOUT_S)
    except OSError as error:
        raise LoraplexError(f"{server.url} does not answer: {error}") from error
    report = msgspec.json.decode(answer, type=LoraPerformanceReport)
    if not wish.is_json:
        print_findings(report)
    wish.give(report, server.url)
    return 0


def _wait(seconds: float) -> None:
    with suppress(KeyboardInterrupt):
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
