"""The deployments: engines, and the ingress behind Serve's proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from loraplex import logs
from loraplex.errors import EngineOverloadedError
from loraplex.lora_modules import start_engine
from loraplex.serve.exchange import Call, Head
from loraplex.serve.ingress import ReplicaLostError, Watch, create_ingress, open_tenants
from loraplex.serve.replica import Replica, server_of_replica
from loraplex.serve.settings import RayConfig
from loraplex.server.auth import KeyRing
from loraplex.server.connections import Connections
from loraplex.tenants.fair_limit import MOST_OF_LIMIT

ENGINES = "engines"
FIGURES_EVERY_S = 1.0
LAST_WORDS_S = 10.0
"""After the grace for requests: for the end of the engine."""

NUM_INGRESSES = 2
"""So that one is there while the other is replaced."""

START_TRIES = 3
"""Of a replica; what is wrong with its settings stays so."""


class EngineReplica:
    """What Serve calls, in an event loop of the replica's own."""

    async def __init__(self, config: RayConfig) -> None:  # type: ignore[misc]  # Serve waits for it
        server = server_of_replica(config.server)
        logs.configure(server.log_level, server.log_format, with_root=True)
        engine = await start_engine(config.engine, server, config.modules)
        self._replica = Replica(serve.get_replica_context().replica_id.unique_id, engine, config)

    async def answer(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        parts = self._replica.answer(call)
        try:
            async for part in parts:
                yield part
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    def check_health(self) -> None:
        self._replica.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        return await self._replica.figures()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._replica.levels()

    async def __del__(self) -> None:
        """Serve calls it when the replica's requests are over."""
        await self._replica.close()


class RayFleet:
    """The replicas behind a handle. num_fronts: that share their places."""

    def __init__(self, handle: DeploymentHandle, watch: Watch, config: RayConfig, num_fronts: int = 1) -> None:
        self._handle = handle.options(method_name="answer", stream=True)
        self._watch = watch
        self._num_of_replica = config.ray.ray_replica_requests
        self._num_fronts = num_fronts
        self.max_waiting = config.engine.max_waiting_requests

    @property
    def num_running(self) -> int:
        return self._watch.num_running

    @property
    def num_places(self) -> int:
        return max(1, self.num_running * self._num_of_replica // self._num_fronts)

    async def send(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        parts = self._handle.remote(call)
        is_over = False
        try:
            async for part in parts:
                yield part
            is_over = True
        except BackPressureError as error:
            raise EngineOverloadedError(f"{error}; try again later") from error
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            is_over = True
            raise ReplicaLostError(f"its process is gone ({type(error).__name__})") from error
        except DeploymentUnavailableError as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            if not is_over:
                parts.cancel()


def count_running(application: str) -> int:
    """Replicas that take requests."""
    found = serve.status().applications.get(application)
    engines = None if found is None else found.deployments.get(ENGINES)
    return 0 if engines is None else engines.replica_states.get("RUNNING", 0)


def failure(application: str) -> str:
    """Why its engines did not start, as the last of them said."""
    found = serve.status().applications.get(application)
    engines = None if found is None else found.deployments.get(ENGINES)
    lines = [] if engines is None else [line.strip() for line in engines.message.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error: " in line), "see the logs of Ray Serve")


def engines(config: RayConfig) -> serve.Application:
    """The engines alone, for a front that has a handle of them."""
    ray_settings, server = config.ray, config.server
    options = {"num_cpus": ray_settings.ray_num_cpus, "num_gpus": ray_settings.ray_num_gpus}
    deployment = serve.deployment(
        name=ENGINES,
        ray_actor_options=options,
        max_ongoing_requests=MOST_OF_LIMIT * ray_settings.ray_replica_requests,
        max_queued_requests=config.engine.max_waiting_requests,
        max_constructor_retry_count=START_TRIES,
        graceful_shutdown_timeout_s=server.shutdown_grace_s + LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=5.0,
        logging_config={"enable_access_log": False},
        request_router_config=RequestRouterConfig(
            request_router_class="loraplex.serve.ray_router:PolicyRequestRouter",
            request_router_kwargs={
                "policy": ray_settings.ray_policy,
                "max_requests": ray_settings.ray_replica_requests,
            },
            request_routing_stats_period_s=FIGURES_EVERY_S,
        ),
        **_scale(config),
    )
    return deployment(EngineReplica).bind(config)


def _scale(config: RayConfig) -> dict[str, Any]:
    settings = config.ray
    if settings.max_replicas == settings.ray_min_replicas:
        return {"num_replicas": settings.ray_min_replicas}
    scaling: dict[str, Any] = {}
    if settings.ray_target_first_token_s is not None:
        scaling["policy"] = AutoscalingPolicy(
            policy_function="loraplex.serve.scaling:QueueAndServiceLevels",
            policy_kwargs={"max_late_share": settings.ray_max_late_share},
        )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.ray_min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.ray_target_requests,
            upscale_delay_s=settings.ray_upscale_delay_s,
            downscale_delay_s=settings.ray_downscale_delay_s,
            **scaling,
        )
    }


def application(config: RayConfig) -> serve.Application:
    """The engines with an ingress. Raises ConfigError."""
    config.check_behind_proxies()
    server, num_ingresses = config.server, min(NUM_INGRESSES, config.ray.ray_min_replicas)
    num_places = config.ray.max_replicas * config.ray.ray_replica_requests

    def build() -> Any:
        name = serve.get_replica_context().app_name
        watch = Watch(lambda: count_running(name))
        watching = asyncio.ensure_future(watch.run())
        fleet = RayFleet(serve.get_deployment_handle(ENGINES, name), watch, config, num_ingresses)
        app = create_ingress(fleet, server, Connections(server, 1), KeyRing.of(server, open_tenants(server)))
        app.state.watching = watching  # the loop has weak references alone
        return app

    ingress = serve.deployment(
        name="ingress",
        num_replicas=num_ingresses,
        max_ongoing_requests=MOST_OF_LIMIT * (num_places + config.engine.max_waiting_requests) + 1000,
        graceful_shutdown_timeout_s=server.shutdown_grace_s + LAST_WORDS_S,
        logging_config={"enable_access_log": False},
        ray_actor_options={"num_cpus": 0.1},
    )
    return ingress(serve.ingress(build)()).bind(engines(config))
