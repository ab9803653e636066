"""Stacks of experts are split by their shape, which a file says freely."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.models.checkpoints.expert_stacks import MAX_EXPERTS
from loraplex.models.checkpoints.files import open_files
from loraplex.models.families import FAMILIES

STACK = "model.layers.0.mlp.experts.gate_up_proj"


def names_of(tmp_path: Path, *shape: int) -> set[str]:
    save_file({STACK: torch.zeros(shape, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with open_files(tmp_path, None, FAMILIES["qwen3_moe"]) as files:
        return set(files.names)


def test_a_stack_is_a_gate_and_an_up_for_each_expert(tmp_path: Path) -> None:
    block = "model.layers.0.mlp.experts"
    assert names_of(tmp_path, 2, 4, 3) == {
        f"{block}.{expert}.{leaf}_proj.weight" for expert in (0, 1) for leaf in ("gate", "up")
    }


def test_a_stack_of_llama_4_is_in_by_out_the_gates_first(tmp_path: Path) -> None:
    """As its vision model's checkpoint names it."""
    block, stack = "model.layers.0.feed_forward.experts", torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    save_file({f"language_model.{block}.gate_up_proj": stack}, tmp_path / "model.safetensors")
    with open_files(tmp_path, None, FAMILIES["llama4_text"]) as files:
        for expert in range(2):
            for turn, leaf in enumerate(("gate", "up")):
                tensor = files.tensor(f"{block}.{expert}.{leaf}_proj.weight")
                assert torch.equal(tensor, stack[expert, :, 2 * turn : 2 * turn + 2].t())


@pytest.mark.parametrize("shape", [(20000, 0, 8), (20000, 8, 0), (0, 2, 8), (MAX_EXPERTS + 1, 2, 1), (2, 3, 8), (2, 4)])
def test_what_is_no_stack_keeps_its_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The loader refuses it by that name. Stacks without bytes could say any number of experts."""
    assert names_of(tmp_path, *shape) == {STACK}
