"""Which batch sizes of decode steps are captured, and the device memory that their graphs need."""

from __future__ import annotations

from loraplex.config import EngineConfig
from loraplex.models.config import ModelConfig

FINE_SIZES_TO = 256
"""Up to this size there is a graph for every 8 rows, behind it for every 16."""

ALLOWANCE_BYTES = 64 << 20
ALLOWANCE_BYTES_PER_GRAPH = 16 << 20
"""What cannot be told from shapes: cuBLAS's workspace of the capturing stream, scratch of split kernels, and what the
driver keeps on the device of each graph. An allowance, not a measurement."""


def graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Rows of the graphs, ascending: 1, 2, 4, 8, 16, 24, ... up to max_num_seqs, or as cuda_graph_sizes says."""
    if len(config.cuda_graph_sizes) > 1:
        return tuple(sorted(set(config.cuda_graph_sizes)))
    largest = config.cuda_graph_sizes[0] if config.cuda_graph_sizes else config.max_num_seqs
    usual = (1, 2, 4, *range(8, FINE_SIZES_TO, 8), *range(FINE_SIZES_TO, largest, 16))
    return (*(size for size in usual if size < largest), largest)


def graph_bytes(config: EngineConfig, model_config: ModelConfig, itemsize: int) -> int:
    """Device memory to leave free for graphs and the logits that they write. itemsize: bytes of an activation.

    One memory pool serves all graphs, so it is as large as the largest needs: the widest tensors of a layer at once,
    and logits in two dtypes.
    """
    sizes, model = graph_sizes(config), model_config
    qkv = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    row = (4 * model.hidden_size + 2 * qkv + inner_numbers(model) + model.vocab_size) * itemsize
    logits = 4 * model.vocab_size
    num_graphs = len(sizes) * (1 if config.lora is None else 3 if config.lora.long_lora_scaling_factors else 2)
    return sizes[-1] * (row + 2 * logits) + ALLOWANCE_BYTES + num_graphs * ALLOWANCE_BYTES_PER_GRAPH


def inner_numbers(model: ModelConfig) -> int:
    """That a layer's MLP or experts keep of one token, at most: three inner states; of experts an inner state and an
    output for each chosen one, the router's logits, and the shared one's inner states."""
    of_experts = (
        each.top_k * (each.inner_size + model.hidden_size) + 2 * each.num_experts + 3 * each.shared_size
        for each in filter(None, model.experts)
    )
    return max(3 * model.intermediate_size, *of_experts, 0)
