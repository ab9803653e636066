"""Forms of refusals that SGLang's and LoRAX's clients read. What refuses before a route does (a key, a role, a guard)
has the form of this server there, too."""

from __future__ import annotations

import msgspec

from loraplex.server.api_error import error_body, error_reply, status_of
from loraplex.server.streaming import sse
from loraplex.server.wires.anthropic_errors import anthropic_event, is_anthropic


class LoraxError(msgspec.Struct, frozen=True):
    """`param` and `code` stay beside what LoRAX has."""

    error: str
    error_type: str
    param: str | None = None
    code: str | None = None


class LoraUpdateReply(msgspec.Struct, frozen=True):
    """SGLang's, of a load or an unload that was done or refused.

    loaded_adapters: paths by name; a key that may not see paths gets the names twice.
    """

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


def lorax_refusal(error: Exception) -> bytes:
    """`error_type` is LoRAX's for what it has one for; its client makes an exception of each."""
    status, body = status_of(error), error_body(error)
    kinds = {400: "validation", 413: "validation", 415: "validation", 429: "overloaded", 404: "not_found"}
    kind = kinds.get(status, "generation" if status >= 499 else body.type)
    return msgspec.json.encode(LoraxError(body.message, kind, body.param, body.code))


def error_event(path: str, error: Exception) -> bytes:
    """In the middle of a stream of any route, in its form; `/generate` streams as SGLang does."""
    if is_anthropic(path):
        return anthropic_event(error)
    return sse(lorax_refusal(error) if path in LORAX_STREAMS else error_reply(error))


LORAX_STREAMS = frozenset({"/generate_stream", "/"})
FORMS: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(("/generate", "/generate_stream", "/"), LoraxError),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), LoraUpdateReply),
}
"""Of the refusals of a path, beside this server's own."""
