"""Which library of kernels runs: the best one that this machine has and that passes its self-test.

`open_library` never raises for a machine that has none: it says why, and stock torch runs instead.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass, replace

from loraplex.kernels.native.library import ISAS, LOAD_ERRORS, NativeLibrary, load
from loraplex.kernels.native.self_test import first_difference

logger = logging.getLogger(__name__)

ISA_VARIABLE = "LORAPLEX_ISA"
"""Environment variable that names the instruction set instead of the best one; `none` turns native kernels off."""

COMPARED_WITH = {"avx512": "avx2", "neon_dotprod": "neon"}
"""The libraries that have to give the same bits as another one before they run."""


@dataclass(frozen=True, slots=True)
class NoLibrary:
    """Why there are no native kernels here; `is_wanted`: because the environment says so."""

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
    """The best instruction set of this processor. Raises one of LOAD_ERRORS when no library can tell."""
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
    """Why a library cannot be trusted: what it does other than the one below it. Empty when it is as it should be."""
    trusted = COMPARED_WITH.get(library.isa)
    if trusted is None:
        return ""
    try:
        operator = first_difference(library, load(trusted))
    except LOAD_ERRORS as error:
        return f"the self-test has nothing to compare with: {error}"
    return f"the self-test found other bits in {operator} than {trusted} has; please report this" if operator else ""
