"""Real transformers models and real peft adapters, as small as they come, and what they publish to us."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from loraplex.adapters.files import AdapterFolder
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.tensors import WeightFile
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraSlice, LoraTarget, ShardKind
from loraplex.errors import AdapterValidationError

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_LAYERS = 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@functools.cache
def base_state(family: str) -> Mapping[str, torch.Tensor]:
    return new_base(family).state_dict()


def new_base(family: str) -> torch.nn.Module:
    """llama (no biases), qwen2 (biases of q, k, v, random), llama_bias (biases everywhere, random)."""
    torch.manual_seed(0)
    if family == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    else:
        has_bias = family == "llama_bias"
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SIZES, attention_bias=has_bias, mlp_bias=has_bias)
        )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def targets_of(model: torch.nn.Module, fused: bool = True) -> tuple[LoraTarget, ...]:
    """What our decoder publishes for this model: q, k, v and gate, up fused."""
    targets = []
    for layer in range(model.config.num_hidden_layers):
        for block, names in (("self_attn", ("qkv", "o_proj")), ("mlp", ("gate_up", "down_proj"))):
            for name in names:
                parts = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}.get(name, (name,))
                targets.append(_target(model, layer, f"model.layers.{layer}.{block}", name, parts))
    return tuple(targets)


def all_targets_of(model: torch.nn.Module) -> tuple[LoraTarget, ...]:
    """The embedding, the norms and the head, too."""
    config = model.config
    vocab, hidden, depth = config.vocab_size, config.hidden_size, config.num_hidden_layers
    norms = [
        _whole(name, int(name.split(".")[2]) if ".layers." in name else depth, *module.weight.shape * 2, ShardKind.NORM)
        for name, module in model.named_modules()
        if name.endswith("norm")
    ]
    embedding = _whole("model.embed_tokens", -1, vocab, hidden, ShardKind.EMBEDDING)
    is_tied = bool(config.tie_word_embeddings)
    head = replace(_whole("lm_head", depth, hidden, vocab, ShardKind.HEAD), is_tied=is_tied)
    return (embedding, *targets_of(model), *norms, head)


def _whole(name: str, layer: int, in_features: int, out_features: int, kind: ShardKind) -> LoraTarget:
    slices = (LoraSlice(name, 0, out_features, out_features),)
    return LoraTarget(name, layer, in_features, in_features, slices, kind)


def _target(model: torch.nn.Module, layer: int, where: str, name: str, parts: tuple[str, ...]) -> LoraTarget:
    slices, offset = [], 0
    for part in parts:
        linear = model.get_submodule(f"{where}.{part}")
        slices.append(
            LoraSlice(f"{where}.{part}", offset, linear.out_features, linear.out_features, linear.bias is not None)
        )
        offset += linear.out_features
    width = linear.in_features
    return LoraTarget(f"{where}.{name}", layer, width, width, tuple(slices))


@dataclass(frozen=True)
class PeftAdapter:
    """A saved adapter: its directory, the base's targets, and what peft made of the configuration."""

    path: Path
    targets: tuple[LoraTarget, ...]
    layers: Mapping[str, Any]
    model: torch.nn.Module

    def delta(self, module: str) -> torch.Tensor:
        return self.layers[module].get_delta_weight("default")

    @property
    def facts(self) -> dict[str, tuple[int, float, float]]:
        """module -> (rank, alpha, scaling)."""
        return {
            name: (layer.r["default"], layer.lora_alpha["default"], layer.scaling["default"])
            for name, layer in self.layers.items()
        }


def lora_layers(model: torch.nn.Module) -> dict[str, Any]:
    """module name in the base -> peft's layer."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def make_adapter(path: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> PeftAdapter:
    """Make, fill with random numbers (trained biases of the base too) and save an adapter with real peft."""
    base = new_base(family)
    targets = targets_of(base)
    config = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**config), autocast_adapter_dtype=False)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name or (parameter.requires_grad and name.endswith("bias")):
                torch.nn.init.normal_(parameter, std=0.3)
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
        model.save_pretrained(path, save_embedding_layers=False)
    return PeftAdapter(path, targets, lora_layers(model), model)


def save_kind(
    path: Path,
    config: peft.PeftConfig,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    rank_pattern: Mapping[str, list[bool]] | None = None,
) -> tuple[LoraTarget, ...]:
    """Save an adapter of any kind with real peft, its tensors random (trained biases of the base too), none of them 0.

    rank_pattern: what AdaLoRA's training leaves in its configuration. Returns the base's targets.
    """
    base = new_base(family)
    names, targets = set(base.state_dict()), targets_of(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if name.endswith("ranknum.default"):
                continue
            is_of_adapter = name.removeprefix("base_model.model.").replace(".base_layer", "") not in names
            if is_of_adapter or (parameter.requires_grad and name.endswith("bias")):
                torch.nn.init.normal_(parameter, std=0.3)
            if is_of_adapter:
                parameter.data = parameter.data.to(dtype)
        if rank_pattern is not None:
            model.peft_config["default"].rank_pattern = dict(rank_pattern)
        model.save_pretrained(path, save_embedding_layers=False)
    return targets


def peft_reads(path: Path, family: str = "llama") -> torch.nn.Module:
    """What peft makes of a saved adapter, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(new_base(family), str(path)).double().eval()


def tuned_layers(model: torch.nn.Module) -> dict[str, Any]:
    """module name in the base -> peft's layer, of any kind."""
    return {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)
    }


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "adapter_config.json").read_text())


def edit_config(path: Path, **changes: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps({**read_config(path), **changes}))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "adapter_model.safetensors")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")


LIMITS = LoRAConfig()


def header_nbytes(path: Path) -> int:
    """Bytes of the adapter's tensors in the file's dtypes, by the headers."""
    return WeightFile.open(AdapterFolder(path, "adapter"), LIMITS.host_memory_bytes).nbytes


def load(path: Path, targets: tuple[LoraTarget, ...], lora_config: LoRAConfig = LIMITS) -> LoRAModel:
    return LoRAModel.from_local_checkpoint(path, PEFTHelper.from_local_dir(path), targets, lora_config)


def refused(adapter: PeftAdapter, lora_config: LoRAConfig = LIMITS) -> tuple[str, ...]:
    """The reasons, all of them, why it is not loaded."""
    with pytest.raises(AdapterValidationError) as caught:
        load(adapter.path, adapter.targets, lora_config)
    assert "'sql'" in caught.value.message
    return caught.value.reasons


def shard(path: Path, parts: int) -> None:
    """File the tensors as an index and its shards."""
    tensors = read_tensors(path)
    weight_map = {}
    for index in range(parts):
        names = sorted(tensors)[index::parts]
        file = f"adapter_model-{index + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map.update(dict.fromkeys(names, file))
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def to_bin(path: Path, change: Callable[[dict[str, Any]], Any] = lambda tensors: tensors) -> None:
    torch.save(change(read_tensors(path)), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
