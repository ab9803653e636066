"""adapter_model.bin: a zip written by torch.save, read with weights-only unpickling.

A zip may claim anything, so before torch sees it: its directory and its pickle are no longer than those of an adapter,
every member is stored, not compressed, and members together are no larger than the file. The pickle names nothing but
what tensors are made of: torch's weights-only unpickler also allows a `bytearray` of any length. Tuples in it
are nested no deeper than those of a tensor: the hash of a deep one, as a key, overflows the stack of the process, and
that of `t = (t, t)`, written sixty times, never ends. Plain pickles (torch before 1.6) are refused: they allocate what
they claim.

torch reads zips with a reader of its own, which takes the directory from another place and `DATA.PKL` for `data.pkl`.
So it gets a zip written here of the members that were checked, and never the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from typing import Any

import torch

from loraplex.adapters.files import BIN_NAME, AdapterFolder, check_name, check_no_pointer, damaged
from loraplex.adapters.regular_file import RegularFile, check_size
from loraplex.errors import AdapterFileFormatError, AdapterTruncatedError, shown

REMEDY = "save it again with save_pretrained(safe_serialization=True)"
MEMBERS_A_TENSOR = 2
PICKLE_BYTES_A_TENSOR = 512
OPCODES_A_TENSOR = 64
"""Of a parameter 42. The check and torch's weights-only unpickler go over them in Python."""
MAX_TUPLE_DEPTH = 4
"""Arguments of a parameter, those of its tensor, and its shape; one to spare."""
SPARE_MEMBERS = 64
PIECE_BYTES = 2**20
DIRECTORY_BYTES_A_MEMBER = 400
"""46, and the member's name, which begins with the name that the file was saved under."""
_UNPICKLING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError, AssertionError)
_NAMES_IN_PICKLES = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}
_STORAGE = re.compile(r"torch \w+Storage")
_PUTS, _GETS, _CALLS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}, {"REDUCE", "BINPERSID"}
_OPCODES = {"PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_OPCODES |= {"SHORT_BINSTRING", "BINUNICODE", "GLOBAL", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_OPCODES |= {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"}
_OPCODES |= _PUTS | _GETS | _CALLS


def read_bin(folder: AdapterFolder, max_bytes: int, max_tensors: int) -> dict[str, torch.Tensor]:
    """The tensors of the file, on the CPU.

    Raises AdapterFileFormatError, AdapterTruncatedError, AdapterTooLargeError, and what opening raises.
    """
    where = folder.where(BIN_NAME)
    with io.BytesIO() as checked:  # closed with an error: a traceback may live until the next collection
        with folder.open(BIN_NAME) as file:
            check_size(file.size, max_bytes, folder.adapter)
            _write_checked_zip(checked, file, max_tensors, where)
        try:
            loaded = torch.load(checked, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _more_than_tensors(where, _first_line(error)) from error
        except _UNPICKLING_ERRORS as error:
            raise damaged(where, f"{_first_line(error)}; {REMEDY}") from error
    return _check_tensors(loaded, file.size, where)


def _refused(where: str, what: str) -> AdapterFileFormatError:
    return AdapterFileFormatError(f"{where} {what}; {REMEDY}")


def _more_than_tensors(where: str, what: str) -> AdapterFileFormatError:
    return _refused(where, f"holds more than tensors and is not loaded: {what}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _write_checked_zip(copy: io.BytesIO, file: RegularFile, max_tensors: int, where: str) -> None:
    """A zip of the same members, which every reader reads alike.

    The file is read in pieces, its directory first: a sparse or truncated one costs no memory, and no piece holds the
    interpreter's lock for long.
    """
    max_members = max_tensors * MEMBERS_A_TENSOR + SPARE_MEMBERS
    source = _PieceReader(file, max(PIECE_BYTES, max_members * DIRECTORY_BYTES_A_MEMBER))
    head = source.read(8)
    check_no_pointer(head, where)
    if head[:4] != b"PK\x03\x04":
        raise _refused(where, "is not a file of torch.save (a zip)")
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            if len(members) > max_members:
                text = f"has more than {max_members} members; no adapter of this base model has"
                raise AdapterFileFormatError(f"{where} {text}")
            is_stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            if not is_stored or sum(member.file_size for member in members) > file.size:
                raise _refused(where, "is a compressed zip; torch.save does not write such")
            names = {member.filename.lower() for member in members}  # torch finds members whatever their case
            if len(names) < len(members):
                raise _refused(where, "has two members of one name")
            _copy(archive, members, copy)
        file.check_unchanged(file.stamp)
        with zipfile.ZipFile(copy) as archive:
            for member in archive.infolist():
                if member.filename.lower().endswith(".pkl"):
                    _check_pickle(archive, member, max_tensors, where)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError, RuntimeError, LookupError) as error:
        text = f"is truncated or damaged: {_first_line(error)}; copy the file again"
        raise AdapterTruncatedError(f"{where} {text}") from error
    copy.seek(0)


def _copy(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], target: io.BytesIO) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as written:
        for member in members:
            info = zipfile.ZipInfo(member.filename)
            info.file_size = member.file_size
            with archive.open(member) as source, written.open(info, "w") as sink:
                while piece := source.read(PIECE_BYTES):
                    sink.write(piece)


class _PieceReader(io.FileIO):
    """A file as `zipfile` reads it, no more than `max_bytes` at a time: a longer piece is a directory without end."""

    def __init__(self, file: RegularFile, max_bytes: int) -> None:
        super().__init__(file.fd, closefd=False)
        self._file = file
        self._max_bytes = max_bytes

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._file.size - self.tell())
        size = left if size is None or size < 0 else min(size, left)
        if size > self._max_bytes:
            raise _refused(self._file.where, f"has a directory of {size} bytes, at most {self._max_bytes} are read")
        piece = bytearray(size)
        num_read = self._file.read_into(memoryview(piece), self.tell())
        self.seek(num_read, io.SEEK_CUR)
        return bytes(piece[:num_read])


def _check_pickle(archive: zipfile.ZipFile, member: zipfile.ZipInfo, max_tensors: int, where: str) -> None:
    """Refuse a pickle that names anything but tensors, or is longer than theirs, before it is loaded."""
    max_bytes, max_opcodes = max_tensors * PICKLE_BYTES_A_TENSOR, max_tensors * OPCODES_A_TENSOR
    if member.file_size > max_bytes:
        raise _refused(where, f"has a pickle of {member.file_size} bytes, at most {max_bytes} are read")
    depths = _TupleDepths(where)
    for number, (opcode, argument, _) in enumerate(pickletools.genops(archive.read(member))):
        if number >= max_opcodes:
            raise _refused(where, f"has a pickle of more than {max_opcodes} steps; no adapter of this base model has")
        is_known = argument in _NAMES_IN_PICKLES or (isinstance(argument, str) and _STORAGE.fullmatch(argument))
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") and not is_known:
            raise _more_than_tensors(where, f"it names {shown(argument)}")
        depths.follow(opcode, argument)


class _TupleDepths:
    """Follows a pickle without building anything: of each value on the stack, how deep it is nested in tuples.

    What an opcode takes and pushes is `pickletools`' own knowledge. Raises AdapterFileFormatError for a deep tuple and
    for what torch.save does not write, IndexError for an empty stack.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[int] = []
        self._marks: list[int] = [0]
        self._memo: dict[Any, int] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: object) -> None:
        stack, name = self._stack, opcode.name
        if name not in _OPCODES:
            raise _more_than_tensors(self._where, f"{name} in its pickle")
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _PUTS:
            self._memo[argument] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name not in ("PROTO", "STOP"):
            depths = self._take(opcode.stack_before)
            if opcode.stack_after == [pickletools.pytuple]:
                stack.append(1 + max(depths, default=0))
            elif not depths or name in _CALLS:  # calls make storages, tensors and dicts: none is hashed by its content
                stack.append(0)
            else:  # the list or dict that is added to
                stack.append(depths[0])
            if stack[-1] > MAX_TUPLE_DEPTH:
                raise _more_than_tensors(self._where, f"tuples nested deeper than {MAX_TUPLE_DEPTH}")

    def _take(self, kinds: list[pickletools.StackObject]) -> list[int]:
        start = len(self._stack) - len(kinds)
        if pickletools.markobject in kinds:
            start = self._marks.pop() - kinds.index(pickletools.markobject)
        if start < self._marks[-1]:
            raise IndexError("its pickle takes more than it has")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken


def _check_tensors(loaded: object, size: int, where: str) -> dict[str, torch.Tensor]:
    if not isinstance(loaded, dict):
        raise AdapterFileFormatError(f"{where} holds a {type(loaded).__name__}, not a dict of tensors")
    loaded = dict(dict.items(loaded))  # an OrderedDict's own attributes, which a pickle sets, may hide its methods
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or not _is_plain(tensor):
            raise AdapterFileFormatError(f"{where}: entry {shown(name)} is not a plain tensor")
        check_name(name, where)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())  # tensor.nbytes overflows
    if nbytes > size:  # stride 0, or shared bytes
        raise AdapterFileFormatError(f"{where} holds tensors that are larger than the file")
    return loaded


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
