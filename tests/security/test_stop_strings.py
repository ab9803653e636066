"""Stop strings that cost more than the tokens: bounded in all, prepared once, one step a character."""

from __future__ import annotations

import pytest

from loraplex.core import SamplingParams
from loraplex.errors import InvalidRequestError
from loraplex.sampling_params import MAX_STOP_CHARS, MAX_STOP_STRINGS
from loraplex.text import detokenizer
from loraplex.text.detokenizer import StopMatcher, StopTable
from tests.security.http_target import HealthProbe, HttpTarget

HALF = "ab" * (MAX_STOP_CHARS // 4)


@pytest.mark.parametrize(
    "stop",
    [
        ["a" * 2**18 + str(index) for index in range(4)],
        ["a" * (MAX_STOP_CHARS + 1)],
        "a" * (MAX_STOP_CHARS + 1),
        [HALF, HALF, "x"],
        [str(index) for index in range(MAX_STOP_STRINGS + 1)],
        ["a"] * 2**20,
    ],
    ids=["4 of 256 KiB", "one too long", "one text", "too long in all", "too many", "a million"],
)
def test_too_much_is_refused(stop: list[str] | str) -> None:
    with pytest.raises(InvalidRequestError, match="stop has") as refused:
        SamplingParams(stop=stop)
    assert len(refused.value.message) < 200


def test_as_much_as_may_be() -> None:
    assert SamplingParams(stop=[HALF, HALF]).stop == (HALF, HALF)
    assert SamplingParams(stop=["abc"] * MAX_STOP_STRINGS).stop == ("abc",) * MAX_STOP_STRINGS


def test_a_table_is_made_once_for_all_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class CountedTable(StopTable):
        def __init__(self, stops: tuple[str, ...]) -> None:
            made.append(len(stops))
            super().__init__(stops)

    monkeypatch.setattr(detokenizer, "StopTable", CountedTable)
    params = SamplingParams(n=16, stop=[HALF, "once for all"])
    for index in range(params.n):
        StopMatcher(params.child(index).stop)
    assert made == [2]


@pytest.mark.parametrize("text", ["a" * 5000, "ab" * 2500, "b" * 5000, "abb" * 1700])
def test_a_character_costs_a_constant(text: str) -> None:
    """Counted: how often the automaton looks at a node, for the texts that fall back the most."""
    stops = [*("a" * length + "c" for length in range(1, 40)), "ab" * 500 + "c", "ab" * 600 + "d"]
    matcher, looks = StopMatcher(stops), 0

    class CountedChildren(list[dict[str, int]]):
        def __getitem__(self, index: object) -> dict[str, int]:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().__getitem__(index)  # type: ignore[index]

    matcher._table = StopTable(stops)
    matcher._table.children = CountedChildren(matcher._table.children)
    assert matcher.feed(text) is None
    assert looks <= 3 * len(text)


def test_the_server_goes_on_meanwhile() -> None:
    stops = ",".join(f'"{"a" * 2**18}{index}"' for index in range(4))
    body = f'{{"model": "base", "prompt": "hi", "n": 16, "stop": [{stops}]}}'.encode()
    with HttpTarget() as target, HealthProbe(target) as probe:
        reply = target.send("/v1/completions", body)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "stop")
    assert len(reply.body) < 500
    assert probe.longest_s < 1.0
