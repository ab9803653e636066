"""What a request needs, read from its body without making its values: the adapter's name and the length of its prompt.

The decoder makes none of the fields: it finds where each begins and ends. A name is made of a field that is short
enough for one. The replica checks the body. What is not there, or has another form, is left for its answer.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence, Set
from typing import Any, TypeVar

import msgspec

from loraplex.bounds.json_size import slices
from loraplex.routing import Needs, prefix_digests
from loraplex.server.api_error import ApiError
from loraplex.server.auth import key_of
from loraplex.server.body import check_num_values

T = TypeVar("T")

BLOCK_BYTES = 512
"""Of a prompt's JSON: what one digest stands for."""

MAX_BLOCKS = 64
BYTES_A_TOKEN = 4
MAX_NAME_CHARS = 256
LORAX_BASE = "__base_model__"
MAX_VALUES, MAX_TEXT_VALUES = 2**22, 2**18
"""Of a body, ids of its prompt included; the second one where it has more quotes than so many texts: the decoder looks
each key up, and 1.4 million of them take it a tenth of a second."""

MAX_NAME_BYTES = 12 * MAX_NAME_CHARS + 2
"""Of a name's JSON: each character may be two escapes."""

_SECRET = secrets.token_bytes(32)
_NOTHING = msgspec.Raw(b"")


def _fields(*names: str) -> msgspec.json.Decoder[Any]:
    """Of an object's fields: their JSON."""
    fields = [(name, msgspec.Raw, _NOTHING) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, gc=False))


_PROMPTS = ("messages", "prompt", "input", "inputs", "text", "input_ids")
_REQUESTS = _fields("model", "lora_path", "parameters", "instructions", "system", *_PROMPTS)
_PARAMETERS = _fields("adapter_id")  # LoRAX's
_VERBS = _fields("name", "lora_name", "old", "old_name", "new", "new_name")
_NAMES = msgspec.json.Decoder(str)


def needs_of(body: bytes, authorization: str, base_names: Set[str] = frozenset()) -> Needs:
    """Raises ApiError for what is no JSON object, or has too many values. base_names: of the base model."""
    num_quotes = sum(part.count(b'"') for part in slices(body))
    check_num_values(body, MAX_TEXT_VALUES if num_quotes > 2 * MAX_TEXT_VALUES else MAX_VALUES)
    fields = _decode(_REQUESTS, body)
    adapter = _name(fields.lora_path) or _adapter_id(fields.parameters) or adapter_of(_name(fields.model), base_names)
    before = bytes(fields.instructions) + bytes(fields.system)
    prompt = before + next(filter(None, (bytes(getattr(fields, name)) for name in _PROMPTS)), b"")
    tenant = tenant_of(authorization)
    return Needs(
        adapter=adapter,
        num_prompt_tokens=_num_tokens(prompt),
        prefix_digests=prefix_digests(prompt, f"{tenant} {adapter}", BLOCK_BYTES, MAX_BLOCKS),
        tenant=tenant,
    )


def _adapter_id(parameters: msgspec.Raw) -> str | None:
    text = memoryview(parameters)
    if not text or text[0] != ord("{"):
        return None
    name = _name(_decode(_PARAMETERS, text).adapter_id)
    return None if name == LORAX_BASE else name


def adapter_of(model: str | None, base_names: Set[str]) -> str | None:
    """The adapter that `sql` or `base:sql` names; None for the base model. A mix counts as an adapter of its own."""
    if model is None or model in base_names:
        return None
    base, colon, adapter = model.partition(":")
    return adapter if colon and base in base_names else model


def tenant_of(authorization: str) -> str | None:
    """A name for what a client sends as its key, however it is spelled, from which the key does not follow; another one
    in each process."""
    if not authorization:
        return None
    key = key_of(authorization)
    credential = authorization if key is None else f"Bearer {key}"
    return hmac.new(_SECRET, credential.encode("latin-1", "replace"), "sha256").hexdigest()[:16]


def adapters_named(body: bytes, fields: Sequence[str]) -> list[str]:
    """What fields of a verb's body name. Raises ApiError for what is no JSON object."""
    found = _decode(_VERBS, body)
    names = (_name(getattr(found, field)) for field in fields)
    return [name for name in names if name is not None]


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | memoryview) -> T:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ApiError("the body is not usable: its JSON is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiError(f"the body is not a valid JSON object: {error}") from None


def _name(value: msgspec.Raw) -> str | None:
    text = memoryview(value)
    if not 2 < len(text) <= MAX_NAME_BYTES or text[0] != ord('"'):
        return None
    name = _decode(_NAMES, text)
    return name if len(name) <= MAX_NAME_CHARS else None


def _num_tokens(prompt: bytes) -> int:
    """About: token ids by their commas, text by its bytes."""
    is_ids = prompt[:1] == b"[" and prompt[1:32].lstrip()[:1].isdigit()
    return prompt.count(b",") + 1 if is_ids else len(prompt) // BYTES_A_TOKEN
