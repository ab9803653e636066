"""The mathematics of a merge, module by module, in float32 as peft computes it on a CPU.

    delta_i = scaling_i B_i A_i         w_i: the weight of adapter i

    cat              A = [w_i scaling_i A_i] below one another, B = [B_i] beside one another: the sum of w_i delta_i
    linear           A = sum of sqrt|w_i scaling_i| sign A_i, B = sum of sqrt|w_i scaling_i| B_i: not that sum
    ties             as linear, of the largest numbers alone, and of these only those of the sign that prevails
    dare_...         as linear or ties, of numbers that are drawn, divided by their share
    magnitude_prune  as linear, of the largest numbers alone
    ..._svd, svd     the same of the products delta_i; the result is cut to its main singular directions

Draws are those of torch's generator of the seed, in peft's order: modules as the model has them, A before B, adapter by
adapter.

A decomposition is as small as its result allows. Without rules no product is made: the matrix that is decomposed is as
small as the ranks. Of a product that rules have changed, the main directions are looked for in a block Krylov space,
in float64, until a residual shows them; a whole decomposition follows when it does not. svd_clamp depends on the signs
of singular vectors, so that it always takes the decomposition that peft takes.

Sources: TIES-Merging (arXiv:2306.01708), DARE (arXiv:2311.03099), block Krylov (arXiv:1504.05477).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.tensors import is_finite

KRYLOV_SPARE = 8
"""At least so many vectors more than directions are wanted, and a multiple of it in all, which is quick."""

KRYLOV_LOOKS = (6, 8, 10, 12)
"""Products with D D^T after which the directions are looked at."""

MAX_RESIDUAL = 1e-7
"""Of D v - s u, as a share of the largest singular value: what float32 makes of the result is more."""

Tensors = Iterable[torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank]."""


class Part(NamedTuple):
    """What one adapter has of a module; tensors are float32. is_embedding: peft's product is transposed, which decides
    where draws fall."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float
    weight: float
    is_embedding: bool = False

    @property
    def delta(self) -> torch.Tensor:
        delta = self.lora_b @ self.lora_a * self.scaling
        return delta.T if self.is_embedding else delta

    @property
    def factor(self) -> float:
        return self.weight * self.scaling


def combine(parts: Sequence[Part], wish: MergeWish, rank: int, generator: torch.Generator) -> Factors:
    """A and B of one module, to be applied with a scaling of 1. rank: at most so much, of a decomposition."""
    combination = wish.combination
    if combination.rule == "cat":
        lora_a = torch.cat([part.lora_a * part.factor for part in parts])
        return lora_a, torch.cat([part.lora_b for part in parts], dim=1)
    if combination.is_svd:
        return _decomposed(parts, wish, rank, generator)
    roots = [math.sqrt(abs(part.factor)) for part in parts]
    signed = [math.copysign(root, part.factor) for root, part in zip(roots, parts, strict=True)]
    merge = _rule_of(wish, generator)
    return merge([part.lora_a for part in parts], signed), merge([part.lora_b for part in parts], roots)


# ------------------------------------------------------------------------------------------------------------- rules


def _rule_of(wish: MergeWish, generator: torch.Generator) -> Callable[[Tensors, Sequence[float]], torch.Tensor]:
    """(tensors of one shape, their weights) -> one tensor."""
    combination, density = wish.combination, 1.0 if wish.density is None else wish.density

    def sparse(tensor: torch.Tensor) -> torch.Tensor:
        if density >= 1:
            return tensor
        return _drawn(tensor, density, generator) if combination.is_random else _largest(tensor, density)

    def merge(tensors: Tensors, weights: Sequence[float]) -> torch.Tensor:
        kept = [sparse(tensor) for tensor in tensors]
        if combination.elects_signs:
            return _of_one_sign(kept, weights, wish.majority_sign_method or "total")
        return _sum(tensor * weight for tensor, weight in zip(kept, weights, strict=True))

    return merge


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One after the other: so many are not in memory at a time."""
    return functools.reduce(torch.add, tensors)


def _largest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    """Unsorted: topk takes the same of equal numbers, in a third of the time."""
    numbers, is_kept = tensor.reshape(-1), torch.zeros(tensor.numel(), dtype=torch.bool)
    is_kept[torch.topk(numbers.abs(), int(density * len(numbers)), sorted=False).indices] = True
    return numbers.where(is_kept, 0.0).view(tensor.shape)


def _drawn(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    is_kept = torch.bernoulli(torch.full_like(tensor, density), generator=generator)
    return tensor * is_kept / density


def _of_one_sign(tensors: Sequence[torch.Tensor], weights: Sequence[float], method: str) -> torch.Tensor:
    """The mean of the numbers that have the sign that prevails at their place: of the sum, or of most adapters. A 0 has
    none."""
    votes = _sum(tensors if method == "total" else (tensor.sign() for tensor in tensors))
    sign, total, count = torch.where(votes >= 0, 1.0, -1.0), torch.zeros_like(votes), torch.zeros_like(votes)
    for tensor, weight in zip(tensors, weights, strict=True):
        agrees = tensor.sign() == sign
        total += (tensor * weight).where(agrees, 0.0)
        count += agrees
    return total / count.clamp(min=1)


# ---------------------------------------------------------------------------------------------------- decompositions


def _decomposed(parts: Sequence[Part], wish: MergeWish, rank: int, generator: torch.Generator) -> Factors:
    is_low_rank = wish.combination.rule == "linear" and sum(len(part.lora_a) for part in parts) < _least_side(parts)
    if is_low_rank and wish.svd_clamp is None:
        return _of_low_rank(parts, rank)
    delta = _rule_of(wish, generator)((part.delta for part in parts), [part.weight for part in parts])
    delta = delta.T if parts[0].is_embedding else delta
    if not is_finite(delta):
        raise OverflowError("the products of B and A do not fit in float32")
    if wish.svd_clamp is None:
        return main_directions(delta, rank)
    lora_a, lora_b = all_directions(delta, rank)
    limit = torch.quantile(torch.cat([lora_b.flatten(), lora_a.flatten()]), wish.svd_clamp).item()
    return lora_a.clamp(-limit, limit), lora_b.clamp(-limit, limit)


def all_directions(delta: torch.Tensor, rank: int) -> Factors:
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    return right[:rank], left[:, :rank] * values[:rank]


def main_directions(delta: torch.Tensor, rank: int) -> Factors:
    """As `all_directions`, of the Krylov space of D D^T and random vectors, more of them than directions are wanted:
    those are found soon whose singular values stand out of what is beyond so many vectors, however close together they
    are. D^T where D has more rows than columns."""
    is_tall = len(delta) > delta.shape[1]
    wide, width = (delta.T if is_tall else delta).double(), (-(-rank // KRYLOV_SPARE) + 1) * KRYLOV_SPARE
    block = torch.randn(len(wide), width, dtype=wide.dtype, generator=torch.Generator().manual_seed(0))
    basis, images = block[:, :0], wide.T[:, :0]
    for step in range(1, min(max(KRYLOV_LOOKS), len(wide) // 2 // width) + 1):
        for _ in range(2):  # once leaves what rounding makes of it
            block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
        image = wide.T @ block
        basis, images = torch.cat([basis, block], dim=1), torch.cat([images, image], dim=1)
        if step in KRYLOV_LOOKS:
            chosen = torch.linalg.eigh(images.T @ images).eigenvectors[:, -rank:]
            right, values, turn = torch.linalg.svd(images @ chosen, full_matrices=False)
            left = basis @ (chosen @ turn.T)
            if (wide @ right - left * values).norm() <= MAX_RESIDUAL * values[0]:
                found = (left.T, right * values) if is_tall else (right.T, left * values)
                return found[0].float(), found[1].float()
        block = wide @ image
    return all_directions(delta, rank)


def _least_side(parts: Sequence[Part]) -> int:
    return min(parts[0].lora_a.shape[1], len(parts[0].lora_b))


def _of_low_rank(parts: Sequence[Part], rank: int) -> Factors:
    """B A = Q_b (R_b R_a^T) Q_a^T: the middle is as small as the ranks."""
    q_b, r_b = torch.linalg.qr(torch.cat([part.lora_b.double() * part.factor for part in parts], dim=1))
    q_a, r_a = torch.linalg.qr(torch.cat([part.lora_a.double() for part in parts]).T)
    middle = r_b @ r_a.T
    if not middle.isfinite().all():
        raise OverflowError("the products of B and A do not fit in float64")
    left, values, right = torch.linalg.svd(middle)
    return (right[:rank] @ q_a.T).float(), (q_b @ (left[:, :rank] * values[:rank])).float()
