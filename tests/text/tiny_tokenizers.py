"""Tokenizers of every kind that models come with, trained here on a few lines, and directories around them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. She sells sea shells by the sea shore, don't you know?",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 22), 'hello world')\n\n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Où est la bibliothèque?",
    "你好世界。今天天气很好。 こんにちは世界 안녕하세요 Привет, мир!",
)
KINDS = ("byte-bpe", "byte-bpe-in-sequence", "sentencepiece-bpe", "metaspace-unigram", "wordpiece", "no-decoder")
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


def _add_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("</think>", normalized=False)])
    bos = backend.token_to_id("<s>")
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", bos)]
        )
    return backend


def _byte_bpe() -> tokenizers.Tokenizer:
    """Llama 3, Qwen, GPT-2: bytes in a printable alphabet."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _byte_bpe_in_sequence() -> tokenizers.Tokenizer:
    """The same with its decoder wrapped, which hides that it is byte-level."""
    backend = _byte_bpe()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def _sentencepiece_bpe() -> tokenizers.Tokenizer:
    """Llama 2, Mistral: `_` for a space, one in front, `<0x..>` for what is not in the vocabulary."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def _metaspace_unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=260, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _no_decoder() -> tokenizers.Tokenizer:
    """Words, put together with spaces."""
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


_BUILDERS = dict(
    zip(
        KINDS,
        (_byte_bpe, _byte_bpe_in_sequence, _sentencepiece_bpe, _metaspace_unigram, _wordpiece, _no_decoder),
        strict=True,
    )
)


@cache
def _serialized(kind: str) -> str:
    return str(_add_special(_BUILDERS[kind]()).to_str())


def tiny_backend(kind: str) -> tokenizers.Tokenizer:
    """A fresh one each time: no test shares what it changes."""
    return tokenizers.Tokenizer.from_str(_serialized(kind))


def write_directory(
    path: Path, kind: str = "byte-bpe", tokenizer_config: dict[str, Any] | None = None, **files: Any
) -> Path:
    """A model directory: tokenizer.json, tokenizer_config.json and others by their names without `.json`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_serialized(kind), encoding="utf-8")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    full_config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **(tokenizer_config or {})}
    for name, content in {"tokenizer_config": full_config, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path
