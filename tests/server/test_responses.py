"""How long texts are written: in pieces, and within a bound."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import InvalidRequestError
from loraplex.server import openai_api, responses, streaming
from loraplex.server.responses import AnswerRoom, Detokenized, encode, written_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXTS, st.integers(1, 5))
def test_a_text_in_pieces_is_the_same_json(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "TEXT_PIECE_CHARS", piece)
        assert encode(Detokenized(written_text(text, AnswerRoom()))) == encode(Detokenized(text))


def test_escapes_count() -> None:
    """A control character takes six bytes."""
    room = AnswerRoom()
    written_text("\x01" * (responses.MAX_WRITTEN_BYTES // 6), room)
    with pytest.raises(InvalidRequestError, match="texts of this answer take more than"):
        written_text("\x01", room)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "base", "prompt": ["abcdefgh"] * 9, "max_tokens": 0, "echo": True}),
        ("/v1/completions", {"model": "base", "prompt": "abcdefgh", "n": 9, "max_tokens": 8}),
        ("/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": "x" * 70}]}),
        ("/detokenize", {"model": "base", "tokens": list(range(65, 91)) * 3}),
    ],
)
async def test_an_answer_with_too_long_texts_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    assert (await client.post(path, json=body)).status_code == 200
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 50)
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert "texts of this answer take more than 50 bytes" in json.loads(reply.content)["error"]["message"]


def test_events_are_made_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the piece before them is taken: a client that pauses would get all of them in one piece of memory."""
    monkeypatch.setattr(streaming, "PIECE_BYTES", 10)
    made: list[int] = []

    def events() -> Iterator[bytes]:
        for number in range(7):
            made.append(number)
            yield b"%d234" % number

    pieces = streaming.in_pieces(events())
    assert made == []
    assert next(pieces) == b"023412342234"
    assert made == [0, 1, 2]
    assert [*pieces] == [b"323442345234", b"6234"]
    assert [*streaming.in_pieces(iter(()))] == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_in_pieces_is_the_same_stream(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": ["a", "b"]}
    body = {"model": "base", **asked, "n": 5, "max_tokens": 3, "stream": True, "return_token_ids": True}

    def texts(answer: httpx.Response) -> list[str]:
        events = [line for line in answer.text.splitlines() if line]
        assert events.pop() == "data: [DONE]"
        return sorted(json.dumps(json.loads(event.removeprefix("data: "))["choices"]) for event in events)

    whole = texts(await client.post(path, json=body))
    for module in (streaming, openai_api):
        monkeypatch.setattr(module, "PIECE_BYTES", 1)
    assert texts(await client.post(path, json=body)) == whole


async def test_what_a_stream_sends_of_a_choice_at_a_time_is_bounded(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_WRITTEN_BYTES", 300)
    body = {"model": "base", "prompt": "x" * 20, "max_tokens": 2, "echo": True, "logprobs": 5, "stream": True}
    answer = await client.post("/v1/completions", json=body)
    assert "log probabilities of this answer take more than 300 bytes" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
