"""Engines as replicas of Ray Serve: `loraplex serve --ray`, and `build_app` for a Serve application of one's own.

`build_app` needs the extra `loraplex[ray]`; what else is here, and has no `ray` in its name, does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loraplex.serve.settings import RayConfig, RaySettings

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["RayConfig", "RaySettings", "build_app"]


def build_app(config: RayConfig | Mapping[str, Any]) -> Application:
    """The application: an ingress behind Serve's proxies, and engines. A mapping has the fields of `RayConfig.of`.

    Raises ConfigError, also where the extra is not installed.
    """
    from loraplex.serve.settings import check_installed

    check_installed()
    from loraplex.serve.ray_application import application

    return application(config if isinstance(config, RayConfig) else RayConfig.of(config))
