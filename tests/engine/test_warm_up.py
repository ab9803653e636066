"""The steps before the first request: after them, serving launches no kernel that was not launched before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraplex import LoRAConfig
from loraplex.engine import build as build_module
from loraplex.engine.engine import EngineCore
from loraplex.engine.warm_up import Rehearsal, rehearsals, warm_up
from loraplex.kernels.triton.backend import TritonBackend
from loraplex.kernels.triton.launch import TritonLauncher
from tests.engine.driver import Driver
from tests.engine.rules_bench import MAX_MODEL_LEN, Asked, Bench, loaded

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 1 << 20,
}


class VariantLauncher(TritonLauncher):
    """Writes down what Triton would compile: kernels with their constants and the dtypes of their arguments."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.variants: set[tuple[Any, ...]] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        dtypes = tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
        self.variants.add((kernel.fn.__name__, dtypes, tuple(sorted(constants.items(), key=lambda item: item[0]))))
        super().launch(kernel, grid, *args, **constants)


def steps_of(engine: EngineCore, max_tokens: int, max_num_seqs: int) -> list[Rehearsal]:
    return list(rehearsals(max_tokens, max_num_seqs, engine.info.max_model_len, num_slots=2))


@pytest.mark.interpreter
def test_after_it_no_kernel_is_new(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = VariantLauncher()
    monkeypatch.setattr(build_module, "get_backend", lambda *_: TritonBackend(CPU, launcher))
    driver = Driver(bench.base, LoRAConfig(), **SETTINGS)
    core = driver.engine
    warm_up(core._runner, core._blocks, steps_of(core, 32, 4))
    known = launcher.variants.copy()
    assert any(name == "keep_nucleus_kernel" for name, *_ in known)
    loaded(driver, bench)
    asked = [Asked(driver, bench, name, which) for which, name in ((0, "one"), (0, None), (1, "two"))]
    driver.finish()
    for each in asked:
        each.check()
    new = launcher.variants - known
    assert not new, sorted(name for name, *_ in new)


def test_it_leaves_nothing_behind(bench: Bench) -> None:
    driver = Driver(bench.base, LoRAConfig(), **SETTINGS)
    core, told = driver.engine, []
    free = core._blocks.num_free_blocks
    steps = steps_of(core, 32, 4)
    warm_up(core._runner, core._blocks, steps, lambda done, total: told.append((done, total)))
    assert told == [(done, len(steps)) for done in range(1, len(steps) + 1)]
    assert core._blocks.num_free_blocks == free
    core.check_integrity()
    loaded(driver, bench)
    asked = Asked(driver, bench, "one")
    driver.finish()
    asked.check()


def test_steps_that_do_not_fit_in_the_kv_cache_are_left_out(bench: Bench) -> None:
    driver = Driver(bench.base, LoRAConfig(), **SETTINGS)
    core = driver.engine
    free = core._blocks.num_free_blocks
    warm_up(core._runner, core._blocks, [Rehearsal(((0, 10**6),)), Rehearsal(((0, 4), (0, 10**6)))])
    assert core._blocks.num_free_blocks == free


@pytest.mark.parametrize(
    ("max_tokens", "max_num_seqs", "max_context"), [(1, 1, 2), (2, 2, 2), (48, 7, 20), (2048, 64, 8192)]
)
def test_no_step_is_larger_than_the_engine_allows(max_tokens: int, max_num_seqs: int, max_context: int) -> None:
    steps = list(rehearsals(max_tokens, max_num_seqs, max_context, num_slots=3))
    assert {step.num_slots for step in steps} == {0, 3}
    for step in steps:
        assert sum(end - start for start, end in step.ranges) <= max_tokens
        assert all(0 <= start < end <= max_context for start, end in step.ranges)
    assert max(sum(end - start for start, end in step.ranges) for step in steps) == max_tokens
    assert not any(step.num_slots for step in rehearsals(max_tokens, max_num_seqs, max_context, num_slots=0))
