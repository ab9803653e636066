"""A replayed step has the bits of the operators called one by one, in any step; what cannot be replayed is noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loraplex.kernels.native.program import LEAST_ROWS, OPERATORS, StepProgram, Workspace
from loraplex.kernels.ops import KernelBackend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.kernels.step_batch import StepBatch
from loraplex.models.decoder import Decoder
from tests.fixtures import VOCAB_SIZE, ModelZoo
from tests.kernels.cases import BF16, draw_gain, make_weights
from tests.kernels.native.machine import ISAS, library_or_skip
from tests.models.adapter_files import pack_adapter
from tests.models.paged_runner import PagedRunner, load_decoder

library_or_skip(ISAS[-1])

Part = tuple[str, list[int]]
OTHERS = {"sum_ranks", "rms_norm_ranks", "layer_norm", "add_scaled", "gelu", "experts", "add_gated"}
"""Not of this family, or of several ranks."""

MORE_ROWS = LEAST_ROWS + 20

STEPS: tuple[tuple[dict[str, int], dict[str, int]], ...] = (
    ({"a": 5, "b": 17}, {}),
    ({"a": 1, "b": 1}, {}),
    ({"a": 1, "c": 9}, {"c": 2}),
    ({"a": 1, "b": 1, "c": 1}, {"a": 0, "c": 2}),
    ({"d": MORE_ROWS}, {"d": 0}),
    ({"a": 1, "b": 1}, {}),
    ({"d": 3, "a": 1, "c": 1}, {"d": 0, "c": 2}),
    ({"d": 5, "a": 1, "c": 1}, {"d": 1, "a": 2, "c": 1}),
)
"""Tokens of each sequence, and the lora_slot of those that have one. Slot 1 has an adapter with gains."""


def add_gains(table: SlotTable, ops: KernelBackend, lora_slot: int, end: int) -> None:
    """An adapter with gains behind `end`: with A and B, without, and no such slice; input gains where they can be."""
    generator = torch.Generator().manual_seed(lora_slot)
    for target in filter(lambda target: target.is_linear, table.targets):
        ranks = (40,) if len(target.slices) == 1 else (0, 40, None)[: len(target.slices)]
        slices = list(make_weights(target, ranks, BF16, False, generator, True))
        if len(slices) == 1 and slices[0] is not None:
            slices[0] = replace(slices[0], input_gain=draw_gain(target.in_features, generator))
        layouts = ops.pack(slices, torch.float32, table.buffer[end:])
        table.set_block(target.name, lora_slot, end, layouts)
        end += ops.packed_nbytes(slices, torch.float32)


def with_adapters(zoo: ModelZoo, family: str, has_gains: bool = True) -> Decoder:
    from peft import LoraConfig

    base = zoo.base(family)
    configs = [
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(r=5, lora_alpha=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    ]
    decoder = load_decoder(base, backend="native", enable_lora=True)
    kernels = decoder._ops
    table = SlotTable(decoder.lora_targets(), capacity=4, buffer=torch.full((1 << 20,), 255, dtype=torch.uint8))
    decoder.bind_lora(table, kernels)
    end = 0
    for config, lora_slot in zip(configs, (2, 0), strict=True):
        end = pack_adapter(zoo.adapter(base, config, seed=lora_slot), table, kernels, lora_slot, end)
    if has_gains:
        add_gains(table, kernels, 1, end)
    return decoder


def run_all(runner: PagedRunner) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    results: list[Tensor] = []
    for lengths, slots in STEPS:
        parts: list[Part] = [
            (name, torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist()) for name, n in lengths.items()
        ]
        segments, start = [], 0
        for name, tokens in parts:
            if name in slots:
                segments.append(LoraSegment(start, start + len(tokens), slots[name]))
            start += len(tokens)
        results += runner.step(parts, LoraPlan.build(segments, start, capacity=4))
    return results


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_replay_has_the_bits_of_the_operators(zoo: ModelZoo, family: str) -> None:
    decoder = with_adapters(zoo, family)
    replayed = PagedRunner(decoder, block_size=16)
    got = run_all(replayed)
    decoder._run_layers = decoder._forward_layers
    one_by_one = PagedRunner(decoder, block_size=16)
    want = run_all(one_by_one)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not any(logits.isnan().any() for logits in got)
    assert torch.equal(replayed.kv.view(torch.int32), one_by_one.kv.view(torch.int32))


class Counted:
    """A decoder's layers, captured once more, with a count of the calls of their Python."""

    def __init__(self, decoder: Decoder) -> None:
        self.calls = 0
        self.seconds: Counter[str] = Counter()
        self._layers = decoder._forward_layers
        decoder._run_layers = decoder._ops.captured(self.forward, self.on_seconds)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor, batch: StepBatch) -> Tensor:
        self.calls += 1
        return self._layers(x, rope, kv, batch)

    def on_seconds(self, operator: str, seconds: float) -> None:
        self.seconds[operator] += seconds


def test_python_runs_once_for_base_and_once_for_adapters_and_again_when_the_workspace_grows(zoo: ModelZoo) -> None:
    decoder = with_adapters(zoo, "llama")
    counted = Counted(decoder)
    runner = PagedRunner(decoder, block_size=16)
    run_all(runner)
    assert counted.calls == 4
    run_all(runner)
    assert counted.calls == 4
    assert set(counted.seconds) == set(OPERATORS)
    assert all(counted.seconds[operator] > 0 for operator in {*OPERATORS} - OTHERS)
    assert counted.seconds["sum_ranks"] == 0, "of one rank"
    run_all(PagedRunner(decoder, block_size=16))  # another KV memory
    assert counted.calls == 6


def test_python_runs_again_when_the_table_gets_its_first_input_gain(zoo: ModelZoo) -> None:
    """Until then no operator for input gains is recorded. An output gain alone changes nothing."""
    decoder = with_adapters(zoo, "llama", has_gains=False)
    counted = Counted(decoder)
    runner = PagedRunner(decoder, block_size=16)
    table = decoder._linears.wrapped[0]._table
    assert table is not None

    def step(slot: int) -> None:
        runner.step([("a", [5])], LoraPlan.build([LoraSegment(0, 1, slot)], 1, 1))

    step(2)
    table.expect(0, (), has_gains=True)
    step(2)
    assert counted.calls == 1
    assert counted.seconds["scale_input"] == 0
    add_gains(table, decoder._ops, 1, table.buffer.numel() // 2)
    for slot in (1, 2):
        step(slot)
    runner.step([("b", [5])])
    assert counted.calls == 3
    assert counted.seconds["scale_input"] > 0


def test_a_cache_of_another_layout_is_left_to_the_operators(zoo: ModelZoo) -> None:
    decoder = with_adapters(zoo, "llama")
    counted = Counted(decoder)
    run_all(PagedRunner(decoder, block_size=8))
    assert counted.calls == len(STEPS)


def test_what_torch_computes_between_operators_is_noticed(zoo: ModelZoo) -> None:
    decoder = load_decoder(zoo.base("llama"), backend="native")
    ops, weight = decoder._ops, decoder.norm.weight

    def forward(x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor, batch: StepBatch) -> Tensor:
        return ops.rms_norm(x * 2, weight, 1e-6)

    decoder._run_layers = ops.captured(forward)
    with pytest.raises(AssertionError, match="not of the workspace"):
        PagedRunner(decoder, block_size=16).step([("a", [3, 4])])
    assert isinstance(decoder._run_layers, StepProgram)
    decoder._run_layers = ops.captured(decoder._forward_layers)
    assert not PagedRunner(decoder, block_size=16).step([("a", [3, 4])])[0].isnan().any()


def test_a_workspace_gives_memory_out_again_when_the_last_view_is_gone() -> None:
    workspace = Workspace(4)
    first = workspace.empty(32)
    view = first.view(4, 2, 16)[:, 1:]
    address = first.data_ptr()
    assert address % 64 == 0
    assert workspace.has(address)
    assert workspace.has(view.data_ptr())
    del first
    second = workspace.empty(32)
    assert second.data_ptr() != address
    view.fill_(7)
    del view
    assert workspace.empty(32).data_ptr() == address
    assert not workspace.has(torch.zeros(4).data_ptr())
