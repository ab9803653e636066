"""The snapshot that crosses processes: frozen, complete, free of third parties. The page:
tests/server/test_metrics.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from loraplex.cpu import CpuUse
from loraplex.metrics import EngineStats, MemoryMode, MemoryReport, StepTimes


def filled(cls: type[Any]) -> Any:
    """A value of `cls` in which every field differs from every other and from its default."""
    values: dict[str, Any] = {}
    for number, (name, hint) in enumerate(get_type_hints(cls).items(), start=1):
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            values[name] = filled(hint)
        elif hint in (Mapping[str, int], Mapping[str, float]):
            values[name] = {f"{name}_key": number}
        elif hint == Mapping[int, str]:
            values[name] = {number: f"{name} of it"}
        elif hint == tuple[int, ...]:
            values[name] = (number, number + 1)
        elif get_origin(hint) is tuple:
            values[name] = (filled(get_args(hint)[0]),)
        elif hint == int | None:
            values[name] = number
        elif hint is MemoryMode:
            values[name] = MemoryMode.LOW_MEMORY
        else:
            values[name] = hint(number)
    return cls(**values)


def test_every_field_crosses_the_process_border() -> None:
    stats = filled(EngineStats)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
    defaults = EngineStats()
    assert all(getattr(stats, field.name) != getattr(defaults, field.name) for field in dataclasses.fields(EngineStats))


def test_an_engine_that_did_nothing_has_counted_nothing() -> None:
    stats = EngineStats()
    assert stats.step_times == StepTimes(0, {})
    assert stats.cpu == CpuUse()
    assert stats.memory == MemoryReport()
    assert (stats.memory.loads, stats.memory.evictions, stats.memory.kv_cache_usage) == ({}, {}, 0)
    names = {field.name for field in dataclasses.fields(stats)} - {"step_times", "cpu", "memory"}
    assert not any(getattr(stats, name) for name in names)


def test_a_snapshot_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineStats().num_running = 1  # type: ignore[misc]


def test_it_imports_only_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import loraplex.metrics; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.strip(" '[]\n").split(".")[0] for name in done.stdout.split(",")}
    assert loaded <= {"loraplex", *sys.stdlib_module_names}
