"""The HTTP server: OpenAI's and vLLM's routes, and Loraplex's own for adapters. See docs/http.md.

Importing it imports no FastAPI: the names below are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.server.app import create_app
    from loraplex.server.config import ServerConfig, ServerSettings
    from loraplex.server.listener import bind
    from loraplex.server.run import run_server, serve

_HOME_OF = {
    "create_app": "loraplex.server.app",
    "ServerConfig": "loraplex.server.config",
    "ServerSettings": "loraplex.server.config",
    "bind": "loraplex.server.listener",
    "run_server": "loraplex.server.run",
    "serve": "loraplex.server.run",
}

__all__ = ["ServerConfig", "ServerSettings", "bind", "create_app", "run_server", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'loraplex.server' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
