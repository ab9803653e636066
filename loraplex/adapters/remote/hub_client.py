"""The HTTP client of huggingface_hub: what a hub answers is bounded before it is read, and names no file.

The library makes file names of the ETag and the commit that a hub, a mirror, or what stands between says; reads answers
of its API, errors and redirects whole, decompressed, and page after page as long as there are some; takes of a file
what is sent; waits as long as it is told to; and sends its token wherever a page says that the next one is. Its client
gets hooks here, once in a process, which hold for models too. Xet, another way to a file, has a client of its own,
which has none: what names it is taken out of the answers, and files come as they are.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from loraplex.bounds.json_size import excess_of

MAX_ANSWER_BYTES = 2**23
MAX_ANSWER_VALUES = 2**17
"""Of an answer that is no file: of the API, a redirect, an error. Its parser is one call, in which no other thread of
the server runs: 12 ms for so many values."""

MAX_REQUESTS = 32
"""For one list of files."""

MAX_PAUSE_S = 30
"""That a hub may ask for before the next request."""

_NAMES = {
    "etag": re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"?'),
    "x-linked-etag": re.compile(r'(?:W/)?"?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"?'),
    "x-repo-commit": re.compile("[0-9a-f]{40}"),
}
"""Headers that become names of files, and what they may be."""

_RESET = re.compile(r";\s*t=([0-9]+)")

XET_HASH = "x-xet-hash"
"""Names a file to Xet."""

_IS_API = "loraplex.is_api"
"""Of a request and of those that it is redirected to."""

_lock = threading.Lock()
_fetch: ContextVar[HubFetch | None] = ContextVar("fetch", default=None)


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


class HubFetch:
    """What the requests of one fetch may take, all that the library makes of its own accord included: they end by a
    deadline, since the library waits as long as a hub asks it to, and for some answers without end."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self.requests_left: int | None = None
        self.bytes_left: int | None = None

    @property
    def left_s(self) -> float:
        """Raises HubAnswerError when nothing is left."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise HubAnswerError("the hub has taken too long")
        return left_s

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Around requests of one list."""
        self.requests_left = MAX_REQUESTS
        with self._running():
            yield
        self.requests_left = None

    @contextmanager
    def receiving(self, num_bytes: int) -> Iterator[None]:
        """Around requests for one file of so many bytes, those that go on where one broke off included."""
        self.bytes_left = num_bytes
        with self._running():
            yield
        self.bytes_left = None

    @contextmanager
    def _running(self) -> Iterator[None]:
        token = _fetch.set(self)
        try:
            yield
        finally:
            _fetch.reset(token)

    def begin(self, request: Any) -> None:
        if self.requests_left is not None:
            if self.requests_left == 0:
                raise HubAnswerError(f"the hub lists its files in more than {MAX_REQUESTS} answers")
            self.requests_left -= 1
        left_s, timeouts = self.left_s, request.extensions.get("timeout", {})
        for name in ("connect", "read", "write", "pool"):
            timeouts[name] = min(left_s, timeouts.get(name) or left_s)
        request.extensions["timeout"] = timeouts

    def take(self, num_bytes: int) -> None:
        """More of a file. Raises HubAnswerError for more than there are in it."""
        _ = self.left_s
        if self.bytes_left is not None:
            self.bytes_left -= num_bytes
            if self.bytes_left < 0:
                raise HubAnswerError("the hub sends more of a file than it has listed")

    def check_pause(self, headers: Any) -> None:
        """Raises HubAnswerError for a pause that is too long."""
        asked = [headers.get("retry-after", ""), *_RESET.findall(headers.get("ratelimit", ""))]
        pause_s = max(map(_number, asked))
        if pause_s > MAX_PAUSE_S:
            raise HubAnswerError(f"the hub answers again in {pause_s:g} s")


def _number(text: str) -> float:
    """As the library reads it, or more; of a date, which it passes over, 0."""
    try:
        return float(text)
    except ValueError:
        return 0.0


class _Guarded:
    """A client factory. All fetches share one client, and the library closes it when an address takes no connection:
    here it gets another one then, and those that use the one before end with what they have begun."""

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    def __call__(self) -> Any:
        client = self._before()
        client.close = lambda: None  # its connections end with its last user
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", ()), _on_request],
            "response": [*hooks.get("response", ()), _on_response],
        }
        return client


def _on_request(request: Any) -> None:
    from huggingface_hub import constants

    fetch = _fetch.get()
    if fetch is not None:
        fetch.begin(request)
    if _origin_of(str(request.url)) != _origin_of(constants.ENDPOINT):
        request.headers.pop("authorization", None)
    if "/api/" in request.url.path:
        request.extensions[_IS_API] = True
    request.headers["accept-encoding"] = "identity"


def _origin_of(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _on_response(response: Any) -> None:
    """Before its body is read."""
    for name, pattern in _NAMES.items():
        value = response.headers.get(name)
        if value is not None and not pattern.fullmatch(value):
            raise HubAnswerError(f"the hub's {name} is none: {value[:80]!r}")
    response.headers.pop(XET_HASH, None)
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HubAnswerError(f"the hub's answer is in {encoding[:80]!r}, which was not asked for")
    fetch = _fetch.get()
    if fetch is not None:
        fetch.check_pause(response.headers)
    is_file = response.is_success and _IS_API not in response.request.extensions
    stream_type = sys.modules[type(response).__module__.partition(".")[0]].SyncByteStream
    response.stream = type("_Bounded", (_Bounded, stream_type), {})(response.stream, fetch, is_file)


class _Bounded:
    """A body that is no longer than it may be. A file outside of a fetch, of a base model, may have any length."""

    def __init__(self, stream: Any, fetch: HubFetch | None, is_file: bool) -> None:
        self._stream = stream
        self._fetch = fetch
        self._is_file = is_file

    def __iter__(self) -> Iterator[bytes]:
        if self._is_file:
            for piece in self._stream:
                if self._fetch is not None:
                    self._fetch.take(len(piece))
                yield piece
        else:
            yield self._counted()

    def _counted(self) -> bytes:
        answer = bytearray()
        for piece in self._stream:
            answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise HubAnswerError(f"the hub's answer has more than {MAX_ANSWER_BYTES} bytes")
            if self._fetch is not None:
                self._fetch.take(0)
        excess = excess_of(bytes(answer), MAX_ANSWER_VALUES)
        if excess is not None:
            raise HubAnswerError(f"the hub's answer has too many {excess.value}")
        return bytes(answer)

    def close(self) -> None:
        self._stream.close()
