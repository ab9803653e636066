"""sgmv_* and bgmv_* on every backend: signatures, a float64 loop, base rows, broadcasts, refusals; and that add_lora
equals them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.compat import punica_ops
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraSegment
from loraplex.kernels.protocols import KernelBackend
from loraplex.kernels.reference import ReferenceBackend
from loraplex.kernels.slices import SliceWeights
from tests.kernels.cases import (
    BACKENDS,
    BF16,
    FP16,
    FP32,
    NATIVE,
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
from tests.kernels.native.machine import ISAS, library_or_skip

CPU = torch.device("cpu")


class Ops:
    """The operators on one backend."""

    def __init__(self, backend: KernelBackend) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(getattr(punica_ops, name), backend=self.backend)


each_backend = pytest.mark.parametrize("ops", [Ops(backend) for backend in BACKENDS], ids=lambda ops: ops.backend.name)

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


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults(name: str) -> None:
    names, defaults = SIGNATURES[name]
    parameters = dict(inspect.signature(getattr(punica_ops, name)).parameters)
    assert parameters.pop("backend").kind is inspect.Parameter.KEYWORD_ONLY
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
def test_equal_a_float64_loop(ops: Ops, case: dict[str, Any]) -> None:
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
        lambda y: ops.bgmv_shrink(x, a, y, per_row, 0.5),
        lambda y: ops.sgmv_shrink(x, a, y, *sequences, 0.5),
    )
    check(
        (len(rows), out_features + 2),
        0,
        out_features,
        lambda y: loop(v.to(out_dtype), b.to(out_dtype), y, rows, 1.0, add_inputs),
        lambda y: ops.bgmv_expand(v, b, y, per_row, add_inputs),
        lambda y: ops.sgmv_expand(v, b, y, *sequences, add_inputs),
    )
    check(
        (len(rows), out_features + 9),
        4,
        4 + out_features,
        lambda y: loop(v.to(out_dtype), b.to(out_dtype), y, rows, 1.0, add_inputs),
        lambda y: ops.bgmv_expand_slice(v, b, y, per_row, 4, out_features, add_inputs),
        lambda y: ops.sgmv_expand_slice(v, b, y, *sequences, 4, out_features, add_inputs),
    )


def test_cases_are_few() -> None:
    assert len(CASES) * len(BACKENDS) <= 400


# ------------------------------------------------------------------------------------------------------ edge cases


@each_backend
def test_defaults_of_bgmv_add_and_of_sgmv_replace(ops: Ops) -> None:
    v, b = torch.ones(2, 1), torch.ones(1, 3, 1)
    indices, sequences = torch.tensor([0, 0]), metadata([2], [0])
    added, replaced = torch.ones(2, 3), torch.ones(2, 3)
    ops.bgmv_expand(v, b, added, indices)
    ops.sgmv_expand(v, b, replaced, *sequences)
    assert added.tolist() == [[2.0] * 3] * 2
    assert replaced.tolist() == [[1.0] * 3] * 2
    added, replaced = torch.ones(2, 4), torch.ones(2, 4)
    ops.bgmv_expand_slice(v, b, added, indices, 1, 3)
    ops.sgmv_expand_slice(v, b, replaced, *sequences, 1, 3)
    assert added.tolist() == [[1.0, 2.0, 2.0, 2.0]] * 2
    assert replaced.tolist() == [[1.0] * 4] * 2


@each_backend
def test_expand_takes_the_columns_that_both_have(ops: Ops) -> None:
    b = torch.arange(5.0).reshape(1, 5, 1)
    narrow, wide = torch.zeros(1, 3), torch.full((1, 7), -1.0)
    ops.bgmv_expand(torch.ones(1, 1), b, narrow, torch.tensor([0]))
    ops.bgmv_expand(torch.ones(1, 1), b, wide, torch.tensor([0]), False)
    assert narrow.tolist() == [[0.0, 1.0, 2.0]]
    assert wide.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0]]


@each_backend
@pytest.mark.parametrize("index", [0, -1])
def test_a_single_result_row_goes_to_all_output_rows(ops: Ops, index: int) -> None:
    b, indices, sequences = torch.tensor([[[2.0], [3.0]]]), torch.tensor([index]), metadata([1], [index])
    start = torch.tensor([[1.0, 1.0], [5.0, 5.0], [9.0, 9.0]])
    added, replaced, shrunk, part = start.clone(), start.clone(), start.clone(), start.clone()
    ops.bgmv_expand(torch.ones(1, 1), b, added, indices)
    ops.sgmv_expand(torch.ones(1, 1), b, replaced, *sequences)
    ops.bgmv_shrink(torch.ones(1, 1), b, shrunk, indices, 2.0)
    ops.bgmv_expand_slice(torch.ones(1, 1), b[:, :1], part, indices, 1, 1, True)
    if index < 0:
        assert all(torch.equal(t, start) for t in (added, replaced, shrunk, part))
        return
    assert added.tolist() == [[3.0, 4.0], [7.0, 8.0], [11.0, 12.0]]
    assert replaced.tolist() == [[2.0, 3.0]] * 3
    assert shrunk.tolist() == [[4.0, 6.0]] * 3
    assert part.tolist() == [[1.0, 3.0], [5.0, 7.0], [9.0, 11.0]]


@each_backend
def test_no_rows_is_no_error(ops: Ops) -> None:
    output = torch.zeros(0, 4)
    ops.bgmv_expand(torch.zeros(0, 2), torch.zeros(1, 4, 2), output, torch.zeros(0, dtype=torch.long))
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
def test_every_other_mismatch_is_refused(ops: Ops, what: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        REFUSED[what](ops)


# --------------------------------------------------------------------------------------- the engine's op is these


@each_backend
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1, 1], [3, 2, 4, 1]], ids=str)
def test_add_lora_is_shrink_then_expand(ops: Ops, dtype: torch.dtype, lens: list[int]) -> None:
    """One slice: sgmv_expand; several: sgmv_expand_slice for each. The last sequence but one is the base model's."""
    generator = torch.Generator().manual_seed(7)
    indices, ends = [1, 0, -1, 2], np.cumsum(lens).tolist()
    segments = [LoraSegment(e - n, e, i) for n, e, i in zip(lens, ends, indices, strict=True) if i >= 0]
    sequences = metadata(lens, indices)
    for out in ((40,), (40, 16, 8)):
        target = make_target(24, out)
        adapters = [make_weights(target, (8,) * len(out), dtype, False, generator) for _ in range(3)]
        problem = make_problem(target, adapters, segments, sum(lens), ops.backend.activation_dtype(dtype), generator)
        composed = problem.y.clone()
        for j, s in enumerate(target.slices):
            scaled = [scaled_b(weights[j]) for weights in adapters]
            a, b = torch.stack([w[0] for w in scaled]), torch.stack([w[1] for w in scaled])
            shrunk = torch.zeros(sum(lens), 8, dtype=problem.x.dtype)
            ops.sgmv_shrink(problem.x, a, shrunk, *sequences, 1.0)
            if len(out) == 1:
                ops.sgmv_expand(shrunk, b, composed, *sequences, True)
            else:
                ops.sgmv_expand_slice(shrunk, b, composed, *sequences, s.out_offset, s.out_features, True)
        got = run(problem, ops.backend, make_table(target, adapters, dtype, ops.backend))
        assert same_bits(composed[problem.is_base], problem.y[problem.is_base])
        assert_close(got[~problem.is_base], composed[~problem.is_base], dtype)


def scaled_b(weights: SliceWeights | None) -> tuple[torch.Tensor, torch.Tensor]:
    assert weights is not None
    assert weights.lora_a is not None
    assert weights.lora_b is not None
    return weights.lora_a, weights.lora_b * weights.scaling


# ------------------------------------------------------------------------------------------------------- the kernels


def field_call(ops: Ops, rows: list[int], dtype: torch.dtype, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(shrunk, expanded) of rows over three adapters of rank 12; unaligned weights."""
    generator = torch.Generator().manual_seed(seed)
    a, b = draw(generator, dtype, 3, 12, 70), draw(generator, dtype, 3, 41, 12)
    x, y = draw(generator, dtype, len(rows), 70), draw(generator, dtype, len(rows), 41)
    v = torch.zeros(len(rows), 12, dtype=dtype)
    indices = torch.tensor(rows)
    ops.bgmv_shrink(x, a, v, indices, 0.5)
    ops.bgmv_expand(v, b, y, indices)
    return v, y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_each_instruction_set_against_the_reference(isa: str, dtype: torch.dtype) -> None:
    rows = [2, 0, -1, 2, 1, 2, 2, 0]
    native = field_call(Ops(NativeBackend(library_or_skip(isa), 1)), rows, dtype)
    for got, expected in zip(native, field_call(Ops(ReferenceBackend()), rows, dtype), strict=True):
        assert_close(got, expected)


@pytest.mark.skipif(not isinstance(NATIVE, NativeLibrary), reason="no native kernels are built")
def test_a_row_has_the_bits_that_it_has_alone() -> None:
    """Of other rows, of the number of threads, and of whether weights are one column or many."""
    assert isinstance(NATIVE, NativeLibrary)
    generator = torch.Generator().manual_seed(1)
    a, x, indices = draw(generator, FP32, 3, 70, 300), draw(generator, FP32, 900, 300), torch.arange(900) % 4 - 1
    whole = torch.zeros(900, 70)
    Ops(NativeBackend(NATIVE, 3)).bgmv_shrink(x, a, whole, indices, 0.7)
    one = Ops(NativeBackend(NATIVE, 1))
    for row in (1, 2, 3, 500, 899):
        alone = torch.zeros(1, 70)
        one.bgmv_shrink(x[row : row + 1], a, alone, indices[row : row + 1], 0.7)
        assert same_bits(alone[0], whole[row])
        column = torch.zeros(1, 1)
        one.bgmv_shrink(x[row : row + 1], a[:, 69:], column, indices[row : row + 1], 0.7)
        assert same_bits(column[0], whole[row, 69:])


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_triton_against_the_reference(dtype: torch.dtype) -> None:
    """Small tiles and a large one; bfloat16, which the interpreter cannot compute, runs on stock torch."""
    triton_backend = pytest.importorskip("loraplex.kernels.triton.backend")
    backend = triton_backend.TritonBackend(CPU)
    if not backend.launcher.is_interpreted:
        pytest.skip("runs in Triton's interpreter")
    for rows in ([2, 0, -1, 2], [1] * 40 + [0, -1]):
        for got, expected in zip(
            field_call(Ops(backend), rows, dtype), field_call(Ops(ReferenceBackend()), rows, dtype), strict=True
        ):
            assert_close(got, expected)
    assert not backend.fallbacks()


@each_backend
def test_other_memory_layouts_are_read(ops: Ops) -> None:
    """Weights of other strides and dtypes, inputs and outputs that are views."""
    generator = torch.Generator().manual_seed(5)
    b = draw(generator, FP16, 8, 21, 3).permute(2, 1, 0)  # [3, 21, 8], dense in no dimension
    v, indices = draw(generator, torch.float64, 8, 6).T[:, :8], torch.tensor([0, 2, 2, -1, 1, 0])
    start = draw(generator, FP32, 42, 6).T[:, ::2]
    output = start.clone(memory_format=torch.preserve_format)
    ops.bgmv_expand(v, b, output, indices)
    assert_close(output, loop(v.to(FP32), b.to(FP32), start, indices.tolist(), 1.0, add_inputs=True))


@each_backend
def test_an_adapter_of_rank_0_adds_nothing(ops: Ops) -> None:
    output = torch.ones(2, 5)
    ops.bgmv_expand(torch.zeros(2, 0), torch.zeros(1, 5, 0), output, torch.tensor([0, -1]), False)
    assert output.tolist() == [[0.0] * 5, [1.0] * 5]


def test_without_a_backend_the_best_one_of_the_device_runs() -> None:
    rows = [0, 1, -1, 2]
    best = Ops(get_backend("auto", CPU))

    class Default:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return getattr(punica_ops, name)

    for got, expected in zip(field_call(Default(), rows, FP32), field_call(best, rows, FP32), strict=True):
        assert same_bits(got, expected)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("floating point", {"inputs": X.long()}),
        ("whole numbers", {"lora_indices_tensor": INDICES.float()}),
        ("on one device", {"lora_a_weights": A.to("meta")}),
        ("lora index 2 is outside -1..1", {"lora_indices_tensor": INDICES + 1}),
        ("inputs have 3 rows, there are 2 indices", {"lora_indices_tensor": INDICES[:2]}),
        ("the rank of lora_a_weights is 4", {"output_tensor": torch.zeros(3, 3)}),
    ],
)
def test_messages_say_what_does_not_match(what: str, change: dict[str, torch.Tensor]) -> None:
    arguments = {"inputs": X, "lora_a_weights": A, "output_tensor": torch.zeros(3, 4), "lora_indices_tensor": INDICES}
    with pytest.raises(ValueError, match=what):
        punica_ops.bgmv_shrink(**(arguments | change))
