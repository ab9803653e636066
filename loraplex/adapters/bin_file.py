"""adapter_model.bin: a zip written by torch.save, read with weights-only unpickling.

A zip may claim anything, so before torch sees it: every member is stored, not compressed, and members together are no larger than the
file. Plain pickles (torch before 1.6) are refused: they allocate what they claim.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import torch

from loraplex.adapters.files import check_no_pointer
from loraplex.adapters.regular_file import RegularFile, check_size
from loraplex.errors import AdapterFileFormatError, AdapterTruncatedError

REMEDY = "save it again with save_pretrained(safe_serialization=True)"


def read_bin(path: Path, adapter: str, max_bytes: int) -> dict[str, torch.Tensor]:
    """The tensors of the file, on the CPU. Raises AdapterFileFormatError, AdapterTruncatedError, AdapterTooLargeError and kin."""
    where = f"adapter {adapter!r}: {path.name}"
    with RegularFile.open(path, adapter) as file:
        check_size(file.size, max_bytes, adapter)
        data = file.read_all()
    _check_zip(bytes(data[:8]), io.BytesIO(data), len(data), where)
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise AdapterFileFormatError(
            f"{where} holds more than tensors and is not loaded: {_first_line(error)}; {REMEDY}"
        ) from error
    except (
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        EOFError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as error:
        raise AdapterFileFormatError(f"{where} is damaged: {_first_line(error)}; {REMEDY}") from error
    return _check_tensors(loaded, len(data), where)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _check_zip(magic: bytes, file: io.BytesIO, size: int, where: str) -> None:
    check_no_pointer(magic, where)
    if magic[:4] != b"PK\x03\x04":
        raise AdapterFileFormatError(f"{where} is not a file of torch.save (a zip); {REMEDY}")
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise AdapterTruncatedError(f"{where} is truncated or damaged: {error}; copy the file again") from error
    if (
        any(member.compress_type != zipfile.ZIP_STORED for member in members)
        or sum(m.file_size for m in members) > size
    ):
        raise AdapterFileFormatError(f"{where} is a compressed zip; torch.save does not write such; {REMEDY}")


def _check_tensors(loaded: object, size: int, where: str) -> dict[str, torch.Tensor]:
    if not isinstance(loaded, dict):
        raise AdapterFileFormatError(f"{where} holds a {type(loaded).__name__}, not a dict of tensors")
    for name, tensor in loaded.items():
        is_plain = isinstance(name, str) and isinstance(tensor, torch.Tensor)
        if not is_plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise AdapterFileFormatError(f"{where}: entry {name!r} is not a plain tensor")
    if sum(tensor.numel() * tensor.element_size() for tensor in loaded.values()) > size:
        raise AdapterFileFormatError(
            f"{where} holds tensors that are larger than the file"
        )  # stride 0, or shared bytes
    return loaded
