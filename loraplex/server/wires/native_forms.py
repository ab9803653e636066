"""Forms of refusals that SGLang's and LoRAX's clients read. What refuses before a route does (a key, a role, a guard)
has the form of this server there, too."""

from __future__ import annotations

import msgspec


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


FORMS: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(("/generate", "/generate_stream", "/"), LoraxError),
    **dict.fromkeys(("/load_lora_adapter", "/unload_lora_adapter"), LoraUpdateReply),
}
"""Of the refusals of a path, beside this server's own."""
