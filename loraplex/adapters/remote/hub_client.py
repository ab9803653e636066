"""The HTTP client of huggingface_hub: what a hub answers is bounded before it is read, and names no file.

The library makes file names of the ETag and the commit that a hub, a mirror, or what stands between says; reads answers
of its API whole, decompressed, and page after page as long as there are some; and sends its token wherever a page says
that the next one is. Its client gets hooks here, once in a process, which hold for models too.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 2**25
"""Of an answer that is no file."""

MAX_REQUESTS = 32
"""For one list of files."""

_NAMES = {
    "etag": re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"?'),
    "x-linked-etag": re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"?'),
    "x-repo-commit": re.compile("[0-9a-f]{40}"),
}
"""Headers that become names of files, and what they may be."""

_lock = threading.Lock()
_requests_left: ContextVar[int | None] = ContextVar("requests_left", default=None)


class HubAnswerError(OSError):
    """A hub's answer is none that a hub gives."""


def guard_client() -> None:
    """From now on. A client factory of the program is kept."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    with _lock:
        before = _http._GLOBAL_CLIENT_FACTORY
        if not isinstance(before, _Guarded):
            set_client_factory(_Guarded(before))


@contextmanager
def listing() -> Iterator[None]:
    """Around requests of one list."""
    token = _requests_left.set(MAX_REQUESTS)
    try:
        yield
    finally:
        _requests_left.reset(token)


class _Guarded:
    """A client factory."""

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    def __call__(self) -> Any:
        client = self._before()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", ()), _on_request],
            "response": [*hooks.get("response", ()), _on_response],
        }
        return client


def _on_request(request: Any) -> None:
    from huggingface_hub import constants

    left = _requests_left.get()
    if left is not None:
        if left == 0:
            raise HubAnswerError(f"the hub lists its files in more than {MAX_REQUESTS} answers")
        _requests_left.set(left - 1)
    if request.url.host != urlsplit(constants.ENDPOINT).hostname:
        request.headers.pop("authorization", None)
    if _is_api(request):
        request.headers["accept-encoding"] = "identity"


def _on_response(response: Any) -> None:
    """Before its body is read."""
    for name, pattern in _NAMES.items():
        value = response.headers.get(name)
        if value is not None and not pattern.fullmatch(value):
            raise HubAnswerError(f"the hub's {name} is none: {value[:80]!r}")
    if not _is_api(response.request):
        return
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HubAnswerError(f"the hub's answer is in {encoding[:80]!r}, which was not asked for")
    stream_type = sys.modules[type(response).__module__.partition(".")[0]].SyncByteStream
    response.stream = type("_Bounded", (_Bounded, stream_type), {})(response.stream)


def _is_api(request: Any) -> bool:
    return "/api/" in request.url.path


class _Bounded:
    """A body of at most MAX_ANSWER_BYTES."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        num_bytes = 0
        for piece in self._stream:
            num_bytes += len(piece)
            if num_bytes > MAX_ANSWER_BYTES:
                raise HubAnswerError(f"the hub's answer has more than {MAX_ANSWER_BYTES} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()
