"""Log probabilities in the two forms of the OpenAI API and in vLLM's form for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core import Logprob, TokenLogprobs
from loraplex.server.engine_surface import TokenizerSurface
from loraplex.server.responses import (
    AnswerRoom,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    written,
)

LOWEST_LOGPROB = -9999.0
"""What OpenAI sends for "very unlikely": JSON has no -Infinity."""


class TokenTexts:
    """The string that stands for a token in logprobs: its text, or `token_id:N` (`return_tokens_as_token_ids`)."""

    def __init__(self, tokenizer: TokenizerSurface, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def __call__(self, token_id: int, logprob: Logprob | None = None) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self._tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """A piece of a character has its own bytes here, where its text is U+FFFD."""
        return self._tokenizer.token_bytes(token_id)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    texts: TokenTexts,
    offset: int,
    room: AnswerRoom | None = None,
) -> CompletionLogprobs:
    """The legacy form. `logprobs` is parallel to `token_ids`; its entry is None for a prompt's first token."""
    tokens, chosen, tops, offsets = [], [], [], []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        logprob = None if candidates is None else candidates.get(token_id)
        text = texts(token_id, logprob)
        tokens.append(text)
        offsets.append(offset)
        chosen.append(None if logprob is None else finite(logprob.logprob))
        tops.append(None if candidates is None else written(_top_by_text(candidates, texts), room))
        offset += len(text)
    return CompletionLogprobs(text_offset=offsets, token_logprobs=chosen, tokens=tokens, top_logprobs=tops)


def _top_by_text(candidates: TokenLogprobs, texts: TokenTexts) -> dict[str, float]:
    """Two tokens may have one text (pieces of a character): the likelier is kept, so the largest value is there."""
    top: dict[str, float] = {}
    for token_id, logprob in _by_rank(candidates):
        top.setdefault(texts(token_id, logprob), finite(logprob.logprob))
    return top


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    num_top: int,
    texts: TokenTexts,
    room: AnswerRoom | None = None,
) -> ChatLogprobs:
    """The chat form: each token, then the `num_top` likeliest at its position (the token itself only if among them)."""
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        tops = [_top(key, value, texts) for key, value in _by_rank(candidates)[:num_top]]
        own = _top(token_id, candidates[token_id], texts)
        content.append(written(TokenLogprob(own.token, own.logprob, own.bytes, tops), room))
    return ChatLogprobs(content=content)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs | None], room: AnswerRoom | None = None) -> PromptLogprobs:
    return [
        None
        if candidates is None
        else written(
            {
                str(token_id): PromptLogprob(finite(item.logprob), item.rank, item.decoded_token)
                for token_id, item in candidates.items()
            },
            room,
        )
        for candidates in logprobs
    ]


def _top(token_id: int, logprob: Logprob, texts: TokenTexts) -> TopLogprob:
    text = texts(token_id, logprob)
    return TopLogprob(text, finite(logprob.logprob), list(texts.bytes_of(token_id)))


def _by_rank(candidates: TokenLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
