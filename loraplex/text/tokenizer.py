"""Text to token ids and back, and chats to text: `tokenizers` and a `jinja2` sandbox, nothing else.

A directory's `tokenizer.json` decides how text is cut; `tokenizer_config.json` (or the older `special_tokens_map.json`)
names the special tokens; a chat renders as `transformers.PreTrainedTokenizerBase.apply_chat_template` renders it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, decoders

from loraplex.errors import InvalidRequestError, ModelConfigError, ModelNotFoundError, shown
from loraplex.text.chat_template import (
    MAX_ARGUMENT_CHARS,
    Json,
    num_chars_of,
    plain_json,
    render_chat,
    render_open_chat,
)
from loraplex.text.conversion import TOKENIZER_FILE, with_tokenizer

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FEW_IDS = 256
_TEMPLATE_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")


# ------------------------------------------------------------------------------------------------- files of a model


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Json]:
    """The object in a JSON file; {} when there is no such file. ModelConfigError when it is something else."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def read_eos_token_ids(directory: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids that the model states, without a tokenizer: of generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        fields = read_json(Path(directory) / name)
        if fields.get("eos_token_id") is not None:
            return stated_eos_token_ids(fields, f"{name} in {directory}")
    return ()


def stated_eos_token_ids(fields: Mapping[str, Json], where: str) -> tuple[int, ...]:
    """`eos_token_id` of a configuration: an id, a list of them, or nothing. Raises ModelConfigError."""
    stated = fields.get("eos_token_id")
    token_ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in token_ids):
        raise ModelConfigError(f"{where}: eos_token_id must be a token id or a list of them, got {shown(stated)}")
    return tuple(token_ids)


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    if not directory.is_dir():
        raise ModelNotFoundError(f"no tokenizer: {directory} is no directory")
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise ModelConfigError(
            f"{directory} has no {TOKENIZER_FILE}; copy it there or name another directory with --tokenizer. Prompts "
            "as token ids work without a tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelConfigError(
            f"{path} is no tokenizer that `tokenizers` {tokenizers.__version__} reads: {error}"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def added_token(value: Json, *, is_special: bool) -> AddedToken | None:
    """An AddedToken of its JSON form (a string, or an object with `content`); None for anything else."""
    if isinstance(value, str):
        return AddedToken(value, special=is_special, normalized=not is_special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    flags = {name: bool(value[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special", is_special)) or is_special, **flags)


class SpecialTokens:
    """Special tokens of a tokenizer_config.json: the named ones, the other added ones, those without a name."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        named = {name: config[name] for name in (*NAMED_SPECIAL_TOKENS, *_own_token_names(config)) if config.get(name)}
        if isinstance(extra, dict):
            named, extra = {**named, **extra}, []
        named_tokens = {name: added_token(value, is_special=True) for name, value in named.items()}
        self.named = {name: token for name, token in named_tokens.items() if token is not None}
        listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
        self.others = [token for _, v in listed if (token := added_token(v, is_special=False)) is not None]
        self.extra = [token for v in extra if (token := added_token(v, is_special=True)) is not None]

    @classmethod
    def from_dir(cls, directory: Path) -> SpecialTokens:
        path = directory / "tokenizer_config.json"
        config = read_json(path)
        if "added_tokens_decoder" not in config:  # the form before 2023 has them in a file of their own
            config |= read_json(directory / "special_tokens_map.json")
        try:
            return cls(config)
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelConfigError(f"{path}: its special or added tokens cannot be read: {error}") from error

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Make the backend know them all. A token that it has keeps its id, and its flags if it need not be special."""
        known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        new = [
            token
            for token in (*self.others, *self.named.values())
            if token.content not in known or (token.special and not known[token.content])
        ]
        backend.add_tokens(new)  # one call: each builds an index of all
        names = {*known, *(token.content for token in (*self.others, *self.named.values()))}
        backend.add_special_tokens([token for token in self.extra if token.content not in names])


def _own_token_names(config: Mapping[str, Json]) -> list[str]:
    """A model's own named tokens (`image_token`, ...): templates see them too."""
    return [key for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))]


def read_chat_templates(directory: Path) -> dict[str, str]:
    """Chat templates by name: .jinja files, else tokenizer_config.json (one, or a list), else chat_template.json."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files = {**files, "default": directory / "chat_template.jinja"}
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):
        stated = read_json(directory / name).get("chat_template")
        if stated:
            return named_templates(stated, directory / name)
    return {}


def named_templates(stated: Json, path: Path) -> dict[str, str]:
    if isinstance(stated, str):
        return {"default": stated}
    try:
        named = dict(stated) if isinstance(stated, dict) else {entry["name"]: entry["template"] for entry in stated}
    except (TypeError, KeyError) as error:
        raise ModelConfigError(f"{path}: chat_template must be a string or a list of name and template") from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ModelConfigError(f"{path}: chat_template must be a string or a list of name and template")
    return named


# ------------------------------------------------------------------------------------------------- the tokenizer


class TemplateRenderer(Protocol):
    def render(self, source: str, variables: Mapping[str, Json], is_open: bool = False) -> str: ...


class TrustedTemplates:
    """Renders the templates of the model's own directory, here and now."""

    def render(self, source: str, variables: Mapping[str, Json], is_open: bool = False) -> str:
        return (render_open_chat if is_open else render_chat)(source, variables)


class Tokenizer:
    """Immutable once made; its calls may come from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens_map: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        base: Tokenizer | None = None,
        templates: TemplateRenderer | None = None,
    ) -> None:
        """base: whose tokens mean the same here, and are looked up there. templates: renders chat_templates apart."""
        self.backend = backend
        self._base = base
        self._templates = templates or TrustedTemplates()
        self.special_tokens_map = dict(special_tokens_map or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_ids = self.with_own_eos(eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i in added if self._is_special(i))
        self.longest_added_token = max((len(token.content) for token in added.values()), default=0)
        state = b"" if backend.decoder is None else bytes(backend.decoder.__getstate__())
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.has_split_characters = b'"ByteLevel"' in state
        self._has_byte_fallback = b'"ByteFallback"' in state
        self._token_bytes: dict[int, bytes] = {}
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Raises ModelNotFoundError (no directory), ModelConfigError (a file that is missing or wrong, by name)."""
        directory = Path(path)
        with with_tokenizer(directory) as files:
            backend, special = _read_backend(files), SpecialTokens.from_dir(files)
        special.add_to(backend)
        return cls(
            backend,
            special_tokens_map={name: token.content for name, token in special.named.items()},
            chat_templates=read_chat_templates(directory),
            eos_token_ids=read_eos_token_ids(directory),
        )

    def with_own_eos(self, stated: Sequence[int]) -> tuple[int, ...]:
        """The end-of-sequence ids that a configuration states, behind the tokenizer's own."""
        own = self._named_id("eos_token")
        return tuple(dict.fromkeys([*([] if own is None else [own]), *stated]))

    @property
    def num_added_tokens(self) -> int:
        return len(self.backend.get_added_tokens_decoder())

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.token_id(token)

    def _is_special(self, token_id: int) -> bool:
        """As decoding sees it: the flag of an added token is not all that counts."""
        return not self.decode([token_id]) and bool(self.decode([token_id], skip_special_tokens=False))

    # -- text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; the texts are cut in parallel."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequestError(f"a prompt is no valid Unicode text: {error}", param="prompt") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Ids that the tokenizer does not have (a model's padding of the vocabulary) have no text.

        Of many, other threads run meanwhile: of the two calls the one for several lists leaves the interpreter's lock.
        """
        token_ids = list(token_ids)
        try:
            if len(token_ids) > _FEW_IDS:
                (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
            else:
                text = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(i for i in token_ids if not 0 <= i < 2**32)
            raise InvalidRequestError(f"{wrong} is no token id; token ids are 0..{self.vocab_size - 1}") from error
        return str(text)

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < 2**32 and self.backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, b"" for an unknown one; a piece of a character is exactly its bytes."""
        known = self._token_bytes.get(token_id)
        if known is None and self._base is not None and self._base.has_token(token_id):
            return self._base.token_bytes(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._find_token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token on its own, with its leading space; U+FFFD for pieces of a character. Each time the same object:
        answers keep one for each candidate of a position, and a token may have a kilobyte."""
        known = self._token_texts.get(token_id)
        if known is None and self._base is not None and self._base.has_token(token_id):
            return self._base.token_text(token_id)
        if known is None:
            text = self.token_bytes(token_id).decode("utf-8", errors="replace")
            known = self._token_texts.setdefault(token_id, text)
        return known

    def is_byte_token(self, token_id: int) -> bool:
        """Whether it is one of the `<0x00>`..`<0xFF>` that stand for a byte."""
        return self._has_byte_fallback and _byte_of(self.backend.id_to_token(token_id) or "") is not None

    def _find_token_bytes(self, token_id: int) -> bytes:
        if not self.has_token(token_id):
            return b""
        token: str = self.backend.id_to_token(token_id) or ""
        if self.is_byte_level:
            return _byte_level_bytes(token)
        if self._has_byte_fallback and (byte := _byte_of(token)) is not None:
            return bytes([byte])
        if "\u2581" in token:  # sentencepiece's space; a decoder would strip a leading one
            return token.replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    # -- chats

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Json] | None = None,
        *,
        documents: Sequence[Mapping[str, Json]] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> str:
        """The prompt of a chat. `chat_template`: the name of one of the model's templates, or a template.

        `template_kwargs` go to the template as variables. `continue_final_message` leaves the last message open for the
        model.
        """
        source = self._choose_template(chat_template, has_tools=tools is not None)
        chat = plain_json(messages, "messages")
        if not chat or not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
            raise InvalidRequestError(
                "messages must be a list of at least one object with role and content", param="messages"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        variables = self._template_variables(template_kwargs or {})
        variables |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        variables |= {"tools": plain_json(tools, "tools"), "documents": plain_json(documents, "documents")}
        return self._templates.render(source, variables, continue_final_message)

    def template_for_tools(self) -> str:
        """The template that a chat with tools has; empty: none."""
        return self.chat_templates.get("tool_use", self.chat_templates.get("default", ""))

    def _template_variables(self, template_kwargs: Mapping[str, Json]) -> dict[str, Json]:
        taken = [name for name in _TEMPLATE_ARGUMENTS if name in template_kwargs]
        if taken:
            raise InvalidRequestError(
                f"chat template arguments cannot set {', '.join(taken)}; use the request's own fields",
                param="chat_template_kwargs",
            )
        arguments = plain_json(dict(template_kwargs), "chat_template_kwargs")
        if (num_chars := num_chars_of(arguments)) > MAX_ARGUMENT_CHARS:
            raise InvalidRequestError(
                f"chat template arguments have {num_chars} characters, at most {MAX_ARGUMENT_CHARS} together; put long "
                "texts into messages or documents",
                param="chat_template_kwargs",
            )
        return {**self.special_tokens_map, **arguments}

    def _choose_template(self, chat_template: str | None, has_tools: bool) -> str:
        if chat_template is not None:
            return self.chat_templates.get(chat_template, chat_template)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.chat_templates:
                return self.chat_templates[name]
        if self.chat_templates:
            names = ", ".join(map(shown, sorted(self.chat_templates)))
            raise InvalidRequestError(
                f"this model has no default chat template, only: {names}; name one of them", param="messages"
            )
        raise InvalidRequestError(
            "this model has no chat template (none in tokenizer_config.json or chat_template.jinja): use "
            "/v1/completions, or send a chat_template",
            param="messages",
        )


# ------------------------------------------------------------------------------------------------- bytes of tokens


def _byte_of(token: str) -> int | None:
    """The byte of `<0x41>`, None for other tokens."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level_bytes(token: str) -> bytes:
    """A token of the byte-level alphabet; one with any other character (an added token) stands for its own text."""
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()
