"""Mutants of a valid adapter, deterministic by seed and number, and the whole way of a load to judge them by.

mutator = AdapterMutator(adapter_path("sql"), seed=1)
changes = mutator.write(17, directory)            # the 17th mutant, whatever was made before
verdict = LoadPath(directory.parent).judge(directory)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loraplex.adapters.fields import HONOURED, IGNORED, REFUSED
from loraplex.adapters.inspect import inspect_adapter
from loraplex.adapters.registry import LoRARegistry
from loraplex.adapters.source import AdapterSource
from loraplex.errors import MAX_REASONS, MAX_TEXT_BYTES, AdapterError, InvalidRequestError
from loraplex.server import ServerConfig
from loraplex.server.adapter_roots import AdapterRoots
from tests.adapters.fake_store import FakeStore
from tests.security.demo_reader import demo_opener, demo_targets

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX, BIN = "adapter_model.safetensors.index.json", "adapter_model.bin"
FILES = (CONFIG, WEIGHTS, INDEX, BIN, "adapter_model-00001-of-00002.safetensors", "x")

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        7,
        2**16,
        2**31,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        1e-308,
        "",
        "x",
        " ",
        "\0",
        "\ud800",
    ),
    *("LORA", "all", "lora_only", "all-linear", "gaussian", "pissa", "q_proj", "x" * 5000, "\u202e", "../..", "None"),
    *([], {}, [None], [1, "a"], ["q_proj"], ["q_proj", "nothing"], [[[[]]]], {"a": 1}, {"q_proj": 4}, {"a": {"b": []}}),
    *({f"k{number}": "x" for number in range(200)}, list(range(500)), {"(a|b)" * 1100: 8, "x": 4}),
)
REGEXES = (
    r".*\.(q|v)_proj",
    "(",
    "[",
    "(a|b)" * 600,
    "a{1,65535}" * 50,
    "(" * 3000,
    "\\",
    "(?P<idx>x)",
    "[a-\uffff]" * 20,
)
COSTLY_REGEXES = (r"(\w+\.)*(q|v)_proj", r"(?i).*PROJ", r"(?=.*)x")
NUMBERS = (0, 1, -1, 3, 2**31, 2**47, 2**48, 2**63, 10**30, 0.5, None, "1", True, [])
DTYPES = ("F64", "F32", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "f32", "", "X" * 100, None, 5)
NAMES = (
    "",
    ".",
    "\0",
    "\ud800",
    "x" * 600,
    "a.lora_A.weight",
    "lm_head.lora_A.weight",
    "..",
    "layers.9999999999.x.lora_B.weight",
)
TAGS = (".lora_magnitude_vector", ".lora_A.default.weight", ".lora_embedding_A", ".modules_to_save.weight", ".bias")


@dataclass(frozen=True)
class AdapterMutator:
    source: Path
    seed: int = 0

    def write(self, number: int, directory: Path) -> tuple[str, ...]:
        """Mutant `number` in `directory`, in place of what is there; what was changed, in order."""
        if directory.is_dir() and not directory.is_symlink():
            directory.chmod(0o700)
            shutil.rmtree(directory)
        shutil.copytree(self.source, directory)
        rng = random.Random(f"{self.seed}/{number}")
        changes = []
        chosen = [rng.choice(MUTATIONS) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        for mutation in sorted(chosen, key=LAST.__contains__):
            try:
                detail = mutation(rng, directory)
            except Exception:  # a change before took what it needs
                detail = "nothing to change"
            changes.append(f"{mutation.__name__}: {detail}"[:120])
        return tuple(changes)


# -------------------------------------------------------------------------------------------------------- configuration


def set_field(rng: random.Random, path: Path) -> object:
    fields = json.loads((path / CONFIG).read_text())
    name = rng.choice([*sorted(HONOURED | IGNORED.keys() | REFUSED.keys()), "unknown", "x" * 300, "\u202e"])
    fields[name] = rng.choice(VALUES)
    (path / CONFIG).write_text(json.dumps(fields))
    return name, fields[name]


def set_pattern(rng: random.Random, path: Path) -> object:
    fields = json.loads((path / CONFIG).read_text())
    regex = rng.choice(REGEXES) if rng.random() < 0.95 else rng.choice(COSTLY_REGEXES)
    name = rng.choice(("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"))
    fields[name] = {regex: rng.choice((4, 8, -1, "x")), "q_proj": 8} if name.endswith("k_pattern") else regex
    if name == "layers_pattern":
        fields["layers_to_transform"] = rng.choice(([0], 1, [-1], ["x"], [2**70]))
    (path / CONFIG).write_text(json.dumps(fields))
    return name, regex


def drop_field(rng: random.Random, path: Path) -> object:
    fields = json.loads((path / CONFIG).read_text())
    name = rng.choice(sorted(fields))
    del fields[name]
    (path / CONFIG).write_text(json.dumps(fields))
    return name


def repeat_field(rng: random.Random, path: Path) -> object:
    text = (path / CONFIG).read_text()
    (path / CONFIG).write_text(text.rstrip().removesuffix("}") + f', "r": {rng.choice((1, 8, 10**5))}}}')
    return "r"


def replace_config(rng: random.Random, path: Path) -> object:
    content = rng.choice(
        ("", "[]", "null", "5", '"x"', "{" * 5000, "[" * 60_000, "[" * 10**6, "{}", "NaN", '{"r":1e999}')
    )
    (path / CONFIG).write_text(content)
    return content[:10]


# -------------------------------------------------------------------------------------------------------------- headers


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = (path / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_entry(rng: random.Random, path: Path) -> object:
    header, data = read_header(path)
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    key = rng.choice(("dtype", "shape", "data_offsets", "more"))
    entry = header[name]
    if key == "dtype":
        entry[key] = rng.choice(DTYPES)
    elif key == "more":
        entry[rng.choice(("x", "dtype ", ""))] = 1
    else:
        entry[key] = list(entry[key])
        entry[key][rng.randrange(len(entry[key]))] = rng.choice(NUMBERS)
    write_header(path, header, data)
    return name, key, entry.get(key)


def rename_tensor(rng: random.Random, path: Path) -> object:
    header, data = read_header(path)
    old = rng.choice(sorted(header))
    new = rng.choice(
        (
            *NAMES,
            rng.choice(sorted(header)),
            old + ".x",
            old.replace("layers.", "layers.1"),
            old.rpartition(".lora")[0] + rng.choice(TAGS),
        )
    )
    header[new] = header.pop(old)
    write_header(path, header, data)
    return old, new


def drop_tensor(rng: random.Random, path: Path) -> object:
    header, data = read_header(path)
    for name in rng.sample(sorted(header), rng.choice((1, 2, len(header)))):
        del header[name]
    write_header(path, header, data)
    return len(header)


def add_tensors(rng: random.Random, path: Path) -> object:
    header, data = read_header(path)
    count = rng.choice((1, 100, 5000, 9000))
    name = rng.choice(
        ("x{}", "model.layers.{}.self_attn.q_proj.lora_A.weight", "model.layers.0.q{}.lora_magnitude_vector")
    )
    header |= {name.format(n): {"dtype": "F32", "shape": [0, 1], "data_offsets": [len(data)] * 2} for n in range(count)}
    write_header(path, header, data)
    return name, count


def swap_tensors(rng: random.Random, path: Path) -> object:
    header, data = read_header(path)
    one, other = rng.sample(sorted(header.keys() - {"__metadata__"}), 2)
    header[one], header[other] = header[other], header[one]
    write_header(path, header, data)
    return one, other


def change_length(rng: random.Random, path: Path) -> object:
    data = (path / WEIGHTS).read_bytes()
    length = rng.choice((0, 1, 2, 100, len(data), len(data) - 8, 2**24, 2**31, 2**62, 2**64 - 1))
    (path / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    return length


# ---------------------------------------------------------------------------------------------------------------- bytes


def change_numbers(rng: random.Random, path: Path) -> object:
    """NaN, Inf, the largest, the least, noise: at a multiple of four, from the end."""
    data = bytearray((path / WEIGHTS).read_bytes())
    at = len(data) - 4 * rng.randrange(1, 2000)
    word = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\1\0\0\0", rng.randbytes(4)))
    data[at : at + 4] = word
    (path / WEIGHTS).write_bytes(data)
    return word


def flip_bytes(rng: random.Random, path: Path) -> object:
    file = path / rng.choice((CONFIG, WEIGHTS, WEIGHTS))
    data = bytearray(file.read_bytes())
    for _ in range(rng.randrange(1, 8)):
        data[rng.randrange(min(len(data), 6000))] = rng.randrange(256)
    file.write_bytes(data)
    return file.name


def change_size(rng: random.Random, path: Path) -> object:
    file = path / rng.choice((CONFIG, WEIGHTS))
    size = rng.choice((0, 1, 8, 9, file.stat().st_size - 1, file.stat().st_size + 1, file.stat().st_size // 2, 2**34))
    os.truncate(file, size)
    return file.name, size


# --------------------------------------------------------------------------------------------------------- names, links


def rename_file(rng: random.Random, path: Path) -> object:
    old, new = rng.choice((CONFIG, WEIGHTS)), rng.choice(FILES)
    (path / old).rename(path / new)
    return old, new


def link_file(rng: random.Random, path: Path) -> object:
    file = path / rng.choice(FILES)
    target = rng.choice((file.name, WEIGHTS, CONFIG, "gone", "/dev/zero", "/dev/null", "/etc/passwd", "..", "../../x"))
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    return file.name, target


def put_no_file(rng: random.Random, path: Path) -> object:
    file = path / rng.choice(FILES)
    file.unlink(missing_ok=True)
    kind = rng.choice((os.mkfifo, os.mkdir, Path.touch))
    kind(file)
    return file.name, kind.__name__


def to_shards(rng: random.Random, path: Path) -> object:
    tensors = load_file(path / WEIGHTS)
    shards = [f"s{number}.safetensors" for number in range(3)]
    names: dict[str, Any] = {name: rng.choice(shards) for name in sorted(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name, where in names.items() if where == shard}, path / shard)
    (path / WEIGHTS).unlink()
    if rng.random() < 0.7:
        names[rng.choice(sorted(names))] = rng.choice(
            (*shards, WEIGHTS, "../x.safetensors", "/etc/passwd", "", None, 5)
        )
    if rng.random() < 0.3:
        (path / shards[0]).unlink()
        os.link(path / shards[1], path / shards[0])
    (path / INDEX).write_text(json.dumps({"weight_map": names}))
    return len(names)


def to_bin(rng: random.Random, path: Path) -> object:
    tensors: dict[Any, Any] = dict(load_file(path / WEIGHTS))
    extra = rng.choice((None, 5, "x", torch.ones(3), torch.ones(1).expand(10**9), bytearray(8), os.getcwd, [[]]))
    if extra is not None:
        tensors[rng.choice(("x", 5, sorted(tensors)[0]))] = extra
    torch.save(tensors, path / BIN)
    (path / WEIGHTS).unlink()
    data = bytearray((path / BIN).read_bytes())
    for _ in range(rng.choice((0, 0, 1, 5))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    (path / BIN).write_bytes(data)
    return type(extra).__name__


MUTATIONS: tuple[Callable[[random.Random, Path], object], ...] = (
    *(set_field, set_field, set_field, set_pattern, drop_field, repeat_field, replace_config),
    *(change_entry, change_entry, change_entry, rename_tensor, rename_tensor, drop_tensor, add_tensors, swap_tensors),
    *(change_length, change_numbers, change_numbers, flip_bytes, flip_bytes, change_size),
    *(rename_file, link_file, put_no_file, to_shards, to_bin),
)
LAST = (change_size, rename_file, link_file, put_no_file)
"""After these a file may be one that must not be read here: 16 GiB, sparse, or no file at all."""


# ------------------------------------------------------------------------------------------------------------- verdicts


@dataclass
class LoadPath:
    """The way of `POST /v1/adapters` without HTTP: roots, source, validation, registry; the store is a fake."""

    root: Path
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        opener = demo_opener(AdapterSource((self.root.resolve(),)))
        self._roots = AdapterRoots.of(ServerConfig(adapter_roots=(str(self.root),)))
        self._registry = LoRARegistry(FakeStore(), opener.open)

    def judge(self, directory: Path, inspects: bool = True) -> str:
        """`served`, or the error's class. Raises AssertionError, or what the code under test should not have raised."""
        verdict = self._load(str(directory))
        self.counts[verdict] = self.counts.get(verdict, 0) + 1
        if inspects:
            self._check_inspection(directory, verdict)
        return verdict

    def _load(self, path: str) -> str:
        refusal: AdapterError | InvalidRequestError | None = None
        try:
            self._roots.check(path)
            self._registry.load("mutant", path)
        except (AdapterError, InvalidRequestError) as error:
            refusal = error
        if refusal is not None:
            assert 400 <= refusal.http_status < 500, refusal
            assert len(refusal.message.encode()) <= MAX_TEXT_BYTES
            assert len(getattr(refusal, "reasons", ())) <= MAX_REASONS
            assert "root:" not in refusal.message, "a line of /etc/passwd"
            assert not self._registry.names()
            return type(refusal).__name__
        self._registry.unload("mutant")
        self._registry.check_integrity()
        return "served"

    def _check_inspection(self, directory: Path, verdict: str) -> None:
        """It has no roots, and otherwise the same opinion."""
        try:
            is_honoured = inspect_adapter(directory, demo_targets()).is_honoured
        except AdapterError:
            is_honoured = False
        assert is_honoured == (verdict == "served") or verdict == "AdapterPathForbiddenError"
