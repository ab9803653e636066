"""Latencies by adapter, with a clock that is set by hand."""

from __future__ import annotations

import pytest

from loraplex.core import FinishReason, Request, SamplingParams, TokenOutput
from loraplex.performance import requests as requests_module
from loraplex.performance.requests import OTHERS, Latencies, RequestRecorder, ServiceTargets


class Followed:
    """A recorder with its clock and its names."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.names = {1: "sql", 2: "chat"}
        self.recorder = RequestRecorder(ServiceTargets(1.0, 0.1), self.names.get, lambda: self.now_s)

    def begin(self, request_id: str, adapter_id: int | None = None) -> None:
        self.recorder.begin(Request(request_id, (1, 2), SamplingParams(), 8, 0, adapter_id=adapter_id))

    def tokens(self, at_s: float, request_id: str, count: int, reason: FinishReason | None = None) -> None:
        self.now_s = at_s
        self.recorder.see(TokenOutput(request_id, (5,) * count, reason))

    def of(self, name: str | None) -> Latencies:
        return self.recorder.by_adapter[name]


@pytest.fixture
def followed() -> Followed:
    return Followed()


def test_a_request_from_first_to_last(followed: Followed) -> None:
    followed.begin("a", 1)
    followed.tokens(0.5, "a", 1)
    followed.tokens(0.54, "a", 2)  # two at once share the time
    followed.tokens(0.64, "a", 1, FinishReason.LENGTH)
    latencies = followed.of("sql")
    assert (latencies.num_requests, latencies.num_finished, latencies.num_tokens) == (1, 1, 4)
    assert latencies.first_token.total_s == pytest.approx(0.5)
    assert (latencies.inter_token.count, latencies.inter_token.min_s) == (3, pytest.approx(0.02))
    assert latencies.end_to_end.total_s == pytest.approx(0.64)
    assert latencies.num_in_both == 1


def test_targets_are_kept_one_by_one(followed: Followed) -> None:
    followed.begin("late")
    followed.begin("slow")
    followed.tokens(0.5, "slow", 1)
    followed.tokens(1.5, "late", 1, FinishReason.STOP)
    followed.tokens(1.5, "slow", 1, FinishReason.STOP)
    base = followed.of(None)
    assert (base.num_finished, base.num_in_first_token, base.num_in_inter_token, base.num_in_both) == (2, 1, 1, 0)


def test_ends_of_other_kinds(followed: Followed) -> None:
    for request_id in ("stopped", "left", "failed", "aborted"):
        followed.begin(request_id, 2)
        followed.tokens(0.1, request_id, 1)
    followed.recorder.stop("stopped")
    followed.recorder.forget("left")
    followed.tokens(0.2, "failed", 0, FinishReason.ERROR)
    followed.tokens(0.2, "aborted", 0, FinishReason.ABORT)
    chat = followed.of("chat")
    assert (chat.num_requests, chat.num_finished, chat.num_failed, chat.end_to_end.count) == (4, 1, 1, 1)
    for request_id in ("stopped", "left", "unknown"):
        followed.tokens(9.0, request_id, 1)
        followed.recorder.stop(request_id)
        followed.recorder.forget(request_id)
    assert chat.num_tokens == 4


def test_a_version_is_counted_under_what_it_is_called_when_a_request_begins(followed: Followed) -> None:
    followed.begin("before", 1)
    followed.names.update({1: "sql@1", 3: "sql"})
    followed.begin("to the kept one", 1)
    followed.begin("to the new one", 3)
    followed.begin("gone", 7)
    found = {name: each.num_requests for name, each in followed.recorder.by_adapter.items()}
    assert found == {"sql": 2, "sql@1": 1, "adapter 7": 1}


def test_adapters_beyond_the_bound_are_counted_together(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_ADAPTERS", 2)
    for index, adapter_id in enumerate((1, 2, 3, 4, 1)):
        followed.begin(f"r{index}", adapter_id)
    assert {name: each.num_requests for name, each in followed.recorder.by_adapter.items()} == {
        "sql": 2,
        "chat": 1,
        OTHERS: 2,
    }
