"""What an adapter's directory says about the text of its requests: added tokens, chat template, generation defaults.

    tokenizer.json, tokenizer_config.json, special_tokens_map.json, added_tokens.json    added and special tokens
    chat_template.jinja, or chat_template in tokenizer_config.json                       chat templates
    generation_config.json                                                               sampling defaults, end tokens

`read` makes a small JSON document of them (`AdapterText`), which the registry carries with the version; `of` makes the
tokenizer. Files that equal the base's say nothing. Text is cut by the base's own rules and vocabulary, which the two
share in memory, and the adapter's tokens are added to them: one that means another id than the base's is refused.

The files are a stranger's: bytes are bounded before they are read, values before they are kept, JSON that may be long
is parsed value by value, and no part of them but added tokens comes to the tokenizer's library. Long files are read in
a turn: dozens of loads that wait for one keep nothing of them.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from loraplex.adapters.files import (
    ADDED_TOKENS,
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKEN_NAMES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    AdapterFolder,
)
from loraplex.adapters.registry import AdapterText
from loraplex.errors import (
    AdapterValidationError,
    AdapterWeightsMissingError,
    InvalidRequestError,
    ModelConfigError,
    shown,
)
from loraplex.processes.fair_turns import FairTurns
from loraplex.sampling_params import MAX_STOP_TOKEN_IDS
from loraplex.text.chat_template import Json
from loraplex.text.request_text import RequestText, generation_defaults, json_object
from loraplex.text.template_process import TemplateProcesses
from loraplex.text.tokenizer import SpecialTokens, Tokenizer, named_templates, stated_eos_token_ids
from loraplex.text.tokenizer_file import (
    MAX_ADDED_CHARS,
    MAX_ADDED_TOKENS,
    MAX_TOKEN_CHARS,
    Declared,
    check_meaning,
    read_added_tokens,
    token_entry,
)

MAX_SMALL_BYTES = 2**21
MAX_GENERATION_BYTES = 2**16
"""It is parsed in no turn: in less than a millisecond."""

MAX_TEMPLATE_BYTES = 2**17
MAX_TEMPLATES, MAX_NAME_CHARS = 16, 64
MAX_BASE_SIZES = 4
"""How many times the base's tokenizer.json the adapter's may be: a later version of the library writes it longer."""

MAX_NAMES = 256
MAX_DOCUMENT_BYTES = 2**20
NUM_PARSING = 2
"""Threads that read tokenizer files at a time, value by value: each of many would hold the interpreter's lock from the
event loop."""

PIECE_BYTES = 2**20
"""Of a file that may be the base's, at a time."""

MAX_BUILT, MAX_KNOWN_FILES = 256, 64
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")

_log = logging.getLogger(__name__)
_FILES_ERRORS = (ValueError, RecursionError, ModelConfigError, InvalidRequestError)


class AdapterTexts:
    """Any thread may call it. directory: of the base's tokenizer.

    has_defaults: whether generation_config.json counts.
    """

    def __init__(self, base: RequestText, directory: str | Path, has_defaults: bool = True) -> None:
        self._base = base
        self._directory = Path(directory)
        self._has_defaults = has_defaults
        self._templates = TemplateProcesses()
        self._base_digests: dict[str, bytes | None] = {}
        self._known: OrderedDict[bytes, Declared] = OrderedDict()
        self._built: OrderedDict[str, RequestText] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = FairTurns(NUM_PARSING, most_of_a_client=1)

    def close(self) -> None:
        """End the processes of chat templates."""
        self._templates.close()

    def take_for_base(self, folder: AdapterFolder) -> None:
        """The base's text is this adapter's from now on, since it is merged into the base. Raises as `read`."""
        self._base = self.of(self.read(folder, None))

    # ---------------------------------------------------------------------------------------------- files to a document

    def read(self, folder: AdapterFolder, vocab_size: int | None) -> AdapterText | None:
        """None when the directory brings nothing of its own. vocab_size: where the adapter's vocabulary ends.

        Raises AdapterValidationError with every reason, and what opening a file raises.
        """
        document: dict[str, Json] = {} if vocab_size is None else {"vocab_size": vocab_size}
        reasons: list[str] = []
        parts = [self._read_tokens] if self._base.tokenizer is not None else []
        for part in (*parts, *([self._read_generation] if self._has_defaults else [])):
            try:
                document |= part(folder)
            except _FILES_ERRORS as error:
                reasons.append(str(error))
        if reasons:
            raise AdapterValidationError.from_reasons(folder.adapter, reasons)
        if not document:
            return None
        text = AdapterText.of(document)
        if len(text.json) > MAX_DOCUMENT_BYTES:
            reason = f"its own tokens, templates and defaults are more than {MAX_DOCUMENT_BYTES} bytes of JSON"
            raise AdapterValidationError.from_reasons(folder.adapter, [reason])
        with self._turns.own():
            built = self.of(text)
        end, known = built.vocab_size, document.get("added_tokens", [])
        beyond = [token["content"] for token in known if token["id"] >= end]
        if beyond:
            _log.warning(
                "adapter %r adds %d tokens without a row in its embedding (%s): prompts that have one are refused",
                folder.adapter,
                len(beyond),
                shown(beyond[0]),
            )
        return text

    def _read_tokens(self, folder: AdapterFolder) -> dict[str, Json]:
        base = self._base.tokenizer
        assert base is not None
        is_copy = {name: self._is_copy(folder, name) for name in TOKEN_NAMES}
        template = self._bytes(folder, TEMPLATE)
        document: dict[str, Json] = {}
        templates = _templates(template, {})
        if False in is_copy.values():
            names = [name for name in TOKEN_NAMES if name != TOKENIZER or not is_copy[name]]
            document, templates = self._read_in_turn(folder, names, template)
        if templates and templates != base.chat_templates:
            self._templates.check(templates)
            document["chat_templates"] = templates
        return document

    def _read_in_turn(
        self, folder: AdapterFolder, names: Sequence[str], template: bytes | None
    ) -> tuple[dict[str, Json], dict[str, str]]:
        """What is not the base's, and the templates."""
        with self._turns.own() as turn:
            files = {name: data for name in names if (data := self._bytes(folder, name)) is not None}
            turn.computes()
            config = json_object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
            return self._own_tokens(files, config), _templates(template, config)

    def _own_tokens(self, files: Mapping[str, bytes], config: dict[str, Json]) -> dict[str, Json]:
        base = self._base.tokenizer
        assert base is not None
        declared: list[tuple[int, AddedToken]] = []
        if TOKENIZER in files:
            declared += self._declared(files[TOKENIZER])
        if ADDED_TOKENS in files:
            listed = json_object(files[ADDED_TOKENS], ADDED_TOKENS)
            declared += [token_entry({"id": i, "content": content}, ADDED_TOKENS) for content, i in listed.items()]
        if SPECIAL_TOKENS in files and "added_tokens_decoder" not in config:
            config |= json_object(files[SPECIAL_TOKENS], SPECIAL_TOKENS)
        decoder = config.get("added_tokens_decoder") or {}
        if not isinstance(decoder, dict):
            raise ValueError(f"{TOKENIZER_CONFIG}: added_tokens_decoder must be an object of token ids")
        for token_id, value in decoder.items():
            number = int(token_id) if token_id.isdecimal() and len(token_id) < 12 else token_id
            declared.append(
                token_entry({**value, "id": number} if isinstance(value, dict) else value, TOKENIZER_CONFIG)
            )
        try:
            special = SpecialTokens(config)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{TOKENIZER_CONFIG}: its special or added tokens cannot be read: {error}") from error
        return self._checked(base, declared, special)

    def _checked(
        self, base: Tokenizer, declared: list[tuple[int, AddedToken]], special: SpecialTokens
    ) -> dict[str, Json]:
        """What of them is not the base's, once all ids are as declared and none of the base's means something else."""
        listed = [token for _, token in declared]
        listed += [*special.named.values(), *special.others, *special.extra]
        if any(len(token.content) > MAX_TOKEN_CHARS for token in listed):
            raise ValueError(f"an added token has more than {MAX_TOKEN_CHARS} characters")
        if len(special.named) > MAX_NAMES:
            raise ValueError(f"{TOKENIZER_CONFIG} names more than {MAX_NAMES} special tokens")
        if max(map(len, special.named), default=0) > MAX_NAME_CHARS:
            raise ValueError(f"{TOKENIZER_CONFIG} has a name of more than {MAX_NAME_CHARS} characters")
        known = base.backend.get_added_tokens_decoder()
        new = {token.content for token in listed} - {token.content for token in known.values()}
        if len(new) > MAX_ADDED_TOKENS or sum(map(len, new)) > MAX_ADDED_CHARS:
            raise ValueError(
                f"there are more than {MAX_ADDED_TOKENS} added tokens, or {MAX_ADDED_CHARS} characters of them"
            )
        for token_id, token in declared:
            check_meaning(base, token.content, token_id)
        like_base = {(token.content, token.lstrip, token.rstrip) for token in known.values()}
        for token in listed:
            is_costly = token.content.isspace() and (token.lstrip or token.rstrip)
            if is_costly and (token.content, token.lstrip, token.rstrip) not in like_base:
                raise ValueError(
                    f"added token {shown(token.content)} is white space, and takes more of it (lstrip or rstrip): the "
                    "time for a long run of it would grow with the square of its length; set both to false"
                )
        own = {i: token for i, token in declared if i not in known or _fields(i, known[i]) != _fields(i, token)}
        backend = extended(base.backend, own)
        special.add_to(backend)
        for token_id, token in declared:
            found = backend.token_to_id(token.content)
            if found != token_id:
                raise ValueError(
                    f"added token {shown(token.content)} has id {token_id}, but would be {found}: ids of added tokens "
                    f"follow the base's, from {base.vocab_size} on, without a gap"
                )
        document: dict[str, Json] = {}
        made = backend.get_added_tokens_decoder()
        fields = [_fields(i, made[i]) for i in sorted(made)]
        if added := [
            each for each in fields if each["id"] not in known or _fields(each["id"], known[each["id"]]) != each
        ]:
            document["added_tokens"] = added
        names = {name: token.content for name, token in special.named.items()}
        if names and names != base.special_tokens_map:
            document["special_tokens"] = names
        return document

    def _declared(self, data: bytes) -> Declared:
        """Of a tokenizer.json; those of the last files are remembered, since those of a thousand adapters are equal."""
        digest = self._digest(data)
        with self._lock:
            declared = self._known.get(digest)
        if declared is None:
            assert self._base.tokenizer is not None
            declared = read_added_tokens(data, self._base.tokenizer)
            with self._lock:
                self._known[digest] = declared
                if len(self._known) > MAX_KNOWN_FILES:
                    self._known.popitem(last=False)
        return declared

    def _read_generation(self, folder: AdapterFolder) -> dict[str, Json]:
        data = self._bytes(folder, GENERATION_CONFIG)
        if data is None:
            return {}
        fields, base = json_object(data, GENERATION_CONFIG), self._base
        try:
            defaults, stated = generation_defaults(fields), stated_eos_token_ids(fields, GENERATION_CONFIG)
        except (InvalidRequestError, ModelConfigError) as error:
            raise ValueError(f"{GENERATION_CONFIG}: {error}") from error
        if len(stated) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"{GENERATION_CONFIG}: eos_token_id has more than {MAX_STOP_TOKEN_IDS} ids")
        eos_token_ids = stated if base.tokenizer is None else base.tokenizer.with_own_eos(stated)
        has_other_ends = bool(stated) and eos_token_ids != base.eos_token_ids
        if defaults == base.defaults and not has_other_ends:
            return {}
        ends: dict[str, Json] = {"eos_token_ids": list(stated)} if has_other_ends else {}
        return {"generation_config": defaults, **ends}

    def _bytes(self, folder: AdapterFolder, name: str) -> bytes | None:
        most = {TEMPLATE: MAX_TEMPLATE_BYTES, GENERATION_CONFIG: MAX_GENERATION_BYTES}.get(name, MAX_SMALL_BYTES)
        if name == TOKENIZER:
            most += MAX_BASE_SIZES * _size_of(self._directory / TOKENIZER)
        try:
            return folder.read(name, most)
        except AdapterWeightsMissingError:
            return None

    @staticmethod
    def _digest(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    def _is_copy(self, folder: AdapterFolder, name: str) -> bool | None:
        """Whether a file is the base's; None: there is none."""
        try:
            with folder.open(name) as file:
                if file.size != _size_of(self._directory / name):
                    return False
                digest, piece = hashlib.sha256(), memoryview(bytearray(min(file.size, PIECE_BYTES)))
                for start in range(0, file.size, PIECE_BYTES):
                    digest.update(piece[: file.read_into(piece, start)])
                return digest.digest() == self._base_digest(name)
        except AdapterWeightsMissingError:
            return None

    def _base_digest(self, name: str) -> bytes | None:
        if name not in self._base_digests:
            path = self._directory / name
            self._base_digests[name] = self._digest(path.read_bytes()) if path.is_file() else None
        return self._base_digests[name]

    # ---------------------------------------------------------------------------------------- a document to a tokenizer

    def of(self, text: AdapterText | None) -> RequestText:
        """The base's where an adapter brings nothing. Equal documents are one object, while they are among the last."""
        built = self.known(text)
        if built is not None:
            return built
        assert text is not None
        built = self._build(text)
        with self._lock:
            built = self._built.setdefault(text.digest, built)
            if len(self._built) > MAX_BUILT:
                self._built.popitem(last=False)
        return built

    def known(self, text: AdapterText | None) -> RequestText | None:
        """`of` at once; None for what has to be made first."""
        if text is None:
            return self._base
        with self._lock:
            built = self._built.get(text.digest)
            if built is not None:
                self._built.move_to_end(text.digest)
            return built

    def _build(self, text: AdapterText) -> RequestText:
        document, base = text.document, self._base
        tokenizer, eos_token_ids = base.tokenizer, tuple(document.get("eos_token_ids", base.eos_token_ids))
        if tokenizer is not None and document.keys() & {"added_tokens", "special_tokens", "chat_templates"}:
            tokenizer = self._tokenizer(tokenizer, document, eos_token_ids)
        if tokenizer is not None:
            eos_token_ids = tokenizer.with_own_eos(eos_token_ids)
        vocab_size = document.get("vocab_size", base.vocab_size)
        return replace(
            base,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            eos_token_ids=tuple(each for each in eos_token_ids if each < vocab_size),  # others are never drawn
            defaults=document.get("generation_config", base.defaults) if self._has_defaults else base.defaults,
            digest=text.digest,
            renders_apart="chat_templates" in document,
            max_model_len=text.max_model_len,
        )

    def _tokenizer(self, base: Tokenizer, document: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Tokenizer:
        added = {each["id"]: _token(each) for each in document.get("added_tokens", [])}
        has_templates = "chat_templates" in document
        return Tokenizer(
            extended(base.backend, added) if added else base.backend,
            special_tokens_map=document.get("special_tokens", base.special_tokens_map),
            chat_templates=document.get("chat_templates", base.chat_templates),
            eos_token_ids=eos_token_ids,
            base=base,
            templates=self._templates if has_templates else None,
        )


def extended(base: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """The base's rules and vocabulary, the same objects in memory, with these tokens beside the base's added ones."""
    backend = tokenizers.Tokenizer(base.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(base, part) is not None:
            setattr(backend, part, getattr(base, part))
    tokens = base.get_added_tokens_decoder() | dict(added)
    backend.add_tokens([tokens[token_id] for token_id in sorted(tokens)])  # one call: each builds an index of all
    return backend


def _fields(token_id: int, token: AddedToken) -> dict[str, Json]:
    return {"id": token_id, "content": token.content, **{flag: getattr(token, flag) for flag in FLAGS}}


def _token(fields: Mapping[str, Any]) -> AddedToken:
    return AddedToken(fields["content"], **{flag: fields[flag] for flag in FLAGS})


def _templates(template: bytes | None, config: Mapping[str, Json]) -> dict[str, str]:
    """As of the base: the .jinja file goes before tokenizer_config.json."""
    if template is not None:
        try:
            return {"default": template.decode("utf-8")}
        except ValueError as error:
            raise ValueError(f"{TEMPLATE} is not UTF-8: {error}") from error
    stated = config.get("chat_template")
    templates = named_templates(stated, Path(TOKENIZER_CONFIG)) if stated else {}
    if len(templates) > MAX_TEMPLATES or max(map(len, templates), default=0) > MAX_NAME_CHARS:
        raise ValueError(
            f"{TOKENIZER_CONFIG}: chat_template has more than {MAX_TEMPLATES} templates, or a name of more than "
            f"{MAX_NAME_CHARS} characters"
        )
    if sum(map(len, templates.values())) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{TOKENIZER_CONFIG}: chat_template has more than {MAX_TEMPLATE_BYTES} characters")
    return templates


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
