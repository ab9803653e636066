"""Quantised checkpoints and what else a load does: packed weights on disk, merged adapters, ranks, parts of models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from loraplex.config import LoRAConfig
from loraplex.distributed import own_rows
from loraplex.errors import ConfigError
from loraplex.kernels.ops import get_backend
from loraplex.models import packed_cache
from loraplex.models.config import ModelConfig
from loraplex.models.loader import Checkpoint, load_model
from loraplex.models.packed_cache import PackedCache
from tests.engine.driver import Driver
from tests.fixtures import ModelZoo
from tests.models.checkpoints.forms import CASES, Made, make
from tests.models.checkpoints.gguf_models import make_gguf
from tests.models.checkpoints.test_forms import HAS_NATIVE, decoder_of, logits_of
from tests.models.paged_runner import CPU
from tests.ranks.engines import SETTINGS, Asked, adapter_of, answers, kind_of, load, opened

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no native kernels are built")


def made_of(zoo: ModelZoo, to: Path, name: str, family: str = "llama") -> Made:
    if name == "GGUF":
        return make_gguf(zoo.base("llama"), to / "made", "llama", ("Q8_0", "Q4_0", "F16"))
    return make(zoo.base(family), to, CASES[name])


@needs_native
@pytest.mark.parametrize("name", ["W8A8", "AWQ", "GPTQ act-order", "GGUF"])
def test_a_second_start_maps_what_the_first_packed(
    zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    path = made_of(zoo, tmp_path / "m", name).quantized
    config, ops = ModelConfig.from_dir(path), get_backend("native", CPU)
    cache = PackedCache(tmp_path / "cache", path, ("bfloat16", "panels16.1"))
    first = load_model(path, config, torch.bfloat16, CPU, "auto", 0, ops, False)
    thread = cache.save_soon(first.weighted_layers())
    assert thread is not None
    thread.join()
    monkeypatch.setattr(Checkpoint, "load_into", None)  # the checkpoint is not read again
    again = load_model(path, config, torch.bfloat16, CPU, "auto", 0, ops, False, packed_cache=cache)
    assert torch.equal(logits_of(again), logits_of(first))
    assert again.weights_form == first.weights_form != ""


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_an_adapter_is_merged_into_the_numbers(zoo: ModelZoo, tmp_path: Path, kind: str) -> None:
    made = made_of(zoo, tmp_path, "AWQ")
    adapter = kind_of(zoo, made.plain, "DoRA") if kind == "DoRA" else adapter_of(zoo, made.plain, "q and v")
    said = []
    for path in (made.quantized, made.plain):
        driver = Driver(path, is_lora_on=False, **SETTINGS, merge_adapter=str(adapter))
        try:
            said.append(answers(driver, [Asked(None), Asked(None, 30)]))
        finally:
            driver.close()
    assert said[0] == said[1]


@needs_native
def test_what_a_merged_adapter_changes_is_not_kept(zoo: ModelZoo, tmp_path: Path) -> None:
    made = made_of(zoo, tmp_path, "AWQ")
    adapter = adapter_of(zoo, made.plain, "q and v")
    driver = Driver(made.quantized, is_lora_on=False, **SETTINGS, merge_adapter=str(adapter), dtype="bfloat16")
    try:
        words = "4 linears in its own int4 in groups of 32 with zero points, 4 linears in bfloat16"
        assert words in driver.engine.info.form
    finally:
        driver.close()


@needs_native
def test_no_dominant_adapter_is_merged_into_kept_integers(zoo: ModelZoo, tmp_path: Path) -> None:
    path = made_of(zoo, tmp_path, "W8A8").quantized
    lora = LoRAConfig(merge_dominant_adapter=True, disk_memory_bytes=0)
    with pytest.raises(ConfigError, match="merge_dominant_adapter needs base weights in floats"):
        Driver(path, lora, **SETTINGS, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "family"),
    [*((name, "llama") for name in ("W8A8", "GPTQ", "GGUF")), pytest.param("GPTQ", "phi3", marks=pytest.mark.slow)],
)
def test_two_ranks_say_what_one_says(zoo: ModelZoo, tmp_path: Path, name: str, family: str) -> None:
    """In float32, whose numbers are widened by each rank; DoRA divides by norms of the whole rows."""
    made = made_of(zoo, tmp_path, name, family)
    dora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    adapters = {"LoRA": adapter_of(zoo, made.plain, "all linears"), "DoRA": zoo.adapter(made.plain, dora)}
    asks = [Asked(each, 20 + 9 * shift, shift=shift) for shift, each in enumerate((None, *adapters))]
    said = []
    for size in (1, 2):
        with opened(made.quantized, size, dtype="float32") as driver:
            load(driver, adapters)
            said.append(answers(driver, asks))
    assert said[0] == said[1]


@needs_native
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(("name", "quantization"), [("W8A8", "int8"), ("GPTQ zeros", "int4")])
def test_two_ranks_keep_their_shares_of_integers(
    zoo: ModelZoo, tmp_path: Path, name: str, quantization: str, family: str
) -> None:
    """Of down_proj, which is cut by its 160 inputs, groups of 32 cannot be shared: that one is rounded again. phi3 has
    one tensor for q, k and v, and one for gate and up."""
    path = made_of(zoo, tmp_path, name, family).quantized
    with opened(path, 2, dtype="float32", quantization=quantization) as driver:
        words = "6 linears in its own int8" if quantization == "int8" else "4 linears in its own int4 in groups of 32"
        assert words in driver.engine.info.form
        model, plain = driver.engine._runner._model, decoder_of(path, "reference")
        for linear, whole in zip(model.linears, plain.linears, strict=True):
            if linear.is_kept and not linear.name.endswith("down_proj"):
                got = linear.ops.linear(torch.eye(linear.target.in_features), linear.weight)
                offset = 0
                for own, full in zip(linear.target.slices, whole.target.slices, strict=True):
                    rows = whole.weight[full.out_offset : full.out_offset + full.out_features]
                    want = torch.cat([rows[each] for each in own_rows(own, linear.target.shard)])
                    torch.testing.assert_close(
                        got[:, offset : offset + own.out_features], want.t(), rtol=1e-6, atol=1e-9
                    )
                    offset += own.out_features
        ones = torch.ones(2, 160), torch.ones(64, 2)
        norms = model.row_norms("model.layers.1.mlp.down_proj", *ones, 0.01)
        want = plain.row_norms("model.layers.1.mlp.down_proj", *ones, 0.01)
        torch.testing.assert_close(norms, want, rtol=1e-5 if quantization == "int8" else 0.1, atol=0)


def test_rows_of_a_quantised_embedding_are_its_numbers(zoo: ModelZoo, tmp_path: Path) -> None:
    made, tokens = made_of(zoo, tmp_path, "GGUF"), torch.tensor([0, 17, 8191])
    got = decoder_of(made.quantized, "torch").base_rows("lm_head", tokens)
    want = load_file(made.plain / "model.safetensors")["model.embed_tokens.weight"][tokens]
    assert got is not None
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
