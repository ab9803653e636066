"""PEFTHelper against peft itself: fields, matching, ranks, scalings."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from loraplex.adapters.fields import CONTEXT_FIELDS, HONOURED, IGNORED, REFUSED, Verdict, is_set
from loraplex.adapters.format import PEFTHelper
from loraplex.config import LoRAConfig
from loraplex.errors import (
    AdapterConfigMissingError,
    AdapterFileFormatError,
    AdapterPathNotFoundError,
    AdapterValidationError,
)

LIMITS = LoRAConfig()
MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def helper(**fields: Any) -> PEFTHelper:
    return PEFTHelper.from_dict({**MINIMAL, **fields}, "sql")


def reasons(**fields: Any) -> list[str]:
    return helper(**fields).reasons(LIMITS)


# ------------------------------------------------------------------------------------------------------ classification


def test_every_field_of_the_installed_peft_is_classified() -> None:
    known = HONOURED | IGNORED.keys() | REFUSED.keys()
    missing = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.name not in known]
    assert not missing, (
        f"new fields of peft {peft.__version__}: decide what they mean and put them into adapters/fields.py"
    )


FIELDS_OF_PEFT = {
    "0.1": [
        "r",
        "target_modules",
        "lora_alpha",
        "lora_dropout",
        "merge_weights",
        "fan_in_fan_out",
        "enable_lora",
        "bias",
    ],
    "0.2": ["modules_to_save", "base_model_name_or_path", "peft_type", "task_type", "inference_mode"],
    "0.3": ["init_lora_weights"],
    "0.5": ["layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "auto_mapping", "revision"],
    "0.7": ["megatron_config", "megatron_core", "loftq_config", "use_rslora"],
    "0.12": ["use_dora", "layer_replication", "runtime_config"],
    "0.15": ["eva_config", "exclude_modules", "lora_bias", "corda_config", "trainable_token_indices"],
    "0.18": [
        "use_qalora",
        "qalora_group_size",
        "target_parameters",
        "arrow_config",
        "ensure_weight_tying",
        "peft_version",
    ],
}


@pytest.mark.parametrize("version", FIELDS_OF_PEFT)
def test_every_field_of_older_pefts_is_classified(version: str) -> None:
    assert set(FIELDS_OF_PEFT[version]) <= HONOURED | IGNORED.keys() | REFUSED.keys()


def test_no_field_is_in_two_classes() -> None:
    assert not HONOURED & IGNORED.keys()
    assert not HONOURED & REFUSED.keys()
    assert not IGNORED.keys() & REFUSED.keys()


def test_the_default_config_of_peft_is_accepted_without_a_word(tmp_path: Path) -> None:
    peft.LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    found = PEFTHelper.from_local_dir(tmp_path)
    found.validate_legal(LIMITS)
    assert found.warnings == ()


LORA_DEFAULTS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
SET_VALUES: dict[str, Any] = {
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
    "target_parameters": ["experts.gate_up_proj"],
    "layer_replication": [[0, 4], [2, 5]],
    "use_qalora": True,
    "arrow_config": {"top_k": 3},
    "kasa_config": {"beta": 1e-4},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 64},
    "enable_lora": [True, False, True],
    "vllm_long_context_scaling_factors": [4.0],
    "long_lora_scaling_factors": [4.0],
    "long_lora_max_len": 8192,
    "max_position_embeddings": 8192,
    "added_tokens_config": {"<x>": 1},
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_is_not_honoured_is_refused_by_name_and_value(name: str) -> None:
    value = SET_VALUES[name]
    found = reasons(**{name: value})
    assert len(found) == 1
    assert name in found[0]
    assert repr(value)[:40] in found[0]
    with pytest.raises(AdapterValidationError, match=name):
        helper(**{name: value}).validate_legal(LIMITS)
    verdict = next(verdict for verdict in helper(**{name: value}).verdicts if verdict.name == name)
    assert verdict.verdict is Verdict.REFUSED


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.parametrize("value", [None, False, [], {}, "", 0])
def test_a_field_that_says_nothing_is_accepted(name: str, value: Any) -> None:
    assert reasons(**{name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_type", "CAUSAL_LM"),
        ("task_type", "SEQ_CLS"),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}),
        ("peft_version", "0.99.0"),
        ("base_model_name_or_path", "org/base"),
        ("revision", "abc"),
        ("inference_mode", True),
        ("lora_dropout", 0.1),
        ("megatron_config", {"a": 1}),
        ("megatron_core", "megatron.core"),
        ("runtime_config", {"ephemeral_gpu_offload": False}),
        ("eva_config", {"rho": 2.0}),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"verbose": True}),
        ("lora_ga_config", {"scale": "stable"}),
        ("qalora_group_size", 16),
        ("ensure_weight_tying", True),
        ("merge_weights", True),
    ],
)
def test_a_field_of_training_only_is_accepted(name: str, value: Any) -> None:
    assert reasons(**{name: value}) == []
    assert helper(**{name: value}).canonical() == helper().canonical()


@pytest.mark.parametrize("value", [[5], [5, 5, 7], [2**31 - 1] * 1024])
def test_invocation_tokens_are_read_and_are_part_of_the_content(value: list[int]) -> None:
    found = helper(alora_invocation_tokens=value)
    assert found.reasons(LIMITS) == []
    assert found.invocation_tokens == tuple(value)
    verdict = next(each for each in found.verdicts if each.name == "alora_invocation_tokens")
    assert verdict.verdict is Verdict.HONOURED
    assert found.canonical() != helper().canonical()
    assert found.canonical() != helper(alora_invocation_tokens=[*value, 1]).canonical()
    assert found.naming() != helper().naming()


@pytest.mark.parametrize("value", [None, [], 0, ""])
def test_no_invocation_tokens_are_a_plain_lora_as_in_peft(value: Any) -> None:
    found = helper(alora_invocation_tokens=value)
    assert found.reasons(LIMITS) == []
    assert (found.invocation_tokens, found.canonical()) == ((), helper().canonical())


@pytest.mark.parametrize("value", [7, "ab", True, [-1], [2**31], [True], [1.0], [[1]], {"a": 1}, [5] * 1025])
def test_invocation_tokens_that_are_none_are_refused_by_name(value: Any) -> None:
    (reason,) = reasons(alora_invocation_tokens=value)
    assert reason.startswith("alora_invocation_tokens must be a list of at most 1024 token ids, got ")
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("init_lora_weights", "mica"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("context_length", 4096),
        ("vllm_long_context_scaling_factor", 2.0),
    ],
)
def test_what_acts_on_rows_before_an_invocation_is_refused_beside_it(name: str, value: Any) -> None:
    assert reasons(**{name: value}) == []
    (reason,) = reasons(alora_invocation_tokens=[5], **{name: value})
    assert reason.startswith(f"{name}={value!r} with alora_invocation_tokens: ")
    if "peft does not load that" in reason:
        config = peft.LoraConfig(
            target_modules=["0"], task_type="CAUSAL_LM", alora_invocation_tokens=[5], **{name: value}
        )
        with pytest.raises(ValueError, match="unsupported variant combination"):
            peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), config)
    else:
        assert "it acts on the rows before the invocation, too" in reason


@pytest.mark.parametrize("field", [{"lora_bias": True}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}])
def test_what_is_part_of_the_delta_may_stand_beside_an_invocation(field: dict[str, Any]) -> None:
    assert reasons(alora_invocation_tokens=[5], **field) == []


def test_an_unknown_key_is_a_warning_when_it_says_nothing_and_refused_otherwise() -> None:
    for value in (None, False, "", [], {}):
        assert reasons(brand_new=value) == []
        assert "brand_new" in helper(brand_new=value).warnings[0]
    for value in (True, 3, "x", [0], {"a": 1}):
        assert "brand_new" in reasons(brand_new=value)[0]


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_keep_the_base_are_accepted(value: Any) -> None:
    assert reasons(init_lora_weights=value) == []


@pytest.mark.parametrize(
    "value", ["pissa", "pissa_niter_16", "PISSA", "olora", "corda", "loftq", "lora_ga", "whatever", 7]
)
def test_initialisations_that_change_the_base_are_refused(value: Any) -> None:
    (reason,) = reasons(init_lora_weights=value)
    assert "init_lora_weights" in reason
    assert str(value) in reason


# ------------------------------------------------------------------------------------------------------- single values


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_missing_field_is_named(field: str, how: str) -> None:
    fields = {**MINIMAL, field: None}
    if how == "missing":
        del fields[field]
    (reason,) = PEFTHelper.from_dict(fields).reasons(LIMITS)
    assert f"{field} is missing" in reason


@pytest.mark.parametrize("value", [0, -1, 8.0, "8", True, [8], 10**9, 10**400])
def test_r_must_be_a_positive_whole_number(value: Any) -> None:
    assert "r must be a positive whole number, at most 65536, got " in reasons(r=value)[0]
    assert "must be a positive whole number, at most 65536, got " in reasons(rank_pattern={"q_proj": value})[0]


@pytest.mark.parametrize("value", [0, -16, "16", True, math.nan, math.inf, [1], 10**400])
def test_alpha_must_be_positive(value: Any) -> None:
    assert "lora_alpha must be a positive number" in reasons(lora_alpha=value)[0]


@pytest.mark.parametrize("value", ["true", 1, 0, [], "no"])
@pytest.mark.parametrize("name", ["use_rslora", "lora_bias", "fan_in_fan_out", "use_dora"])
def test_flags_must_be_booleans(name: str, value: Any) -> None:
    assert f"{name} must be true or false" in reasons(**{name: value})[0]


@pytest.mark.parametrize("value", ["some", None, True, "boft_only"])
def test_bias_must_be_known(value: Any) -> None:
    assert "bias must be 'none', 'all' or 'lora_only'" in reasons(bias=value)[0]


@pytest.mark.parametrize("value", [5, {"a": 1}, [1], [None], [""], [["q_proj"]]])
@pytest.mark.parametrize("name", ["target_modules", "exclude_modules"])
def test_module_lists_must_hold_names(name: str, value: Any) -> None:
    assert any(f"{name} must be a list of names" in reason for reason in reasons(**{name: value}))


@pytest.mark.parametrize("value", ["[", "(q_proj", "*", "a{2", "(?P<x"])
def test_a_broken_regex_is_named(value: str) -> None:
    found = reasons(target_modules=value)
    try:
        re.compile(value)
    except re.error:
        assert "target_modules" in found[0]
        assert "no regular expression" in found[0]
    else:
        assert found == []


def test_empty_target_modules_change_nothing_and_are_refused() -> None:
    assert "target_modules is empty" in reasons(target_modules=[])[0]


@pytest.mark.parametrize("peft_type", ["MISS", "XLORA", "BOFT", "PROMPT_TUNING", "lora", "loha", 3])
def test_another_peft_type_is_refused(peft_type: Any) -> None:
    assert "peft_type must be 'LORA'" in reasons(peft_type=peft_type)[0]


def test_a_missing_peft_type_is_a_warning() -> None:
    found = PEFTHelper.from_dict({key: value for key, value in MINIMAL.items() if key != "peft_type"})
    assert found.reasons(LIMITS) == []
    assert "peft_type" in found.warnings[0]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
        ({"target_modules": ".*q_proj", "layers_pattern": "layers"}, "layers_pattern"),
        ({"lora_bias": True, "init_lora_weights": "gaussian"}, "lora_bias"),
        ({"lora_bias": True, "use_dora": True}, "lora_bias"),
    ],
)
def test_what_peft_itself_refuses_to_construct_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        peft.LoraConfig(**{**MINIMAL, **fields})
    assert any(word in reason for reason in reasons(**fields))


@pytest.mark.parametrize("value", [[-1], ["0"], 1.5, [True], {"0": 1}, [0] * 8193])
def test_layers_must_be_numbers(value: Any) -> None:
    assert "layers_to_transform must be layer numbers" in reasons(layers_to_transform=value)[0]


def test_a_layer_is_looked_up_and_not_compared_with_each_number() -> None:
    """A file may list thousands, and a mixture of experts has tens of thousands of modules."""
    compared = []

    class Layer(int):
        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return int(self) == other

        __hash__ = int.__hash__

    names = [f"model.layers.{layer}.q_proj" for layer in range(8)]
    layers = tuple(Layer(layer) for layer in range(4, 64))
    found = PEFTHelper("adapter", 1, 1.0, ("q_proj",), layers_to_transform=layers).match_modules(names)
    assert found == set(names[4:])
    assert len(compared) <= len(names)
    assert helper(layers_to_transform=[2, 0, 2]).layers_to_transform == (0, 2)


def test_patterns_must_map_to_numbers() -> None:
    found = reasons(rank_pattern={"q_proj": 0, "v_proj": "4"}, alpha_pattern={"q_proj": -1})
    assert len(found) == 3
    assert "rank_pattern" in reasons(rank_pattern=["q_proj"])[0]
    assert "alpha_pattern" in reasons(alpha_pattern={"(": 4})[0]


def test_all_reasons_come_at_once() -> None:
    with pytest.raises(AdapterValidationError) as caught:
        helper(r=0, lora_alpha=-1, use_qalora=True, bias="x", unknown=1, peft_type="lora").validate_legal(LIMITS)
    assert len(caught.value.reasons) == 6
    assert "'sql'" in caught.value.message
    assert all(reason in caught.value.message for reason in caught.value.reasons)


def test_limits_of_the_server() -> None:
    assert helper(r=64).reasons(LoRAConfig(max_lora_rank=64)) == []
    assert "rank 65 is above max_lora_rank 64" in helper(r=65).reasons(LoRAConfig(max_lora_rank=64))[0]
    assert "rank 128" in helper(rank_pattern={"q_proj": 128}).reasons(LoRAConfig(max_lora_rank=64))[0]
    assert helper(r=4096).reasons(LoRAConfig()) == []
    assert "rank 4097 is above 4096" in helper(r=4097).reasons(LoRAConfig())[0]
    assert "rank 20000 is above 4096" in helper(rank_pattern={"q_proj": 20000}).reasons(LoRAConfig())[0]
    for fields in ({"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}):
        assert "bias_enabled" in helper(**fields).reasons(LoRAConfig(bias_enabled=False))[0]


def test_fan_in_fan_out_is_a_warning() -> None:
    found = helper(fan_in_fan_out=True)
    assert found.reasons(LIMITS) == []
    assert "fan_in_fan_out" in found.warnings[0]


# --------------------------------------------------------------------------------------------------------------- files


def test_distinct_errors_of_the_config_file(tmp_path: Path) -> None:
    with pytest.raises(AdapterPathNotFoundError, match="no such directory"):
        PEFTHelper.from_local_dir(tmp_path / "nowhere")
    with pytest.raises(AdapterConfigMissingError, match=r"adapter_config\.json"):
        PEFTHelper.from_local_dir(tmp_path)
    config = tmp_path / "adapter_config.json"
    for content, word in (
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"[" * 60_000, "not JSON"),
        (b"[" * 200_000, "more than 65536 values"),
        (b'{"r": ' + b"[" * 16 + b"]" * 16 + b"}", "nested deeper than 16"),
        (b" " * (2**20 + 1), "at most"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON"),
    ):
        config.write_bytes(content)
        with pytest.raises(AdapterFileFormatError, match=word):
            PEFTHelper.from_local_dir(tmp_path)
    with pytest.raises(AdapterPathNotFoundError, match="not a directory"):
        PEFTHelper.from_local_dir(config)
    config.unlink()
    config.mkdir()
    with pytest.raises(AdapterFileFormatError, match="not a regular file"):
        PEFTHelper.from_local_dir(tmp_path)


def test_reads_what_peft_saves(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=["v_proj", "q_proj"], use_rslora=True, rank_pattern={"q_proj": 9}
    )
    config.save_pretrained(tmp_path)
    found = PEFTHelper.from_local_dir(tmp_path)
    assert (found.r, found.lora_alpha, found.use_rslora) == (4, 10.0, True)
    assert set(found.target_modules) == {"q_proj", "v_proj"}
    assert found.scaling_factor == found.vllm_lora_scaling_factor == 10 / math.sqrt(4)
    assert found.scaling_of("model.layers.0.self_attn.q_proj") == 10 / math.sqrt(9)


# ------------------------------------------------------------------------------------------------------------- scaling


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 16 / 8), (True, 16 / math.sqrt(8))])
def test_scaling(use_rslora: bool, expected: float) -> None:
    assert helper(use_rslora=use_rslora).scaling_factor == expected


def test_canonical_has_only_what_changes_the_mathematics() -> None:
    plain = helper().canonical()
    assert helper(target_modules=["v_proj", "q_proj"], peft_version="1", layers_to_transform=[0]).canonical() == plain
    assert helper(lora_alpha=16.0).canonical() == plain
    for change in (
        {"r": 4},
        {"lora_alpha": 8},
        {"use_rslora": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"use_dora": True},
    ):
        assert helper(**change).canonical() != plain
    one = helper(alpha_pattern={"q_proj": 1, ".*proj": 2})
    assert one.canonical() != helper(alpha_pattern={".*proj": 2, "q_proj": 1}).canonical()
    assert json.loads(one.canonical())["alpha_pattern"] == [["q_proj", 1.0], [".*proj", 2.0]]


@pytest.mark.parametrize("name", CONTEXT_FIELDS)
@pytest.mark.parametrize("value", [-1, True, "8", [2], math.inf, math.nan, 1e99, 2**40])
def test_contexts_that_are_none_are_refused(name: str, value: Any) -> None:
    (reason,) = reasons(**{name: value})
    assert reason.startswith(f"{name} must be a")
    assert helper(**{name: value}).context_fields == (name,), "all else is checked"


def test_a_longer_context_changes_the_mathematics() -> None:
    long = helper(context_length=256)
    assert (long.context_length, long.context_fields, helper().context_fields) == (256, ("context_length",), ())
    digested = {helper(**{name: 4}).canonical() for name in CONTEXT_FIELDS}
    assert len({*digested, helper().canonical(), long.canonical()}) == 5
    for name in CONTEXT_FIELDS:
        for nothing in (None, 0, False, ""):
            assert helper(**{name: nothing}).canonical() == helper().canonical()


def test_a_scaling_beside_alpha_and_r_must_be_theirs() -> None:
    assert reasons(vllm_lora_scaling_factor=2.0) == reasons(vllm_lora_scaling_factor=2) == []
    assert helper(vllm_lora_scaling_factor=2.0).canonical() == helper().canonical()
    assert reasons(vllm_lora_scaling_factor=16 / math.sqrt(8), use_rslora=True) == []
    for value in (1.0, "2", True, math.nan):
        (reason,) = reasons(vllm_lora_scaling_factor=value)
        assert "vllm_lora_scaling_factor must be 2, as lora_alpha and r have it" in reason


def test_is_set() -> None:
    assert not any(is_set(value) for value in (None, False, 0, "", [], {}, ()))
    assert all(is_set(value) for value in (True, 1, "0", [None], {"a": None}, 0.5))


def test_the_documentation_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    assert [name for name in HONOURED | IGNORED.keys() | REFUSED.keys() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("before", ["model.language_model.", "language_model.model.", "language_model."])
def test_names_beside_other_parts(before: str) -> None:
    """Of an adapter that was trained on a model with an image tower, on its text model alone."""
    modules = [f"model.layers.{layer}.self_attn.{leaf}" for layer in range(2) for leaf in ("q_proj", "k_proj")]
    full = f"{before}layers.1.self_attn.q_proj"

    def helper(**fields: Any) -> PEFTHelper:
        return PEFTHelper.from_dict({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [], **fields})

    listed = helper(target_modules=[full, f"{before}layers.7.self_attn.q_proj"])
    assert listed.match_modules(modules) == {modules[2]}
    assert listed.unmatched_targets(modules) == (f"{before}layers.7.self_attn.q_proj",)
    exact = helper(target_modules=[full], layers_to_transform=[0])
    assert exact.match_modules(modules) == (set() if before == "language_model." else {modules[2]})
    for excluded in ([full], r".*language_model.*layers\.1\.self_attn\.q_proj"):
        left = helper(target_modules=["q_proj", "k_proj"], exclude_modules=excluded).match_modules(modules)
        assert left == {*modules} - {modules[2]}
    other = helper(target_modules=["q_proj", "k_proj"], exclude_modules=r".*vision_tower.*")
    assert other.match_modules(modules) == {*modules}
