"""The report that `loraplex adapter inspect` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.adapters.fields import Verdict
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.weights import LoRAModel
from loraplex.config import LoRAConfig
from loraplex.core import LongContexts
from loraplex.errors import AdapterConfigMissingError, AdapterPathNotFoundError, AdapterValidationError
from tests.adapters.peft_oracle import (
    PeftAdapter,
    all_targets_of,
    edit_config,
    load,
    make_adapter,
    new_base,
    read_tensors,
    write_tensors,
)


@pytest.fixture
def adapter(tmp_path: Path) -> PeftAdapter:
    return make_adapter(
        tmp_path / "sql",
        dtype=torch.bfloat16,
        r=4,
        lora_alpha=8,
        rank_pattern={"v_proj": 2},
        target_modules=["q_proj", "v_proj"],
    )


def test_a_good_adapter(adapter: PeftAdapter) -> None:
    report = inspect_adapter(adapter.path, adapter.targets)
    assert report.is_honoured
    assert report.is_checked_against_base
    assert report.ranks == {4: 3, 2: 3}
    assert report.scalings == {2.0: 3, 4.0: 3}
    assert report.dtypes == {"BF16": 12}
    assert (report.num_tensors, report.weight_file) == (12, "adapter_model.safetensors")
    assert report.modules == tuple(sorted(adapter.layers))
    model = LoRAModel.from_local_checkpoint(
        adapter.path, PEFTHelper.from_local_dir(adapter.path), adapter.targets, LoRAConfig()
    )
    assert (report.adapter_digest, report.nbytes) == (model.adapter_digest, model.nbytes)
    verdicts = {field.name: field.verdict for field in report.fields}
    assert (verdicts["r"], verdicts["lora_dropout"]) == (Verdict.HONOURED, Verdict.IGNORED)
    text = report.describe()
    for word in (
        "would be loaded",
        "rank: 2 (3 modules), 4 (3 modules)",
        "BF16 (12 tensors)",
        model.adapter_digest,
        "honoured r = 4",
    ):
        assert word in text


def test_it_says_which_files_are_about_text(adapter: PeftAdapter) -> None:
    assert "text of its requests" not in inspect_adapter(adapter.path).describe()
    (adapter.path / "chat_template.jinja").write_text("x")
    (adapter.path / "tokenizer.json").write_text("{}")
    assert "text of its requests: tokenizer.json, chat_template.jinja" in inspect_adapter(adapter.path).describe()


def test_it_says_what_activates_an_alora(adapter: PeftAdapter) -> None:
    plain = inspect_adapter(adapter.path, adapter.targets).adapter_digest
    edit_config(adapter.path, alora_invocation_tokens=[60, 61])
    report = inspect_adapter(adapter.path, adapter.targets)
    assert report.is_honoured
    assert report.adapter_digest != plain
    assert "honoured alora_invocation_tokens = [60, 61]" in report.describe()
    edit_config(adapter.path, bias="all")
    assert inspect_adapter(adapter.path).reasons[0].startswith("bias='all' with alora_invocation_tokens")


def test_an_alora_that_no_prompt_can_activate_is_refused(adapter: PeftAdapter) -> None:
    """The base has 64 tokens. Without a base that is not known."""
    targets = all_targets_of(new_base("llama"))
    edit_config(adapter.path, alora_invocation_tokens=[60, 63])
    assert inspect_adapter(adapter.path, targets).is_honoured
    edit_config(adapter.path, alora_invocation_tokens=[60, 99, 64])
    assert inspect_adapter(adapter.path).is_honoured
    reason = "alora_invocation_tokens: token 64 is in no prompt, and it would never act: its vocabulary has 64 tokens"
    assert inspect_adapter(adapter.path, targets).reasons == (f"{reason}; give the ids of the training",)
    with pytest.raises(AdapterValidationError, match="token 64 is in no prompt"):
        load(adapter.path, targets)


def test_it_says_how_far_the_context_reaches(adapter: PeftAdapter) -> None:
    edit_config(adapter.path, context_length=200)
    base = LongContexts("default", 64, 1.0, (4.0,))
    report = inspect_adapter(adapter.path, adapter.targets, None, base)
    assert report.is_honoured
    assert "context: 200 tokens, the base's 64 positions stretched by 4; a step" in report.describe()
    refused = inspect_adapter(adapter.path, adapter.targets, None, replace(base, scaling_factors=()))
    assert "long_lora_scaling_factors allows none: start the server with 4 among them" in refused.describe()
    assert "context: a longer one, which depends on the base's positions" in inspect_adapter(adapter.path).describe()
    edit_config(adapter.path, context_length=64)
    assert "context:" not in inspect_adapter(adapter.path, adapter.targets, None, base).describe()


def test_without_a_base_it_says_so_and_finds_what_it_can(adapter: PeftAdapter) -> None:
    report = inspect_adapter(adapter.path)
    assert report.is_honoured
    assert "not checked against a base model" in report.describe()
    tensors = read_tensors(adapter.path)
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    del tensors[f"{q}.lora_B.weight"]
    tensors[f"{q.replace('0', '1')}.lora_A.weight"][0, 0] = float("nan")
    tensors[f"{q.replace('0', '2')}.lora_A.weight"] = torch.ones(5, 32)
    tensors["junk"] = torch.ones(1)
    tensors["a.lora_A.weight"] = torch.ones(4, 2, dtype=torch.int32)
    tensors[f"{q.replace('0', '3')}.lora_A.default.weight"] = torch.ones(4, 32)
    tensors[f"{q.replace('0', '3')}.lora_A.weight"] = torch.ones(4, 32)
    write_tensors(adapter.path, tensors)
    edit_config(adapter.path, use_dora=True)
    reasons = "\n".join(inspect_adapter(adapter.path).reasons)
    expected = ("no lora_B.weight", "NaN", "[5, 32]", "rank should be 4", "junk", "dtype I32", "use_dora")
    for word in (*expected, "are the same part of the adapter"):
        assert word in reasons


def test_orders_for_a_terminal_are_shown_and_not_obeyed(adapter: PeftAdapter) -> None:
    edit_config(adapter.path, base_model_name_or_path="\x1b[2Jbase", **{"\x1b[31mbad\x07": 1, "two\nlines": 2})
    text = inspect_adapter(adapter.path).describe()
    assert "base model: \\x1b[2Jbase" in text
    assert "\\x1b[31mbad\\x07 = 1" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_refused_adapter_lists_every_reason(adapter: PeftAdapter) -> None:
    edit_config(adapter.path, use_qalora=True, target_modules=["q_proj", "v_proj", "k_proj"])
    report = inspect_adapter(adapter.path, adapter.targets, LoRAConfig(max_lora_rank=2))
    assert not report.is_honoured
    reasons = "\n".join(report.reasons)
    for word in ("use_qalora", "max_lora_rank", "k_proj"):
        assert word in reasons
    assert "is refused" in report.describe()
    assert {field.name for field in report.fields if field.verdict is Verdict.REFUSED} == {"use_qalora"}


def test_another_base_is_a_reason(adapter: PeftAdapter) -> None:
    wide = {
        name: [99 if size == 32 else size for size in tensor.shape]
        for name, tensor in read_tensors(adapter.path).items()
    }
    write_tensors(adapter.path, {name: torch.ones(shape) for name, shape in wide.items()})
    assert "hidden size 99 against 32" in inspect_adapter(adapter.path, adapter.targets).reasons[0]


def test_unreadable_weights_are_a_reason(adapter: PeftAdapter) -> None:
    file = adapter.path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    report = inspect_adapter(adapter.path, adapter.targets)
    assert "truncated" in report.reasons[0]
    assert (report.adapter_digest, report.nbytes) == ("", 0)
    file.unlink()
    assert "has none of" in inspect_adapter(adapter.path).reasons[0]


def test_a_bad_pattern_is_a_reason(adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_config(adapter.path, rank_pattern={"(": 3})
    assert any("rank_pattern" in reason for reason in inspect_adapter(adapter.path).reasons)
    monkeypatch.setattr("loraplex.adapters.patterns.DEADLINE_S", 0.5)
    edit_config(adapter.path, rank_pattern={r"(\w|.)*X": 3})
    for targets in (None, adapter.targets):
        assert any("takes longer" in reason for reason in inspect_adapter(adapter.path, targets).reasons)


def test_without_a_config_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(AdapterConfigMissingError):
        inspect_adapter(tmp_path)
    with pytest.raises(AdapterPathNotFoundError):
        inspect_adapter(tmp_path / "nowhere")
