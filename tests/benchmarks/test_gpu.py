"""The GPU scripts without a GPU: what they count and judge, and each once in Triton's interpreter. No figures."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import adapters, check, check_pieces, engine, kernel_cases, kernels, timing
from benchmarks.gpu.adapters import scratch_folder, write_adapters
from benchmarks.gpu.attention_problems import SPLIT_CONTEXT, flash_problems
from benchmarks.gpu.check_pieces import Piece, SideBySide
from benchmarks.gpu.engine_profile import KernelTime, Profile, profile_of, short_name
from benchmarks.gpu.exact import expected_lora, poisoned_allocations, row_error, same_bits, without_ties
from benchmarks.gpu.inputs import draw_slots, make_attention, segments_of
from benchmarks.gpu.kernel_cases import TARGETS, Case, _Stacked, expert_cases, lora_case, lora_cases
from benchmarks.gpu.kernel_checks import Finding
from benchmarks.gpu.kernel_checks import check as check_problem
from benchmarks.gpu.place import FP32, LEFT_OUT, Place, Sheet, endable, exit_code, find_place
from benchmarks.gpu.problems import Problem
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, QWEN, TINY, lora_bytes
from benchmarks.gpu.timing import Ceilings, Timing
from loraplex.adapters.inspect import inspect_adapter
from loraplex.kernels.plan import LoraSegment
from loraplex.kernels.slices import SliceWeights
from loraplex.kernels.torch_ops import TorchBackend
from loraplex.metrics import EngineStats, KernelFallback
from loraplex.models.config import ModelConfig
from tests.kernels.triton.fake_flash_attention import FakeFlashAttention

CPU = torch.device("cpu")
PLACE = Place(CPU, TorchBackend(), may_capture=False)


# ------------------------------------------------------------------------------------------------------ what is counted


def test_shapes_are_those_of_the_models() -> None:
    assert LLAMA_8B.weight_numbers() == 7_504_658_432  # 8.03 billion without the embedding and the norms
    assert LLAMA_1B.weight_numbers() == pytest.approx(1.236e9, rel=1e-3)
    assert LLAMA_8B.adapter_numbers(16) == 41_943_040
    assert LLAMA_8B.kv_numbers() * 2 == 128 * 1024
    assert lora_bytes(LLAMA_8B.target("o"), 16, 2) == 2 * 16 * 8192
    assert [s.out_features for s in QWEN.target("qkv").slices] == [896, 128, 128]


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_1B, QWEN, TINY], ids=lambda shape: shape.name)
def test_the_engine_takes_their_configs(shape: object, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(shape.write(tmp_path))  # type: ignore[attr-defined]
    assert config.hidden_size == shape.hidden  # type: ignore[attr-defined]
    assert config.head_dim == shape.head_dim  # type: ignore[attr-defined]


def test_floors_are_the_larger_of_bytes_and_operations() -> None:
    ceilings = Ceilings(bandwidth=100.0, matrix_rate=1000.0)
    assert ceilings.floor_s(50, 100) == 0.5
    assert ceilings.floor_s(50, 2000) == 2.0


def test_popularities() -> None:
    rng = np.random.default_rng(0)
    assert draw_slots("distinct", 5, rng) == [0, 1, 2, 3, 4]
    assert draw_slots("identical", 3, rng) == [0, 0, 0]
    assert set(draw_slots("uniform", 64, rng)) == set(range(8))
    skewed = draw_slots("skewed", 64, rng)
    assert sorted(set(skewed)) == list(range(max(skewed) + 1))
    assert skewed.count(0) > 16
    assert segments_of([0, 0, -1, 2]) == [LoraSegment(0, 2, 0), LoraSegment(3, 4, 2)]


def test_sequences_lie_in_their_blocks() -> None:
    plan, num_blocks = make_attention([2, 1, 1], [18, 0, 5], CPU, rng=np.random.default_rng(1))
    assert num_blocks == 4
    slots = plan.kv_slot_mapping.tolist()
    tables = plan.block_tables.tolist()
    assert slots == [tables[0][1] * 16, tables[0][1] * 16 + 1, -1, tables[2][0] * 16 + 4]
    assert plan.q_indptr.tolist() == [0, 2, 3, 4]


def test_written_adapters_are_valid_and_differ(tmp_path: Path) -> None:
    requests = write_adapters(TINY, 2, 4, tmp_path)
    assert all(inspect_adapter(request.lora_path).is_honoured for request in requests)
    contents = [Path(request.lora_path, "adapter_model.safetensors").read_bytes() for request in requests]
    assert contents[0] != contents[1]


# ------------------------------------------------------------------------------------------------------- what is judged


def test_a_row_error_is_of_the_worst_row() -> None:
    expected = torch.ones(100, 4)
    out = expected.clone()
    assert row_error(out, expected) == 0.0
    out[7, 1] = 1.2
    assert row_error(out, expected) == pytest.approx(0.1)
    out[3, 0] = float("nan")
    assert row_error(out, expected) == float("inf")
    assert row_error(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0
    assert row_error(torch.ones(2, 3), torch.zeros(2, 3)) > 1


def test_allocations_are_poisoned_only_there() -> None:
    with poisoned_allocations():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_lora_formula() -> None:
    target = TINY.target("o")
    weights = SliceWeights(torch.ones(1, 64), torch.full((64, 1), 2.0), torch.full((64,), 3.0), 0.5)
    y = expected_lora(torch.zeros(3, 64), torch.ones(3, 64), [LoraSegment(1, 2, 0, 10.0)], [(weights,)], target.slices)
    assert y[1].tolist() == [10.0 * (0.5 * 64 * 2 + 3)] * 64
    assert y[[0, 2]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_without_ties_have_one_rounding_to_float8(dtype: torch.dtype) -> None:
    def roundings(x: torch.Tensor) -> list[torch.Tensor]:
        wide = x.float()
        scale = wide.abs().amax(-1, keepdim=True) / 448
        other = wide.abs().amax(-1, keepdim=True) * torch.tensor(1 / 448)
        quotients = (wide / scale, wide * (1 / scale), wide / other, wide * (1 / other))
        return [quotient.to(torch.float8_e4m3fn).float() for quotient in quotients]

    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    first, *others = roundings(x)
    assert any((first != other).any() for other in others)
    kept = without_ties(x)
    assert 0.9 < float((kept == x).float().mean()) < 1
    first, *others = roundings(kept)
    assert all(torch.equal(first, other) for other in others)


def problem(run: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
    """Twice x, by `run`."""
    x = torch.arange(6.0).view(3, 2) + 1

    def redraw() -> None:
        x[1:] += 1

    return Problem("g", "double", FP32, lambda: (run(x),), lambda: (2 * x.double(),), redraw)


def test_a_right_kernel_is_ok() -> None:
    assert check_problem(problem(lambda x: 2 * x), PLACE) == Finding("g", "double", True, "", 0.0, 1e-5)


def half_written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:, 0] = 2 * x[:, 0]
    return out


@pytest.mark.parametrize(
    ("run", "note"),
    [
        (lambda x: 2 * x + 1e-3, "wrong numbers"),
        (half_written, "wrong numbers"),
        (lambda x: 2 * x + 2e-6 * torch.rand(()), "two runs differ"),
        (lambda x: 2 * x * (1 + 1e-6 * x[1:2, :1]), "a row depends on its neighbours"),
    ],
)
def test_a_wrong_kernel_is_found(run: Callable[[torch.Tensor], torch.Tensor], note: str) -> None:
    torch.manual_seed(0)
    found = check_problem(problem(run), PLACE)
    assert found.is_ok is False
    assert note in found.note


def test_a_replay_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that goes on reading what was there when it was captured."""
    import benchmarks.gpu.kernel_checks as module

    def stale(call: Callable[[], object], change: Callable[[], None], place: Place) -> object:
        out = call()
        change()
        return out

    monkeypatch.setattr(module, "replayed", stale)
    found = check_problem(problem(lambda x: 2 * x), PLACE)
    assert found.note == "a graph's replay differs from eager"


class Falling(TorchBackend):
    """One that no kernel covers."""

    calls = 0

    def fallbacks(self) -> tuple[KernelFallback, ...]:
        return (KernelFallback("silu_mul", "none", "why", self.calls),) if self.calls else ()

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().silu_mul(gate_up)


def test_what_stock_torch_ran_has_failed() -> None:
    backend, x = Falling(), torch.randn(3, 8)
    run = Problem("g", "n", FP32, lambda: (backend.silu_mul(x),), lambda: (TorchBackend().silu_mul(x),), None, backend)
    assert check_problem(run, PLACE).note == "stock torch ran silu_mul: why"
    others = replace(run, run=run.expected)
    assert check_problem(others, PLACE).is_ok  # what an earlier check fell back to is not this one's


def test_what_stock_torch_ran_has_no_time() -> None:
    backend, x = Falling(), torch.randn(3, 8)
    case = Case("g", "n", 1.0, 1.0, lambda: [lambda: backend.silu_mul(x)], backend=backend)
    timed = kernels.time_case(case, PLACE, Ceilings(1, 1), 0.1)
    assert (timed.us, timed.error) == (None, "stock torch ran silu_mul: why")


def test_what_looks_at_the_host_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def time_calls(calls: list[str], place: Place, seconds: float, may_capture: bool) -> Timing:
        tried.append((calls[0], may_capture))
        return Timing(1e-6, 0.0, may_capture)

    monkeypatch.setattr(kernels, "time_calls", time_calls)
    peers = {"torch": lambda: ["torch"], "grouped": lambda: ["grouped"]}
    case = Case("g", "n", 1.0, 1.0, lambda: ["own"], peers, eager_peers=frozenset({"torch"}))  # type: ignore[arg-type]
    timed = kernels.time_case(case, PLACE, Ceilings(1, 1), 0.1)
    assert tried == [("own", True), ("torch", False), ("grouped", True)]
    assert timed.eager == ["torch"]


def test_stock_experts_are_declared() -> None:
    pytest.importorskip("triton")
    cases = list(expert_cases(find_place(is_interpreted=True)))
    assert [case.eager_peers for case in cases if case.peers] == [{"torch"}]
    assert not any(case.eager_peers for case in cases if not case.peers)


def test_a_capture_that_fails_leaves_the_generator_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Graph:
        def capture_begin(self, **options: object) -> None:
            done.append("begin")

        def capture_end(self) -> None:
            done.append("end")
            raise RuntimeError("the capture was invalidated")

    generator = SimpleNamespace(graphsafe_set_state=lambda state: done.append(state))
    fresh = SimpleNamespace(graphsafe_get_state=lambda: "fresh")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "initial_seed", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: fresh))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *of: done.append(of), raising=False)
    assert timing._captured([lambda: done.append("call")]) is None
    assert done == ["begin", "call", "end", "end", (0, (0, 1)), "fresh"]


def test_a_gap_in_a_kernel_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("loraplex.kernels.triton.backend")
    monkeypatch.setattr(backend.glue, "rms_norm_gap", lambda x, weight: "mut")
    out = tmp_path / "check.json"
    assert check.main(["--interpret", "--only", "glue", "--match", "rms_norm", "--jobs", "1", "--json", str(out)]) == 1
    assert not any(one["is_ok"] for one in figures(out)["findings"])


@pytest.mark.parametrize("arguments", [["--only", "glue", "--match", "nonsense"], ["--only", "sanitizer"]])
def test_a_check_of_nothing_is_no_success(arguments: list[str]) -> None:
    pytest.importorskip("triton")
    assert check.main(["--interpret", *arguments]) == 1


def test_what_the_time_is_too_short_for_is_named(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    short = ["--interpret", "--budget", "1e-9", "--json"]
    assert check.main(["--only", "glue,engine", "--jobs", "1", *short, str(tmp_path / "check.json")]) == 1
    found = figures(tmp_path / "check.json")["findings"]
    assert [one["name"] for one in found][-2:] == ["rms_norm of 6x8 heads of 128", "all"]
    assert {one["note"] for one in found} == {LEFT_OUT}
    assert kernels.main([*short, str(tmp_path / "kernels.json")]) == 1
    assert {one["error"] for one in figures(tmp_path / "kernels.json")["timed"]} == {LEFT_OUT}
    assert engine.main([*short, str(tmp_path / "engine.json")]) == 1
    rows = figures(tmp_path / "engine.json")["rows"]
    assert {row["note"] for row in rows} == {LEFT_OUT}
    assert {row["variant"] for row in rows} == set(engine.VARIANTS)
    assert "decode, 2 on 1 adapter" in [row["load"] for row in rows]


def test_the_split_context_is_split() -> None:
    kernel = pytest.importorskip("loraplex.kernels.triton.attention")
    assert kernel._num_splits(SPLIT_CONTEXT, None, 64) > 1


def test_same_bits_tells_zeros_apart() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_a_check_that_raises_is_a_finding() -> None:
    def run() -> Finding:
        raise RuntimeError("does not compile\nat line 3")

    assert check._guarded("g", "n", run) == Finding("g", "n", False, "RuntimeError: does not compile")


def test_the_sanitizer_is_left_out_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    place = replace(PLACE, device=torch.device("cuda"))
    found = list(check.findings(place, ["sanitizer"], "", True, math.inf))
    assert [one.is_ok for one in found] == [None] * 6
    assert [one.name for one in found[3:5]] == ["memcheck of glue", "racecheck of lora, decode"]
    assert {one.note for one in found} == {"left out: compute-sanitizer is not on the PATH"}


def test_the_sanitizer_has_a_limit_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\nsleep 600")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(check, "SANITIZER_LIMIT_S", 0.5)
    monkeypatch.setattr(check, "python", lambda *arguments: ["true"])
    place = replace(PLACE, device=torch.device("cuda"))
    found = check.sanitized(place, check.SANITIZED[0], math.inf)
    assert (found.is_ok, found.note) == (None, "left out: not done in 0 s")
    tool.write_text("#!/bin/sh\necho ===== all is well")
    assert check.sanitized(place, check.SANITIZED[0], math.inf).is_ok
    tool.write_text("#!/bin/sh\necho ===== Invalid read\nexit 99")
    found = check.sanitized(place, check.SANITIZED[0], math.inf)
    assert (found.is_ok, found.note) == (False, "===== Invalid read")


def test_without_a_gpu_it_is_said_in_a_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no CUDA device here"):
        kernels.main([])


def test_targets_are_of_the_large_shape() -> None:
    row = engine.Row("Llama-3-8B", "default", "decode")
    bench = engine.Bench(None, PLACE, LLAMA_8B, "default", [], Ceilings(1, 1), engine.ON_A_GPU, 2, 0.0)
    assert bench._judged(row, 0.85, 0.85).verdict == "ok"
    assert bench._judged(row, 0.84, 0.85).verdict == "MISSED"
    assert bench._judged(row, 0.06, 0.05, is_at_least=False).verdict == "MISSED"
    assert replace(bench, shape=LLAMA_1B)._judged(row, 0.1, 0.85).verdict == ""
    assert replace(bench, variant="eager")._judged(row, 0.1, 0.85).verdict == ""


def test_loads_with_a_target_come_first() -> None:
    place = replace(PLACE, device=torch.device("cuda"))
    loads = [*engine.loads_of("default", place, 32)]
    assert loads[:4] == [f"decode, 32 {on}" for on in ("base", "on 1 adapter", "on 32 adapters", "on 8 adapters")]
    assert loads[4:8] == ["decode, 1 base", "decode, 8 base", "decode, 64 base", "cold adapters beside 31"]
    assert loads[8:11] == ["profile, 32 base", "profile, 32 on 1 adapter", "profile, 32 on 32 adapters"]
    assert loads[14] == "decode, 64 on 32 adapters"
    assert [*engine.loads_of("eager", place, 32)][:4] == [*loads[:3], "decode, 64 base"]


def test_a_profile_is_of_one_step() -> None:
    spans = [
        ("void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)", 0.0, 10.0),
        ("void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)", 20.0, 30.0),
        ("shrink_kernel", 25.0, 65.0),
        ("shrink_kernel", 26.0, 27.0),
    ]
    found = profile_of(spans, 2, 1e-4)
    assert (found.wall_us, found.busy_us, found.num_launched) == (50.0, 27.5, 2.0)
    assert [(one.name, one.us, one.count) for one in found.kernels] == [
        ("shrink_kernel", 20.5, 1.0),
        ("elementwise_kernel(CUDAFunctor_add)", 10.0, 1.0),
    ]
    assert Profile.read(json.loads(json.dumps(asdict(found)))) == found
    many = replace(found, kernels=[KernelTime(f"k{i}", 1.0, 2.0) for i in range(20)])
    assert len(many.lines()) == 16
    assert many.lines()[-1].split() == ["5.0", "us", "10.0", "x", "5", "others"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("void (anonymous namespace)::fill_kernel<int>(int*)", "fill_kernel"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "),
    ],
)
def test_names_of_kernels_are_short(name: str, short: str) -> None:
    assert short_name(name) == short.strip()


def test_loads_that_were_measured_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "engine.json"
    arguments = ["--interpret", "--lora-backend", "torch", "--variants", "default", "--json", str(out), "--resume"]
    assert engine.main(arguments) == 0
    first = json.loads(out.read_text())
    with monkeypatch.context() as patched:
        patched.setattr(engine, "LLM", interrupted)
        assert engine.main(arguments) == 0
        assert json.loads(out.read_text())["rows"] == first["rows"]
        first["rows"][2]["note"] = LEFT_OUT
        first["rows"][1]["tokens_per_s"] = 1e-3
        out.write_text(json.dumps(first))
        assert engine.main(arguments) == 130
        assert len(json.loads(out.read_text())["rows"]) == len(first["rows"]) - 1
    assert engine.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["load"] for row in rows] == [row["load"] for row in first["rows"]]
    assert rows[3:] == first["rows"][3:]
    assert rows[2]["base_ratio"] > 1e3
    first["rows"][5]["note"] = LEFT_OUT
    out.write_text(json.dumps({**first, "adapters": 4}))
    monkeypatch.setattr(engine, "LLM", interrupted)
    assert engine.main(arguments) == 130
    assert json.loads(out.read_text())["rows"] == []


def test_eager_steps_and_fallbacks_fail_a_row() -> None:
    row, before = (
        engine.Row("m", "default", "decode", note="n"),
        EngineStats(graph_steps={"lora": 5}, eager_steps={"prefill": 1}),
    )
    fine = EngineStats(graph_steps={"lora": 8, "base": 1}, eager_steps={"prefill": 3})
    assert engine.ran(row, before, fine, True) == replace(row, replayed=1.0)
    mixed = replace(fine, eager_steps={"prefill": 3, "not_captured": 4})
    found = engine.ran(row, before, mixed, True)
    assert (found.replayed, found.eager) == (0.5, {"not_captured": 4})
    assert found.note == "FAILED: eager decode steps: 4 not_captured; n"
    assert "no step was replayed" in engine.ran(row, before, before, True).note
    assert engine.ran(row, before, before, False) == row
    fallen = engine.ran(row, before, replace(fine, kernel_fallbacks={"rms_norm: mut": 2}), False)
    assert fallen.note == "FAILED: rms_norm: mut: 2 calls by stock torch; n"


def test_kernels_are_judged() -> None:
    much, some, prefill = TARGETS
    ceilings = Ceilings(bandwidth=1e12, matrix_rate=1e12)
    one = kernels.Timed("lora decode", "n", 10.0, 0.0, 8.1e6, 6.1e6, 8.1, {"bmm": 11.0, "grouped": 12.0}, target=much)
    assert kernels.verdicts(one, ceilings) == {much: True, kernels.FASTER: True}
    slow = replace(one, us=11.5)
    assert kernels.verdicts(slow, ceilings) == {much: False, kernels.FASTER: False}
    assert kernels.verdicts(replace(one, target=prefill), ceilings)[prefill]
    unknown = kernels.Timed("lora decode", "n", None, 0.0, 8.1e6, 6.1e6, 8.1, {"bmm": None}, "left out", some)
    assert kernels.verdicts(unknown, ceilings) == {some: None, kernels.FASTER: None}
    assert [line.rpartition("cases")[0] or line for line in kernels.judged([one, slow, unknown], ceilings)] == [
        f"target: {much}, 80 %: MISSED in 1 of 2 ",
        f"target: {some}, 50 %: not measured",
        f"target: {prefill}, 60 %: not measured",
        "target: lora, faster than bmm and grouped: MISSED in 1 of 3 ",
    ]
    assert kernels.cells(slow, ceilings, True)[-1] == "MISSED, SLOWER"
    assert kernels.cells(slow, ceilings, False)[-1] == ""


def test_which_cases_have_a_target() -> None:
    much, some, prefill = TARGETS
    square = LLAMA_8B.target("o")

    def target(group: str, linear: object, rank: int, rows: int) -> str:
        place = replace(PLACE, device=torch.device("meta"))  # sizes alone
        return lora_case(place, group, linear, rank, list(range(rows)), "").target  # type: ignore[arg-type]

    assert target("lora decode", LLAMA_8B.target("gate_up"), 64, 64) == much
    assert target("lora decode", square, 16, 32) == some
    assert target("lora decode", square, 16, 31) == ""
    assert [target("lora prefill", square, rank, 3) for rank in (32, 64)] == ["", prefill]


def test_the_grid_of_lora_is_small_and_targets_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    place = find_place(is_interpreted=True)
    monkeypatch.setattr(Place, "is_interpreted", False)
    monkeypatch.setattr(kernel_cases, "copies_for", lambda *of: 1)
    cases = list(lora_cases(place))
    has_target = [bool(case.target) for case in cases]
    assert has_target == sorted(has_target, reverse=True)
    assert {case.target for case in cases} == {*TARGETS, ""}
    assert len({(case.group, case.name) for case in cases}) == len(cases) < 70
    assert sum("prefill" in case.group for case in cases) == 12
    assert sum("int8" in case.group for case in cases) == 8


def test_grouped_products_are_those_of_bmm(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = _Stacked(PLACE, TINY.target("qkv"), 8, [0, 0, 1, 2], 1)
    torch.manual_seed(0)
    x, y = stacked._rows()
    weights = list(stacked._weights())
    monkeypatch.setattr(stacked, "_weights", lambda: iter(weights))
    results = []
    for build in (stacked.bmm, stacked.grouped):
        out = y.clone()
        monkeypatch.setattr(stacked, "_rows", lambda out=out: (x, out))
        (call,) = build()
        call()
        results.append(out)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_sheet_as_markdown() -> None:
    sheet = Sheet(("a", "b"), [("x", "1")], num_texts=1)
    assert sheet.markdown() == "| a | b |\n| --- | ---: |\n| x | 1 |"


# ------------------------------------------------------------------------------------------------------------ each once


def figures(path: Path) -> dict[str, list[dict[str, object]]]:
    return dict(json.loads(path.read_text()))


def test_check_runs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "check.json"
    arguments = [
        "--interpret",
        "--only",
        "lora,attention,glue,linear,sampler",
        "--match",
        "fp32",
        "--jobs",
        "1",
        "--json",
        str(out),
    ]
    assert check.main(arguments) == 0
    found = figures(out)["findings"]
    assert {one["group"] for one in found} >= {"lora", "attention", "glue", "sampler"}
    assert all(one["is_ok"] for one in found)


def test_groups_run_side_by_side(tmp_path: Path) -> None:
    """And again, where all is known: nothing runs."""
    pytest.importorskip("triton")
    out = tmp_path / "check.json"
    arguments = ["--interpret", "--only", "glue,sampler", "--match", "silu", "--jobs", "2", "--json", str(out)]
    assert check.main(arguments) == 0
    found = figures(out)
    names = ["silu_mul 3x64 fp32", "silu_mul 3x64 fp16", "20 rows of 300 as on the CPU"]
    assert [one["name"] for one in found["findings"]] == names
    assert found["whole"] == ["glue", "sampler"]
    assert check.main([*arguments, "--resume"]) == 0
    again = json.loads(out.read_text())
    assert again["findings"] == found["findings"]
    assert again["seconds"] < 2


def test_pieces_are_dealt_out_and_a_process_that_falls_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_pieces, "KEEP_EVERY_S", 0.1)
    said = (
        "import json, os, sys, time\n"
        "path, number = sys.argv[1], int(sys.argv[2])\n"
        "one = {'group': 'lora', 'name': f'c{number}', 'is_ok': True}\n"
        "partial = path + '.w'\n"
        "with open(partial, 'w') as file:\n"
        "    json.dump({'findings': [one], 'whole': ['lora']}, file)\n"
        "os.replace(partial, path)\n"
        "print('fell'); time.sleep(600 * (number == 2)); sys.exit(7 * (number == 1))\n"
    )
    pieces = [Piece("lora", i, 3, tuple(f"c{j}" for j in range(i, 9, 3))) for i in range(3)]

    def command(piece: Piece, path: Path, budget_s: float) -> list[str]:
        return [sys.executable, "-c", said, str(path), str(piece.number)]

    side = SideBySide(pieces, {}, 2, tmp_path, time.monotonic() + 600, command, lambda piece: {})
    for _ in side.run():
        if len(side.findings("lora")) >= 5:
            break
    side.end()
    found = {one.name: (one.is_ok, one.note) for one in side.findings("lora")}
    assert [name for name in found if name in ("c0", "c1", "c2")] == ["c0", "c1", "c2"]
    assert found["c1"] == (True, "")
    assert found["c4"] == (False, "its process ended with exit code 7: fell")
    assert found["c7"] == (None, "left out: its process had ended")
    assert str(found["c8"][1]).startswith("left out: not")
    assert side.whole == ["lora"]


def test_what_was_right_is_kept_and_the_rest_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "check.json"
    arguments = ["--interpret", "--only", "glue", "--match", "fp32", "--jobs", "1", "--json", str(out), "--resume"]
    assert check.main(arguments) == 0
    written = json.loads(out.read_text())
    marked = [{**one, "note": "kept"} for one in written["findings"]]
    marked[1] |= {"is_ok": False}
    written["machine"]["commit"] = "another"
    out.write_text(json.dumps({**written, "findings": marked[:2]}))
    assert check.main(arguments) == 0
    assert [one["note"] for one in figures(out)["findings"]] == ["kept", "", ""]
    assert str(figures(out)["title"]).endswith("some of it was measured before, at commit another")
    written["machine"]["torch"] = "1.0"
    out.write_text(json.dumps({**written, "findings": marked}))
    assert check.main(arguments) == 0
    assert [one["note"] for one in figures(out)["findings"]] == ["", "", ""]
    assert "is of torch 1.0: all of it is run" in capsys.readouterr().out


def test_cases_that_were_timed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "kernels.json"
    arguments = ["--interpret", "--only", "glue", "--json", str(out), "--resume"]
    ran: list[str] = []

    def time_case(case: Case, place: Place, ceilings: Ceilings, budget_s: float) -> kernels.Timed:
        ran.append(case.name)
        error = "it fell" if len(ran) == 2 else ""
        us = None if error else 1.0
        return kernels.Timed(case.group, case.name, us, 0.0, 1.0, 1.0, 1.0, dict.fromkeys(case.peers, 2.0), error)

    monkeypatch.setattr(kernels, "time_case", time_case)
    assert kernels.main(arguments) == 1
    monkeypatch.setattr(kernels, "measure_ceilings", interrupted)
    first = json.loads(out.read_text())
    assert kernels.main(arguments) == 0
    assert len(ran) == 4
    assert ran[3] == ran[1]
    second = json.loads(out.read_text())
    assert [one["us"] for one in second["timed"]] == [1.0] * 3
    assert second["ceilings"] == first["ceilings"]
    monkeypatch.setattr(kernels, "time_case", interrupted)
    assert kernels.main([*arguments, "--only", "lora"]) == 130
    assert json.loads(out.read_text())["timed"] == second["timed"]
    monkeypatch.setattr(kernels, "time_case", time_case)
    first["timed"][0]["peers"] = {}
    out.write_text(json.dumps(first))
    assert kernels.main(arguments) == 0
    assert ran[4:] == ran[:2]


def test_resumed_parts_find_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.dumps({"title": "t", "table": {"headings": ["a"], "rows": []}, "seconds": 1.0})
    for name in ("check.json", "check.log", "gpu.md"):
        (tmp_path / name).write_text(whole)

    def run_until(command: list[str], log: object, limit_s: float) -> object:
        return interrupted() if "--resume" in command else ""

    monkeypatch.setattr(driver, "run_until", run_until)
    assert driver.main(["--out", str(tmp_path), "--only", "check", "--resume", "--interpret"]) == 130
    assert (tmp_path / "check.json").read_text() == whole
    assert (tmp_path / "check.log").read_text() == ""
    (tmp_path / "check.json").write_text(whole[:9])
    assert driver.main(["--out", str(tmp_path), "--only", "check", "--resume", "--interpret"]) == 130
    assert not (tmp_path / "check.json").exists()


def test_names_of_checks_are_their_own() -> None:
    pytest.importorskip("triton")
    place = find_place(is_interpreted=True)
    for group in ("lora", "attention", "linear", "experts"):
        names = check.names_of(group, "", place, is_small=False)
        assert names is not None
        assert len(set(names)) == len(names)


@pytest.mark.slow
def test_experts_are_checked(tmp_path: Path) -> None:
    """All of it takes the interpreter minutes."""
    pytest.importorskip("triton")
    out = tmp_path / "check.json"
    arguments = ["--interpret", "--only", "experts", "--match", "fp32 int8", "--json", str(out)]
    assert check.main(arguments) == 0
    assert [(one["group"], one["is_ok"]) for one in figures(out)["findings"]] == [("experts", True)]


@pytest.mark.slow
def test_kernels_run(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "kernels.json"
    assert kernels.main(["--interpret", "--json", str(out)]) == 0
    timed = figures(out)["timed"]
    assert all(one["us"] is not None for one in timed)
    assert timed[0]["peers"]["bmm"] > 0  # type: ignore[index]
    assert timed[0]["peers"]["grouped"] > 0  # type: ignore[index]
    assert {one["group"] for one in timed if one["missing"]} == {"attention prefill"}
    table = json.loads(out.read_text())["table"]
    column = table["headings"].index("flash_attn us")
    assert {row[column] for row in table["rows"] if row[0] == "attention prefill"} == {"not installed"}


@pytest.mark.slow
def test_flash_attention_is_checked_and_timed_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, with a fake; its trial finds a wrong one. It takes no float32, in which the interpreter
    times."""
    pytest.importorskip("triton")
    place = find_place(is_interpreted=True)
    assert not list(flash_problems(place, ((4, 2, 64),)))
    flash = FakeFlashAttention().install(monkeypatch)
    problems = list(flash_problems(place, ((4, 2, 64),)))
    assert len(problems) == 2
    assert all(planned.name.endswith("fp16, flash_attn") for planned in problems)
    for planned in problems:
        found = check_problem(planned.build(), place)
        assert found.is_ok, found
        assert len(flash.calls) > 0
    out = tmp_path / "kernels.json"
    assert kernels.main(["--interpret", "--only", "attention", "--json", str(out)]) == 0
    (prefill,) = [one for one in figures(out)["timed"] if one["group"] == "attention prefill"]
    assert prefill["missing"] == {}
    assert prefill["peers"]["flash_attn"] is None  # type: ignore[index]
    flash.factor = 1.5
    (found, _) = check.findings(place, ["attention"], "flash_attn", True, math.inf)
    assert found.is_ok is False
    assert "its trial gave other numbers" in found.note


def test_the_engine_runs(tmp_path: Path) -> None:
    """With stock torch: a whole engine takes minutes in the interpreter."""
    pytest.importorskip("triton")
    out = tmp_path / "engine.json"
    assert engine.main(["--interpret", "--lora-backend", "torch", "--variants", "default", "--json", str(out)]) == 0
    rows = figures(out)["rows"]
    loads = [row["load"] for row in rows]
    assert loads[:3] == ["start", "decode, 2 base", "decode, 2 on 1 adapter"]
    assert rows[2]["base_ratio"] is not None
    assert any("cold adapters" in str(load) for load in loads)
    written = json.loads(out.read_text())
    assert written["settings"]["default"]["lora_backend"] == "torch"
    assert written["sizes"]["rounds"] == 1
    assert written["machine"]["torch"] == torch.__version__


def test_one_command_leaves_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(
        name: str, budget_s: float, limit_s: float, folder: Path, is_interpreted: bool, is_resumed: bool
    ) -> str:
        assert budget_s < limit_s
        assert not is_resumed
        (folder / f"{name}.log").write_text("began\nfell")
        if name == "engine":
            return "exit code 1"
        rows = [["g", "n r16 x", "FAILED" if name == "check" else "1"]]
        table = {"headings": ["a", "b", "c"], "rows": rows, "num_texts": 2}
        (folder / f"{name}.json").write_text(json.dumps({"title": f"of {name}", "table": table, "seconds": 1.0}))
        return ""

    monkeypatch.setattr(driver, "run_part", run_part)
    assert driver.main(["--out", str(tmp_path), "--budget", "100"]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "## engine: exit code 1" in page
    assert "| g | n r16 x | 1 |" in page
    shown = capsys.readouterr().out
    assert "1 checks, 1 failed, 0 left out" in shown
    assert shown.endswith("== engine: exit code 1\nbegan\nfell\n")


# ----------------------------------------------------------------------------------------------------------- the ending


def interrupted(*arguments: object, **options: object) -> object:
    raise KeyboardInterrupt


def test_ctrl_c_leaves_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    found = iter([check.Finding("glue", "one", True)])

    def one_and_no_more(*arguments: object) -> Finding:
        return next(found, None) or interrupted()  # type: ignore[return-value]

    monkeypatch.setattr(check, "check", one_and_no_more)
    assert check.main(["--interpret", "--only", "glue", "--json", str(tmp_path / "check.json")]) == 130
    assert [one["name"] for one in figures(tmp_path / "check.json")["findings"]] == ["one"]
    monkeypatch.setattr(kernels, "time_case", interrupted)
    assert kernels.main(["--interpret", "--json", str(tmp_path / "kernels.json")]) == 130
    assert figures(tmp_path / "kernels.json")["timed"] == []
    monkeypatch.setattr(engine, "bench", interrupted)
    assert engine.main(["--interpret", "--json", str(tmp_path / "engine.json")]) == 130
    assert exit_code(interrupted) == 130  # type: ignore[arg-type]


def test_sigterm_removes_the_adapters() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with endable() as ending, scratch_folder() as folder:
        assert folder.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ending.code == 143
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_is_left_of_a_part_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "GRACE_S", 0.1)
    monkeypatch.setattr(adapters, "SHARED_MEMORY", tmp_path)
    stubborn = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path({str(tmp_path)!r}, f'loraplex-gpu-{{os.getpid()}}-x').mkdir(); time.sleep(600)"
    )
    with (tmp_path / "log").open("w") as log:
        assert driver.run_until([sys.executable, "-c", stubborn], log, 2.0) == "ended after 2 s"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_an_earlier_run_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("check.json", "check.log", "kernels.json", "gpu.md"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(driver, "run_part", interrupted)
    assert driver.main(["--out", str(tmp_path), "--only", "check"]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.md", "kernels.json"]
    assert "## check: not whole: it was ended" in (tmp_path / "gpu.md").read_text()
