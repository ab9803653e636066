"""What `loraplex profile` takes beside a model and its workload: a server instead, and where the report goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loraplex.config import setting
from loraplex.errors import ConfigError
from loraplex.performance.requests import ServiceTargets

DEFAULT_SECONDS = 30.0
MAX_SECONDS = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """Raises ConfigError for what cannot be, before a long run and not after it."""

    url: str | None = setting(
        None, "a running server instead of a model, such as 127.0.0.1:8000; its key is in LORAPLEX_API_KEY"
    )
    seconds: float | None = setting(None, "seconds of a running server's profile (default: 30); Ctrl-C ends it earlier")
    report: str | None = setting(None, "HTML file for the report: findings, charts and tables")
    json: bool = setting(False, "report as JSON on standard output")
    first_token_s: float = setting(
        ServiceTargets().first_token_s, "target for the first token of a request, in seconds"
    )
    inter_token_s: float = setting(ServiceTargets().inter_token_s, "target for the time between two tokens, in seconds")

    def __post_init__(self) -> None:
        if self.url is None and self.seconds is not None:
            raise ConfigError("--seconds is for a running server; a model runs its --requests")
        if not 0 < self.duration_s <= MAX_SECONDS:
            raise ConfigError(f"seconds must be > 0 and at most {MAX_SECONDS}, got {self.seconds}")
        for name in ("first_token_s", "inter_token_s"):
            if not 0 < getattr(self, name) <= MAX_SECONDS:
                raise ConfigError(f"{name} must be > 0 and at most {MAX_SECONDS}, got {getattr(self, name)}")
        folder = Path(self.report or ".").absolute().parent
        if self.report is not None and not folder.is_dir():
            raise ConfigError(f"report {self.report!r}: there is no directory {str(folder)!r}")

    @property
    def duration_s(self) -> float:
        return DEFAULT_SECONDS if self.seconds is None else self.seconds

    @property
    def targets(self) -> ServiceTargets:
        return ServiceTargets(self.first_token_s, self.inter_token_s)
