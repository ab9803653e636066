"""The mathematics of a merge, module by module, in float32 as peft computes it on a CPU.

    delta_i = scaling_i B_i A_i         w_i: the weight of adapter i

    cat              A = [w_i scaling_i A_i] below one another, B = [B_i] beside one another: the sum of w_i delta_i
    linear           A = sum of sqrt|w_i scaling_i| sign A_i, B = sum of sqrt|w_i scaling_i| B_i: not that sum
    ties             as linear, of the largest numbers alone, and of these only those of the sign that prevails
    dare_...         as linear or ties, of numbers that are drawn, divided by their share
    magnitude_prune  as linear, of the largest numbers alone
    ..._svd, svd     the same of the products delta_i; the result is cut to its main singular directions

Draws are those of torch's generator of the seed, in peft's order: modules as the model has them, A before B, adapter by
adapter. Without rules and svd_clamp (which depends on the signs of singular vectors), no product is made: the matrix
that is decomposed is as small as the ranks.

Sources: TIES-Merging (arXiv:2306.01708), DARE (arXiv:2311.03099).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from loraplex.adapters.merging.wish import MergeWish

Tensors = Sequence[torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank]."""


class Part(NamedTuple):
    """What one adapter has of a module; tensors are float32."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float
    weight: float

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
        stacked = torch.stack([sparse(tensor) for tensor in tensors])
        weighted = stacked * torch.tensor(weights, dtype=stacked.dtype).view(-1, *(1,) * tensors[0].dim())
        if not combination.elects_signs:
            return weighted.sum(dim=0)
        agrees = _agrees(stacked, wish.majority_sign_method or "total")
        return (weighted * agrees).sum(dim=0) / agrees.sum(dim=0).clamp(min=1)

    return merge


def _largest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    numbers, kept = tensor.reshape(-1), torch.zeros(tensor.numel(), dtype=tensor.dtype)
    places = torch.topk(numbers.abs(), int(density * len(numbers))).indices
    kept[places] = numbers[places]
    return kept.view(tensor.shape)


def _drawn(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    is_kept = torch.bernoulli(torch.full_like(tensor, density), generator=generator)
    return tensor * is_kept / density


def _agrees(stacked: torch.Tensor, method: str) -> torch.Tensor:
    """Which numbers have the sign that prevails at their place: of the sum, or of most adapters. 0 has none."""
    signs = stacked.sign()
    votes = (stacked if method == "total" else signs).sum(dim=0)
    return signs == torch.where(votes >= 0, 1.0, -1.0)


# ---------------------------------------------------------------------------------------------------- decompositions


def _decomposed(parts: Sequence[Part], wish: MergeWish, rank: int, generator: torch.Generator) -> Factors:
    is_low_rank = wish.combination.rule == "linear" and sum(len(part.lora_a) for part in parts) < _least_side(parts)
    if is_low_rank and wish.svd_clamp is None:
        return _of_low_rank(parts, rank)
    deltas = [part.lora_b @ part.lora_a * part.scaling for part in parts]
    delta = _rule_of(wish, generator)(deltas, [part.weight for part in parts])
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    lora_a, lora_b = right[:rank], left[:, :rank] * values[:rank]
    if wish.svd_clamp is None:
        return lora_a, lora_b
    limit = torch.quantile(torch.cat([lora_b.flatten(), lora_a.flatten()]), wish.svd_clamp).item()
    return lora_a.clamp(-limit, limit), lora_b.clamp(-limit, limit)


def _least_side(parts: Sequence[Part]) -> int:
    return min(parts[0].lora_a.shape[1], len(parts[0].lora_b))


def _of_low_rank(parts: Sequence[Part], rank: int) -> Factors:
    """B A = Q_b (R_b R_a^T) Q_a^T: the middle is as small as the ranks."""
    q_b, r_b = torch.linalg.qr(torch.cat([part.lora_b.double() * part.factor for part in parts], dim=1))
    q_a, r_a = torch.linalg.qr(torch.cat([part.lora_a.double() for part in parts]).T)
    left, values, right = torch.linalg.svd(r_b @ r_a.T)
    return (right[:rank] @ q_a.T).float(), (q_b @ (left[:, :rank] * values[:rank])).float()
