"""An adapter that was trained with a longer context than its base: what it makes of the base's positions.

    factor    vllm_long_context_scaling_factor, or ceil(context_length / positions of the base)
    context   context_length, or positions of the base * factor

As in vLLM: an adapter's rows have linear rope scaling of its factor (position interpolation, arXiv 2306.15595), which
is in place of the base's own where that is linear, too. No other rope type is stretched: yarn and llama3 scale by
dimension, and what they are together with a factor, no trainer that writes these fields has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex.adapters.format import PEFTHelper
from loraplex.core import STRETCHED_ROPE_TYPES, LongContexts


@dataclass(frozen=True, slots=True)
class LongContext:
    """rope_factor: what the adapter's rows divide the rotary frequencies by. max_model_len: prompt and output together,
    in tokens."""

    rope_factor: float
    max_model_len: int

    @classmethod
    def of(cls, helper: PEFTHelper, base: LongContexts) -> LongContext | None:
        """None where the adapter has the base's positions. `reasons` is about the others."""
        factor = _factor(helper, base)
        if factor == base.rope_factor:
            return None
        return cls(factor, helper.context_length or int(base.num_positions * factor))


def _factor(helper: PEFTHelper, base: LongContexts) -> float:
    if helper.vllm_long_context_scaling_factor:
        return helper.vllm_long_context_scaling_factor
    if helper.context_length:
        return float(math.ceil(helper.context_length / base.num_positions))
    return base.rope_factor


def reasons(helper: PEFTHelper, base: LongContexts) -> list[str]:
    """Why this base refuses the adapter's context."""
    found, stated, end = [], helper.vllm_max_position_embeddings, base.num_positions
    if stated not in (0, end):
        found.append(f"vllm_max_position_embeddings={stated}: it was trained on a base of other positions, here {end}")
    context = LongContext.of(helper, base)
    if context is None:
        return found
    factor, what = context.rope_factor, f"it stretches the base's {end} positions by {context.rope_factor:g}"
    if base.rope_type not in STRETCHED_ROPE_TYPES:
        names = " or ".join(STRETCHED_ROPE_TYPES)
        found.append(f"{what}, but their rope_type is {base.rope_type!r}: only {names} is stretched")
    elif factor < base.rope_factor:
        found.append(f"{what}, which is less than the base's own factor, {base.rope_factor:g}")
    elif context.max_model_len > end * factor:
        found.append(f"{what}, to {int(end * factor)}, and context_length is {context.max_model_len}")
    elif factor not in base.scaling_factors:
        allowed = ", ".join(f"{each:g}" for each in base.scaling_factors) or "none"
        found.append(f"{what}; long_lora_scaling_factors allows {allowed}: start the server with {factor:g} among them")
    return found
