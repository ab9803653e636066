"""Which modules, with which rank and scaling: compared with peft on a grid, and with its rules on any input."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.patterns import MAX_STEPS, _max_steps
from loraplex.config import LoRAConfig
from loraplex.errors import (
    AdapterValidationError,
)
from tests.adapters.peft_oracle import LINEARS, lora_layers, new_base

LIMITS = LoRAConfig()
MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def helper(**fields: Any) -> PEFTHelper:
    return PEFTHelper.from_dict({**MINIMAL, **fields}, "sql")


def reasons(**fields: Any) -> list[str]:
    return helper(**fields).reasons(LIMITS)


# ----------------------------------------------------------------------------------- parity with what peft instantiates

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GRID: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": list(LINEARS), "r": 5, "lora_alpha": 3},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "down_proj"]},
    {"target_modules": ["self_attn.q_proj", "0.mlp.up_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-LINEAR", "exclude_modules": ["down_proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": r"model\.layers\.[02]\.self_attn\.(q_proj|o_proj)"},
    {"target_modules": r".*(q_proj|gate_proj)$", "exclude_modules": r".*layers\.1\..*"},
    {
        "target_modules": r"(?:.*?(?:model|text).*?(?:mlp).*?(?:up_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.mlp\.gate_proj)"
    },
    {"target_modules": ATTENTION, "exclude_modules": ["k_proj"]},
    {"target_modules": ATTENTION, "exclude_modules": ["model.layers.0.self_attn.q_proj", "2.self_attn.v_proj"]},
    {"target_modules": ATTENTION, "exclude_modules": r".*\.[kv]_proj"},
    {"target_modules": ATTENTION, "layers_to_transform": 1},
    {"target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    {"target_modules": ATTENTION, "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
    {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": []},
    {"target_modules": ATTENTION, "layers_to_transform": []},
    {"target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"], "layers_to_transform": [2]},
    {"target_modules": ATTENTION, "use_rslora": True, "r": 6, "lora_alpha": 7},
    {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 4, "model.layers.1.self_attn.k_proj": 2}},
    {
        "target_modules": ATTENTION,
        "rank_pattern": {r"^model\.layers\.0\..*": 3},
        "alpha_pattern": {r".*\.2\..*q_proj": 5},
    },
    {"target_modules": ATTENTION, "rank_pattern": {"^q_proj": 3, "proj": 2, "q.proj": 7}},
    {"target_modules": ATTENTION, "rank_pattern": {"k_proj|v_proj": 3}, "alpha_pattern": {"(q|k)_proj": 9.5}},
    {"target_modules": ATTENTION, "rank_pattern": {"self_attn.q_proj": 3, "q_proj": 2}, "alpha_pattern": {"q_proj": 1}},
    {"target_modules": ATTENTION, "rank_pattern": {"q_proj": 2, "self_attn.q_proj": 3}, "use_rslora": True},
    {"target_modules": ATTENTION, "alpha_pattern": {"layers.1.self_attn.q_proj": 64}, "lora_alpha": 0.5},
    {"target_modules": ATTENTION, "rank_pattern": {"nothing": 3}},
    {"target_modules": list(LINEARS), "rank_pattern": {r"mlp\.\w+": 2, r"\d+\.self_attn\.[qk]_proj": 3}},
]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_peft_puts_lora_where_we_say_with_the_scaling_that_we_say(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = new_base(family)
    peft.LoraConfig(**{"r": 8, "lora_alpha": 16, **fields}).save_pretrained(tmp_path)
    config = peft.LoraConfig.from_pretrained(tmp_path)  # the order of pattern keys counts, and saving sorts them
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = lora_layers(peft.get_peft_model(model, config))
    found = PEFTHelper.from_local_dir(tmp_path)
    assert found.reasons(LIMITS) == []
    assert found.match_modules(linears) == layers.keys()
    numbers = found.numbers(tuple(layers))
    for name, layer in layers.items():
        facts = (numbers.ranks[name], numbers.alphas[name], found.scaling_of(name))
        assert facts == (layer.r["default"], layer.lora_alpha["default"], layer.scaling["default"]), name
    config.save_pretrained(tmp_path)  # and as a trained adapter has it
    assert PEFTHelper.from_local_dir(tmp_path).match_modules(linears) == layers.keys()


# ---------------------------------------------------------------------------------- parity with peft's rules, any input

NAMES = [
    *(f"model.layers.{layer}.self_attn.{part}_proj" for layer in (0, 1, 10, 11) for part in "qkvo"),
    *(f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1, 10, 11) for part in ("gate", "up", "down")),
    "model.layers.1.experts.0.up_proj",
    "q_proj",
    "layers.0.q_proj",
    "h.1.attn.q_proj",
    "lm_head",
    "model.embed_tokens",
]
pieces = st.sampled_from(["q_proj", "v_proj", "self_attn", "layers", "model", "0", "1", "10", "mlp", "h"])
suffixes = st.lists(pieces, min_size=1, max_size=4).map(".".join)
entries = st.one_of(suffixes, st.sampled_from(NAMES), st.text("qv_proj.01", min_size=1, max_size=8))
atoms = st.one_of(
    pieces,
    st.sampled_from([r"\.", ".", ".*", r"\d+", "(q|v)", r"\w+", "[0-9]", "^", "$", "|", "_proj", ".*?", "(?:1|10)"]),
)
regexes = st.lists(atoms, min_size=1, max_size=5).map("".join).filter(lambda text: is_regex(text))


def is_regex(text: str) -> bool:
    try:
        re.compile(text)
        re.compile(rf"(.*\.)?({text})$")
    except re.error:
        return False
    return True


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    is_list = draw(st.booleans())
    fields: dict[str, Any] = {"target_modules": draw(st.lists(entries, min_size=1, max_size=4) if is_list else regexes)}
    fields["exclude_modules"] = draw(st.one_of(st.none(), regexes, st.lists(entries, max_size=3)))
    if is_list and draw(st.booleans()):  # peft refuses both with a regex
        layers = st.integers(0, 11)
        fields["layers_to_transform"] = draw(st.one_of(layers, st.lists(layers, max_size=3)))
        words = st.sampled_from(["layers", "h", "experts", "model.layers", "(h|layers)"])
        fields["layers_pattern"] = draw(st.one_of(st.none(), words, st.lists(words, max_size=2)))
    return fields


@settings(max_examples=300, deadline=None)
@given(configs())
def test_matching_is_pefts(fields: dict[str, Any]) -> None:
    config = SimpleNamespace(
        **{"target_parameters": None, "layers_to_transform": None, "layers_pattern": None, **fields}
    )
    expected = set()
    for name in NAMES:
        found = check_target_module_exists(config, name)
        if found and not isinstance(found, _ExcludedModule):
            expected.add(name)
    assert helper(**fields).match_modules(NAMES) == expected


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(entries, regexes), st.integers(1, 64), max_size=5))
def test_pattern_keys_are_pefts(pattern: dict[str, int]) -> None:
    usable = {key: value for key, value in pattern.items() if is_regex(key)}
    found = helper(rank_pattern=usable, alpha_pattern=usable)
    numbers = found.numbers(NAMES)
    for name in NAMES:
        expected = usable.get(get_pattern_key(usable.keys(), name))
        assert numbers.ranks[name] == (expected or 8), name
        assert numbers.alphas[name] == (expected or 16), name


# ----------------------------------------------------------------------------------------------------- hostile patterns


def test_an_exponential_regex_is_refused_and_stops_no_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.adapters.patterns.DEADLINE_S", 0.5)
    found = helper(target_modules=r"(\w|.)*X")
    with pytest.raises(AdapterValidationError, match="takes longer"):
        found.match_modules(NAMES)
    found = helper(rank_pattern={r"(\w|.)*X": 4})
    with pytest.raises(AdapterValidationError, match="takes longer"):
        found.numbers(NAMES)


MANY_NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in range(40)
    for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {
            "target_modules": r"model\.layers\.\d+\.(?:self_attn|mlp)\.(q_proj|gate_proj)$",
            "exclude_modules": r".*\.3\..*",
        },
        {"rank_pattern": {rf"^model\.layers\.{layer}\..*q_proj": layer + 1 for layer in range(20)}},
        {"rank_pattern": dict.fromkeys(MANY_NAMES, 3), "alpha_pattern": dict.fromkeys(MANY_NAMES, 3)},
        {"layers_to_transform": [1, 2]},
        {"layers_to_transform": [1, 2], "layers_pattern": ["layers", "h"]},
    ],
    ids=str,
)
def test_usual_patterns_need_no_child(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("loraplex.adapters.patterns.subprocess")
    found = helper(**fields)
    assert found.match_modules(MANY_NAMES)
    assert found.numbers(MANY_NAMES).ranks.keys() == set(MANY_NAMES)
    assert not found.numbers(MANY_NAMES).warnings


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w|.)*X",
        r"(a+)+b",
        r"(?:\w+\.?)+!",
        ".*.*.*.*.*.*X",
        "(.|.)" * 30 + "X",
        r"(?i)X",
        r"(?=.*)X",
        r"(\w+\.){2,9}X",
        "(a|b|[)])" * 20,
    ],
)
def test_dangerous_patterns_go_to_the_child(pattern: str) -> None:
    assert _max_steps(pattern, max(map(len, MANY_NAMES))) * len(MANY_NAMES) > MAX_STEPS


def test_a_regex_that_could_be_exponential_but_is_not_is_matched_as_peft_does() -> None:
    pattern = r"(\w+\.)*(q|v)_proj"
    assert helper(target_modules=pattern).match_modules(NAMES) == {
        name for name in NAMES if re.fullmatch(pattern, name)
    }
    assert "no regular expression" in reasons(target_modules=r"(?=(\w+\.)*")[0]
