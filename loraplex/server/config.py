"""Settings of the HTTP server. The command line takes its names, defaults and help from the fields."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from loraplex.adapters.merging.wish import MAX_MERGE_BYTES
from loraplex.adapters.remote.fetched import MAX_FETCHED_BYTES
from loraplex.adapters.remote.hub import HUB_PREFIX
from loraplex.adapters.remote.object_store import OBJECT_PREFIX, ObjectAdapter
from loraplex.adapters.sources.named import NamedSources
from loraplex.adapters.sources.uploads import MAX_STORED_BYTES, MAX_UPLOAD_BYTES, UploadLimits
from loraplex.config import DEFAULT_DATABASE_PATIENCE_S, RegistryDatabase, setting
from loraplex.errors import AdapterPathNotFoundError, ConfigError
from loraplex.frontend.runners.settings import RunnerSettings
from loraplex.private_folder import private_folder
from loraplex.sampling_params import MAX_PRIORITY
from loraplex.server.api_keys import MAX_KEYS, MIN_KEY_CHARS, fingerprint, is_key
from loraplex.text.tools.answer import REASONING_PARSERS, TOOL_CALL_PARSERS

DATABASE_VARIABLE = "LORAPLEX_DATABASE_URL"
MIN_DATABASE_PATIENCE_S = 0.5
"""The database is asked every 0.2 s."""

MIN_ENGINE_TIMEOUT_S = 3.0
"""An idle engine is heard about once a second."""

_HOST = re.compile(r"\*|(\*\.)?[\w.-]+|\[?[0-9A-Fa-f:.]+\]?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
_NO_HOST = "allowed_hosts has {!r}; write a name without scheme and port, such as api.example.com"
_NO_ORIGIN = "cors_allowed_origins has {!r}; write scheme://host[:port] without a path, such as https://app.example.com"
_NO_ROOT = "adapter_roots has {!r}, which is no place in an object store; write s3://bucket or s3://bucket/prefix"
_ENDPOINT = re.compile(r"https?://[^/\s@?#]+(/[^\s?#]*)?")
MAX_TOP_ADAPTERS = 1000
"""Each has six series."""

ON_BAD_ADAPTER = ("refuse", "skip")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server runs, whatever it serves. Sizes are bytes, times seconds."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    share_prefix_cache: bool = setting(
        False,
        "cached prompt prefixes shared between API keys; one key may then find out what another has sent",
        group="Security",
    )
    disable_dynamic_loading: bool = setting(
        False,
        "refusal of requests that load, replace or unload an adapter; adapters come from the command line, its "
        "--adapter-source included, and --state-dir alone",
    )
    guard_metrics: bool = setting(False, "API key required for /metrics, where the server has keys")
    cors_allowed_origins: tuple[str, ...] = setting(
        (),
        "origin of web pages that may call this server, such as https://app.example.com; repeatable",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "further host name of this server; *.example.com, or * for any; repeatable (default: loopback names on a "
        "loopback host; elsewhere any name with API keys, addresses and local names without)",
        flag="--allowed-host",
    )
    ssl_certfile: str | None = setting(None, "TLS certificate with its chain, in PEM; the server then speaks https")
    ssl_keyfile: str | None = setting(None, "private key of the TLS certificate (default: in the certificate's file)")
    ssl_ca_certs: str | None = setting(None, "certificates of authorities that client certificates must come from")
    ssl_cert_reqs: int = setting(0, "client certificates: 0 not asked for, 1 checked when sent, 2 required")
    max_body_bytes: int = setting(16 * 2**20, "longest request body; longer ones are answered with 413", group="Limits")
    max_header_bytes: int = setting(
        32 * 2**10, "longest request line with its headers; longer ones are answered with 431"
    )
    header_timeout_s: float = setting(
        30.0, "time for the headers of a request to arrive; then the connection is closed"
    )
    strict_fields: bool = setting(
        False,
        "refusal of fields that cannot change an answer (metadata, store, user, session_id, ...)",
    )
    body_timeout_s: float = setting(
        30.0, "time for a request's body to arrive, unless it comes at --min-transfer-rate; then 408"
    )
    send_timeout_s: float = setting(
        60.0, "time for a client to read an answer, unless at --min-transfer-rate; then the connection is closed"
    )
    min_transfer_rate: int = setting(4096, "least bytes per second of bodies and answers that take longer")
    max_inflight_body_bytes: int = setting(
        256 * 2**20, "total bytes of bodies of all unfinished requests; beyond it they are answered with 503"
    )
    max_waiting_tokens: int = setting(
        2**23, "most prompt tokens of the requests that wait or run; further requests are answered with 429"
    )
    max_connections: int | None = setting(
        None, "most open connections; others are answered with 503 (default: by the open files limit, at most 5000)"
    )
    max_connections_per_ip: int | None = setting(
        None, "most open connections of one client address; not for use behind a proxy (default: --max-connections)"
    )
    max_sequences_per_request: int = setting(1024, "most completions (prompts times n) of one request")
    state_dir: str | None = setting(
        None,
        "directory where adapters' names, versions, pins and counters outlive the server (default: nowhere)",
        group="Server",
    )
    database_url: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "PostgreSQL database where servers of one base model share adapters' names, versions, pins and "
            "counters; other users see a password in the list of processes, the variable LORAPLEX_DATABASE_URL is "
            "better (default: none)",
            "group": None,
            "flag": None,
        },
    )
    database_patience_s: float = setting(
        DEFAULT_DATABASE_PATIENCE_S,
        "time without an answer of the database after which adapters are refused, since another server may have "
        "changed them",
    )
    adapter_output_dir: str | None = setting(
        None,
        "directory for adapters that merges and exports make, one folder each (default: such requests are refused)",
    )
    max_merge_bytes: int = setting(MAX_MERGE_BYTES, "most memory of one merge or export; larger ones are refused")
    max_upload_bytes: int = setting(
        MAX_UPLOAD_BYTES, "longest upload of an adapter's files or tensors; longer ones are answered with 413"
    )
    max_stored_upload_bytes: int = setting(
        MAX_STORED_BYTES,
        "most bytes on disk of all uploaded adapters, in the state directory or a temporary folder; further uploads "
        "are refused",
    )
    on_bad_adapter: str = setting(
        "refuse",
        "what an adapter of --lora-modules or --lora-paths that cannot be loaded does: refuse (the server does not "
        "start), or skip (it starts without it)",
        group="Model and adapters",
    )
    adapter_sources: tuple[str, ...] = setting(
        (),
        "place from which a request for an unknown name loads its adapter: NAME=DIR (its directories), NAME=hf://ORG, "
        "NAME=hf://ORG/REPO (its folders) or NAME=s3://BUCKET/PREFIX; TENANT/NAME=... for one tenant; repeatable",
        group="Model and adapters",
        flag="--adapter-source",
    )
    max_sourced_adapters: int = setting(
        10_000,
        "most names that came from --adapter-source; beyond it one that was not used for long is unloaded",
        group="Model and adapters",
    )
    max_fetched_bytes: int = setting(
        MAX_FETCHED_BYTES,
        "most bytes on disk of adapters that requests fetched from the hub and object stores, in the state directory "
        "or a temporary folder; beyond it those that nothing uses are removed",
        group="Model and adapters",
    )
    tool_call_parser: str = setting(
        "auto",
        "form of tool calls in answers: hermes, llama3_json, mistral, pythonic, qwen3, or auto (by the chat template "
        "of the model or adapter)",
        group="Model and adapters",
    )
    allow_grammars: bool = setting(
        False,
        "accept grammars that clients write (structured_outputs.grammar, guided_grammar). What they cost cannot be "
        "bounded as that of schemas and regular expressions is: for trusted clients alone",
    )
    reasoning_parser: str | None = setting(
        None, "form of thoughts in answers, which become reasoning_content: qwen3 (default: they are content)"
    )
    max_event_streams: int = setting(
        64, "most clients of GET /v1/events at a time; others are answered with 503", group="Limits"
    )
    data_parallel_size: int | None = setting(
        None,
        "engine processes behind this server, each with the model and memory of its own (vLLM's name; default: as many "
        "as --devices, or 1)",
        group="Engine process",
    )
    devices: str | None = setting(
        None, "device of each engine process, such as cuda:0,cuda:1 or cpu:0,cpu:1 (CPUs share the threads out)"
    )
    placement: str = setting(
        "latency",
        "choice of the engine process for a request: latency (least estimated time to the first token), pack (the "
        "busiest with room), spread (the shortest queue)",
    )
    min_runners: int | None = setting(
        None,
        "least engine processes that run; others end while the load does not need them, and their requests move to the "
        "rest (default: all of them run)",
    )
    runner_idle_s: float = setting(60.0, "time without requests until an engine process beyond --min-runners ends")
    engine_timeout_s: float = setting(
        60.0,
        "seconds of silence until the engine process is killed and restarted; ten times as long for one that computes",
        group="Engine process",
    )
    standby_engine: bool = setting(
        True,
        "a second engine process without a model (about 240 MB), for restarts that need not import anything",
        group="Engine process",
    )
    max_engine_restarts: int | None = setting(
        None,
        "failed starts of the engine in a row until the server exits with code 1 (default: no limit, with pauses up "
        "to 60 s)",
        group="Engine process",
    )
    max_request_s: float | None = setting(
        None,
        "longest time of a generation request, waiting included; then it ends with 504 (default: no limit)",
        group="Limits",
    )
    max_priority: int = setting(
        0,
        "most levels that the `priority` of a request may go before (negative) or after others of its key; 0 refuses "
        "other priorities than 0",
        group="Limits",
    )
    probe_timeout_s: float = setting(
        10.0, "longest time for the token of `GET /health?probe=generate`, waiting included", group="Limits"
    )
    shutdown_grace_s: float = setting(
        30.0, "time for running requests to finish after SIGTERM or SIGINT", group="Server"
    )
    keep_alive_s: float = setting(30.0, "time until an idle connection is closed")
    log_level: str = setting(
        "info", "least level of log lines: critical, error, warning, info or debug", group="Logging"
    )
    log_format: str = setting("text", "form of log lines: text or json")
    access_log: bool = setting(True, "a log line for each request")
    metrics_top_adapters: int = setting(
        10,
        "adapters with series of their own in /metrics, those of the most tokens; all others are one sum",
        group="Observability",
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL that a span of each request is exported to, by OTLP over HTTP, such as http://collector:4318/v1/traces "
        "(default: nowhere); needs loraplex[otel]",
    )

    def __post_init__(self) -> None:
        assert self.runners.count, "what is wrong with them was raised"
        _refuse_first(
            [
                (bool(self.host), "host is empty; give an address such as 127.0.0.1"),
                (0 <= self.port <= 65535, f"port must be 0..65535, got {self.port}"),
                *((bool(_HOST.fullmatch(each)), _NO_HOST.format(each)) for each in self.allowed_hosts),
                *((bool(_ORIGIN.fullmatch(each)), _NO_ORIGIN.format(each)) for each in self.cors_allowed_origins),
                (self.max_body_bytes >= 1024, f"max_body_bytes must be >= 1024, got {self.max_body_bytes}"),
                (self.max_header_bytes >= 1024, f"max_header_bytes must be >= 1024, got {self.max_header_bytes}"),
                (0 < self.header_timeout_s < inf, f"header_timeout_s must be > 0, got {self.header_timeout_s}"),
                (0 < self.body_timeout_s < inf, f"body_timeout_s must be > 0, got {self.body_timeout_s}"),
                (0 < self.send_timeout_s < inf, f"send_timeout_s must be > 0, got {self.send_timeout_s}"),
                (self.min_transfer_rate >= 1, f"min_transfer_rate must be >= 1, got {self.min_transfer_rate}"),
                (
                    self.max_inflight_body_bytes >= self.max_body_bytes,
                    f"max_inflight_body_bytes must be >= max_body_bytes ({self.max_body_bytes}), "
                    f"got {self.max_inflight_body_bytes}",
                ),
                *self._connection_checks(),
                *self._tls_checks(),
                (
                    self.max_sequences_per_request >= 1,
                    f"max_sequences_per_request must be >= 1, got {self.max_sequences_per_request}",
                ),
                (self.max_event_streams >= 0, f"max_event_streams must be >= 0, got {self.max_event_streams}"),
                (
                    MIN_ENGINE_TIMEOUT_S <= self.engine_timeout_s < inf,
                    f"engine_timeout_s must be >= {MIN_ENGINE_TIMEOUT_S:g}, got {self.engine_timeout_s}",
                ),
                (
                    self.max_engine_restarts is None or self.max_engine_restarts >= 0,
                    f"max_engine_restarts must be >= 0, got {self.max_engine_restarts}",
                ),
                *self._request_checks(),
                (0 < self.probe_timeout_s < inf, f"probe_timeout_s must be > 0, got {self.probe_timeout_s}"),
                (0 <= self.shutdown_grace_s < inf, f"shutdown_grace_s must be >= 0, got {self.shutdown_grace_s}"),
                (
                    self.on_bad_adapter in ON_BAD_ADAPTER,
                    f"on_bad_adapter must be one of {ON_BAD_ADAPTER}, got {self.on_bad_adapter!r}",
                ),
                (self.max_merge_bytes >= 2**20, f"max_merge_bytes must be >= {2**20}, got {self.max_merge_bytes}"),
                *self._upload_checks(),
                *self._parser_checks(),
                *self._state_checks(),
                (0 < self.keep_alive_s < inf, f"keep_alive_s must be > 0, got {self.keep_alive_s}"),
                (self.log_level in LOG_LEVELS, f"log_level must be one of {LOG_LEVELS}, got {self.log_level!r}"),
                (self.log_format in LOG_FORMATS, f"log_format must be one of {LOG_FORMATS}, got {self.log_format!r}"),
                *self._observability_checks(),
            ]
        )

    def _upload_checks(self) -> list[tuple[bool, str]]:
        return [
            (self.max_upload_bytes >= 1024, f"max_upload_bytes must be >= 1024, got {self.max_upload_bytes}"),
            (
                self.max_stored_upload_bytes >= self.max_upload_bytes,
                f"max_stored_upload_bytes must be >= max_upload_bytes ({self.max_upload_bytes}), "
                f"got {self.max_stored_upload_bytes}",
            ),
        ]

    @property
    def upload_limits(self) -> UploadLimits:
        return UploadLimits(self.max_upload_bytes, self.max_stored_upload_bytes)

    @property
    def runners(self) -> RunnerSettings:
        """The engine processes. Raises ConfigError."""
        return RunnerSettings(
            self.data_parallel_size, self.devices, self.placement, self.min_runners, self.runner_idle_s
        )

    @property
    def sources(self) -> NamedSources:
        """Of adapters by need. Raises ConfigError."""
        return NamedSources.parse(self.adapter_sources)

    def _connection_checks(self) -> list[tuple[bool, str]]:
        limits = {
            "max_waiting_tokens": self.max_waiting_tokens,
            "max_connections": self.max_connections,
            "max_connections_per_ip": self.max_connections_per_ip,
        }
        return [(limit is None or limit >= 1, f"{name} must be >= 1, got {limit}") for name, limit in limits.items()]

    def _parser_checks(self) -> list[tuple[bool, str]]:
        return [
            (
                self.tool_call_parser in ("auto", *TOOL_CALL_PARSERS),
                f"tool_call_parser must be auto or one of {TOOL_CALL_PARSERS}, got {self.tool_call_parser!r}",
            ),
            (
                self.reasoning_parser in (None, *REASONING_PARSERS),
                f"reasoning_parser must be one of {REASONING_PARSERS}, got {self.reasoning_parser!r}",
            ),
        ]

    def _observability_checks(self) -> list[tuple[bool, str]]:
        most, endpoint = self.metrics_top_adapters, self.otlp_traces_endpoint
        return [
            (0 <= most <= MAX_TOP_ADAPTERS, f"metrics_top_adapters must be 0..{MAX_TOP_ADAPTERS}, got {most}"),
            (
                endpoint is None or bool(_ENDPOINT.fullmatch(endpoint)),
                "otlp_traces_endpoint is no http:// or https:// URL without user and query; headers of the exporter "
                "come from OTEL_EXPORTER_OTLP_HEADERS",
            ),
        ]

    def _request_checks(self) -> list[tuple[bool, str]]:
        return [
            (
                self.max_request_s is None or 0 < self.max_request_s < inf,
                f"max_request_s must be > 0, got {self.max_request_s}",
            ),
            (
                0 <= self.max_priority <= MAX_PRIORITY,
                f"max_priority must be 0..{MAX_PRIORITY}, got {self.max_priority}",
            ),
        ]

    def _state_checks(self) -> list[tuple[bool, str]]:
        most, most_bytes = self.max_sourced_adapters, self.max_fetched_bytes
        return [
            (most_bytes >= 2**20, f"max_fetched_bytes must be >= {2**20}, got {most_bytes}"),
            (self.sources is not None and most >= 1, f"max_sourced_adapters must be >= 1, got {most}"),
            (self.state_dir != "", "state_dir is empty; give a directory, or leave it out"),
            (self.adapter_output_dir != "", "adapter_output_dir is empty; give a directory, or leave it out"),
            (self.database_url != "", "database_url is empty; give postgresql://user@host/name, or leave it out"),
            (
                MIN_DATABASE_PATIENCE_S <= self.database_patience_s < inf,
                f"database_patience_s must be >= {MIN_DATABASE_PATIENCE_S:g}, got {self.database_patience_s}",
            ),
        ]

    def _tls_checks(self) -> list[tuple[bool, str]]:
        is_on = self.ssl_certfile is not None
        return [
            (is_on or self.ssl_keyfile is None, "ssl_keyfile needs ssl_certfile: give the certificate, too"),
            (is_on or self.ssl_ca_certs is None, "ssl_ca_certs needs ssl_certfile: give the server's certificate, too"),
            (self.ssl_cert_reqs in (0, 1, 2), f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}"),
            (
                (self.ssl_ca_certs is None) == (self.ssl_cert_reqs == 0),
                "ssl_ca_certs and ssl_cert_reqs 1 or 2 belong together: give both or none",
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ServerSettings):
    """All that the server needs beside the engine."""

    served_model_names: tuple[str, ...] = setting((), "names of the base model in the API (default: the model's own)")
    api_keys: tuple[str, ...] = field(
        default=(), repr=False, metadata={"help": "keys that clients must send as `Authorization: Bearer KEY`"}
    )
    admin_api_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={"help": "keys for the routes that change the server; other keys are then for inference"},
    )
    merged_into: tuple[str, ...] = setting(
        (), "names of the base model that are refused, since served_model_names is an adapter merged into its weights"
    )
    adapter_roots: tuple[str, ...] | None = setting(
        None,
        "directories that the load routes may read, hf://ORG for hub ids, or s3://BUCKET/PREFIX for an object store "
        "(default: anything on a loopback host, else nothing)",
    )

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)  # super() does not work in a dataclass with slots
        names = self.served_model_names
        _refuse_first(
            [
                (all(names), "served_model_names has an empty name"),
                (len(set(names)) == len(names), f"served_model_names has a name twice: {names}"),
                (
                    all(map(is_key, (*self.api_keys, *self.admin_api_keys))),
                    "an API key is empty or has a character that no header can carry",
                ),
                (
                    not set(self.api_keys) & set(self.admin_api_keys),
                    "a key is both an API key and an admin key; make them different, or clients have an operator's "
                    "rights",
                ),
                (
                    len(self.api_keys) + len(self.admin_api_keys) <= MAX_KEYS,
                    f"there are {len(self.api_keys) + len(self.admin_api_keys)} API keys, at most {MAX_KEYS} are "
                    "compared",
                ),
                (all(self.adapter_roots or ()), "adapter_roots has an empty directory"),
                *((_is_root(root), _NO_ROOT.format(root)) for root in self.adapter_roots or ()),
            ]
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should hear before the server listens. A key is named by its fingerprint."""
        checks = [
            (
                not self.is_loopback and not self.has_keys,
                f"{self.host} can be reached from other machines and there is no API key: everyone there may use and "
                "change this server; give --api-key-file and --admin-api-key-file",
            ),
            (
                not self.is_loopback and self.has_keys and not self.admin_api_keys and not self.disable_dynamic_loading,
                f"{self.host} can be reached from other machines and every API key may load, replace and unload "
                "adapters; give --admin-api-key-file, or --disable-dynamic-loading",
            ),
            (
                self.guard_metrics and not self.has_keys,
                "--guard-metrics changes nothing: without an API key /metrics is open",
            ),
            *(
                (
                    len(key) < MIN_KEY_CHARS,
                    f"the API key with fingerprint {fingerprint(key)} has fewer than {MIN_KEY_CHARS} characters",
                )
                for key in (*self.api_keys, *self.admin_api_keys)
            ),
        ]
        return tuple(text for is_due, text in checks if is_due)

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.admin_api_keys)

    @property
    def allowed_adapter_roots(self) -> tuple[str, ...] | None:
        """Where the load routes may read: None is anywhere, () nowhere."""
        if self.adapter_roots is not None:
            return self.adapter_roots
        return None if self.is_loopback else ()

    @property
    def local_adapter_roots(self) -> tuple[Path, ...] | None:
        """The directories among `allowed_adapter_roots`, symbolic links resolved."""
        roots = self.allowed_adapter_roots
        return None if roots is None else local_roots(roots)


def registry_database(
    config: ServerSettings, environment: MutableMapping[str, str] = os.environ
) -> RegistryDatabase | None:
    """The variable is removed: child processes inherit the environment. Raises ConfigError beside a state directory."""
    of_environment = environment.pop(DATABASE_VARIABLE, None)
    url = config.database_url or of_environment
    if url is None:
        return None
    if config.state_dir is not None:
        raise ConfigError("state_dir and database_url are two places for the same names; give one of them")
    if not url:
        raise ConfigError(f"{DATABASE_VARIABLE} is set and empty; unset it, or give postgresql://user@host/name")
    return RegistryDatabase(url, config.database_patience_s)


def output_folder(config: ServerSettings) -> Path | None:
    """Where made adapters are written, links resolved; made if it is missing. Raises ConfigError for one that others
    may write to, or that cannot be made."""
    if config.adapter_output_dir is None:
        return None
    remedy = "give another --adapter-output-dir"
    given = Path(config.adapter_output_dir).expanduser().absolute()
    folder = private_folder(given, "the folder of made adapters", remedy).resolve()
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"the folder of made adapters {folder} cannot be written to: {remedy}")
    return folder


def local_roots(roots: Iterable[str]) -> tuple[Path, ...]:
    """The directories among roots, symbolic links resolved; nothing is in one that is a loop of links."""
    found = []
    for root in roots:
        if not root.startswith((HUB_PREFIX, OBJECT_PREFIX)):
            with suppress(OSError, RuntimeError):
                found.append(Path(root).resolve())
    return tuple(found)


def _is_root(root: str) -> bool:
    try:
        return not root.startswith(OBJECT_PREFIX) or ObjectAdapter.parse(root) is not None
    except AdapterPathNotFoundError:
        return False


def _refuse_first(checks: list[tuple[bool, str]]) -> None:
    for is_fine, text in checks:
        if not is_fine:
            raise ConfigError(text)
