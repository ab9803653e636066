"""A text model beside other parts: its checkpoint loads, and an adapter that was trained on it keeps its names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.models.config import ModelConfig
from tests.fixtures import VOCAB_SIZE, ModelZoo, randomise, write_adapter
from tests.models.paged_runner import PagedRunner, load_decoder
from tests.models.test_decoder import assert_close, make_tokens

TEXT = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 24, "query_pre_attn_scalar": 24},
    **{"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1},
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


@pytest.fixture(scope="module")
def gemma3() -> Any:
    import transformers

    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    torch.manual_seed(3)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomise(model.model.language_model)
    return model


@pytest.fixture(scope="module")
def saved(gemma3: Any, zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    gemma3.save_pretrained(path)
    for file in zoo.tokenizer_dir.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def under_other_names(path: Path, target: Path) -> Path:
    """The same checkpoint as later and earlier versions of transformers name its tensors."""
    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    is_old = any(name.startswith("language_model.model.") for name in tensors)
    before, after = (r"^language_model\.model\.", "model.language_model.")
    if not is_old:
        before, after = r"^model\.language_model\.", "language_model.model."
    save_file({re.sub(before, after, name): tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@torch.inference_mode()
def test_the_text_part_loads_under_both_names(gemma3: Any, saved: Path, tmp_path: Path) -> None:
    tokens = make_tokens(40, 1)
    want = gemma3(torch.tensor([tokens])).logits[0]
    for path in (saved, under_other_names(saved, tmp_path / "other")):
        assert ModelConfig.from_dir(path).model_type == "gemma3_text"
        assert_close(PagedRunner(load_decoder(path)).step([("a", tokens)])[0], want)


def test_an_adapter_of_the_whole_model_acts_on_the_text_part(gemma3: Any, saved: Path, tmp_path: Path) -> None:
    import copy

    import peft

    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=r".*language_model.*\.(q_proj|v_proj|down_proj)",
        rank_pattern={r".*language_model\.layers\.1\.self_attn\.q_proj": 3},
        task_type="CAUSAL_LM",
    )
    write_adapter(tmp_path / "adapter", copy.deepcopy(gemma3), config, seed=1, strength=0.5, dtype="float32")
    model: Any = peft.PeftModel.from_pretrained(copy.deepcopy(gemma3), tmp_path / "adapter").eval()
    prompt, said = make_tokens(30, 2), list[int]()
    with torch.inference_mode():
        for _ in range(8):
            said.append(int(model(torch.tensor([prompt + said])).logits[0, -1].argmax()))
    with LLM(str(saved), max_model_len=128) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        request = LoRARequest("a", 1, str(tmp_path / "adapter"))
        output = llm.generate([{"prompt_token_ids": prompt}] * 2, greedy, lora_request=[request, None])
    assert list(output[0].outputs[0].token_ids) == said != list(output[1].outputs[0].token_ids)
