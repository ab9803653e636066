"""Directories without a tokenizer.json: converted as transformers converts them, or refused with what to install."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import ModelConfigError
from loraplex.text.conversion import has_tokenizer
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CORPUS, tiny_backend

pytestmark = pytest.mark.slow

TEXTS = (*CORPUS, "hello  world 12345 \n x", " lead", "", "a\tb", "<s>x</s> y")
HAS_EXTRA = all(importlib.util.find_spec(name) for name in ("sentencepiece", "tiktoken"))
with_extra = pytest.mark.skipif(not HAS_EXTRA, reason="the extra hf is not installed")
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


def directory(path: Path, **config: Any) -> Path:
    """A model directory without a tokenizer."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def write_tiktoken(file: Path) -> None:
    vocab = json.loads(tiny_backend("byte-bpe").to_str())["model"]["vocab"]
    printable = sorted((token for token in vocab if token.isascii() and token.isprintable()), key=vocab.__getitem__)
    pieces = [*(bytes([i]) for i in range(256)), *(t.encode() for t in printable if len(t) > 1 and "<" not in t)]
    file.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % i for i, piece in enumerate(pieces)))


def check_as_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    ours, oracle = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        token_ids = oracle(text)["input_ids"]
        assert ours.encode(text) == token_ids, text
        assert ours.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True), text
    assert ours.bos_token_id == oracle.bos_token_id
    assert oracle.eos_token_id in ours.eos_token_ids
    return ours


@with_extra
def test_a_sentencepiece_model(tmp_path: Path) -> None:
    import sentencepiece

    path = directory(tmp_path / "m", **LLAMA, legacy=False)
    (tmp_path / "corpus.txt").write_text("\n".join(CORPUS * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(path / "tokenizer"),
        vocab_size=450,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert has_tokenizer(path)
    ours = check_as_transformers(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    assert ours.encode(CORPUS[0]) == [ours.bos_token_id, *processor.encode(CORPUS[0])]
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert sorted(file.name for file in path.glob("*.json")) == ["config.json", "tokenizer_config.json"], "as it was"


@with_extra
def test_a_tiktoken_file(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>")
    write_tiktoken(path / "tokenizer.model")
    ours = check_as_transformers(path)
    assert ours.decode(ours.encode(CORPUS[1])) == CORPUS[1]


def test_without_the_extra_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, blocked = directory(tmp_path / "m", **LLAMA), tmp_path / "blocked"
    (path / "tokenizer.model").write_bytes(b"x")
    blocked.mkdir()
    (blocked / "sentencepiece.py").write_text("raise ImportError('No module named sentencepiece')")
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    with pytest.raises(ModelConfigError, match=r"its tokenizer\.model cannot be converted: .*'loraplex\[hf\]'"):
        Tokenizer.from_dir(path)


@with_extra
def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    """It would make an empty tokenizer of it."""
    path = directory(tmp_path / "m", **LLAMA)
    write_tiktoken(path / "qwen.tiktoken")
    with pytest.raises(ModelConfigError, match=r"has no tokenizer\.json, and its qwen\.tiktoken cannot be converted: "):
        Tokenizer.from_dir(path)


def test_a_directory_without_any_is_told(tmp_path: Path) -> None:
    path = directory(tmp_path / "m")
    assert not has_tokenizer(path)
    with pytest.raises(ModelConfigError, match=r"has no tokenizer\.json; copy it there"):
        Tokenizer.from_dir(path)
