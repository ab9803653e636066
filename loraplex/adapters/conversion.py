"""Other kinds than plain LoRA in what the kernels compute with: A and B, a magnitude, gains.

    DoRA     magnitude = lora_magnitude_vector
    BD-LoRA  A, or B, of the blocks on its diagonal, which the file has under one another; in the dtype of the file
    IA3      gain = ia3_l, or input_gain = ia3_l where the module is one of feedforward_modules
    AdaLoRA  A = lora_A * lora_E, B = lora_B
    LoHa     (w1_a w1_b) o (w2_a w2_b) = B A with B[:, i r + j] = w1_a[:, i] w2_a[:, j], A[i r + j] = w1_b[i] w2_b[j],
             of rank r * r; where that is above min(in, out), the product itself and an identity
    LoKr     kron(w1, w2) = B A with B = kron(p1, p2), A = kron(q1, q2) for w1 = p1 q1, w2 = p2 q2. p, q are w_a, w_b,
             or the matrix and an identity: the least rank that is exact whatever the numbers
    VeRA     A = lambda_d vera_A[:, :in], B = lambda_b vera_B[:out], row by row; all modules share vera_A and vera_B

It is computed in float64 and rounded once to float32. A product of two numbers of the file is exact in float64, so each
number of A and B is off by one rounding at most, as those of a trained LoRA are; in float32, the sums of w_a w_b would
be rounded at each step and the other factor would multiply what that lost. In 16 bits A and B would be another adapter.

Ranks and bytes are known from the shapes, before anything is made: r * r and kron make gigabytes of small files. numpy
computes, in pieces: torch would start a pool of threads for each loader thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import Kind

PIECE_NUMBERS = 2**20
"""Rows of A or B are made in float64 so many numbers at a time."""

WHOLE = (1, 1)
"""Blocks on the diagonals of A and B."""

MAX_WIDTH = 2**20
"""Of a linear, as a file says it: divisors are looked for up to its square root."""

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
Array = np.ndarray
Converter = Callable[[Tensors], dict[str, torch.Tensor]]
"""A module's tensors by their short names (kinds.PARTS) -> the fields of its layer."""


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What a module is served as: its rank, and the bytes of what is made of the file's tensors."""

    rank: int
    nbytes: int


# ------------------------------------------------------------------------------------------------- shapes and costs


def part_shapes(
    helper: PEFTHelper,
    rank: int,
    in_features: int,
    out_features: int,
    is_feedforward: bool = False,
    is_embedding: bool = False,
    blocks: tuple[int, int] = WHOLE,
) -> dict[str, tuple[int, ...]]:
    """The parts that a module's tensors must be, and their shapes. rank, blocks: what the configuration says of the
    module."""
    match helper.kind:
        case Kind.LN_TUNING | Kind.TRAINABLE_TOKENS:
            return {}
        case Kind.LORA if is_embedding:
            return {"lora_embedding_A": (rank, in_features), "lora_embedding_B": (out_features, rank)}
        case Kind.LORA:
            a_blocks, b_blocks = blocks
            shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (rank, in_features // a_blocks)}
            shapes["lora_B.weight"] = (out_features, rank // b_blocks)
            if helper.lora_bias:
                shapes["lora_B.bias"] = (out_features,)
            if helper.use_dora:
                shapes["lora_magnitude_vector"] = (out_features,)
            return shapes
        case Kind.ADALORA:
            return {"lora_A": (rank, in_features), "lora_B": (out_features, rank), "lora_E": (rank, 1)}
        case Kind.IA3:
            return {"ia3_l": (1, in_features) if is_feedforward else (out_features, 1)}
        case Kind.LOHA:
            pair = (out_features, rank), (rank, in_features)
            return dict(zip(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), pair * 2, strict=True))
        case Kind.LOKR:
            return _lokr_shapes(helper, rank, in_features, out_features)
        case Kind.VERA:
            return {"vera_lambda_b": (out_features,), "vera_lambda_d": (rank,)}


def _lokr_shapes(helper: PEFTHelper, rank: int, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
    """peft stores a factor whole unless the rank is below half of its larger side; w1, only with decompose_both."""
    (cols1, cols2), (rows1, rows2) = (
        factor_pair(in_features, helper.decompose_factor),
        factor_pair(out_features, helper.decompose_factor),
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, cols, may_decompose in (
        ("lokr_w1", rows1, cols1, helper.decompose_both),
        ("lokr_w2", rows2, cols2, True),
    ):
        if may_decompose and 2 * rank < max(rows, cols):
            shapes |= {f"{name}_a": (rows, rank), f"{name}_b": (rank, cols)}
        else:
            shapes[name] = (rows, cols)
    return shapes


@lru_cache(maxsize=256)
def factor_pair(size: int, factor: int) -> tuple[int, int]:
    """The sizes of LoKr's two factors along an axis.

    factor and the rest where it divides the size. Else the smaller is the largest divisor that is at most `factor`
    (-1: any); beyond the square root only the first divisor counts.
    """
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    largest = size if factor == -1 else factor
    low = [divisor for divisor in range(1, int(size**0.5) + 2) if divisor * divisor <= size and size % divisor == 0]
    first_high = size // low[-1]
    if first_high <= largest:
        return low[-1], first_high
    smaller = max((divisor for divisor in low if divisor <= largest), default=1)
    return smaller, size // smaller


def file_widths(kind: Kind, shapes: Shapes, blocks: tuple[int, int] = WHOLE) -> tuple[int, int] | None:
    """(in, out) of the module that these tensors are for; None when they do not say it. IA3 says one of the two."""
    embedding = ("lora_embedding_A", "lora_embedding_B")
    pairs = [embedding] if kind is Kind.LORA and not shapes.keys().isdisjoint(embedding) else _WIDTH_PARTS.get(kind)
    pairs = pairs or [(w, w) if w in shapes else (f"{w}_b", f"{w}_a") for w in _WS]
    sides = [(shapes.get(columns, ()), shapes.get(rows, ())) for columns, rows in pairs]
    if any(len(shape) != 2 for side in sides for shape in side):
        return None
    widths = blocks[0] * math.prod(columns[1] for columns, _ in sides), math.prod(rows[0] for _, rows in sides)
    return widths if all(0 < width <= MAX_WIDTH for width in widths) else None


_WS = ("lokr_w1", "lokr_w2")
_WIDTH_PARTS = {
    Kind.LORA: [("lora_A.weight", "lora_B.weight")],
    Kind.ADALORA: [("lora_A", "lora_B")],
    Kind.IA3: [("ia3_l", "ia3_l")],
    Kind.LOHA: [("hada_w1_b", "hada_w1_a")],
}
"""The parts with as many columns as a module has inputs, and as many rows as it has outputs."""


def cost_of(
    helper: PEFTHelper, rank: int, in_features: int, out_features: int, blocks: tuple[int, int] = WHOLE
) -> ModuleCost:
    """Of a module, without making anything. nbytes of A and B is 0 where they are the file's own."""
    match helper.kind:
        case Kind.LORA:
            made = [width for width, count in zip((in_features, out_features), blocks, strict=True) if count > 1]
            return ModuleCost(rank, rank * sum(made) * torch.float32.itemsize)
        case Kind.IA3 | Kind.LN_TUNING | Kind.TRAINABLE_TOKENS:
            return ModuleCost(0, 0)
        case Kind.ADALORA | Kind.VERA:
            served = rank
        case Kind.LOHA:
            served = min(rank * rank, in_features, out_features)
        case Kind.LOKR:
            shapes = _lokr_shapes(helper, rank, in_features, out_features)
            served = _kron_rank(shapes, "lokr_w1") * _kron_rank(shapes, "lokr_w2")
    return ModuleCost(served, served * (in_features + out_features) * torch.float32.itemsize)


def _kron_rank(shapes: Shapes, name: str) -> int:
    return min(shapes[name]) if name in shapes else min(*shapes[f"{name}_a"], *shapes[f"{name}_b"])


# ---------------------------------------------------------------------------------------------------------- conversions


def converter_of(helper: PEFTHelper) -> Converter | None:
    """What makes a layer's fields of its tensors; None where these are the fields as they are, as of a plain LoRA."""
    if helper.kind is Kind.LORA:
        return _of_dora if helper.use_dora else None
    return _CONVERTERS.get(helper.kind)


def _of_dora(parts: Tensors) -> dict[str, torch.Tensor]:
    return {name: _float32(part) if name == "magnitude" else part for name, part in parts.items()}


def _of_ia3(parts: Tensors) -> dict[str, torch.Tensor]:
    return {name: _float32(part.view(-1)) for name, part in parts.items()}


def _of_adalora(parts: Tensors) -> dict[str, torch.Tensor]:
    made = {name: part for name, part in parts.items() if name == "bias"}
    if "lora_a" not in parts:
        return made
    lora_a, singular = _float64(parts["lora_a"]), _float64(parts["lora_e"])
    rank, width = lora_a.shape
    made["lora_a"] = _rounded(rank, width, lambda rows: lora_a[rows] * singular[rows])
    return {**made, "lora_b": _float32(parts["lora_b"])}


def _of_loha(parts: Tensors) -> dict[str, torch.Tensor]:
    w1_a, w1_b, w2_a, w2_b = (_float64(parts[f"hada_{name}"]) for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    (num_rows, rank), num_cols = w1_a.shape, w1_b.shape[1]
    if rank * rank > min(num_rows, num_cols):
        delta = _rounded(num_rows, num_cols, lambda rows: (w1_a[rows] @ w1_b) * (w2_a[rows] @ w2_b))
        if num_rows < num_cols:
            return {"lora_a": delta, "lora_b": torch.eye(num_rows)}
        return {"lora_a": torch.eye(num_cols), "lora_b": delta}
    left, right = np.divmod(np.arange(rank * rank), rank)
    return {
        "lora_a": _rounded(rank * rank, num_cols, lambda rows: w1_b[left[rows]] * w2_b[right[rows]]),
        "lora_b": _rounded(num_rows, rank * rank, lambda rows: _outer(w1_a[rows], w2_a[rows])),
    }


def _of_lokr(parts: Tensors) -> dict[str, torch.Tensor]:
    (p1, q1), (p2, q2) = (_factors(parts, name) for name in _WS)
    return {"lora_a": _kron(q1, q2), "lora_b": _kron(p1, p2)}


def _of_vera(parts: Tensors) -> dict[str, torch.Tensor]:
    """vera_a has the module's inputs already: nothing of its own says how many it has."""
    lambda_b, lambda_d = (_float64(parts[name])[:, None] for name in ("lambda_b", "lambda_d"))
    vera_a, vera_b = _numbers(parts["vera_a"]), _numbers(parts["vera_b"][: len(lambda_b)])
    return {
        "lora_a": _rounded(len(vera_a), vera_a.shape[1], lambda rows: vera_a[rows] * lambda_d[rows]),
        "lora_b": _rounded(len(vera_b), vera_b.shape[1], lambda rows: vera_b[rows] * lambda_b[rows]),
    }


def scales_of(parts: Tensors) -> dict[str, torch.Tensor]:
    """Of a VeRA whose A and B stay what they are."""
    return {"rank_scale": _float32(parts["lambda_d"]), "out_scale": _float32(parts["lambda_b"])}


def row_maxima(matrix: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row."""
    return torch.from_numpy(np.abs(_numbers(matrix)).max(axis=1, initial=0).astype(np.float32))


_CONVERTERS: dict[Kind, Converter] = {
    Kind.ADALORA: _of_adalora,
    Kind.IA3: _of_ia3,
    Kind.LOHA: _of_loha,
    Kind.LOKR: _of_lokr,
    Kind.VERA: _of_vera,
}


def block_diagonal(stored: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks that lie under one another, on the diagonal of a matrix of zeros."""
    num_rows, width = stored.shape
    made = torch.zeros(num_rows, num_blocks * width, dtype=stored.dtype)
    diagonal = _bits(made).reshape(num_blocks, -1, num_blocks, width)
    for index, block in enumerate(_bits(stored).reshape(num_blocks, -1, width)):
        diagonal[index, :, index] = block
    return made


# ------------------------------------------------------------------------------------------------- rows of tokens


def with_tokens(weight: torch.Tensor | None, tokens: torch.Tensor, token_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """A weight with these rows in it, or the rows alone: weight and row_ids, ascending. Exact: float32 where the two
    differ in dtype."""
    order = np.argsort(np.array(token_ids, dtype=np.int64))
    if weight is None:
        rows = _bits(tokens)[order].copy()
        ids = torch.from_numpy(np.array(token_ids, dtype=np.int64)[order])
        return {"weight": torch.from_numpy(rows).view(tokens.dtype), "row_ids": ids}
    if weight.dtype is not tokens.dtype:
        weight, tokens = _float32(weight), _float32(tokens)
    made = _bits(weight).copy()
    made[np.array(token_ids, dtype=np.int64)] = _bits(tokens)
    return {"weight": torch.from_numpy(made).view(tokens.dtype)}


def are_equal(first: torch.Tensor, second: torch.Tensor, is_transposed: bool = False) -> bool:
    """Bit for bit."""
    if first.dtype is not second.dtype:
        return False
    bits = _bits(second)
    return np.array_equal(_bits(first), bits.T if is_transposed else bits)


def _bits(tensor: torch.Tensor) -> Array:
    """As integers: numpy has no bfloat16, and -0 is not 0."""
    bits: Array = tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16).numpy()
    return bits


def _factors(parts: Tensors, name: str) -> tuple[Array, Array]:
    """p, q with p q = w, of the least rank that the shapes promise. An identity is of booleans, a byte each."""
    if name in parts:
        matrix = _float64(parts[name])
    else:
        w_a, w_b = _float64(parts[f"{name}_a"]), _float64(parts[f"{name}_b"])
        if w_a.shape[1] <= min(w_a.shape[0], w_b.shape[1]):
            return w_a, w_b
        matrix = w_a @ w_b
    rows, cols = matrix.shape
    return (np.eye(rows, dtype=bool), matrix) if rows <= cols else (matrix, np.eye(cols, dtype=bool))


def _kron(left: Array, right: Array) -> torch.Tensor:
    outer, inner = np.divmod(np.arange(len(left) * len(right)), len(right))
    width = left.shape[1] * right.shape[1]
    return _rounded(len(outer), width, lambda rows: _outer(left[outer[rows]], right[inner[rows]]))


def _outer(left: Array, right: Array) -> Array:
    """[n, p] and [n, q] -> [n, p q]: row by row, each number of the one times each of the other."""
    made: Array = (left[:, :, None] * right[:, None, :]).reshape(len(left), -1)
    return made


def _rounded(num_rows: int, num_cols: int, rows_of: Callable[[slice], Array]) -> torch.Tensor:
    """A float32 matrix of rows that are made in float64. What is too large becomes Inf: the reader refuses it."""
    made = torch.empty(num_rows, num_cols)
    view, step = made.numpy(), max(1, PIECE_NUMBERS // max(1, num_cols))
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, num_rows, step):
            view[start : start + step] = rows_of(slice(start, start + step))
    return made


def _float64(tensor: torch.Tensor) -> Array:
    return _numbers(tensor).astype(np.float64)


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    """Exact: all dtypes that are read have fewer bits."""
    if tensor.dtype is torch.float32:
        return tensor
    made = torch.empty(tensor.shape)
    made.numpy()[...] = _numbers(tensor)
    return made


def _numbers(tensor: torch.Tensor) -> Array:
    """float32 or float16; numpy has no bfloat16, which is the upper half of a float32."""
    if tensor.dtype is torch.bfloat16:
        wide = tensor.contiguous().view(torch.int16).numpy().astype(np.uint32) << 16
        return wide.view(np.float32)
    found: Array = tensor.numpy()
    return found
