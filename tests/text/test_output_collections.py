"""Texts that grow: what an output had at its step stays, however the text grows."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import CompletionOutput
from loraplex.text.output_collections import GrowingCompletion, TextPieces


def completion(text: TextPieces, **values: Any) -> GrowingCompletion:
    return GrowingCompletion(text, index=0, token_ids=(), **values)


@given(st.lists(st.text(max_size=3), max_size=300), st.data())
def test_each_output_has_the_text_of_its_step(pieces: list[str], data: st.DataObject) -> None:
    grown, outputs, texts = TextPieces(), [], [""]
    outputs.append(completion(grown))
    for piece in pieces:
        grown.append(piece)
        texts.append(texts[-1] + piece)
        outputs.append(completion(grown))
    step = data.draw(st.integers(0, len(pieces)))
    begin = data.draw(st.integers(0, len(texts[step])))
    for output, text in zip(outputs, texts, strict=True):
        assert (output.text, output.num_chars) == (text, len(text))
    assert outputs[step].text_from(begin) == texts[step][begin:]


def test_small_pieces_become_one() -> None:
    grown = TextPieces()
    for _ in range(1000):
        grown.append("ab")
    assert len(grown.pieces) <= 1000 // TextPieces.SMALL + TextPieces.SMALL
    assert completion(grown).text == "ab" * 1000


def test_what_is_new_is_found_without_the_rest() -> None:
    """A step that joins all of it costs as much as the answer is long."""

    class Counted(str):
        joined = 0

        def __len__(self) -> int:
            Counted.joined += 1
            return super().__len__()

    grown = TextPieces()
    for _ in range(60):
        grown.append(Counted("word"))
    Counted.joined = 0
    assert completion(grown).text_from(59 * 4) == "word"
    assert Counted.joined <= 2


def test_the_other_fields_are_those_of_a_completion() -> None:
    grown = TextPieces()
    grown.append("text")
    output = completion(grown, finish_reason=None, cumulative_logprob=-1.0)
    assert isinstance(output, CompletionOutput)
    assert (output.index, output.token_ids, output.cumulative_logprob) == (0, (), -1.0)
    assert "text='text'" in repr(output)
