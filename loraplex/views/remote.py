"""A running server, asked over HTTP with the standard library: for `loraplex top` and `loraplex profile --url`."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from loraplex.errors import ConfigError, LoraplexError

TIMEOUT_S = 30.0


class RemoteServer:
    """`url` as the ready line of `loraplex serve` says it, or host:port. The key, unless one is given, is the first in
    LORAPLEX_ADMIN_API_KEY, or else in LORAPLEX_API_KEY.

    Raises OSError without an answer, LoraplexError for an answer that is an error, ConfigError for what is no URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = checked_url(url)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._key = key_of_environment() if api_key is None else api_key

    def get(self, path: str) -> bytes:
        return self._answer(path, None)

    def get_json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def post(self, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> bytes:
        return self._answer(path, json.dumps({} if body is None else body).encode(), timeout_s)

    def _answer(self, path: str, body: bytes | None, timeout_s: float = TIMEOUT_S) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise LoraplexError(f"{self.url}{path}: {error.code}: {_message(error.read())}") from None
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLCertVerificationError):
                raise ConnectionError(_reason(error.reason)) from error
            remedy = "name the file with the certificate of its authority in the variable SSL_CERT_FILE"
            reason = error.reason.verify_message
            raise LoraplexError(f"{self.url}: its certificate is not trusted ({reason}): {remedy}") from None
        except http.client.HTTPException as error:
            hint = "; does it speak https?" if self.url.startswith("http:") else ""
            raise ConnectionError(f"the answer broke off{hint}") from error
        return answer


def _reason(error: str | BaseException) -> str:
    """In words, without Python's names around them."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def key_of_environment() -> str:
    """An admin's first: memory and events are an operator's to see."""
    keys = os.environ.get("LORAPLEX_ADMIN_API_KEY") or os.environ.get("LORAPLEX_API_KEY", "")
    return keys.split(",")[0]


def checked_url(url: str) -> str:
    """The URL of a server, with http:// before what is only host:port."""
    full = f"http://{url}" if re.fullmatch(r"[\w.-]+:\d+/?|\[[0-9A-Fa-f:.]+\]:\d+/?", url) else url
    try:
        parts = urllib.parse.urlsplit(full)
        is_url = parts.scheme in ("http", "https") and parts.port != 0 and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"url must be like http://127.0.0.1:8000 or 127.0.0.1:8000, got {url!r}")
    return full.rstrip("/")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would take the key elsewhere."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _message(answer: bytes) -> str:
    """Of an error in this server's form, or the beginning of whatever it is."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
