"""What an adapter has of its own, read as peft reads it: rows of tokens, whole weights, LoRA of embedding and head."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraTarget
from loraplex.errors import AdapterBaseMismatchError, AdapterError, AdapterFileFormatError, AdapterValidationError
from tests.adapters.peft_oracle import (
    LIMITS,
    PeftAdapter,
    all_targets_of,
    edit_config,
    load,
    read_tensors,
    targets_of,
    write_tensors,
)
from tests.fixtures import OWN_OPTIONS, VOCAB_SIZE, ModelZoo, Oracle

OPTIONS = {"hidden_size": 32, "intermediate_size": 48}
PROMPT = [5, 4005, 7995, 4000, 37, 8, 8000, 1203]


@torch.no_grad()
def applied(model: Any, adapter: LoRAModel) -> Any:
    """The base model with what the adapter says put into its weights: LoRALayerWeights, spelled out."""
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    if adapter.vocab_size is not None:
        model.config.tie_word_embeddings = False
        model.resize_token_embeddings(adapter.vocab_size, mean_resizing=False)
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight[VOCAB_SIZE:].fill_(float("nan"))
    for name, layer in adapter.layers.items():
        module = model.get_submodule(name)
        if layer.weight is not None and layer.row_ids is not None:
            module.weight[layer.row_ids] = layer.weight.float()
        elif layer.weight is not None:
            module.weight.copy_(layer.weight.float())
        if layer.lora_a is not None and layer.lora_b is not None:
            delta = layer.scaling * layer.lora_b.float() @ layer.lora_a.float()
            module.weight += delta.T if name.endswith("embed_tokens") else delta
        if layer.bias is not None:
            module.bias.copy_(layer.bias.float())
        if layer.gain is not None:
            module.weight *= layer.gain[:, None]
            if module.bias is not None:
                module.bias *= layer.gain
    return model


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_what_is_read_computes_what_peft_computes(zoo: ModelZoo, name: str, family: str, is_tied: bool) -> None:
    base = zoo.base(family, options={**OPTIONS, "tie_word_embeddings": is_tied})
    path = zoo.own_adapter(base, name)
    model: Any = zoo.oracle(base).model
    adapter = load(path, all_targets_of(model))
    expected = zoo.oracle(base, path).logits(PROMPT)
    assert expected.shape[1] == (adapter.vocab_size or model.config.vocab_size)
    found = Oracle(applied(model, adapter)).logits(PROMPT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[:, :8000], zoo.oracle(base).logits(PROMPT)[:, :8000], atol=0.1)


# ------------------------------------------------------------------------------------------------------------- refusals

EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def changed(zoo: ModelZoo, tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The reasons why an adapter of OWN_OPTIONS, changed, is refused; of a small base."""

    def reasons(
        name: str,
        change: Callable[[Tensors], object] = lambda tensors: None,
        config: LoRAConfig = LIMITS,
        targets: Callable[[Any], tuple[LoraTarget, ...]] = all_targets_of,
        is_tied: bool = True,
        **fields: Any,
    ) -> tuple[str, ...]:
        base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": is_tied})
        shutil.copytree(zoo.own_adapter(base, name), tmp_path / "sql")
        tensors = read_tensors(tmp_path / "sql")
        change(tensors)
        write_tensors(tmp_path / "sql", tensors)
        edit_config(tmp_path / "sql", **fields)
        try:
            load(tmp_path / "sql", targets(zoo.oracle(base).model), config)
        except AdapterValidationError as error:
            return error.reasons
        except AdapterBaseMismatchError as error:
            return (error.message,)
        finally:
            shutil.rmtree(tmp_path / "sql")
        return ()

    return reasons


def resized(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def dropped(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def scaled(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].mul_(2)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("saved head", dropped(f"{HEAD}.weight"), "lm_head: the file has no weight, which modules_to_save calls for"),
        ("LN tuning", dropped("base_model.model.model.norm.ln_tuning_layers.weight"), "model.norm: the file has no"),
        ("saved head", resized(f"{HEAD}.weight", 8192, 33), "[8192, 33], expected [8192, 32]"),
        ("saved head", resized(f"{HEAD}.weight", 8192), "has shape [8192], expected [8192, 32]"),
        ("saved norms", resized("base_model.model.model.norm.weight", 64), "[64], expected [32]"),
        ("saved norms", resized("base_model.model.model.norm.weight", 1, 32), "[1, 32], expected [32]"),
        ("saved head", resized(f"{HEAD}.weight", 9000, 32), "it is for a vocabulary of 9000 tokens"),
        (
            "saved head",
            resized(f"{HEAD}.weight", 8193, 32),
            "embed_tokens: the file has no rows of it for",
        ),
        ("saved embedding and head", resized(f"{HEAD}.weight", 8193, 32), "vocabularies of 8192"),
        ("saved norms", resized(f"{HEAD}.modules_to_save.weight", 8192, 32), "calls for no modules_to_save.weight"),
        ("saved norms", resized(f"{EMBED}.token_adapter.trainable_tokens_delta", 3, 32), "calls for no trainable_tok"),
        ("trained tokens", resized(f"{EMBED}.token_adapter.trainable_tokens_delta", 3, 32), "[3, 32], expected [1600"),
        ("trained tokens", dropped(f"{EMBED}.token_adapter.trainable_tokens_delta"), "has no trainable_tokens_delta"),
        ("LoRA of the embedding", resized(f"{EMBED}.lora_embedding_A", 5, 8192), "[5, 8192], expected [4, 8192]"),
        ("LoRA of the embedding", dropped(f"{EMBED}.lora_embedding_B"), "the file has no lora_embedding_B"),
        ("LoRA of the embedding", resized(f"{EMBED}.lora_A.weight", 4, 32), "has lora_A.weight but"),
        ("LoRA of the head", dropped(f"{HEAD}.lora_B.weight"), "lm_head: the file has no lora_B.weight"),
        ("LoRA of both, tied", scaled(f"{HEAD}.lora_A.weight"), "lora_embedding_B and lm_head.lora_A.weight differ"),
        ("saved, tied", scaled(f"{HEAD}.weight"), "embed_tokens.weight and lm_head.weight differ"),
        ("added tokens", scaled(f"{HEAD}.weight"), "embed_tokens.weight and lm_head.weight differ"),
        ("added tokens, saved", scaled(f"{HEAD}.modules_to_save.weight"), "lm_head.modules_to_save.weight differ"),
        (
            "added tokens, trained",
            scaled(f"{HEAD}.token_adapter.trainable_tokens_delta"),
            "lm_head.trainable_tokens_delta differ",
        ),
        ("saved linears", dropped("base_model.model.model.layers.1.self_attn.k_proj.bias"), "not its own bias"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    changed: Callable[..., tuple[str, ...]], name: str, change: Callable[[Tensors], object], words: str
) -> None:
    reasons = changed(name, change)
    assert any(words in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("saved head", {"modules_to_save": ["score"]}, "'score' names no module of the base model"),
        ("saved head", {"modules_to_save": ["lm_head", "x"]}, "'x' names no module of the base model"),
        ("saved head", {"modules_to_save": "lm_head"}, "must be a list of names"),
        ("saved head", {"modules_to_save": ["lm_.*"]}, "must be a list of names"),
        ("saved head", {"modules_to_save": None}, ""),  # peft takes it for a saved layer then
        ("saved norms", {"modules_to_save": None}, "model.norm.weight' is not used"),
        ("saved linears", {"modules_to_save": ["proj"]}, "modules_to_save and target_modules both name"),
        ("saved embedding", {"trainable_token_indices": [1]}, "modules_to_save and the trained tokens both name"),
        ("LoRA of the embedding", {"trainable_token_indices": [1]}, "target_modules and the trained tokens both name"),
        (
            "trained tokens, LoRA of the head",
            {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]}},
            "target_modules and the trained tokens both name 'lm_head'",
        ),
        ("LoRA of the embedding", {"use_dora": True}, "'model.embed_tokens': use_dora of it is not supported"),
        ("LoRA of the embedding", {"lora_bias": True}, "'model.embed_tokens': lora_bias of it is not supported"),
        ("LoRA of the head", {"use_dora": True}, "'lm_head': use_dora of it is not supported"),
        ("IA3 with a saved head", {"modules_to_save": None, "target_modules": ["lm_head"]}, "IA3 of it is not"),
        ("AdaLoRA of the head", {"target_modules": ["embed_tokens"]}, "ADALORA of it is not supported"),
        ("trained tokens", {"target_modules": ["q_proj", "model.norm"]}, "'model.norm' names no module"),
        ("trained tokens", {"trainable_token_indices": [1, 1]}, "each once"),
        ("trained tokens", {"trainable_token_indices": [-1]}, "none below 0"),
        ("trained tokens", {"trainable_token_indices": [2**31]}, "trainable_token_indices must list token ids"),
        ("trained tokens", {"trainable_token_indices": [True]}, "trainable_token_indices must list token ids"),
        ("trained tokens", {"trainable_token_indices": {"q_proj": [1]}}, "tokens can be trained of the embedding"),
        ("trained tokens", {"trainable_token_indices": {"wte": [1]}}, "'wte' names no module"),
        ("trained tokens", {"trainable_token_indices": {"tokens": [1], "embed_tokens": [1]}}, "2 times"),
        ("trained tokens", {"trainable_token_indices": [8192, 8194]}, "token 8192 is trained, but its vocabulary has"),
        ("trained tokens apart", {"ensure_weight_tying": True}, "with other tokens of lm_head"),
        ("TrainableTokens", {"token_indices": []}, "token_indices must list token ids"),
        ("TrainableTokens", {"target_modules": ["q_proj"]}, "tokens can be trained of the embedding"),
        ("added tokens", {"added_tokens_config": {"a": 1}}, "save_embedding_layers=True"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    changed: Callable[..., tuple[str, ...]], name: str, fields: dict[str, Any], words: str
) -> None:
    reasons = changed(name, **fields)
    assert any(words in reason for reason in reasons) if words else reasons == (), reasons


def test_added_tokens_are_bounded(changed: Callable[..., tuple[str, ...]]) -> None:
    assert changed("added tokens", config=LoRAConfig(lora_extra_vocab_size=200)) == ()
    (reason,) = changed("added tokens", config=LoRAConfig(lora_extra_vocab_size=199))
    assert "it is for a vocabulary of 8392 tokens, the base has 8192 and lora_extra_vocab_size allows 199" in reason
    assert changed("fewer tokens", config=LoRAConfig(lora_extra_vocab_size=0)) == ()


@pytest.mark.parametrize("is_tied", [True, False])
def test_added_tokens_need_rows_of_both_ends(changed: Callable[..., tuple[str, ...]], is_tied: bool) -> None:
    reasons = changed("added tokens", dropped(f"{HEAD}.weight"), is_tied=is_tied)
    assert reasons == () if is_tied else reasons[0].startswith("lm_head: the file has no rows of it for the 200 tokens")


def test_the_remedy_for_missing_rows_is_one(changed: Callable[..., tuple[str, ...]]) -> None:
    """Of an end that is a target peft saves the layer, and nothing of the other."""
    for module, targeted in ((HEAD, "embed_tokens"), (f"{EMBED}", "lm_head")):
        reasons = changed(
            "added tokens, LoRA of both",
            lambda tensors, module=module: [tensors.pop(each) for each in [*tensors] if each.startswith(module)],
            is_tied=False,
            target_modules=[targeted],
        )
        assert any("or with this one in modules_to_save" in reason for reason in reasons), reasons


def test_a_magnitude_of_the_embedding_is_refused_once(changed: Callable[..., tuple[str, ...]]) -> None:
    name = f"{EMBED}.lora_magnitude_vector"
    reasons = changed("LoRA of the embedding", resized(name, 8192), use_dora=True)
    assert any("use_dora of it is not supported" in reason for reason in reasons)
    assert not any("use_dora is not set" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda tensors: None, {"trainable_token_indices": [2**31 - 1]}),
        (resized(f"{EMBED}.lora_embedding_A", 0, 2**40), {}),
        (resized(f"{HEAD}.lora_B.weight", 2**40, 0), {}),
    ],
)
def test_a_number_alone_makes_no_vocabulary(
    changed: Callable[..., tuple[str, ...]], change: Callable[[Tensors], object], fields: dict[str, Any]
) -> None:
    """An id far beyond the base's, or the shape of a tensor without elements."""
    tracemalloc.start()
    try:
        assert changed("trained tokens", change, **fields)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_trained_tokens_may_be_all_that_is_added(zoo: ModelZoo, tmp_path: Path) -> None:
    """Of tied weights: the head has the same rows."""
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    shutil.copytree(zoo.own_adapter(base, "trained tokens"), tmp_path / "sql")
    ids = [VOCAB_SIZE + 1, *range(1598), VOCAB_SIZE]
    edit_config(tmp_path / "sql", trainable_token_indices=ids)
    adapter = load(tmp_path / "sql", all_targets_of(zoo.oracle(base).model))
    assert adapter.vocab_size == VOCAB_SIZE + 2
    rows = read_tensors(tmp_path / "sql")[f"{EMBED}.token_adapter.trainable_tokens_delta"]
    for module in ("model.embed_tokens", "lm_head"):
        layer = adapter.layers[module]
        assert layer.weight is not None
        assert layer.row_ids is not None
        assert layer.row_ids.tolist() == sorted(ids)
        assert torch.equal(layer.weight[-2:], rows[[1599, 0]])


def test_a_base_without_such_targets_refuses_them_by_name(changed: Callable[..., tuple[str, ...]]) -> None:
    for name, words in (
        ("saved head", "modules_to_save: 'lm_head' names no module of the base model"),
        ("LN tuning", "names no module of the base model"),
        ("trained tokens", "trainable_token_indices: 'embed_tokens' names no module of the base model"),
        ("LoRA of the head", "target_modules names 'lm_head': adapters on embeddings and the output layer are not"),
        ("added tokens", "no linear 'lm_head'"),
    ):
        reasons = changed(name, targets=targets_of)
        assert any(words in reason for reason in reasons), reasons


def test_biases_of_saved_linears_are_biases(changed: Callable[..., tuple[str, ...]]) -> None:
    assert "bias_enabled is off" in changed("saved linears", config=LoRAConfig(bias_enabled=False))[0]


@pytest.mark.parametrize("file", ["new_embeddings.safetensors", "new_embeddings.bin"])
def test_the_old_form_of_added_tokens_is_refused(adapter: PeftAdapter, file: str) -> None:
    (adapter.path / file).write_bytes(b"")
    with pytest.raises(AdapterFileFormatError, match=rf"{file} is not read; .*save_embedding_layers"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_keep_their_bits_and_ids_their_dtype(zoo: ModelZoo, dtype: str) -> None:
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    path = zoo.own_adapter(base, "trained tokens", dtype=dtype)
    targets = all_targets_of(zoo.oracle(base).model)
    rows = read_tensors(path)[f"{EMBED}.token_adapter.trainable_tokens_delta"]
    for lora_dtype in ("auto", "bfloat16"):
        layer = load(path, targets, LoRAConfig(lora_dtype=lora_dtype)).layers["lm_head"]
        assert layer.weight is not None
        assert layer.row_ids is not None
        assert layer.row_ids.dtype is torch.int64
        assert torch.equal(layer.weight, rows.flip(0) if lora_dtype == "auto" else rows.flip(0).bfloat16())


def test_the_digest_knows_what_the_rows_are_of(zoo: ModelZoo, tmp_path: Path) -> None:
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    path, targets = zoo.own_adapter(base, "trained tokens"), all_targets_of(zoo.oracle(base).model)
    shutil.copytree(path, tmp_path / "sql")
    edit_config(tmp_path / "sql", trainable_token_indices=list(range(1600)))
    assert load(tmp_path / "sql", targets).adapter_digest != load(path, targets).adapter_digest


def test_a_giant_of_its_own_is_refused_before_it_is_read(zoo: ModelZoo, tmp_path: Path) -> None:
    """A sparse file of some kilobytes that says it has gigabytes."""
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    shutil.copytree(zoo.own_adapter(base, "saved head"), tmp_path / "sql")
    shape = [2**24, 32]
    header = json.dumps({f"{HEAD}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**31]}}).encode()
    with (tmp_path / "sql" / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**31)
    with pytest.raises(AdapterError, match="vocabulary of 16777216 tokens"):
        load(tmp_path / "sql", all_targets_of(zoo.oracle(base).model))


# -------------------------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_inspect_takes_what_is_served(zoo: ModelZoo, name: str) -> None:
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    path = zoo.own_adapter(base, name)
    for targets in (None, all_targets_of(zoo.oracle(base).model)):
        assert inspect_adapter(path, targets).reasons == ()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "LoRA of both",
            [
                "has: A of a LoRA of the embedding, 131072 bytes in the file; a step reads a column for each token",
                "has: an adapter of the output layer, 131584 bytes in the file; a step reads all of it, for the rows",
                "has: the output layer as it was saved, 1048576 bytes in the file; a step reads at most all of it",
                "vocabulary: 8192 tokens, the base has 8192",
            ],
        ),
        (
            "saved linears",
            ["has: own weights of linears of 5 modules, 20480 bytes in the file; a step reads all, beside the base's"],
        ),
        (
            "LN tuning",
            ["kind: LN_TUNING, served", "has: own weights of norms of 5 modules, 640 bytes in the file; a step"],
        ),
        (
            "TrainableTokens",
            [
                "has: trained tokens of the embedding, 204800 bytes in the file; a step reads a row for each token",
                "has: trained tokens of the output layer, 204800 bytes in the file; a step reads all of them, for the",
            ],
        ),
        (
            "added tokens, saved",
            [
                "has: an embedding of its own, 1074176 bytes in the file; a step reads a row for each token",
                "has: the embedding once more, 1074176 bytes in the file; a step reads none of it",
                "has: a layer as it was before training of 2 modules, 2148352 bytes in the file; a step reads none",
                "vocabulary: 8392 tokens, the base has 8192",
            ],
        ),
    ],
)
def test_inspect_says_what_each_part_is_and_costs(zoo: ModelZoo, name: str, lines: list[str]) -> None:
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": True})
    text = inspect_adapter(zoo.own_adapter(base, name), all_targets_of(zoo.oracle(base).model)).describe()
    for line in lines:
        assert f"\n  {line}" in text


@pytest.mark.parametrize(
    "name", [f"{EMBED[:-13]}.norm.weight", f"{HEAD}.modules_to_save.weight", f"{EMBED}.trainable_tokens_delta"]
)
def test_inspect_refuses_what_no_field_calls_for(adapter: PeftAdapter, name: str) -> None:
    """Without a base, too."""
    write_tensors(adapter.path, {**read_tensors(adapter.path), name: torch.zeros(64, 32)})
    assert any(name in reason for reason in inspect_adapter(adapter.path).reasons)


def test_inspect_says_why_without_a_base(adapter: PeftAdapter) -> None:
    tensors = read_tensors(adapter.path)
    tensors[f"{EMBED}.lora_embedding_A"] = torch.zeros(5, 64)
    write_tensors(adapter.path, tensors)
    reasons = inspect_adapter(adapter.path).reasons
    assert any("has no lora_embedding_B" in reason for reason in reasons), reasons


# -------------------------------------------------------------------------------------------------------------- mutants

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    [],
    {},
    "lm_head",
    ["lm_head"],
    ["embed_tokens"],
    ["norm"],
    ["q_proj"],
    [3, 1],
)
VALUES += (
    [8192],
    [8193],
    [[]],
    {"lm_head": [1]},
    {"embed_tokens": [9], "lm_head": [9]},
    {"": [1]},
    "LORA",
    "LN_TUNING",
)
FIELDS = ("peft_type", "target_modules", "exclude_modules", "modules_to_save", "trainable_token_indices")
FIELDS += ("token_indices", "ensure_weight_tying", "use_dora", "bias", "lora_bias", "r")
PARTS_OF_ITS_OWN = ("weight", "base_layer.weight", "original_module.weight", "modules_to_save.weight", "bias")
PARTS_OF_ITS_OWN += ("token_adapter.trainable_tokens_delta", "lora_embedding_A", "lora_embedding_B", "lora_A.weight")
SHAPES = ((), (0,), (32,), (1, 32), (4, 8192), (32, 4), (8192, 32), (8193, 32), (9000, 32), (2, 2, 2), (0, 32))


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutant_is_an_adapter_or_refused(data: st.DataObject, zoo: ModelZoo) -> None:
    """By `adapter inspect` as by a load; what is loaded is of the base's shapes, and rows are of the vocabulary."""
    base = zoo.base("qwen2", options={**OPTIONS, "tie_word_embeddings": data.draw(st.booleans())})
    targets = all_targets_of(zoo.oracle(base).model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(
            shutil.copytree(zoo.own_adapter(base, data.draw(st.sampled_from(sorted(OWN_OPTIONS)))), f"{folder}/a")
        )
        edit_config(path, **data.draw(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=2)))
        tensors = read_tensors(path)
        for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
            tensor = tensors.pop(name)
            how = data.draw(st.sampled_from(["drop", "rename", "reshape", "change"]))
            if how == "rename":
                module = data.draw(st.sampled_from((EMBED, HEAD, f"{EMBED[:-13]}.norm", name.rpartition(".")[0])))
                tensors[f"{module}.{data.draw(st.sampled_from(PARTS_OF_ITS_OWN))}"] = tensor
            elif how == "reshape":
                tensors[name] = torch.ones(data.draw(st.sampled_from(SHAPES)))
            elif how == "change":
                tensors[name] = tensor + 1
        write_tensors(path, tensors)
        try:
            adapter = load(path, targets)
        except AdapterError:
            assert not inspect_adapter(path, targets).is_honoured
            return
        assert inspect_adapter(path, targets).is_honoured
        assert_fits(adapter, targets)


def assert_fits(adapter: LoRAModel, targets: tuple[LoraTarget, ...]) -> None:
    vocab_size = adapter.vocab_size or VOCAB_SIZE
    assert 0 < vocab_size <= VOCAB_SIZE + LIMITS.lora_extra_vocab_size
    sizes = {
        part.module_name: (part.full_out_features, t.full_in_features, t.kind) for t in targets for part in t.slices
    }
    for layer in adapter:
        out, width, kind = sizes[layer.module_name]
        out, width = vocab_size if kind == "head" else out, vocab_size if kind == "embedding" else width
        whole = {"norm": (out,), "embedding": (width, out)}.get(kind, (out, width))
        expected = {"lora_a": (layer.rank, width), "lora_b": (out, layer.rank), "weight": whole, "input_gain": (width,)}
        expected |= dict.fromkeys(("magnitude", "gain", "bias", "lora_bias"), (out,))
        if layer.row_ids is not None:
            ids = layer.row_ids.tolist()
            assert ids == sorted(set(ids))
            assert 0 <= ids[0] <= ids[-1] < vocab_size
            expected |= {"row_ids": (len(ids),), "weight": (len(ids), whole[1])}
        assert {field: tuple(tensor.shape) for field, tensor in layer.tensors.items()}.items() <= expected.items()
        assert layer.tensors


ROWS_BEFORE = (
    "a weight of its own would change the rows before the invocation; save it with save_embedding_layers=False"
)


@pytest.mark.parametrize("name", ["LoRA of both", "added tokens"])
def test_an_alora_has_nothing_but_deltas_of_linears(changed: Callable[..., tuple[str, ...]], name: str) -> None:
    """Layers that peft saved beside a target, or because tokens were added, would count for rows before, too."""
    assert changed(name) == ()
    named = "target_modules names {!r}: alora_invocation_tokens of it is not supported; train a LoRA of it"
    expected = [named.format(module) for module in ("lm_head", "model.embed_tokens") if name == "LoRA of both"]
    expected += [f"{module}: {ROWS_BEFORE}" for module in ("lm_head", "model.embed_tokens")]
    assert list(changed(name, alora_invocation_tokens=[5, 6])) == expected
