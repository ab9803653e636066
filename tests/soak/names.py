"""What an operator's names should stand for: the registry in two dictionaries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.adapters.registry import LoRARegistry


@dataclass
class Names:
    """loaded: name to the digest of its own version; aliases: names that were switched, to what answers for them."""

    loaded: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @classmethod
    def in_registry(cls, registry: LoRARegistry, names: Iterable[str]) -> Names:
        """What `names` really stand for, at one instant."""
        with registry._lock:
            current, aliases = registry._table.current, registry._table.aliases
            loaded = {name: current[name].ref.adapter_digest for name in names if name in current}
            return cls(loaded, {name: aliases[name] for name in names if name in aliases})

    def content(self, name: str) -> str | None:
        return self.loaded.get(self.aliases.get(name, name))

    def with_load(self, name: str, digest: str) -> Names:
        aliases = {alias: target for alias, target in self.aliases.items() if alias != name}
        return Names({**self.loaded, name: digest}, aliases)

    def with_unload(self, name: str) -> Names:
        loaded = {other: digest for other, digest in self.loaded.items() if other != name}
        return Names(loaded, {alias: target for alias, target in self.aliases.items() if alias != name})

    def with_switch(self, old: str, new: str) -> Names:
        aliases = {alias: target for alias, target in self.aliases.items() if alias != new}
        if old in self.loaded:
            aliases |= {alias: new for alias, target in aliases.items() if target == old}
            aliases[old] = new
        return Names(self.loaded, aliases)
