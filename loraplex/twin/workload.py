"""What comes to a simulated server: arrivals drawn from a seed, or read from a recorded trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.config import setting
from loraplex.errors import ConfigError
from loraplex.twin.files import read_bounded

if TYPE_CHECKING:
    import numpy as np

MAX_REQUESTS = 20_000_000
MAX_TOKENS = 1 << 20
MAX_TRACE_BYTES = 1 << 28
"""Some three million requests."""

MAX_DIGITS = 7
MAX_ADAPTERS = 100_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at `at_s`. adapter: its number, None for the base model; lengths in tokens."""

    at_s: float
    adapter: int | None
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Arrivals with Gamma-distributed gaps, adapters by Zipf, lengths uniform between two bounds."""

    adapters: int = setting(100, "adapters; 0: the base model alone", group="Workload")
    zipf: float = setting(0.9, "popularity of adapter i is i ** -ZIPF; 0: all alike")
    base_share: float = setting(0.0, "share of the requests that go to the base model")
    rate: float = setting(4.0, "requests a second")
    cv: float = setting(1.0, "coefficient of variation of the gaps between arrivals; 1: Poisson")
    requests: int = setting(1000, "requests in all")
    prompt_tokens: str = setting("64", "tokens of a prompt: a number, or LOW-HIGH")
    output_tokens: str = setting("64", "tokens of an answer: a number, or LOW-HIGH")
    shared_prefix_tokens: int = setting(0, "first tokens of a prompt that all prompts of its adapter share")
    ranks: tuple[int, ...] = setting((16,), "rank of an adapter; several are given to adapters in turn")
    seed: int = setting(0, "seed of the arrivals")
    trace: str | None = setting(
        None,
        "recorded arrivals instead of drawn ones: a JSON line each, with at_s, adapter (a name or null), prompt_tokens "
        "and output_tokens",
    )

    def __post_init__(self) -> None:
        if self.trace is not None:
            drawn = (
                "adapters",
                "zipf",
                "base_share",
                "rate",
                "cv",
                "requests",
                "prompt_tokens",
                "output_tokens",
                "seed",
            )
            for each in fields(self):
                is_given = each.name in drawn and getattr(self, each.name) != each.default
                _require(not is_given, f"{each.name} is the trace's: leave it out, or the trace")
        _require(0 <= self.adapters <= MAX_ADAPTERS, f"adapters must be 0..{MAX_ADAPTERS}, got {self.adapters}")
        _require(0 <= self.zipf <= 10, f"zipf must be 0..10, got {self.zipf}")
        _require(0 <= self.base_share <= 1, f"base_share must be 0..1, got {self.base_share}")
        _require(0 < self.rate <= 1e6, f"rate must be > 0 and at most 1000000, got {self.rate}")
        _require(0 < self.cv <= 100, f"cv must be > 0 and at most 100, got {self.cv}")
        _require(1 <= self.requests <= MAX_REQUESTS, f"requests must be 1..{MAX_REQUESTS}, got {self.requests}")
        low, _ = lengths("prompt_tokens", self.prompt_tokens)
        lengths("output_tokens", self.output_tokens)
        _require(
            0 <= self.shared_prefix_tokens < low,
            f"shared_prefix_tokens ({self.shared_prefix_tokens}) must be >= 0 and less than prompt_tokens ({low})",
        )
        _require(
            bool(self.ranks) and all(1 <= rank <= 512 for rank in self.ranks), f"ranks must be 1..512, got {self.ranks}"
        )

    def popularity(self) -> np.ndarray:
        """Shares of the adapters, which add up to 1, the most popular first."""
        import numpy as np

        weights = np.arange(1, self.adapters + 1, dtype=float) ** -self.zipf
        return np.asarray(weights / weights.sum())

    def rank_of(self, adapter: int) -> int:
        return self.ranks[adapter % len(self.ranks)]

    def arrivals(self) -> Arrivals:
        return Arrivals.drawn(self) if self.trace is None else Arrivals.read(Path(self.trace))


class Arrivals(Sequence[Arrival]):
    """In the order of their times. names: of the adapters, by number, where a trace has them."""

    def __init__(
        self,
        at_s: np.ndarray,
        adapters: np.ndarray,
        prompts: np.ndarray,
        outputs: np.ndarray,
        names: Sequence[str] | None = None,
    ) -> None:
        """adapters: -1 is the base model."""
        self.at_s, self.adapters, self.prompts, self.outputs = at_s, adapters, prompts, outputs
        self.names = names

    def __len__(self) -> int:
        return len(self.at_s)

    def __getitem__(self, index: int) -> Arrival:  # type: ignore[override]
        adapter = int(self.adapters[index])
        return Arrival(
            float(self.at_s[index]),
            None if adapter < 0 else adapter,
            int(self.prompts[index]),
            int(self.outputs[index]),
        )

    def __iter__(self) -> Iterator[Arrival]:
        columns = (self.at_s.tolist(), self.adapters.tolist(), self.prompts.tolist(), self.outputs.tolist())
        for at_s, adapter, prompt, output in zip(*columns, strict=True):
            yield Arrival(at_s, None if adapter < 0 else adapter, prompt, output)

    @property
    def num_adapters(self) -> int:
        """One more than the highest number."""
        return int(self.adapters.max(initial=-1)) + 1

    @classmethod
    def drawn(cls, workload: Workload) -> Arrivals:
        """The gaps are scaled so that their mean is exactly 1 / rate."""
        import numpy as np

        draw, count = np.random.default_rng(workload.seed), workload.requests
        gaps = draw.gamma(1 / workload.cv**2, workload.cv**2 / workload.rate, count)
        at_s = np.cumsum(gaps * (count / workload.rate / gaps.sum()))
        adapters = np.full(count, -1, np.int64)
        if workload.adapters:
            cumulated = np.cumsum(workload.popularity())
            adapters = np.minimum(np.searchsorted(cumulated, draw.random(count), side="right"), workload.adapters - 1)
            adapters[draw.random(count) < workload.base_share] = -1
        low, high = lengths("prompt_tokens", workload.prompt_tokens)
        prompts = draw.integers(low, high + 1, count)
        low, high = lengths("output_tokens", workload.output_tokens)
        return cls(at_s, adapters, prompts, draw.integers(low, high + 1, count))

    @classmethod
    def read(cls, path: Path) -> Arrivals:
        """Raises ConfigError, naming the line, for a file that is no trace."""
        import numpy as np

        try:
            lines = read_bounded(path, MAX_TRACE_BYTES).decode().splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from error
        numbers: dict[str, int] = {}
        rows = []
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_row(path, number, line, numbers))
        _require(bool(rows), f"trace {str(path)!r} has no requests")
        rows.sort(key=lambda row: row[0])
        at_s = np.array([row[0] for row in rows], float)
        adapters, prompts, outputs = np.array([row[1:] for row in rows], np.int64).T
        return cls(at_s, adapters, prompts, outputs, list(numbers))


def _row(path: Path, number: int, line: str, numbers: dict[str, int]) -> tuple[float, int, int, int]:
    try:
        fields = json.loads(line)
        at_s, name = float(fields["at_s"]), fields["adapter"]
        prompt, output = int(fields["prompt_tokens"]), int(fields["output_tokens"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"trace {str(path)!r}, line {number}: {type(error).__name__}: {error}; a line is "
            '{"at_s": 0.5, "adapter": "sql", "prompt_tokens": 64, "output_tokens": 64}'
        ) from error
    is_fine = math.isfinite(at_s) and at_s >= 0 and 1 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS
    _require(
        is_fine and (name is None or isinstance(name, str)),
        f"trace {str(path)!r}, line {number}: at_s must be >= 0, adapter a name or null, and tokens 1..{MAX_TOKENS}",
    )
    return at_s, -1 if name is None else numbers.setdefault(name, len(numbers)), prompt, output


def lengths(name: str, text: str) -> tuple[int, int]:
    """`64` or `32-128` as two bounds. Raises ConfigError."""
    low, dash, high = text.partition("-")
    is_number = low.isdecimal() and (high.isdecimal() if dash else True) and len(text) <= 2 * MAX_DIGITS + 1
    bounds = (int(low), int(high if dash else low)) if is_number else (0, 0)
    _require(
        1 <= bounds[0] <= bounds[1] <= MAX_TOKENS,
        f"{name} must be a number or LOW-HIGH, 1..{MAX_TOKENS}, got {text[:40]!r}",
    )
    return bounds


def _require(is_fine: bool, text: str) -> None:
    if not is_fine:
        raise ConfigError(text)
