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

Declared = tuple[tuple[int, AddedToken], ...]
"""Tokens with their ids, as a file says them."""

_SPACE = re.compile(r"[ \t\n\r]*")


def token_entry(value: Json, where: str) -> tuple[int, AddedToken]:
    token = added_token(value, is_special=False)
    token_id = value.get("id") if isinstance(value, dict) else None
    if token is None or not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
        raise ValueError(f"{where}: an added token must have an id and a content, got {shown(value)}")
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

    Raises ValueError for what is no JSON, and for more than `max_values` members and items.
    """

    def __init__(self, text: str, max_values: int) -> None:
        self._text = text
        self._at = 0
        self._num_left = max_values
        self._decode = json.JSONDecoder().raw_decode

    def value(self) -> Json:
        self._peek()
        value, self._at = self._decode(self._text, self._at)
        return value

    def members(self) -> Iterator[str]:
        """The keys of an object. Each value is to be taken, or passed over, before the next key."""
        is_over = self._is_empty("{", "}")
        while not is_over:
            key = self.value()
            if not isinstance(key, str):
                raise ValueError(f"a key is expected at character {self._at}")
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

    def pass_over(self) -> None:
        start = self._peek()
        if start == "{":
            for _ in self.members():
                self.value()
        elif start == "[":
            for _ in self.items():
                self.value()
        else:
            self.value()

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
            raise ValueError("it has more values than any tokenizer of this base model")
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

    def _take(self, character: str) -> None:
        if self._peek() != character:
            raise ValueError(f"{character!r} is expected at character {self._at}")
        self._at += 1


def read_added_tokens(data: bytes, base: Tokenizer) -> Declared:
    """The added tokens of a tokenizer.json whose vocabulary is the base's. Raises ValueError, in words for a client."""
    try:
        cursor = JsonCursor(data.decode("utf-8"), 16 * base.vocab_size + 2**17)
        tokens: list[tuple[int, AddedToken]] = []
        for key in cursor.members():
            if key == "added_tokens":
                tokens += [token_entry(cursor.value(), TOKENIZER) for _ in cursor.items()]
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
