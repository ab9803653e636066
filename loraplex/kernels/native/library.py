"""The shared libraries of kernels, one per instruction set: where they are, whether they are whole, what functions they
have.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ISAS_OF = {
    "x86_64": ("avx512", "avx2", "portable"),
    "aarch64": ("neon_dotprod", "neon", "portable"),
}
ISAS = ISAS_OF.get(platform.machine(), ("portable",))
"""Instruction sets of this machine's architecture, best first."""

ABI_VERSION = 13
"""Of csrc/about.cpp; a library of another version is not used."""

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
    "loraplex_pack_groups": (_INT, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "loraplex_round_int4": (_POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _POINTER, _INT),
    "loraplex_row_norms": (
        _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _LONG, _FLOAT, _POINTER,
    ),
    "loraplex_paged_attention": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER),
    "loraplex_rotary_write_kv": (_POINTER,),
    "loraplex_add_lora": (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "loraplex_scale_input": (_POINTER, _POINTER, _POINTER, _LONG, _INT),
    "loraplex_add_rows": (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _LONG, _INT),
    "loraplex_pack_lora": (_INT, _POINTER, _LONG, _LONG, _POINTER),
    "loraplex_rms_norm": (_POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _INT),
    "loraplex_rms_norm_ranks": (
        _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _POINTER, _POINTER, _INT,
    ),
    "loraplex_add_rms_norm": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _FLOAT, _FLOAT, _INT),
    "loraplex_add_scaled": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _FLOAT, _INT),
    "loraplex_layer_norm": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _FLOAT, _POINTER, _INT),
    "loraplex_gelu": (_POINTER, _LONG, _LONG, _LONG, _INT, _INT, _POINTER, _INT),
    "loraplex_experts": (_POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER),
    "loraplex_add_gated": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _INT),
    "loraplex_silu_mul": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_run_program": (_POINTER, _LONG, _POINTER, _POINTER),
    "loraplex_sum_ranks": (_POINTER, _POINTER, _LONG),
    "loraplex_join_ranks": (_POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "loraplex_argmax": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_top_k": (_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "loraplex_scale_logits": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_floor_weights": (_POINTER, _LONG, _LONG, _FLOAT, _POINTER, _INT),
    "loraplex_invert_cdf": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _INT),
    "loraplex_keep_prefix": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _INT),
    "loraplex_log_sum_exp": (_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "loraplex_mask_logits": (_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG, _LONG, _INT),
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


def load(isa: str) -> NativeLibrary:
    """Open one library, which the processor must be able to run. Raises one of LOAD_ERRORS: not there, damaged, not
    this version's.
    """
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
