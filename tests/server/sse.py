"""Reading what an event stream carried."""

from __future__ import annotations

import json
from typing import Any


def events(body: str | bytes) -> list[dict[str, Any]]:
    """The JSON of each event. The stream must end with [DONE] and carry nothing but `data:` lines."""
    text = body.decode() if isinstance(body, bytes) else body
    parts = text.split("\n\n")
    assert parts.pop() == "", "the stream does not end with an empty line"
    assert all(part.startswith("data: ") for part in parts)
    datas = [part.removeprefix("data: ") for part in parts]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of /v1/completions."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of /v1/chat/completions."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)
