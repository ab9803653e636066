"""Reading an event stream whose events have names."""

from __future__ import annotations

import json
from typing import Any


def typed_events(body: bytes) -> list[dict[str, Any]]:
    """The JSON of each event, which says the name of its event as its type."""
    *parts, rest = body.decode().split("\n\n")
    assert rest == "", "the stream does not end with an empty line"
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
