"""Every `peft_type` of the installed peft has a verdict, and every field of the kinds that are served."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils.peft_types import PeftType

from loraplex.adapters.fields import HONOURED, TABLES, Verdict
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.kinds import AS_LORA, MERGE, PEFT_TYPES, TRAIN, Kind, TypeVerdict
from loraplex.config import LoRAConfig
from loraplex.errors import AdapterValidationError

LIMITS = LoRAConfig()
DOCUMENT = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()

MINIMAL: dict[Kind, dict[str, Any]] = {
    Kind.LORA: {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    Kind.ADALORA: {"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]},
    Kind.IA3: {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    Kind.LOHA: {"peft_type": "LOHA", "r": 4, "alpha": 8, "target_modules": ["q_proj"]},
    Kind.LOKR: {"peft_type": "LOKR", "r": 4, "alpha": 8, "target_modules": ["q_proj"]},
    Kind.LN_TUNING: {"peft_type": "LN_TUNING", "target_modules": ["norm"]},
    Kind.TRAINABLE_TOKENS: {
        "peft_type": "TRAINABLE_TOKENS",
        "target_modules": "model.embed_tokens",
        "token_indices": [5],
    },
}


NOT_YET = ("VERA",)


def helper(kind: Kind, **fields: Any) -> PEFTHelper:
    return PEFTHelper.from_dict({**MINIMAL[kind], **fields}, "sql")


def reasons(kind: Kind, **fields: Any) -> list[str]:
    return helper(kind, **fields).reasons(LIMITS)


# ---------------------------------------------------------------------------------------------------------- every type


def test_every_type_of_the_installed_peft_has_a_verdict() -> None:
    new = {each.value for each in PeftType} - PEFT_TYPES.keys()
    assert not new, f"new in peft {peft.__version__}: decide about {sorted(new)} in adapters/kinds.py and the document"
    assert {each.value for each in PEFT_TYPE_TO_CONFIG_MAPPING} <= PEFT_TYPES.keys()
    gone = PEFT_TYPES.keys() - {each.value for each in PeftType}
    assert not gone, f"peft {peft.__version__} does not have {sorted(gone)}"


def test_what_is_served_or_converted_is_read() -> None:
    of_peft = {name for name, found in PEFT_TYPES.items() if found.verdict in ("served", "converted")}
    assert of_peft == set(Kind.__members__)
    assert all(not PEFT_TYPES[kind].remedy for kind in Kind)
    assert all(PEFT_TYPES[name].remedy for name in PEFT_TYPES.keys() - of_peft)


@pytest.mark.parametrize("name", sorted(PEFT_TYPES))
def test_the_document_lists_every_type_with_its_verdict(name: str) -> None:
    found = PEFT_TYPES[name]
    assert f"- **`{name}`**, {found.verdict}: {found}." in " ".join(DOCUMENT.split())


def _is_done(method: Any) -> bool:
    """Whether a method does something else than to say no."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    assert isinstance(function, ast.FunctionDef)
    last = function.body[-1]
    return not isinstance(last, ast.Raise) and ast.unparse(last) != "return False"


@pytest.mark.parametrize("name", sorted(PEFT_TYPES.keys() - set(Kind.__members__)))
def test_a_remedy_is_what_peft_can_do(name: str) -> None:
    layer = getattr(PEFT_TYPE_TO_TUNER_MAPPING[PeftType(name)], "tuner_layer_cls", None)
    can_convert = layer is not None and _is_done(_subclass_method(layer, "supports_lora_conversion"))
    can_merge = layer is not None and _is_done(_subclass_method(layer, "merge"))
    expected = AS_LORA if can_convert else MERGE if can_merge else TRAIN
    if name == "XLORA":
        assert (can_convert, can_merge) == (False, False)
    else:
        assert PEFT_TYPES[name].remedy == expected


def _subclass_method(layer: type, name: str) -> Any:
    """That of the class, or of one of its subclasses: of linears, most often."""
    found = [each.__dict__[name] for each in (layer, *layer.__subclasses__()) if name in each.__dict__]
    return found[0] if found else getattr(layer, name)


@pytest.mark.parametrize("name", sorted(PEFT_TYPES.keys() - set(Kind.__members__)))
def test_a_type_that_is_not_served_is_refused_for_that_alone(name: str) -> None:
    """None of its other fields is judged by the rules of LoRA."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name)]
    fields = {field.name: {"any": "value"} for field in dataclasses.fields(config)}
    found = PEFTHelper.from_dict({**fields, "peft_type": name, "projection_prng_key": 5}, "sql")
    (reason,) = found.reasons(LIMITS)
    kinds = "'LORA', 'ADALORA', 'IA3', 'LOHA', 'LOKR', 'LN_TUNING' or 'TRAINABLE_TOKENS'"
    assert reason.startswith(f"peft_type must be {kinds}, got ")
    assert reason.endswith(f", which is not served{' yet' if name in NOT_YET else ''}: {PEFT_TYPES[name]}")
    assert found.is_other_method
    assert found.warnings == ()
    assert {verdict.name for verdict in found.verdicts if verdict.verdict is Verdict.REFUSED} == {"peft_type"}
    with pytest.raises(AdapterValidationError, match=name):
        found.validate_legal(LIMITS)


# -------------------------------------------------------------------------------------------------------- every field


@pytest.mark.parametrize("kind", Kind)
def test_every_field_of_the_kinds_config_is_classified(kind: Kind) -> None:
    table = TABLES[kind]
    known = table.honoured | table.ignored.keys() | table.refused.keys()
    fields = dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])
    missing = [field.name for field in fields if field.name not in known]
    assert not missing, f"new fields of {kind} in peft {peft.__version__}: decide about them in adapters/fields.py"


@pytest.mark.parametrize("kind", Kind)
def test_no_field_is_in_two_classes(kind: Kind) -> None:
    table = TABLES[kind]
    assert not table.honoured & table.ignored.keys()
    assert not table.honoured & table.refused.keys()
    assert not table.ignored.keys() & table.refused.keys()


def test_the_table_of_lora_is_that_of_its_names() -> None:
    assert TABLES[Kind.LORA].honoured == HONOURED


@pytest.mark.parametrize("kind", Kind)
def test_the_documentation_names_every_field(kind: Kind) -> None:
    table = TABLES[kind]
    names = table.honoured | table.ignored.keys() | table.refused.keys()
    assert [name for name in sorted(names) if f"`{name}`" not in DOCUMENT] == []


SET_VALUES = {"use_dora": True, "loftq_config": {"loftq_bits": 4}, "modules_to_save": ["lm_head"]}
REFUSED_CASES = [(kind, name) for kind in Kind for name in SET_VALUES if name in TABLES[kind].refused]


@pytest.mark.parametrize(("kind", "name"), REFUSED_CASES)
def test_a_field_that_is_not_honoured_is_refused_by_name(kind: Kind, name: str) -> None:
    (reason,) = reasons(kind, **{name: SET_VALUES[name]})
    assert reason.startswith(f"{name}=")
    assert reasons(kind, **{name: None}) == []


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.LORA])
@pytest.mark.parametrize("name", ["trainable_token_indices", "layer_replication", "target_parameters", "use_rslora_x"])
def test_what_the_kind_does_not_have_is_refused_when_set(kind: Kind, name: str) -> None:
    assert name in reasons(kind, **{name: [1]})[0]


@pytest.mark.parametrize("kind", Kind)
def test_the_default_config_of_peft_is_accepted_without_a_word(kind: Kind, tmp_path: Path) -> None:
    given: dict[str, Any] = {"target_modules": ["down_proj"]}
    given |= {"total_step": 10} if kind is Kind.ADALORA else {}
    given |= {"feedforward_modules": ["down_proj"]} if kind is Kind.IA3 else {}
    given |= {"token_indices": [3]} if kind is Kind.TRAINABLE_TOKENS else {}
    PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**given).save_pretrained(tmp_path)
    found = PEFTHelper.from_local_dir(tmp_path)
    found.validate_legal(LIMITS)
    assert found.warnings == ()
    assert found.kind is kind


IGNORED_VALUES = {
    Kind.ADALORA: {
        "r": 99,
        "target_r": 2,
        "tinit": 5,
        "use_rslora": True,
        "alpha_pattern": {"q_proj": 1},
        "beta1": 0.5,
    },
    Kind.IA3: {"init_ia3_weights": False},
    Kind.LOHA: {"rank_dropout": 0.5, "module_dropout": 0.5, "use_effective_conv2d": True, "init_weights": False},
    Kind.LOKR: {"rank_dropout_scale": True, "use_effective_conv2d": True, "init_weights": "lycoris"},
}


@pytest.mark.parametrize("kind", IGNORED_VALUES)
def test_a_field_that_changes_nothing_is_accepted(kind: Kind) -> None:
    found = helper(kind, **IGNORED_VALUES[kind])
    assert found.reasons(LIMITS) == []
    assert found.canonical() == helper(kind).canonical()
    assert found.scaling_factor == helper(kind).scaling_factor
    ignored = {verdict.name for verdict in found.verdicts if verdict.verdict is Verdict.IGNORED}
    assert ignored == IGNORED_VALUES[kind].keys()


# ------------------------------------------------------------------------------------------------------- single values


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.ADALORA, "init_r"),
        (Kind.ADALORA, "lora_alpha"),
        (Kind.IA3, "feedforward_modules"),
        (Kind.LOHA, "r"),
        (Kind.LOHA, "alpha"),
        (Kind.LOKR, "alpha"),
        *((kind, "target_modules") for kind in Kind),
    ],
)
def test_a_missing_field_is_named(kind: Kind, name: str) -> None:
    (reason,) = reasons(kind, **{name: None})
    assert reason.startswith(f"{name} is missing")


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, 10**400])
@pytest.mark.parametrize(("kind", "name"), [(Kind.ADALORA, "init_r"), (Kind.LOHA, "r"), (Kind.LOKR, "r")])
def test_ranks_must_be_positive_whole_numbers(kind: Kind, name: str, value: Any) -> None:
    assert f"{name} must be a positive whole number" in reasons(kind, **{name: value})[0]


@pytest.mark.parametrize("value", ["4", 2.5, True, None, [4], 10**400, -(2**40)])
def test_decompose_factor_must_be_a_whole_number(value: Any) -> None:
    assert "decompose_factor must be a whole number" in reasons(Kind.LOKR, decompose_factor=value)[0]


@pytest.mark.parametrize("value", [-1, 0, -7, 4, 3, 2**31])
def test_whole_decompose_factors_are_read(value: int) -> None:
    assert helper(Kind.LOKR, decompose_factor=value).decompose_factor == value


def test_decompose_both_must_be_a_flag() -> None:
    assert "decompose_both must be true or false" in reasons(Kind.LOKR, decompose_both=1)[0]


@pytest.mark.parametrize("value", [5, [1], [None], [""], {"down_proj": 1}, "("])
def test_feedforward_modules_must_be_names_or_a_pattern(value: Any) -> None:
    assert "feedforward_modules" in reasons(Kind.IA3, feedforward_modules=value)[0]


def test_feedforward_modules_must_be_targets_as_in_peft() -> None:
    with pytest.raises(ValueError, match="subset"):
        peft.IA3Config(target_modules=["k_proj"], feedforward_modules=["down_proj"])
    (reason,) = reasons(Kind.IA3, target_modules=["k_proj"])
    assert reason == "feedforward_modules: 'down_proj' is not in target_modules"


LEAVES = ("self_attn.k_proj", "mlp.down_proj", "mlp.x_k")
NAMES = [f"model.layers.{layer}.{leaf}" for layer in (0, 1) for leaf in LEAVES]
LISTS = (["down_proj"], ["proj"], ["k"], ["0.mlp.down_proj"], ["model.layers.1.mlp.down_proj"], [], ["x", "_k"], NAMES)


@pytest.mark.parametrize("entries", [*LISTS, r".*\.mlp\..*", r".*down", r"", r".*(0|1)\.mlp\.x_k"])
def test_feedforward_modules_name_what_they_name_in_peft(entries: Any) -> None:
    """The end of a name, without regard to dots: otherwise than target_modules."""
    given = set(entries) if isinstance(entries, list) else entries
    config = peft.IA3Config(target_modules=".*", feedforward_modules=given)
    expected = {name for name in NAMES if peft.IA3Model._check_target_module_feedforward(config, name)}
    found = helper(Kind.IA3, target_modules=".*", feedforward_modules=entries)
    assert found.match_feedforward(NAMES) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"q.lora_E": [True, False, True]}, "a list of 4 times true or false"),
        ({"q.lora_E": [True] * 5}, "a list of 4 times true or false"),
        ({"q.lora_E": [1, 0, 1, 1]}, "a list of 4 times true or false"),
        ({"q.lora_E": 4}, "a list of 4 times true or false"),
        ({"q.lora_A": [True] * 4}, "'q.lora_A' is not the lora_E of a module"),
        ({"q": [True] * 4}, "'q' is not the lora_E of a module"),
        ({"": [True] * 4}, "is not the lora_E of a module"),
        ([True], "rank_pattern must be a map"),
        ({f"q{i}.lora_E": [True] * 4 for i in range(2**13 + 1)}, "rank_pattern must be a map of at most 8192"),
    ],
    ids=range(9),
)
def test_rank_patterns_of_adalora_are_lists_of_booleans(value: Any, words: str) -> None:
    assert words in reasons(Kind.ADALORA, rank_pattern=value)[0]


@pytest.mark.parametrize("suffix", [".lora_E", ".lora_E.default"])
def test_a_rank_pattern_of_adalora_leaves_ranks_and_keeps_the_scaling(suffix: str) -> None:
    found = helper(Kind.ADALORA, rank_pattern={f"a.q_proj{suffix}": [True, False, True, False]})
    assert found.reasons(LIMITS) == []
    numbers = found.numbers(("a.q_proj", "b.q_proj"))
    assert numbers.ranks == {"a.q_proj": 2, "b.q_proj": 4}
    assert set(numbers.scalings.values()) == {16 / (4 + 1e-5)}


def test_scalings() -> None:
    assert helper(Kind.LOHA).scaling_factor == helper(Kind.LOKR).scaling_factor == 2.0
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    assert helper(Kind.LOKR, **patterns).scaling_of("a.q_proj") == 1.5
    assert helper(Kind.IA3).scaling_factor == 1.0


def test_a_scaling_that_float32_cannot_hold_is_refused() -> None:
    for kind, name, formula in (
        (Kind.LOHA, "alpha", "alpha / r"),
        (Kind.ADALORA, "lora_alpha", "lora_alpha / init_r"),
    ):
        found = helper(kind, **{name: 1e200})
        (reason,) = found.unusable_scalings(found.numbers(("q_proj",)))
        assert f"the scaling {formula} is" in reason


def test_the_rank_limit_of_a_configuration_is_that_of_lora_alone() -> None:
    """What the others become depends on the base: validation.py judges it."""
    limit = LoRAConfig(max_lora_rank=2)
    assert "rank 8 is above max_lora_rank 2" in helper(Kind.LORA).reasons(limit)[0]
    for kind in (Kind.ADALORA, Kind.IA3, Kind.LOHA, Kind.LOKR):
        assert helper(kind).reasons(limit) == []


def test_canonical_forms_differ_by_kind() -> None:
    same = {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}
    forms = {PEFTHelper.from_dict({**same, "peft_type": kind}).canonical() for kind in (Kind.LOHA, Kind.LOKR)}
    forms.add(PEFTHelper.from_dict({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}).canonical())
    assert len(forms) == 3


def test_verdicts_are_the_words_of_the_document() -> None:
    assert {str(verdict) for verdict in TypeVerdict} == {"served", "converted", "refused", "refused, not yet"}
