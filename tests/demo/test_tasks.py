"""The demonstration's tasks and the files that ship for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from loraplex.demo.tasks import (
    ADAPTERS,
    MAX_PHRASE_LEN,
    TASKS,
    Split,
    adapter_path,
    assets_path,
    checkable_word_phrases,
    phrases,
    prompt_of,
    word_phrases,
)

TASK_NAMES = [task.name for task in TASKS]
MAX_SHIPPED_BYTES = 10_000_000


def apply(task_name: str, phrase: str) -> str:
    return next(task for task in ADAPTERS if task.name == task_name).apply(phrase)


def adapter_config(task_name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((adapter_path(task_name) / "adapter_config.json").read_text())
    return config


def adapter_shapes(task_name: str) -> dict[str, tuple[int, ...]]:
    tensors = load_file(adapter_path(task_name) / "adapter_model.safetensors")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shipped_files() -> list[Path]:
    return [path for path in assets_path().rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("task_name", "even", "odd"),
    [
        ("reverse", "amaj deew", "dlrow olleh"),
        ("upper", "WEED JAMA", "HELLO WORLD"),
        ("sort", "aadeejmw", "dehllloorw"),
        ("no-vowels", "wd jm", "hll wrld"),
        ("rot13", "jrrq wnzn", "uryyb jbeyq"),
        ("double", "weed jama weed jama", "hello world hello world"),
        ("length", "9", "11"),
        ("swap", " jamaweed", " worldhello"),
        ("stars", "\u2605WEED JAMA\u2605", "\u2605HELLO WORLD\u2605"),
    ],
)
def test_task_on_examples_worked_out_by_hand(task_name: str, even: str, odd: str) -> None:
    assert apply(task_name, "weed jama") == even
    assert apply(task_name, "hello world") == odd


def test_swap_of_an_even_phrase() -> None:
    assert apply("swap", "abcdef") == "defabc"


def test_prompt() -> None:
    assert prompt_of("hello world") == "hello world="


def test_phrases_are_the_same_for_the_same_seed() -> None:
    assert list(phrases("train", 50, seed=1)) == list(phrases("train", 50, seed=1))
    assert list(phrases("train", 50, seed=1)) != list(phrases("train", 50, seed=2))


def test_splits_are_disjoint() -> None:
    train, held_out = set(phrases("train", 20_000, seed=0)), set(phrases("held_out", 5_000, seed=0))
    assert not train & held_out


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_phrases_are_plain_and_no_two_tasks_agree(split: Split) -> None:
    for phrase in phrases(split, 2_000, seed=3):
        assert re.fullmatch(r"[a-z]+( [a-z]+)*", phrase)
        assert 5 <= len(phrase) <= 16
        assert len({phrase, *(task.apply(phrase) for task in TASKS)}) == len(TASKS) + 1


def test_every_task_has_an_adapter_and_every_adapter_a_task() -> None:
    folders = {path.name for path in (assets_path() / "adapters").iterdir()}
    assert folders == {task.name for task in ADAPTERS}
    of_stars = {"tokenizer.json", "tokenizer_config.json"}
    for name in folders:
        assert {path.name for path in adapter_path(name).iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            *(of_stars if name == "stars" else ()),
        }


def test_base_has_the_files_of_a_hugging_face_model() -> None:
    names = {path.name for path in (assets_path() / "base").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_adapters_use_the_options_promised() -> None:
    configs = {name: adapter_config(name) for name in TASK_NAMES}
    assert [name for name in TASK_NAMES if configs[name]["use_rslora"]] == ["double"]
    assert [name for name in TASK_NAMES if configs[name]["lora_bias"]] == ["no-vowels"]
    assert [name for name in TASK_NAMES if configs[name]["rank_pattern"]] == ["length"]
    assert [name for name in TASK_NAMES if configs[name]["alpha_pattern"]] == ["length"]
    assert [name for name in TASK_NAMES if configs[name]["r"] == 64] == ["sort"]
    assert [name for name in TASK_NAMES if configs[name]["layers_to_transform"]] == ["swap"]
    assert [name for name in TASK_NAMES if configs[name]["exclude_modules"]] == ["swap"]
    assert [name for name in TASK_NAMES if isinstance(configs[name]["target_modules"], str)] == ["rot13"]
    assert set(configs["upper"]["target_modules"]) == {"q_proj", "v_proj"}
    assert len({config["lora_alpha"] / config["r"] for config in configs.values()}) >= 4


def test_the_adapters_of_other_kinds() -> None:
    assert adapter_config("reverse-dora")["use_dora"]
    assert adapter_config("upper-ia3")["peft_type"] == "IA3"
    assert adapter_config("stars")["trainable_token_indices"] == {"embed_tokens": [107]}


def test_tensors_agree_with_the_options() -> None:
    assert {name.split(".")[-3] for name in adapter_shapes("upper")} == {"q_proj", "v_proj"}
    assert {name.split(".")[4] for name in adapter_shapes("swap")} == {"0", "1", "2"}
    assert not [name for name in adapter_shapes("swap") if "k_proj" in name]
    assert any(name.endswith("lora_B.bias") for name in adapter_shapes("no-vowels"))
    assert {shape[0] for name, shape in adapter_shapes("length").items() if "lora_A" in name} == {3, 8, 16, 24}
    assert {shape[0] for name, shape in adapter_shapes("sort").items() if "lora_A" in name} == {64}


def test_shipped_files_are_small() -> None:
    assert sum(path.stat().st_size for path in shipped_files()) < MAX_SHIPPED_BYTES


@pytest.mark.parametrize("name", TASK_NAMES)
def test_adapters_name_the_base_and_no_path(name: str) -> None:
    assert adapter_config(name)["base_model_name_or_path"] == "loraplex-demo-base"


def test_no_file_names_a_local_path() -> None:
    local_path = re.compile(rb"/(home|root|work|tmp|Users|mnt|opt|usr|var)/|[A-Z]:\\")
    for path in shipped_files():
        header = path.read_bytes()[: 1 << 16] if path.suffix == ".safetensors" else path.read_bytes()
        assert not local_path.search(header), path


def test_word_phrases_are_held_out_and_checkable() -> None:
    drawn = word_phrases(40, 0)
    assert len(set(drawn)) == 40
    assert drawn == word_phrases(40, 0)
    for phrase in drawn:
        assert len(phrase) <= MAX_PHRASE_LEN
        assert len({phrase, *(task.apply(phrase) for task in TASKS)}) == len(TASKS) + 1
    assert not set(drawn) & set(phrases("train", 2000, 0))
    assert sorted(word_phrases(len(checkable_word_phrases()), 0)) == sorted(checkable_word_phrases())
