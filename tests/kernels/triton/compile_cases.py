"""What is compiled without a GPU: every operator of the Triton backend at the shapes of real models, in every dtype,
decode and prefill.

Tensors are allocated and never filled: no kernel runs. CORE has each kernel in each dtype that it takes
(test_compile.py holds it to that), CASES more shapes: a kernel takes a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.expert_inputs import experts_of, weight_shapes
from benchmarks.gpu.inputs import BLOCK_SIZE, empty_table, make_attention, make_plan, segments_of
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, MIXTRAL, QWEN, QWEN_MOE, ExpertShape, Shape
from loraplex.kernels.experts import ExpertLora
from loraplex.kernels.plan import LoraPlan
from loraplex.kernels.quantized_linear import QuantizedWeight
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.linear import dequantize, round_rows, skinny_linear
from loraplex.kernels.triton.nucleus import keep_nucleus

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)


@dataclass(frozen=True)
class Case:
    """`run(backend)` calls the operators of a backend that was made with `options`."""

    name: str
    dtype: torch.dtype
    run: Callable[[TritonBackend], object]
    options: Mapping[str, Any] = field(default_factory=dict)
    least_arch: int = 80


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------------- LoRA


def lora_case(
    shape: Shape,
    linear: str,
    dtype: torch.dtype,
    slots: Sequence[int],
    ranks: Sequence[int],
    has_gains: bool = False,
    **options: Any,
) -> Case:
    """One row per entry of `slots`; adapter i of rank `ranks[i]`."""
    target = shape.target(linear)
    is_decode = len(slots) <= 64
    what = f"{'decode' if is_decode else 'prefill'} rows={len(slots)} ranks={min(ranks)}-{max(ranks)}"

    def run(backend: TritonBackend) -> None:
        table = empty_table(backend, [target], ranks, dtype)
        table.expect(0, (), has_gains)
        x = _empty(len(slots), target.in_features, dtype=dtype)
        y = _empty(len(slots), sum(s.out_features for s in target.slices), dtype=dtype)
        backend.add_lora(y, x, make_plan(slots, CPU, is_decode), table, 0, target.slices)

    chosen = " gains" * has_gains + "".join(f" {name}={value}" for name, value in options.items())
    return Case(f"add_lora {shape.name} {linear} {_name(dtype)} {what}{chosen}", dtype, run, options)


def input_gain_case(shape: Shape, linear: str, dtype: torch.dtype, slots: Sequence[int]) -> Case:
    """scale_input, one row per entry of `slots`."""
    target = shape.target(linear)
    is_decode = len(slots) <= 64

    def run(backend: TritonBackend) -> None:
        table = empty_table(backend, [target], [8] * (max(slots) + 1), dtype)
        backend.scale_input(
            _empty(len(slots), target.in_features, dtype=dtype), make_plan(slots, CPU, is_decode), table, 0
        )

    what = f"{'decode' if is_decode else 'prefill'} rows={len(slots)}"
    return Case(f"scale_input {shape.name} {linear} {_name(dtype)} {what}", dtype, run)


ROWS_32 = tuple(range(32))


def core_lora_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Blocks in the model's dtype and in eight bits; more ranks than one block of them, and no more; gains."""
    yield lora_case(LLAMA_8B, "qkv", dtype, [0], [16])
    yield lora_case(LLAMA_8B, "gate_up", dtype, list(range(64)), [8, 16, 32, 64] * 16)
    yield lora_case(LLAMA_8B, "qkv", dtype, [0] * 1000 + [1] * 1048, [64, 16])
    yield lora_case(LLAMA_8B, "o", dtype, ROWS_32, [16] * 32, block_dtype=torch.int8)
    yield lora_case(LLAMA_8B, "o", dtype, [0] * 1000 + [1] * 1048, [64, 16], block_dtype=torch.int8)
    yield lora_case(LLAMA_8B, "qkv", dtype, ROWS_32, [16] * 32, has_gains=True)
    yield lora_case(LLAMA_8B, "qkv", dtype, [0] * 1000 + [1] * 1048, [64, 16], has_gains=True)
    yield input_gain_case(LLAMA_8B, "down", dtype, ROWS_32)
    yield input_gain_case(LLAMA_8B, "down", dtype, [0] * 1000 + [1] * 1048)


def more_lora_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield lora_case(LLAMA_8B, "down", dtype, [0] * 4096, [256])
        yield lora_case(LLAMA_8B, "down", dtype, [0] * 16, [128])
        yield lora_case(LLAMA_8B, "qkv", dtype, ROWS_32, [16] * 32)
        yield lora_case(LLAMA_8B, "qkv", dtype, ROWS_32, [16] * 32, block_dtype=torch.int8)
        yield lora_case(QWEN, "qkv", dtype, list(range(8)), [8] * 8)
        yield lora_case(QWEN, "down", dtype, [0] * 512, [8])
        yield lora_case(LLAMA_8B, "gate_up", dtype, list(range(64)), [8, 16, 32, 64] * 16, has_gains=True)
        yield lora_case(LLAMA_8B, "o", dtype, ROWS_32, [16] * 32, has_gains=True, block_dtype=torch.int8)
        yield lora_case(LLAMA_8B, "down", dtype, [0] * 4096, [128], has_gains=True)
        yield input_gain_case(QWEN, "down", dtype, list(range(8)))
        for block_dtype in set(DTYPES) - {dtype}:  # the setting lora_dtype
            yield lora_case(LLAMA_8B, "o", dtype, [0], [16], block_dtype=block_dtype)
            yield lora_case(LLAMA_8B, "o", dtype, [0] * 1000 + [1] * 1048, [64, 16], block_dtype=block_dtype)
    yield lora_case(LLAMA_1B, "gate_up", BF16, [0] * 4 + [1] * 4, [256, 8])


# ----------------------------------------------------------------------------------------------------- attention, norms


def rotary_case(shape: Shape, dtype: torch.dtype, rows: int, kv_dtype: torch.dtype | None = None) -> Case:
    """Rotary positions and the KV write, of parts of one tensor as the decoder has them."""

    def run(backend: TritonBackend) -> None:
        plan, num_blocks = make_attention([rows], [rows], CPU)
        kv = _empty(num_blocks, 2, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype=kv_dtype or dtype)[:, 1]
        dim = shape.head_dim
        qkv = _empty(rows, (shape.heads + 2 * shape.kv_heads) * dim, dtype=dtype)
        q, k, v = (
            t.view(rows, -1, dim)
            for t in qkv.split([n * dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)], -1)
        )
        angles = _empty(rows, dim, dtype=dtype)
        backend.rotary_write_kv(q, k, v, angles, angles, kv, plan.kv_slot_mapping)

    what = f"{'decode' if rows <= 64 else 'prefill'} rows={rows}"
    cache = "" if kv_dtype is None else f" cache {_name(kv_dtype)}"
    return Case(f"rotary_write_kv {shape.name} {_name(dtype)} {what}{cache}", dtype, run)


def attention_case(
    shape: Shape,
    dtype: torch.dtype,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
    has_sinks: bool = False,
) -> Case:
    is_decode = set(query_lens) == {1}
    what = f"{'decode' if is_decode else 'prefill'} B={len(query_lens)} context={max(context_lens)}"

    def run(backend: TritonBackend) -> None:
        plan, num_blocks = make_attention(query_lens, context_lens, CPU)
        kv = _empty(num_blocks, 2, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim, dtype=kv_dtype or dtype)[:, 1]
        q = _empty(sum(query_lens), shape.heads, shape.head_dim, dtype=dtype)
        sinks = torch.zeros(shape.heads) if has_sinks else None
        backend.paged_attention(q, kv, plan, shape.head_dim**-0.5, window, None, sinks)

    suffix = ("" if window is None else f" window={window}") + ("" if kv_dtype is None else f" cache {_name(kv_dtype)}")
    suffix += " sinks" if has_sinks else ""
    return Case(f"attention {shape.name} {_name(dtype)} {what}{suffix}", dtype, run)


def _with_heads(heads: int, kv_heads: int, head_dim: int) -> Shape:
    return Shape(
        f"{heads}/{kv_heads} heads of {head_dim}", heads * head_dim, 4096, heads, kv_heads, head_dim, 1, 256, True
    )


HEADS_OF_96, HEADS_OF_256 = _with_heads(64, 8, 96), _with_heads(16, 8, 256)


def core_attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    yield attention_case(LLAMA_8B, dtype, [1] * 32, [1000] * 32)
    yield attention_case(LLAMA_8B, dtype, [512, 300], [512, 2000])
    yield attention_case(LLAMA_8B, dtype, [16], [4000])  # few queries over many keys: split, and combined
    yield rotary_case(LLAMA_8B, dtype, 32)


def head_size_cases() -> Iterator[Case]:
    """Beside the 128 of all others. What a head takes of shared memory is the same in all dtypes of 16 bits."""
    yield attention_case(LLAMA_1B, BF16, [1] * 8, [5000] * 8, window=4096)
    yield attention_case(LLAMA_1B, BF16, [600], [900])
    for dtype, shape in ((FP16, HEADS_OF_96), (BF16, HEADS_OF_256)):
        yield attention_case(shape, dtype, [1] * 4, [8000] * 4)
        yield attention_case(shape, dtype, [600], [900])


def more_attention_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield attention_case(LLAMA_1B, dtype, [1] * 32, [1000] * 32)
        yield attention_case(LLAMA_1B, dtype, [512, 300, 1], [512, 2000, 700])
        yield rotary_case(LLAMA_1B, dtype, 32)
        for shape in (QWEN, HEADS_OF_96, HEADS_OF_256):
            yield attention_case(shape, dtype, [1] * 4, [8000] * 4)
            yield attention_case(shape, dtype, [600], [900])
    yield rotary_case(QWEN, BF16, 600)
    yield rotary_case(LLAMA_8B, BF16, 1, kv_dtype=FP16)
    yield attention_case(LLAMA_8B, BF16, [1] * 32, [1000] * 32, kv_dtype=FP16)
    yield attention_case(LLAMA_8B, BF16, [2048], [2048], window=1024)
    for window in (None, 128):  # gpt-oss
        yield attention_case(_with_heads(64, 8, 64), BF16, [1] * 4, [8000] * 4, window, has_sinks=True)
        yield attention_case(_with_heads(64, 8, 64), BF16, [600], [900], window, has_sinks=True)
    yield attention_case(_with_heads(64, 8, 64), BF16, [16], [4000], has_sinks=True)


def glue_case(shape: Shape, dtype: torch.dtype, rows: int) -> Case:
    def run(backend: TritonBackend) -> None:
        x, weight = _empty(rows, shape.hidden, dtype=dtype), _empty(shape.hidden, dtype=dtype)
        backend.rms_norm(x, weight, 1e-5)
        backend.add_rms_norm(x, _empty(rows, shape.hidden, dtype=dtype), weight, 1e-5)
        backend.silu_mul(_empty(rows, 2 * shape.inner, dtype=dtype))

    return Case(f"glue {shape.name} {_name(dtype)} {'decode' if rows <= 64 else 'prefill'} rows={rows}", dtype, run)


def head_norm_case(dtype: torch.dtype) -> Case:
    """The norms of q and k in Qwen3."""

    def run(backend: TritonBackend) -> None:
        backend.rms_norm(_empty(16, 32, 128, dtype=dtype), _empty(128, dtype=dtype), 1e-6)

    return Case(f"glue heads {_name(dtype)} decode rows=16", dtype, run)


def more_glue_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield glue_case(QWEN, dtype, 2048)
        yield head_norm_case(dtype)


# --------------------------------------------------------------------------------------------------- quantised linears


def empty_weight(quantization: str, dtype: torch.dtype, out: int, num_in: int) -> QuantizedWeight:
    """dtype: of int4's scales."""
    q_dtype = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}[quantization]
    q = _empty(out, num_in // 2 if quantization == "int4" else num_in, dtype=q_dtype)
    scale = _empty(num_in // 128, out, dtype=dtype) if quantization == "int4" else _empty(out, dtype=FP32)
    return QuantizedWeight(q, scale, out, num_in)


def linear_case(quantization: str, dtype: torch.dtype, rows: int, num_in: int = 4096, out: int = 6144) -> Case:
    """int8 and int4: few rows are multiplied, for many the weight is dequantised."""

    def run(backend: TritonBackend) -> None:
        weight = empty_weight(quantization, dtype, out, num_in)
        if rows <= 64:
            skinny_linear(backend.launcher, _empty(rows, num_in, dtype=dtype), weight, _empty(out, dtype=dtype))
        else:
            dequantize(backend.launcher, weight, 0, _empty(out, num_in, dtype=dtype))

    what = f"{'decode' if rows <= 64 else 'prefill'} rows={rows}"
    return Case(f"linear {quantization} {num_in}x{out} {_name(dtype)} {what}", dtype, run)


def rounding_case(dtype: torch.dtype) -> Case:
    """Activations in float8."""
    return Case(
        f"linear fp8 {_name(dtype)} decode", dtype,
        lambda backend: round_rows(backend.launcher, _empty(32, 4096, dtype=dtype)), least_arch=89,
    )  # fmt: skip


def core_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    yield linear_case("int4", dtype, 16)
    yield linear_case("int4", dtype, 2048)
    yield linear_case("int8", dtype, 16)
    yield linear_case("int8", dtype, 2048)
    yield rounding_case(dtype)


def more_linear_cases() -> Iterator[Case]:
    for dtype, quantization in itertools.product(DTYPES, ("int8", "int4")):
        yield linear_case(quantization, dtype, 64)
        yield linear_case(quantization, dtype, 1, 4864, 896)


# -------------------------------------------------------------------------------------------------------------- experts


def experts_case(
    shape: ExpertShape,
    dtype: torch.dtype,
    slots: Sequence[int],
    ranks: Sequence[int] = (),
    quantization: str | None = None,
    **options: Any,
) -> Case:
    """One row per entry of `slots`, without adapters where there are no ranks. All experts have the same memory."""
    is_decode = len(slots) <= 64

    def run(backend: TritonBackend) -> None:
        targets = shape.targets()
        weights = [
            _empty(*sizes, dtype=dtype) if quantization is None else empty_weight(quantization, dtype, *sizes)
            for sizes in weight_shapes(shape)[:2]
        ] * shape.num_experts
        table = empty_table(backend, targets, ranks, dtype) if ranks else None
        plan = LoraPlan.build(segments_of(slots), len(slots), 64, CPU, is_decode)  # of one capacity, as an engine's
        lora = None if table is None else ExpertLora(plan, table)
        x, logits = (_empty(len(slots), width, dtype=dtype) for width in (shape.hidden, shape.num_experts))
        backend.experts(x, logits, experts_of(shape, weights, targets, table), lora)

    what = f"{'decode' if is_decode else 'prefill'} rows={len(slots)}" + (f" ranks={max(ranks)}" if ranks else "")
    chosen = "".join(f" {name}={value}" for name, value in options.items())
    name = f"experts {shape.name} {_name(dtype)} {quantization or ''} {what}{chosen}"
    return Case(name, dtype, run, options, 89 if quantization == "fp8" else 80)


MANY_ROWS = [0] * 1000 + [1] * 1048


def core_expert_cases(dtype: torch.dtype) -> Iterator[Case]:
    yield experts_case(MIXTRAL, dtype, ROWS_32, quantization="int4")
    yield experts_case(MIXTRAL, dtype, ROWS_32, quantization="fp8")
    yield experts_case(MIXTRAL, dtype, ROWS_32, [16] * 32)
    yield experts_case(MIXTRAL, dtype, ROWS_32, [16] * 32, "int8", block_dtype=torch.int8)
    yield experts_case(MIXTRAL, dtype, MANY_ROWS, [64, 16])


def more_expert_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for slots, quantization in itertools.product(([0], [0] * 200, MANY_ROWS), (None, "int8", "int4", "fp8")):
            yield experts_case(MIXTRAL, dtype, slots, quantization=quantization)
        yield experts_case(MIXTRAL, dtype, MANY_ROWS, [128, 16], "int4")
        yield experts_case(MIXTRAL, dtype, MANY_ROWS, [128, 16], "fp8")
        yield experts_case(QWEN_MOE, dtype, ROWS_32, [16, 64] * 16)
        yield experts_case(QWEN_MOE, dtype, MANY_ROWS, [16, 64], block_dtype=torch.int8)


# ------------------------------------------------------------------------------------------------------------- sampling


def nucleus_case() -> Case:
    def run(backend: TritonBackend) -> None:
        logits = _empty(16, 128_256, dtype=FP32)
        keep_nucleus(backend.launcher, logits, _empty(16, 128_256, dtype=FP32), _empty(16, 1, dtype=torch.float64))

    return Case("sampler keep_nucleus", FP32, run)


# ---------------------------------------------------------------------------------------------------- steps that differ


def many_sizes_case() -> Case:
    """One layer's operators in steps of many sizes, as they come to an engine: they should share their kernels."""

    def run(backend: TritonBackend) -> None:
        for rows in (1, 2, 3, 7, 16, 32, 33, 64):
            lora_case(LLAMA_8B, "qkv", BF16, list(range(rows)), [16] * 64).run(backend)
        for rows in (70, 200, 300, 700, 1500, 3000, 5000, 20_000):
            lora_case(LLAMA_8B, "qkv", BF16, [0] * rows, [16]).run(backend)
        for rows in (1, 3, 16, 33, 64, 70, 200, 700, 1500, 20_000):
            input_gain_case(LLAMA_8B, "down", BF16, [0] * rows).run(backend)
        for rows in (1, 3, 33, 64, 200, 300, 2000):
            experts_case(MIXTRAL, BF16, [0] * rows, [16]).run(backend)
        for rows in (1, 2, 3, 16, 17, 64, 300, 1000):
            glue_case(LLAMA_8B, BF16, rows).run(backend)
            rotary_case(LLAMA_8B, BF16, rows).run(backend)
        for batch in (1, 2, 3, 16, 31, 64):
            attention_case(LLAMA_8B, BF16, [1] * batch, [700 + batch] * batch).run(backend)
        for query, context in ((5, 5), (16, 100), (17, 3000), (300, 300), (1000, 4321), (4000, 4000)):
            attention_case(LLAMA_8B, BF16, [query, 1], [context, 777]).run(backend)

    return Case("many sizes Llama-3-8B bfloat16 prefill", BF16, run)


def core_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel in this dtype."""
    yield from core_lora_cases(dtype)
    yield from core_attention_cases(dtype)
    yield glue_case(LLAMA_8B, dtype, 16)
    yield from core_linear_cases(dtype)
    yield from core_expert_cases(dtype)


ONE_DTYPE = (nucleus_case(), *core_cases(BF16))
CORE = (
    *ONE_DTYPE,
    *(case for dtype in (FP32, FP16) for case in core_cases(dtype)),
    *head_size_cases(),
    many_sizes_case(),
)
CASES = (
    *(*CORE, *more_lora_cases(), *more_attention_cases(), *more_glue_cases(), *more_linear_cases()),
    *more_expert_cases(),
)


def cases_for(arch: int, is_core: bool) -> list[Case]:
    """The core of sm_89 is bfloat16 alone: its instructions are those of sm_80; its shared memory differs."""
    cases = CASES if not is_core else ONE_DTYPE if arch == 89 else CORE
    return [case for case in cases if case.least_arch <= arch]
