"""What an engine reads of adapters: once for `open` and the `read` that follows."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from loraplex.adapters import source_reader
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.source_reader import OpenedModels, SourceReader
from loraplex.adapters.weights import LoRAModel
from loraplex.core import AdapterSpec
from loraplex.demo.tasks import assets_path
from loraplex.errors import AdapterContentChangedError, AdapterLoadError
from loraplex.processes.fair_turns import own_tenant
from tests.security.demo_reader import demo_reader

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(sorted((assets_path() / "adapters").iterdir())[0], tmp_path / "adapter"))


@pytest.fixture
def reader() -> SourceReader:
    return SourceReader(AdapterSource(), demo_reader())


def spec_of(directory: Path, reader: SourceReader) -> AdapterSpec:
    content = reader.open(str(directory), "a")
    return AdapterSpec(7, "a", 1, content.adapter_digest, str(directory), content.nbytes, content.rank)


def model_of(nbytes: int, digest: str) -> LoRAModel:
    return mock.create_autospec(LoRAModel, instance=True, nbytes=nbytes, adapter_digest=digest)


@pytest.mark.parametrize("tenant", ["acme", ""])
def test_files_are_read_in_turns_of_the_tenant(
    directory: Path, reader: SourceReader, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    seen: list[str] = []
    read = source_reader.read_adapter

    def noting(*arguments: Any) -> LoRAModel:
        seen.append(own_tenant())
        return read(*arguments)

    monkeypatch.setattr(source_reader, "read_adapter", noting)
    content = reader.open(str(directory), "a", tenant)
    monkeypatch.setattr(reader._opened, "take", lambda path, digest: None)
    name = f"{tenant}/a" if tenant else "a"
    reader.read(AdapterSpec(7, name, 1, content.adapter_digest, str(directory), content.nbytes, content.rank))
    assert (seen, own_tenant()) == ([tenant, tenant], "")


def test_what_was_opened_is_not_read_again(directory: Path, reader: SourceReader) -> None:
    spec = spec_of(directory, reader)
    (directory / WEIGHTS).unlink()
    model = reader.read(spec)
    assert (model.adapter_id, model.adapter_digest) == (7, spec.adapter_digest)
    with pytest.raises(AdapterLoadError):  # it was taken
        reader.read(spec)


def test_what_cannot_be_read_again_says_nothing_of_what_is_there(directory: Path, reader: SourceReader) -> None:
    """A link to another tenant's files: the fields of their configuration, and their digest, stood in the error."""
    spec = spec_of(directory, reader)
    reader._opened.take(spec.path, spec.adapter_digest)
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "secret_field": "hunter2"}')
    with pytest.raises(AdapterContentChangedError, match="has changed since it was loaded") as caught:
        reader.read(spec)
    assert "secret" not in caught.value.message
    assert "hunter2" not in caught.value.message


def test_another_content_is_not_given_for_the_one_that_was_opened(directory: Path, reader: SourceReader) -> None:
    spec = spec_of(directory, reader)
    with pytest.raises(AdapterContentChangedError):
        reader.read(AdapterSpec(7, "a", 1, "0" * 64, spec.path, spec.nbytes, spec.max_rank))


def test_what_nothing_adds_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    now = [100.0]
    monkeypatch.setattr(source_reader.time, "monotonic", lambda: now[0])
    models = OpenedModels(max_bytes=1000)
    models.put("x", model_of(10, "1"))
    now[0] += 1.5
    models.put("y", model_of(10, "2"))
    assert len(timers) == 1
    now[0] += 1.0
    timers[0].function()
    assert models.take("x", "1") is None
    assert len(timers) == 2, "for what is still there"
    now[0] += 1.5
    timers[1].function()
    assert models.take("y", "2") is None
    assert len(timers) == 2


def test_the_bytes_that_wait_are_bounded() -> None:
    models = OpenedModels(max_bytes=100)
    models.put("large", model_of(101, "1"))
    assert models.take("large", "1") is None
    for number in range(5):
        models.put(str(number), model_of(40, "2"))
    assert [models.take(str(number), "2") is not None for number in range(5)] == [False, False, False, True, True]


def test_without_a_thread_that_lets_go_of_it_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that had not started counted as one: the open failed, and what was opened later was kept."""
    now, refusal = [100.0], RuntimeError("can't start new thread")
    monkeypatch.setattr(source_reader.time, "monotonic", lambda: now[0])
    models = OpenedModels(max_bytes=1000)
    with mock.patch.object(threading.Thread, "start", autospec=True) as start:
        start.side_effect = refusal
        models.put("x", model_of(10, "1"))
        assert models.take("x", "1") is None
        start.side_effect = None
        models.put("y", model_of(10, "2"))
        now[0] += 1.5
        models.put("z", model_of(10, "3"))
        now[0] += 1.0
        (timer,) = start.call_args.args
        start.side_effect = refusal
        timer.function()
    assert models._nbytes == 0
    assert models.take("y", "2") is models.take("z", "3") is None
