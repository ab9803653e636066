"""What `loraplex model inspect` says of a model against the model that is loaded, and of broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loraplex.errors import ModelNotFoundError
from loraplex.kernels.ops import get_backend
from loraplex.models.config import ModelConfig
from loraplex.models.inspect import MAX_REASONS, inspect_model
from loraplex.models.loader import load_model
from tests.fixtures import ModelZoo
from tests.models.paged_runner import CPU


def changed_copy(base: Path, to: Path, **changes: Any) -> Path:
    """A copy with other fields in its config.json."""
    shutil.copytree(base, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bytes_are_those_of_the_loaded_model(zoo: ModelZoo, family: str) -> None:
    """Each form of the kernels that run here, to the byte."""
    base, ops = zoo.base(family), get_backend("auto", CPU)
    report, config = inspect_model(str(base)), ModelConfig.from_dir(base)
    assert report.is_served, report.reasons
    dtype = getattr(torch, config.effective_dtype("auto"))
    forms = [form for form in report.forms if form.device == "cpu"]
    assert [form.quantization for form in forms] == ["", *ops.quantizations]
    for form in forms:
        quantization = form.quantization or None
        model = load_model(base, config, dtype, CPU, "auto", 0, ops, False, quantization=quantization)
        kept = sum(tensor.nbytes for layer in model.weighted_layers() for tensor in layer.prepared().values())
        assert form.weight_bytes == kept, form
    assert report.num_parameters == sum(t.numel() for t in load_file(base / "model.safetensors").values())
    block = torch.empty(model.kv_shape(1, 16), dtype=dtype)
    assert report.kv_token_bytes * 16 == block.nbytes
    modules = {s.module_name for t in model.lora_targets() for s in t.slices if ".layers." in s.module_name}
    assert sum(t.num_modules for t in report.targets) == len([m for m in modules if m.endswith("_proj")])


def test_a_mixture_of_experts_has_the_forms_of_a_gpu(zoo: ModelZoo) -> None:
    """To the byte, of those that the Triton kernels of experts read."""
    triton = pytest.importorskip("loraplex.kernels.triton.backend")
    base, ops = zoo.base("mixtral"), triton.TritonBackend(CPU)
    report, config = inspect_model(str(base)), ModelConfig.from_dir(base)
    assert report.is_served, report.reasons
    forms = {form.quantization: form.weight_bytes for form in report.forms if form.device == "cuda"}
    assert set(forms) == {"", *ops.quantizations}
    for quantization, weight_bytes in forms.items():
        model = load_model(base, config, torch.float32, CPU, "auto", 0, ops, False, quantization=quantization or None)
        tensors = (tensor for layer in model.weighted_layers() for tensor in layer.prepared().values())
        kept = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}  # a tied head is its embedding
        assert weight_bytes == sum(kept.values()), quantization


def test_sharded_files_are_one_model(zoo: ModelZoo) -> None:
    whole = inspect_model(str(zoo.base("qwen3")))
    shards = inspect_model(str(zoo.base("qwen3", options={"max_shard_size": "500KB"})))
    assert whole.is_served
    assert shards.checkpoint == whole.checkpoint
    assert shards.forms == whole.forms


def test_tensors_are_not_read(zoo: ModelZoo, tmp_path: Path) -> None:
    """A file of the right size with nothing behind its header says as much."""
    base = changed_copy(zoo.base("llama"), tmp_path / "m")
    before, file = inspect_model(str(base)), base / "model.safetensors"
    size = file.stat().st_size
    length = int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, 8 + length)
    os.truncate(file, size)
    assert inspect_model(str(base)) == before


def _not_json(path: Path) -> None:
    (path / "config.json").write_text("{")


def _nested(path: Path) -> None:
    (path / "config.json").write_text("[" * 100_000)


def _a_pipe(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


def _weights_are_a_pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def _truncated(path: Path) -> None:
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)


def _cut_in_the_header(path: Path) -> None:
    os.truncate(path / "model.safetensors", 40)


def _long_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")


def _pointer(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" + b" " * 100)


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _outside(path: Path) -> None:
    index = {"weight_map": {"a": "../other.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _odd_entry(path: Path) -> None:
    header = json.dumps({"a\x1b[31m": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_not_json, "config.json is damaged: no JSON"),
        (_nested, "config.json is damaged"),
        (_a_pipe, "config.json is not a regular file"),
        (_weights_are_a_pipe, "model.safetensors is not a regular file"),
        (_truncated, "model.safetensors is truncated: its tensors end at"),
        (_cut_in_the_header, "model.safetensors is truncated: it has 40 bytes"),
        (_long_header, "its header would have 1099511627776 bytes"),
        (_pointer, "is not safetensors"),
        (_no_weights, "has no model.safetensors and no model.safetensors.index.json"),
        (_outside, "'../other.safetensors', which is not the name of a file beside it"),
        (_odd_entry, "has a wrong shape or offset"),
    ],
)
def test_a_broken_directory_is_a_reason(
    zoo: ModelZoo, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    base = changed_copy(zoo.base("llama"), tmp_path / "m")
    damage(base)
    report = inspect_model(str(base))
    assert not report.is_served
    assert any(reason in each for each in report.reasons), report.reasons
    assert not report.forms
    assert report.describe().isprintable() or "\x1b" not in report.describe()
    json.dumps(asdict(report))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are "),
        ({"architectures": [5]}, "architectures must be a list of names, got [5]"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"text_config": {"hidden_size": 10**12}}, "hidden_size is 1000000000000"),
        ({"intermediate_size": 72}, "mlp.down_proj.weight has shape "),
        ({"num_hidden_layers": 1}, "not used by the model: model.layers.1."),
        ({"torch_dtype": "float8", "dtype": "float8"}, "dtype 'float8' is not one of"),
    ],
)
def test_what_a_load_refuses_is_refused(zoo: ModelZoo, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    base = changed_copy(zoo.base("llama"), tmp_path / "m", **changes)
    report = inspect_model(str(base))
    assert any(reason in each for each in report.reasons), report.reasons
    assert len(report.reasons) <= MAX_REASONS
    assert report.checkpoint, "what the files hold is said anyway"


def test_what_is_no_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no such directory"):
        inspect_model(str(tmp_path / "none"))
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json: give the directory of a model"):
        inspect_model(str(tmp_path))


def test_a_hub_id_is_judged_by_headers_alone(zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The weights are not fetched: their headers come by huggingface_hub's range requests."""
    from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo

    base, fetched = zoo.base("llama"), tmp_path / "snapshot"
    shutil.copytree(base, fetched, ignore=shutil.ignore_patterns("*.safetensors"))
    data = (base / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    infos = {name: TensorInfo(t["dtype"], t["shape"], tuple(t["data_offsets"])) for name, t in header.items()}
    files = {"model.safetensors": SafetensorsFileMetadata({}, infos)}

    def snapshot_download(name: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SafetensorsRepoMetadata(None, False, dict.fromkeys(infos, ""), files),
    )
    there, here = inspect_model("org/name"), inspect_model(str(base))
    assert (there.forms, there.checkpoint, there.reasons) == (here.forms, here.checkpoint, ())
    assert here.forms
    infos["model.layers.0.other.weight"] = infos.pop("model.norm.weight")
    reason = "1 missing: model.norm.weight; 1 not used by the model: model.layers.0.other.weight"
    assert reason in inspect_model("org/name").reasons[0]


def test_the_command_prints_a_table_or_json(zoo: ModelZoo, tmp_path: Path) -> None:
    base = zoo.base("llama")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "loraplex", "model", "inspect", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    shown, as_json = run(str(base)), run(str(base), "--json")
    assert (shown.returncode, as_json.returncode) == (0, 0), shown.stderr + as_json.stderr
    assert "would be served" in shown.stdout
    assert "--quantization" in shown.stdout
    assert json.loads(as_json.stdout)["forms"][0]["weight_bytes"] > 0
    refused = run(str(changed_copy(base, tmp_path / "m", model_type="mamba", architectures=["MambaForCausalLM"])))
    assert refused.returncode == 1
    assert "refused: " in refused.stdout
    assert "Traceback" not in refused.stderr
