"""What a merge is asked for: which adapters, with which weights, combined how. No torch: a server checks it at once.

The names are those of peft's `add_weighted_adapter`. Left out: svd_full_matrices, which changes no result, and
svd_driver, which chooses among the solvers of a GPU. seed is ours: peft draws from torch's global generator.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.errors import InvalidRequestError, shown

MAX_MERGED = 16
MAX_SVD_RANK = 512
MAX_MERGE_BYTES = 2 * 2**30
"""Of memory, unless the operator chooses another limit."""


class Combination(enum.StrEnum):
    """Values of `combination_type`. Those that end in svd combine products B A, `cat` and the rest A and B."""

    LINEAR = "linear"
    CAT = "cat"
    SVD = "svd"
    TIES = "ties"
    TIES_SVD = "ties_svd"
    DARE_LINEAR = "dare_linear"
    DARE_LINEAR_SVD = "dare_linear_svd"
    DARE_TIES = "dare_ties"
    DARE_TIES_SVD = "dare_ties_svd"
    MAGNITUDE_PRUNE = "magnitude_prune"
    MAGNITUDE_PRUNE_SVD = "magnitude_prune_svd"

    @property
    def is_svd(self) -> bool:
        return self.value.endswith("svd")

    @property
    def rule(self) -> str:
        """linear, cat, ties, dare_linear, dare_ties or magnitude_prune: what is done to A and B, or to products."""
        return "linear" if self is Combination.SVD else self.value.removesuffix("_svd")

    @property
    def is_random(self) -> bool:
        return self.value.startswith("dare")

    @property
    def is_sparse(self) -> bool:
        return self.rule not in ("linear", "cat")

    @property
    def elects_signs(self) -> bool:
        return "ties" in self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeWish:
    """Raises InvalidRequestError, whose `param` names the field, for what cannot be.

    combination_type None: `svd`, as in peft, and `linear` of a single adapter. density: the share of numbers that is
    kept. svd_rank None: the largest rank. svd_clamp: the quantile beyond which entries of the factors are cut off.
    """

    adapters: tuple[tuple[str, float], ...]
    combination_type: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None
    svd_rank: int | None = None
    svd_clamp: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for param, reason in filter(None, (self._wrong_adapters(), self._wrong_combination())):
            raise InvalidRequestError(reason, param=param)
        for field, check in _CHECKS.items():
            if why := check(self, self.combination):
                raise InvalidRequestError(f"{field} {why}", param=field)

    @property
    def combination(self) -> Combination:
        usual = Combination.LINEAR if len(self.adapters) == 1 else Combination.SVD
        return usual if self.combination_type is None else Combination(self.combination_type)

    def _wrong_adapters(self) -> tuple[str, str] | None:
        if not 1 <= len(self.adapters) <= MAX_MERGED:
            return "adapters", f"adapters: 1 to {MAX_MERGED} can be merged, got {len(self.adapters)}"
        names = [name for name, _ in self.adapters]
        if len(set(names)) < len(names):
            return "adapters", "adapters: one is named twice; name it once, with the sum of its weights"
        odd = next((weight for _, weight in self.adapters if not math.isfinite(weight)), None)
        return None if odd is None else ("adapters", f"adapters: a weight must be a finite number, got {odd}")

    def _wrong_combination(self) -> tuple[str, str] | None:
        known = [each.value for each in Combination]
        if self.combination_type not in (None, *known):
            text = f"combination_type {shown(self.combination_type)} is not one of {', '.join(known)}"
            return "combination_type", text
        if len(self.adapters) == 1 and self.combination is not Combination.LINEAR:
            text = f"combination_type {self.combination_type}: one adapter alone is merged by linear, as in peft"
            return "combination_type", text
        return None


def parse_weighted(text: str) -> tuple[str, float]:
    """(path, weight) of `PATH=WEIGHT`. Raises InvalidRequestError."""
    path, _, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        path, number = "", 0.0
    if not path:
        raise InvalidRequestError(f"adapter {shown(text)}: write PATH=WEIGHT, such as sql=0.7", param="adapters")
    return path, number


def _of_density(wish: MergeWish, combination: Combination) -> str | None:
    if not combination.is_sparse:
        return None if wish.density is None else f"is of no use with {combination}; leave it out"
    if wish.density is None:
        return f"is needed with {combination}: the share of numbers that is kept"
    return None if 0 < wish.density <= 1 else f"must be above 0 and at most 1, got {wish.density}"


def _of_method(wish: MergeWish, combination: Combination) -> str | None:
    method = wish.majority_sign_method
    if method is None:
        return None
    if not combination.elects_signs:
        return f"is of no use with {combination}; leave it out"
    return None if method in ("total", "frequency") else f"must be total or frequency, got {shown(method)}"


def _of_rank(wish: MergeWish, combination: Combination) -> str | None:
    if wish.svd_rank is None:
        return None
    if not combination.is_svd:
        return f"is of no use with {combination}; leave it out"
    return None if 1 <= wish.svd_rank <= MAX_SVD_RANK else f"must be 1..{MAX_SVD_RANK}, got {wish.svd_rank}"


def _of_clamp(wish: MergeWish, combination: Combination) -> str | None:
    if wish.svd_clamp is None:
        return None
    if not combination.is_svd:
        return f"is of no use with {combination}; leave it out"
    return None if 0 < wish.svd_clamp <= 1 else f"must be above 0 and at most 1, got {wish.svd_clamp}"


def _of_seed(wish: MergeWish, combination: Combination) -> str | None:
    if wish.seed is None:
        return None
    if not combination.is_random:
        return f"is of no use with {combination}, which draws nothing; leave it out"
    return None if 0 <= wish.seed < 2**63 else f"must be 0..{2**63 - 1}, got {wish.seed}"


_CHECKS: dict[str, Callable[[MergeWish, Combination], str | None]] = {
    "density": _of_density,
    "majority_sign_method": _of_method,
    "svd_rank": _of_rank,
    "svd_clamp": _of_clamp,
    "seed": _of_seed,
}
