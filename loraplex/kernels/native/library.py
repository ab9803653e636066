"""Find, choose, test and open the shared library of kernels: one per instruction set, the best that this machine can run.

`open_library` never raises for a machine that has none: it says why, and stock torch runs instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ISAS = ("avx512", "avx2", "portable")
"""Instruction sets, best first."""

ABI_VERSION = 4
"""Of csrc/about.cpp; a library of another version is not used."""

ISA_VARIABLE = "LORAPLEX_ISA"
"""Environment variable that names the instruction set to use instead of the best one; `none` turns native kernels off."""

LOAD_ERRORS = (OSError, ValueError)
"""What `load` raises: no such file or not a library; one of another version."""

_ELF64 = struct.Struct("<5s35xQ10xHH2x")
"""Magic and class; offset of the section headers, size and number of them."""

DIGEST_SUFFIX = ".sha256"
"""Of the file beside a library in which the build says what its bytes are (CMakeLists.txt)."""

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "loraplex_linear": (
        _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT,
    ),
    "loraplex_pack_linear": (_INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_paged_attention": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER),
    "loraplex_rotary_write_kv": (_POINTER,),
    "loraplex_add_lora": (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "loraplex_pack_lora": (_INT, _POINTER, _LONG, _LONG, _POINTER),
    "loraplex_rms_norm": (_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _INT),
    "loraplex_add_rms_norm": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _INT),
    "loraplex_silu_mul": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_run_program": (_POINTER, _LONG, _POINTER, _POINTER),
    "loraplex_argmax": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_top_k": (_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_scale_logits": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_floor_weights": (_POINTER, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    "loraplex_invert_cdf": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_keep_prefix": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "loraplex_log_sum_exp": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_ranks": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_checksums": (_POINTER, _POINTER, _LONG, _POINTER),
    "loraplex_team_stats": (_POINTER,),
}  # fmt: skip
"""Arguments of every function of csrc/; all return nothing and release the interpreter's lock."""


class TeamStats(ctypes.Structure):
    """As in csrc/api.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("computed", "waited", "left_out")),
        *((name, ctypes.c_int64) for name in ("threads", "active")),
    )


@dataclass(frozen=True)
class NativeLibrary:
    """An opened library. `functions` has the functions by name, with their argument types set."""

    isa: str
    path: Path
    functions: ctypes.CDLL
    note: str = ""
    """Why this is not the best instruction set of the machine; empty when it is."""

    def team_stats(self) -> TeamStats:
        """What the threads of all calls have seen."""
        stats = TeamStats()
        self.functions.loraplex_team_stats(ctypes.byref(stats))
        return stats


@dataclass(frozen=True, slots=True)
class NoLibrary:
    """Why there are no native kernels here; `is_wanted`: because somebody said so."""

    reason: str
    is_wanted: bool = False


@functools.cache
def open_library() -> NativeLibrary | NoLibrary:
    """The best library that this machine can run, opened once per process."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted == "none":
        return NoLibrary(f"{ISA_VARIABLE}=none; unset it for native kernels", is_wanted=True)
    if wanted and wanted not in ISAS:
        return NoLibrary(f"{ISA_VARIABLE}={wanted} is none of {', '.join(ISAS)}, none")
    try:
        best = best_isa()
        if wanted and ISAS.index(wanted) < ISAS.index(best):
            return NoLibrary(f"{ISA_VARIABLE}={wanted}, but this processor has {best} at most")
        return _forced(wanted, best) if wanted else _best_from(best)
    except LOAD_ERRORS as error:
        return NoLibrary(str(error))


def best_isa() -> str:
    """The best instruction set of this processor. Raises one of LOAD_ERRORS when there is no library that could tell."""
    name: bytes = load("portable").functions.loraplex_best_isa()
    return name.decode()


def _forced(isa: str, best: str) -> NativeLibrary:
    """The library that the environment variable names, whatever its test says."""
    library = load(isa)
    difference = _difference(library)
    if difference:
        logger.warning("%s=%s is used as it says, but %s", ISA_VARIABLE, isa, difference)
    return replace(library, note="" if isa == best else f"{ISA_VARIABLE}={isa}; unset it for {best}")


def _best_from(best: str) -> NativeLibrary:
    """The first of the instruction sets from `best` on that can be opened and passes its test."""
    notes = []
    for isa in ISAS[ISAS.index(best) : -1]:
        try:
            library = load(isa)
        except LOAD_ERRORS as error:
            if isinstance(error, ValueError):  # it is there
                logger.warning("%s is not used: %s", isa, error)
            notes.append(f"not {isa}: {error}")
            continue
        difference = _difference(library)
        if not difference:
            return replace(library, note="; ".join(notes))
        logger.warning("%s is not used: %s", isa, difference)
        notes.append(f"not {isa}: {difference}")
    return replace(load("portable"), note="; ".join(notes))


def _difference(library: NativeLibrary) -> str:
    """Why an AVX-512 library cannot be trusted: what it does other than AVX2. Empty when it is as it should be."""
    from loraplex.kernels.native.self_test import first_difference  # which imports the operators, and they this file

    if library.isa != "avx512":
        return ""
    try:
        operator = first_difference(library, load("avx2"))
    except LOAD_ERRORS as error:
        return f"the self-test has nothing to compare with: {error}"
    return f"the self-test found other bits in {operator} than avx2 has; please report this" if operator else ""


def load(isa: str) -> NativeLibrary:
    """Open one library, which the processor must be able to run. Raises one of LOAD_ERRORS: not there, damaged, not this version's."""
    path = _find(f"libloraplex_{isa}.so")
    _check_whole(path)
    functions = ctypes.CDLL(str(path))
    try:
        version = functions.loraplex_abi_version()
        functions.loraplex_isa.restype = functions.loraplex_best_isa.restype = ctypes.c_char_p
        for name, arguments in SIGNATURES.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = arguments, None
    except AttributeError as error:
        raise ValueError(f"{error}; it is of another version, install loraplex again") from error
    if functions.loraplex_isa().decode() != isa:
        raise ValueError(f"{path} holds the {functions.loraplex_isa().decode()} kernels; install loraplex again")
    if version != ABI_VERSION:
        raise ValueError(f"{path} has version {version}, this package needs {ABI_VERSION}; install loraplex again")
    return NativeLibrary(isa, path, functions)


def _check_whole(path: Path) -> None:
    """Raises ValueError for a file that is not as it was built: to open it, or to call into it, would end the process.

    Without a digest beside it only what was cut off is noticed: an ELF file ends with its section headers.
    """
    data, recorded = path.read_bytes(), path.with_name(path.name + DIGEST_SUFFIX)
    is_whole = False
    if len(data) >= _ELF64.size:
        magic, offset, entry_size, num_entries = _ELF64.unpack_from(data)
        is_whole = magic == b"\x7fELF\x02" and len(data) >= offset + entry_size * num_entries > 0
    if is_whole and recorded.exists():
        is_whole = recorded.read_bytes().strip() == hashlib.sha256(data).hexdigest().encode()
    if not is_whole:
        raise ValueError(f"{path} is damaged; install loraplex again")


def _folders() -> Iterator[Path]:
    """Beside this file, or where the package was installed when this is a source checkout."""
    yield Path(__file__).parent / "lib"
    yield from (Path(entry) / "loraplex/kernels/native/lib" for entry in sys.path)


def _find(file_name: str) -> Path:
    """Raises OSError when it is in no folder."""
    for folder in _folders():
        if (folder / file_name).is_file():
            return folder / file_name
    raise OSError(
        f"{file_name} is not installed: there was no C++ compiler when loraplex was installed; "
        "install g++ (or clang) and then loraplex again"
    )
