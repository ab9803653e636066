"""The HTTP server: OpenAI's and vLLM's routes, and Loraplex's own for adapters. See docs/http.md."""

from loraplex.server.app import create_app
from loraplex.server.config import ServerConfig
from loraplex.server.run import bind, run_server, serve

__all__ = ["ServerConfig", "bind", "create_app", "run_server", "serve"]
