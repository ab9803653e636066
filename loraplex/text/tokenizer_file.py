"""A tokenizer.json beside the base's: its added tokens, once its vocabulary is found to be the base's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import AddedToken

from loraplex.adapters.files import TOKENIZER
from loraplex.errors import shown
from loraplex.text.chat_template import Json
from loraplex.text.tokenizer import Tokenizer, added_token
from loraplex.text.utf8 import decode_in_pieces

Declared = tuple[tuple[int, AddedToken], ...]
"""Tokens with their ids, as a file says them."""

MAX_ADDED_TOKENS = 2048
MAX_TOKEN_CHARS = 256
MAX_ADDED_CHARS = 2**15
"""To add them is one call of the library, which makes an automaton of all characters and keeps the interpreter for up
to 40 ms."""

MAX_STRING_CHARS = 2**21
MAX_DEPTH = 32
_SPACE = re.compile(r"[ \t\n\r]{0,4096}")
_SHORT = re.compile(r'"[^"\\\x00-\x1f]{0,512}"|[-+.0-9A-Za-z]{1,64}')
_PAIR = re.compile(r'\[_"[^"\\\x00-\x1f]{0,512}"_,_"[^"\\\x00-\x1f]{0,512}"_\]'.replace("_", r"[ \t\n\r]{0,64}"))


def token_entry(value: Json, where: str) -> tuple[int, AddedToken]:
    token = added_token(value, is_special=False)
    token_id = value.get("id") if isinstance(value, dict) else None
    if token is None or not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
        raise ValueError(f"{where}: an added token must have an id and a content, got {shown(value)}")
    if len(token.content) > MAX_TOKEN_CHARS:
        raise ValueError(f"{where}: an added token has more than {MAX_TOKEN_CHARS} characters")
    return token_id, token


def check_meaning(base: Tokenizer, content: str, token_id: int) -> None:
    """Raises ValueError for a token or an id of the base's vocabulary that is another one here."""
    own_id, own = base.token_id(content), base.backend.id_to_token(token_id)
    if own_id not in (None, token_id) or own not in (None, content):
        theirs = f"id {own_id} is {shown(content)}" if own is None else f"id {token_id} is {shown(own)}"
        raise ValueError(
            f"token {shown(content)} of its tokenizer has id {token_id}, in the base's vocabulary {theirs}: the "
            "adapter was trained on another tokenizer; save it with the base's, or start with --no-adapter-text"
        )


class JsonCursor:
    """Reads JSON value by value: a parser that is called once for a long text would keep other threads waiting.

    Raises ValueError for what is no JSON, for more than `max_values` members and items, for a string of more than
    MAX_STRING_CHARS, and for what is nested deeper than MAX_DEPTH.
    """

    def __init__(self, text: str, max_values: int) -> None:
        self._text = text
        self._at = 0
        self._num_left = max_values
        self._decode = json.JSONDecoder().raw_decode

    def value(self, depth: int = 0) -> Json:
        match self._opening(depth):
            case "{":
                return {key: self.value(depth + 1) for key in self.members()}
            case "[":
                return [self.value(depth + 1) for _ in self.items()]
            case _:
                return self._scalar()

    def pass_over(self, depth: int = 0) -> None:
        """`value`, but nothing is kept."""
        match self._opening(depth):
            case "[" if pair := _PAIR.match(self._text, self._at):  # of BPE's merges: most of a file
                self._at = pair.end()
            case "{":
                for _ in self.members():
                    self.pass_over(depth + 1)
            case "[":
                for _ in self.items():
                    self.pass_over(depth + 1)
            case _:
                self._scalar()

    def _opening(self, depth: int) -> str:
        """The next character, which opens an object, a list or a scalar."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{TOKENIZER} is nested deeper than {MAX_DEPTH} levels")
        return self._peek()

    def _scalar(self) -> Json:
        short = _SHORT.match(self._text, self._at)
        if short is None:
            self._check_string()
            value, self._at = self._decode(self._text, self._at)
            return value
        self._at = short.end()
        text = short[0]
        if text[0] == '"':
            return text[1:-1]
        value, end = self._decode(text)
        if end < len(text):
            raise self._odd("a value is expected")
        return value

    def _check_string(self) -> None:
        """One begins here, and ends in time."""
        if self._text[self._at : self._at + 1] != '"':
            raise self._odd("a value is expected")
        end, last = self._at, self._at + MAX_STRING_CHARS
        while (end := self._text.find('"', end + 1, last)) > 0:
            start = end
            while self._text[start - 1] == "\\":
                start -= 1
            if (end - start) % 2 == 0:
                return
        raise self._odd(f"a string without an end, or of more than {MAX_STRING_CHARS} characters")

    def members(self) -> Iterator[str]:
        """The keys of an object. Each value is to be taken, or passed over, before the next key."""
        is_over = self._is_empty("{", "}")
        while not is_over:
            self._peek()
            key = self._scalar()
            if not isinstance(key, str):
                raise self._odd("a key is expected")
            self._take(":")
            yield key
            is_over = self._ends("}")

    def items(self) -> Iterator[int]:
        """The numbers of a list's items. Each is to be taken, or passed over, before the next."""
        is_over, index = self._is_empty("[", "]"), 0
        while not is_over:
            yield index
            index += 1
            is_over = self._ends("]")

    @property
    def is_at_list(self) -> bool:
        return self._peek() == "["

    def _is_empty(self, opening: str, closing: str) -> bool:
        self._take(opening)
        is_empty = self._peek() == closing
        self._at += is_empty
        return is_empty

    def _ends(self, bracket: str) -> bool:
        """Behind a value: whether the object or list ends here; else another one follows."""
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"{TOKENIZER} has more values than any tokenizer of this base model")
        if self._peek() == bracket:
            self._at += 1
            return True
        self._take(",")
        return False

    def _peek(self) -> str:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _odd(self, what: str) -> ValueError:
        return ValueError(f"{TOKENIZER} is not JSON: {what} at character {self._at}")

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise self._odd(f"{character!r} is expected")
        self._at += 1


def read_added_tokens(data: bytes, base: Tokenizer) -> Declared:
    """The added tokens of a tokenizer.json whose vocabulary is the base's. Raises ValueError, in words for a client."""
    try:
        cursor = JsonCursor(decode_in_pieces(data), 16 * base.vocab_size + 2**17)
        tokens: list[tuple[int, AddedToken]] = []
        for key in cursor.members():
            if key == "added_tokens":
                for _ in cursor.items():
                    tokens.append(token_entry(cursor.value(), TOKENIZER))
                    if len(tokens) > base.num_added_tokens + MAX_ADDED_TOKENS:
                        raise ValueError(f"{TOKENIZER}: there are more than {MAX_ADDED_TOKENS} added tokens")
            elif key == "model":
                _read_model(cursor, base)
            else:
                cursor.pass_over()
    except UnicodeDecodeError as error:
        raise ValueError(f"{TOKENIZER} is not UTF-8: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{TOKENIZER} is not JSON: {shown(str(error))}") from error
    return tuple(tokens)


def _read_model(cursor: JsonCursor, base: Tokenizer) -> None:
    for part in cursor.members():
        if part != "vocab":
            cursor.pass_over()
        elif cursor.is_at_list:  # Unigram: pairs of a token and its score
            for token_id in cursor.items():
                pair = cursor.value()
                _check_token(base, pair[0] if isinstance(pair, list) and pair else None, token_id)
        else:
            for token in cursor.members():
                _check_token(base, token, cursor.value())


def _check_token(base: Tokenizer, token: Json, token_id: Json) -> None:
    if not isinstance(token, str) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
        raise ValueError(f"{TOKENIZER}: its vocabulary has {shown(token)} with id {shown(token_id)}")
    if base.token_id(token) == token_id:
        return
    check_meaning(base, token, token_id)
    raise ValueError(
        f"{TOKENIZER}: token {shown(token)} (id {token_id}) is in its model's vocabulary and not in the base's: only "
        "tokens of tokenizer.add_tokens can be served"
    )
