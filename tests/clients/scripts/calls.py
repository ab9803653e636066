"""What the scripts beside this one share: where the server is, what its models answer, and a call that must fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

ErrorT = TypeVar("ErrorT", bound=BaseException)

URL = os.environ["CLIENT_URL"]
V1 = f"{URL}/v1"
KEY = os.environ["CLIENT_KEY"]
BLOCKED_KEY = os.environ.get("CLIENT_BLOCKED_KEY", "")
"""Of a tenant whose one request is spent; empty: the server has no keys."""
SLOW_KEY = os.environ.get("CLIENT_SLOW_KEY", "")
"""Of a tenant with a request in four seconds."""

PHRASE = "good morning"
ANSWERS = {"demo": "good morning", "reverse": "gninrom doog", "upper": "GOOD MORNING"}
UNSEEN = "rot13" if BLOCKED_KEY else "nothing-of-this-name"
"""No model for this key: on a server with tenants an adapter that is there and was not granted."""
USER: Any = [{"role": "user", "content": PHRASE}]


class Answer(BaseModel):
    """Bounded, so that a model which writes at random ends."""

    model_config = ConfigDict(extra="forbid")
    count: int = Field(ge=0, le=99)
    kind: Literal["red", "blue"]


def refused(kind: type[ErrorT], call: Callable[[], object]) -> ErrorT:
    """The error of a call that must be refused."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer!r}")
