"""Token ids, bytes and special tokens of every kind of tokenizer, and the files of a model directory."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from loraplex.errors import InvalidRequestError, ModelConfigError, ModelNotFoundError
from loraplex.text.tokenizer import Tokenizer, read_eos_token_ids
from tests.text.tiny_tokenizers import CORPUS, KINDS, SPECIAL, tiny_backend, write_directory

EOS = 480
TOKENIZERS = {kind: Tokenizer(tiny_backend(kind)) for kind in KINDS}


# ------------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_directory(tmp_path, kind)
    ours, oracle = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)
    for text in (*CORPUS, "", " ", "a  b\n", "😀<|im_end|>x<tool call>", "\x00\ufffd"):
        for adds in (True, False):
            token_ids = ours.encode(text, add_special_tokens=adds)
            assert token_ids == oracle(text, add_special_tokens=adds).input_ids
            for skips in (True, False):
                assert ours.decode(token_ids, skips) == oracle.decode(token_ids, skip_special_tokens=skips)
    assert ours.special_tokens_map == oracle.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_ids) == (oracle.bos_token_id, (oracle.eos_token_id,))
    assert ours.vocab_size == len(oracle)


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = TOKENIZERS["byte-bpe"]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_text_of_many_ids_is_that_of_one_call(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), min_size=250, max_size=400))
    for skips in (True, False):
        assert tokenizer.decode(token_ids, skips) == tokenizer.backend.decode(token_ids, skip_special_tokens=skips)


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_run_while_many_ids_become_text(kind: str) -> None:
    """Without an interval at which the interpreter's lock is taken away: where it is kept, nothing ticks."""
    backend = tiny_backend(kind)
    backend.add_tokens([AddedToken("x" * 100, normalized=False)])
    tokenizer, ticks, has_ended = Tokenizer(backend), [0], threading.Event()
    token_ids = [tokenizer.token_id("x" * 100)] * 100_000

    def tick() -> None:
        while not has_ended.wait(1e-4):
            ticks[0] += 1

    thread, interval = threading.Thread(target=tick), sys.getswitchinterval()
    thread.start()
    try:
        while not ticks[0]:
            time.sleep(1e-3)
        sys.setswitchinterval(100)
        before = ticks[0]
        text = tokenizer.decode(token_ids)
        after = ticks[0]
    finally:
        sys.setswitchinterval(interval)
        has_ended.set()
        thread.join()
    assert text.count("x") == 10_000_000
    assert after > before


def test_batch_is_the_texts_one_by_one() -> None:
    tokenizer = TOKENIZERS["sentencepiece-bpe"]
    assert tokenizer.encode_batch(CORPUS) == [tokenizer.encode(text) for text in CORPUS]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_batch(["the"], add_special_tokens=False) == [tokenizer.encode("the")[1:]]


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", None, 3, b"x"], ids=repr)
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no valid Unicode text"):
        TOKENIZERS["byte-bpe"].encode(text)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70])
def test_what_is_no_token_id_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{wrong} is no token id"):
        TOKENIZERS["byte-bpe"].decode([5, wrong])


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_ids_have_no_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    beyond = tokenizer.vocab_size + 7
    assert tokenizer.decode([beyond]) == ""
    assert tokenizer.token_text(beyond) == ""
    assert tokenizer.token_bytes(-1) == b""
    assert not tokenizer.has_token(beyond)


def test_the_longest_added_token_is_known() -> None:
    backend = tiny_backend(KINDS[0])
    longest = Tokenizer(backend).longest_added_token
    backend.add_tokens(["<" + "x" * longest + ">"])
    assert Tokenizer(backend).longest_added_token == longest + 2 < 100


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_what_decoding_skips(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.special_ids == {tokenizer.token_id(token) for token in SPECIAL}


def test_texts_of_single_tokens() -> None:
    byte_bpe, pieces = TOKENIZERS["byte-bpe"], TOKENIZERS["sentencepiece-bpe"]
    for tokenizer in (byte_bpe, pieces):
        token_ids = tokenizer.encode("the fox 😀", add_special_tokens=False)
        assert [tokenizer.token_bytes(i) for i in token_ids[-4:]] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
        assert tokenizer.token_text(token_ids[-1]) == "\ufffd"
        assert b"".join(map(tokenizer.token_bytes, token_ids)).decode().strip() == "the fox 😀"
    assert TOKENIZERS["metaspace-unigram"].token_text(TOKENIZERS["metaspace-unigram"].encode("the")[-1])[0] != "\u2581"
    for token in ("<|im_end|>", "<tool call>"):
        for tokenizer in TOKENIZERS.values():
            token_id = tokenizer.token_id(token)
            assert token_id is not None
            assert tokenizer.token_text(token_id) == token


def test_a_tokens_text_is_one_object() -> None:
    """A new one for each candidate of an answer's log probabilities was a kilobyte of a long token."""
    backend = tiny_backend("byte-bpe")
    base = Tokenizer(backend)
    backend.add_tokens(["😀" * 256])
    own = Tokenizer(backend, base=base)
    for token_id in (*base.encode("fox"), own.vocab_size - 1):
        assert own.token_text(token_id) is own.token_text(token_id)
    assert own.token_text(own.vocab_size - 1) == "😀" * 256
    assert own.token_text(5) is base.token_text(5)


def test_padding_and_truncation_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny_backend("byte-bpe")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(tmp_path).encode(CORPUS[0])) == len(TOKENIZERS["byte-bpe"].encode(CORPUS[0]))


# ------------------------------------------------------------------------------------------------- special tokens


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (EOS,)),
        (None, {"eos_token_id": 7}, (EOS, 7)),
        ({"eos_token_id": [9, EOS, 8]}, {"eos_token_id": 7}, (EOS, 9, 8)),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, (EOS, 3)),
        ({}, {"eos_token_id": None}, (EOS,)),
        ({"eos_token_id": EOS}, {"eos_token_id": 7}, (EOS,)),
    ],
)
def test_eos_ids_of_all_files(generation: Any, config: Any, expected: tuple[int, ...], tmp_path: Path) -> None:
    files = {"generation_config": generation, "config": config}
    path = write_directory(tmp_path, **{name: content for name, content in files.items() if content is not None})
    assert Tokenizer.from_dir(path).eos_token_ids == expected
    (path / "tokenizer.json").unlink()
    assert set(read_eos_token_ids(path)) | {EOS} == set(expected)  # known without a tokenizer too


def test_no_eos_at_all(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_dir(path)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.special_tokens_map) == ((), None, {})


@pytest.mark.parametrize("wrong", ["</s>", [1, "2"], True, -1, [[1]], 1.5], ids=str)
def test_wrong_eos_is_named(wrong: Any, tmp_path: Path) -> None:
    path = write_directory(tmp_path, generation_config={"eos_token_id": wrong})
    with pytest.raises(ModelConfigError, match=r"generation_config.json .* eos_token_id must be a token id"):
        Tokenizer.from_dir(path)


def decoder_entry(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


SPECIAL_FILES: dict[str, dict[str, Any]] = {
    "objects": {"tokenizer_config": {"eos_token": {"__type": "AddedToken", **decoder_entry("<|im_end|>")}}},
    "new tokens": {
        "tokenizer_config": {
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "added_tokens_decoder": {
                "488": decoder_entry("<pad>", special=True),
                "487": decoder_entry("<eos>", special=True),
                "489": decoder_entry("<plain>", special=False),
            },
        }
    },
    "extra": {"tokenizer_config": {"extra_special_tokens": ["</think>", "<extra>"]}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<a>", "<b>"]}},
    "named extra": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<audio>"}},
    "old map": {
        "tokenizer_config": {},
        "special_tokens_map": {"eos_token": decoder_entry("<|im_end|>"), "pad_token": "</s>"},
    },
    "becomes special": {"tokenizer_config": {"eos_token": "</think>"}},
    "null": {"tokenizer_config": {"eos_token": None, "pad_token": None}},
}


@pytest.mark.parametrize("case", SPECIAL_FILES)
def test_special_tokens_as_transformers_reads_them(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_directory(tmp_path, **SPECIAL_FILES[case])
    ours, oracle = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)
    assert ours.special_tokens_map == oracle.special_tokens_map
    assert (ours.eos_token_ids or (None,)) == (oracle.eos_token_id,)
    text = "the fox<|im_end|></think>x<eos><pad><plain> <a><b><extra><image><audio></s>"
    token_ids = ours.encode(text)
    assert token_ids == oracle(text).input_ids
    assert ours.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True)
    assert "".join(ours.decode([i]) for i in token_ids) == ours.decode(token_ids)
    assert {i for i in token_ids if not ours.decode([i])} == ours.special_ids & set(token_ids)


# ---------------------------------------------------------------------------------------------------- what is missing


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is no directory"):
        Tokenizer.from_dir(tmp_path / "nowhere")


def test_no_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"no tokenizer.json; copy it there.*token ids work without a tokenizer"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 3}'])
def test_damaged_tokenizer_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelConfigError, match="json is no tokenizer"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config", "generation_config", "config", "special_tokens_map"])
@pytest.mark.parametrize("content", ["", "{", "[1]", "\udcff"], ids=["empty", "cut", "list", "not UTF-8"])
def test_damaged_config_file(name: str, content: str, tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / f"{name}.json").write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(ModelConfigError, match=rf"{name}\.json"):
        Tokenizer.from_dir(path)


@pytest.mark.parametrize("stated", [3, [3], [{"name": "x"}], ["x"], [{"name": "x", "template": 3}]], ids=json.dumps)
def test_damaged_chat_template(stated: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="chat_template must be a string or a list"):
        Tokenizer.from_dir(write_directory(tmp_path, tokenizer_config={"chat_template": stated}))


@pytest.mark.parametrize("entries", [[3], {"x": {"content": "y"}}, 7], ids=str)
def test_damaged_added_tokens(entries: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="special or added tokens cannot be read"):
        Tokenizer.from_dir(write_directory(tmp_path, tokenizer_config={"added_tokens_decoder": entries}))


def test_chat_template_file_that_is_no_text(tmp_path: Path) -> None:
    path = write_directory(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelConfigError, match=r"chat_template.jinja cannot be read as UTF-8"):
        Tokenizer.from_dir(path)
