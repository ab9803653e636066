"""sgmv_* and bgmv_*: signatures and defaults, a float64 loop, base rows, broadcasts, refusals; and that add_lora equals them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.plan import LoraSegment, SliceWeights
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    assert_close,
    case_id,
    make_problem,
    make_table,
    make_target,
    make_weights,
    pairwise,
    run,
    same_bits,
)

Backend = Any
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)

SEQUENCES = ["b_seq_start_loc", "seq_len_tensor", "lora_indices_tensor", "batches", "max_seq_length", "token_nums"]
SIGNATURES = {
    "sgmv_shrink": (["inputs", "lora_a_weights", "output_tensor", *SEQUENCES, "scaling"], {}),
    "sgmv_expand": (["inputs", "lora_b_weights", "output_tensor", *SEQUENCES, "add_inputs"], {"add_inputs": False}),
    "sgmv_expand_slice": (
        ["inputs", "lora_b_weights", "output_tensor", *SEQUENCES, "slice_offset", "slice_size", "add_inputs"],
        {"add_inputs": False},
    ),
    "bgmv_shrink": (
        ["inputs", "lora_a_weights", "output_tensor", "lora_indices_tensor", "scaling"],
        {"scaling": 1.0},
    ),
    "bgmv_expand": (
        ["inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "add_inputs"],
        {"add_inputs": True},
    ),
    "bgmv_expand_slice": (
        [
            "inputs",
            "lora_b_weights",
            "output_tensor",
            "lora_indices_tensor",
            "slice_offset",
            "slice_size",
            "add_inputs",
        ],
        {"add_inputs": True},
    ),
}


@each_backend
@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults(backend: Backend, name: str) -> None:
    names, defaults = SIGNATURES[name]
    parameters = inspect.signature(getattr(backend, name)).parameters
    assert list(parameters) == names
    assert {p: v.default for p, v in parameters.items() if v.default is not inspect.Parameter.empty} == defaults


# ------------------------------------------------------------------------------------------------------ values

DIMENSIONS: dict[str, list[Any]] = {
    "rank": [1, 2, 5, 8, 12, 16, 48, 64, 128, 256],
    "lens": [[1], [1] * 7, [3, 1, 5], [64], [0, 4, 0, 2], [2] * 16],
    "num_slots": [1, 2, 7, 32],
    "popularity": ["distinct", "identical", "mixed", "none"],
    "dtypes": [(FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, FP32), (FP32, BF16)],
    "features": [(64, 64), (37, 51), (16, 100)],
    "is_4d": [False, True],
    "add_inputs": [False, True],
}
CASES = pairwise(DIMENSIONS)


def metadata(lens: list[int], indices: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    starts = np.cumsum([0, *lens[:-1]]).tolist()
    tensors = (torch.tensor(starts), torch.tensor(lens), torch.tensor(indices))
    return (*tensors, len(lens), max(lens), sum(lens))


def draw_indices(popularity: str, count: int, num_slots: int) -> list[int]:
    if popularity == "distinct":
        return [i % num_slots for i in range(count)]
    if popularity == "mixed":
        return [(i * 5) % (num_slots + 1) - 1 for i in range(count)]
    return [{"identical": num_slots - 1, "none": -1}[popularity]] * count


def loop(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, rows: list[int], scaling: float, add_inputs: bool
) -> torch.Tensor:
    """output[t] (+)= scaling * W[i_t] inputs[t] in float64, base rows as they were."""
    out = output.to(torch.float64)
    matrices = weights.squeeze(1) if weights.dim() == 4 else weights
    for t, index in enumerate(rows):
        if index >= 0:
            result = scaling * (matrices[index].to(torch.float64) @ inputs[t].to(torch.float64))
            out[t] = out[t] + result if add_inputs else result
    return out


def draw(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


@each_backend
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equal_a_float64_loop(backend: Backend, case: dict[str, Any]) -> None:
    rank, lens, num_slots, add_inputs = (case[k] for k in ("rank", "lens", "num_slots", "add_inputs"))
    (in_features, out_features), (out_dtype, in_dtype) = case["features"], case["dtypes"]
    generator = torch.Generator().manual_seed(rank)
    indices = draw_indices(case["popularity"], len(lens), num_slots)
    sequences = metadata(lens, indices)
    rows = [index for index, n in zip(indices, lens, strict=True) for _ in range(n)]
    is_base = torch.tensor([i < 0 for i in rows])
    per_row = torch.tensor(rows)
    lead = (num_slots, 1) if case["is_4d"] else (num_slots,)
    a, b = draw(generator, in_dtype, *lead, rank, in_features), draw(generator, in_dtype, *lead, out_features, rank)
    x = draw(generator, in_dtype, len(rows), in_features)
    v = draw(generator, in_dtype, len(rows), rank)
    x[is_base] = float("nan")
    v[is_base] = float("nan")

    def check(shape: tuple[int, int], low: int, high: int, expected_of: Any, *calls: Any) -> None:
        """Each call on its own poisoned output, of which [low, high) may change."""
        start = torch.full(shape, float("nan"), dtype=out_dtype)
        start[:, low:high] = draw(generator, out_dtype, shape[0], high - low)
        expected = expected_of(start[:, low:high])
        for call in calls:
            output = start.clone()
            call(output)
            assert same_bits(output[is_base], start[is_base])
            assert output[:, :low].isnan().all()
            assert output[:, high:].isnan().all()
            if not is_base.all():
                assert_close(output[~is_base, low:high], expected[~is_base])

    check(
        (len(rows), rank + 3),
        0,
        rank,
        lambda y: loop(x.to(out_dtype), a.to(out_dtype), y, rows, 0.5, add_inputs=False),
        lambda y: backend.bgmv_shrink(x, a, y, per_row, 0.5),
        lambda y: backend.sgmv_shrink(x, a, y, *sequences, 0.5),
    )
    check(
        (len(rows), out_features + 2),
        0,
        out_features,
        lambda y: loop(v.to(out_dtype), b.to(out_dtype), y, rows, 1.0, add_inputs),
        lambda y: backend.bgmv_expand(v, b, y, per_row, add_inputs),
        lambda y: backend.sgmv_expand(v, b, y, *sequences, add_inputs),
    )
    check(
        (len(rows), out_features + 9),
        4,
        4 + out_features,
        lambda y: loop(v.to(out_dtype), b.to(out_dtype), y, rows, 1.0, add_inputs),
        lambda y: backend.bgmv_expand_slice(v, b, y, per_row, 4, out_features, add_inputs),
        lambda y: backend.sgmv_expand_slice(v, b, y, *sequences, 4, out_features, add_inputs),
    )


def test_cases_are_few() -> None:
    assert len(CASES) * len(BACKENDS) <= 400


# ------------------------------------------------------------------------------------------------------ edge cases


@each_backend
def test_defaults_of_bgmv_add_and_of_sgmv_replace(backend: Backend) -> None:
    v, b = torch.ones(2, 1), torch.ones(1, 3, 1)
    indices, sequences = torch.tensor([0, 0]), metadata([2], [0])
    added, replaced = torch.ones(2, 3), torch.ones(2, 3)
    backend.bgmv_expand(v, b, added, indices)
    backend.sgmv_expand(v, b, replaced, *sequences)
    assert added.tolist() == [[2.0] * 3] * 2
    assert replaced.tolist() == [[1.0] * 3] * 2
    added, replaced = torch.ones(2, 4), torch.ones(2, 4)
    backend.bgmv_expand_slice(v, b, added, indices, 1, 3)
    backend.sgmv_expand_slice(v, b, replaced, *sequences, 1, 3)
    assert added.tolist() == [[1.0, 2.0, 2.0, 2.0]] * 2
    assert replaced.tolist() == [[1.0] * 4] * 2


@each_backend
def test_expand_takes_the_columns_that_both_have(backend: Backend) -> None:
    b = torch.arange(5.0).reshape(1, 5, 1)
    narrow, wide = torch.zeros(1, 3), torch.full((1, 7), -1.0)
    backend.bgmv_expand(torch.ones(1, 1), b, narrow, torch.tensor([0]))
    backend.bgmv_expand(torch.ones(1, 1), b, wide, torch.tensor([0]), False)
    assert narrow.tolist() == [[0.0, 1.0, 2.0]]
    assert wide.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0]]


@each_backend
@pytest.mark.parametrize("index", [0, -1])
def test_a_single_result_row_goes_to_all_output_rows(backend: Backend, index: int) -> None:
    b, indices, sequences = torch.tensor([[[2.0], [3.0]]]), torch.tensor([index]), metadata([1], [index])
    start = torch.tensor([[1.0, 1.0], [5.0, 5.0], [9.0, 9.0]])
    added, replaced, shrunk, part = start.clone(), start.clone(), start.clone(), start.clone()
    backend.bgmv_expand(torch.ones(1, 1), b, added, indices)
    backend.sgmv_expand(torch.ones(1, 1), b, replaced, *sequences)
    backend.bgmv_shrink(torch.ones(1, 1), b, shrunk, indices, 2.0)
    backend.bgmv_expand_slice(torch.ones(1, 1), b[:, :1], part, indices, 1, 1, True)
    if index < 0:
        assert all(torch.equal(t, start) for t in (added, replaced, shrunk, part))
        return
    assert added.tolist() == [[3.0, 4.0], [7.0, 8.0], [11.0, 12.0]]
    assert replaced.tolist() == [[2.0, 3.0]] * 3
    assert shrunk.tolist() == [[4.0, 6.0]] * 3
    assert part.tolist() == [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]


@each_backend
def test_no_rows_is_no_error(backend: Backend) -> None:
    output = torch.zeros(0, 4)
    backend.bgmv_expand(torch.zeros(0, 2), torch.zeros(1, 4, 2), output, torch.zeros(0, dtype=torch.long))
    assert output.shape == (0, 4)


A, B = torch.zeros(2, 4, 6), torch.zeros(2, 5, 4)
X, V = torch.zeros(3, 6), torch.zeros(3, 4)
INDICES = torch.tensor([0, 1, -1])
REFUSED = {
    "inputs and weights": lambda b: b.bgmv_shrink(torch.zeros(3, 7), A, torch.zeros(3, 4), INDICES),
    "too few columns": lambda b: b.bgmv_shrink(X, A, torch.zeros(3, 3), INDICES),
    "rows": lambda b: b.bgmv_shrink(X, A, torch.zeros(4, 4), INDICES),
    "fewer output rows": lambda b: b.bgmv_expand(V, B, torch.zeros(2, 5), INDICES),
    "too few indices": lambda b: b.bgmv_expand(V, B, torch.zeros(3, 5), torch.tensor([0, 1])),
    "index too large": lambda b: b.bgmv_expand(V, B, torch.zeros(3, 5), torch.tensor([0, 1, 2])),
    "index below -1": lambda b: b.bgmv_expand(V, B, torch.zeros(3, 5), torch.tensor([0, 1, -2])),
    "rank": lambda b: b.bgmv_expand(torch.zeros(3, 3), B, torch.zeros(3, 5), INDICES),
    "weights of 2 dimensions": lambda b: b.bgmv_expand(V, B[0], torch.zeros(3, 5), INDICES),
    "weights [slots, 2, out, rank]": lambda b: b.bgmv_expand(V, torch.zeros(2, 2, 5, 4), torch.zeros(3, 5), INDICES),
    "inputs of 1 dimension": lambda b: b.bgmv_expand(V[0], B, torch.zeros(1, 5), torch.tensor([0])),
    "slice and weights": lambda b: b.bgmv_expand_slice(V, B, torch.zeros(3, 9), INDICES, 0, 4),
    "slice past the end": lambda b: b.bgmv_expand_slice(V, B, torch.zeros(3, 9), INDICES, 5, 5),
    "slice before the start": lambda b: b.bgmv_expand_slice(V, B, torch.zeros(3, 9), INDICES, -1, 5),
    "batches": lambda b: b.sgmv_shrink(
        X, A, torch.zeros(3, 4), torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([0, 1]), 3, 2, 3, 1.0
    ),
    "start": lambda b: b.sgmv_shrink(
        X, A, torch.zeros(3, 4), torch.tensor([0, 1]), torch.tensor([2, 1]), torch.tensor([0, 1]), 2, 2, 3, 1.0
    ),
    "token_nums": lambda b: b.sgmv_shrink(
        X, A, torch.zeros(3, 4), torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([0, 1]), 2, 2, 4, 1.0
    ),
    "max_seq_length": lambda b: b.sgmv_shrink(
        X, A, torch.zeros(3, 4), torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([0, 1]), 2, 1, 3, 1.0
    ),
}


@each_backend
@pytest.mark.parametrize("what", REFUSED)
def test_every_other_mismatch_is_refused(backend: Backend, what: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        REFUSED[what](backend)


# --------------------------------------------------------------------------------------- the engine's op is these


@each_backend
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1, 1], [3, 2, 4, 1]], ids=str)
def test_add_lora_is_shrink_then_expand(backend: Backend, dtype: torch.dtype, lens: list[int]) -> None:
    """One slice: sgmv_expand; several: sgmv_expand_slice for each. The last sequence but one is the base model's."""
    generator = torch.Generator().manual_seed(7)
    indices, ends = [1, 0, -1, 2], np.cumsum(lens).tolist()
    segments = [LoraSegment(e - n, e, i) for n, e, i in zip(lens, ends, indices, strict=True) if i >= 0]
    sequences = metadata(lens, indices)
    for out in ((40,), (40, 16, 8)):
        target = make_target(24, out)
        adapters = [make_weights(target, (8,) * len(out), dtype, False, generator) for _ in range(3)]
        problem = make_problem(target, adapters, segments, sum(lens), backend.activation_dtype(dtype), generator)
        composed = problem.y.clone()
        for j, s in enumerate(target.slices):
            scaled = [scaled_b(weights[j]) for weights in adapters]
            a, b = torch.stack([w[0] for w in scaled]), torch.stack([w[1] for w in scaled])
            shrunk = torch.zeros(sum(lens), 8, dtype=problem.x.dtype)
            backend.sgmv_shrink(problem.x, a, shrunk, *sequences, 1.0)
            if len(out) == 1:
                backend.sgmv_expand(shrunk, b, composed, *sequences, True)
            else:
                backend.sgmv_expand_slice(shrunk, b, composed, *sequences, s.out_offset, s.out_features, True)
        got = run(problem, backend, make_table(target, adapters, dtype, backend))
        assert same_bits(composed[problem.is_base], problem.y[problem.is_base])
        assert_close(got[~problem.is_base], composed[~problem.is_base], dtype)


def scaled_b(weights: SliceWeights | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert weights is not None
    assert weights.lora_a is not None
    assert weights.lora_b is not None
    return weights.lora_a, weights.lora_b * weights.scaling
