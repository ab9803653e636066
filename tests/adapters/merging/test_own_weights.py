"""Embeddings, heads, norms and whole weights: merged into the base, and exported, as peft has them; the rest is refused
by name, so that nothing is left out in silence."""

from __future__ import annotations

import copy
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.merging.base import MergedAdapter
from loraplex.adapters.merging.export import export_directory
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterValidationError
from tests.adapters.peft_oracle import edit_config, load, read_config, read_tensors, write_tensors
from tests.fixtures import OWN_OPTIONS, VOCAB_SIZE, ModelZoo
from tests.models.paged_runner import load_decoder

pytestmark = pytest.mark.slow

LIMITS = LoRAConfig(lora_extra_vocab_size=256)
OTHER_VOCABULARY = [name for name, (_, _, vocab_size) in OWN_OPTIONS.items() if vocab_size not in (None, VOCAB_SIZE)]
MERGED = [name for name in OWN_OPTIONS if name not in OTHER_VOCABULARY]
TIED_MERGED = {
    "LoRA of both, tied",
    "saved, tied",
    "saved norms",
    "saved linears",
    "a saved linear, all biases",
    "a saved MLP",
    "trained tokens",
    "TrainableTokens",
    "LN tuning",
}
"""Of a base whose head is tied: what changes neither end, or both alike."""


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(160).view(4, 40) * 53 % (VOCAB_SIZE - 200)
    ids[0, ::2] = torch.arange(7990, 7890, -5)  # tokens that are trained
    with torch.inference_mode():
        return model(input_ids=ids).logits


def by_peft(zoo: ModelZoo, base: Path, path: Path, vocab_size: int | None = None) -> torch.nn.Module:
    """Not merged: a merge of peft into tied weights changes both ends."""
    model = copy.deepcopy(zoo.oracle(base).model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if vocab_size is not None:
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        return peft.PeftModel.from_pretrained(model, str(path)).eval()


def merged(zoo: ModelZoo, base: Path, adapter: MergedAdapter) -> torch.nn.Module:
    model = copy.deepcopy(zoo.oracle(base).model)
    model.load_state_dict({name: adapter.changed(name, tensor) for name, tensor in model.state_dict().items()})
    return model


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", MERGED)
def test_the_merged_base_answers_as_the_adapter_unmerged(zoo: ModelZoo, name: str, is_tied: bool) -> None:
    base = zoo.base("llama", options={"tie_word_embeddings": is_tied})
    path, targets = zoo.own_adapter(base, name), load_decoder(base, enable_lora=True).lora_targets()
    if is_tied and name not in TIED_MERGED:
        with pytest.raises(AdapterValidationError, match=r"is tied to model\.embed_tokens"):
            MergedAdapter.read(str(path), targets)
        return
    found = logits_of(merged(zoo, base, MergedAdapter.read(str(path), targets)))
    wanted, plain = logits_of(by_peft(zoo, base, path)), logits_of(zoo.oracle(base).model)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert (wanted - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", OTHER_VOCABULARY)
def test_a_vocabulary_of_its_own_is_not_merged(zoo: ModelZoo, name: str) -> None:
    base = zoo.base("llama")
    with pytest.raises(AdapterValidationError, match="a vocabulary of its own"):
        MergedAdapter.read(str(zoo.own_adapter(base, name)), load_decoder(base, enable_lora=True).lora_targets())


@pytest.mark.parametrize("name", ["LoRA of the embedding", "LoRA of the head"])
def test_a_lora_of_a_tied_end_alone_is_not_merged(zoo: ModelZoo, tmp_path: Path, name: str) -> None:
    """Saved without the base's weights, as with save_embedding_layers=False: a tied head has no weight to change."""
    base = zoo.base("llama", options={"tie_word_embeddings": True})
    path = without_weights(zoo.own_adapter(base, name), tmp_path)
    with pytest.raises(AdapterValidationError, match=r"lm_head is tied to model\.embed_tokens"):
        MergedAdapter.read(str(path), load_decoder(base, enable_lora=True).lora_targets())


def without_weights(path: Path, folder: Path) -> Path:
    copied = Path(shutil.copytree(path, folder / path.name))
    file = copied / "adapter_model.safetensors"
    save_file(
        {key: tensor for key, tensor in load_file(file).items() if "lora_" in key or "hada_" in key},
        file,
        {"format": "pt"},
    )
    return copied


# ------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_exports_are_bit_for_bit_what_was_filed(zoo: ModelZoo, tmp_path: Path, name: str, is_tied: bool) -> None:
    base = zoo.base("llama", options={"tie_word_embeddings": is_tied})
    path = zoo.own_adapter(base, name)
    if "AdaLoRA" in name or "LoHa" in name:
        with pytest.raises(AdapterValidationError, match="weights of its own cannot be written as a plain LoRA"):
            export_directory(str(path), tmp_path / "copy", 2**30)
        path = without_weights(path, tmp_path)
    made = export_directory(str(path), tmp_path / "copy", 2**30)
    if name not in ("AdaLoRA of the head", "LoHa of the head"):
        found, wanted = read_tensors(tmp_path / "copy"), read_tensors(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
        assert read_config(tmp_path / "copy") == read_config(path)
        assert made.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    vocab_size = OWN_OPTIONS[name][2]
    torch.testing.assert_close(
        logits_of(by_peft(zoo, base, tmp_path / "copy", vocab_size)),
        logits_of(by_peft(zoo, base, path, vocab_size)),
        atol=1e-4,
        rtol=1e-4,
    )
    load(tmp_path / "copy", tuple(load_decoder(base, enable_lora=True).lora_targets()), LIMITS)


def test_tokens_of_both_ends_of_a_tied_base_are_exported(zoo: ModelZoo, tmp_path: Path) -> None:
    """peft writes one tensor for both."""
    base = zoo.base("llama", options={"tie_word_embeddings": True})
    path = tmp_path / "both"
    shutil.copytree(zoo.own_adapter(base, "trained tokens"), path)
    ids = read_config(path)["trainable_token_indices"]
    edit_config(path, trainable_token_indices={"lm_head": ids, "embed_tokens": ids})
    load(path, tuple(load_decoder(base, enable_lora=True).lora_targets()), LIMITS)
    export_directory(str(path), tmp_path / "copy", 2**30)
    assert read_tensors(tmp_path / "copy").keys() == read_tensors(path).keys()


def test_tokens_of_two_ends_that_are_not_tied_are_exported(zoo: ModelZoo, tmp_path: Path) -> None:
    base = zoo.base("llama", options={"tie_word_embeddings": False})
    path = tmp_path / "both"
    shutil.copytree(zoo.own_adapter(base, "TrainableTokens"), path)
    (name,) = read_tensors(path)
    head = "base_model.model.lm_head.trainable_tokens_delta"
    write_tensors(path, {**read_tensors(path), head: 2 * read_tensors(path)[name]})
    edit_config(path, target_modules=["embed_tokens", "lm_head"])
    export_directory(str(path), tmp_path / "copy", 2**30)
    assert torch.equal(read_tensors(tmp_path / "copy")[head], read_tensors(path)[head])
