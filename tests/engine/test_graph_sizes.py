"""Batch sizes that are captured, and the memory that is left free for their graphs."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.config import EngineConfig
from loraplex.engine.graph_sizes import graph_bytes, graph_sizes
from loraplex.errors import ConfigError
from loraplex.models.config import ModelConfig
from tests.fixtures import ModelZoo


def test_they_grow_by_eight_and_end_with_the_largest_batch() -> None:
    assert graph_sizes(EngineConfig(model="m")) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(EngineConfig(model="m", max_num_seqs=20)) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(EngineConfig(model="m", max_num_seqs=3)) == (1, 2, 3)
    assert graph_sizes(EngineConfig(model="m", max_num_seqs=1)) == (1,)
    assert graph_sizes(EngineConfig(model="m", max_num_seqs=300))[-5:] == (248, 256, 272, 288, 300)


def test_as_asked() -> None:
    cuda: dict[str, Any] = {"model": "m", "device": "cuda"}
    assert graph_sizes(EngineConfig(**cuda, cuda_graph_sizes=(16,))) == (1, 2, 4, 8, 16)
    assert graph_sizes(EngineConfig(**cuda, cuda_graph_sizes=(32, 8, 8))) == (8, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cuda_graph_sizes": (8,), "device": "cpu"}, "need a CUDA device, not 'cpu'"),
        ({"cuda_graph_sizes": (8,), "device": "cuda:1", "enforce_eager": True}, "no enforce_eager"),
        ({"cuda_graph_sizes": (0, 8), "device": "cuda"}, r"1\.\.max_num_seqs \(64\), got \(0, 8\)"),
        ({"cuda_graph_sizes": (65,), "device": "cuda"}, r"1\.\.max_num_seqs \(64\)"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_their_memory_grows_with_the_largest_batch_and_the_number_of_graphs(zoo: ModelZoo) -> None:
    model = ModelConfig.from_dir(zoo.base("llama"))
    few, more = (graph_bytes(EngineConfig(model="m", max_num_seqs=n), model, 2) for n in (64, 128))
    assert more - few > 64 * model.vocab_size * 4
    assert graph_bytes(EngineConfig(model="m", lora=None), model, 2) < few
