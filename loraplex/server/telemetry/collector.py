"""The HTTP session to a collector: its answers are bounded in bytes and seconds, for they are not needed.

requests reads an answer whole, decompressed, and its timeout is between two bytes: an answer of gigabytes, or of a byte
a second, would take the server's memory or the export's thread.
"""

from __future__ import annotations

import time
from typing import Any

import requests

MAX_ANSWER_BYTES = 1 << 16
"""As they come, without decompression. What is longer is cut off."""

ANSWER_S = 10.0
"""For all of an answer's body."""


class CollectorSession(requests.Session):
    """Sends as requests does, without redirects."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Raises requests.ConnectionError for an answer that does not end in time."""
        options |= {"stream": True, "allow_redirects": False}
        response = super().send(request, **options)
        try:
            body = _read(response.raw)
        finally:
            response.close()
        response._content, response._content_consumed = body, True
        return response


def _read(raw: Any) -> bytes:
    body, ends_s = b"", time.monotonic() + ANSWER_S
    while len(body) < MAX_ANSWER_BYTES:
        piece = raw.read1(MAX_ANSWER_BYTES - len(body), decode_content=False)
        if not piece:
            break
        body += piece
        if time.monotonic() > ends_s:
            raise requests.ConnectionError(f"the collector's answer did not end within {ANSWER_S:.0f} s")
    return body
