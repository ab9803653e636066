"""What `kernels.py` times: each operator at the shapes of real models beside what stock torch has for it.

A case has as many copies of its weights, adapters or keys as the L2 cannot hold, and calls go through them in turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu.expert_cases import EAGER_PEERS, expert_layers
from benchmarks.gpu.flash_attention import flash_absence, flash_backend
from benchmarks.gpu.inputs import (
    BLOCK_SIZE,
    Packed,
    draw_slots,
    draw_weights,
    make_attention,
    make_plan,
    make_table,
    pack,
)
from benchmarks.gpu.place import BF16, FP32, Place
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, Shape, lora_bytes, make_target
from benchmarks.gpu.timing import Call, copies_for
from loraplex.core import LoraTarget
from loraplex.kernels.ops import KernelBackend

Build = Callable[[], list[Call]]


@dataclass(frozen=True)
class Case:
    """build(): calls that do the same on different memory. num_bytes, operations: the least of one call.

    target: a name of TARGETS. backend: whose kernels are to run; None: the place's. missing: peers that are not here,
    and why. eager_peers: those that look at their data on the host, which no graph can hold.
    """

    group: str
    name: str
    num_bytes: float
    operations: float
    build: Build
    peers: Mapping[str, Build] = field(default_factory=dict)
    target: str = ""
    backend: KernelBackend | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    eager_peers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Target:
    """The least share of a ceiling: of the copy bandwidth, or of the matrix rate."""

    share: float
    is_of_rate: bool = False


TARGETS = {
    "decode, 100 MB of adapters and more, of the copy bandwidth": Target(0.80),
    "decode, 32 distinct of rank 16, 4096x4096, of the copy bandwidth": Target(0.50),
    "prefill, rank 64 and more, of the matrix rate": Target(0.60, is_of_rate=True),
}
"""Those of docs/gpu.md."""

MUCH_BYTES = 100e6

GATHERED_BYTES = 4 << 30
"""Of the adapters that bmm copies for each row: with more it takes longer than all else."""


def _target(target: LoraTarget, rank: int, slots: Sequence[int], weight_bytes: float, is_decode: bool) -> str:
    """Of a LoRA case with the backend's own choices."""
    much, some, prefill = TARGETS
    if not is_decode:
        return prefill if rank >= 64 else ""
    if weight_bytes >= MUCH_BYTES:
        return much
    is_square = target.in_features == sum(s.out_features for s in target.slices) == 4096
    return some if is_square and rank == 16 and list(slots) == list(range(32)) else ""


def dtype_of(place: Place) -> torch.dtype:
    return FP32 if place.is_interpreted else BF16


def _randn(place: Place, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype_of(place), device=place.device).normal_()


# ----------------------------------------------------------------------------------------------------------------- LoRA


def lora_case(
    place: Place, group: str, target: LoraTarget, rank: int, slots: Sequence[int], label: str, **options: Any
) -> Case:
    """One row per entry of `slots`, all adapters of one rank. options: of the backend; with them there are no peers."""
    dtype, count, rows = dtype_of(place), max(slots) + 1, len(slots)
    outs = [s.out_features for s in target.slices]
    itemsize = options.get("block_dtype", dtype).itemsize
    weight_bytes = count * lora_bytes(target, rank, itemsize)
    moved = weight_bytes + rows * (target.in_features + 2 * sum(outs)) * dtype.itemsize
    operations = sum(2.0 * rows * rank * (target.in_features + out) for out in outs)
    is_decode = "decode" in group
    copies = copies_for(weight_bytes if is_decode else moved, place)
    backend = place.lora_backend(**options) if options else place.backend

    def build() -> list[Call]:
        targets = [make_target(f"copy{i}", target.in_features, outs) for i in range(copies)]
        packed = _packed(backend, target, rank, dtype)
        table = make_table(targets, [[packed] * copies] * count, place.device)
        plan = make_plan(slots, place.device, is_decode)
        x, y = _randn(place, rows, target.in_features), _randn(place, rows, sum(outs))

        def call(of: LoraTarget) -> Call:
            return lambda: backend.add_lora(y, x, plan, table, table.first_row(of.name), of.slices)

        return [call(of) for of in targets]

    stacked = _Stacked(place, target, rank, slots, copies)
    name = f"{target.in_features}x{'+'.join(map(str, outs))} r{rank} {label}"
    peers = {} if options else {"bmm": stacked.bmm, "grouped": stacked.grouped}
    missing = {}
    if peers and rows * lora_bytes(target, rank, itemsize) > GATHERED_BYTES:
        del peers["bmm"]
        missing["bmm"] = "too large"
    judged = "" if options else _target(target, rank, slots, weight_bytes, is_decode)
    return Case(group, name, moved, operations, build, peers, judged, backend, missing)


@functools.lru_cache(maxsize=4)
def _packed(backend: KernelBackend, target: LoraTarget, rank: int, dtype: torch.dtype) -> Packed:
    """An adapter that several cases have."""
    return pack(backend, target, draw_weights(target, rank, dtype, torch.Generator()), dtype)


class _Stacked:
    """The same with adapters of one rank in stacked tensors: what torch's batched and grouped products need."""

    def __init__(
        self,
        place: Place,
        target: LoraTarget,
        rank: int,
        slots: Sequence[int],
        copies: int,
    ) -> None:
        self._place, self._target, self._rank, self._copies, self._slots = place, target, rank, copies, slots

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y)"""
        width = sum(s.out_features for s in self._target.slices)
        return tuple(_randn(self._place, len(self._slots), n) for n in (self._target.in_features, width))

    def _weights(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, int, int]]]:
        """Of each copy: A [slots, rank, in], B [slots, out, rank] and the columns of each slice."""
        many, slices = (self._copies, max(self._slots) + 1), self._target.slices
        drawn = [
            (
                _randn(self._place, *many, self._rank, self._target.in_features).div_(64),
                _randn(self._place, *many, s.out_features, self._rank).div_(8),
            )
            for s in slices
        ]
        for copy in range(self._copies):
            yield [(a[copy], b[copy], s.out_offset, s.out_features) for (a, b), s in zip(drawn, slices, strict=True)]

    def bmm(self) -> list[Call]:
        """A batched product of each row with its adapter; rows that share one make copies of it first."""
        rows = torch.tensor(self._slots, device=self._place.device)
        is_distinct = len(set(self._slots)) == len(self._slots)
        x, y = self._rows()

        def call(slices: Sequence[tuple[torch.Tensor, torch.Tensor, int, int]]) -> Call:
            def run() -> None:
                for a, b, offset, width in slices:
                    if not is_distinct:
                        a, b = a[rows], b[rows]
                    delta = torch.bmm(torch.bmm(x[:, None], a.mT), b.mT)
                    y.narrow(1, offset, width).add_(delta[:, 0])

            return run

        return [call(slices) for slices in self._weights()]

    def grouped(self) -> list[Call]:
        """torch._grouped_mm over runs of rows of one adapter."""
        ends = np.cumsum(np.bincount(self._slots))
        x, y = self._rows()
        ends_on_device = torch.tensor(ends, dtype=torch.int32, device=self._place.device)

        def call(slices: Sequence[tuple[torch.Tensor, torch.Tensor, int, int]]) -> Call:
            def run() -> None:
                for a, b, offset, width in slices:
                    shrunk = torch._grouped_mm(x, a.mT, offs=ends_on_device)
                    y.narrow(1, offset, width).add_(torch._grouped_mm(shrunk, b.mT, offs=ends_on_device))

            return run

        return [call(slices) for slices in self._weights()]


def lora_cases(place: Place) -> Iterator[Case]:
    """Those with a target first; else decode on 4096x4096 and on the other linears of an 8B model, eight-bit blocks,
    prompts."""
    if place.is_interpreted:
        yield lora_case(place, "lora decode", TINY.target("qkv"), 8, [0, 1, 2], "T=3 distinct")
        yield lora_case(place, "lora decode, int8 blocks", TINY.target("o"), 8, [0, 1], "T=2", block_dtype=torch.int8)
        yield lora_case(place, "lora prefill", TINY.target("down"), 16, [0] * 20 + [1] * 4, "T=24 x2")
        return
    cases = [*_decode_cases(place), *_int8_cases(place), *_prompt_cases(place)]
    yield from sorted(cases, key=lambda case: not case.target)


def _decode_cases(place: Place) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    square, others = LLAMA_8B.target("o"), ("qkv", "gate_up", "down")
    for rank, popularity, batch in itertools.product((16, 64), ("distinct", "uniform", "identical"), (1, 8, 32, 64)):
        slots = draw_slots(popularity, batch, rng)
        yield lora_case(place, "lora decode", square, rank, slots, f"T={batch} {popularity} ({max(slots) + 1})")
    for linear, rank, (popularity, batch) in itertools.product(
        others, (16, 64), (("distinct", 32), ("identical", 32), ("distinct", 64))
    ):
        slots = draw_slots(popularity, batch, rng)
        case = lora_case(
            place, f"lora decode, {linear}", LLAMA_8B.target(linear), rank, slots, f"T={batch} {popularity}"
        )
        if batch == 32 or case.target:
            yield case


def _int8_cases(place: Place) -> Iterator[Case]:
    for linear, rank in itertools.product(("o", "qkv", "gate_up", "down"), (16, 64)):
        target = LLAMA_8B.target(linear)
        yield lora_case(
            place, "lora decode, int8 blocks", target, rank, range(32), "T=32 distinct", block_dtype=torch.int8
        )


def _prompt_cases(place: Place) -> Iterator[Case]:
    for linears, rank in ((("o", "qkv", "gate_up", "down"), 64), (("o", "gate_up"), 128)):
        for linear, (num_adapters, rows) in itertools.product(linears, ((1, 2048), (4, 8192))):
            slots = sorted(i % num_adapters for i in range(rows))
            yield lora_case(place, "lora prefill", LLAMA_8B.target(linear), rank, slots, f"T={rows} x{num_adapters}")


# ------------------------------------------------------------------------------------------------------------ attention


def attention_case(place: Place, shape: Shape, query_lens: Sequence[int], context_lens: Sequence[int]) -> Case:
    """All sequences alike for torch, which has keys and values side by side; FlashAttention 3 reads the same pages."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    dtype, rows = dtype_of(place), sum(query_lens)
    kv_bytes = 2.0 * sum(context_lens) * kv_heads * dim * dtype.itemsize
    seen = sum(n * (c - n) + n * (n + 1) / 2 for n, c in zip(query_lens, context_lens, strict=True))
    copies = min(64, copies_for(kv_bytes, place))
    batch, query_len, context = len(query_lens), query_lens[0], context_lens[0]

    def paged(backend: KernelBackend) -> list[Call]:
        plan, num_blocks = make_attention(query_lens, context_lens, place.device, rng=np.random.default_rng(0))
        kv = _randn(place, num_blocks, copies, 2, kv_heads, BLOCK_SIZE, dim)
        q = _randn(place, rows, heads, dim)
        return [lambda layer=kv[:, i]: backend.paged_attention(q, layer, plan, dim**-0.5, None) for i in range(copies)]

    def sdpa() -> list[Call]:
        q = _randn(place, batch, heads, query_len, dim)
        drawn = [[_randn(place, batch, kv_heads, context, dim) for _ in range(2)] for _ in range(copies)]
        is_causal = query_len == context
        return [
            lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
            for k, v in drawn
        ]

    kind = "decode" if query_len == 1 else "prefill"
    name = f"{shape.name} B={batch} queries {query_len} context {context}"
    moved = kv_bytes + 2.0 * rows * heads * dim * dtype.itemsize
    peers: dict[str, Build] = {"torch": sdpa} if query_len in (1, context) else {}
    absence = flash_absence(place) if kind == "prefill" else None
    if kind == "prefill" and absence is None:
        peers["flash_attn"] = lambda: paged(flash_backend(place, (heads, kv_heads, dim), dtype))
    missing = {} if absence is None else {"flash_attn": absence.removeprefix("it is ")}
    operations = 4.0 * heads * dim * seen
    return Case(f"attention {kind}", name, moved, operations, lambda: paged(place.backend), peers, missing=missing)


def attention_cases(place: Place) -> Iterator[Case]:
    if place.is_interpreted:
        yield attention_case(place, TINY, [1, 1], [20, 20])
        yield attention_case(place, TINY, [18], [18])
        return
    for shape in (LLAMA_8B, LLAMA_1B):
        for batch, context in ((1, 512), (1, 8192), (8, 2048), (32, 1024), (64, 512), (64, 4096)):
            yield attention_case(place, shape, [1] * batch, [context] * batch)
        yield attention_case(place, shape, [2048], [2048])
        yield attention_case(place, shape, [512] * 4, [512] * 4)
        yield attention_case(place, shape, [2048], [8192])


# ---------------------------------------------------------------------------------------------------- norms and linears


def glue_cases(place: Place) -> Iterator[Case]:
    shape = TINY if place.is_interpreted else LLAMA_8B
    itemsize = dtype_of(place).itemsize
    for rows in (3,) if place.is_interpreted else (1, 32, 2048):
        numbers = rows * shape.hidden
        copies = min(64, copies_for(2 * numbers * itemsize, place))
        weight = _randn(place, shape.hidden)
        yield _norm_case(place, rows, shape.hidden, weight, copies, 4.0 * numbers * itemsize)
        gate_ups = [_randn(place, rows, 2 * shape.inner) for _ in range(min(copies, 16))]
        yield Case(
            "glue", f"silu_mul {rows}x{shape.inner}", 3.0 * rows * shape.inner * itemsize, 0,
            lambda g=gate_ups: [lambda one=one: place.backend.silu_mul(one) for one in g],
            {"torch": lambda g=gate_ups: [
                lambda one=one: F.silu(one.chunk(2, -1)[0]) * one.chunk(2, -1)[1] for one in g
            ]},
        )  # fmt: skip
        yield _rotary_case(place, shape, rows)


def _norm_case(place: Place, rows: int, hidden: int, weight: torch.Tensor, copies: int, moved: float) -> Case:
    pairs = [[_randn(place, rows, hidden) for _ in range(2)] for _ in range(copies)]

    def stock() -> list[Call]:
        def call(x: torch.Tensor, residual: torch.Tensor) -> Call:
            return lambda: F.rms_norm(residual.add_(x), (hidden,), weight, 1e-5)

        return [call(x, residual) for x, residual in pairs]

    return Case(
        "glue", f"add_rms_norm {rows}x{hidden}", moved, 0,
        lambda: [lambda x=x, r=r: place.backend.add_rms_norm(x, r, weight, 1e-5) for x, r in pairs], {"torch": stock},
    )  # fmt: skip


def _rotary_case(place: Place, shape: Shape, rows: int) -> Case:
    dim, dtype = shape.head_dim, dtype_of(place)
    counts = [shape.heads, shape.kv_heads, shape.kv_heads]
    plan, num_blocks = make_attention([rows], [rows], place.device)

    def build() -> list[Call]:
        qkv = _randn(place, rows, sum(counts) * dim)
        q, k, v = (part.view(rows, -1, dim) for part in qkv.split([n * dim for n in counts], -1))
        angles = _randn(place, rows, dim)
        kv = _randn(place, num_blocks, 2, shape.kv_heads, BLOCK_SIZE, dim)
        return [lambda: place.backend.rotary_write_kv(q, k, v, angles, angles, kv, plan.kv_slot_mapping)]

    moved = 2.0 * rows * sum(counts) * dim * dtype.itemsize
    return Case("glue", f"rotary_write_kv {rows} rows {shape.name}", moved, 0, build)


def linear_cases(place: Place) -> Iterator[Case]:
    """The base model's linears as the backend runs them, unquantised and in each form that it has."""
    shape = TINY if place.is_interpreted else LLAMA_8B
    for quantization in (None, *place.backend.quantizations):
        for linear, rows in itertools.product(
            ("gate_up",) if place.is_interpreted else ("qkv", "gate_up", "down"),
            (3,) if place.is_interpreted else (1, 16, 64, 2048),
        ):
            yield _linear_case(place, shape, linear, rows, quantization)


def _linear_case(place: Place, shape: Shape, linear: str, rows: int, quantization: str | None) -> Case:
    num_in, outs = shape.linears()[linear]
    out, dtype = sum(outs), dtype_of(place)
    itemsize = {None: dtype.itemsize, "int4": 0.5}.get(quantization, 1)
    weight_bytes = float(num_in * out * itemsize)

    def weights() -> list[torch.Tensor]:
        return [_randn(place, out, num_in) / num_in**0.5 for _ in range(min(24, copies_for(weight_bytes, place)))]

    def build() -> list[Call]:
        x = _randn(place, rows, num_in)
        prepared = [place.backend.prepare_linear(weight, quantization) for weight in weights()]
        return [lambda w=one: place.backend.linear(x, w) for one in prepared]

    def stock() -> list[Call]:
        x = _randn(place, rows, num_in)
        return [lambda w=one: F.linear(x, w) for one in weights()]

    name = f"{linear} {num_in}x{out} T={rows} {quantization or 'unquantised'}"
    moved = weight_bytes + rows * (num_in + out) * dtype.itemsize
    peers = {} if quantization is None else {"torch": stock}
    return Case("linear", name, moved, 2.0 * rows * num_in * out, build, peers)


def expert_cases(place: Place) -> Iterator[Case]:
    for group, layer, peers in expert_layers(place):
        yield Case(
            group, layer.name, layer.num_bytes, layer.operations, layer.build, peers,
            eager_peers=EAGER_PEERS & peers.keys(),
        )  # fmt: skip


GROUPS: Mapping[str, Callable[[Place], Iterator[Case]]] = {
    "lora": lora_cases, "attention": attention_cases, "glue": glue_cases, "linear": linear_cases,
    "experts": expert_cases,
}  # fmt: skip
