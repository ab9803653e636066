"""The field's names over the product's parts: a batch by LoRA id, a worker's verbs, slices that recombine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from loraplex import LoRAConfig, LoRARequest
from loraplex.compat import punica_ops
from loraplex.compat.vllm import (
    BatchLoRADataMapper,
    LoRAMapping,
    WorkerLoRAManager,
    slice_lora_a_weights,
    slice_lora_b_weights,
)
from loraplex.core import ShardKind
from loraplex.engine import batch
from loraplex.errors import AdapterNoRoomError, ConfigError, InvalidRequestError
from loraplex.layers.lora import with_lora
from tests.layers.test_lora import IN, TOKENS, each_kind, make_base
from tests.memory.rig import Rig


@pytest.mark.parametrize(("short", "name"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_short_names_of_dtypes(short: str, name: str) -> None:
    config = LoRAConfig(lora_dtype=short)
    assert config == LoRAConfig(lora_dtype=name)
    assert config.effective_dtype("float32") == name
    with pytest.raises(ConfigError, match="got 'fp32'"):
        LoRAConfig(lora_dtype="fp32")


# ------------------------------------------------------------------------------------------------------- a batch by id


@dataclass(frozen=True)
class Sequence_:
    lora_id: int | None
    num_tokens: int = 1


REQUESTS = {lora_id: LoRARequest(f"a{lora_id}", lora_id, f"/p{lora_id}") for lora_id in (3, 7, 9)}


def test_sequences_are_mapped_to_their_adapters() -> None:
    sequences = [Sequence_(7, 2), Sequence_(None, 3), Sequence_(3), Sequence_(7), Sequence_(0)]
    mapping = BatchLoRADataMapper.map_sequence_to_adapters(sequences, REQUESTS)
    assert mapping.index_mapping.tolist() == [0, 0, -1, -1, -1, 1, 0, -1]
    assert mapping.prompt_mapping.tolist() == [0, -1, 1, 0, -1]
    assert mapping.lora_index_mapping == {7: 0, 3: 1}
    assert mapping.lora_set == {7: {0, 3}, 3: {2}}
    assert mapping.max_lora_id == 7
    assert mapping.is_prefill
    assert [mapping.get_lora_id_for_index(i) for i in range(8)] == [7, 7, None, None, None, 3, 7, None]
    mapping.validate(8, 5, 2)


def test_a_batch_of_the_base_model_alone() -> None:
    mapping = BatchLoRADataMapper.map_sequence_to_adapters([Sequence_(None), Sequence_(None)], {})
    assert (mapping.index_mapping.tolist(), mapping.max_lora_id, mapping.is_prefill) == ([-1, -1], 0, False)


def test_batch_indices_are_what_the_operators_take() -> None:
    mapping = BatchLoRADataMapper.map_sequence_to_adapters([Sequence_(9), Sequence_(None), Sequence_(3)], REQUESTS)
    indices = mapping.create_batch_indices()
    assert indices.dtype == torch.int32
    assert indices.tolist() == [0, -1, 1]
    assert mapping.create_batch_indices(2).tolist() == [0, -1]
    output = torch.zeros(3, 1)
    punica_ops.bgmv_expand(torch.ones(3, 1), torch.tensor([[[5.0]], [[6.0]]]), output, indices)
    assert output.flatten().tolist() == [5.0, 0.0, 6.0]


def test_what_is_not_in_the_batch_is_refused() -> None:
    mapping = LoRAMapping(np.array([0]), np.array([0]), lora_index_mapping={3: 0})
    for index in (-1, 1):
        with pytest.raises(InvalidRequestError, match=f"token {index} is not in the batch of 1 tokens"):
            mapping.get_lora_id_for_index(index)
    with pytest.raises(InvalidRequestError, match="batch_size 2: the batch has 1 tokens"):
        mapping.create_batch_indices(2)
    with pytest.raises(InvalidRequestError, match="sequence 1 names LoRA 4"):
        BatchLoRADataMapper.map_sequence_to_adapters([Sequence_(3), Sequence_(4)], REQUESTS)


# ----------------------------------------------------------------------------------------------------- verbs of a batch


@dataclass(frozen=True)
class Named:
    adapter_id: int


@pytest.fixture(params=[False, True], ids=["one memory", "two memories"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(is_separate=request.param)


def test_active_adapters_come_together(rig: Rig) -> None:
    worker = WorkerLoRAManager(rig.manager)
    rig.add(1, 2, 3)
    requests = [LoRARequest("one", 1, "/p1"), Named(2), Named(2)]
    mapping = batch.LoRAMapping.from_prompts([-1], [1])
    assert rig.loader is not None
    with rig.loader.opened():
        assert worker.activate_adapter(3)
        assert not worker.activate_adapter(3)
        worker.set_active_adapters(requests, mapping)
        assert not worker.set_adapter_mapping(mapping)
        assert sorted(filter(None, worker.lora_index_to_id)) == [1, 2]
        assert len(worker.lora_index_to_id) == rig.manager.table.capacity
        with pytest.raises(AdapterNoRoomError):
            worker.set_active_adapters([Named(1), Named(2), Named(3)])
    assert sum(r.num_running for r in rig.manager.list_adapters()) == 0
    rig.manager.check_integrity()


def test_a_slot_of_shared_content_has_the_first_adapters_id(rig: Rig) -> None:
    rig.manager.add_adapter(rig.spec(5, digest="same"))
    rig.manager.add_adapter(rig.spec(4, digest="same"))
    worker = WorkerLoRAManager(rig.manager)
    rig.activate(4)
    assert [each for each in worker.lora_index_to_id if each is not None] == [5]


def test_a_mapping_is_checked_against_what_is_there(rig: Rig) -> None:
    worker = WorkerLoRAManager(rig.manager)
    rig.add(1)
    rig.activate(1)
    mapping = batch.LoRAMapping.from_prompts([-1, 0], [2, 1])
    assert worker.set_adapter_mapping(mapping)
    assert not worker.set_adapter_mapping(mapping)
    for slots in ([1], [10_000], [-2]):
        with pytest.raises(InvalidRequestError):
            worker.set_adapter_mapping(batch.LoRAMapping(np.array(slots), np.array(slots)))


# -------------------------------------------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("size", [1, 2, 4])
@each_kind
def test_slices_of_all_ranks_recombine(kind: ShardKind, full: list[int], cls: type, size: int) -> None:
    layer = with_lora(make_base(kind, full, size))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, IN, generator=generator)
    lora_a = [torch.randn(5, IN, generator=generator) for _ in full]
    lora_b = [torch.randn(n, 5, generator=generator) for n in full]
    parts = []
    for rank in range(size):
        own_a, own_b = slice_lora_a_weights(layer, lora_a, rank), slice_lora_b_weights(layer, lora_b, rank)
        own_x = x.chunk(size, dim=1)[rank] if kind is ShardKind.ROW else x
        deltas = [own_x @ a.T @ b.T for a, b in zip(own_a, own_b, strict=True) if a is not None and b is not None]
        assert [d.shape[1] for d in deltas] == [s.out_features for s in layer.target.slices]
        parts.append(deltas)
    for i, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
        of_slice = [deltas[i] for deltas in parts]
        if kind is ShardKind.ROW:
            whole = torch.stack(of_slice).sum(0)
        else:
            whole = of_slice[0] if kind is ShardKind.REPLICATED else torch.cat(of_slice, dim=1)
        torch.testing.assert_close(whole, x @ a.T @ b.T, rtol=1e-4, atol=1e-4)


def test_one_tensor_for_one_slice_and_a_list_for_several() -> None:
    single, merged = (
        with_lora(make_base(ShardKind.COLUMN, [16], 2)),
        with_lora(make_base(ShardKind.COLUMN, [16, 16], 2)),
    )
    b = torch.arange(16.0)[:, None]
    assert slice_lora_b_weights(single, b, 1).flatten().tolist() == list(range(8, 16))
    assert slice_lora_a_weights(single, torch.ones(2, IN), 1).shape == (2, IN)
    second = slice_lora_b_weights(merged, [None, b], 1)
    assert second[0] is None
    assert torch.equal(second[1], b[8:])
    assert slice_lora_a_weights(merged, [None, None], 0) == [None, None]
    with pytest.raises(ValueError, match="give a list"):
        slice_lora_b_weights(merged, b, 0)
    with pytest.raises(ValueError, match="give a list"):
        slice_lora_a_weights(merged, torch.ones(2, IN), 0)
    with pytest.raises(ValueError, match="2 slices, got 1"):
        slice_lora_a_weights(merged, [None], 0)
