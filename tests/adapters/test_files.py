"""Damaged and hostile files: an error that says what, never a crash, a hang or a huge allocation."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from loraplex.adapters import tensors
from loraplex.adapters.files import AdapterFolder, metadata_of
from loraplex.adapters.regular_file import RegularFile
from loraplex.config import LoRAConfig
from loraplex.errors import (
    AdapterError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterPathNotFoundError,
    AdapterPermissionError,
    AdapterTooLargeError,
    AdapterTruncatedError,
    AdapterWeightsMissingError,
)
from tests.adapters.peft_oracle import (
    PeftAdapter,
    edit_config,
    header_nbytes,
    load,
    new_base,
    read_config,
    shard,
    targets_of,
    to_bin,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None], tail: bytes = b"") -> None:
    file = path / "adapter_model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + tail)


def file_of(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def test_every_truncation_is_refused_and_most_are_named_so(adapter: PeftAdapter) -> None:
    file = adapter.path / "adapter_model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    for size in (0, 1, 7, 8, 9, 8 + length - 1, 8 + length, 8 + length + 1, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(AdapterTruncatedError, match=r"adapter_model\.safetensors is truncated"):
            load(adapter.path, adapter.targets)


@pytest.mark.parametrize(
    ("content", "error", "word"),
    [
        (b"not a safetensors file at all", AdapterFileFormatError, "not safetensors"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            AdapterFileFormatError,
            "git-lfs pointer",
        ),
        (struct.pack("<Q", 2**63) + b"{}", AdapterFileFormatError, "header would have"),
        (struct.pack("<Q", 50_000_000) + b"{}", AdapterFileFormatError, "header would have"),
        (struct.pack("<Q", 1000) + b"{}", AdapterTruncatedError, "a header of 1000 bytes"),
        (struct.pack("<Q", 4) + b"[1] ", AdapterFileFormatError, "does not begin"),
        (struct.pack("<Q", 4) + b"{1} ", AdapterFileFormatError, "not JSON"),
        (struct.pack("<Q", 7) + b'{"\xff":1}', AdapterFileFormatError, "not JSON"),
        (struct.pack("<Q", 0), AdapterFileFormatError, "does not begin"),
        (struct.pack("<Q", 7) + b'{"a":1}', AdapterFileFormatError, "not dtype, shape and data_offsets"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":1}', AdapterFileFormatError, "twice"),
        (file_of({"__metadata__": {"a": [5e-324] * 2000}}), AdapterFileFormatError, "numbers of over 20 digits"),
        (file_of({"__metadata__": {"a": [10**4000] * 6}}), AdapterFileFormatError, "numbers of over 20 digits"),
    ],
)
def test_what_is_no_safetensors(adapter: PeftAdapter, content: bytes, error: type[AdapterError], word: str) -> None:
    (adapter.path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(error, match=word):
        load(adapter.path, adapter.targets)


def test_long_numbers_of_a_configuration_are_counted(adapter: PeftAdapter) -> None:
    """A mebibyte of them kept the engine for half a second."""
    edit_config(adapter.path, x=[10**4000] * 6)
    with pytest.raises(AdapterFileFormatError, match=r"adapter_config\.json has more than 1024 numbers of over 20"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ({"a": 1}, {}),
        ({"a": 1, "__metadata__": {"config": '{"r": 8}'}, "b": {"c": "}"}}, {"config": '{"r": 8}'}),
        ({"__metadata__": 3}, {}),
        ({'a"__metadata__"': {"config": "x"}}, {}),
    ],
)
def test_metadata_alone_is_parsed(tmp_path: Path, header: object, found: object) -> None:
    """What is wrong elsewhere is the load's to refuse."""
    text = json.dumps(header).encode().replace(b'"b"', b'"\xff')
    (tmp_path / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert metadata_of(AdapterFolder(tmp_path, "x")) == found


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"a": [[]] * 2**18}, "has more than 262144 values"),
        ({"a": [10**4000] * 6}, "numbers of over 20 digits"),
        ({"a": "x" * 2**21}, "no JSON of at most 2097152 bytes"),
    ],
)
def test_metadata_is_counted_before_it_is_parsed(tmp_path: Path, metadata: object, word: str) -> None:
    """A server parsed it all at once: 16 MiB kept every client waiting for a second."""
    (tmp_path / "adapter_model.safetensors").write_bytes(file_of({"__metadata__": metadata}))
    with pytest.raises(AdapterFileFormatError, match=word):
        metadata_of(AdapterFolder(tmp_path, "x"))


def entry_of(header: dict[str, Any]) -> dict[str, Any]:
    return header[f"{Q}.lora_A.weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: entry_of(header).update(shape=[2**40, 2**40]),
        lambda header: entry_of(header).update(shape=[4, 31]),
        lambda header: entry_of(header).update(shape=[-4, 32]),
        lambda header: entry_of(header).update(shape=["4", 32]),
        lambda header: entry_of(header).update(shape=4),
        lambda header: entry_of(header).update(shape=[1] * 100),
        lambda header: entry_of(header).update(dtype="F16"),
        lambda header: entry_of(header).update(dtype=5),
        lambda header: entry_of(header).update(data_offsets=[0, 2**50]),
        lambda header: entry_of(header).update(data_offsets=[2**47, 2**47 + 512]),
        lambda header: entry_of(header).update(data_offsets=[0, 512, 1024]),
        lambda header: entry_of(header).update(data_offsets=[512, 0]),
        lambda header: entry_of(header).update(data_offsets=[0, True]),
        lambda header: header.update(again=dict(entry_of(header))),
        lambda header: header.pop(f"{Q}.lora_A.weight"),
    ],
)
def test_a_header_that_lies_is_refused_without_allocating_what_it_claims(adapter: PeftAdapter, change: Any) -> None:
    rewrite_header(adapter.path, change)
    with pytest.raises((AdapterFileFormatError, AdapterTruncatedError)):
        load(adapter.path, adapter.targets)
    with pytest.raises(SafetensorError), safe_open(adapter.path / "adapter_model.safetensors", "pt") as file:
        file.keys()


def test_bytes_after_the_last_tensor_are_refused(adapter: PeftAdapter) -> None:
    rewrite_header(adapter.path, lambda header: None, tail=b"more")
    with pytest.raises(AdapterFileFormatError, match="4 bytes follow"):
        load(adapter.path, adapter.targets)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_adapter_error_or_harmless(
    adapter: PeftAdapter, saved: PeftAdapter, data: st.DataObject
) -> None:
    """Flipped bytes and cuts: an error of ours, or a file that the safetensors library reads as the same numbers."""
    content = bytearray((saved.path / "adapter_model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(2500, len(content) - 1)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    file = adapter.path / "adapter_model.safetensors"
    file.write_bytes(content)
    try:
        model = load(adapter.path, adapter.targets)
    except AdapterError:
        return
    with safe_open(file, "pt") as reference:
        for layer in model:
            expected = reference.get_tensor(f"base_model.model.{layer.module_name}.lora_A.weight")
            assert torch.equal(layer.lora_a, expected)


def test_no_weights_at_all(adapter: PeftAdapter) -> None:
    (adapter.path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterWeightsMissingError, match=r"adapter_model\.safetensors"):
        load(adapter.path, adapter.targets)
    with pytest.raises(AdapterPathNotFoundError):
        header_nbytes(adapter.path / "nowhere")


def test_a_dangling_link_a_directory_and_a_fifo_are_no_weights(adapter: PeftAdapter, tmp_path: Path) -> None:
    file = adapter.path / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(AdapterWeightsMissingError, match="missing"):
        load(adapter.path, adapter.targets)
    file.unlink()
    file.mkdir()
    with pytest.raises(AdapterFileFormatError, match="not a regular file"):
        load(adapter.path, adapter.targets)
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(AdapterFileFormatError, match="not a regular file"):
        load(adapter.path, adapter.targets)


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read anything: drop its rights for a moment."""
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "."])
def test_permission_denied(adapter: PeftAdapter, name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:  # pytest's own directories are closed to others
        Path(parent).chmod(0o755)
        path = Path(shutil.copytree(adapter.path, Path(parent) / "sql"))
        (path / name).chmod(0)
        with without_privileges(), pytest.raises(AdapterPermissionError, match=r"'sql'.* may not be read"):
            load(path, adapter.targets)
        (path / name).chmod(0o755)


def test_an_adapter_beyond_the_host_budget_is_refused_with_both_numbers(adapter: PeftAdapter) -> None:
    nbytes = header_nbytes(adapter.path)
    with pytest.raises(AdapterTooLargeError, match=rf"{nbytes} bytes.* {nbytes - 1} bytes"):
        load(adapter.path, adapter.targets, LoRAConfig(host_memory_bytes=nbytes - 1))
    load(adapter.path, adapter.targets, LoRAConfig(host_memory_bytes=nbytes))


def test_a_huge_bin_is_refused_before_it_is_read(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    os.truncate(adapter.path / "adapter_model.bin", 2**42)  # sparse: no disk is used
    with pytest.raises(AdapterTooLargeError, match=str(2**42)):
        load(adapter.path, adapter.targets)


def test_a_failing_disk_is_an_adapter_error(adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(AdapterLoadError, match=r"'sql'.* cannot be read: Input/output error"):
        load(adapter.path, adapter.targets)
    with pytest.raises(AdapterLoadError, match="Input/output error"):
        header_nbytes(adapter.path)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(
    adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of one file with the data of another would be a wrong adapter, unnoticed."""
    file = adapter.path / "adapter_model.safetensors"
    shutil.copy(file, adapter.path / "new")
    shards = tensors.read_shards

    def read_then_replace(*arguments: Any) -> Any:
        found = shards(*arguments)
        os.replace(adapter.path / "new", file)
        return found

    monkeypatch.setattr(tensors, "read_shards", read_then_replace)
    with pytest.raises(AdapterLoadError, match="changed while it was read"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_file_that_is_written_while_it_is_read_is_refused(
    adapter: PeftAdapter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith("bin"):
        to_bin(adapter.path)
    read_into = RegularFile.read_into

    def read_and_touch(file: RegularFile, buffer: memoryview, offset: int) -> int:
        count = read_into(file, buffer, offset)
        if file.path.name == name:
            os.utime(file.path, ns=(1, file.path.stat().st_mtime_ns + 1))
        return count

    monkeypatch.setattr(RegularFile, "read_into", read_and_touch)
    with pytest.raises(AdapterLoadError, match="changed while it was read"):
        load(adapter.path, adapter.targets)


# --------------------------------------------------------------------------------------------------------------- shards


def test_a_missing_or_wrong_shard_is_named(adapter: PeftAdapter) -> None:
    shard(adapter.path, 2)
    first = adapter.path / "adapter_model-00001-of-00002.safetensors"
    second = adapter.path / "adapter_model-00002-of-00002.safetensors"
    second.rename(adapter.path / "aside")
    with pytest.raises(AdapterWeightsMissingError, match="00002-of-00002"):
        load(adapter.path, adapter.targets)
    shutil.copy(first, second)
    with pytest.raises(AdapterFileFormatError, match="disagree about"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 5, None])
def test_an_index_names_files_beside_it_only(adapter: PeftAdapter, name: Any) -> None:
    shard(adapter.path, 2)
    (adapter.path / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(AdapterFileFormatError, match="names the shard"):
        load(adapter.path, adapter.targets)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_damaged_index(adapter: PeftAdapter, content: str) -> None:
    shard(adapter.path, 2)
    (adapter.path / "adapter_model.safetensors.index.json").write_text(content)
    with pytest.raises(AdapterFileFormatError, match=r"index\.json"):
        load(adapter.path, adapter.targets)


# ------------------------------------------------------------------------------------------------------------------ bin


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("must-not-be-made",))


def test_a_pickle_with_code_is_refused_and_not_run(adapter: PeftAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter.path)
    to_bin(adapter.path, lambda tensors: {**tensors, "evil": Evil()})
    with pytest.raises(AdapterFileFormatError, match=r"adapter_model\.bin holds more than tensors"):
        load(adapter.path, adapter.targets)
    (adapter.path / "adapter_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(AdapterFileFormatError, match=r"not a file of torch\.save"):
        load(adapter.path, adapter.targets)
    assert not (adapter.path / "must-not-be-made").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (lambda tensors: list(tensors), "holds a list"),
        (lambda tensors: {"a": 1}, "'a' is not a plain tensor"),
        (lambda tensors: {1: torch.ones(1)}, "1 is not a plain tensor"),
        (lambda tensors: {"a": torch.ones(2).to_sparse()}, "names 'torch._utils _rebuild_sparse_tensor'"),
        (lambda tensors: {"a": torch.ones(1).expand(10**12)}, "larger than the file"),
        (lambda tensors: {"a": torch.ones(1).expand(2**31, 2**31)}, "larger than the file"),
    ],
)
def test_a_bin_that_is_no_dict_of_tensors(adapter: PeftAdapter, content: Any, word: str) -> None:
    to_bin(adapter.path, content)
    with pytest.raises(AdapterFileFormatError, match=word):
        load(adapter.path, adapter.targets)


def test_a_bin_of_parameters_or_views_is_read(adapter: PeftAdapter) -> None:
    plain = load(adapter.path, adapter.targets)
    to_bin(adapter.path, lambda tensors: {name: torch.nn.Parameter(t.T.contiguous().T) for name, t in tensors.items()})
    assert load(adapter.path, adapter.targets).adapter_digest == plain.adapter_digest


def test_a_zip_bomb_is_refused_before_it_is_unpacked(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    packed = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
        new.writestr("archive/data/zeros", b"\0" * 50_000_000)
    file.write_bytes(packed.getvalue())
    with pytest.raises(AdapterFileFormatError, match="compressed zip"):
        load(adapter.path, adapter.targets)


def test_every_truncation_of_a_bin_is_refused(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    data = file.read_bytes()
    for size in (0, 3, 10, len(data) // 2, len(data) - 30, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises((AdapterTruncatedError, AdapterFileFormatError)):
            load(adapter.path, adapter.targets)


def test_a_damaged_bin_is_an_adapter_error(adapter: PeftAdapter) -> None:
    to_bin(adapter.path)
    file = adapter.path / "adapter_model.bin"
    data = file.read_bytes()
    num_refused = 0
    for position in range(0, 3000, 97):
        file.write_bytes(
            data[:position] + bytes(255 - byte for byte in data[position : position + 8]) + data[position + 8 :]
        )
        try:
            load(adapter.path, adapter.targets)
        except AdapterError:  # any other error fails the test
            num_refused += 1
    assert num_refused > 0


def test_the_config_can_be_read_back(saved: PeftAdapter) -> None:
    assert read_config(saved.path)["r"] == 4
    assert targets_of(new_base("llama")) == saved.targets
