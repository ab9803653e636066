"""Tokenizers of GGUF metadata, as transformers reads them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from loraplex.errors import ModelConfigError
from loraplex.text import gguf_tokenizer
from loraplex.text.gguf_tokenizer import PATTERNS, tokenizer_of
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CORPUS, SPECIAL, tiny_backend

TEXTS = (*CORPUS, "hello  world 12345 \n x", "a\tb", "it's <|im_start|>user\nyes</think>no", "e\u0301 \u1e9b\u0323", "")


def byte_level(pre: str = "qwen2", **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer."""
    state = json.loads(tiny_backend("byte-bpe").to_str())
    vocab = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    own = {"<tool call>": 4, "</think>": 4, **dict.fromkeys(SPECIAL, 3)}
    found = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [own.get(token, 1) for token in tokens],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        **changes,
    }
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None} | template


def sentencepiece(**changes: Any) -> dict[str, Any]:
    state = json.loads(tiny_backend("sentencepiece-bpe").to_str())["model"]["vocab"]
    tokens = sorted(state, key=state.__getitem__)
    kinds = [2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens]
    found = {
        "model": "llama",
        "tokens": tokens,
        "scores": [float(-i) if kind == 1 else 0.0 for i, kind in enumerate(kinds)],
        "token_type": kinds,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def read(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_of(metadata, "m.gguf")
    assert tokenizer is not None
    return tokenizer


def oracle_of(metadata: dict[str, Any]) -> Any:
    """transformers' own reader of the same metadata, which adds no token at the ends."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    return convert_gguf_tokenizer("llama", fields)[0]


@pytest.mark.parametrize("pre", [pre for pre in PATTERNS if pre not in ("smollm", "default", "")])
def test_byte_level_text_is_cut_as_transformers_cuts_it(pre: str) -> None:
    metadata = byte_level(pre)
    ours, oracle = read(metadata), oracle_of(metadata)
    for text in TEXTS:
        expected = oracle.encode(text, add_special_tokens=False).ids
        composed = pre in ("qwen2", "deepseek-r1-qwen") and "\u0301" in text  # NFC, as tokenizer.json of Qwen has it
        if not composed:
            assert ours.encode(text, add_special_tokens=False) == expected, text
            assert ours.decode(expected, skip_special_tokens=False) == oracle.decode(
                expected, skip_special_tokens=False
            )
    assert ours.decode(ours.encode("it's <|im_start|>")) == "it's "


def test_sentencepiece_text_is_cut_as_transformers_cuts_it() -> None:
    metadata = sentencepiece()
    ours, oracle = read(metadata), oracle_of(metadata)
    for text in TEXTS:
        expected = oracle.encode(text, add_special_tokens=False).ids
        if not text.startswith(" "):
            assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text)[0] == 1, "the token before a text, which llama.cpp adds, too"
        assert ours.decode(ours.encode(text)) == text


def test_tokens_at_the_ends_names_and_template() -> None:
    plain, framed = read(byte_level()), read(byte_level(add_bos_token=True, add_eos_token=True))
    bos, eos = plain.bos_token_id, plain.eos_token_ids[0]
    assert framed.encode("The fox") == [bos, *plain.encode("The fox"), eos]
    assert plain.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}
    assert plain.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    more = read(byte_level(eot_token_id=plain.token_id("<|im_end|>")))
    assert more.eos_token_ids == (eos, plain.token_id("<|im_end|>"))
    assert tokenizer_of({"general.architecture": "llama"}, "m.gguf") is None


@pytest.mark.parametrize("pre", [pre for pre in PATTERNS if pre])
def test_old_files_leave_the_token_before_a_text_to_the_name(pre: str) -> None:
    """As llama.cpp has it: files of these names need not say that a text begins with it."""
    tokenizer = read(byte_level(pre))
    begins = pre in ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
    assert (tokenizer.encode("The fox")[0] == tokenizer.bos_token_id) == begins
    asked, not_asked = read(byte_level(pre, add_bos_token=True)), read(byte_level(pre, add_bos_token=False))
    plain = tokenizer.encode("The fox", add_special_tokens=False)
    assert asked.encode("The fox") == [tokenizer.bos_token_id, *plain]
    assert not_asked.encode("The fox") == plain


@pytest.mark.parametrize("pre", ["llama-bpe", "falcon3", "tekken", "qwen2"])
def test_a_word_that_is_a_token_needs_no_merges(pre: str) -> None:
    metadata = byte_level(pre, merges=[], add_bos_token=False)
    word = max((t for t in metadata["tokenizer.ggml.tokens"] if t.isascii() and t.isalpha()), key=len)
    assert (len(read(metadata).encode(word)) == 1) == (pre != "qwen2")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported are gpt2 and llama"),
        ({"pre": "odd"}, "tokenizer.ggml.pre 'odd' is not supported"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": ["a", "a"]}, "has a token twice"),
        ({"tokens": [1]}, "tokenizer.ggml.tokens has to be a list of str"),
        ({"token_type": [1]}, "1 kinds for"),
        ({"merges": ["zz zz"]}, "cannot be read"),
        ({"bos_token_id": 10**9}, "cannot be read"),
        ({"bos_token_id": "x"}, "cannot be read"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError, match=r"m\.gguf: its tokenizer .*--tokenizer") as caught:
        tokenizer_of(byte_level(**changes), "m.gguf")
    assert reason in str(caught.value)


def test_scores_are_needed_for_each_piece() -> None:
    with pytest.raises(ModelConfigError, match="2 scores for"):
        tokenizer_of(sentencepiece(scores=[0.0, 1.0]), "m.gguf")


def test_pieces_are_bounded_before_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sentencepiece()["tokenizer.ggml.tokens"]
    own = {"scores": [0.0] * (len(tokens) + 1), "token_type": None}

    def refused(piece: str, reason: str, **changes: Any) -> None:
        metadata = sentencepiece(**{"tokens": [*tokens, piece], **own, **changes})
        with pytest.raises(ModelConfigError, match=reason):
            tokenizer_of({key: value for key, value in metadata.items() if value is not None}, "m.gguf")

    refused("a" * 2000, "a piece of 2000 characters; at most 1024")
    with pytest.raises(ModelConfigError, match="a piece of 2000 characters"):
        tokenizer_of(byte_level(tokens=["a" * 2000], token_type=None), "m.gguf")
    monkeypatch.setattr(gguf_tokenizer, "MAX_TEXT_CHARS", 50)
    refused("ab", r"pieces of \d+ characters together; at most 50")
    monkeypatch.undo()
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGES", 20)
    refused("ab", "more than 20 merges")
    monkeypatch.setattr(gguf_tokenizer, "MAX_ENTRIES", 20)
    with pytest.raises(ModelConfigError, match=r"tokenizer.ggml.tokens has \d+ entries; at most 20"):
        tokenizer_of(byte_level(), "m.gguf")


def test_merges_take_memory_for_pieces_that_are_there_alone() -> None:
    piece = "ab" * 512
    vocab = {piece: 0, "a": 1, piece[1:]: 2}
    tracemalloc.start()
    merges = gguf_tokenizer._merges_of(vocab, [(piece, 0.0, 1)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert merges == [("a", piece[1:])]
    assert peak < 64 * len(piece), "a list of all cuts has the square of the piece's length"
