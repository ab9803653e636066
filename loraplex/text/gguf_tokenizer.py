"""The tokenizer in the metadata of a GGUF file: byte-level BPE (`gpt2`) and sentencepiece's BPE (`llama`).

A file says pieces, their kinds, scores or merges; of how text is cut before, only a name (`tokenizer.ggml.pre`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from loraplex.errors import ModelConfigError, shown
from loraplex.text.tokenizer import Tokenizer

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _GPT4 % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _GPT4 % ""),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "default", "smollm", ""), ""),
}
"""tokenizer.ggml.pre -> what text is cut into before merging; "": as GPT-2 does."""

SINGLE_DIGITS = ("smollm",)

COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Those whose text is in NFC first."""

LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Those in which a word that is a token needs no merges, and whose texts begin with a token, unless the file says that
they do not."""

MAX_ENTRIES, MAX_PIECE_CHARS, MAX_TEXT_CHARS, MAX_MERGES = 2**21, 1024, 2**24, 2**21
"""Of a list, of a piece, of all pieces together, and what comes of them: many times what a vocabulary has."""

CONTROL, USER_DEFINED = 3, 4
"""Of tokenizer.ggml.token_type."""

_SPACE = "\u2581"
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """None for a file without one. Raises ModelConfigError for one that is not read; where: the file."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    try:
        return _Reader(metadata).tokenizer(kind)
    except Exception as error:  # tokenizers raises plain Exception
        remedy = "give the directory of another with --tokenizer"
        raise ModelConfigError(f"{where}: its tokenizer cannot be read: {error}; {remedy}") from error


class _Reader:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._list("tokens", str)
        if not self.tokens or len(set(self.tokens)) != len(self.tokens):
            raise ValueError("tokenizer.ggml.tokens is empty, or has a token twice")
        if (longest := max(map(len, self.tokens))) > MAX_PIECE_CHARS:
            raise ValueError(f"tokenizer.ggml.tokens has a piece of {longest} characters; at most {MAX_PIECE_CHARS}")
        if (together := sum(map(len, self.tokens))) > MAX_TEXT_CHARS:
            what = f"pieces of {together} characters together; at most {MAX_TEXT_CHARS}"
            raise ValueError(f"tokenizer.ggml.tokens has {what}")
        self.kinds: list[int] = self._list("token_type", int) or [1] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise ValueError(f"{len(self.kinds)} kinds for {len(self.tokens)} tokens")

    def tokenizer(self, kind: object) -> Tokenizer:
        if kind == "gpt2":
            backend = self._byte_level()
        elif kind == "llama":
            backend = self._sentencepiece()
        else:
            raise ValueError(f"tokenizer.ggml.model {shown(kind)} is not supported; supported are gpt2 and llama")
        special = {
            name: self.tokens[i] for key, name in _NAMED.items() if (i := self._get(f"{key}_token_id")) is not None
        }
        for token_kind, is_special in ((CONTROL, True), (USER_DEFINED, False)):
            named = [token for token, each in zip(self.tokens, self.kinds, strict=True) if each == token_kind]
            backend.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in named])
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
        self._add_ends(backend, special, kind == "llama" or self._get("pre") in LLAMA3_LIKE)
        ends = [self._get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        template = self._metadata.get("tokenizer.chat_template")
        return Tokenizer(
            backend,
            special_tokens_map=special,
            chat_templates={"default": template} if isinstance(template, str) else {},
            eos_token_ids=[i for i in ends if isinstance(i, int)],
        )

    def _byte_level(self) -> tokenizers.Tokenizer:
        pre = self._get("pre") or ""
        if pre not in PATTERNS:
            raise ValueError(f"tokenizer.ggml.pre {shown(pre)} is not supported; supported are {', '.join(PATTERNS)}")
        merges = [(left, right) for left, _, right in (text.partition(" ") for text in self._list("merges", str))]
        vocab = {token: i for i, token in enumerate(self.tokens)}
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in LLAMA3_LIKE))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[pre])
        backend.pre_tokenizer = byte_level
        if PATTERNS[pre]:
            split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        elif pre in SINGLE_DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        if pre in COMPOSED:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise ValueError(f"{len(scores)} scores for {len(self.tokens)} tokens")
        vocab = {token: i for i, token in enumerate(self.tokens)}
        unknown = self._get("unknown_token_id")
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab,
                _merges_of(vocab, [*zip(self.tokens, scores, self.kinds, strict=True)]),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        has_prefix = self._get("add_space_prefix", True)
        prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _add_ends(self, backend: tokenizers.Tokenizer, special: Mapping[str, str], begins: bool) -> None:
        """The token before a text (begins: where the file does not say), and the one behind it."""
        bos = special.get("bos_token") if self._get("add_bos_token", begins) else None
        eos = special.get("eos_token") if self._get("add_eos_token", False) else None
        if bos is None and eos is None:
            return
        single = " ".join(filter(None, (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0")))
        pair = f"{single} {single.replace(':0', ':1').replace('$A', '$B')}"
        ids = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
        backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self._get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
            raise ValueError(f"tokenizer.ggml.{key} has to be a list of {kind.__name__}")
        if len(found) > MAX_ENTRIES:
            raise ValueError(f"tokenizer.ggml.{key} has {len(found)} entries; at most {MAX_ENTRIES} are read")
        return found


def _merges_of(vocab: Mapping[str, int], pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """sentencepiece merges the pair whose piece has the highest score: every way to cut a piece into two, by score."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind not in (1, 5):  # of control tokens and bytes there is nothing to merge
            continue
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        if len(found) + len(known) > MAX_MERGES:
            raise ValueError(f"its pieces make more than {MAX_MERGES} merges")
        for left, right in sorted(known, key=lambda cut: (vocab[cut[0]], vocab[cut[1]])):
            found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda each: each[:3], reverse=True)
    return [(left, right) for *_, left, right in found]
