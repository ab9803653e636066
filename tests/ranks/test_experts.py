"""Mixtures of experts over ranks, which have a part of each expert: the tokens of transformers + peft in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest

from loraplex.errors import ModelConfigError
from loraplex.models.config import ModelConfig
from loraplex.models.shares import check_shares
from tests.engine.test_moe_parity import NOT_CONVERTED, adapters
from tests.fixtures import ModelZoo
from tests.models.checkpoints.test_gpt_oss_files import make_mxfp4
from tests.ranks.engines import LORA, check, load, opened

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]

NUM_TOKENS = 24
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 16}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text")


@pytest.mark.parametrize(("size", "is_full"), [(2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_chunks_and_from_the_prefix_cache(
    zoo: ModelZoo, tmp_path: Path, family: str, size: int, is_full: bool
) -> None:
    base = zoo.base(family)
    paths = dict(adapters(zoo, base, tmp_path))
    if family in NOT_CONVERTED:
        paths = {name: path for name, path in paths.items() if not name.startswith("modules")}
    cases = [(None, zoo.fit_case(base, length=40, num_tokens=NUM_TOKENS))]
    cases += [(name, zoo.fit_case(base, path, length=12, num_tokens=NUM_TOKENS)) for name, path in paths.items()]
    with opened(base, size, replace(LORA, fully_sharded_loras=is_full), **CHUNKS) as driver:
        load(driver, paths)
        check(driver, cases, NUM_TOKENS)
        hits = driver.stats.num_prefix_hit_tokens
        check(driver, cases, NUM_TOKENS)
        assert driver.stats.num_prefix_hit_tokens > hits


@pytest.mark.parametrize(
    ("dtype", "inner", "num_kept"), [("float32", 160, 0), ("bfloat16", 192, 30), ("bfloat16", 160, 15)]
)
def test_mxfp4_over_two_ranks(zoo: ModelZoo, tmp_path: Path, dtype: str, inner: int, num_kept: int) -> None:
    """In 16 bits experts are kept in int8 in groups of 32, but for down_proj where a rank's share ends in a group."""
    made = make_mxfp4(zoo.base("gpt_oss", dtype=dtype, options={"intermediate_size": inner}), tmp_path)
    parameters = ["mlp.router.weight", "experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=parameters, task_type="CAUSAL_LM"
    )
    paths = {"LoRA": zoo.adapter(made.plain, config, dtype=dtype)}
    names = (None, "LoRA")
    cases = [(name, zoo.fit_case(made.plain, paths.get(name or ""), num_tokens=NUM_TOKENS)) for name in names]
    with opened(made.quantized, 2, dtype=dtype, kv_cache_dtype="float32", **CHUNKS) as driver:
        kept = f"kept as {num_kept} linears in int8 in groups of 32" if num_kept else "kept as 39 linears in float32"
        assert f"MXFP4 checkpoint, {kept}" in driver.engine.info.form
        load(driver, paths)
        check(driver, cases, NUM_TOKENS)


def test_experts_that_ranks_cannot_share_are_refused(zoo: ModelZoo) -> None:
    base = zoo.base("qwen3_moe", options={"moe_intermediate_size": 49, "num_hidden_layers": 1})
    with pytest.raises(ModelConfigError, match="experts' intermediate size of the model is 49, which 2 ranks"):
        check_shares(ModelConfig.from_dir(base), 2, False)
