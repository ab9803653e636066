"""What `kernels.py` times of a mixture of experts: a layer of real models, bare and with adapters on all experts.

A layer is larger than the L2; calls route their rows differently, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.gpu.expert_inputs import experts_of, weight_shapes
from benchmarks.gpu.inputs import draw_weights, make_plan, make_table, pack
from benchmarks.gpu.place import BF16, FP32, Place
from benchmarks.gpu.shapes import MIXTRAL, QWEN_MOE, TINY_EXPERTS, ExpertShape, lora_bytes
from benchmarks.gpu.timing import Call
from loraplex.kernels.experts import ExpertLora
from loraplex.kernels.plan import SlotTable
from loraplex.kernels.torch_ops import TorchBackend

NUM_ROUTES = 4
RANK = 16

EAGER_PEERS = frozenset({"torch"})
"""Stock torch asks on the host which rows an expert has."""


class ExpertLayer:
    """A layer's experts in one form, one row for each entry of `slots` (-1: of the base).

    num_bytes: weights of the experts that rows choose, if all are as likely; each pair's adapter; rows, once each.
    """

    def __init__(self, place: Place, shape: ExpertShape, slots: Sequence[int], quantization: str | None) -> None:
        self._place, self._shape, self._slots, self._quantization = place, shape, slots, quantization
        self._dtype = FP32 if place.is_interpreted else BF16

    @property
    def name(self) -> str:
        count = max(self._slots) + 1
        adapters = f" {count} adapters r{RANK}" if count else " base"
        return f"{self._shape.name} T={len(self._slots)}{adapters} {self._quantization or 'unquantised'}"

    @property
    def num_bytes(self) -> float:
        shape, rows, itemsize = self._shape, len(self._slots), self._dtype.itemsize
        num_chosen = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** rows)
        numbers = 3 * shape.hidden * shape.inner
        weights = num_chosen * numbers * {None: itemsize, "int4": 0.5}.get(self._quantization, 1)
        an_expert = sum(lora_bytes(target, RANK, itemsize) for target in shape.targets()[:2])
        pairs = min(sum(slot >= 0 for slot in self._slots) * shape.top_k, (max(self._slots) + 1) * num_chosen)
        return weights + pairs * an_expert + 2 * rows * shape.hidden * itemsize

    @property
    def operations(self) -> float:
        return 2.0 * len(self._slots) * self._shape.top_k * 3 * self._shape.hidden * self._shape.inner

    def build(self) -> list[Call]:
        backend, targets, table = self._place.backend, self._shape.targets(), self._table()
        prepared = [backend.prepare_linear(each, self._quantization) for each in self._weights()]
        layer = experts_of(self._shape, prepared, targets, table)
        plan = make_plan(self._slots, self._place.device, is_decode=len(self._slots) <= 64)
        lora = None if table is None else ExpertLora(plan, table)
        return [lambda x=x, logits=logits: backend.experts(x, logits, layer, lora) for x, logits in self._rows()]

    def stock(self) -> list[Call]:
        """Expert by expert; it looks at the choice on the host."""
        layer = experts_of(self._shape, self._weights(), self._shape.targets(), None)
        ops = TorchBackend()
        return [lambda x=x, logits=logits: ops.experts(x, logits, layer, None) for x, logits in self._rows()]

    def grouped(self) -> list[Call]:
        """torch._grouped_mm for both linears, of rows that are sorted already and are not added up."""
        num_experts, pairs = self._shape.num_experts, len(self._slots) * self._shape.top_k
        weights = self._weights()
        gate_up, down = (torch.stack(weights[first::2]).mT for first in (0, 1))
        ends = (torch.arange(1, num_experts + 1) * pairs // num_experts).to(self._place.device, torch.int32)
        x = torch.randn(pairs, self._shape.hidden, device=self._place.device).to(self._dtype)

        def run() -> None:
            inner = self._place.backend.silu_mul(torch._grouped_mm(x, gate_up, offs=ends))
            torch._grouped_mm(inner, down, offs=ends)

        return [run]

    def _weights(self) -> list[torch.Tensor]:
        return [
            torch.randn(out, num_in, device=self._place.device).to(self._dtype) / num_in**0.5
            for out, num_in in weight_shapes(self._shape)
        ]

    def _rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x, *logits = (
            torch.randn(len(self._slots), n, device=self._place.device).to(self._dtype)
            for n in (self._shape.hidden, *[self._shape.num_experts] * NUM_ROUTES)
        )
        return [(x, each) for each in logits]

    def _table(self) -> SlotTable | None:
        targets, count = self._shape.targets(), max(self._slots) + 1
        if not count:
            return None
        backend, generator = self._place.backend, torch.Generator()
        first = [pack(backend, t, draw_weights(t, RANK, self._dtype, generator), self._dtype) for t in targets[:2]]
        return make_table(targets, [first * self._shape.num_experts] * count, self._place.device)


def expert_layers(place: Place) -> Iterator[tuple[str, ExpertLayer, dict[str, Callable[[], list[Call]]]]]:
    """(group, layer, its peers): those of a layer in the model's dtype without adapters."""
    shapes: tuple[ExpertShape, ...] = (TINY_EXPERTS,) if place.is_interpreted else (MIXTRAL, QWEN_MOE)
    steps = (2,) if place.is_interpreted else (1, 32, 2048)
    for shape, rows in itertools.product(shapes, steps):
        group = f"experts {'decode' if rows <= 64 else 'prefill'}"
        base = ExpertLayer(place, shape, [-1] * rows, None)
        yield group, base, {"torch": base.stock} | ({} if place.is_interpreted else {"grouped": base.grouped})
        distinct = list(range(rows)) if rows <= 64 else [0] * (rows // 2) + [1] * (rows // 2)
        yield group, ExpertLayer(place, shape, distinct, None), {}
    for quantization in place.backend.quantizations:
        rows = 2 if place.is_interpreted else 32
        yield "experts decode", ExpertLayer(place, shapes[0], [-1] * rows, quantization), {}
