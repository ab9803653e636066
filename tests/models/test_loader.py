"""Loading: every weight once and in its place, every mismatch named; dummy weights; where a model's name leads."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.errors import ConfigError, ModelNotFoundError, ModelWeightError
from loraplex.kernels.ops import get_backend
from loraplex.layers.linear import ParallelLinear
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import Checkpoint, DummyWeights, load_model
from loraplex.models.source import resolve_model
from tests.fixtures import ModelZoo
from tests.models.paged_runner import CPU, PagedRunner, load_decoder


def values(decoder: Decoder) -> dict[str, Tensor]:
    return {part.name: part.destination for part in decoder.weight_parts()}


def copy_model(base: Path, to: Path) -> tuple[Path, dict[str, Tensor]]:
    """A copy that may be written to, and its tensors."""
    shutil.copytree(base, to)
    return to, load_file(to / "model.safetensors")


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_weight_is_the_checkpoints(zoo: ModelZoo, family: str, dtype: torch.dtype) -> None:
    base = zoo.base(family)
    got, want = values(load_decoder(base, backend="reference", dtype=dtype)), load_file(base / "model.safetensors")
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == dtype
        assert torch.equal(got[name], tensor.to(dtype)), name


def test_slices_of_a_fused_weight_share_one_tensor(zoo: ModelZoo) -> None:
    """Nothing is read to be concatenated."""
    got = values(load_decoder(zoo.base("qwen2"), backend="reference"))
    for modules in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        parts = [got[f"model.layers.1.{module}.weight"] for module in modules]
        for before, after in itertools.pairwise(parts):
            assert after.data_ptr() == before.data_ptr() + before.nbytes
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_the_model_outlives_its_file(zoo: ModelZoo, tmp_path: Path) -> None:
    """Weights are the process's own: overwriting the file changes nothing."""
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    decoder = load_decoder(path)
    before = PagedRunner(decoder).step([("a", [5, 6, 7])])[0]
    (path / "model.safetensors").write_bytes(b"\0" * (path / "model.safetensors").stat().st_size)
    assert torch.equal(PagedRunner(decoder).step([("a", [5, 6, 7])])[0], before)
    assert tensors


def test_sharded_files_and_progress(zoo: ModelZoo) -> None:
    base = zoo.base("qwen3", options={"max_shard_size": "500KB"})
    assert len(list(base.glob("model-*.safetensors"))) > 1
    calls: list[tuple[int, int]] = []
    config, ops = ModelConfig.from_dir(base), get_backend("reference", CPU)
    decoder = load_model(base, config, torch.float32, CPU, "auto", 0, ops, False, lambda *call: calls.append(call))
    whole = values(load_decoder(zoo.base("qwen3"), backend="reference"))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in values(decoder).items())
    total = sum(tensor.nbytes for tensor in whole.values())
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)


def test_missing_and_unused_weights_are_named_together(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    tensors["model.layers.0.self_attn.q_proj.lora"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save(path, tensors)
    with pytest.raises(ModelWeightError) as e:
        load_decoder(path)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(e.value)
    assert "1 not used by the model: model.layers.0.self_attn.q_proj.lora" in str(e.value)


def test_a_bias_that_the_config_does_not_have_is_unused(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    save(path, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelWeightError, match=r"not used by the model: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_decoder(path)


def test_many_missing_weights_make_a_short_message(zoo: ModelZoo, tmp_path: Path) -> None:
    path, _ = copy_model(zoo.base("llama"), tmp_path / "m")
    save(path, {"model.norm.weight": torch.ones(64)})
    with pytest.raises(ModelWeightError, match=r"19 missing: model\.embed_tokens\.weight, .* and 11 more$"):
        load_decoder(path)


def test_a_wrong_shape_names_both(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    save(path, tensors | {"model.layers.0.self_attn.k_proj.weight": torch.zeros(48, 64)})
    with pytest.raises(ModelWeightError, match=r"k_proj\.weight has shape \(48, 64\).*\(32, 64\)"):
        load_decoder(path)


def test_buffers_of_old_checkpoints_are_ignored(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    save(path, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load_decoder(path)


def test_a_tied_head_may_be_there_when_it_is_the_embedding(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    head = tensors["model.embed_tokens.weight"].clone()
    save(path, tensors | {"lm_head.weight": head})
    load_decoder(path)
    save(path, tensors | {"lm_head.weight": head + 1})
    with pytest.raises(ModelWeightError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        load_decoder(path)


def test_bad_files_are_named(zoo: ModelZoo, tmp_path: Path) -> None:
    path, _ = copy_model(zoo.base("llama"), tmp_path / "m")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        ModelWeightError, match=r"model\.safetensors cannot be read as safetensors, it may be truncated"
    ):
        load_decoder(path)
    weights.unlink()
    with pytest.raises(ModelWeightError, match=r"has no model\.safetensors and no model\.safetensors\.index\.json$"):
        load_decoder(path)
    (path / "pytorch_model.bin").touch()
    with pytest.raises(ModelWeightError, match=r"pytorch_model\.bin is not read, convert it to safetensors"):
        load_decoder(path)


def test_a_bad_index_is_named(zoo: ModelZoo, tmp_path: Path) -> None:
    path, tensors = copy_model(zoo.base("llama"), tmp_path / "m")
    (path / "model.safetensors").rename(path / "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors") | {"x": "model-2.safetensors"}})
    )
    with pytest.raises(ModelWeightError, match=r"model-2\.safetensors is named by .*index\.json but is not there"):
        load_decoder(path)
    for content in ("{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../a"}}'):
        index.write_text(content)
        with pytest.raises(ModelWeightError, match=r"index\.json"):
            load_decoder(path)


# --------------------------------------------------------------------------------------------------------------- dummy


def load_dummy(zoo: ModelZoo, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    config = ModelConfig.from_dir(zoo.base("qwen2"))
    return load_model("nowhere", config, dtype, CPU, "dummy", seed, get_backend("reference", CPU), False)


def test_dummy_weights_come_from_the_seed(zoo: ModelZoo) -> None:
    one, same, other = (values(load_dummy(zoo, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all("norm" in name or not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_give_finite_logits_of_many_answers(zoo: ModelZoo, dtype: torch.dtype) -> None:
    logits = PagedRunner(load_dummy(zoo, 0, dtype)).step([("a", list(range(3, 43)))])[0]
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
    assert len(logits.argmax(-1).unique()) > 20


def test_dummy_matrices_have_their_deviation_and_no_equal_rows(zoo: ModelZoo) -> None:
    weights = values(load_dummy(zoo, 0))
    for name, deviation in (("model.layers.0.mlp.down_proj.weight", 160**-0.5), ("model.embed_tokens.weight", 0.5 / 8)):
        assert weights[name].std().item() == pytest.approx(deviation, rel=0.05)
        assert len(weights[name].unique(dim=0)) == len(weights[name])


def test_an_unknown_load_format_is_refused(zoo: ModelZoo) -> None:
    base = zoo.base("llama")
    with pytest.raises(ConfigError, match="load_format must be auto or dummy, got 'gguf'"):
        load_model(
            base, ModelConfig.from_dir(base), torch.float32, CPU, "gguf", 0, get_backend("reference", CPU), False
        )


# ------------------------------------------------------------------------------------------------------------ the place


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")


def test_places_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="is a file that is no GGUF; give the directory"):
        resolve_model(str(tmp_path / "file"))
    for name in (str(tmp_path / "none"), "./none", "a/b/c", "~/none-such"):
        with pytest.raises(ModelNotFoundError, match="there is no such directory"):
            resolve_model(name)


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str | None]] = []

    def snapshot_download(
        name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        calls.append((name, revision))
        assert "*.safetensors" in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/name", "main") == tmp_path
    assert calls == [("org/name", "main")]


def test_what_the_hub_does_not_give_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"'org/none' at revision 'v1' is no local directory and the hub"):
        resolve_model("org/none", "v1")
    with pytest.raises(ModelNotFoundError, match="'bad name!'"):
        resolve_model("bad name!")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_one_layer_at_a_time_is_in_memory_as_it_came(zoo: ModelZoo, load_format: str, quantization: str) -> None:
    """At every moment of a load: linears are shapes, or quantised, but for one."""
    base = zoo.base("qwen2")
    config = ModelConfig.from_dir(base)
    model = Decoder(config, get_backend("reference", CPU), torch.float32, CPU, True, quantization=quantization)
    layers = model.weighted_layers()
    linears = [layer for layer in layers if isinstance(layer, ParallelLinear)]
    assert all(linear.weight.is_meta for linear in linears)
    seen = set()

    def watch(_done: int, _total: int) -> None:
        weights = [linear.weight for linear in linears if isinstance(linear.weight, Tensor)]
        seen.add(sum(not weight.is_meta for weight in weights))

    source = Checkpoint(base, config) if load_format == "auto" else DummyWeights(0, CPU)
    source.load_into(layers, watch)
    assert seen == {0, 1}
    assert not any(isinstance(linear.weight, Tensor) for linear in linears)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_checkpoint_with_one_tensor_for_all_experts_of_a_layer(zoo: ModelZoo, tmp_path: Path, family: str) -> None:
    """As transformers saves it when it is asked to keep its own layout."""
    base = zoo.base(family)
    model: Any = zoo.oracle(base).model
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") and len(tensor.shape) == 3 for name, tensor in names.items())
    got, want = (values(load_decoder(path, backend="reference")) for path in (tmp_path, base))
    assert set(got) == set(want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    odd = {
        name: tensor[..., :-1].contiguous() if "experts.down_proj" in name else tensor for name, tensor in names.items()
    }
    save_file(odd, tmp_path / "model.safetensors")
    with pytest.raises(ModelWeightError, match=r"experts\.0\.(down_proj|w2)\.weight has shape"):
        load_decoder(tmp_path, backend="reference")
