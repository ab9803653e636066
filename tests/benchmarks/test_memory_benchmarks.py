"""The benchmarks of adapter memory: what they judge and how, and each once on a tiny fixture. No figure is checked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks import cold_start, few_slots, loaded_engine, many_adapters, slora_sweep, switching
from benchmarks.arguments import seconds
from benchmarks.cold_start import gaps_within, in_turn
from benchmarks.fixture import Fixture, fixture
from benchmarks.many_adapters import Counters
from benchmarks.open_loop import Arrival, Record, Summary
from benchmarks.slora_sweep import LOADS, MODERATE, OVERLOAD, Cell, cells_of, plan, rows_of


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    """Twelve adapters of rank 8."""
    root = tmp_path_factory.mktemp("fixtures")
    return fixture("tiny", 12, ranks=[8], adapter_dtype="bfloat16", targets=("q_proj", "v_proj"), root=root)


def figures(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text())
    assert "tiny-r8-7-bfloat16-qv" in found["title"]
    return dict(found)


def common(made: Fixture, tmp_path: Path) -> list[str]:
    return ["--fixture", str(made.base.parent), "--threads", "1", "--json", str(tmp_path / "out.json")]


# -------------------------------------------------------------------------------------------------------- what is there


def test_no_two_adapters_have_one_content(made: Fixture) -> None:
    contents = [load_file(path / "adapter_model.safetensors") for path in made.adapters]
    assert len({tuple(tensor.sum().item() for tensor in content.values()) for content in contents}) == 12
    assert {name.split(".")[-3] for name in contents[0]} == {"q_proj", "v_proj"}
    assert json.loads((made.adapters[3] / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


def test_a_fixture_that_is_too_small_is_refused_in_a_line(made: Fixture) -> None:
    with pytest.raises(SystemExit, match="has 12 adapters, 13 are asked for"):
        slora_sweep.main(["--fixture", str(made.base.parent), "--cells", "n13-a1-cv1"])
    with pytest.raises(SystemExit, match="is no fixture"):
        few_slots.main(["--fixture", str(made.base)])


def test_seconds() -> None:
    assert seconds("0.5") == 0.5
    for text in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be seconds"):
            seconds(text)


def test_verdicts() -> None:
    assert loaded_engine.verdict(1.1, 1.1) == "ok"
    assert loaded_engine.verdict(1.11, 1.1) == "MISSED"
    assert loaded_engine.verdict(0.95, 0.95, is_at_least=True) == "ok"
    assert loaded_engine.verdict(0.94, 0.95, is_at_least=True) == "MISSED"
    assert loaded_engine.verdict(None, 1.0) == "-"


# ------------------------------------------------------------------------------------------------------------ the sweep


def test_cells_have_names_and_are_compared_with_five() -> None:
    cell = Cell.of("n2000-a0.5-cv8")
    assert (cell.num_adapters, cell.alpha, cell.cv, cell.name) == (2000, 0.5, 8.0, "n2000-a0.5-cv8")
    assert cells_of("n2000-a1-cv1,n20-a1-cv1,n100-a0.1-cv4") == [
        Cell(0.1, 4, 5), Cell(0.1, 4, 100), Cell(1, 1, 5), Cell(1, 1, 20), Cell(1, 1, 2000),
    ]  # fmt: skip
    for name in ("n2000", "n0-a1-cv1", "n5-a0-cv1", "n5-a1-cv0", "n5-a1.1.1-cv1", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="nN-aALPHA-cvCV"):
            Cell.of(name)


def test_the_default_cells_are_a_dozen_of_the_sweep() -> None:
    cells = slora_sweep.parser().parse_args([]).cells
    assert len(cells) == 12
    assert {cell.num_adapters for cell in cells} == {5, 20, 100, 1000, 2000}
    assert {cell.few for cell in cells} <= set(cells)


def test_cells_take_turns_with_what_they_are_compared_with() -> None:
    cells = cells_of("n20-a1-cv1,n7-a0.1-cv1")
    runs = plan(cells, 2)
    assert len(runs) == 4 * 2 * 2
    names = [(run.cell.num_adapters, run.load) for run in runs[:8]]
    assert names == [(5, 1.1), (7, 1.1), (7, 1.1), (5, 1.1), (5, 0.7), (7, 0.7), (7, 0.7), (5, 0.7)]
    assert {run.cell.alpha for run in runs[:8]} == {0.1}


def a_summary(rate: float, first_s: float, error: str = "") -> Summary:
    """Of one request of as many tokens as come in a second, the first after `first_s`."""
    record = Record(Arrival(0.0, None, [5], 2), 0.0, [first_s] * (int(rate) - 1) + [1.0], error)
    return Summary.of([[record]])


def test_a_cell_is_judged_by_both_targets() -> None:
    few, many = cells_of("n20-a1-cv1")

    def met(rate: float, first_s: float, error: str = "") -> bool | None:
        summaries = {
            (few, OVERLOAD): a_summary(100, 0.5),
            (few, MODERATE): a_summary(10, 0.5),
            (many, OVERLOAD): a_summary(rate, 0.9, error),
            (many, MODERATE): a_summary(10, first_s),
        }
        counted = {(cell, load): Counters(1, 2) for cell in (few, many) for load in LOADS}
        first, second = rows_of([few, many], lambda cell, load: summaries[cell, load], counted)
        assert first.is_met is None
        assert second.counted.num_misses == 4
        assert second.throughput == pytest.approx(rate / 100)
        assert second.first_token == pytest.approx(first_s / 0.5)
        return second.is_met

    assert met(95, 0.6)
    assert not met(94, 0.5)
    assert not met(100, 0.61)
    assert not met(100, 0.5, "cut off")


def test_the_sweep_runs(made: Fixture, tmp_path: Path) -> None:
    arguments = (
        "--cells n12-a1-cv4 --seconds 0.1 --device-room 4 --host-room 6 --capacity-requests 20 --prompt-len 4-8 "
        "--output-len 2-4"
    )
    assert slora_sweep.main([*common(made, tmp_path), *arguments.split()]) == 0
    cells = figures(tmp_path / "out.json")["cells"]
    assert isinstance(cells, list)
    assert [cell["name"] for cell in cells] == ["n5-a1-cv4", "n12-a1-cv4"]
    few, many = cells
    assert few["overload"]["num_requests"] == many["overload"]["num_requests"] > 0
    assert few["overload"]["num_failed"] == many["moderate"]["num_failed"] == 0
    assert many["counted"]["num_loads"] > few["counted"]["num_loads"]  # six fit


# ------------------------------------------------------------------------------------------------------------ few slots


def test_ratios_of_few_slots() -> None:
    def row(first_s: float, error: str = "") -> few_slots.Row:
        return few_slots.Row("case", 6, 3, a_summary(10, first_s, error), Counters())

    collapse, tail = few_slots.judge(row(0.6), row(0.5), row(0.5))
    assert collapse.ratio == pytest.approx(1.2)
    assert collapse.is_met
    assert tail.ratio == 1.0
    assert not few_slots.judge(row(0.7), row(0.5), row(0.5))[0].is_met
    collapse, tail = few_slots.judge(row(0.6, "lost"), row(0.5), row(0.5, "lost"))
    assert collapse.ratio is tail.ratio is None
    assert not collapse.is_met


def test_few_slots_runs(made: Fixture, tmp_path: Path) -> None:
    arguments = (
        "--adapters 8 --room 4 --seconds 0.1 --requests 20 --rounds 2 --capacity-requests 20 --prompt-len 4 "
        "--output-len 4"
    )
    assert few_slots.main([*common(made, tmp_path), *arguments.split()]) == 0
    rows = figures(tmp_path / "out.json")["rows"]
    assert isinstance(rows, list)
    assert [(row["num_adapters"], row["num_slots"]) for row in rows] == [(8, 4), (8, 8), (6, 3)]
    little, all_fit, fair = rows
    assert all(row["summary"]["num_failed"] == 0 for row in rows)
    assert little["summary"]["num_requests"] == all_fit["summary"]["num_requests"]
    assert fair["summary"]["num_requests"] == 40
    assert little["counted"]["num_evictions"] > 0 == all_fit["counted"]["num_evictions"]
    assert fair["counted"]["num_evictions"] > 0


def test_room_must_be_little() -> None:
    with pytest.raises(SystemExit, match="--room fewer"):
        few_slots.main(["--adapters", "8", "--room", "8"])


# ----------------------------------------------------------------------------------------------------------- cold start


def test_states_take_turns() -> None:
    assert list(in_turn("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_only_gaps_beside_cold_requests_count() -> None:
    record = Record(Arrival(0.0, None, [5], 5), 0.0, [1.0, 1.5, 2.5, 2.75, 4.0])
    assert gaps_within(record, 1.5, 2.75) == [0.5, 1.0, 0.25]
    assert gaps_within(record, 5.0, 6.0) == []


def test_cold_starts_run(made: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "BACKGROUND_FIRST_S", 0.05)
    monkeypatch.setattr(cold_start, "LAST_ENDS_S", 0.2)
    arguments = "--adapters 4 --background 2 --rounds 3 --blocks 1 --every 0.02 --prompt-len 8"
    assert cold_start.main([*common(made, tmp_path), *arguments.split()]) == 0
    engines = figures(tmp_path / "out.json")["engines"]
    assert isinstance(engines, list)
    states = [[row["state"] for row in engine] for engine in engines]
    assert states == [["resident", "host", "source"], ["resident", "host", "disk"]]
    for row in (*engines[0], *engines[1]):
        assert (row["num_early"], row["first_token_s"] > 0, row["others_s"] > 0) == (0, True, True)


def test_a_tier_that_is_not_there_is_said_in_a_line(
    made: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cold_start.TIER_OF, "source", "tape")
    with pytest.raises(SystemExit, match="a0000 is in tier source, not in tape"):
        cold_start.main([*common(made, tmp_path), "--adapters", "5", "--prompt-len", "4"])


# ----------------------------------------------------------------------------------------------- switching and the rest


def test_switching_runs(made: Fixture, tmp_path: Path) -> None:
    arguments = "--blocks 1 --samples 3 --prompt-len 4 --output-len 1 --requests-in-flight 2"
    assert switching.main([*common(made, tmp_path), *arguments.split()]) == 0
    rows = figures(tmp_path / "out.json")["rows"]
    assert isinstance(rows, list)
    verbs = ["promote, idle", "promote, busy", "switch, idle", "switch, busy"]
    assert [row["what"] for row in rows] == ["staying", "alternating", *verbs]
    assert [row["num_samples"] for row in rows] == [8, 8, 3, 3, 3, 3]
    assert [row["target_ms"] for row in rows] == [None, 1.0, 100.0, 100.0, 50.0, 50.0]


def test_many_adapters_runs(made: Fixture, tmp_path: Path) -> None:
    arguments = (
        "--adapters 12 --requests 8 --requests-in-flight 2 --prompt-len 4 --output-len 2 --host-memory-bytes 100000"
    )
    assert many_adapters.main([*common(made, tmp_path), *arguments.split()]) == 0
    assert figures(tmp_path / "out.json")["many"]
