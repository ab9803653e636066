"""Directories made to cost memory or time, or to pass for an adapter: each is refused at a cost that its bound says."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import pickletools
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loraplex.adapters import files, validation, weights
from loraplex.adapters.bin_file import OPCODES_A_TENSOR
from loraplex.adapters.files import HEADER_BYTES_A_TENSOR, MAX_TENSORS, MIN_TENSORS, AdapterFolder, read_shards
from loraplex.adapters.format import PEFTHelper
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.regular_file import RegularFile
from loraplex.adapters.tensors import FINITE_PIECE, WeightFile, is_finite
from loraplex.adapters.weights import CheckedReader
from loraplex.config import LoRAConfig
from loraplex.core import LoraSlice, LoraTarget
from loraplex.demo.tasks import TASKS, adapter_path
from loraplex.errors import (
    MAX_REASONS,
    MAX_SHOWN_CHARS,
    MAX_TEXT_BYTES,
    AdapterError,
    AdapterFileFormatError,
    AdapterLoadError,
    AdapterTruncatedError,
    AdapterValidationError,
    LoraplexError,
    error_from_payload,
    shown,
)
from loraplex.processes.fair_turns import ByteBudget
from tests.security.demo_reader import demo_reader
from tests.security.regex_steps import StepCounter

ADAPTER = adapter_path(TASKS[0].name)
WEIGHTS, INDEX, BIN = "adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_model.bin"
MIB = 2**20


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ADAPTER, tmp_path / "sql"))


def refusal(path: Path) -> AdapterError:
    """What a load says. Whatever else it raises fails the test."""
    with pytest.raises(AdapterError) as caught:
        demo_reader().read(path, PEFTHelper.from_local_dir(path))
    error = caught.value
    assert error.http_status in range(400, 500)
    assert len(json.dumps(error.message).encode()) <= MAX_TEXT_BYTES
    return error


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """The most memory that Python has at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def write_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def write_config(path: Path, **fields: Any) -> None:
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --------------------------------------------------------------------------------------------------------------- shards


def write_index(path: Path, names: list[str]) -> None:
    (path / WEIGHTS).unlink(missing_ok=True)
    (path / INDEX).write_text(json.dumps({"weight_map": {f"t{number}": name for number, name in enumerate(names)}}))


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_shards_that_are_one_sparse_file_are_refused(adapter: Path, link: Callable[[Path, Path], None]) -> None:
    """16 KiB of directory, 16 GiB of headers."""
    big = adapter / "big"
    write_header(big, b"{" + b" " * (15 * MIB))
    os.truncate(big, 16 * MIB)
    names = [f"s{number:04}.safetensors" for number in range(1000)]
    for name in names:
        link(big, adapter / name)
    write_index(adapter, names)
    with at_most(40 * MIB):
        assert "header would have" in refusal(adapter).message
    write_header(big, b"{" + b" " * MIB)
    with at_most(20 * MIB):
        assert "same file as another shard" in refusal(adapter).message


def test_a_sparse_tensor_that_no_base_has_is_not_read(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GB of nothing in a file of 4 KB took 6 GB and 50 s, to say that a shape is wrong."""
    name, nbytes = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", 3 * 10**9
    entry = {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}
    write_header(adapter / WEIGHTS, json.dumps({name: entry}).encode())
    os.truncate(adapter / WEIGHTS, (adapter / WEIGHTS).stat().st_size + nbytes)
    monkeypatch.setattr(weights, "read_tensors", lambda *arguments: pytest.fail("it was read"))
    assert "has shape [750000000]" in refusal(adapter).message


def test_a_sparse_file_of_shapes_that_the_base_has_is_not_read(adapter: Path) -> None:
    """Its rank was all that was said of it: 20 KiB on disk were 2.5 GB in memory, and 600 MB of zeros in the cache."""
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight" for letter in "AB"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank, entries, end = 2**16, {}, 0
    for name, shape in zip(names, ([rank, 32], [32, rank]), strict=True):
        nbytes = 4 * rank * 32
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    write_header(adapter / WEIGHTS, json.dumps(entries).encode())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": rank}))
    os.truncate(adapter / WEIGHTS, (adapter / WEIGHTS).stat().st_size + end)
    with at_most(20 * MIB):
        assert "is sparse: " in refusal(adapter).message


def test_the_look_for_nan_copies_a_piece_at_a_time() -> None:
    numbers = torch.zeros(2**25)
    with at_most(32 * MIB):
        assert is_finite(numbers)
    for index in (0, FINITE_PIECE - 1, FINITE_PIECE, -1):
        odd = numbers[: FINITE_PIECE + 3].clone()
        odd[index] = float("nan")
        assert not is_finite(odd)


def test_headers_of_all_shards_have_one_budget(adapter: Path) -> None:
    names = [f"s{number:02}.safetensors" for number in range(20)]
    for name in names:
        write_header(adapter / name, b"{" + b" " * (MIB // 2))
    write_index(adapter, names)
    with at_most(20 * MIB):
        assert "are left for it" in refusal(adapter).message


def test_a_sparse_file_without_a_header_is_not_read(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", 2 * MIB))
    os.truncate(adapter / WEIGHTS, 2**40)
    with at_most(2 * MIB):
        assert "does not begin" in refusal(adapter).message


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        ".x.safetensors",
        "x.safetensors\x00",
        "x.SAFETENSORS",
        "x\n.safetensors",
        "\u202ex.safetensors",
        "x" * 300 + ".safetensors",
        "-.safetensors",
        5,
        None,
        ["a"],
        {},
    ],
)
def test_shard_names_that_are_none(adapter: Path, name: Any) -> None:
    write_index(adapter, [name])
    assert "names the shard" in refusal(adapter).message


@pytest.mark.parametrize(
    "content",
    [
        b'{"weight_map": {' + b",".join(b'"t%d": "s%d.safetensors"' % (n, n) for n in range(1025)) + b"}}",
        b'{"weight_map": {' + b",".join(b'"%d":""' % n for n in range(200_000)) + b"}}",
        b'{"weight_map": ' + b"[" * 100_000,
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        b" " * (3 * MIB),
    ],
)
def test_indexes_that_are_too_large(adapter: Path, content: bytes) -> None:
    (adapter / WEIGHTS).unlink()
    (adapter / INDEX).write_bytes(content)
    with at_most(24 * MIB):
        assert isinstance(refusal(adapter), AdapterFileFormatError)


# -------------------------------------------------------------------------------------------------------------- headers


def header_of(num_tensors: int, name: str = "t{}") -> bytes:
    entries = (
        f'"{name.format(number)}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for number in range(num_tensors)
    )
    return ("{" + ",".join(entries) + "}").encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (header_of(202_000), "header would have"),
        (header_of(20_000, "\\u0074{}"), "values"),
        (header_of(MIN_TENSORS + 1), "more than 8192 tensors"),
        (b'{"a":[' + b"1," * 500_000 + b"1]}", "values"),
        (b"{" + b",".join(b'"%d":1' % number for number in range(120_000)) + b"}", "values"),
        (b'{"a":' * 80_000 + b"1" + b"}" * 80_000, "not JSON"),
        (b'{"a":' * 150_000 + b"1" + b"}" * 150_000, "values"),
        (header_of(1, "x" * 513), "in 513 characters"),
        (b'{"a":{"dtype":"' + b"F" * MIB + b'","shape":[0],"data_offsets":[0,0]}}', "wrong dtype"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}', "not JSON"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 22_000 + b'],"data_offsets":[0,0]}}', "numbers of over 20 digits"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[NaN,4]}}', "wrong dtype"),
        (b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', "wrong dtype"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "wrong dtype"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "does not begin where"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,281474976710655]}}', "takes"),
        (b'{"a":{"dtype":"F32","shape":[70368744177663],"data_offsets":[0,281474976710652]}}', "truncated"),
        (b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', "takes 0 bytes"),
        (b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,4]}}', "twice"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}', "not dtype, shape"),
        (b'{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "is refused"),
        (b'{"__metadata__":' + b'{"a":' * 500 + b"1" + b"}" * 501, "is refused"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_headers_are_bounded_before_they_become_objects(adapter: Path, header: bytes, message: str) -> None:
    """202,000 tensors took 2 GB and 8.6 s."""
    has_data = b'"data_offsets":[0,4]' in header or b"[4,8]" in header
    write_header(adapter / WEIGHTS, header, b"\0" * 4 if has_data else b"")
    with at_most(64 * MIB):
        assert message in refusal(adapter).message


@pytest.mark.parametrize(
    "name",
    [
        "layers." + "9" * 400 + ".x",
        "layers." * 60,
        "." * 500,
        "�",
        "\x00",
        "a" * 512,
        "base_model.model.",
        ".bias",
        f"model.layers.{'1' * 300}.self_attn.q_proj.lora_A.weight",
        ".lora_A.weight",
        "lora_A.default.weight",
    ],
)
def test_odd_tensor_names_are_reasons(adapter: Path, name: str) -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    write_header(adapter / WEIGHTS, header)
    refusal(adapter)
    assert not inspect_adapter(adapter).is_honoured


@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [2**47] * 7 + [0]], ids=str)
def test_an_empty_tensor_of_an_enormous_shape_is_a_reason(adapter: Path, shape: list[int]) -> None:
    """Beside a tensor of another dtype its strides were worked out, beyond what torch takes: the load was a 500."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    entries = {
        name.format("A"): {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]},
        name.format("B"): {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]},
    }
    write_header(adapter / WEIGHTS, json.dumps(entries).encode(), b"\xff\xff")
    message = refusal(adapter).message
    assert f"{name.format('A')!r} has shape" in message
    assert f"{name.format('B')!r} has NaN or Inf" in message
    assert not inspect_adapter(adapter).is_honoured


def big_base(num_layers: int, leaves: tuple[str, ...]) -> list[LoraTarget]:
    return [
        LoraTarget(
            f"model.layers.{layer}.{leaf}", layer, 8, 8, (LoraSlice(f"model.layers.{layer}.{leaf}", 0, 8, 8, False),)
        )
        for layer in range(num_layers)
        for leaf in leaves
    ]


def test_adapters_of_large_models_pass() -> None:
    """126 layers of 7 linears; 94 layers of 128 experts. Names as long as real ones."""
    dense = len(big_base(126, tuple("qkvogud"))) * 2
    experts = [
        f"base_model.model.model.layers.{n // 384}.mlp.experts.{n % 384}.gate_proj.lora_A.weight" for n in range(36_096)
    ]
    entry = '{"dtype":"BF16","shape":[16,4096],"data_offsets":[%d,%d]}'
    header = ",".join(f'"{name}":' + entry % (n << 17, (n + 1) << 17) for n, name in enumerate(experts))
    assert dense <= MIN_TENSORS
    assert len(header) / len(experts) < HEADER_BYTES_A_TENSOR
    assert header.count(",") + header.count(":") + header.count("[") < 12 * len(experts)
    assert CheckedReader(big_base(25_000, ("q",)), LoRAConfig()).max_tensors == 100_000


def test_a_refusal_takes_time_in_proportion_to_the_tensors(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 tensors of layers that the base lacks took 28 s: each counted the layers of all."""
    names = [f"model.layers.{layer}.self_attn.q_proj.lora_A.weight" for layer in range(5000)]
    header = {name: {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]} for name in names}
    write_header(adapter / WEIGHTS, json.dumps(header).encode())
    calls: list[str] = []
    layer_of = validation._layer_of
    monkeypatch.setattr(validation, "_layer_of", lambda module: calls.append(module) or layer_of(module))
    refusal(adapter)
    assert len(calls) < 5 * len(names)


@pytest.mark.parametrize("part", ["layers.1", "layers1.", "9", "layers.", ".", "a"])
def test_a_long_name_takes_steps_in_proportion_to_its_length(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """2,800 names of 500 characters took 5 s: the layer was looked for again from each character."""
    monkeypatch.setattr(files, "MAX_NAME_DOTS", 512)
    module = (part * 500)[:480] + ("x" if part == "layers.1" else "")
    monkeypatch.setattr(validation, "_LAYER", counting := _CountingPattern(validation._LAYER.pattern))
    names = [f"model.{module}{number:03}.lora_A.weight" for number in range(40)]
    header = {name: {"dtype": "F32", "shape": [0, 1], "data_offsets": [0, 0]} for name in names}
    write_header(adapter / WEIGHTS, json.dumps(header).encode())
    refusal(adapter)
    assert counting.calls
    assert counting.steps < 20 * len("".join(names))


class _CountingPattern:
    """Matches as a regex does, once from the start of a text, and counts the steps."""

    def __init__(self, regex: str) -> None:
        self._pattern, self._counter = re.compile(regex), StepCounter(regex, 10**7)
        self.calls = 0

    def match(self, text: str) -> re.Match[str] | None:
        self.calls += 1
        if len(text) > 100:  # of the file, not of the base
            assert self._counter.matches("match", text) == bool(self._pattern.match(text))
        return self._pattern.match(text)

    @property
    def steps(self) -> int:
        return self._counter.steps


def test_files_that_are_read_at_once_share_a_budget() -> None:
    """The second waits until the first has let go; one that is larger than all of it goes alone."""
    budget, order = ByteBudget(100), []
    may_end, is_in = threading.Event(), threading.Event()

    def hold(name: str, nbytes: int) -> None:
        with budget.hold(nbytes):
            order.append(name)
            is_in.set()
            assert may_end.wait(30)

    first = threading.Thread(target=hold, args=("first", 1000))
    first.start()
    assert is_in.wait(30)
    others = [threading.Thread(target=hold, args=(name, 40)) for name in ("second", "third")]
    for thread in others:
        thread.start()
    assert (order, budget.held_bytes) == (["first"], 1000)
    may_end.set()
    for thread in (first, *others):
        thread.join(30)
    assert (sorted(order[1:]), budget.held_bytes) == (["second", "third"], 0)


def test_a_small_adapter_is_read_while_large_ones_hold_the_budget(adapter: Path) -> None:
    reader, models = demo_reader(), []
    reader._budget._stuck_s = math.inf
    thread = threading.Thread(
        target=lambda: models.append(reader.read(adapter, PEFTHelper.from_local_dir(adapter))), daemon=True
    )
    with reader._budget.hold(reader._budget.max_bytes):
        thread.start()
        thread.join(30)
        assert models


# ----------------------------------------------------------------------------------------------- configuration, reasons


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {f"k{number}": "x" for number in range(20_000)}},
        {"rank_pattern": {f"k{number}": "x" for number in range(8_000)}},
        {"rank_pattern": {"k" * 500_000: "x" * 100_000}},
        {f"field{number}": 1 for number in range(20_000)},
        {f"field{number}": "x" * 1000 for number in range(400)},
        {"x" * 500_000: 1},
        {"use_dora": "x" * 500_000},
        {"target_modules": [f"m{number}" for number in range(30_000)]},
        {"target_modules": ["x" * 500_000]},
        {"target_modules": "x" * 500_000},
        {"bias": ["x"] * 30_000},
        {"r": "9" * 500_000},
        {"r": [[[[[["x" * 1000]]]]]]},
        {"init_lora_weights": "pissa" + "x" * 500_000},
        {"layers_to_transform": list(range(-30_000, 0))},
        {"peft_type": {"a": {"b": "c" * 500_000}}},
        {"base_model_name_or_path": "\u202e" * 300_000, "r": -1},
    ],
    ids=lambda fields: next(iter(fields))[:20],
)
def test_a_refusal_is_short_whatever_the_file_says(adapter: Path, fields: dict[str, Any]) -> None:
    write_config(adapter, **fields)
    with at_most(64 * MIB):
        error = refusal(adapter)
    assert len(error.message.encode()) < 16 * 2**10
    assert "x" * (MAX_SHOWN_CHARS + 1) not in error.message
    assert len(getattr(error, "reasons", ())) <= MAX_REASONS


def test_reasons_beyond_the_limit_are_counted() -> None:
    error = AdapterValidationError.from_reasons("sql", ["y" * 10_000 for _ in range(1000)], 5)
    assert len(error.reasons) == MAX_REASONS
    assert error.reasons[-1] == f"... and {1005 - MAX_REASONS + 1} more"
    assert len(error.message.encode()) < MAX_TEXT_BYTES
    copy = error_from_payload(error.to_payload())
    assert (copy.message, copy.reasons) == (error.message, error.reasons)  # type: ignore[attr-defined]
    assert len(AdapterValidationError.from_reasons("sql", ["a"] * MAX_REASONS).reasons) == MAX_REASONS


@pytest.mark.parametrize("text", ["x" * 10**6, "\U0001f600" * 10**6])
def test_no_error_is_longer_than_its_bound(text: str) -> None:
    assert len(LoraplexError(text).message.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        "\n" * 10**6,
        list(range(10**5)),
        {str(number): number for number in range(10**5)},
        10**4000,
        [[[[[[[1]]]]]]],
        "�" * 50,
        b"x" * 10**6,
        None,
        1.5,
    ],
)
def test_a_value_in_a_message_is_short(value: Any) -> None:
    assert 0 < len(shown(value)) <= MAX_SHOWN_CHARS


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "content",
    [
        deep(17),
        deep(900),
        deep(60_000),
        "[" * 10**6,
        '{"r":' + "9" * 10**5 + "}",
        "[" + "1," * 400_000 + "1]",
        "\ufeff{}",
    ],
)
def test_configurations_that_are_too_deep_or_too_long(adapter: Path, content: str) -> None:
    (adapter / "adapter_config.json").write_text(content)
    with at_most(24 * MIB):
        assert isinstance(refusal(adapter), AdapterFileFormatError)


# ------------------------------------------------------------------------------------------------------ what is no file


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))


ODD_FILES: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "socket": bind_socket,
    "directory": Path.mkdir,
    "null": lambda path: path.symlink_to("/dev/null"),
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "random": lambda path: path.symlink_to("/dev/random"),
    "tty": lambda path: path.symlink_to("/dev/tty"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "environment": lambda path: path.symlink_to("/proc/self/environ"),
    "own descriptor": lambda path: path.symlink_to("/proc/self/fd/0"),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
}


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS, INDEX, BIN])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_neither_blocks_nor_is_read(
    adapter: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapter)
    for file in adapter.iterdir():
        if name == file.name or file.name == WEIGHTS != "adapter_config.json" != name:
            file.unlink()
    ODD_FILES[kind](adapter / name)
    with pytest.raises(AdapterLoadError) as caught:
        demo_reader().read(adapter, PEFTHelper.from_local_dir(adapter))
    assert "PATH" not in caught.value.message


# ---------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("content", ["shorter", "longer", "other", "gone", "a FIFO"])
def test_a_file_that_changes_after_its_header_was_read(
    adapter: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, data = adapter / WEIGHTS, (adapter / WEIGHTS).read_bytes()
    read = weights.read_tensors

    def change_and_read(*args: Any) -> Any:
        if content in ("shorter", "longer"):
            os.truncate(file, len(data) + (1 if content == "longer" else -1))
        else:
            file.unlink()
        if content == "other":
            file.write_bytes(data)
        if content == "a FIFO":
            os.mkfifo(file)
        return read(*args)

    monkeypatch.setattr(weights, "read_tensors", change_and_read)
    assert isinstance(refusal(adapter), AdapterLoadError)


def test_a_file_that_is_cut_while_its_bytes_are_read(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = RegularFile.read_pieces

    def cut_and_read(file: RegularFile, pieces: Any, offset: int) -> int:
        if offset > 8:
            os.truncate(file.path, offset + 1)
        return read(file, pieces, offset)

    monkeypatch.setattr(RegularFile, "read_pieces", cut_and_read)
    assert isinstance(refusal(adapter), AdapterTruncatedError)


def test_a_shard_that_becomes_another_between_two_reads(adapter: Path) -> None:
    """The header that was read is the one that is parsed."""
    folder = AdapterFolder(adapter, "sql")
    file = WeightFile(folder, WEIGHTS, MAX_TENSORS, read_shards(folder, WEIGHTS, MAX_TENSORS))
    write_header(adapter / WEIGHTS, b"{}")
    assert file.entries


# -------------------------------------------------------------------------------------------------------------- pickles


class Call:
    """Calls `function` where a pickle of it is loaded with everything allowed."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def to_bin(path: Path, change: Callable[[dict[str, Any]], Any] = lambda tensors: tensors) -> None:
    torch.save(change(load_file(path / WEIGHTS)), path / BIN)
    (path / WEIGHTS).unlink()


@pytest.mark.parametrize(
    "evil",
    [
        Call(os.mkdir, "must-not-be-made"),
        Call(os.system, "touch must-not-be-made"),
        Call(eval, "open('must-not-be-made', 'w')"),
        Call(bytearray, 2**36),
        Call(bytes, 2**36),
        Call(getattr, 5, "real"),
        Call(torch.zeros, 2**30),
        Call(__import__, "antigravity"),
    ],
    ids=lambda evil: evil.call[0].__name__,
)
def test_pickles_that_call_are_refused_before_they_are_loaded(
    adapter: Path, evil: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `bytearray` of 64 GiB is allowed by torch's weights-only unpickler."""
    monkeypatch.chdir(adapter)
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("it was loaded"))
    to_bin(adapter, lambda tensors: {**tensors, "evil": evil})
    assert "holds more than tensors" in refusal(adapter).message
    (adapter / BIN).write_bytes(pickle.dumps(evil))
    assert isinstance(refusal(adapter), AdapterFileFormatError)
    assert not (adapter / "must-not-be-made").exists()


@pytest.mark.parametrize("name", ["DATA.PKL", "data.PKL", "Data.pkl"])
def test_a_pickle_that_only_torch_finds_by_its_name(adapter: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's zip reader takes `archive/DATA.PKL` for `archive/data.pkl`: 1 KB of file took any number of gigabytes."""
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("it was loaded"))
    to_bin(adapter, lambda tensors: {**tensors, "evil": Call(bytearray, 2**36)})
    members = _members(adapter / BIN)
    _write_zip(adapter / BIN, {key.replace("data.pkl", name): value for key, value in members.items()})
    assert "holds more than tensors" in refusal(adapter).message


def test_two_pickles_whose_names_differ_in_case_alone(adapter: Path) -> None:
    to_bin(adapter)
    members = _members(adapter / BIN)
    pickled = next(key for key in members if key.endswith("data.pkl"))
    _write_zip(adapter / BIN, {pickled.upper(): b"}.", **members})
    assert "two members of one name" in refusal(adapter).message


def test_a_zip_with_a_directory_that_only_torch_reads(adapter: Path) -> None:
    """Python takes the directory that lies before the end record, torch's reader the one at the offset that the record
    says: what was checked was not what was loaded. Whichever is taken, it is the checked one."""
    helper = PEFTHelper.from_local_dir(adapter)
    digest = demo_reader().read(adapter, helper).adapter_digest
    to_bin(adapter)
    good = _members(adapter / BIN)
    evil = {key: pickle.dumps({"x": bytearray(9)}, 2) if key.endswith("data.pkl") else b"" for key in good}
    (evil_members, evil_directory, _), (members, directory, end) = _zip_parts(evil), _zip_parts(good)
    evil_members = evil_members.ljust(len(members), b"\0")
    moved, position = bytearray(directory), 0
    while position < len(moved):
        name, extra, comment, offset = struct.unpack_from("<HHH8xI", moved, position + 28)
        struct.pack_into("<I", moved, position + 42, offset + len(evil_members) - len(members))
        position += 46 + name + extra + comment
    fields = bytearray(end)
    struct.pack_into("<I", fields, 16, len(evil_members))
    (adapter / BIN).write_bytes(evil_members + evil_directory + members + moved + fields)
    assert demo_reader().read(adapter, helper).adapter_digest == digest


def _members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write_zip(target: Path | io.BytesIO, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _zip_parts(members: dict[str, bytes]) -> tuple[bytes, bytes, bytes]:
    """The members, the directory and the end record of a zip."""
    file = io.BytesIO()
    _write_zip(file, members)
    data = file.getvalue()
    end = data.rindex(b"PK\5\6")
    size, offset = struct.unpack_from("<II", data, end + 12)
    return data[:offset], data[offset : offset + size], data[end:]


def test_a_sparse_bin_is_refused_by_its_end_and_not_read(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole it would be gigabytes of memory, and seconds with the interpreter's lock."""
    num_read: list[int] = []
    read = RegularFile.read_into

    def counted(self: RegularFile, buffer: memoryview, offset: int) -> int:
        num_read.append(len(buffer) if self.path.name == BIN else 0)
        return read(self, buffer, offset)

    monkeypatch.setattr(RegularFile, "read_into", counted)
    (adapter / WEIGHTS).unlink()
    (adapter / BIN).write_bytes(b"PK\x03\x04")
    os.truncate(adapter / BIN, 2**29)
    assert "truncated or damaged" in refusal(adapter).message
    assert 0 < sum(num_read) < 2**18


def test_a_damaged_bin_leaves_no_bytes_behind_its_error(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of a refusal may live until the next collection of old objects, which a server seldom makes."""
    copies: list[io.BytesIO] = []

    class Copy(io.BytesIO):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            copies.append(self)

    to_bin(adapter)
    seen = SimpleNamespace(BytesIO=Copy, SEEK_SET=io.SEEK_SET, SEEK_CUR=io.SEEK_CUR, SEEK_END=io.SEEK_END)
    monkeypatch.setattr("loraplex.adapters.bin_file.io", seen)
    data = bytearray((adapter / BIN).read_bytes())
    data[len(data) // 2] ^= 1
    (adapter / BIN).write_bytes(data)
    assert "truncated or damaged" in refusal(adapter).message
    assert copies
    assert all(copy.closed for copy in copies)


def test_a_good_bin_is_still_read(adapter: Path) -> None:
    helper = PEFTHelper.from_local_dir(adapter)
    digest = demo_reader().read(adapter, helper).adapter_digest
    for change in (dict, lambda t: {name: torch.nn.Parameter(each) for name, each in t.items()}):
        tensors = load_file(ADAPTER / WEIGHTS)
        torch.save(change(tensors), adapter / BIN)
        (adapter / WEIGHTS).unlink(missing_ok=True)
        assert demo_reader().read(adapter, helper).adapter_digest == digest


def test_zips_of_very_many_members_and_long_pickles(adapter: Path) -> None:
    to_bin(adapter)
    with zipfile.ZipFile(adapter / BIN, "a") as archive:
        for number in range(20_000):
            archive.writestr(f"archive/data/x{number}", b"")
    with at_most(64 * MIB):
        assert "members" in refusal(adapter).message
    (adapter / BIN).unlink()
    shutil.copy(ADAPTER / WEIGHTS, adapter / WEIGHTS)
    to_bin(adapter, lambda tensors: {**tensors, "x": "y" * 5_000_000})
    assert "a pickle of" in refusal(adapter).message


def test_a_pickle_of_short_steps(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 million steps of one byte each took a minute: in the check, and in torch's unpickler again."""
    to_bin(adapter)
    with zipfile.ZipFile(adapter / BIN) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    members[pickled] = members[pickled][:2] + b"N" * 1_000_000 + members[pickled][2:]
    _write_zip(adapter / BIN, members)
    steps: list[None] = []
    genops = pickletools.genops
    monkeypatch.setattr(pickletools, "genops", lambda data: (steps.append(None) or step for step in genops(data)))
    assert "steps" in refusal(adapter).message
    assert len(steps) <= MIN_TENSORS * OPCODES_A_TENSOR + 1
    parameters = {f"{number}.lora_A.weight": torch.nn.Parameter(torch.ones(1)) for number in range(100)}
    torch.save(parameters, content := io.BytesIO())
    with zipfile.ZipFile(content) as archive:
        (real,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        assert sum(1 for _ in genops(archive.read(real))) < 100 * OPCODES_A_TENSOR * 3 / 4


def test_a_pickle_of_references_to_itself(adapter: Path) -> None:
    """Lists of lists of lists: small as references, endless when printed or walked."""
    bomb: Any = ["x"]
    for _ in range(100):
        bomb = [bomb] * 10
    to_bin(adapter, lambda tensors: {**tensors, "bomb": bomb})
    with at_most(64 * MIB):
        assert "'bomb' is not a plain tensor" in refusal(adapter).message


def test_pickles_that_are_cut_or_patched(adapter: Path) -> None:
    to_bin(adapter)
    data = (adapter / BIN).read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        content = archive.read(
            "archive/data.pkl" if "archive/data.pkl" in archive.namelist() else "adapter_model/data.pkl"
        )
    assert list(pickletools.genops(content))
    start = data.index(content)
    for offset in range(1, len(content), max(1, len(content) // 40)):
        (adapter / BIN).write_bytes(data[: start + offset] + b"\x80" + data[start + offset + 1 :])
        refusal(adapter)


ORDERED_DICT = b"ccollections\nOrderedDict\n"
PICKLES = {
    "a key that overflows the stack": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "a key whose hash never ends": b"\x80\x02}))\x86" + b"q\x00h\x00\x86" * 64 + b"K\x01s.",
    "hidden methods": b"\x80\x02" + ORDERED_DICT + b")R}X\x05\x00\x00\x00itemsK\x01sb.",
}


def test_pickles_of_odd_keys_are_refused_and_the_process_lives(adapter: Path, tmp_path: Path) -> None:
    """In a process of its own, since the hash of a deep tuple ended the server and that of a shared one held it up."""
    (adapter / WEIGHTS).unlink()
    paths = []
    for number, pickled in enumerate(PICKLES.values()):
        paths.append(path := tmp_path / f"odd-{number}")
        shutil.copytree(adapter, path)
        with zipfile.ZipFile(path / BIN, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
    code = """
import sys
from pathlib import Path
from loraplex.errors import AdapterError
from tests.security.test_adapter_files import refusal
for path in sys.argv[1:]:
    assert isinstance(refusal(Path(path)), AdapterError)
    print(path, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, timeout=180, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(map(str, paths))


def test_a_dtype_that_no_encoding_has_is_refused_in_words(adapter: Path) -> None:
    """Half of a surrogate pair in the text of an error made the answer a 500."""
    data = (adapter / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"F32"', b'"\\ud800"', 1).replace(b'"BF16"', b'"\\ud800"', 1)
    (adapter / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert "has a wrong dtype" in refusal(adapter).message.encode().decode()
