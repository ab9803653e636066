"""Requests that come one by one: `LLM.submit`, `step` and `abort`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from loraplex import LLM, LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import AdapterUnavailableError, EngineOverloadedError, InvalidRequestError
from tests.fixtures import TARGET_MODULES, VOCAB_SIZE, ModelZoo

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama")


@pytest.fixture(scope="module")
def adapter(zoo: ModelZoo, base: Path) -> Path:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    return zoo.adapter(base, config, seed=60)


@pytest.fixture
def llm(base: Path) -> Iterator[LLM]:
    """Nothing is left of any request."""
    with LLM(str(base), max_model_len=160, max_waiting_requests=4) as llm:
        yield llm
        assert not llm.has_unfinished
        assert not llm.engine.has_unfinished
        assert llm._front.registry is not None
        assert llm._front.registry.num_references == 0
        assert len(llm._front.outputs) == 0
        llm.check_integrity()


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def step_to_the_end(llm: LLM) -> dict[str, list[RequestOutput]]:
    """Every output, by request."""
    seen: dict[str, list[RequestOutput]] = {}
    while llm.has_unfinished:
        for output in llm.step():
            seen.setdefault(output.request_id, []).append(output)
    return seen


def test_requests_that_come_later_have_the_tokens_of_generate(llm: LLM, adapter: Path) -> None:
    one = LoRARequest("one", 1, str(adapter))
    prompts = [ids(9, seed=1), ids(5, seed=2), ids(7, seed=3)]
    expected = llm.generate(prompts, GREEDY, lora_request=[one, None, one])
    assert not llm.has_unfinished
    first = llm.submit(prompts[0], GREEDY, lora_request=one)
    outputs = llm.step() + llm.step()
    assert [output.request_id for output in outputs] == [first, first]
    second = llm.submit({"prompt_token_ids": prompts[1]}, GREEDY)
    third = llm.submit(prompts[2], GREEDY, lora_request=one, request_id="mine")
    assert third == "mine"
    seen = step_to_the_end(llm)
    for name, wanted in zip((first, second, third), expected, strict=True):
        last = seen[name][-1]
        assert last.finished
        assert last.error is None
        assert last.lora_request == wanted.lora_request
        assert last.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_outputs_are_cumulative(llm: LLM) -> None:
    name = llm.submit(ids(4), GREEDY)
    seen = step_to_the_end(llm)[name]
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 9))
    assert [output.finished for output in seen] == [False] * 7 + [True]
    assert llm.step() == []


def test_all_completions_of_a_prompt_come_in_one_output(llm: LLM) -> None:
    name = llm.submit("some text", SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=5))
    last = step_to_the_end(llm)[name][-1]
    assert [len(completion.token_ids) for completion in last.outputs] == [4, 4, 4]


def test_a_request_that_fails_takes_no_other_with_it(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    source = tmp_path / "gone"
    shutil.copytree(adapter, source)
    gone = LoRARequest("gone", 1, str(source))
    prompt = ids(6)
    expected = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    llm.add_lora(gone)
    shutil.rmtree(source)
    adapter_id = llm.adapters()[0].ref.adapter_id
    while llm.engine.adapters.evict_adapter(adapter_id):
        pass
    failing, good = llm.submit(prompt, GREEDY, lora_request=gone), llm.submit(prompt, GREEDY)
    seen = step_to_the_end(llm)
    (failed,) = seen[failing]
    assert failed.finished
    assert failed.outputs == ()
    assert isinstance(failed.error, AdapterUnavailableError)
    assert failed.lora_request == gone
    assert seen[good][-1].outputs[0].token_ids == expected


def test_abort(llm: LLM, adapter: Path) -> None:
    one = LoRARequest("one", 1, str(adapter))
    running, other = llm.submit(ids(4), LONG, lora_request=one), llm.submit(ids(5), GREEDY)
    llm.step()
    assert llm.abort(running)
    assert not llm.abort(running)
    assert set(step_to_the_end(llm)) == {other}
    assert not llm.abort(other)


def test_what_cannot_run_is_refused_and_leaves_nothing(llm: LLM, adapter: Path) -> None:
    one = LoRARequest("one", 1, str(adapter))
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.submit([], GREEDY, lora_request=one)
    llm.submit(ids(4), GREEDY, lora_request=one, request_id="taken")
    with pytest.raises(InvalidRequestError, match="'taken' is in use"):
        llm.submit(ids(4), GREEDY, lora_request=one, request_id="taken")
    with pytest.raises(InvalidRequestError, match="1 submitted requests have not ended"):
        llm.generate(ids(4), GREEDY)
    assert set(step_to_the_end(llm)) == {"taken"}


def test_a_full_queue_takes_all_completions_of_a_prompt_or_none(llm: LLM) -> None:
    """Four may wait."""
    names = [llm.submit(ids(4, seed=i), GREEDY) for i in range(3)]
    with pytest.raises(EngineOverloadedError):
        llm.submit(ids(4), SamplingParams(n=2, max_tokens=4))
    names.append(llm.submit(ids(4, seed=9), GREEDY))
    with pytest.raises(EngineOverloadedError):
        llm.submit(ids(4), GREEDY)
    assert set(step_to_the_end(llm)) == set(names)
