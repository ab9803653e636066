"""Whether the ranks of tensor parallelism can share a model evenly, known from its config.json."""

from __future__ import annotations

from loraplex.errors import ModelConfigError
from loraplex.models.config import ModelConfig


def check_shares(config: ModelConfig, num_ranks: int, is_fully_sharded: bool) -> None:
    """ModelConfigError for a model that `num_ranks` ranks cannot share evenly."""
    kv_heads = config.num_key_value_heads
    sizes = {"num_attention_heads": config.num_attention_heads, "intermediate_size": config.intermediate_size}
    sizes |= {"vocab_size": config.vocab_size}
    for experts in filter(None, config.experts):
        sizes |= {"the experts' intermediate size": experts.inner_size, "the shared expert's": experts.shared_size}
    if is_fully_sharded:
        sizes["hidden_size"] = config.hidden_size
    if kv_heads > num_ranks or num_ranks % kv_heads:  # else a head is on several ranks
        sizes["num_key_value_heads"] = kv_heads
    for name, size in sizes.items():
        if size % num_ranks:
            raise ModelConfigError(
                f"{name} of the model is {size}, which {num_ranks} ranks cannot share evenly; lower "
                "tensor_parallel_size"
            )
