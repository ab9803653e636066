"""Which library is chosen and why, with folders and environments of every kind; no machine makes it raise."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch

import loraplex.kernels.native.library as library_module
from loraplex.errors import ConfigError
from loraplex.kernels.fallbacks import NATIVE_OPERATORS
from loraplex.kernels.native import choice
from loraplex.kernels.native.backend import NativeBackend
from loraplex.kernels.native.choice import ISA_VARIABLE, NoLibrary, open_library
from loraplex.kernels.native.library import DIGEST_SUFFIX, ISAS, ISAS_OF, NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.kernels.protocols import LayerOps, SamplingOps
from tests.kernels.native.machine import library_or_skip

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `open_library` looks again, and no variable is set."""
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    monkeypatch.setattr("loraplex.kernels.ops.open_library", open_library.__wrapped__)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of libraries; empty."""
    monkeypatch.setattr(library_module, "_folders", lambda: iter([tmp_path]))
    return tmp_path


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of libraries, with copies of all three, on a processor with AVX-512."""
    for isa in ISAS:
        path = library_or_skip(isa).path
        shutil.copy(path, tmp_path)
        record_digest(tmp_path / path.name)
    monkeypatch.setattr(library_module, "_folders", lambda: iter([tmp_path]))
    return tmp_path


def record_digest(path: Path) -> None:
    """As the build does (CMakeLists.txt)."""
    path.with_name(path.name + DIGEST_SUFFIX).write_text(hashlib.sha256(path.read_bytes()).hexdigest() + "\n")


def opened() -> NativeLibrary | NoLibrary:
    return open_library.__wrapped__()


def library() -> NativeLibrary:
    result = opened()
    assert isinstance(result, NativeLibrary), result
    return result


def reason() -> str:
    result = opened()
    assert isinstance(result, NoLibrary), result
    return result.reason


def so(folder: Path, isa: str) -> Path:
    return folder / f"libloraplex_{isa}.so"


# ------------------------------------------------------------------------------------------------- nothing to be opened


def test_not_built(folder: Path) -> None:
    text = reason()
    for word in ("libloraplex_portable.so", "not installed", "C++ compiler", "install"):
        assert word in text


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF\x02\x01\x01" + bytes(57)])
def test_a_file_that_is_no_library(folder: Path, content: bytes) -> None:
    so(folder, "portable").write_bytes(content)
    assert "libloraplex_portable.so is damaged; install loraplex again" in reason()


@pytest.mark.parametrize("part", [63, 64, 1000, 20_000, -1])
def test_a_library_that_was_cut_off(libraries: Path, part: int) -> None:
    """The loader would end the process with a bus error."""
    path = so(libraries, "portable")
    path.write_bytes(path.read_bytes()[:part])
    assert "libloraplex_portable.so is damaged; install loraplex again" in reason()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 64
    path.write_bytes(data)


@pytest.mark.parametrize("at", [5000, 50_000, 200_000, -5000])
def test_a_library_whose_body_is_damaged_is_never_opened(
    libraries: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is sound: to open it, or the first call, would end the process."""
    flip(so(libraries, "portable"), at)
    monkeypatch.setattr(library_module.ctypes, "CDLL", lambda name: pytest.fail(f"{name} was opened"))
    assert "libloraplex_portable.so is damaged; install loraplex again" in reason()


@pytest.mark.parametrize("damaged", [("avx512",), ("avx512", "avx2")])
def test_the_next_one_runs_instead_of_a_damaged_one(
    libraries: Path, damaged: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    for isa in damaged:
        flip(so(libraries, isa), 100_000)
    found = library()
    assert found.isa == ISAS[len(damaged)]
    for isa in damaged:
        text = f"libloraplex_{isa}.so is damaged; install loraplex again"
        assert text in found.note
        assert [text in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"0" * 64])
def test_a_digest_that_says_something_else(libraries: Path, content: bytes) -> None:
    path = so(libraries, "portable")
    path.with_name(path.name + DIGEST_SUFFIX).write_bytes(content)
    assert "libloraplex_portable.so is damaged" in reason()


def test_a_library_without_a_digest_is_believed(libraries: Path) -> None:
    """Built by hand, or by an older build."""
    for path in libraries.glob(f"*{DIGEST_SUFFIX}"):
        path.unlink()
    assert library().isa == "avx512"


def test_the_build_records_digests() -> None:
    for isa in ISAS:
        path = library_or_skip(isa).path
        recorded = path.with_name(path.name + DIGEST_SUFFIX)
        if not recorded.exists():
            pytest.skip(f"{path.name} is of a build from before there were digests")
        assert recorded.read_text() == hashlib.sha256(path.read_bytes()).hexdigest() + "\n"


def test_the_library_of_something_else(folder: Path) -> None:
    import _ctypes

    shutil.copy(_ctypes.__file__, so(folder, "portable"))
    text = reason()
    assert "loraplex_abi_version" in text
    assert "install loraplex again" in text


def test_another_version(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "ABI_VERSION", 999)
    text = reason()
    assert "this package needs 999" in text
    assert "install loraplex again" in text


def test_the_library_of_another_instruction_set(libraries: Path) -> None:
    """What is said to run would not be what runs, or the processor would lack it."""
    shutil.copy(so(libraries, "avx2"), so(libraries, "avx512"))
    record_digest(so(libraries, "avx512"))
    assert library().isa == "avx2"
    assert "libloraplex_avx512.so holds the avx2 kernels; install loraplex again" in library().note


def test_a_function_is_missing(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "SIGNATURES", {"loraplex_of_tomorrow": ()})
    assert "loraplex_of_tomorrow" in reason()


def test_folders_are_the_package_and_where_it_was_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    folders = list(library_module._folders())
    assert folders[0] == Path(library_module.__file__).parent / "lib"
    assert folders[1:] == [tmp_path / "loraplex/kernels/native/lib"]


# ----------------------------------------------------------------------------------------------------- the environment


def test_none_turns_native_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "none")
    assert opened() == NoLibrary("LORAPLEX_ISA=none; unset it for native kernels", is_wanted=True)


def test_an_unknown_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx1024")
    assert "avx1024 is none of avx512, avx2, portable, none" in reason()


@pytest.mark.parametrize("isa", ISAS)
def test_one_can_be_asked_for(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library_or_skip(isa)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    assert library().isa == isa
    best = choice.best_isa()
    assert library().note == ("" if isa == best else f"LORAPLEX_ISA={isa}; unset it for {best}")


def test_more_than_the_processor_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    monkeypatch.setattr(choice, "best_isa", lambda: "avx2")
    assert "this processor has avx2 at most" in reason()


def test_one_that_is_asked_for_and_missing(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    so(libraries, "avx2").unlink()
    monkeypatch.setenv(ISA_VARIABLE, "avx2")
    assert "libloraplex_avx2.so" in reason()


# -------------------------------------------------------------------------------------------------- the best that works


def test_the_best_is_chosen(libraries: Path) -> None:
    assert (library().isa, library().note) == ("avx512", "")
    assert library().path == so(libraries, "avx512")


def test_a_missing_or_damaged_one_is_passed_over(libraries: Path) -> None:
    so(libraries, "avx512").write_bytes(b"damaged")
    assert library().isa == "avx2"
    assert "not avx512: " in library().note
    so(libraries, "avx2").unlink()
    assert library().isa == "portable"
    assert "not avx2: " in library().note


def test_without_avx2_there_is_nothing_to_compare_with(libraries: Path) -> None:
    so(libraries, "avx2").unlink()
    assert library().isa == "portable"
    assert "nothing to compare with" in library().note


@pytest.fixture
def _differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.kernels.native.choice.first_difference", lambda library, trusted: "linear int8")


@pytest.mark.usefixtures("_differs")
def test_avx512_that_differs_is_not_used(libraries: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library().isa == "avx2"
    assert "linear int8" in library().note
    assert "avx512 is not used" in caplog.text
    description = get_backend("auto", CPU).description
    assert description.startswith("native avx2, ")
    assert "linear int8" in description


@pytest.mark.usefixtures("_differs")
def test_avx512_that_differs_is_used_when_asked_for(
    libraries: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx512")
    assert library().isa == "avx512"
    assert "linear int8" in caplog.text


@pytest.mark.usefixtures("_differs")
def test_other_instruction_sets_are_not_compared(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ("avx2", "portable"):
        monkeypatch.setattr(choice, "best_isa", lambda isa=isa: isa)
        assert (library().isa, library().note) == (isa, "")


@pytest.mark.parametrize(("difference", "expected"), [("", "neon_dotprod"), ("linear int4", "neon")])
def test_dot_products_of_arm64_are_compared_with_neon(
    difference: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(library: NativeLibrary, trusted: NativeLibrary) -> str:
        compared.append((library.isa, trusted.isa))
        return difference

    monkeypatch.setattr(choice, "ISAS", ISAS_OF["aarch64"])
    monkeypatch.setattr(choice, "best_isa", lambda: "neon_dotprod")
    monkeypatch.setattr(choice, "load", lambda isa: NativeLibrary(isa, Path(isa), ctypes.CDLL(None)))
    monkeypatch.setattr(choice, "first_difference", compare)
    assert library().isa == expected
    assert compared == [("neon_dotprod", "neon")]


def test_it_is_opened_once_a_process() -> None:
    assert open_library() is open_library()


# ------------------------------------------------------------------------------------------ what the backend says of it


def test_description_of_the_native_backend() -> None:
    best = library_or_skip(choice.best_isa())
    threads = torch.get_num_threads()
    expected = f"native {best.isa}, {threads} thread{'s' if threads > 1 else ''}"
    assert get_backend("native", CPU).description == get_backend("auto", CPU).description == expected


def test_descriptions_of_stock_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert get_backend("torch", CPU).description == "stock torch (asked for with lora_backend torch)"
    assert get_backend("auto", torch.device("meta")).description == (
        "stock torch (there are no kernels of our own for meta)"
    )
    assert get_backend("reference", CPU).description == "reference"
    monkeypatch.setenv(ISA_VARIABLE, "none")
    assert get_backend("auto", CPU).description == "stock torch (LORAPLEX_ISA=none; unset it for native kernels)"
    assert caplog.text == ""
    monkeypatch.delenv(ISA_VARIABLE)
    with caplog.at_level(logging.WARNING):
        backend = get_backend("auto", CPU)
    assert backend.description.startswith("stock torch (libloraplex_portable.so is not installed")
    assert backend.silu_mul(torch.zeros(2, 4)).shape == (2, 2)
    assert [(each.op, each.backend, each.calls) for each in backend.fallbacks()] == [("silu_mul", "native", 1)]
    assert "g++" in backend.fallbacks()[0].reason
    assert "stock torch runs" in caplog.text


def test_every_operator_with_kernels_is_counted_without_them() -> None:
    operators = {name for name in {**vars(LayerOps), **vars(SamplingOps)} if not name.startswith("_")}
    weights = {"activation_dtype", "embeds_prepared", "embedding", "linear_tensors", "prepare_linear", "restore_linear"}
    weights.add("keep_linear")
    weights |= {"row_norms", "own_shape", "own_weight", "linear_rows"}  # of a load, or a view, not of a step
    # of other processes, which no stock operator stands for
    weights |= {"rank_nbytes", "collectives", "sum_ranks", "rms_norm_ranks"}
    own = {name for name, f in vars(NativeBackend).items() if inspect.isfunction(f)}
    assert own & operators - weights == set(NATIVE_OPERATORS)


def test_native_kernels_that_are_asked_for_and_missing(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no native kernels here: libloraplex_portable"):
        get_backend("native", CPU)
