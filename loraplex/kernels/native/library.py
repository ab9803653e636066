"""Find, choose, test and open the shared library of kernels: one per instruction set, the best that this machine can run.

`open_library` never raises for a machine that has none: it says why, and stock torch runs instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ISAS = ("avx512", "avx2", "portable")
"""Instruction sets, best first."""

ABI_VERSION = 1
"""Of csrc/about.cpp; a library of another version is not used."""

ISA_VARIABLE = "LORAPLEX_ISA"
"""Environment variable that names the instruction set to use instead of the best one; `none` turns native kernels off."""

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "loraplex_linear": (
        _INT, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT,
    ),
    "loraplex_pack_linear": (_INT, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_rms_norm": (_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _INT),
    "loraplex_add_rms_norm": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _INT),
    "loraplex_silu_mul": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_argmax": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_top_k": (_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_scale_logits": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_floor_weights": (_POINTER, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    "loraplex_invert_cdf": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_keep_prefix": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "loraplex_log_sum_exp": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_ranks": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
}  # fmt: skip
"""Arguments of every function of csrc/; all return nothing and release the interpreter's lock."""


@dataclass(frozen=True)
class NativeLibrary:
    """An opened library. `functions` has the functions by name, with their argument types set."""

    isa: str
    path: Path
    functions: ctypes.CDLL
    note: str = ""
    """Why this is not the best instruction set of the machine; empty when it is."""


@dataclass(frozen=True, slots=True)
class NoLibrary:
    """Why there are no native kernels here."""

    reason: str


@functools.cache
def open_library() -> NativeLibrary | NoLibrary:
    """The best library that this machine can run, opened once per process."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted == "none":
        return NoLibrary(f"{ISA_VARIABLE}=none")
    if wanted and wanted not in ISAS:
        return NoLibrary(f"{ISA_VARIABLE}={wanted} is none of {', '.join(ISAS)}, none")
    try:
        portable = _load("portable")
    except (OSError, AttributeError, ValueError) as error:
        return NoLibrary(str(error))
    best = portable.functions.loraplex_best_isa().decode()
    return _choose(wanted or best, best, portable)


def _choose(wanted: str, best: str, portable: NativeLibrary) -> NativeLibrary | NoLibrary:
    if ISAS.index(wanted) < ISAS.index(best):
        return NoLibrary(f"{ISA_VARIABLE}={wanted}, but this processor has {best} at most")
    notes = []
    for isa in ISAS[ISAS.index(wanted) : -1]:
        try:
            library = _load(isa)
        except (OSError, AttributeError, ValueError) as error:
            notes.append(f"{isa}: {error}")
            continue
        return NativeLibrary(library.isa, library.path, library.functions, "; ".join(notes))
    return NativeLibrary(portable.isa, portable.path, portable.functions, "; ".join(notes))


def _load(isa: str) -> NativeLibrary:
    """Raises OSError, AttributeError or ValueError when the library is not there or not this version's."""
    path = _find(f"libloraplex_{isa}.so")
    functions = ctypes.CDLL(str(path))
    functions.loraplex_isa.restype = functions.loraplex_best_isa.restype = ctypes.c_char_p
    version = functions.loraplex_abi_version()
    if version != ABI_VERSION:
        raise ValueError(f"{path} has version {version}, this package needs {ABI_VERSION}; install loraplex again")
    for name, arguments in SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    return NativeLibrary(isa, path, functions)


def _find(file_name: str) -> Path:
    """Beside this file, or where the package was installed when this is a source checkout. Raises OSError."""
    folders = [Path(__file__).parent / "lib", *(Path(entry) / "loraplex/kernels/native/lib" for entry in sys.path)]
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    raise OSError(f"{file_name} is not installed: no C++ compiler with OpenMP was found when loraplex was built")
