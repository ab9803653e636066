"""What the fake model says, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core import CompletionOutput, Logprob, SamplingParams, TokenLogprobs
from loraplex.testing.fake_tokenizer import FakeTokenizer


@dataclass(slots=True)
class FakeCompletion:
    """One completion while it grows: `planned(i)` is its i-th token."""

    index: int
    reply: str
    params: SamplingParams
    max_tokens: int
    tokenizer: FakeTokenizer
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def grow(self) -> None:
        if self.finish_reason is not None:
            return
        token_id = self._planned(len(self.token_ids))
        self.token_ids.append(token_id)
        if token_id == FakeTokenizer.EOS or token_id in self.params.stop_token_ids:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id == FakeTokenizer.EOS else token_id
        elif self._stop_string() is not None:
            self.finish_reason, self.stop_reason = "stop", self._stop_string()
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"

    def _planned(self, position: int) -> int:
        body = self.tokenizer.encode(self.reply, add_special_tokens=False)
        is_end = not self.params.ignore_eos and position >= max(len(body), self.params.min_tokens)
        return FakeTokenizer.EOS if is_end else body[position % len(body)]

    def _text(self) -> str:
        is_stopped = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return self.tokenizer.decode(self.token_ids[:-1] if is_stopped else self.token_ids)

    def _stop_string(self) -> str | None:
        text = self._text()
        return next((stop for stop in self.params.stop if stop in text), None)

    def _visible_text(self) -> str:
        """Without the stop string, a piece of a character, or what may become a stop string."""
        text = self._text()
        if isinstance(self.stop_reason, str):
            end = text.index(self.stop_reason)
            return text[: end + len(self.stop_reason)] if self.params.include_stop_str_in_output else text[:end]
        if self.finish_reason is not None:
            return text
        text = text.rstrip("\ufffd")
        held = (
            length for stop in self.params.stop for length in range(len(stop), 0, -1) if text.endswith(stop[:length])
        )
        return text[: len(text) - max(held, default=0)]

    def output(self) -> CompletionOutput:
        count = self.params.logprobs
        logprobs = None if count is None else tuple(fake_logprobs(each, count) for each in self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self._visible_text(),
            token_ids=tuple(self.token_ids),
            cumulative_logprob=None if logprobs is None else sum(each[0].logprob for each in map(_values, logprobs)),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


def _values(logprobs: TokenLogprobs) -> list[Logprob]:
    return list(logprobs.values())


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token is the likeliest (-0.25); the next in the vocabulary follow, each half as likely as the one before."""
    candidates = [(token_id + offset) % FakeTokenizer.vocab_size for offset in range(max(count, 1))]
    text = FakeTokenizer().token_text
    return {each: Logprob(-0.25 - 0.5 * rank, rank + 1, text(each)) for rank, each in enumerate(candidates)}
