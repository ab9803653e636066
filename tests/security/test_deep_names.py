"""Names of tensors with hundreds of dots, in files that no base model's names stand beside: what a configuration may
say of a name grew with the square of its dots, and 1,000 names took half a minute.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters import patterns
from loraplex.adapters.files import MAX_NAME_DOTS
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.merging.base import fetched
from loraplex.adapters.merging.export import export_directory
from loraplex.adapters.merging.merge import merge_directories
from loraplex.adapters.merging.wish import MergeWish
from loraplex.adapters.patterns import (
    LOOKS_A_NAME,
    SPARE_LOOKS,
    PatternError,
    named_by_ends,
    named_by_spans,
    pattern_values,
)
from loraplex.errors import AdapterFileFormatError, AdapterValidationError
from tests.security.demo_reader import demo_reader

ROOM = 2**30
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 8, "target_modules": ["a"], "modules_to_save": ["zzz"]}
DEEP = [f"{'a.' * (MAX_NAME_DOTS - 4)}{'b' * (number + 200)}" for number in range(200)]
"""As deep as names may be, when `.lora_A.weight` is behind them; each of another length."""


def write(path: Path, modules: list[str], **fields: Any) -> Path:
    """A LoRA of 1 x 1 on each of the modules."""
    names = [f"{module}.lora_{side}.weight" for module in modules for side in "AB"]
    header = {
        name: {"dtype": "F16", "shape": [1, 1], "data_offsets": [2 * at, 2 * at + 2]} for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    (path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\1\0" * len(names))
    return path


def to_bin(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    torch.save({f"{'a.' * 100}lora_A.weight": torch.ones(1, 1)}, path / "adapter_model.bin")


def merge(path: Path) -> None:
    merge_directories(MergeWish(adapters=((str(path), 1.0),)), path.with_name("made"), ROOM)


def load(path: Path) -> None:
    demo_reader().read(path, PEFTHelper.from_local_dir(path))


WAYS_IN: dict[str, Callable[[Path], Any]] = {
    "load": load,
    "export": lambda path: export_directory(str(path), path.with_name("made"), ROOM),
    "merge": merge,
    "merge into the base": lambda path: fetched(str(path)),
}


@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("way", WAYS_IN)
def test_a_name_with_more_dots_than_models_have_is_refused(tmp_path: Path, way: str, is_bin: bool) -> None:
    path = write(tmp_path / "deep", ["a." * 200 + "a"])
    if is_bin:
        to_bin(path)
    with pytest.raises(AdapterFileFormatError, match=f"names a tensor in .* dots, at most {MAX_NAME_DOTS} are read"):
        WAYS_IN[way](path)
    (reason,) = inspect_adapter(path).reasons
    assert "dots" in reason
    assert not (tmp_path / "made").exists()


ENDS = ["b" * length for length in range(1, 400)]
KEYS = {f"{'.' * 40}{'c' * at}.{'c' * (length - at)}": 1 for length in range(200, 350) for at in range(16)}
"""Plain keys of many lengths, each with dots at 16 different places."""


@pytest.mark.parametrize(
    "fields", [{"modules_to_save": ENDS}, {"rank_pattern": KEYS}], ids=lambda fields: next(iter(fields))
)
def test_what_takes_too_many_comparisons_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """As a merge or an export reads a file whose own names stand for the base's."""
    path = write(tmp_path / "deep", DEEP, **fields)
    with pytest.raises(AdapterValidationError, match="too many comparisons"):
        export_directory(str(path), tmp_path / "made", ROOM)


def test_what_is_inspected_takes_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "ranks", DEEP, rank_pattern=KEYS)
    assert "too many comparisons" in str(inspect_adapter(path).reasons)
    path = write(tmp_path / "saved", DEEP, modules_to_save=ENDS)
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b".lora_A.weight", b"-------.weight"))
    assert "too many comparisons" in str(inspect_adapter(path).reasons)


def test_ends_of_trained_tokens_and_of_feedforward_modules_are_counted_too() -> None:
    names = [f"{name[:-2]}{number}" for number in range(20) for name in DEEP]
    tokens = PEFTHelper.from_dict({**CONFIG, "trainable_token_indices": {end: [1] for end in ENDS}})
    gains = PEFTHelper.from_dict({**CONFIG, "peft_type": "IA3", "target_modules": ENDS, "feedforward_modules": ENDS})
    for match in (tokens.match_trained_tokens, gains.match_feedforward):
        with pytest.raises(AdapterValidationError, match="too many comparisons"):
            match(names * 4)


@pytest.mark.parametrize(
    "match",
    [
        lambda names: named_by_ends(frozenset("b" * length for length in range(1, 400)), names, with_parents=True),
        lambda names: named_by_spans(frozenset(".".join("a" * length) for length in range(1, 29)), names * 10),
        lambda names: pattern_values(KEYS, names),
    ],
    ids=["ends", "spans", "plain keys"],
)
def test_comparisons_are_counted(monkeypatch: pytest.MonkeyPatch, match: Callable[[list[str]], Any]) -> None:
    """No matching ends with more than its names may take, and what it takes is what it does."""
    taken: list[int] = []
    take = patterns.Looks.take
    monkeypatch.setattr(patterns.Looks, "take", lambda looks, num: taken.append(num) or take(looks, num))
    monkeypatch.setattr(patterns, "SPARE_LOOKS", 2**13)
    with pytest.raises(PatternError, match="too many comparisons"):
        match(DEEP)
    assert sum(taken[:-1]) <= 2**13 + LOOKS_A_NAME * len(DEEP) * 10


def test_long_names_of_a_file_do_not_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of a child process is remembered with the names that it is about."""
    patterns._known_reply_of_child.cache_clear()
    names = [f"{name}.{number}" for name in DEEP for number in range(3)]
    for most, num_known in ((len("".join(names)) - 1, 0), (len("".join(names)), 1)):
        monkeypatch.setattr(patterns, "MAX_KNOWN_CHARS", most)
        assert patterns.fullmatches(r"(\w+\.)*x", names) == {}
        assert patterns._known_reply_of_child.cache_info().currsize == num_known


def test_a_large_model_with_a_rank_for_each_linear_is_far_from_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(60)
        for expert in range(128)
        for part in ("gate", "up", "down")
    ]
    monkeypatch.setattr(patterns, "SPARE_LOOKS", SPARE_LOOKS // 2)
    ranks = dict.fromkeys(names[: 2**13], 8)
    assert pattern_values(ranks, names).keys() == ranks.keys()
    saved = frozenset({"embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", *names[:100]})
    assert named_by_ends(saved, names, with_parents=True).keys() == set(names[:100])
    assert named_by_spans(saved, names).keys() == set(names[:100])


TEXTS = st.text("ab.", min_size=1, max_size=9)


@settings(max_examples=300, deadline=None)
@given(st.frozensets(TEXTS, max_size=6), st.lists(TEXTS, max_size=4, unique=True))
def test_names_are_found_by_the_definition(entries: frozenset[str], names: list[str]) -> None:
    def by(is_said: Callable[[str, str], bool]) -> dict[str, frozenset[str]]:
        found = {name: frozenset(entry for entry in entries if is_said(entry, name)) for name in names}
        return {name: hits for name, hits in found.items() if hits}

    def ends_a_parent(entry: str, name: str) -> bool:
        return any(name[:stop].endswith(entry) for stop in range(len(name)) if name[stop] == ".")

    assert named_by_ends(entries, names) == by(lambda entry, name: name.endswith(entry))
    assert named_by_ends(entries, names, with_parents=True) == by(
        lambda entry, name: name.endswith(entry) or ends_a_parent(entry, name)
    )
    assert named_by_spans(entries, names) == by(lambda entry, name: f".{entry}." in f".{name}.")
