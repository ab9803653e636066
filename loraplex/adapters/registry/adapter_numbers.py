"""Which `lora_int_id` belongs to which name."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView

from loraplex.errors import AdapterConflictError


class AdapterNumbers:
    """vLLM's numbers: `lora_int_id` to name. A number belongs to one name, and a name has one number or none."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._owner: dict[int, str] = {}

    def of(self, name: str) -> int | None:
        return self._of.get(name)

    def owner(self, lora_int_id: int) -> str | None:
        return self._owner.get(lora_int_id)

    def items(self) -> ItemsView[int, str]:
        return self._owner.items()

    @property
    def names(self) -> KeysView[str]:
        return self._of.keys()

    def check(self, name: str, lora_int_id: int | None) -> None:
        """Raises AdapterConflictError when the number is another name's, or the name has another number."""
        if lora_int_id is None:
            return
        owner = self._owner.get(lora_int_id, name)
        if owner != name:
            raise AdapterConflictError(
                f"lora_int_id {lora_int_id} belongs to adapter {owner!r}, not to {name!r}; use another number",
                param="lora_int_id",
            )
        number = self._of.get(name, lora_int_id)
        if number != lora_int_id:
            raise AdapterConflictError(
                f"adapter {name!r} has lora_int_id {number}, not {lora_int_id}; use that number", param="lora_int_id"
            )

    def bind(self, name: str, lora_int_id: int | None) -> bool:
        """Whether the name has got its number by this."""
        if lora_int_id is None or name in self._of:
            return False
        self._of[name] = lora_int_id
        self._owner[lora_int_id] = name
        return True

    def unbind(self, name: str) -> None:
        number = self._of.pop(name, None)
        if number is not None:
            del self._owner[number]

    @property
    def is_consistent(self) -> bool:
        return {number: name for name, number in self._of.items()} == self._owner
