"""docs/names.md against the field's names and the code: each entry leads somewhere or says why not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_docs import resolve

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "names.md").read_text()
FIELD = (
    *("LoRALayerWeights", "LoRAModel", "get_lora", "check_lora_name", "clone", "optimize", "compute_delta_weight"),
    *("from_local_checkpoint", "LoRARequest", "lora_name", "lora_int_id", "lora_path", "adapter_id", "base_model_name"),
    *("lora_local_path", "long_lora_max_len", "tensorizer_config_dict", "add_lora", "remove_lora", "list_loras"),
    *("LoRAMapping", "index_mapping", "prompt_mapping", "is_prefill", "lora_index_mapping", "lora_set", "max_lora_id"),
    *("BatchLoRADataMapper", "map_sequence_to_adapters", "get_lora_id_for_index", "create_batch_indices"),
    *("ForwardBatch.lora_ids", "LoRABatchProcessor.prepare_batch", "prepare_lora_batch", "punica_wrapper"),
    *("PunicaWrapper", "LoRAConfig", "lora_dtype", "bias_enabled", "fully_sharded_loras", "lora_extra_vocab_size"),
    *("effective_dtype", "max_loras", "max_cpu_loras", "max_lora_rank", "max_loaded_loras", "PEFTHelper"),
    *("from_local_dir", "validate_legal", "scaling_factor", "vllm_lora_scaling_factor", "allocate_adapter"),
    *("check_memory_status", "LoRAMemoryPool", "get_intermediate_buffer", "OptimizedLoRAWeights", "add_adapter"),
    *("remove_adapter", "activate_adapter", "deactivate_adapter", "pin_adapter", "list_adapters"),
    *("set_active_adapters", "set_adapter_mapping", "LoRAModelManager", "WorkerLoRAManager", "LoRAManager"),
    *("switch_lora", "sgmv_shrink", "sgmv_expand", "sgmv_expand_slice", "bgmv_shrink", "bgmv_expand"),
    *("bgmv_expand_slice", "BaseLayerWithLoRA", "base_layer", "set_lora", "lora_backend", "set_lora_info"),
    *("apply_lora", "slice_lora_a_weights", "slice_lora_b_weights", "VocabParallelEmbeddingWithLoRA"),
    *("ColumnParallelLinearWithLoRA", "MergedColumnParallelLinearWithLoRA", "QKVParallelLinearWithLoRA"),
    *("RowParallelLinearWithLoRA", "LoraTarget", "TypeBasedDispatcher", "LoadLoRAAdapterReqInput", "LoRARef"),
    *("LoRARegistry", "emergency_memory_recovery", "enter_low_memory_mode", "start_lora_profiling"),
    *("generate_lora_performance_report", "lora-modules", "lora-paths"),
)
"""What the texts call it that users of Loraplex come from."""

ENTRIES = [
    " ".join(entry.split())
    for entry in re.findall(r"^- ((?:.+\n)(?:  .+\n)*)", TEXT.split("## Command line")[0], re.MULTILINE)
]
"""Each as `**theirs**: ours. What differs`, on one line."""


@pytest.mark.parametrize("name", FIELD)
def test_each_name_of_the_field_is_on_the_page(name: str) -> None:
    assert re.search(rf"\b{re.escape(name)}\b", TEXT)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.split("**")[1])
def test_each_entry_leads_somewhere_or_says_why(entry: str) -> None:
    parts = re.fullmatch(r"\*\*[^*]+\*\*: (not here|`[^`]+`(?:, `[^`]+`)*)\.(.*)", entry)
    assert parts, "**theirs**: ours. What differs"
    ours, remarks = parts.groups()
    if ours == "not here":
        assert len(remarks.split()) >= 5
    else:
        targets = re.findall(r"`(loraplex(?:\.\w+)+)`", ours)
        assert targets
        assert all(resolve(target) is not None for target in targets)


def test_there_are_entries() -> None:
    assert len(ENTRIES) > 60
