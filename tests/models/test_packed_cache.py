"""Packed weights on disk: the same logits from a map, made again when anything is off, never an error."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from loraplex.frontend.llm import LLM
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.models import packed_cache
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import Checkpoint, load_model
from loraplex.models.packed_cache import PackedCache
from tests.fixtures import ModelZoo
from tests.models.paged_runner import CPU, PagedRunner

pytestmark = pytest.mark.skipif(not isinstance(open_library(), NativeLibrary), reason="no native kernels are built")


@pytest.fixture
def base(zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    return Path(shutil.copytree(zoo.base("qwen2"), tmp_path / "base"))


def cache_of(base: Path, *form: str) -> PackedCache:
    return PackedCache(base.parent / "cache", base, form or ("float32", "panels16.1"))


def load(base: Path, cache: PackedCache | None, quantization: str | None = None) -> Decoder:
    config, ops = ModelConfig.from_dir(base), get_backend("native", CPU)
    return load_model(
        base, config, torch.float32, CPU, "auto", 0, ops, False, quantization=quantization, packed_cache=cache
    )


def save(base: Path, cache: PackedCache, quantization: str | None = None) -> torch.Tensor:
    """Load with nothing kept yet; wait for the file; the logits."""
    model = load(base, None, quantization)
    thread = cache.save_soon(model.weighted_layers())
    assert thread is not None
    thread.join()
    return logits(model)


def logits(model: Decoder) -> torch.Tensor:
    return PagedRunner(model, block_size=16).step([("a", list(range(3, 30)))])[0]


def files(base: Path) -> list[str]:
    return sorted(file.name for file in (base.parent / "cache").iterdir())


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4-a16"])
def test_a_second_start_maps_what_the_first_packed(
    base: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = save(base, cache_of(base), quantization)
    monkeypatch.setattr(Checkpoint, "load_into", None)  # the checkpoint is not read again
    assert torch.equal(logits(load(base, cache_of(base), quantization)), want)


def test_a_folder_that_cannot_be_keeps_nothing(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A component of 300 characters in $LORAPLEX_CACHE ended the engine's start."""
    cache = PackedCache(base.parent / ("x" * 300), base, ("float32", "panels16.1"))
    model = load(base, cache)
    thread = cache.save_soon(model.weighted_layers())
    assert thread is not None
    thread.join()
    assert "packed weights are not kept" in caplog.text


def test_panels_lie_on_cache_lines(base: Path) -> None:
    save(base, cache_of(base))
    with safe_open(cache_of(base).file, framework="pt") as opened:
        addresses = {key: opened.get_tensor(key) for key in list(opened.keys()) if key.endswith("panels")}
        assert addresses
        assert {t.data_ptr() % packed_cache.ALIGNMENT for t in addresses.values()} == {0}


def test_the_first_load_keeps_its_weights(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(base)
    kept = []
    monkeypatch.setattr(cache, "save_soon", lambda layers: kept.extend(layers))
    load(base, cache)
    assert kept


def test_a_changed_checkpoint_is_another_file_and_the_old_one_goes(base: Path) -> None:
    save(base, cache_of(base))
    old = files(base)
    weights = base / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert not cache_of(base).restore(load(base, None).weighted_layers())
    save(base, cache_of(base))
    assert len(files(base)) == 1
    assert files(base) != old


def test_forms_live_side_by_side(base: Path) -> None:
    save(base, cache_of(base))
    save(base, cache_of(base, "float32", "int8", "panels16.1"), "int8")
    assert len(files(base)) == 2


def test_an_unreadable_file_is_made_again(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    want = save(base, cache_of(base))
    file = cache_of(base).file
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(load(base, cache_of(base))), want)
    assert "cannot be read and are made again" in caplog.text


def test_what_a_killed_process_left_is_swept(base: Path) -> None:
    cache = cache_of(base)
    cache.file.parent.mkdir()
    left = cache.file.with_suffix(".999999999.tmp")
    left.touch()
    save(base, cache)
    assert files(base) == [cache.file.name]


def test_a_folder_that_cannot_be_written_is_a_warning(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base.parent / "cache").touch()
    with caplog.at_level(logging.WARNING):
        save(base, cache_of(base))
    assert "packed weights are not kept" in caplog.text


def test_a_small_model_is_not_kept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 1 << 40)
    assert cache_of(base).save_soon(load(base, None).weighted_layers()) is None
    assert not (base.parent / "cache").exists()


def test_starts_that_are_killed_leave_one_file_at_most(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short command ends before its file is written, every time: the rest of the last goes before the next begins."""
    cache = cache_of(base)
    cache.file.parent.mkdir()
    left = [cache.file.with_suffix(f".{pid}.tmp") for pid in ("999999999", f"{os.getpid()}-7777")]
    for file in left:
        file.touch()

    def write(file: Path, tensors: object) -> None:
        assert files(base) == []
        raise OSError("killed here")

    monkeypatch.setattr(packed_cache, "_write", write)
    save(base, cache)
    assert files(base) == []


def test_two_engines_of_one_process_write_two_files(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one has the name of a finished file while the other still writes into it."""
    written: list[Path] = []
    both = threading.Barrier(2)

    def write(file: Path, tensors: object) -> None:
        written.append(file)
        file.touch()
        both.wait(timeout=30)

    monkeypatch.setattr(packed_cache, "_write", write)
    layers = load(base, None).weighted_layers()
    threads = [cache_of(base).save_soon(layers) for _ in range(2)]
    for thread in threads:
        assert thread is not None
        thread.join()
    assert len(set(written)) == 2
    assert files(base) == [cache_of(base).file.name]


def test_an_offline_engine_ends_once_its_weights_are_kept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a short script packs them again each time."""
    write = packed_cache._write
    monkeypatch.setattr(packed_cache, "_write", lambda *arguments: (time.sleep(0.2), write(*arguments)))
    LLM(str(base), packed_cache_dir=str(base.parent / "cache")).close()
    assert [Path(name).suffix for name in files(base)] == [".safetensors"]
