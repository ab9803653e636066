"""A tokenizer without a vocabulary file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loraplex.errors import InvalidRequestError


class FakeTokenizer:
    """One token per UTF-8 byte; 1 begins a text, 2 ends it. `byte = token_id - 3`. Chats: `<|role|>content` lines."""

    BOS, EOS, FIRST_BYTE = 1, 2, 3
    vocab_size = FIRST_BYTE + 256
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    special_ids = frozenset((0, BOS, EOS))
    longest_added_token = len("<pad>")
    _SPECIAL: Mapping[int, bytes] = {0: b"<pad>", BOS: b"<s>", EOS: b"</s>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.BOS] * add_special_tokens + [self.FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = [token_id for token_id in token_ids if token_id >= self.FIRST_BYTE or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        special = self._SPECIAL.get(token_id)
        return bytes([token_id - self.FIRST_BYTE]) if special is None else special

    def template_for_tools(self) -> str:
        """Calls as Hermes writes them."""
        return "<tool_call>"

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Everything that it is given is in the text; a message with the role `refuse` is refused."""
        if any(message["role"] == "refuse" for message in messages):
            raise InvalidRequestError("the chat template refuses this chat: no such role", param="messages")
        given = {"tools": tools, "documents": documents, **(template_kwargs or {})}
        shown = {name: value for name, value in given.items() if value}
        lines = [json.dumps(shown)] * bool(shown) + [self._line(message) for message in messages]
        if continue_final_message:
            return "\n".join(lines)
        return "\n".join([*lines, "<|assistant|>"]) if add_generation_prompt else "\n".join([*lines, ""])

    @staticmethod
    def _line(message: Mapping[str, Any]) -> str:
        extras = {name: value for name, value in message.items() if name not in ("role", "content")}
        return f"<|{message['role']}|>" + (json.dumps(extras) if extras else "") + str(message["content"])
