"""The files of a checkpoint, opened: plain tensors by name, and weights that are in a form's bits."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraplex.errors import ModelWeightError
from loraplex.models.checkpoints.expert_stacks import split
from loraplex.models.checkpoints.gguf import GgufFile
from loraplex.models.checkpoints.stored import FLOATS, Form, StoredWeight
from loraplex.models.families import Family

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointFiles(Protocol):
    """Names are those of Hugging Face. title: of the form; "" where weights are plain floats."""

    @property
    def title(self) -> str: ...

    @property
    def names(self) -> Collection[str]: ...

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is, a view of the file's memory map."""
        ...

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight | None:
        """The weight of that name, where its form made other tensors or other types of it; None: it is a plain tensor.
        ModelWeightError: the tensors are not those of the form and of this shape.
        """
        ...

    def used(self, names: Collection[str]) -> tuple[set[str], list[str]]:
        """(tensors that make the model's of these names, or that change none of them; names without any)"""
        ...


@contextlib.contextmanager
def open_files(path: Path, form: Form | None, family: Family | None = None) -> Iterator[CheckpointFiles]:
    """Those of a directory of safetensors, or a GGUF file. Raises ModelWeightError, ModelConfigError.

    family: says under which names a model beside other parts has its weights; the others' are left aside.
    """
    if path.is_file():
        yield GgufFile(path)
        return
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(_open(path / name)) for name in _file_names(path)]
        yield Safetensors({key: file for file in files for key in list(file.keys())}, form, family)


class Safetensors:
    """where: the opened file of each tensor."""

    def __init__(self, where: Mapping[str, Any], form: Form | None, family: Family | None = None) -> None:
        self._form = form
        if family is not None and family.experts is not None:
            where = split(where, family.experts.names)
        self._where = {
            _own_name(name, family): (file, name)
            for name, file in where.items()
            if family is None or not name.startswith(family.other_weights)
        }

    @property
    def title(self) -> str:
        return "" if self._form is None else self._form.title

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def tensor(self, name: str) -> Tensor:
        file, stored_name = self._where[name]
        tensor: Tensor = file.get_tensor(stored_name)
        return tensor

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight | None:
        if self._form is None or len(shape) != 2:
            return None
        module = name.removesuffix(".weight")
        tensors = {suffix: self.tensor(f"{module}.{suffix}") for suffix in self._suffixes(module)}
        if not tensors or (tensors.keys() == {"weight"} and tensors["weight"].dtype in FLOATS):
            return None
        return self._form.weight(module, (shape[0], shape[1]), tensors)

    def used(self, names: Collection[str]) -> tuple[set[str], list[str]]:
        wanted, used, missing = frozenset(names), set(), []
        for name in names:
            module, _, kind = name.rpartition(".")
            found = {f"{module}.{suffix}" for suffix in self._suffixes(module)} if kind == "weight" else set()
            if name in self._where:
                found.add(name)
            if not found:
                missing.append(name)
            used |= found
        if self._form is not None:
            ignored = tuple(f".{suffix}" for suffix in self._form.ignored)
            used |= {name for name in self._where if ignored and name.endswith(ignored)}
            used |= {name for name in self._where if self._is_empty_bias(name, wanted)}
        return used, missing

    def _suffixes(self, module: str) -> list[str]:
        """Of the tensors of the form that a module has."""
        if self._form is None:
            return []
        return [suffix for suffix in self._form.suffixes if f"{module}.{suffix}" in self._where]

    def _is_empty_bias(self, name: str, names: Collection[str]) -> bool:
        """Old quantised files have biases of zeros at linears without one."""
        module = name.removesuffix(".bias")
        return name not in names and f"{module}.weight" in names and module != name and not self.tensor(name).any()


def _own_name(name: str, family: Family | None) -> str:
    for prefix, own in () if family is None else family.text_prefixes.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _file_names(path: Path) -> list[str]:
    index = path / INDEX_FILE
    if index.exists():
        return sorted(set(_read_index(index).values()))
    if (path / WEIGHTS_FILE).exists():
        return [WEIGHTS_FILE]
    pickles = sorted(file.name for file in path.glob("*.bin"))
    hint = f"; {pickles[0]} is not read, convert it to safetensors" if pickles else ""
    raise ModelWeightError(f"{path} has no {WEIGHTS_FILE} and no {INDEX_FILE}{hint}")


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A safetensors file whose tensors are views of its memory map."""
    try:
        opened = safe_open(file, framework="pt")
    except FileNotFoundError as e:
        raise ModelWeightError(f"{file} is named by {INDEX_FILE} but is not there") from e
    except (SafetensorError, OSError) as e:
        raise ModelWeightError(f"{file} cannot be read as safetensors, it may be truncated: {e}") from e
    with opened as handle:
        yield handle


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ModelWeightError(f"{index} is not an index of safetensors ({type(e).__name__}: {e})") from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelWeightError(f"{index} has an empty weight_map")
    for key, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelWeightError(f"{index}: {key} is in {file!r}, which is not the name of a file beside it")
    return weight_map
