"""How a tenant's requests stand among those of others: its share of the engine, and targets that admission heeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from loraplex.config import setting
from loraplex.errors import InvalidRequestError
from loraplex.sampling_params import MAX_PRIORITY, MAX_TARGET_MS, MAX_WEIGHT, MIN_WEIGHT, Claim

BOUNDS: Mapping[str, tuple[float, float]] = {
    "weight": (MIN_WEIGHT, MAX_WEIGHT),
    "max_priority": (0, MAX_PRIORITY),
    "ttft_target_ms": (1, MAX_TARGET_MS),
    "itl_target_ms": (1, MAX_TARGET_MS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevel:
    """None: weight 1, the server's --max-priority, no target. Raises InvalidRequestError for what is beyond BOUNDS."""

    weight: float | None = setting(None, "share of the engine beside those of other tenants (default: 1)")
    max_priority: int | None = setting(
        None, "levels of priority that its requests may be before or after each other (default: --max-priority)"
    )
    ttft_target_ms: int | None = setting(None, "target to the first token in milliseconds, a hint for admission")
    itl_target_ms: int | None = setting(None, "target between tokens in milliseconds, a hint for admission")

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            least, most = BOUNDS[name]
            if not least <= value <= most:
                raise InvalidRequestError(f"{name} must be {least:g} to {most:g}, got {value:g}")

    @classmethod
    def of(cls, given: Mapping[str, float]) -> Self:
        """Of what `given` gave; other names are passed over."""
        known = [each.name for each in fields(cls) if each.name in given]
        made: dict[str, Any] = {name: given[name] if name == "weight" else int(given[name]) for name in known}
        return cls(**made)

    def given(self) -> dict[str, float]:
        """What is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def claim(self, tenant: str, priority: int, max_priority: int) -> Claim:
        """Of a request. max_priority: where the tenant has none of its own. Raises InvalidRequestError."""
        most = max_priority if self.max_priority is None else self.max_priority
        if abs(priority) > most:
            setting = "--max-priority" if self.max_priority is None else "max_priority of this tenant,"
            text = f"priority is {priority}, and {setting} {most} allows {-most} to {most}"
            raise InvalidRequestError(text if most else f"{text}; leave it out", param="priority")
        weight = 1.0 if self.weight is None else self.weight
        return Claim(tenant, weight, priority, self.ttft_target_ms, self.itl_target_ms)
