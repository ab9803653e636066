"""What is exported is what is served: peft and Loraplex read it to the same adapter."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors import safe_open

from loraplex.adapters import tensors, weights
from loraplex.adapters.merging import export, written
from loraplex.adapters.merging import outline as outlines
from loraplex.adapters.merging.export import export_adapter, export_directory
from loraplex.adapters.merging.outline import Origin, Outline
from loraplex.adapters.merging.part_folder import ABANDONED_S, LOCK_NAME, PART_PREFIX, held, remove_abandoned
from loraplex.adapters.merging.written import MadeAdapter, write_directory
from loraplex.adapters.source import AdapterSource
from loraplex.errors import (
    AdapterConflictError,
    AdapterContentChangedError,
    AdapterDiskFullError,
    AdapterPathNotFoundError,
    AdapterTooLargeError,
    AdapterValidationError,
    RequestAbortedError,
)
from loraplex.frontend.making import AdapterMaker
from tests.adapters.peft_oracle import (
    load,
    make_adapter,
    new_base,
    peft_reads,
    read_config,
    save_kind,
    shard,
    targets_of,
    to_bin,
    tuned_layers,
)

ROOM = 2**30
TARGETS = {"target_modules": ["q_proj", "down_proj"]}
AS_THEY_ARE = {
    "lora": peft.LoraConfig(r=4, lora_alpha=6, rank_pattern={"down_proj": 2}, alpha_pattern={"q_proj": 3}, **TARGETS),
    "rslora": peft.LoraConfig(r=4, use_rslora=True, layers_to_transform=[0, 2], **TARGETS),
    "lora_bias": peft.LoraConfig(r=2, lora_bias=True, **TARGETS),
    "alora": peft.LoraConfig(r=4, alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM", **TARGETS),
    "dora": peft.LoraConfig(r=4, use_dora=True, **TARGETS),
    "lora without a target": peft.LoraConfig(r=4, exclude_modules=["down_proj"], **TARGETS),
    "ia3": peft.IA3Config(target_modules=["o_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": peft.VeraConfig(r=4, **TARGETS),
}
CONVERTED = {
    "adalora": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, lora_alpha=7, **TARGETS),
    "loha": peft.LoHaConfig(r=2, alpha=3, **TARGETS),
    "lokr": peft.LoKrConfig(r=2, alpha=3, decompose_both=True, rank_pattern={"q_proj": 4}, **TARGETS),
}


def logits_of(path: Path, family: str = "llama") -> torch.Tensor:
    with torch.inference_mode():
        return peft_reads(path, family)(input_ids=torch.arange(40).view(2, 20) % 64).logits


@pytest.mark.parametrize("name", [*AS_THEY_ARE, *CONVERTED])
def test_peft_loads_an_export_to_the_same_logits(tmp_path: Path, name: str) -> None:
    save_kind(tmp_path / "sql", {**AS_THEY_ARE, **CONVERTED}[name])
    export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    wanted = logits_of(tmp_path / "sql")
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        base = new_base("llama").double()(input_ids=torch.arange(40).view(2, 20) % 64).logits
    assert (base - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("name", AS_THEY_ARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_converted_keeps_its_digest_and_its_dtype(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    targets = save_kind(tmp_path / "sql", AS_THEY_ARE[name], dtype=dtype)
    made = export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    assert load(tmp_path / "out", targets).adapter_digest == load(tmp_path / "sql", targets).adapter_digest
    assert read_config(tmp_path / "out") == read_config(tmp_path / "sql")
    assert made.origin.startswith(
        f"{name.upper() if name in ('ia3', 'vera') else 'LORA'}{' with DoRA' * (name == 'dora')} '"
    )


@pytest.mark.parametrize("family", ["qwen2", "llama_bias"])
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_exported_too(tmp_path: Path, family: str, bias: str) -> None:
    adapter = make_adapter(tmp_path / "sql", family, bias=bias, r=2)
    export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    wanted, found = load(adapter.path, adapter.targets), load(tmp_path / "out", adapter.targets)
    assert found.adapter_digest == wanted.adapter_digest
    assert any(layer.bias is not None for layer in found)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_kind_is_exported_as_the_lora_that_it_became(tmp_path: Path, name: str) -> None:
    targets = save_kind(tmp_path / "sql", CONVERTED[name])
    export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    served, found = load(tmp_path / "sql", targets), load(tmp_path / "out", targets)
    assert found.layers.keys() == served.layers.keys()
    for module, layer in served.layers.items():
        ours = found.layers[module]
        assert torch.equal(ours.lora_a, layer.lora_a)
        assert torch.equal(ours.lora_b, layer.lora_b)
        assert ours.scaling == pytest.approx(layer.scaling, rel=1e-15)
    assert tuned_layers(peft_reads(tmp_path / "out")).keys() == served.layers.keys()
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert name.upper() in file.metadata()["made_of"]


def test_biases_of_a_converted_kind_are_refused_by_name(tmp_path: Path) -> None:
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], bias="all")
    save_kind(tmp_path / "sql", config, family="qwen2")
    with pytest.raises(AdapterValidationError, match=r"k_proj\.bias"):
        export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    assert [path.name for path in tmp_path.iterdir()] == ["sql"]


@pytest.mark.parametrize("form", [to_bin, lambda path: shard(path, 3)], ids=["bin", "shards"])
def test_an_export_is_one_safetensors_file(tmp_path: Path, form: object) -> None:
    make_adapter(tmp_path / "sql", r=2)
    assert callable(form)
    form(tmp_path / "sql")
    export_directory(str(tmp_path / "sql"), tmp_path / "out", ROOM)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    targets = targets_of(new_base("llama"))
    assert load(tmp_path / "out", targets).adapter_digest == load(tmp_path / "sql", targets).adapter_digest


# -------------------------------------------------------------------------------------------------------------- bounds


def registered(path: Path, digest: str) -> Origin:
    """As a server has it, which knows what was loaded."""
    return Origin("sql", str(path), AdapterSource(), digest)


@pytest.mark.parametrize(
    "store", [lambda path: None, to_bin, lambda path: shard(path, 3)], ids=["safetensors", "bin", "shards"]
)
def test_files_that_changed_are_compared_with_nothing_but_the_digest(
    tmp_path: Path, store: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = save_kind(tmp_path / "sql", AS_THEY_ARE["lora"])
    store(tmp_path / "sql")
    digest = load(tmp_path / "sql", targets).adapter_digest
    _, found = export_adapter(registered(tmp_path / "sql", digest), ROOM)
    assert found == digest
    compared: list[Outline] = []
    monkeypatch.setattr(export, "_exported", lambda outline, limits: compared.append(outline))
    monkeypatch.setattr(outlines, "_modules", lambda *args: compared.append(args))
    with pytest.raises(AdapterContentChangedError):
        export_adapter(registered(tmp_path / "sql", "0" * 64), ROOM)
    assert compared == []


@pytest.mark.parametrize(("name", "form"), [("lora", "safetensors"), ("lora", "bin"), ("loha", ""), ("vera", "")])
def test_an_export_takes_no_more_memory_than_it_may(
    tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LoHa as a LoRA is many times its file; a .bin is in memory three times while it is read."""
    save_kind(tmp_path / "sql", {**AS_THEY_ARE, **CONVERTED}[name])
    if form == "bin":
        to_bin(tmp_path / "sql")
    read: list[object] = []
    really_read, really_load = weights.read_tensors, tensors.read_bin
    monkeypatch.setattr(weights, "read_tensors", lambda *args: read.append(args) or really_read(*args))
    monkeypatch.setattr(tensors, "read_bin", lambda *args: read.append(args) or really_load(*args))
    with pytest.raises(AdapterTooLargeError, match=r"the export would take (\d+) bytes .*max_merge_bytes") as caught:
        export_directory(str(tmp_path / "sql"), tmp_path / "out", 2048)
    assert read == []
    needed = int(caught.value.message.split(" bytes")[0].rpartition(" ")[2])
    with pytest.raises(AdapterTooLargeError):
        export_directory(str(tmp_path / "sql"), tmp_path / "out", needed - 1)
    made = export_directory(str(tmp_path / "sql"), tmp_path / "out", needed)
    assert made.nbytes <= needed


def test_a_cancelled_export_ends_before_its_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = load(tmp_path / "sql", save_kind(tmp_path / "sql", AS_THEY_ARE["lora"])).adapter_digest
    origin, asked = registered(tmp_path / "sql", digest), 0

    def count() -> bool:
        nonlocal asked
        asked += 1
        return False

    export_adapter(origin, ROOM, count)
    assert asked >= 4
    for step in range(asked):
        answers = iter([*[False] * step, True])
        with pytest.raises(RequestAbortedError):
            export_adapter(origin, ROOM, lambda answers=answers: next(answers))


# --------------------------------------------------------------------------------------------------------- directories


def small() -> MadeAdapter:
    return MadeAdapter({"r": 1}, {"a": torch.ones(4)}, "a test")


def test_a_folder_that_is_there_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("out", "dangling"):
        with pytest.raises(AdapterConflictError, match=name):
            write_directory(small(), tmp_path / name)
    with pytest.raises(AdapterPathNotFoundError):
        write_directory(small(), tmp_path / "missing" / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_seen_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written.shutil, "disk_usage", lambda path: SimpleNamespace(free=written.SPARE_DISK_BYTES))
    with pytest.raises(AdapterDiskFullError, match="16 bytes are to be written"):
        write_directory(small(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(written, "save_file", fail)
    with pytest.raises(AdapterDiskFullError, match="No space left on device"):
        write_directory(small(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


MAKER = """
import sys, time
from pathlib import Path
from loraplex.adapters.merging import written

def hang(*args):
    print("writes", flush=True)
    time.sleep(999)

written.save_file = hang
written.write_directory(written.MadeAdapter({}, {}, "test"), Path(sys.argv[1]))
"""


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PART_PREFIX}*"))


def test_what_a_killed_maker_left_is_removed_before_the_next_export(tmp_path: Path) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path / "slow")], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    with maker:
        try:
            assert maker.stdout.readline() == "writes\n"
            (part,) = parts_in(tmp_path)
            write_directory(small(), tmp_path / "first")
            remove_abandoned(tmp_path)
            assert parts_in(tmp_path) == [part], "its maker lives"
        finally:
            maker.kill()
    write_directory(small(), tmp_path / "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    for name in ("first", "second"):
        assert len(list((tmp_path / name).iterdir())) == 2, "no lock is left in an adapter"


def test_a_server_removes_at_its_start_what_has_no_maker(tmp_path: Path) -> None:
    lost, kept = tmp_path / f"{PART_PREFIX}lost", tmp_path / f"{PART_PREFIX}kept"
    for path in (lost, kept):
        path.mkdir()
    with held(lost):
        pass
    with held(kept):
        AdapterMaker(None, None, None, tmp_path, ROOM).close()
        assert parts_in(tmp_path) == [kept]


def test_a_link_is_no_temporary_folder(tmp_path: Path) -> None:
    made, other = tmp_path / "made", tmp_path / "other"
    for path in (made, other):
        path.mkdir()
    with held(other):
        pass
    (made / f"{PART_PREFIX}link").symlink_to(other)
    (made / f"{PART_PREFIX}folder").mkdir()
    (made / f"{PART_PREFIX}folder" / LOCK_NAME).symlink_to(other / LOCK_NAME)
    remove_abandoned(made)
    assert len(parts_in(made)) == 2
    assert [path.name for path in other.iterdir()] == [LOCK_NAME]


def test_a_file_system_without_locks_keeps_them_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    lost = tmp_path / f"{PART_PREFIX}lost"
    lost.mkdir()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(lost):
        remove_abandoned(tmp_path)
        assert list(lost.iterdir()) == []
    write_directory(small(), tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_what_an_ended_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    import os
    import time

    old, young, other = (tmp_path / name for name in (f"{PART_PREFIX}old", f"{PART_PREFIX}young", "sql-1"))
    for path in (old, young, other):
        path.mkdir()
    for path in (old, other):
        os.utime(path, (time.time() - ABANDONED_S - 9,) * 2)
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([young.name, other.name])
