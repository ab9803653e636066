"""Decode steps as graphs, captured and replayed on a device that is not there (graph_tape.py)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from loraplex import LoRAConfig
from loraplex.config import EngineConfig
from loraplex.engine import build as build_module
from loraplex.engine import decode_graphs
from loraplex.engine.build import build_engine
from loraplex.engine.decode_graphs import DecodeGraphs, _Key
from loraplex.engine.step_buffers import StagedBuffers
from loraplex.errors import EngineError, RequestAbortedError
from loraplex.kernels.torch_ops import TorchBackend
from tests.engine.driver import Driver
from tests.engine.graph_tape import MaskedBackend, TapeDevice, TapeGraph
from tests.engine.rules_bench import MAX_MODEL_LEN, NAMES, NUM_TOKENS, PROMPT_LENGTH, Asked, Bench, loaded
from tests.fixtures import TARGET_MODULES, GreedyCase, ModelZoo

MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="module")
def rank_64(zoo: ModelZoo, bench: Bench) -> tuple[Path, GreedyCase]:
    """An adapter of a larger rank than those of the bench, and what it says to a prompt."""
    config = LoraConfig(r=64, lora_alpha=32, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    path = zoo.adapter(bench.base, config, seed=50)
    return path, zoo.fit_case(bench.base, path, length=PROMPT_LENGTH)


@pytest.fixture
def make(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeDriver]:
    """Engines with graphs on a tape; each replay is compared with the same step run kernel by kernel."""
    drivers: list[Driver] = []

    def make(
        device: TapeDevice | None = None,
        backend: TorchBackend | None = None,
        is_lora_on: bool = True,
        lora: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Driver:
        device = device or TapeDevice()
        monkeypatch.setattr(build_module, "get_backend", lambda *_: backend or MaskedBackend())
        monkeypatch.setattr(decode_graphs, "graph_device_for", lambda *_: device)
        settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 6, "kv_cache_memory_bytes": 1 << 20, **settings}
        driver = Driver(bench.base, LoRAConfig(**{"max_loras": 8, **(lora or {})}), is_lora_on=is_lora_on, **settings)
        drivers.append(driver)
        device.poisoned += staged(driver).host_blocks
        return loaded(driver, bench) if is_lora_on else driver

    yield make
    for driver in drivers:
        driver.check_idle()
        driver.close()


def staged(driver: Driver) -> StagedBuffers:
    buffers = driver.engine._runner._builder._buffers
    assert isinstance(buffers, StagedBuffers)
    return buffers


def graphs_of(driver: Driver) -> DecodeGraphs:
    assert driver.engine.graphs is not None
    return driver.engine.graphs


class TestCapture:
    def test_the_largest_first_with_adapters_and_without_and_progress_is_told(
        self, bench: Bench, make: MakeDriver
    ) -> None:
        device = TapeDevice()
        driver = make(device)
        assert device.log == ["warm-up", "capture"] * 8  # 6, 4, 2, 1
        told: list[tuple[str, int, int]] = []
        build_engine(
            EngineConfig(model=str(bench.base), max_model_len=32, max_num_seqs=2, kv_cache_memory_bytes=1 << 20),
            lambda *step: told.append(step),
        ).close()
        assert [step for step in told if step[0] == "graphs"] == [("graphs", done, 4) for done in (1, 2, 3, 4)]
        assert [key.size for key in graphs_of(driver)._graphs] == [6, 6, 4, 4, 2, 2, 1, 1]

    def test_an_engine_without_lora_has_half_as_many(self, make: MakeDriver) -> None:
        assert graphs_of(make(is_lora_on=False)).num_graphs == 4

    def test_kernels_of_the_host_are_not_captured(
        self, make: MakeDriver, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Stock torch reads lengths on the host: there are none in a capture."""
        with caplog.at_level(logging.WARNING, logger="loraplex.engine.decode_graphs"):
            driver = make(backend=TorchBackend())
        assert graphs_of(driver).num_graphs == 0
        assert "no CUDA graph for 6 rows, their steps run kernel by kernel" in caplog.text
        asked = Asked(driver, bench, "one")
        driver.finish()
        asked.check()

    @pytest.mark.parametrize("fails_at", [0, 5])
    def test_out_of_memory_leaves_an_engine_without_graphs(
        self, make: MakeDriver, bench: Bench, fails_at: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        device = TapeDevice(fails_at)
        driver = make(device)
        assert device.log[-1] == "release"
        assert "OutOfMemoryError: CUDA out of memory" in caplog.text
        asked = Asked(driver, bench, "one")
        driver.finish()
        asked.check()
        assert driver.stats.graph_steps == {}
        assert driver.stats.eager_steps == {"prefill": 1, "not_captured": 15}

    def test_what_cuda_refuses_in_a_capture_leaves_an_engine_without_graphs(
        self, make: MakeDriver, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Other CUDA errors mean that the device is lost; this one does not."""
        refusal = "CUDA error: operation not permitted when stream is capturing"
        driver = make(TapeDevice(0, torch.AcceleratorError(refusal)))
        assert f"AcceleratorError: {refusal}" in caplog.text
        asked = Asked(driver, bench, "one")
        driver.finish()
        asked.check()

    def test_without_cuda_or_with_enforce_eager_there_are_none(self) -> None:
        def device(name: str, backend: TorchBackend, **settings: Any) -> object:
            config = EngineConfig(model="m", **settings)
            return decode_graphs.graph_device_for(config, backend, torch.device(name))

        assert device("cpu", MaskedBackend()) is None
        assert device("cuda", MaskedBackend(), enforce_eager=True) is None
        assert device("cuda", TorchBackend()) is None


class TestReplay:
    @pytest.mark.parametrize("names", [(None,), (None, None, None), ("one",), ("two", None, "one", "two", None)])
    def test_tokens_are_the_models(self, make: MakeDriver, bench: Bench, names: tuple[str | None, ...]) -> None:
        """What transformers + peft say, through graphs padded from 3 to 4 and from 5 to 6."""
        driver = make()
        asked = [Asked(driver, bench, name, which % 2) for which, name in enumerate(names)]
        with graphs_of(driver).compared() as counts:
            driver.finish()
        for each in asked:
            each.check()
        kind = "base" if set(names) == {None} else "lora"
        assert driver.stats.graph_steps == {kind: 15}
        assert driver.stats.eager_steps == {"prefill": 1}
        assert counts == {"equal": 15}

    @pytest.mark.parametrize("beside", [None, "one"])
    def test_an_alora_that_nothing_activates_decodes_as_the_base(
        self, make: MakeDriver, bench: Bench, zoo: ModelZoo, beside: str | None
    ) -> None:
        config = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[5, 6, 7], task_type="CAUSAL_LM")
        driver = make()
        driver.registry.load("activated", str(zoo.adapter(bench.base, config)))
        asked, case = Asked(driver, bench, beside), bench.cases[None][0]
        request_id = driver.submit(case.prompt_token_ids, "activated", max_tokens=NUM_TOKENS)
        with graphs_of(driver).compared() as counts:
            driver.finish()
        asked.check()
        assert driver.tokens(request_id) == case.output_token_ids[:NUM_TOKENS]
        kind = "base" if beside is None else "lora"
        assert driver.stats.graph_steps == {kind: 15}
        assert counts == {"equal": 15}
        graphs_of(driver)._graphs.pop(_Key(1, has_adapters=False))
        driver.submit(case.prompt_token_ids, "activated", max_tokens=NUM_TOKENS)
        driver.finish()
        assert driver.stats.graph_steps == {kind: 15}
        assert driver.stats.eager_steps == {"prefill": 2, "not_captured": 15}

    def test_adapters_that_come_go_and_move_are_not_captured_again(self, make: MakeDriver, bench: Bench) -> None:
        device = TapeDevice()
        driver = make(device, max_num_seqs=2)
        with graphs_of(driver).compared() as counts:
            Asked(driver, bench, "one")
            driver.finish()  # graphs of one row are made for rank 8 now
            num_captures = device.log.count("capture")
            addresses = set()
            for name in ("one", "two", "one", "three"):
                asked = Asked(driver, bench, name)
                driver.step(3)
                addresses.add(int(driver.engine.adapters.table.a_addr[0].max()))
                driver.finish()
                asked.check()
                driver.registry.evict(name)
        assert device.log.count("capture") == num_captures
        assert len(addresses) > 1
        assert counts["different"] == 0
        assert counts["equal"] == 5 * 15

    def test_a_larger_rank_captures_again_one_size_at_a_time(
        self, make: MakeDriver, bench: Bench, rank_64: tuple[Path, GreedyCase]
    ) -> None:
        device = TapeDevice()
        driver = make(device, max_num_seqs=2)
        path, case = rank_64
        driver.registry.load("large", str(path))
        small = Asked(driver, bench, "one")
        driver.finish()
        assert device.log.count("capture") == 4 + 1  # of 1 row with adapters, for rank 8
        with graphs_of(driver).compared() as counts:
            large = driver.submit(case.prompt_token_ids, "large", max_tokens=16)
            driver.finish()
            base = Asked(driver, bench, None)
            driver.finish()
        assert device.log.count("capture") == 6
        small.check()
        base.check()
        assert driver.tokens(large) == case.output_token_ids[:16]
        assert counts == {"equal": 30}

    def test_the_first_gain_captures_again_one_size_at_a_time(self, make: MakeDriver, bench: Bench) -> None:
        """Of graphs with adapters: the first gain of outputs, and the first of inputs."""
        device = TapeDevice()
        driver = make(device, max_num_seqs=2)
        table = driver.engine.adapters.table

        def captures(name: str | None) -> int:
            before = device.log.count("capture")
            asked = Asked(driver, bench, name)
            driver.finish()
            asked.check()
            return device.log.count("capture") - before

        captures("one")  # for rank 8
        assert captures("one") == 0
        for gains in ((True, False), (False, True)):
            table.expect(0, (), *gains)
            assert captures(None) == 0
            assert captures("one") == 1
            assert captures("one") == 0

    def test_a_capture_that_fails_later_costs_that_graph_alone(self, make: MakeDriver, bench: Bench) -> None:
        driver = make(TapeDevice(fails_at=4), max_num_seqs=2)
        one, base = Asked(driver, bench, "one"), Asked(driver, bench, None, num_tokens=4)
        driver.finish()
        one.check()
        base.check()
        assert driver.stats.eager_steps == {"prefill": 1, "not_captured": 3}
        assert driver.stats.graph_steps == {"lora": 12}

    def test_ranks_that_no_capture_covers_run_kernel_by_kernel(self, make: MakeDriver, bench: Bench) -> None:
        driver = make(backend=MaskedBackend(max_rank=4))
        one, base = Asked(driver, bench, "one"), Asked(driver, bench, None)
        driver.finish()
        one.check()
        base.check()
        assert driver.stats.eager_steps == {"prefill": 1, "adapters": 15}

    def test_more_sequences_than_the_largest_graph(
        self, make: MakeDriver, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decode_graphs, "graph_sizes", lambda _: (1, 2))
        driver = make()
        asked = [Asked(driver, bench, None, num_tokens=count) for count in (4, 8, 8)]
        driver.finish()
        for each in asked:
            each.check()
        assert driver.stats.eager_steps == {"prefill": 1, "batch_size": 3}
        assert driver.stats.graph_steps == {"base": 4}

    def test_prompts_in_chunks_and_prompt_logprobs_are_no_decode_steps(self, make: MakeDriver, bench: Bench) -> None:
        driver = make(max_num_batched_tokens=7)
        asked = Asked(driver, bench, "one", num_tokens=4)  # chunks of 7, 7 and 6
        driver.finish()
        asked.check()
        assert driver.stats.eager_steps == {"prefill": 3}
        request_id = driver.submit(bench.cases[None][0].prompt_token_ids, prompt_logprobs=1, max_tokens=3)
        driver.finish()
        assert len(driver.outputs[request_id].prompt_logprobs or ()) == PROMPT_LENGTH
        assert driver.stats.graph_steps == {"lora": 3, "base": 2}

    def test_a_profile_is_of_the_steps_that_run_without_it(self, make: MakeDriver, bench: Bench) -> None:
        driver = make()
        asked = Asked(driver, bench, "one")
        driver.step(3)
        driver.engine.start_profile()
        driver.step(3)
        profile = driver.engine.stop_profile()
        assert profile.num_steps == 3
        driver.finish()
        asked.check()
        assert driver.stats.eager_steps == {"prefill": 1}
        assert driver.stats.graph_steps == {"lora": 15}

    def test_scratch_memory_stays_while_graphs_write_to_it(self, make: MakeDriver) -> None:
        class Backend(MaskedBackend):
            def release_workspace(self) -> int:
                return 1 << 20

        assert make(backend=Backend()).engine._runner.release_workspace() == 0
        assert make(TapeDevice(fails_at=0), Backend()).engine._runner.release_workspace() == 1 << 20

    def test_a_replay_gives_what_a_stale_buffer_could_not(self, make: MakeDriver, bench: Bench) -> None:
        """`compared` does notice: a graph whose static tensors are another step's gives other logits."""
        driver = make()
        Asked(driver, bench, "one")
        driver.step(2)
        graphs = graphs_of(driver)
        with graphs.compared() as counts:
            captured = graphs._graphs[_Key(1, True)]
            other = captured.graph
            assert isinstance(other, TapeGraph)
            other._calls = other._calls[:-8] + other._calls[-1:]  # the last product is missing
            driver.finish()
        assert counts["different"] > 0
        driver.outputs.clear()


# ----------------------------------------------------------------------------------------------------- whatever happens


ROUNDS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([None, None, None, *NAMES, "large"]), st.integers(1, NUM_TOKENS)),
        st.tuples(st.just("step"), st.none(), st.integers(1, 6)),
        st.tuples(st.just("evict"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("abort"), st.none(), st.integers(0, 5)),
        st.tuples(st.just("compact"), st.none(), st.just(0)),
    ),
    min_size=6,
    max_size=16,
)


def test_replays_equal_eager_steps_whatever_happens(
    make: MakeDriver, bench: Bench, rank_64: tuple[Path, GreedyCase]
) -> None:
    """Requests that come and go, of the base and of adapters that take each other's memory; one engine for all.

    Each answers as transformers + peft do, and each replay gives the bits of the step run kernel by kernel.
    """
    path, large_case = rank_64
    lora = {"adapter_memory_bytes": 9 * bench.nbytes, "host_memory_bytes": 10 * bench.nbytes}  # "large" takes 8
    driver = make(lora=lora, max_num_seqs=5, max_num_batched_tokens=32)
    driver.registry.load("large", str(path))
    asked: list[tuple[str, tuple[int, ...]]] = []

    def ask(name: str | None, num_tokens: int) -> None:
        case = large_case if name == "large" else bench.cases[None if name is None else bench.adapters[name]][0]
        request_id = driver.submit(case.prompt_token_ids, name, max_tokens=num_tokens)
        asked.append((request_id, case.output_token_ids[:num_tokens]))

    def abort(which: int) -> None:
        if driver.running_ids:
            driver.abort(driver.running_ids[which % len(driver.running_ids)])

    acts: dict[str, Callable[[Any, int], object]] = {
        "ask": ask,
        "step": lambda _, count: driver.step(count),
        "evict": lambda name, _: driver.registry.evict(name),
        "abort": lambda _, which: abort(which),
        "compact": lambda _, __: driver.engine.adapters.compact(1 << 20, math.inf),
    }

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(rounds=ROUNDS)
    def play(rounds: list[tuple[str, str | None, int]]) -> None:
        asked.clear()
        for act, name, number in rounds:
            acts[act](name, number)
        driver.finish()
        for request_id, tokens in asked:
            if request_id in driver.outputs:
                assert driver.tokens(request_id) == tokens
            else:
                assert isinstance(driver.errors[request_id], RequestAbortedError)

    with graphs_of(driver).compared() as counts:
        play()
    assert counts["different"] == 0
    steps = driver.stats.graph_steps
    assert min(steps["base"], steps["lora"]) > 20


# ------------------------------------------------------------------------------------------------ the tape can be wrong


class TestTheTape:
    def replayed(self, run: Callable[[], None], device: TapeDevice | None = None) -> None:
        (device or TapeDevice()).capture(run).replay()

    def test_what_the_host_knew_at_the_capture_is_what_a_replay_has(self) -> None:
        x, y, host = torch.ones(3), torch.zeros(3), {"factor": 2.0}
        graph = TapeDevice().capture(lambda: y.copy_(x * host["factor"]))
        host["factor"] = 5.0
        x.fill_(3.0)
        graph.replay()
        assert y.tolist() == [6.0] * 3

    def test_it_reads_static_tensors_as_they_are_now_and_views_of_them(self) -> None:
        x, y = torch.zeros(4), torch.zeros(2)
        graph = TapeDevice().capture(lambda: y.copy_(torch.cat([x[:1], x[2:3]]).mul_(2)))
        x.copy_(torch.arange(4))
        graph.replay()
        assert y.tolist() == [0.0, 4.0]

    def test_memory_that_is_poisoned_shows(self) -> None:
        stale, y, device = torch.ones(3), torch.zeros(3), TapeDevice()
        device.poisoned.append(stale.view(torch.uint8))
        device.capture(lambda: y.copy_(stale + 1)).replay()
        assert y.isnan().all()

    @pytest.mark.parametrize(
        "run",
        [lambda: torch.ones(3).sum().item(), lambda: torch.ones(3).nonzero(), lambda: torch.tensor([1.0, 2.0])],
        ids=["item", "nonzero", "from a list"],
    )
    def test_what_reads_the_host_or_waits_is_refused(self, run: Callable[[], None]) -> None:
        with pytest.raises(EngineError, match="not permitted when a stream is capturing"):
            TapeDevice().capture(run)
