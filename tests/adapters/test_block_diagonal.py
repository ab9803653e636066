"""Block-diagonal LoRA as peft files it: read to the bit, and refused where peft refuses it or the file is not it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraplex.adapters.conversion import cost_of
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.validation import TensorCheck, base_modules
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterValidationError
from tests.adapters.peft_oracle import LINEARS, edit_config, load, make_adapter, new_base, read_tensors, write_tensors

OF_A, OF_B = ["o_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
BLOCKS: dict[str, Any] = {"target_modules_bd_a": OF_A, "target_modules_bd_b": OF_B, "nblocks": 2}
Q = "model.layers.0.self_attn.q_proj"
MINIMAL = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def reasons(**fields: Any) -> list[str]:
    return PEFTHelper.from_dict({**MINIMAL, **fields}).reasons(LoRAConfig())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("blocks", "fields"),
    [
        (BLOCKS, {"target_modules": list(LINEARS)}),
        ({**BLOCKS, "nblocks": 4}, {"r": 8, "use_rslora": True, "rank_pattern": {"v_proj": 4}}),
        ({**BLOCKS, "target_modules_bd_b": ["q_proj"], "match_strict": False}, {"bias": "all"}),
        ({**BLOCKS, "nblocks": 1}, {}),
    ],
    ids=str,
)
def test_blocks_are_on_the_diagonal_and_all_else_is_zero(
    dtype: torch.dtype, blocks: Mapping[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    made = make_adapter(tmp_path / "a", "qwen2", dtype, use_bdlora=dict(blocks), **fields)
    model = load(made.path, made.targets)
    for name, layer in made.layers.items():
        ours = model.layers[name]
        parts = layer.lora_A["default"], layer.lora_B["default"]
        whole = [getattr(part, "weight_as_blockdiagonal_matrix", lambda part=part: part.weight)() for part in parts]
        assert ours.lora_a is not None
        assert ours.lora_b is not None
        assert ours.lora_a.dtype == ours.lora_b.dtype == dtype
        assert torch.equal(ours.lora_a, whole[0])
        assert torch.equal(ours.lora_b, whole[1])
        counts = [getattr(part, "nblocks", 1) for part in parts]
        assert [ours.a_blocks, ours.b_blocks] == counts
    report = inspect_adapter(made.path)
    assert report.reasons == ()
    assert report.kind.startswith("LORA, block-diagonal, served")


def test_its_blocks_are_part_of_its_identity() -> None:
    blocks = (
        BLOCKS,
        {**BLOCKS, "nblocks": 4},
        {**BLOCKS, "target_modules_bd_a": OF_B, "target_modules_bd_b": OF_A},
        None,
    )
    digests = {PEFTHelper.from_dict({**MINIMAL, "use_bdlora": each}).canonical() for each in blocks}
    assert len(digests) == len(blocks)


@pytest.mark.parametrize(
    "value",
    [
        7,
        True,
        "q_proj",
        ["q_proj"],
        {"nblocks": 0},
        {"nblocks": "2"},
        {"nblocks": 2**20},
        {"nblocks": 2, "target_modules_bd_a": "o_proj"},
        {"nblocks": 2, "target_modules_bd_b": [""]},
        {"nblocks": 2, "match_strict": 1},
        {"nblocks": 2, "more": 1},
        {"nblocks": 2, "target_modules_bd_a": ["o_proj"] * 129},
    ],
)
def test_what_is_no_configuration_of_it_is_refused(value: Any) -> None:
    (reason,) = reasons(use_bdlora=value)
    assert reason.startswith(
        "use_bdlora must be null or an object of target_modules_bd_a, target_modules_bd_b, nblocks"
    )


def test_each_name_is_looked_for_once_in_a_module() -> None:
    """A load asks several times for each module of a mixture of experts."""
    looked_for = []

    class Module(str):
        __slots__ = ()

        def __contains__(self, part: str) -> bool:
            looked_for.append(part)
            return super().__contains__(part)

    helper, module = PEFTHelper.from_dict({**MINIMAL, "use_bdlora": BLOCKS}), Module(Q)
    assert helper.block_diagonal is not None
    for _ in range(3):
        assert helper.blocks_of(module) == (1, 2)
        assert helper.block_diagonal.reason_against(module, 4, 32, 32) is None
    assert looked_for == [*OF_A, "q_proj"]


@pytest.mark.parametrize(("name", "value"), [("use_dora", True), ("alora_invocation_tokens", [3])])
def test_what_peft_does_not_load_beside_it_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    (reason,) = reasons(use_bdlora=BLOCKS, **{name: value})
    assert reason.startswith(f"{name}={value!r} with use_bdlora: peft does not load that")
    config = peft.LoraConfig(target_modules=["0"], task_type="CAUSAL_LM", use_bdlora=BLOCKS, **{name: value})
    with pytest.raises(ValueError, match="unsupported variant combination"):
        peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ({**BLOCKS, "target_modules_bd_a": ["self_attn"]}, f"{Q}: use_bdlora names it for both A and B"),
        ({**BLOCKS, "target_modules_bd_b": ["k_proj"]}, f"{Q}: use_bdlora names it for neither A nor B"),
        ({**BLOCKS, "nblocks": 3}, f"{Q}: its rank 8 and 32 features cannot be cut into 3 blocks"),
        ({**BLOCKS, "nblocks": 4}, "lora_B.weight' has shape [32, 4], expected [32, 2]"),
        (None, "lora_B.weight' has shape [32, 4], expected [32, 8]"),
    ],
    ids=str,
)
def test_files_that_another_configuration_made(blocks: Any, reason: str, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", use_bdlora=dict(BLOCKS), target_modules=["q_proj"])
    edit_config(made.path, use_bdlora=blocks)
    with pytest.raises(AdapterValidationError) as caught:
        load(made.path, made.targets)
    assert any(reason in each for each in caught.value.reasons), caught.value.reasons
    assert inspect_adapter(made.path).reasons


def test_what_it_costs_is_known_before_it_is_made() -> None:
    """Of a head with many blocks the file is small and B is not."""
    helper = PEFTHelper.from_dict({**MINIMAL, "use_bdlora": BLOCKS})
    assert cost_of(helper, 16, 32, 32_000, (1, 16)).nbytes == 16 * 32_000 * 4
    assert cost_of(helper, 16, 32, 32_000, (2, 1)).nbytes == 16 * 32 * 4
    check = TensorCheck(helper, base_modules(()))
    check.costs["lm_head"] = cost_of(helper, 16, 32, 32_000, (1, 16))
    (reason,) = check.over_limits(LoRAConfig(host_memory_bytes=2**20))
    assert reason.startswith("as a LoRA it has 2048000 bytes; a file of 0 bytes may become")


def test_its_numbers_are_checked(tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "a", use_bdlora=dict(BLOCKS), target_modules=["q_proj"])
    tensors = read_tensors(made.path)
    tensors[f"base_model.model.{Q}.lora_B.weight"][0, 0] = float("nan")
    write_tensors(made.path, tensors)
    with pytest.raises(AdapterValidationError, match="NaN"):
        load(made.path, made.targets)


def test_a_rank_that_peft_cannot_cut_is_refused_there_too() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", use_bdlora={**BLOCKS, "nblocks": 3})
    with pytest.raises(ValueError, match="not divisible"):
        peft.get_peft_model(new_base("llama"), config)
    assert json.dumps(config.to_dict()["use_bdlora"])
