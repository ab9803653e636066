"""Settings of `loraplex route`, and the replicas that it stands in front of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from urllib.parse import urlsplit

from loraplex.config import setting
from loraplex.errors import ConfigError
from loraplex.routing import POLICIES
from loraplex.server.config import ServerConfig

MAX_REPLICAS = 256

BODIES_BYTES = 256 * 2**20
"""Of all unfinished requests together, at least one longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """How the router runs. Sizes are bytes, times seconds; those that a server has too mean the same."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(9000, "port to listen on; 0 takes a free one")
    policy: str = setting(
        "latency",
        "choice of a replica: latency (least estimated time to the first token), pack (the busiest that has room), "
        "spread (the shortest queue)",
    )
    replica_requests: int = setting(256, "requests that a replica has, waiting ones included, before it counts as full")
    max_attempts: int = setting(3, "most replicas that a request is sent to, where one cannot be reached or refuses it")
    poll_interval_s: float = setting(1.0, "pause between two looks at a replica's health and load")
    connect_timeout_s: float = setting(2.0, "time for a connection to a replica, and for its answer to a poll")
    answer_timeout_s: float = setting(600.0, "longest silence of a replica within an answer; then the request fails")
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "further host name of the router; *.example.com, or * for any; repeatable",
        group="Security",
        flag="--allowed-host",
    )
    ssl_certfile: str | None = setting(None, "TLS certificate with its chain, in PEM; the router then speaks https")
    ssl_keyfile: str | None = setting(None, "private key of the TLS certificate (default: in the certificate's file)")
    cors_allowed_origins: tuple[str, ...] = setting(
        (),
        "origin of web pages that may call the router, such as https://app.example.com; repeatable",
    )
    guard_metrics: bool = setting(False, "a key that a replica takes, and that is of no tenant, required for /metrics")
    max_body_bytes: int = setting(16 * 2**20, "longest request body; longer ones are answered with 413", group="Limits")
    max_upload_bytes: int = setting(
        64 * 2**20, "longest body of tensors, held in memory until all replicas have it; longer ones are refused"
    )
    max_connections: int | None = setting(
        None,
        "most open connections of clients, with as many to replicas (default: by the open files limit, at most 2500)",
    )
    max_connections_per_ip: int | None = setting(
        None, "most open connections of one client address; not for use behind a proxy (default: --max-connections)"
    )
    shutdown_grace_s: float = setting(
        30.0, "time for running requests to finish after SIGTERM or SIGINT", group="Server"
    )
    log_level: str = setting(
        "info", "least level of log lines: critical, error, warning, info or debug", group="Logging"
    )
    log_format: str = setting("text", "form of log lines: text or json")
    access_log: bool = setting(True, "a log line for each request")
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL that a span of each request is exported to, by OTLP over HTTP (default: nowhere); needs loraplex[otel]",
        group="Observability",
    )

    def __post_init__(self) -> None:
        checks = [
            (self.policy in POLICIES, f"policy must be one of {tuple(POLICIES)}, got {self.policy!r}"),
            (self.replica_requests >= 1, f"replica_requests must be >= 1, got {self.replica_requests}"),
            (self.max_attempts >= 1, f"max_attempts must be >= 1, got {self.max_attempts}"),
            (self.max_upload_bytes >= 1024, f"max_upload_bytes must be >= 1024, got {self.max_upload_bytes}"),
        ]
        for name in ("poll_interval_s", "connect_timeout_s", "answer_timeout_s"):
            value = getattr(self, name)
            checks.append((0 < value < inf, f"{name} must be > 0, got {value}"))
        for is_fine, text in checks:
            if not is_fine:
                raise ConfigError(text)

    @property
    def server_config(self) -> ServerConfig:
        """The same for the parts of the server that the router is made of. Raises ConfigError."""
        return ServerConfig(
            host=self.host,
            port=self.port,
            allowed_hosts=self.allowed_hosts,
            cors_allowed_origins=self.cors_allowed_origins,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            max_body_bytes=self.max_body_bytes,
            max_inflight_body_bytes=max(BODIES_BYTES, self.max_body_bytes, 2 * self.max_upload_bytes),
            max_connections=self.max_connections,
            max_connections_per_ip=self.max_connections_per_ip,
            shutdown_grace_s=self.shutdown_grace_s,
            log_level=self.log_level,
            log_format=self.log_format,
            access_log=self.access_log,
            otlp_traces_endpoint=self.otlp_traces_endpoint,
        )


def replica_urls(given: Sequence[str]) -> dict[str, str]:
    """URL by name, host:port. Raises ConfigError for what is no server's address, or is there twice."""
    from loraplex.views.remote import checked_url

    if not 1 <= len(given) <= MAX_REPLICAS:
        raise ConfigError(f"give 1 to {MAX_REPLICAS} replicas with --replica URL, got {len(given)}")
    found: dict[str, str] = {}
    for each in given:
        url = checked_url(each)
        parts = urlsplit(url)
        if parts.path or parts.query or parts.fragment or parts.username is not None:
            raise ConfigError(f"a replica is scheme://host:port without path, query or user, got {each!r}")
        name = parts.netloc.lower()
        if name in found:
            raise ConfigError(f"replica {name} is given twice")
        found[name] = url
    return found
