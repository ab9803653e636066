"""Settings of an application on Ray Serve, and what they have to be for several replicas."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from loraplex.config import EngineConfig, LoRAConfig, setting
from loraplex.errors import ConfigError
from loraplex.lora_modules import check_lora_modules, parse_lora_modules
from loraplex.routing import POLICIES
from loraplex.server.api_keys import KeySettings
from loraplex.server.config import ServerConfig, registry_database

MAX_REPLICAS = 256
FAILED_STARTS = 3
"""Of an engine in a row, after which Serve replaces its replica; --max-engine-restarts says another number."""

NOT_ON_RAY = ("state_dir", "max_event_streams")
NOT_BEHIND_PROXIES = (
    *("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "keep_alive_s", "access_log"),
    *("max_header_bytes", "header_timeout_s", "body_timeout_s", "send_timeout_s", "min_transfer_rate"),
    *("max_inflight_body_bytes", "max_connections", "max_connections_per_ip"),
)
"""Settings of the port: Serve's proxies have the port of `build_app`, and settings of their own."""


def _refuse_first(checks: Sequence[tuple[bool, str]]) -> None:
    for is_fine, text in checks:
        if not is_fine:
            raise ConfigError(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """How engines run on Ray Serve. Times are seconds."""

    ray: bool = setting(
        False,
        "engines as replicas of a deployment of Ray Serve, with this server in front of them; needs loraplex[ray]",
        group="Ray Serve",
    )
    ray_address: str | None = setting(
        None, "address of a Ray cluster, or auto for the one of this machine (default: a new one, which ends with it)"
    )
    ray_application: str = setting("loraplex", "name of the Serve application, one for each such server of a cluster")
    ray_min_replicas: int = setting(1, "least replicas")
    ray_max_replicas: int | None = setting(None, "most replicas (default: --ray-min-replicas, nothing is scaled)")
    ray_target_requests: float = setting(
        32.0, "requests of a replica, waiting ones included, that Serve adds and removes replicas to come to"
    )
    ray_target_first_token_s: float | None = setting(
        None, "time to the first token above which a request is late (default: queues alone decide)"
    )
    ray_max_late_share: float = setting(0.05, "share of late requests above which Serve adds a replica")
    ray_upscale_delay_s: float = setting(30.0, "time for which more replicas must be needed before Serve adds them")
    ray_downscale_delay_s: float = setting(600.0, "time for which fewer must be needed before Serve removes them")
    ray_policy: str = setting(
        "latency",
        "choice of a replica: latency (least estimated time to the first token), pack (the busiest that has room), "
        "spread (the shortest queue)",
    )
    ray_replica_requests: int = setting(256, "requests of a replica; a client's further ones wait in front of it")
    ray_num_cpus: float = setting(1.0, "CPUs that a replica reserves in the cluster")
    ray_num_gpus: float = setting(0.0, "GPUs that a replica reserves in the cluster; it sees no other ones")

    def __post_init__(self) -> None:
        most = self.max_replicas
        checks = [
            (
                1 <= self.ray_min_replicas <= most <= MAX_REPLICAS,
                f"ray_min_replicas and ray_max_replicas must be 1 <= least <= most <= {MAX_REPLICAS}, got "
                f"{self.ray_min_replicas} and {most}",
            ),
            (self.ray_policy in POLICIES, f"ray_policy must be one of {tuple(POLICIES)}, got {self.ray_policy!r}"),
            (self.ray_replica_requests >= 1, f"ray_replica_requests must be >= 1, got {self.ray_replica_requests}"),
            (0 < self.ray_max_late_share < 1, f"ray_max_late_share must be in 0..1, got {self.ray_max_late_share}"),
            (bool(self.ray_application), "ray_application is empty; give a name, or leave it out"),
            (self.ray_address != "", "ray_address is empty; give host:port, ray://host:port or auto, or leave it out"),
        ]
        is_reached = most == self.ray_min_replicas or self.ray_target_requests < self.ray_replica_requests
        text = "ray_target_requests must be below ray_replica_requests, since Serve does not count requests that wait"
        checks.append((is_reached, f"{text}; got {self.ray_target_requests:g} and {self.ray_replica_requests}"))
        for name in ("ray_upscale_delay_s", "ray_downscale_delay_s", "ray_num_cpus", "ray_num_gpus"):
            checks.append((0 <= getattr(self, name) < inf, f"{name} must be >= 0, got {getattr(self, name)}"))
        for name in ("ray_target_requests", "ray_target_first_token_s"):
            value = getattr(self, name)
            checks.append((value is None or 0 < value < inf, f"{name} must be > 0, got {value}"))
        _refuse_first(checks)

    @property
    def max_replicas(self) -> int:
        return self.ray_min_replicas if self.ray_max_replicas is None else self.ray_max_replicas

    def lacks(self, resources: Mapping[str, float]) -> Iterator[str]:
        """What a cluster with these has too little of for the least number of replicas, in words."""
        for kind, setting_name, each in (
            ("CPU", "--ray-num-cpus", self.ray_num_cpus),
            ("GPU", "--ray-num-gpus", self.ray_num_gpus),
        ):
            wanted, found = self.ray_min_replicas * each, resources.get(kind, 0.0)
            if wanted > found:
                yield (
                    f"{self.ray_min_replicas} replicas reserve {wanted:g} {kind}s, and the cluster has {found:g}: the "
                    f"server is ready once it has more; {setting_name} is {each:g}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """All that an application is made of. modules: (name, path) of the adapters that each replica loads at its start.

    The database is in `server.database_url`. Raises ConfigError for settings that replicas cannot have.
    """

    engine: EngineConfig
    server: ServerConfig
    modules: tuple[tuple[str, str], ...] = ()
    ray: RaySettings = RaySettings()

    def __post_init__(self) -> None:
        check_lora_modules(self.modules, self.server.served_model_names)
        _check_default(self.server, NOT_ON_RAY, "does not apply on Ray: names outlive it with --database-url alone")
        can_change = self.engine.lora is not None and not self.server.disable_dynamic_loading
        shares = self.server.database_url is not None
        _refuse_first(
            [
                (
                    shares or not can_change or self.ray.max_replicas == 1,
                    f"{self.ray.max_replicas} replicas share their adapters' names in a database: give --database-url, "
                    "or --disable-dynamic-loading",
                )
            ]
        )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> RayConfig:
        """`model`, and as mappings of their settings `engine`, `lora` (None: off), `server`, `keys`, `ray`; then
        `served_model_names`, `adapter_roots` and `lora_modules` as lists. Keys and the database may be in the
        environment, as for a server. Raises ConfigError."""
        left = dict(arguments)
        try:
            model = left.pop("model")
        except KeyError:
            raise ConfigError("the application needs a model: a directory or hub id of the base model") from None
        lora = left.pop("lora", {})
        names = tuple(left.pop("served_model_names", ())) or (str(model).rstrip("/"),)
        modules = parse_lora_modules(left.pop("lora_modules", ()), base_names=names)
        keys = _made(KeySettings, "keys", left.pop("keys", {}))
        roots = left.pop("adapter_roots", None)
        own = {
            "served_model_names": names,
            "api_keys": keys.inference_keys(),
            "admin_api_keys": keys.admin_keys(),
            "adapter_roots": None if roots is None else tuple(roots),
        }
        server = _made(ServerConfig, "server", left.pop("server", {}), own)
        lora_config = None if lora is None else _made(LoRAConfig, "lora", lora)
        engine = _made(EngineConfig, "engine", left.pop("engine", {}), {"model": model, "lora": lora_config})
        ray = _made(RaySettings, "ray", left.pop("ray", {}))
        if left:
            raise ConfigError(f"the application has unknown fields {', '.join(sorted(map(str, left)))}: remove them")
        return cls(engine=engine, server=with_database(server), modules=modules, ray=ray)

    def check_behind_proxies(self) -> None:
        """Raises ConfigError for a setting of a port that the application has not."""
        why = "is of the port, which Serve's proxies have: set it in their http_options, or use `loraplex serve --ray`"
        _check_default(self.server, NOT_BEHIND_PROXIES, why)
        default = RaySettings()
        for name in ("ray_address", "ray_application"):
            is_default = getattr(self.ray, name) == getattr(default, name)
            _refuse_first([(is_default, f"{name} is for `loraplex serve --ray`: Serve's own deploy command says it")])


def with_database(server: ServerConfig) -> ServerConfig:
    """The same with the database of the environment. Raises ConfigError."""
    database = registry_database(server)
    return server if database is None else replace(server, database_url=database.url)


def check_installed() -> None:
    """Raises ConfigError where the extra is not there."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise ConfigError("Ray Serve is not installed: pip install 'loraplex[ray]'")


def _made(kind: Any, name: str, given: Mapping[str, Any], own: Mapping[str, Any] = {}) -> Any:
    """Lists of a file become tuples."""
    known = {each.name for each in fields(kind)} - set(own)
    unknown = [str(each) for each in given if each not in known]
    if unknown:
        raise ConfigError(f"{name} has unknown fields {', '.join(sorted(unknown))}: remove them")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return kind(**values, **own)


def _check_default(server: ServerConfig, names: Sequence[str], why: str) -> None:
    default = {each.name: each.default for each in fields(ServerConfig)}
    _refuse_first([(getattr(server, name) == default[name], f"{name} {why}") for name in names])
