"""Files of other kinds than LoRA: one adapter however it is filed; refused with every reason, before it costs much."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters import conversion, validation, weights
from loraplex.adapters.fields import TABLES
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.kinds import PARTS, Kind
from loraplex.adapters.validation import TensorCheck
from loraplex.adapters.weights import CheckedReader, LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LoraSlice, LoraTarget
from loraplex.errors import AdapterBaseMismatchError, AdapterError, AdapterLoadError, AdapterValidationError
from tests.adapters.peft_oracle import (
    edit_config,
    load,
    make_adapter,
    read_tensors,
    save_kind,
    shard,
    to_bin,
    write_tensors,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN = "base_model.model.model.layers.0.mlp.down_proj"
TARGETS = ["q_proj", "down_proj"]
LIMITS = LoRAConfig()

CONFIGS: dict[str, Callable[[], peft.PeftConfig]] = {
    "dora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_modules=TARGETS, total_step=10),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=2, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=3, target_modules=TARGETS),
}


@pytest.fixture(scope="session")
def saved_kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[LoraTarget, ...]]:
    root = tmp_path_factory.mktemp("kinds")
    for name, config in CONFIGS.items():
        targets = save_kind(root / name / "sql", config())
    return root, targets


class Saved:
    """Copies of adapters of every kind."""

    def __init__(self, root: Path, targets: tuple[LoraTarget, ...], own: Path) -> None:
        self.root, self.targets, self._own = root, targets, own

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.root / name / "sql", self._own / name / "sql"))

    def refused(self, path: Path, config: LoRAConfig = LIMITS) -> tuple[str, ...]:
        with pytest.raises(AdapterValidationError) as caught:
            load(path, self.targets, config)
        return caught.value.reasons


@pytest.fixture
def saved(saved_kinds: tuple[Path, tuple[LoraTarget, ...]], tmp_path: Path) -> Saved:
    return Saved(*saved_kinds, tmp_path)


# ------------------------------------------------------------------------------------------------- however it is filed


def content(model: LoRAModel) -> list[tuple[object, ...]]:
    return [(layer.module_name, f, t.tolist()) for layer in model for f, t in layer.tensors.items()]


@pytest.mark.parametrize("name", CONFIGS)
def test_prefixes_shards_and_bin_are_one_adapter(name: str, saved: Saved, tmp_path: Path) -> None:
    path = saved.copy(name)
    plain, tensors = load(path, saved.targets), read_tensors(path)
    changes: tuple[Callable[[str], str], ...] = (
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".weight", ".default.weight") if key.endswith(".weight") else f"{key}.default",
    )
    for rename in changes:
        write_tensors(path, {rename(key): tensor for key, tensor in tensors.items()})
        model = load(path, saved.targets)
        assert (model.adapter_digest, content(model)) == (plain.adapter_digest, content(plain))
    write_tensors(path, tensors)
    for number, convert in enumerate((lambda at: shard(at, 3), to_bin)):
        other = Path(shutil.copytree(path, tmp_path / str(number)))
        convert(other)
        model = load(other, saved.targets)
        assert (model.adapter_digest, content(model)) == (plain.adapter_digest, content(plain))


def test_a_magnitude_is_a_parameter_or_a_weight(saved: Saved) -> None:
    path = saved.copy("dora")
    plain, tensors = load(path, saved.targets), read_tensors(path)
    for suffix in (".weight", ".default", ".default.weight"):
        renamed = {key + suffix if key.endswith("_vector") else key: tensor for key, tensor in tensors.items()}
        write_tensors(path, renamed)
        assert load(path, saved.targets).adapter_digest == plain.adapter_digest


DIGESTS = {
    "dora": "62ed115864363d4907d56344a4b5c1c9a5be6a93a83537862085060e68e02186",
    "ia3": "59052fd14100ec30736c6774bcde80b0c8ceec98918b839051d6c3707fa83f62",
    "adalora": "c412d32451d53b5f92a40103021237044bd9b437a5f794b35a3f745635fb94af",
    "loha": "9b8e70925b7f07c8bfcae0516e94e04f5ed9596507d3518e9590fac1ece34393",
    "lokr": "9a321ced8786a794c2a586e714b40388a4349b5b9badd10180e173bca3a0bc10",
    "vera": "251fe701fc7bd500ff1fa0dda0602f1a45175714949dcbcda37b9d4203e48d29",
}
"""Of adapters whose numbers are all one half: they are written to disk."""


@pytest.mark.parametrize("name", CONFIGS)
def test_digests_are_stable_over_releases(name: str, saved: Saved) -> None:
    path = saved.copy(name)
    write_tensors(path, {key: torch.full_like(tensor, 0.5) for key, tensor in read_tensors(path).items()})
    assert load(path, saved.targets).adapter_digest == DIGESTS[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dora", {"lora_alpha": 3}),
        ("adalora", {"lora_alpha": 3}),
        ("loha", {"alpha": 3}),
        ("loha", {"alpha_pattern": {"q_proj": 1}}),
        ("lokr", {"alpha": 3}),
    ],
)
def test_what_scales_is_in_the_digest(name: str, change: dict[str, Any], saved: Saved) -> None:
    path = saved.copy(name)
    plain = load(path, saved.targets).adapter_digest
    edit_config(path, **change)
    assert load(path, saved.targets).adapter_digest != plain
    assert inspect_adapter(path, saved.targets).adapter_digest == load(path, saved.targets).adapter_digest


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ia3", {"feedforward_modules": r".*\.down_proj", "target_modules": ".*(q|down)_proj"}),
        ("adalora", {"r": 7, "tinit": 3, "use_rslora": True}),
        ("lokr", {"rank_dropout": 0.5, "decompose_both": False}),
        ("loha", {"init_weights": False, "target_modules": ["down_proj", "q_proj"]}),
    ],
)
def test_what_the_tensors_say_is_not_in_the_digest(name: str, change: dict[str, Any], saved: Saved) -> None:
    path = saved.copy(name)
    plain = load(path, saved.targets)
    edit_config(path, **change)
    model = load(path, saved.targets)
    assert (model.adapter_digest, content(model)) == (plain.adapter_digest, content(plain))


def test_a_dora_and_its_lora_have_two_digests(tmp_path: Path) -> None:
    dora, lora = make_adapter(tmp_path / "dora", use_dora=True), make_adapter(tmp_path / "lora")
    tensors = read_tensors(dora.path)
    write_tensors(lora.path, {key: tensor for key, tensor in tensors.items() if not key.endswith("_vector")})
    digests = {load(each.path, each.targets).adapter_digest for each in (dora, lora)}
    assert len(digests) == 2


# ------------------------------------------------------------------------------------------- a recipe is checked once


@pytest.mark.parametrize("name", CONFIGS)
def test_a_reader_that_knows_the_recipe_makes_the_same(
    name: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[TensorCheck] = []
    check = TensorCheck.check
    monkeypatch.setattr(TensorCheck, "check", lambda self: (checks.append(self), check(self))[1])
    path, reader = saved.copy(name), CheckedReader(saved.targets, LIMITS)
    write_tensors(path, read_tensors(path))  # without the metadata that peft writes into the header
    first = reader.read(path, PEFTHelper.from_local_dir(path))
    num_checks = len(checks)
    write_tensors(path, {key: tensor * 2 for key, tensor in read_tensors(path).items()})
    second = reader.read(path, PEFTHelper.from_local_dir(path))
    assert len(checks) == num_checks <= 2
    assert second.blueprint is first.blueprint
    assert content(second) == content(load(path, saved.targets)) != content(first)
    assert second.warnings == first.warnings == load(path, saved.targets).warnings


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dora", {"use_dora": False}),
        ("ia3", {"feedforward_modules": []}),
        ("ia3", {"peft_type": "LOHA"}),
        ("adalora", {"init_r": 5}),
        ("adalora", {"rank_pattern": {"model.layers.0.self_attn.q_proj.lora_E": [True, True, True, False]}}),
        ("loha", {"peft_type": "LOKR"}),
        ("loha", {"r": 2}),
        ("lokr", {"decompose_both": True, "r": 1}),
        ("lokr", {"decompose_factor": 2}),
    ],
    ids=str,
)
def test_another_configuration_is_judged_as_by_a_new_reader(name: str, changes: dict[str, Any], saved: Saved) -> None:
    path, reader = saved.copy(name), CheckedReader(saved.targets, LIMITS)
    reader.read(path, PEFTHelper.from_local_dir(path))
    edit_config(path, **changes)
    with pytest.raises(AdapterValidationError) as caught:
        reader.read(path, PEFTHelper.from_local_dir(path))
    assert caught.value.reasons == saved.refused(path)


# ------------------------------------------------------------------------------------------------------------ refusals

Tensors = dict[str, torch.Tensor]


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("dora", drop(f"{Q}.lora_magnitude_vector"), ["no lora_magnitude_vector", "use_dora"]),
        ("dora", put(f"{Q}.lora_magnitude_vector", torch.ones(31)), ["[31]", "[32]"]),
        ("dora", put(f"{Q}.lora_magnitude_vector", torch.ones(1, 32)), ["[1, 32]", "[32]"]),
        ("dora", put(f"{Q}.lora_magnitude_vector", torch.full((32,), float("nan"))), ["magnitude_vector", "NaN"]),
        ("dora", put(f"{Q}.lora_magnitude_vector.weight", torch.ones(32)), ["the same part"]),
        ("ia3", drop(f"{Q}.ia3_l"), ["q_proj", "no tensors for it"]),
        ("ia3", put(f"{Q}.ia3_l", torch.ones(1, 32)), ["[1, 32]", "[32, 1]"]),
        ("ia3", put(f"{Q}.ia3_l", torch.ones(32)), ["[32]", "[32, 1]"]),
        ("ia3", put(f"{DOWN}.ia3_l", torch.ones(48, 1)), ["[48, 1]", "[1, 48]"]),
        ("ia3", put(f"{Q}.ia3_l", torch.full((32, 1), float("inf"))), ["ia3_l", "Inf"]),
        ("ia3", put(f"{Q}.ia3_l", torch.ones(32, 1).double()), ["dtype F64"]),
        ("ia3", put(f"{Q}.lora_A.weight", torch.ones(4, 32)), ["no part of an IA3"]),
        ("ia3", put(f"{Q}.base_layer.bias", torch.ones(32)), ["no part of an IA3"]),
        ("adalora", drop(f"{Q}.lora_E"), ["the file has no lora_E"]),
        ("adalora", put(f"{Q}.lora_E", torch.ones(3, 1)), ["[3, 1]", "[4, 1]"]),
        ("adalora", put(f"{Q}.lora_E", torch.ones(4)), ["[4]", "[4, 1]"]),
        ("adalora", put(f"{Q}.lora_A", torch.ones(3, 32)), ["[3, 32]", "[4, 32]"]),
        ("adalora", put(f"{Q}.lora_A.weight", torch.ones(4, 32)), ["no part of an AdaLoRA"]),
        ("adalora", put(f"{Q}.ranknum", torch.ones(1)), ["no part of an AdaLoRA"]),
        ("adalora", put(f"{Q}.base_layer.bias", torch.ones(32)), ["bias is 'none'"]),
        ("loha", drop(f"{Q}.hada_w2_b"), ["the file has no hada_w2_b"]),
        ("loha", put(f"{Q}.hada_w1_a", torch.ones(3, 32)), ["[3, 32]", "[32, 3]"]),
        ("loha", put(f"{Q}.hada_w1_b", torch.ones(2, 32)), ["[2, 32]", "[3, 32]"]),
        ("loha", put(f"{Q}.hada_w1_b", torch.ones(0, 32)), ["[0, 32]", "gathered"]),
        ("loha", put(f"{Q}.hada_t1", torch.ones(3, 3, 2, 2)), ["convolutions"]),
        ("loha", put(f"{Q}.alpha", torch.ones(())), ["no part of a LoHa"]),
        ("loha", put("base_model.model.lm_head.hada_w1_a", torch.ones(64, 3)), ["lm_head", "output layer"]),
        ("lokr", drop(f"{Q}.lokr_w2_a"), ["the file has no lokr_w2_a"]),
        ("lokr", put(f"{Q}.lokr_w1", torch.ones(5, 3)), ["[5, 3]", "[4, 4]"]),
        ("lokr", put(f"{Q}.lokr_w1", torch.ones(5, 4)), ["for 32 inputs and 40 outputs, the base has 32 and 32"]),
        ("lokr", put(f"{Q}.lokr_w2", torch.ones(8, 8)), ["the file has lokr_w2 but", "lokr_w1, lokr_w2_a, lokr_w2_b"]),
        ("lokr", put(f"{Q}.lokr_t2", torch.ones(2, 2, 3, 3)), ["convolutions"]),
        ("lokr", put(f"{Q}.lokr_w2_b", torch.full((2, 8), float("nan"))), ["lokr_w2_b", "NaN"]),
        ("lokr", put(Q.replace("q_proj", "k_proj.lokr_w1"), torch.ones(4, 4)), ["k_proj", "does not name"]),
        ("lokr", lambda tensors: tensors.clear(), ["no tensors for it"]),
        ("vera", drop("base_model.vera_A"), ["the file has no vera_A", "save_projection=True"]),
        ("vera", put("base_model.vera_B", torch.ones(32, 2)), ["'base_model.vera_B' has shape [32, 2]", "[32, 3]"]),
        ("vera", put("base_model.vera_A", torch.ones(48, 3)), ["'base_model.vera_A' has shape [48, 3]", "[3, 48]"]),
        ("vera", put("base_model.vera_A", torch.full((3, 48), float("nan"))), ["vera_A", "NaN"]),
        ("vera", put("base_model.vera_A.default", torch.ones(3, 48)), ["the same part"]),
        ("vera", put(f"{Q}.vera_A", torch.ones(3, 32)), ["the file has vera_A but"]),
        ("vera", put(f"{Q}.vera_lambda_b", torch.ones(31)), ["[31]", "[32]"]),
        ("vera", put(f"{Q}.vera_lambda_d", torch.ones(4)), ["[4]", "[3]"]),
        ("vera", drop(f"{Q}.vera_lambda_d"), ["the file has no vera_lambda_d"]),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    name: str, change: Callable[[Tensors], None], words: list[str], saved: Saved
) -> None:
    path = saved.copy(name)
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)
    reasons = saved.refused(path)
    assert any(all(word in reason for word in words) for reason in reasons), reasons
    assert inspect_adapter(path, saved.targets).reasons == reasons
    assert isinstance(inspect_adapter(path).reasons, tuple)


KEPT = [True, False, True, True]


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("ia3", {"feedforward_modules": TARGETS}, ["q_proj", "has shape [32, 1], expected [1, 32]"]),
        ("ia3", {"feedforward_modules": []}, ["[1, 48]", "[32, 1]"]),
        ("ia3", {"layers_to_transform": [0]}, ["layers_to_transform", "not a known field"]),
        ("adalora", {"init_r": 3}, ["[4, 32]", "[3, 32]"]),
        ("vera", {"r": 4}, ["has shape [3, 48], expected [4, 48]"]),
        ("vera", {"save_projection": False}, ["save_projection must be true", "peft.save_as_lora(path, model, rank)"]),
        ("vera", {"bias": "vera_only"}, ["bias must be 'none' of a VeRA"]),
        ("vera", {"exclude_modules": ["k_proj"]}, ["exclude_modules", "not a known field"]),
        ("adalora", {"rank_pattern": {"model.layers.0.self_attn.q_proj.lora_E": KEPT}}, ["[4, 32]", "[3, 32]"]),
        ("adalora", {"rank_pattern": {"model.layers.0.x.lora_E": KEPT}}, ["'model.layers.0.x', which is no target"]),
        ("adalora", {"rank_pattern": {"model.layers.0.self_attn.q_proj.lora_E": KEPT[1:]}}, ["a list of 4 times"]),
        ("loha", {"rank_pattern": {"q_proj": 2}}, ["[32, 3]", "[32, 2]"]),
        ("loha", {"peft_type": "LOKR"}, ["no part of a LoKr"]),
        ("loha", {"peft_type": "LORA", "lora_alpha": 8}, ["alpha=8 is not a known field"]),
        ("lokr", {"r": 3}, ["lokr_w2_a", "[8, 2]", "[8, 3]"]),
        ("lokr", {"r": 64}, ["the file has no lokr_w2"]),
        ("lokr", {"decompose_both": True, "r": 1}, ["the file has no lokr_w1_a"]),
        ("lokr", {"decompose_factor": 2}, ["lokr_w1", "[4, 4]", "[2, 2]"]),
        ("dora", {"use_dora": False}, ["the file has lora_magnitude_vector but use_dora is not set"]),
    ],
)
def test_a_config_that_does_not_fit_the_file_is_refused(
    name: str, fields: dict[str, Any], words: list[str], saved: Saved
) -> None:
    path = saved.copy(name)
    edit_config(path, **fields)
    reasons = saved.refused(path)
    assert any(all(word in reason for word in words) for reason in reasons), reasons
    assert not inspect_adapter(path, saved.targets).is_honoured


def test_an_adalora_without_any_rank_left_is_refused(saved: Saved) -> None:
    path = saved.copy("adalora")
    tensors = read_tensors(path)
    names = {key.removeprefix("base_model.model.").rpartition(".")[0] for key in tensors}
    edit_config(path, rank_pattern={f"{name}.lora_E": [False] * 4 for name in names})
    gone = {key: t[:, :0] if key.endswith("lora_B") else t[:0] for key, t in tensors.items()}
    write_tensors(path, gone)
    assert saved.refused(path) == ("rank_pattern leaves no rank to any module: the adapter changes nothing",)


@pytest.mark.parametrize("name", ["dora", "ia3", "adalora", "loha", "lokr"])
def test_an_adapter_of_another_base_is_said_to_be_one(name: str, saved: Saved) -> None:
    """LoKr's tensors say the widths of their module only by their products."""
    path, other = saved.copy(name), {16: 24, 32: 64, 48: 96}
    wide = tuple(_resized(target, other) for target in saved.targets)
    with pytest.raises(AdapterBaseMismatchError) as caught:
        load(path, wide)
    assert "attention width 32 against 64" in caught.value.message
    assert "intermediate size 48 against 96" in caught.value.message
    says_one_side = name == "ia3"  # of q_proj the outputs, of down_proj the inputs
    assert ("hidden size 32 against 64" in caught.value.message) == (not says_one_side)


def test_an_adalora_of_more_layers_is_for_another_base(saved: Saved) -> None:
    """Its rank_pattern, too, names layers that are not there."""
    path = saved.copy("adalora")
    tensors = read_tensors(path)
    deeper = {key.replace("layers.2", "layers.3"): tensor.clone() for key, tensor in tensors.items()}
    write_tensors(path, {**tensors, **deeper})
    names = {key.removeprefix("base_model.model.").rpartition(".")[0] for key in (*tensors, *deeper)}
    edit_config(path, rank_pattern={f"{name}.lora_E": [True] * 4 for name in names})
    with pytest.raises(AdapterBaseMismatchError, match="number of layers 4 against 3"):
        load(path, saved.targets)


def _resized(target: LoraTarget, sizes: Mapping[int, int]) -> LoraTarget:
    slices = tuple(
        LoraSlice(part.module_name, part.out_offset, sizes[part.out_features], sizes[part.out_features], part.has_bias)
        for part in target.slices
    )
    width = sizes[target.in_features]
    return LoraTarget(target.name, target.layer, width, width, slices)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("loha", ("hada_w1_a", "hada_w2_a")),
        ("loha", ("hada_w1_b", "hada_w2_b")),
        ("lokr", ("lokr_w1", "lokr_w2_b")),
        ("adalora", ("lora_A", "lora_E")),
    ],
)
def test_products_that_float32_does_not_hold_are_refused(name: str, parts: tuple[str, ...], saved: Saved) -> None:
    """Each number is finite; their product is not."""
    path = saved.copy(name)
    tensors = read_tensors(path)
    write_tensors(path, {key: t * 1e30 if key.endswith(parts) else t for key, t in tensors.items()})
    reasons = saved.refused(path)
    assert all("does not fit in float32 once it is multiplied out" in reason for reason in reasons)
    assert len(reasons) == 6
    assert inspect_adapter(path, saved.targets).reasons == reasons


# -------------------------------------------------------------------------------------------------- what it may cost


def one_target(in_features: int, out_features: int) -> tuple[LoraTarget, ...]:
    name = "model.layers.0.self_attn.o_proj"
    slices = (LoraSlice(name, 0, out_features, out_features, False),)
    return (LoraTarget(name, 0, in_features, in_features, slices),)


O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj"


def write_one(path: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    edit_config(path, target_modules=["o_proj"], **config)
    torch.manual_seed(4)
    write_tensors(path, {f"{O_PROJ}.{part}": torch.randn(*shape) for part, shape in shapes.items()})


WIDE = one_target(8192, 8192)
LOHA_NAMES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
BLOWN_UP: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], int]] = {
    "lokr": ({"peft_type": "LOKR", "r": 64, "alpha": 1}, {"lokr_w1": (64, 64), "lokr_w2": (128, 128)}, 8192),
    "loha": (
        {"peft_type": "LOHA", "r": 90, "alpha": 1},
        dict(zip(LOHA_NAMES, ((8192, 90), (90, 8192)) * 2, strict=True)),
        8100,
    ),
}


@pytest.mark.parametrize(("config", "shapes", "rank"), BLOWN_UP.values(), ids=BLOWN_UP)
def test_a_small_file_that_would_become_gigabytes_is_refused_before_it_does(
    config: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_one(tmp_path / "sql", config, shapes)
    made: list[object] = []
    monkeypatch.setattr(conversion, "_rounded", lambda *args: made.append(args))
    with pytest.raises(AdapterValidationError) as caught:
        load(tmp_path / "sql", WIDE, LoRAConfig(max_lora_rank=512, host_memory_bytes=2**30))
    by_rank, by_bytes = caught.value.reasons
    nbytes = 4 * rank * 2 * 8192
    assert f"as a LoRA it has rank {rank}, which is above max_lora_rank 512" in by_rank
    assert f"as a LoRA it has {nbytes} bytes; a file of " in by_bytes
    assert f"may become {2**27}, by the host budget of {2**30}" in by_bytes
    assert inspect_adapter(tmp_path / "sql", None, LoRAConfig(max_lora_rank=512, host_memory_bytes=2**30)).reasons == (
        by_rank,
        by_bytes,
    )
    assert made == []


def test_max_lora_rank_is_of_what_it_becomes(saved: Saved) -> None:
    for name, rank in (("loha", 9), ("lokr", 8), ("adalora", 4)):
        path = saved.copy(name)
        model = load(path, saved.targets, LoRAConfig(max_lora_rank=rank))
        assert model.rank == rank
        (reason,) = saved.refused(path, LoRAConfig(max_lora_rank=rank - 1))
        assert reason.startswith(f"as a LoRA it has rank {rank}, which is above max_lora_rank {rank - 1}")
        assert inspect_adapter(path, None, LoRAConfig(max_lora_rank=rank - 1)).reasons == (reason,)
    load(saved.copy("ia3"), saved.targets, LoRAConfig(max_lora_rank=1))


def test_a_warning_says_what_it_becomes(saved: Saved) -> None:
    for name, kind, rank in (("loha", Kind.LOHA, 9), ("lokr", Kind.LOKR, 8)):
        path = saved.copy(name)
        model = load(path, saved.targets)
        text = f"it is served as a LoRA of ranks up to {rank}, with {model.nbytes} bytes before alignment"
        assert model.warnings == (f"peft_type is {kind}; {text}",)
    assert load(saved.copy("adalora"), saved.targets).warnings == ()


def test_an_eighth_of_the_budget_or_four_times_the_file(tmp_path: Path) -> None:
    """What is made of 5,120 numbers by LoKr is 4 MiB; of AdaLoRA, as much as the file or twice that."""
    config, shapes = {"peft_type": "LOKR", "r": 8, "alpha": 1}, {"lokr_w1": (32, 32), "lokr_w2_a": (32, 8)}
    write_one(tmp_path / "sql", config, {**shapes, "lokr_w2_b": (8, 32)})
    targets, nbytes = one_target(1024, 1024), 4 * 256 * 2048
    assert load(tmp_path / "sql", targets, LoRAConfig(host_memory_bytes=8 * nbytes)).nbytes == nbytes
    with pytest.raises(AdapterValidationError, match=f"may become {nbytes - 1},"):
        load(tmp_path / "sql", targets, LoRAConfig(host_memory_bytes=8 * nbytes - 1))
    ada = {"peft_type": "ADALORA", "init_r": 8, "lora_alpha": 1}
    write_one(tmp_path / "ada", ada, {"lora_A": (8, 1024), "lora_B": (1024, 8), "lora_E": (8, 1)})
    tensors = read_tensors(tmp_path / "ada")
    write_tensors(tmp_path / "ada", {key: tensor.bfloat16() for key, tensor in tensors.items()})
    made = 4 * 8 * 2048
    assert load(tmp_path / "ada", targets, LoRAConfig(host_memory_bytes=made)).nbytes == made
    with pytest.raises(AdapterError):
        load(tmp_path / "ada", targets, LoRAConfig(host_memory_bytes=made - 1))


def test_loads_wait_for_room_for_what_they_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight at once, each of half the budget with what it makes: two in hand at most."""
    config, shapes = {"peft_type": "LOKR", "r": 8, "alpha": 1}, {"lokr_w1": (32, 32), "lokr_w2_a": (32, 8)}
    write_one(tmp_path / "sql", config, {**shapes, "lokr_w2_b": (8, 32)})
    nbytes = 4 * 256 * 2048
    monkeypatch.setattr(validation, "SHARE_OF_CONVERTED", 1)
    reader = CheckedReader(one_target(1024, 1024), LoRAConfig(host_memory_bytes=int(nbytes * 2.2)))
    making, most, lock = 0, 0, threading.Lock()
    read_tensors_ = weights.read_tensors

    def counted(*args: Any) -> Any:
        nonlocal making, most
        with lock:
            making += 1
            most = max(most, making)
        time.sleep(0.01)
        found = read_tensors_(*args)
        with lock:
            making -= 1
        return found

    monkeypatch.setattr(weights, "read_tensors", counted)
    helper = PEFTHelper.from_local_dir(tmp_path / "sql")
    threads = [threading.Thread(target=reader.read, args=(tmp_path / "sql", helper), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert most == 2


def test_a_file_that_changes_between_the_two_readings(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second reading finds that more would be made than was waited for."""
    path = saved.copy("lokr")
    reader = CheckedReader(saved.targets, LIMITS)
    monkeypatch.setattr(reader, "_read", lambda folder, helper, file_bytes, made_bytes: made_bytes + 1)
    with pytest.raises(AdapterLoadError, match="changed while it was read"):
        reader.read(path, PEFTHelper.from_local_dir(path))


@pytest.mark.parametrize("name", ["loha", "lokr"])
@pytest.mark.parametrize("factor", [10**9, 2**31, -(2**31), 0])
def test_any_factor_is_judged_at_once(name: str, factor: int, saved: Saved) -> None:
    path = saved.copy(name)
    edit_config(path, decompose_factor=factor)
    start = time.monotonic()
    with pytest.raises(AdapterError):
        load(path, one_target(131_071, 131_071))  # a prime
    assert time.monotonic() - start < 2


def test_factors_that_claim_a_huge_module_are_judged_at_once(tmp_path: Path) -> None:
    """Widths are products of what two small tensors say."""
    shapes = {"lokr_w1": (2**18 - 5, 1), "lokr_w2": (2**18 - 5, 1)}
    write_one(tmp_path / "sql", {"peft_type": "LOKR", "r": 9**5, "alpha": 1}, shapes)
    edit_config(tmp_path / "sql", r=9)
    start = time.monotonic()
    with pytest.raises(AdapterValidationError):
        load(tmp_path / "sql", one_target(64, 64))
    assert not inspect_adapter(tmp_path / "sql").is_honoured
    assert time.monotonic() - start < 2


MASKS = {"model.layers.0.self_attn.q_proj.lora_E": [True, False, True, True]}
VALUES: tuple[Any, ...] = (None, True, 0, 1, 2, 3, 4, -1, 2**16, 10**400, 0.5, "", "q_proj", [], ["down_proj"], {})
VALUES += ([[]], {"q_proj": 2}, MASKS, *map(str, Kind), "VERA")
FIELDS = sorted(set().union(*(table.honoured for table in TABLES.values())))
ALL_PARTS = sorted({part for parts in PARTS.values() for part in parts.values()})
SHAPES = ((), (0,), (4,), (32,), (1, 48), (48, 1), (32, 1), (4, 4), (32, 4), (4, 32), (0, 32), (3, 3, 2))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutant_of_any_kind_is_an_adapter_or_refused(data: st.DataObject, saved: Saved) -> None:
    """By `adapter inspect` as by a load; what is loaded has tensors of the base's shapes, all finite."""
    with tempfile.TemporaryDirectory() as folder:
        path = Saved(saved.root, saved.targets, Path(folder)).copy(data.draw(st.sampled_from(sorted(CONFIGS))))
        edit_config(path, **data.draw(st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=2)))
        tensors = read_tensors(path)
        for name in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=3, unique=True)):
            tensor = tensors.pop(name)
            how = data.draw(st.sampled_from(["drop", "rename", "reshape", "dtype"]))
            if how == "rename":
                module = name.rpartition(".lora_" if ".lora_" in name else ".")[0]
                tensors[f"{module}.{data.draw(st.sampled_from(ALL_PARTS))}"] = tensor
            elif how == "reshape":
                tensors[name] = torch.ones(data.draw(st.sampled_from(SHAPES)))
            elif how == "dtype":
                tensors[name] = tensor.to(data.draw(st.sampled_from(DTYPES)))
        write_tensors(path, tensors)
        try:
            model = load(path, saved.targets)
        except AdapterError:
            assert not inspect_adapter(path, saved.targets).is_honoured
            return
        assert inspect_adapter(path, saved.targets).is_honoured
        assert_fits(model, saved.targets)


def assert_fits(model: LoRAModel, targets: tuple[LoraTarget, ...]) -> None:
    widths = {part.module_name: (part.out_features, t.in_features) for t in targets for part in t.slices}
    for layer in model:
        out_features, in_features = widths[layer.module_name]
        expected = {"lora_a": (layer.rank, in_features), "lora_b": (out_features, layer.rank)}
        expected |= dict.fromkeys(("magnitude", "gain", "bias", "lora_bias"), (out_features,))
        expected["input_gain"] = (in_features,)
        assert layer.tensors
        for field, tensor in layer.tensors.items():
            assert tuple(tensor.shape) == expected[field]
            assert tensor.isfinite().all()


# ------------------------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("dora", ["kind: LORA with DoRA, served: adds", "part lora_magnitude_vector: 6 tensors, 768 bytes"]),
        ("ia3", ["kind: IA3, served: multiplies", "part ia3_l: 6 tensors, 960 bytes"]),
        ("adalora", ["kind: ADALORA, converted to A and B at load", "served as: a LoRA of rank 4 (6 modules), "]),
        ("loha", ["kind: LOHA, converted", "part hada_w1_a: 6 tensors", "served as: a LoRA of rank 9 (6 modules), "]),
        ("lokr", ["kind: LOKR, converted", "part lokr_w1: 6 tensors", "served as: a LoRA of rank 8 (6 modules), "]),
        ("vera", ["kind: VERA, converted", "has: projections, kept once for all adapters with equal ones (CPU), 960"]),
    ],
)
def test_inspect_explains_the_kind_its_parts_and_what_they_cost(name: str, lines: list[str], saved: Saved) -> None:
    path = saved.copy(name)
    model = load(path, saved.targets)
    for targets in (None, saved.targets):
        report = inspect_adapter(path, targets)
        assert report.reasons == ()
        text = report.describe()
        assert all(f"  {line}" in text for line in lines), text
        assert report.adapter_digest == model.adapter_digest
        assert sum(nbytes for _, nbytes in (report.parts or {}).values()) == report.nbytes
        if report.served_ranks:
            assert report.served_nbytes == model.nbytes
            assert f"{model.nbytes} bytes in float32" in text


def test_inspect_says_why_a_type_is_not_served(saved: Saved) -> None:
    path = saved.copy("loha")
    edit_config(path, peft_type="MISS")
    for targets in (None, saved.targets):
        report = inspect_adapter(path, targets)
        (reason,) = report.reasons
        assert "got 'MISS', which is not served: adds one small matrix, repeated" in reason
        assert "peft.save_as_lora" in reason
        assert "kind: of another method, refused" in report.describe()
    assert saved.refused(path) == report.reasons


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lokr", drop(f"{Q}.lokr_w2_a"), "no lokr_w1 and lokr_w2, each whole or in two factors"),
        ("loha", drop(f"{Q}.hada_w1_a"), "the file has no hada_w1_a"),
        ("ia3", put(f"{Q}.ia3_l", torch.ones(1, 32)), "has shape [1, 32], feedforward_modules calls for [out, 1]"),
        ("dora", drop(f"{Q}.lora_magnitude_vector"), "no lora_magnitude_vector, which use_dora calls for"),
        ("adalora", put(f"{Q}.lora_E", torch.ones(3, 1)), "has shape [3, 1], its rank should be 4"),
        ("lokr", put(f"{Q}.lokr_w2_b", torch.ones(3, 8)), "has shape [3, 8], its rank should be 2"),
        ("lokr", lambda tensors: tensors.clear(), "there is no LOKR adapter in it"),
    ],
)
def test_inspect_without_a_base_finds_what_it_can(
    name: str, change: Callable[[Tensors], None], words: str, saved: Saved
) -> None:
    path = saved.copy(name)
    tensors = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors)
    reasons = inspect_adapter(path).reasons
    assert any(words in reason for reason in reasons), reasons
