"""What an error says in its headers."""

from __future__ import annotations

import json
import pickle

import pytest

from loraplex.errors import (
    AdapterConflictError,
    AdapterFaultError,
    AdapterValidationError,
    EngineOverloadedError,
    InvalidRequestError,
    LoraplexError,
    error_from_payload,
)
from loraplex.server.api_error import error_response


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (AdapterFaultError("adapter 'a' is quarantined", 4.2), 503, "5"),
        (AdapterFaultError("adapter 'a' is quarantined", 0.1), 503, "1"),
        (EngineOverloadedError("too many"), 429, "1"),
        (LoraplexError("no"), 500, None),
    ],
)
def test_clients_are_told_when_to_come_again(error: LoraplexError, status: int, retry_after: str | None) -> None:
    for each in (error, error_from_payload(error.to_payload())):  # it comes from the engine's process
        response = error_response(each)
        assert (response.status_code, response.headers.get("Retry-After")) == (status, retry_after)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no", param="temperature"),
        AdapterValidationError("no", ("a", "b")),
        AdapterConflictError("no", param="name"),
        AdapterFaultError("no", 2.0),
    ],
)
def test_the_field_of_an_error_comes_through_from_another_process(error: LoraplexError) -> None:
    for each in (error, error_from_payload(error.to_payload()), pickle.loads(pickle.dumps(error))):
        assert (type(each), each.message) == (type(error), error.message)
        assert json.loads(error_response(each).body)["error"]["param"] == error.param


def test_the_code_names_the_error() -> None:
    body = json.loads(error_response(AdapterFaultError("adapter 'a' is quarantined")).body)
    assert (body["error"]["code"], body["error"]["type"]) == ("adapter_fault", "unavailable_error")


def test_half_a_character_in_a_message_is_escaped() -> None:
    """A file of an adapter may have one where a message names it."""
    response = error_response(AdapterConflictError("adapter 'a\ud800' is taken", param="\udfff"))
    assert response.status_code == 400
    assert json.loads(response.body)["error"]["message"] == "adapter 'a\\ud800' is taken"
