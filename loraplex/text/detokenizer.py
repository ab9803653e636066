"""Token ids to text as they come, with stop strings.

The text of an output is what decoding prompt and output together adds to decoding the prompt alone. `update` returns
the part of it that no later token can change: bytes of an unfinished character wait, and so does a beginning of a stop
string. Joined, all deltas and `finish()` equal the decoding of everything. The cost of a token does not grow with the
output.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Protocol

from loraplex.core import SamplingParams
from loraplex.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
_MAX_UNFINISHED_TOKENS = 16
_MAX_RUN_TOKENS = 256
"""Of byte tokens: what a request has held at its end is decoded in one call, for all its completions at once."""

_REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """Text of a growing list of tokens. `push` returns what is certain by now, `flush` the rest."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level tokenizers: tokens are bytes, text is their UTF-8 with U+FFFD for what is invalid."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in context:
            self._decoder.decode(self._token_bytes(token_id))

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowStream:
    """Every other tokenizer: the difference between decoding a few tokens with and without the new ones.

    A run of byte tokens (`<0x..>`) has no text before it ends: one invalid byte turns all of it into U+FFFD. A run of
    _MAX_RUN_TOKENS is taken as ended at its last whole character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = list(context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        if token_id in self._skipped or not tokenizer.has_token(token_id):
            return ""
        self._held.append(token_id)
        if not tokenizer.is_byte_token(token_id):
            return self._settle(is_last=False)
        return "" if len(self._held) < _MAX_RUN_TOKENS else self._settle_run()

    def _settle_run(self) -> str:
        num_begun = _num_begun(b"".join(map(self._tokenizer.token_bytes, self._held[-3:])))
        border = len(self._held) - num_begun
        begun, self._held = self._held[border:], self._held[:border]
        text = self._settle(is_last=True)
        while 0x80 <= self._tokenizer.token_bytes(self._context[0])[0] < 0xC0 and len(self._context) > 1:
            del self._context[0]  # it begins with a whole character: else the rest of the run would seem invalid
        self._held = begun
        return text

    def flush(self) -> str:
        return self._settle(is_last=True) if self._held else ""

    def _settle(self, is_last: bool) -> str:
        tokens = self._context + self._held
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        if not is_last and self._tokenizer.has_split_characters and text.endswith(_REPLACEMENT):
            if len(self._held) < _MAX_UNFINISHED_TOKENS:
                return ""
            if num_begun := self._num_begun_tokens(tokens, text):
                begun, self._held = self._held[-num_begun:], self._held[:-num_begun]
                said = self._settle(is_last=True)
                self._held = begun
                return said
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        self._context, self._held = tokens[-_CONTEXT_TOKENS:], []
        return text[_common_length(before, text) :]

    def _num_begun_tokens(self, tokens: Sequence[int], text: str) -> int:
        """Tokens at the end that are one U+FFFD together: they may begin a character. 0: what they say is certain."""
        for num in (1, 2, 3):
            if text == self._tokenizer.decode(tokens[:-num], skip_special_tokens=False) + _REPLACEMENT:
                return num
        return 0


def _num_begun(end: bytes) -> int:
    """Bytes at the end of a text that begin a character of UTF-8 and do not finish it. end: its last three or more."""
    for num_bytes in (1, 2, 3):
        lead = end[-num_bytes]
        if lead >= 0xC0:
            return num_bytes if num_bytes < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) else 0
    return 0


def _common_length(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string found, and where it starts and ends in the text fed so far."""

    stop: str
    start: int
    end: int


class StopTable:
    """The automaton of Aho and Corasick: a character costs O(1) amortised, however many stop strings there are.

    A node is a beginning of a stop string. `children[n]` leads on by one character, `fallback[n]` is the longest proper
    suffix of n that is a node too, `found[n]` the longest stop string at the end of n. A table never changes: all
    completions of a request share one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            self.found[self._node_of(stop)] = stop
        self._link()

    def _node_of(self, stop: str) -> int:
        node = 0
        for character in stop:
            following = self.children[node].get(character)
            if following is None:
                following = self.children[node][character] = len(self.children)
                self.children.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.found.append(None)
            node = following
        return node

    def _link(self) -> None:
        """Level by level, since a fallback is always less deep."""
        queue = deque(self.children[0].values())
        while queue:
            node = queue.popleft()
            self.found[node] = self.found[node] or self.found[self.fallback[node]]
            for character, child in self.children[node].items():
                self.fallback[child] = self.advance(self.fallback[node], character)
                queue.append(child)

    def advance(self, node: int, character: str) -> int:
        """The longest end of the text that begins a stop string, after one more character."""
        while (following := self.children[node].get(character)) is None:
            if not node:
                return 0
            node = self.fallback[node]
        return following


@lru_cache(maxsize=64)
def _stop_table(stops: tuple[str, ...]) -> StopTable:
    return StopTable(stops)


class StopMatcher:
    """Finds the first stop string to be complete; of several that end at one character, the longest (it starts first).

    That depends on the text alone, not on how it is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._table = _stop_table(tuple(stops))
        self._first_characters = self._table.children[0].keys()
        self._node = 0
        self._num_fed = 0

    @property
    def num_held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return self._table.depth[self._node]

    def feed(self, text: str, is_enabled: bool = True) -> StopMatch | None:
        """Take in more text; the first match in it (then nothing may be fed). Disabled: matches are passed over."""
        if not self._node and self._first_characters.isdisjoint(text):
            self._num_fed += len(text)
            return None
        table, node = self._table, self._node
        for character in text:
            self._num_fed += 1
            node = table.advance(node, character)
            stop = table.found[node]
            if stop is not None and is_enabled:
                return StopMatch(stop, self._num_fed - len(stop), self._num_fed)
        while node and not table.children[node]:  # a stop string that was passed over, and begins no longer one
            node = table.fallback[node]
        self._node = node
        return None


class IncrementalDetokenizer:
    """The text of one completion while its tokens come.

    `stop_reason` is the stop string that ended it; `num_tokens` counts the tokens taken in, the one that completed the
    stop string included; later ones are ignored. Before `min_tokens` tokens no stop string ends anything.

    What was returned is not kept.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], params: SamplingParams) -> None:
        """context: the prompt, or what `prompt_context` keeps of it."""
        self._params = params
        self._stream = text_stream(tokenizer, context, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop)
        self._num_emitted = 0
        self._pending = ""
        self._is_finished = False
        self.num_tokens = 0
        self.stop_reason: str | None = None

    def update(self, new_ids: Sequence[int]) -> str:
        """Take in tokens; returns the text that is certain by now and was not returned before."""
        if not self._params.detokenize:
            self.num_tokens += len(new_ids)
            return ""
        delta = []
        for token_id in new_ids:
            if self.stop_reason is not None or self._is_finished:
                break
            self.num_tokens += 1
            piece = self._stream.push(token_id)
            if piece:
                delta.append(self._accept(piece))
        return "".join(delta)

    def finish(self) -> str:
        """No token follows: returns what was held back. A stop string that completes here still counts."""
        if self._is_finished or self.stop_reason is not None:
            return ""
        self._is_finished = True
        delta = self._accept(self._stream.flush())
        if self.stop_reason is None:
            delta += self._emit(len(self._pending))
        return delta

    def _accept(self, piece: str) -> str:
        self._pending += piece
        match = self._matcher.feed(piece, is_enabled=self.num_tokens >= self._params.min_tokens)
        if match is None:
            return self._emit(len(self._pending) - self._matcher.num_held)
        self.stop_reason = match.stop
        end = match.end if self._params.include_stop_str_in_output else match.start
        delta = self._emit(end - self._num_emitted)
        self._pending = ""
        return delta

    def _emit(self, length: int) -> str:
        delta, self._pending = self._pending[:length], self._pending[length:]
        self._num_emitted += len(delta)
        return delta


def text_stream(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
    """The text that follows the prompt; its last tokens are decoded too, for a first space or a split character."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    kind = _ByteStream if tokenizer.is_byte_level else _WindowStream
    return kind(tokenizer, prompt_context(tokenizer, prompt_ids, skip_special_tokens), skipped)


def prompt_context(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The last tokens of a prompt that have a text. A prompt of special tokens is walked whole: once, not for each
    completion."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    with_text = (token for token in reversed(prompt_ids) if token not in skipped and tokenizer.has_token(token))
    return list(islice(with_text, _CONTEXT_TOKENS))[::-1]
