"""The Python interface: what `LLM` accepts, returns and refuses."""

from __future__ import annotations

import math
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from loraplex import LLM, EngineConfig, LoRAConfig, LoRARequest, RequestOutput, SamplingParams
from loraplex.errors import (
    AdapterNotFoundError,
    AdapterPathNotFoundError,
    AdapterValidationError,
    ConfigError,
    EngineShutdownError,
    InvalidRequestError,
    LoraDisabledError,
    ModelNotFoundError,
    PromptTooLongError,
)
from loraplex.memory.eviction.policies import FIFO
from tests.fixtures import NUM_TOKENS, TARGET_MODULES, VOCAB_SIZE, ModelZoo, Oracle

MAX_MODEL_LEN = 160
TEXT = "def step(self, plan):"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EOS = 1


@pytest.fixture(scope="module")
def base(zoo: ModelZoo) -> Path:
    return zoo.base("llama")


@pytest.fixture(scope="module")
def adapters(zoo: ModelZoo, base: Path) -> tuple[Path, Path]:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGET_MODULES), task_type="CAUSAL_LM")
    return zoo.adapter(base, config, seed=60), zoo.adapter(base, config, seed=61)


@pytest.fixture(scope="module")
def shared(base: Path) -> Iterator[LLM]:
    with LLM(str(base), max_model_len=MAX_MODEL_LEN) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One engine for all tests that only ask; each leaves no adapter and no reference behind."""
    yield shared
    for number in shared.list_loras():
        shared.remove_lora(number)
    shared.check_integrity()
    assert shared._front.registry is not None
    assert shared._front.registry.num_references == 0
    assert len(shared._front.outputs) == 0
    assert not shared.engine.has_unfinished


@pytest.fixture
def one(adapters: tuple[Path, Path]) -> LoRARequest:
    return LoRARequest("one", 1, str(adapters[0]))


@pytest.fixture
def two(adapters: tuple[Path, Path]) -> LoRARequest:
    return LoRARequest("two", 2, str(adapters[1]))


def ids(count: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def token_ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def sampled(llm: LLM, prompt: list[int], **params: Any) -> tuple[int, ...]:
    return token_ids(llm.generate({"prompt_token_ids": prompt}, SamplingParams(ignore_eos=True, **params)))[0]


# -------------------------------------------------------------------------------------------------------------- prompts


def test_every_form_of_a_prompt(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode(TEXT)
    forms: list[Any] = [TEXT, {"prompt": TEXT}, tokens, tuple(tokens), {"prompt_token_ids": tokens}]
    expected = token_ids(llm.generate(TEXT, GREEDY))
    for form in forms:
        assert token_ids(llm.generate(form, GREEDY)) == expected
        assert token_ids(llm.generate([form], GREEDY)) == expected
    assert token_ids(llm.generate(forms, GREEDY)) == expected * len(forms)
    assert llm.generate([], GREEDY) == []


def test_outputs_are_in_the_order_of_the_prompts_and_complete(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": ids(5 + index, seed=index)} for index in range(5)]
    lengths = [9, 1, 5, 3, 7]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.prompt_token_ids == tuple(prompt["prompt_token_ids"])
        assert output.prompt is None
        assert output.finished
        assert output.lora_request is None
        assert output.prompt_logprobs is None
        assert output.metrics is not None
        times = output.metrics
        assert 0 <= times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
        completion = output.outputs[0]
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert len(completion.token_ids) == length
        assert completion.text == llm.get_tokenizer().decode(list(completion.token_ids))
        assert completion.logprobs is completion.cumulative_logprob is None
    assert len({output.request_id for output in outputs}) == len(outputs)
    assert llm.generate(TEXT, GREEDY)[0].prompt == TEXT


def test_defaults_are_those_of_sampling_params(llm: LLM) -> None:
    output = llm.generate(TEXT)[0].outputs[0]
    assert len(output.token_ids) <= SamplingParams().max_tokens
    assert output.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ("", InvalidRequestError, "empty"),
        ([[]], InvalidRequestError, "empty"),
        ({"prompt_token_ids": []}, InvalidRequestError, "empty"),
        ([5] * MAX_MODEL_LEN, PromptTooLongError, f"{MAX_MODEL_LEN} tokens.*{MAX_MODEL_LEN}"),
        ("a " * 100_000, PromptTooLongError, "characters"),
        ([VOCAB_SIZE], InvalidRequestError, f"{VOCAB_SIZE} is not in the vocabulary"),
        ([-1], InvalidRequestError, "-1 is not in the vocabulary"),
        ([True, False], InvalidRequestError, "token ids"),
        ({"prompt": "a", "prompt_token_ids": [5]}, InvalidRequestError, "one of"),
        ({"text": "a"}, InvalidRequestError, "text"),
        ([5.0], InvalidRequestError, "float"),
        (None, InvalidRequestError, "NoneType"),
        (7, InvalidRequestError, "int"),
    ],
)
def test_prompts_that_are_refused(llm: LLM, prompt: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        llm.generate(prompt, GREEDY)
    assert isinstance(raised.value, ValueError)


def test_the_longest_prompt_leaves_room_for_one_token(llm: LLM) -> None:
    output = llm.generate(ids(MAX_MODEL_LEN - 1), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    without_limit = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate(ids(MAX_MODEL_LEN - 30), without_limit)[0]
    assert len(output.outputs[0].token_ids) == 30


def test_one_bad_prompt_runs_nothing(llm: LLM, one: LoRARequest) -> None:
    steps = llm.stats().step_times.num_steps
    with pytest.raises(PromptTooLongError):
        llm.generate([TEXT, [5] * 1000], GREEDY, lora_request=one)
    assert llm.stats().step_times.num_steps == steps


def test_more_prompts_than_may_wait(base: Path) -> None:
    with LLM(str(base), max_model_len=64, max_waiting_requests=3, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        prompts = [{"prompt_token_ids": ids(6, seed)} for seed in range(11)]
        together = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, n=1))
        assert [output.prompt_token_ids for output in together] == [tuple(p["prompt_token_ids"]) for p in prompts]


@pytest.mark.parametrize("n", [4, 9])
def test_more_completions_of_one_prompt_than_may_wait(base: Path, n: int) -> None:
    with LLM(str(base), max_model_len=64, max_waiting_requests=3, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        output = llm.generate([ids(6), ids(7)], SamplingParams(seed=1, max_tokens=3, n=n))
        assert [len(each.outputs) for each in output] == [n, n]


# ------------------------------------------------------------------------------------------------------- a progress bar


class Bar:
    """What `use_tqdm` makes, as tqdm's class is called."""

    def __init__(self, total: int, **settings: Any) -> None:
        self.total, self.settings, self.calls = total, settings, []

    def update(self, n: int) -> None:
        self.calls.append(n)

    def close(self) -> None:
        self.calls.append("closed")


def test_use_tqdm_shows_a_bar_if_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    plain = token_ids(llm.generate([TEXT] * 3, GREEDY))
    assert token_ids(llm.generate([TEXT] * 3, GREEDY, use_tqdm=False)) == plain
    assert capsys.readouterr() == ("", "")
    assert token_ids(llm.generate([TEXT] * 3, GREEDY, use_tqdm=True)) == plain
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Processed prompts" in shown.err
    assert "3/3" in shown.err
    llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=True)
    assert "1/1" in capsys.readouterr().err


def test_use_tqdm_may_make_the_bar(llm: LLM) -> None:
    bars: list[Bar] = []

    def make(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[-1]

    llm.generate([TEXT] * 3, SamplingParams(n=2, max_tokens=4), use_tqdm=make)
    (bar,) = bars
    assert (bar.total, bar.settings["desc"]) == (3, "Processed prompts")
    assert bar.calls == [1, 1, 1, "closed"]
    with pytest.raises(PromptTooLongError):
        llm.generate([5] * 1000, GREEDY, use_tqdm=make)
    assert bars[-1].calls == ["closed"]


def test_use_tqdm_takes_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, 1, "yes"):
        with pytest.raises(ConfigError, match=f"use_tqdm must be True, False or what makes a bar .*got {value!r}"):
            llm.generate(TEXT, GREEDY, use_tqdm=value)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ConfigError, match="use_tqdm=True shows a bar of rich, which is not installed"):
        llm.generate(TEXT, GREEDY, use_tqdm=True)


# ------------------------------------------------------------------------------------------------- one for each prompt


def test_lora_request_for_none_all_or_each(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    prompt = {"prompt_token_ids": ids(9)}
    of_base, of_one, of_two = (
        token_ids(llm.generate(prompt, GREEDY, lora_request=request))[0] for request in (None, one, two)
    )
    assert len({of_base, of_one, of_two}) == 3
    mixed = llm.generate([prompt] * 4, GREEDY, lora_request=[None, one, two, one])
    assert token_ids(mixed) == [of_base, of_one, of_two, of_one]
    assert [output.lora_request for output in mixed] == [None, one, two, one]
    assert [output.outputs[0].lora_request for output in mixed] == [None, one, two, one]
    assert token_ids(llm.generate([prompt] * 2, GREEDY, lora_request=one)) == [of_one, of_one]
    assert token_ids(llm.generate([prompt] * 2, GREEDY, lora_request=[None, None])) == [of_base, of_base]


def test_sampling_params_for_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    assert [len(tokens) for tokens in token_ids(llm.generate([TEXT, TEXT], params))] == [2, 5]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lengths_must_match(llm: LLM, one: LoRARequest, count: int) -> None:
    with pytest.raises(ValueError, match=f"sampling_params has {count} entries for 2 prompts"):
        llm.generate([TEXT, TEXT], [GREEDY] * count)
    with pytest.raises(ValueError, match=f"lora_request has {count} entries for 2 prompts"):
        llm.generate([TEXT, TEXT], GREEDY, lora_request=[one] * count)
    with pytest.raises(ValueError, match=f"lora_request has {count} entries for 2 prompts"):
        llm.chat([[{"role": "user", "content": "a"}]] * 2, GREEDY, lora_request=[None] * count)


def test_wrong_types_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="lora_request has a str; it takes LoRARequest"):
        llm.generate([TEXT], GREEDY, lora_request=["one"])
    with pytest.raises(InvalidRequestError, match="sampling_params has a dict; it takes SamplingParams"):
        llm.generate([TEXT], [{"temperature": 0}])
    with pytest.raises(InvalidRequestError, match=r"lora_request.*LoRARequest"):
        llm.generate([TEXT], GREEDY, lora_request=7)


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_sampling_parameter_of_the_wrong_type_is_named(name: str) -> None:
    """What every field refuses; and a text, a fraction and a truth where they are not meant."""
    default = getattr(SamplingParams(), name)
    wrong: list[Any] = [object(), [object()], {"a": "b"}, 7j]
    wrong += [] if name == "stop" else ["5"]
    wrong += [] if type(default) is float else [1.5]
    wrong += [1, "True"] if type(default) is bool else [True]
    for value in wrong:
        with pytest.raises(
            InvalidRequestError, match=f"^sampling parameters are refused: {name} must be .*, got "
        ) as caught:
            SamplingParams(**{name: value})
        assert repr(value)[:40] in str(caught.value)


def test_sampling_parameters_may_be_numpys() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]), seed=np.int32(3)
    )
    assert (params.n, params.temperature, params.stop_token_ids, params.seed) == (2, 0.5, (1, 2), 3)
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # type: ignore[dict-item]


def test_n_completions_are_those_of_the_seeds_that_follow(llm: LLM) -> None:
    prompt = ids(7)
    output = llm.generate({"prompt_token_ids": prompt}, SamplingParams(n=3, seed=11, max_tokens=10, ignore_eos=True))[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in output.outputs] == [
        sampled(llm, prompt, seed=11 + index, max_tokens=10) for index in range(3)
    ]
    assert len({completion.token_ids for completion in output.outputs}) == 3


def test_seeds_are_reproducible_and_independent_of_the_batch(llm: LLM, one: LoRARequest) -> None:
    """Also of the requests' order, of chunks and of other seeds."""
    prompts = [ids(5 + 3 * seed, seed) for seed in range(6)]
    params = [
        SamplingParams(seed=seed, temperature=0.7 + 0.1 * seed, top_p=0.9, top_k=50, max_tokens=12, ignore_eos=True)
        for seed in range(6)
    ]
    requests = [one if seed % 2 else None for seed in range(6)]
    alone = [
        token_ids(llm.generate(prompt, chosen, lora_request=request))[0]
        for prompt, chosen, request in zip(prompts, params, requests, strict=True)
    ]
    assert token_ids(llm.generate(prompts, params, lora_request=requests)) == alone
    backwards = llm.generate(prompts[::-1], params[::-1], lora_request=requests[::-1])
    assert token_ids(backwards) == alone[::-1]


def test_without_a_seed_draws_differ(llm: LLM) -> None:
    prompt = ids(7)
    assert len({sampled(llm, prompt, max_tokens=8) for _ in range(4)}) == 4
    output = llm.generate(prompt, SamplingParams(n=4, max_tokens=8, ignore_eos=True))[0]
    assert len({completion.token_ids for completion in output.outputs}) == 4


def test_sampling_follows_the_models_distribution(llm: LLM, zoo: ModelZoo, base: Path) -> None:
    """The first token of 600 seeds against the oracle's probabilities of its ten likeliest tokens (within 5 sigma)."""
    prompt = ids(6)
    probabilities = zoo.oracle(base).logits(prompt)[-1].double().mul(2).softmax(-1)
    count = 600
    outputs = llm.generate(prompt, SamplingParams(n=100, seed=0, temperature=0.5, max_tokens=1, ignore_eos=True))
    for first in range(100, count, 100):
        params = SamplingParams(n=100, seed=first, temperature=0.5, max_tokens=1, ignore_eos=True)
        outputs += llm.generate(prompt, params)
    drawn = [completion.token_ids[0] for output in outputs for completion in output.outputs]
    assert len(drawn) == count
    for token in probabilities.topk(10).indices.tolist():
        p = float(probabilities[token])
        assert abs(drawn.count(token) - count * p) <= 5 * math.sqrt(count * p * (1 - p)) + 1


def test_greedy_ignores_the_seed(llm: LLM) -> None:
    prompt = ids(7)
    assert len({sampled(llm, prompt, temperature=0, seed=seed, max_tokens=6) for seed in range(3)}) == 1
    assert sampled(llm, prompt, top_k=1, max_tokens=6) == sampled(llm, prompt, temperature=0, max_tokens=6)


def test_penalties_and_bias_act(llm: LLM) -> None:
    prompt = ids(7)
    plain = sampled(llm, prompt, temperature=0, max_tokens=12)
    assert plain[0] not in sampled(llm, prompt, temperature=0, max_tokens=12, logit_bias={plain[0]: -100})
    assert set(sampled(llm, prompt, temperature=0, max_tokens=4, logit_bias={77: 100})) == {77}
    biased = sampled(llm, prompt, temperature=0, max_tokens=4, logit_bias={77: 5.5}, frequency_penalty=2)
    assert 1 <= biased.count(77) < 4
    assert sampled(llm, prompt, temperature=0, max_tokens=4, logit_bias={prompt[0]: 6}, repetition_penalty=10) != (
        (prompt[0],) * 4
    )


# ------------------------------------------------------------------------------------------------------ where it stops


def eos_case(llm: LLM, at: int) -> tuple[list[int], tuple[int, ...], SamplingParams]:
    """A prompt, its free greedy output, and params under which the end of sequence is drawn as token number `at`."""
    prompt = ids(8)
    plain = sampled(llm, prompt, temperature=0, max_tokens=12)
    return prompt, plain, SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(plain[at],))


def test_the_end_of_sequence(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logit_bias={EOS: 100})
    output = llm.generate(TEXT, params)[0].outputs[0]
    assert (output.token_ids, output.text) == ((EOS,), "")
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    ignoring = SamplingParams(temperature=0, max_tokens=6, logit_bias={EOS: 100}, ignore_eos=True)
    output = llm.generate(TEXT, ignoring)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ((EOS,) * 6, "length")
    shown = SamplingParams(
        temperature=0, max_tokens=2, logit_bias={EOS: 100}, ignore_eos=True, skip_special_tokens=False
    )
    assert llm.generate(TEXT, shown)[0].outputs[0].text == "</s></s>"


def test_stop_token_ids(llm: LLM) -> None:
    prompt, plain, params = eos_case(llm, at=4)
    assert plain[4] not in plain[:4]
    output = llm.generate(prompt, params)[0].outputs[0]
    assert output.token_ids == plain[:5]
    assert (output.finish_reason, output.stop_reason) == ("stop", plain[4])
    assert output.text == llm.get_tokenizer().decode(list(plain[:4]))


def test_min_tokens(llm: LLM) -> None:
    """Until then neither the end of sequence nor stop tokens can be drawn."""
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=3, logit_bias={EOS: 100})
    output = llm.generate(TEXT, params)[0].outputs[0]
    assert output.token_ids[3] == EOS
    assert EOS not in output.token_ids[:3]
    assert len(output.token_ids) == 4
    prompt, plain, _ = eos_case(llm, at=1)
    stopping = SamplingParams(temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=(plain[1],), ignore_eos=True)
    tokens = llm.generate(prompt, stopping)[0].outputs[0].token_ids
    assert plain[1] not in tokens[:5]


def test_stop_strings(llm: LLM) -> None:
    """Also across the border of tokens; the text ends before the string, or with it."""
    prompt = ids(8)
    free = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    start = len(llm.get_tokenizer().decode(list(free.token_ids[:4])))
    stop = free.text[start - 2 : start + 2]
    before = free.text[: free.text.index(stop)]
    for include, text in ((False, before), (True, before + stop)):
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop=["never", stop], include_stop_str_in_output=include
        )
        output = llm.generate(prompt, params)[0].outputs[0]
        assert output.text == text
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) < len(free.token_ids)
        assert output.token_ids == free.token_ids[: len(output.token_ids)]


def test_a_stop_string_ends_one_of_n_completions_only(llm: LLM) -> None:
    prompt, shape = ids(8), {"seed": 3, "max_tokens": 10, "ignore_eos": True}
    free = llm.generate(prompt, SamplingParams(n=3, **shape))[0].outputs
    stop = free[1].text[3:6]
    stopped = llm.generate(prompt, SamplingParams(n=3, stop=stop, **shape))[0].outputs
    for before, after in zip(free, stopped, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.finish_reason == ("stop" if stop in before.text else "length")
    assert llm.stats().num_running == llm.stats().num_waiting == 0


def test_detokenize_off(llm: LLM) -> None:
    output = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False))[0]
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 4


# ------------------------------------------------------------------------------------------------------------- logprobs


def log_softmax(oracle: Oracle, tokens: list[int]) -> torch.Tensor:
    return oracle.logits(tokens).double().log_softmax(-1)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_logprobs_are_hugging_faces(
    llm: LLM, zoo: ModelZoo, base: Path, adapters: tuple[Path, Path], one: LoRARequest, is_adapted: bool
) -> None:
    """Of the raw logits, whatever the temperature: each token, its rank, the five best, of prompt and output, within
    1e-4."""
    prompt = ids(10)
    params = SamplingParams(seed=5, max_tokens=9, ignore_eos=True, logprobs=5, prompt_logprobs=5, temperature=1.3)
    output = llm.generate(prompt, params, lora_request=one if is_adapted else None)[0]
    completion = output.outputs[0]
    expected = log_softmax(zoo.oracle(base, adapters[0] if is_adapted else None), [*prompt, *completion.token_ids])
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    given = [*output.prompt_logprobs[1:], *completion.logprobs]
    for row, (token, entries) in enumerate(zip([*prompt[1:], *completion.token_ids], given, strict=True)):
        assert entries is not None
        best = expected[row].topk(5).indices.tolist()
        assert set(entries) == {token, *best}
        for candidate, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[row, candidate]), abs=1e-4)
            assert entry.rank == 1 + int((expected[row] > expected[row, candidate]).sum())
            assert entry.decoded_token == llm.get_tokenizer().token_text(candidate)
    drawn = [entries[token].logprob for entries, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(drawn))


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"max_num_seqs": 3}])
def test_prompt_logprobs_in_chunks_and_beside_cached_prompts(base: Path, llm: LLM, settings: dict[str, int]) -> None:
    """A prompt that is cached is computed again for them; other requests of the batch get none."""
    prompt = ids(40)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    expected = llm.generate(prompt, params)[0]
    with LLM(str(base), max_model_len=64, **settings) as other:
        other.generate(prompt, GREEDY)
        outputs = other.generate([prompt, prompt, ids(9)], [params, GREEDY, params])
        assert [output.num_cached_tokens for output in outputs] == [0, 32, 0]
        assert outputs[1].prompt_logprobs is outputs[1].outputs[0].logprobs is None
        assert outputs[2].prompt_logprobs is not None
        assert len(outputs[2].prompt_logprobs) == 9
        given = outputs[0]
        assert [sorted(each or {}) for each in given.prompt_logprobs or ()] == [[], *([token] for token in prompt[1:])]
        for ours, theirs in zip(given.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
            for token, entry in (ours or {}).items():
                assert theirs is not None
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_prompt_logprobs_of_one_token(llm: LLM) -> None:
    """There is nothing before the first token: its entry is None, as in vLLM."""
    output = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=1))[0]
    assert output.prompt_logprobs == (None,)
    assert output.outputs[0].logprobs is not None


def test_prompt_logprobs_of_n_completions(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate(ids(6), params)[0]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 6


# ----------------------------------------------------------------------------------------------------------------- chat


def test_chat(llm: LLM, one: LoRARequest) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = llm.get_tokenizer()
    written = "<|user|>\nhi\n<|assistant|>\n"
    output = llm.chat(messages, GREEDY)[0]
    assert output.prompt == written
    assert output.prompt_token_ids == tuple(tokenizer.encode(written, add_special_tokens=False))
    assert token_ids([output]) == token_ids(llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY))
    several = llm.chat(
        [messages, [*messages, {"role": "assistant", "content": "ho"}]], GREEDY, lora_request=[None, one]
    )
    assert token_ids(several)[0] == token_ids([output])[0]
    assert several[1].lora_request == one
    assert llm.chat(messages, GREEDY, add_generation_prompt=False)[0].prompt == "<|user|>\nhi\n"


# ------------------------------------------------------------------------------------------------------------- adapters


def test_the_verbs_of_adapters(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    assert llm.list_loras() == set()
    assert llm.add_lora(one) is True
    assert llm.add_lora(one) is False
    assert llm.add_lora(two) is True
    assert llm.list_loras() == {1, 2}
    assert llm.pin_lora(1) is True
    assert llm.pin_lora(1) is False
    info = {each.ref.adapter_name: each for each in llm.adapters()}
    assert (info["one"].is_pinned, info["one"].tier, info["one"].ref.max_rank) == (True, "device", 4)
    assert (info["two"].is_pinned, info["two"].tier, info["two"].num_references) == (False, "host", 0)
    assert llm.remove_lora(1) is True
    assert llm.remove_lora(1) is False
    assert llm.list_loras() == {2}
    with pytest.raises(AdapterNotFoundError, match="lora_int_id 1"):
        llm.pin_lora(1)
    with pytest.raises(AdapterNotFoundError, match="lora_int_id 9"):
        llm.switch_lora(2, 9)


def test_switch_lora(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    prompt = {"prompt_token_ids": ids(9)}
    of_one, of_two = (token_ids(llm.generate(prompt, GREEDY, lora_request=request)) for request in (one, two))
    result = llm.switch_lora(1, 2)
    assert result.old == "one"
    assert result.ref.adapter_name == "two"
    assert "one" in result.evicted
    assert min(result.load_s, result.promote_s) >= 0
    assert token_ids(llm.generate(prompt, GREEDY, lora_request=one)) == of_two
    assert token_ids(llm.generate(prompt, GREEDY, lora_request=two)) == of_two
    llm.switch_lora(2, 1)
    assert token_ids(llm.generate(prompt, GREEDY, lora_request=two)) == of_one
    assert llm.list_loras() == {1, 2}


def test_switch_lora_to_an_adapter_that_is_not_loaded_loads_it(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    of_two = token_ids(llm.generate(TEXT, GREEDY, lora_request=two))
    llm.remove_lora(2)
    llm.add_lora(one)
    result = llm.switch_lora(1, two)
    assert (result.old, result.ref.adapter_name, result.ref.lora_int_id) == ("one", "two", 2)
    assert result.load_s > 0
    assert llm.list_loras() == {1, 2}
    assert token_ids(llm.generate(TEXT, GREEDY, lora_request=one)) == of_two


def test_switch_lora_reloads_in_place_if_asked(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(one)
    llm.add_lora(two)
    assert llm.switch_lora(1, two).ref.adapter_version == 1
    assert llm.switch_lora(1, replace(two, load_inplace=True)).ref.adapter_version == 2


def test_switch_lora_of_an_adapter_that_is_not_active_says_so(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    """One in host memory is redirected all the same; one that is not loaded resolves to nothing, before and after."""
    llm.add_lora(two)
    assert not llm.switch_lora(one, 2).is_old_active
    assert llm.list_loras() == {2}
    llm.add_lora(one)
    assert not llm.switch_lora(one, two).is_old_active
    assert llm._front.registry_or_refuse().resolve("one").adapter_name == "two"
    llm.switch_lora(2, 1)
    assert llm.switch_lora(1, 2).is_old_active


def test_a_switch_that_cannot_be_changes_nothing(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(one)
    for old, new in ((1, 9), (9, 1), (one, 9), (9, one)):
        with pytest.raises(AdapterNotFoundError, match="no adapter has lora_int_id 9; load one with that number first"):
            llm.switch_lora(old, new)
    with pytest.raises(InvalidRequestError, match="adapter 'one' cannot be switched to itself; give two names"):
        llm.switch_lora(one, 1)
    with pytest.raises(InvalidRequestError, match="base_model_name is 'another'"):
        llm.switch_lora(1, replace(two, base_model_name="another"))
    with pytest.raises(AdapterPathNotFoundError, match="nowhere"):
        llm.switch_lora(1, replace(two, lora_path="/nowhere"))
    assert llm.list_loras() == {1}
    assert llm._front.registry_or_refuse().resolve("one").adapter_name == "one"


def test_a_forced_unload_ends_what_runs_and_what_is_not_in_the_engine_yet(
    base: Path, one: LoRARequest, two: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts of one adapter, of which two are queued at a time: all end as aborted, others' answers are whole."""
    with LLM(str(base), max_model_len=MAX_MODEL_LEN, max_waiting_requests=2, max_num_seqs=2) as llm:
        alone = llm.generate(TEXT, GREEDY, lora_request=two)[0]
        registry, step = llm._front.registry_or_refuse(), llm.engine.step
        monkeypatch.setattr(registry._drain, "_abort_grace_s", 0)

        def unload_first() -> Any:
            outputs = step()
            if one.lora_name in registry.names():
                registry.unload(one.lora_name, force=True)
            return outputs

        monkeypatch.setattr(llm.engine, "step", unload_first)
        outputs = llm.generate([TEXT] * 6, GREEDY, lora_request=[one, one, two, one, one, two])
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["abort", "abort", "length", "abort", "abort", "length"]
        assert [outputs[index].outputs[0].token_ids for index in (2, 5)] == [alone.outputs[0].token_ids] * 2
        assert registry.num_references == 0
        llm.check_integrity()


def test_load_inplace_reloads_once_a_call(llm: LLM, adapters: tuple[Path, Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(adapters[0], tmp_path / "mine"))
    first = LoRARequest("mine", 5, str(path))
    again = LoRARequest("mine", 5, str(path), load_inplace=True)
    prompt = {"prompt_token_ids": ids(9)}
    old = token_ids(llm.generate([prompt] * 3, GREEDY, lora_request=first))
    shutil.copytree(adapters[1], path, dirs_exist_ok=True)
    assert token_ids(llm.generate([prompt] * 3, GREEDY, lora_request=first)) == old
    new = token_ids(llm.generate([prompt] * 3, GREEDY, lora_request=again))
    assert new != old
    assert new == token_ids(llm.generate([prompt] * 3, GREEDY, lora_request=LoRARequest("two", 2, str(adapters[1]))))
    assert llm._front.registry_or_refuse().resolve("mine").adapter_version == 2


def test_an_adapter_that_cannot_be_loaded_runs_nothing(llm: LLM, one: LoRARequest, tmp_path: Path) -> None:
    steps = llm.stats().step_times.num_steps
    missing = LoRARequest("missing", 3, str(tmp_path / "nowhere"))
    with pytest.raises(AdapterPathNotFoundError, match="nowhere"):
        llm.generate([TEXT, TEXT], GREEDY, lora_request=[one, missing])
    broken = shutil.copytree(one.lora_path, tmp_path / "broken")
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true, "lora_alpha": -1}')
    with pytest.raises(AdapterValidationError) as raised:
        llm.add_lora(LoRARequest("broken", 4, str(broken)))
    assert len(raised.value.reasons) >= 4, "all reasons at once: DoRA, alpha, r and target_modules"
    assert llm.stats().step_times.num_steps == steps
    assert llm.list_loras() == {1}


def test_a_request_for_another_base_model_is_refused(llm: LLM, adapters: tuple[Path, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="base_model_name is 'another'"):
        llm.add_lora(LoRARequest("one", 1, str(adapters[0]), base_model_name="another"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora_int_id": 0},
        {"lora_int_id": -1},
        {"lora_int_id": True},
        {"lora_int_id": "1"},
        {"lora_name": ""},
        {"lora_path": ""},
        {"long_lora_max_len": 1},
        {"long_lora_max_len": True},
        {"long_lora_max_len": 8.0},
        {"tensorizer_config_dict": {}},
    ],
)
def test_lora_requests_that_cannot_be(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="LoRARequest"):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "p", **arguments})


def test_lora_off(base: Path, one: LoRARequest) -> None:
    with LLM(str(base), enable_lora=False, max_model_len=64) as llm:
        calls = [
            lambda: llm.generate(TEXT, GREEDY, lora_request=one),
            lambda: llm.generate([TEXT, TEXT], GREEDY, lora_request=[None, one]),
            lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY, lora_request=one),
            lambda: llm.add_lora(one),
            lambda: llm.remove_lora(1),
            lambda: llm.pin_lora(1),
            llm.list_loras,
            llm.adapters,
            lambda: llm.switch_lora(1, 2),
        ]
        for call in calls:
            with pytest.raises(LoraDisabledError, match="LoRA is off"):
                call()
        assert len(llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids) == 8
        assert llm.stats().memory.num_adapters == 0
        llm.check_integrity()


# ------------------------------------------------------------------------------------------------ prefix cache and salt


def test_cache_salt_separates_tenants(llm: LLM) -> None:
    prompt = {"prompt_token_ids": ids(40, seed=9)}
    cached = [
        llm.generate(prompt, GREEDY, cache_salt=salt)[0].num_cached_tokens for salt in ("", "", "a", "b", "a", "b", "")
    ]
    assert cached == [0, 32, 0, 0, 32, 32, 32]


def test_adapters_share_no_prefix(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    prompt = {"prompt_token_ids": ids(40, seed=10)}
    cached = [
        llm.generate(prompt, GREEDY, lora_request=request)[0].num_cached_tokens
        for request in (None, one, two, None, one, two)
    ]
    assert cached == [0, 0, 0, 32, 32, 32]


def test_prefix_caching_off(base: Path) -> None:
    with LLM(str(base), enable_prefix_caching=False, max_model_len=64) as llm:
        outputs = [llm.generate(ids(40), GREEDY)[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0]
        assert token_ids(outputs[:1]) == token_ids(outputs[1:])


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("setting", ["swap_space", "max_lora", "maxmodellen", "lora", "quantization"])
def test_unknown_settings_are_refused_by_name(base: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        LLM(str(base), **{setting: 1})


def test_settings_of_vllm_with_one_value(base: Path) -> None:
    with LLM(str(base), tensor_parallel_size=1, trust_remote_code=False, max_model_len=64) as llm:
        assert llm.generate(TEXT, GREEDY)
    for setting, value, why in (
        ("trust_remote_code", True, "no code of a model's repository is run"),
        ("trust_remote_code", 0, "no code of a model's repository is run"),
    ):
        with pytest.raises(ConfigError, match=f"{setting}={value!r} is not supported: {why}"):
            LLM(str(base), **{setting: value})
    with pytest.raises(ConfigError, match="tensor_parallel_size must be >= 1, got True"):
        LLM(str(base), tensor_parallel_size=True)


def test_every_setting_is_a_keyword(base: Path) -> None:
    """The defaults, given explicitly, are accepted; LoRA's settings need LoRA."""
    engine = {f.name: getattr(EngineConfig(model="m"), f.name) for f in fields(EngineConfig)}
    lora = {f.name: getattr(LoRAConfig(), f.name) for f in fields(LoRAConfig)}
    del engine["model"], engine["lora"]
    with LLM(str(base), **{**engine, **lora, "max_model_len": 64}) as llm:
        assert llm.config.lora == LoRAConfig()
    with pytest.raises(ConfigError, match=r"enable_lora=False.*max_loras"):
        LLM(str(base), enable_lora=False, max_loras=2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int8"}, "dtype.*int8"),
        ({"device": "abacus"}, "abacus"),
        ({"lora_backend": "abacus"}, "abacus"),
        ({"max_num_seqs": 0}, "max_num_seqs.*0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"),
        ({"block_size": 12}, "block_size.*12"),
        ({"max_model_len": 10_000}, "10000.*2048"),
        ({"max_model_len": 512, "kv_cache_memory_bytes": 65_536}, "512 tokens.*65536 bytes.*128 tokens"),
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto or one of .*'fp8'"),
        ({"adapter_memory_bytes": 0}, "adapter_memory_bytes.*0"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras.*2.*max_loras.*4"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras"),
        ({"eviction_policy": "random"}, "random"),
        ({"eviction_policy": None}, "eviction_policy .* got None"),
        ({"eviction_policy": 5}, "eviction policy 'builtins:int' lacks name"),
    ],
)
def test_settings_that_cannot_be(base: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        LLM(str(base), **settings)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("policy", ["loraplex.memory.eviction.policies:FIFO", FIFO, FIFO()])
def test_an_eviction_policy_of_ones_own(base: Path, one: LoRARequest, two: LoRARequest, policy: Any) -> None:
    with LLM(str(base), eviction_policy=policy, max_loras=1, max_model_len=64) as llm:
        assert llm.config.lora is not None
        assert llm.config.lora.eviction_policy == "loraplex.memory.eviction.policies:FIFO"
        llm.generate([TEXT] * 2, GREEDY, lora_request=[one, two])
        assert llm.memory_report().evictions["device_room"] >= 1
        llm.check_integrity()


def test_an_eviction_policy_may_be_an_object_that_is_empty(base: Path) -> None:
    class Sized(FIFO):
        def __len__(self) -> int:
            return len(self._keys)

    with LLM(str(base), eviction_policy=Sized(), max_model_len=64) as llm:
        assert llm.config.lora is not None
        assert llm.config.lora.eviction_policy.endswith("<locals>.Sized"), "no place that could be imported"


def test_an_eviction_policy_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    for policy in (object, "builtins:object"):
        with pytest.raises(ConfigError, match="eviction policy 'builtins:object' lacks name, evicts, enter"):
            LLM(str(tmp_path / "nowhere"), eviction_policy=policy)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_from_config_and_progress(base: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(base), max_model_len=64)
    with LLM.from_config(config, lambda what, done, total: seen.append((what, done, total))) as llm:
        assert llm.config is config
        assert len(llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids) == 8
    assert seen
    assert seen[-1][1] == seen[-1][2] > 0


def test_the_tokenizer_may_be_elsewhere_or_absent(base: Path, zoo: ModelZoo, tmp_path: Path) -> None:
    bare = shutil.copytree(base, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with LLM(str(bare), max_model_len=64) as llm:
        assert llm.tokenizer is None
        output = llm.generate(ids(5), GREEDY)[0].outputs[0]
        assert (len(output.token_ids), output.text) == (8, "")
        for call in (
            lambda: llm.generate(TEXT, GREEDY),
            lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY),
            lambda: llm.generate(ids(5), SamplingParams(stop="x")),
        ):
            with pytest.raises(InvalidRequestError, match="tokenizer"):
                call()
    with LLM(str(bare), tokenizer=str(zoo.tokenizer_dir), max_model_len=64) as llm:
        assert llm.generate(TEXT, GREEDY)[0].outputs[0].text


def test_dummy_weights_are_seeded(base: Path) -> None:
    def said(seed: int) -> list[tuple[int, ...]]:
        with LLM(str(base), load_format="dummy", seed=seed, max_model_len=64) as llm:
            return token_ids(llm.generate(ids(5), GREEDY))

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_stats(base: Path, one: LoRARequest) -> None:
    with LLM(str(base), max_model_len=64) as llm:
        llm.generate([ids(5), ids(6)], GREEDY, lora_request=[None, one])
        stats = llm.stats()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (11, 16)
        assert stats.num_finished == {"length": 2}
        assert dict(stats.memory.loads) == {"add": 1}
        assert [stats.memory.counters[name] for name in ("promotions", "misses", "hits")] == [1, 1, 0]
        assert stats.memory.resident_bytes["device"] == stats.memory.resident_bytes["host"] > 0
        assert stats.step_times.num_steps == 8
        assert (stats.num_running, stats.num_waiting, stats.memory.kv_cache_usage) == (0, 0, 0)


def test_stats_of_adapters_are_those_of_the_memory(base: Path, one: LoRARequest, two: LoRARequest) -> None:
    """Under the names that `EngineStats` had before there was `memory`."""
    with LLM(str(base), max_model_len=64, max_loras=1) as llm:
        llm.generate([TEXT, TEXT], GREEDY, lora_request=[one, two])
        stats = llm.stats()
        assert stats.adapter_loads == {"add": 2}
        assert stats.adapter_evictions == {"device_room": 1}
        assert stats.resident_bytes == {tier: stats.memory.tier(tier).used_bytes for tier in ("device", "host")}
        assert stats.resident_bytes["host"] > stats.resident_bytes["device"] > 0
    with LLM(str(base), max_model_len=64, enable_lora=False) as llm:
        stats = llm.stats()
        assert stats.adapter_loads == stats.adapter_evictions == stats.resident_bytes == {}


def test_prompts_that_wait_for_kv_are_looked_up_once(base: Path) -> None:
    """In the counters of the prefix cache: a request that cannot be admitted asks in every step."""
    with LLM(str(base), max_model_len=64, kv_cache_memory_bytes=4 * 8192) as llm:
        assert llm.engine.info.num_kv_blocks == 4
        prompts = [{"prompt_token_ids": ids(40, seed)} for seed in (20, 21, 21)]
        llm.generate(prompts, GREEDY)
        stats = llm.stats()
        assert stats.num_preemptions == 0
        assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (120, 32)


def test_the_end_of_a_context_manager_ends_the_loaders(base: Path, one: LoRARequest, two: LoRARequest) -> None:
    with LLM(str(base), max_model_len=64) as llm:
        llm.add_lora(one)
        threads = llm.engine.adapters._loader._threads
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)
    calls: list[Callable[[], object]] = [
        lambda: llm.generate(TEXT, GREEDY),
        lambda: llm.generate(TEXT, GREEDY, lora_request=one),
        lambda: llm.submit(TEXT, GREEDY),
        llm.step,
        lambda: llm.add_lora(two),
        lambda: llm.pin_lora(1),
        llm.list_loras,
        llm.stats,
    ]
    for call in calls:
        with pytest.raises(EngineShutdownError, match="this LLM is closed: make a new one"):
            call()
    llm.close()
    llm.check_integrity()


def test_threads_take_turns(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    """Four that generate, with and without adapters, while two load, list and unload: tokens are those of one by
    one."""
    adapters = (None, one, two, one)
    prompts = [[{"prompt_token_ids": ids(7 + turn, seed=thread)} for turn in range(5)] for thread in range(4)]
    alone = [
        [token_ids(llm.generate(prompt, GREEDY, lora_request=adapter)) for prompt in own]
        for own, adapter in zip(prompts, adapters, strict=True)
    ]
    begin = threading.Barrier(6)

    def ask(thread: int) -> list[Any]:
        begin.wait(60)
        return [token_ids(llm.generate(prompt, GREEDY, lora_request=adapters[thread])) for prompt in prompts[thread]]

    def load_and_unload(number: int) -> None:
        begin.wait(60)
        for _ in range(5):
            llm.add_lora(LoRARequest(f"other{number}", 10 + number, one.lora_path))
            llm.stats(), llm.adapters()
            llm.remove_lora(10 + number)

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, thread) for thread in range(4)]
        verbs = [pool.submit(load_and_unload, number) for number in range(2)]
        assert [answer.result() for answer in answers] == alone
        for verb in verbs:
            verb.result()


def test_one_thread_steps_what_others_submit(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": ids(6, seed=seed)} for seed in range(8)]
    alone = [token_ids(llm.generate(prompt, GREEDY)) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        names = pool.map(lambda prompt: llm.submit(prompt, GREEDY), prompts)
        done: dict[str, Any] = {}
        while len(done) < len(prompts):
            done |= {output.request_id: token_ids([output]) for output in llm.step() if output.finished}
    assert [done[name] for name in names] == alone


def test_an_error_in_the_middle_leaves_the_engine_usable(
    llm: LLM, one: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, say: what was queued is forgotten, every reference returns, and the next call is served."""
    expected = token_ids(llm.generate([TEXT] * 3, GREEDY, lora_request=one))
    step, calls = llm.engine.step, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT] * 3, GREEDY, lora_request=one)
    assert not llm.engine.has_unfinished
    llm.check_integrity()
    assert token_ids(llm.generate([TEXT] * 3, GREEDY, lora_request=one)) == expected


def test_sixty_four_tokens_of_text_are_the_oracles(llm: LLM, zoo: ModelZoo, base: Path) -> None:
    case = zoo.fit_case(base)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": case.prompt_token_ids}, params)[0].outputs[0]
    assert output.token_ids == case.output_token_ids
    assert output.text == llm.get_tokenizer().decode(list(case.output_token_ids))


def test_a_profile(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    with pytest.raises(InvalidRequestError, match="no profile runs; start one first"):
        llm.generate_lora_performance_report()
    llm.generate([TEXT], GREEDY)
    llm.start_lora_profiling()
    with pytest.raises(InvalidRequestError, match="a profile runs already"):
        llm.start_lora_profiling()
    llm.generate([TEXT] * 3, GREEDY, lora_request=[one, two, None])
    report = llm.generate_lora_performance_report()
    assert {each.name: each.num_tokens for each in report.adapters} == {one.lora_name: 8, two.lora_name: 8, None: 8}
    assert (report.loads, report.switch_cost.load.count) == ({"add": 2}, 2)
    assert (report.num_tokens, report.num_steps, report.num_prefill_tokens > 0) == (24, 8, True)
    assert [(mix.least_adapters, mix.num_steps, mix.mean_rows) for mix in report.mixes] == [(2, 7, 3.0)]
    assert report.memory.num_adapters == 2
    llm.start_lora_profiling()
    assert llm.generate_lora_performance_report().num_steps == 0, "each profile is its own"


def test_a_profile_sees_switches(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(one)
    llm.add_lora(two)
    llm.switch_lora(1, 2)
    llm.start_lora_profiling()
    promoted = [llm.switch_lora(old, new).promote_s for old, new in ((2, 1), (1, 2))]
    switches = llm.generate_lora_performance_report().switch_cost.switch
    assert (switches.count, switches.max_s) == (2, max(promoted))


def test_a_profile_counts_more_loads_than_the_engine_keeps_events(
    llm: LLM, one: LoRARequest, two: LoRARequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine._events, "_events", deque(maxlen=1))
    llm.start_lora_profiling()
    llm.add_lora(one)
    llm.add_lora(two)
    assert llm.generate_lora_performance_report().switch_cost.load.count == 2


def test_without_lora_there_is_a_profile_too(base: Path) -> None:
    with LLM(str(base), enable_lora=False, max_model_len=64) as llm:
        llm.start_lora_profiling()
        llm.generate([TEXT], GREEDY)
        report = llm.generate_lora_performance_report()
    assert [each.name for each in report.adapters] == [None]
    assert report.memory.tiers == ()
