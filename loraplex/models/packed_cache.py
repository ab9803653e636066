"""Prepared weights on disk, so that a later start maps them instead of reading and packing a checkpoint.

One safetensors file per (checkpoint, dtype, quantization, packed format) in a folder of the user's. It is used where it
lies: the processes of one machine share its pages. A file that cannot be read, or that is of another checkpoint, is
made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from loraplex.layers.common import WeightedLayer

logger = logging.getLogger(__name__)

MIN_BYTES = 64 * 2**20
"""Smaller models are packed faster than a file is worth."""

ALIGNMENT = 64
"""Bytes to which panels are aligned in the file, so that no vector crosses a cache line."""

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""As safetensors writes them."""

_UNFINISHED = re.compile(r"\.(\d+)(-\d+)?\.tmp$")
"""How the name of a file that is being written ends: the process, and which of its files."""

_writers: dict[Path, threading.Thread] = {}
"""The files that this process is writing, and who writes them."""

_numbers = itertools.count()


class PackedCache:
    """The file of one checkpoint in one form. `form` names dtype, quantization and packed format.

    merged: the digest of an adapter that is merged into the weights; one such file is kept beside that of the base.
    """

    def __init__(self, folder: Path, checkpoint: Path, form: Sequence[str], merged: str = "") -> None:
        self._prefix = "-".join((_place(checkpoint), *(["merged"] if merged else []), *form))
        self.file = folder / f"{self._prefix}-{_fingerprint(checkpoint)}{merged}.safetensors"

    def restore(self, layers: Sequence[WeightedLayer]) -> bool:
        """Map the weights of every layer from the file; False, and nothing changed, when there is no such file."""
        if not os.path.exists(self.file):  # False for what cannot be a path, too
            return False
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in list(opened.keys())}
        except (SafetensorError, OSError) as error:
            logger.warning("the packed weights in %s cannot be read and are made again: %s", self.file, error)
            return False
        by_layer: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            layer_name, _, name = key.rpartition("|")
            by_layer.setdefault(layer_name, {})[name] = tensor
        if {layer.name for layer in layers} != set(by_layer):
            logger.warning("the packed weights in %s are of another model and are made again", self.file)
            return False
        for layer in layers:
            layer.restore(by_layer[layer.name])
        logger.info("mapped packed weights from %s", self.file)
        return True

    def save_soon(self, layers: Sequence[WeightedLayer]) -> threading.Thread | None:
        """Write the file in a thread of its own; a small model's is not written. A failure is logged, nothing more."""
        tensors = {f"{layer.name}|{name}": tensor for layer in layers for name, tensor in layer.prepared().items()}
        if sum(t.nbytes for t in tensors.values()) < MIN_BYTES:
            return None
        unfinished = self.file.with_suffix(f".{os.getpid()}-{next(_numbers)}.tmp")
        thread = threading.Thread(target=self._save, args=(unfinished, tensors), name="packed-cache", daemon=True)
        _writers[unfinished] = thread
        thread.start()
        return thread

    def _save(self, unfinished: Path, tensors: dict[str, torch.Tensor]) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._sweep()
            _write(unfinished, tensors)
            unfinished.rename(self.file)
            self._forget_others()
        except OSError as error:
            logger.warning("packed weights are not kept, the next start packs them again: %s", error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
        finally:
            del _writers[unfinished]

    def _sweep(self) -> None:
        """What killed processes left of this model in this form; first, so that starts that never finish one do not
        fill the disk."""
        for file in self.file.parent.glob(f"{self._prefix}-*.tmp"):
            name = _UNFINISHED.search(file.name)
            if name is not None and file not in _writers and not _is_another_running(int(name[1])):
                file.unlink(missing_ok=True)

    def _forget_others(self) -> None:
        """Files of this model in this form whose checkpoint has changed."""
        for file in self.file.parent.glob(f"{self._prefix}-*.safetensors"):
            if file != self.file:
                file.unlink(missing_ok=True)


def wait_until_saved() -> None:
    """Until every file that this process is writing is there. What a process that ends before has written is lost."""
    for thread in list(_writers.values()):
        thread.join()


def checkpoint_name(checkpoint: Path) -> str:
    """Another one where the checkpoint is another, or has changed; its weights are not read."""
    return f"{_place(checkpoint)}-{_fingerprint(checkpoint)}"


def _place(checkpoint: Path) -> str:
    return hashlib.sha256(str(checkpoint.resolve()).encode()).hexdigest()[:16]


def _fingerprint(checkpoint: Path) -> str:
    """Changes when a file of the checkpoint does: names, sizes and times of the weights, the content of config.json.
    A GGUF file has its config in it."""
    digest, is_one = hashlib.sha256(), checkpoint.is_file()
    for file in [checkpoint] if is_one else sorted(checkpoint.glob("*.safetensors*")):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    if not is_one:
        digest.update((checkpoint / "config.json").read_bytes())
    return digest.hexdigest()[:16]


def _write(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file, large tensors first, each on a multiple of ALIGNMENT; the format allows no gaps."""
    order = sorted(tensors, key=lambda key: tensors[key].nbytes % ALIGNMENT != 0)
    header, offset = {}, 0
    for key in order:
        end = offset + tensors[key].nbytes
        shape = list(tensors[key].shape)
        header[key] = {"dtype": DTYPE_NAMES[tensors[key].dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            for piece in _pieces(tensors[key]):
                out.write(piece)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, without a copy, few at a time: writing lets go of the interpreter's lock between them."""
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(flat), 1 << 22):
        yield flat[start : start + (1 << 22)]


def _is_another_running(pid: int) -> bool:
    """Whether another process of this number lives; in a container this one may have the number of one that died."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
