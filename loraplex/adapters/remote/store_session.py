"""The HTTP session of an object store: answers are bounded before they are read, and nothing leads elsewhere.

aiobotocore's own session follows redirects to any host and reads every answer whole, however long it is. Imported with
s3fs, when the first source of a store is given.
"""

from __future__ import annotations

from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

MAX_ANSWER_BYTES = 2**21
"""Of an answer that is no object: a list of 1,000 keys of 1,024 bytes, or an error."""

MAX_TAGS = 50_000
"""Of its XML, and attributes: the parser holds the interpreter's lock, 2 MiB of empty tags take it 0.2 s."""


REGION = "x-amz-bucket-region"
"""Of a redirect: botocore goes to that region, once. Without it, it asks for the region, is redirected, and asks."""


class OddAnswerError(Exception):
    """What the store sent is no list of 1,000 objects."""


class RedirectError(Exception):
    """The store sends elsewhere."""


class BoundedSession(AIOHTTPSession):  # type: ignore[misc]
    """Raises OddAnswerError, and RedirectError for a redirect that is not to another region."""

    async def send(self, request: Any) -> Any:
        is_object, request.stream_output = request.stream_output, True  # else the whole answer is read now
        answer = await super().send(request)
        if not is_object or answer.status_code >= 300:
            answer._content = await _bounded(answer.raw)
        if answer.status_code in (301, 302, 307, 308) and REGION not in answer.headers:
            raise RedirectError(f"status {answer.status_code}, and no region")
        return answer

    async def _get_session(self, proxy_url: str | None) -> Any:
        return _Staying(await super()._get_session(proxy_url))


class _Staying:
    """aiohttp's session, which asks the host that it was told to and no other."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, **settings: Any) -> Any:
        return await self._session.request(method, allow_redirects=False, **settings)


async def _bounded(raw: Any) -> bytes:
    pieces: list[bytes] = []
    num_bytes = num_tags = 0
    async for piece in raw.content.iter_any():
        pieces.append(piece)
        num_bytes += len(piece)
        num_tags += piece.count(b"<") + piece.count(b"=")
        if num_bytes > MAX_ANSWER_BYTES or num_tags > MAX_TAGS:
            raw.close()
            raise OddAnswerError(f"more than {MAX_ANSWER_BYTES} bytes or {MAX_TAGS} tags")
    answer = b"".join(pieces)
    if b"<!" in answer:  # botocore's parser takes every answer for UTF-8
        raise OddAnswerError("a declaration: entities may become a thousand times as long")
    return answer
