"""Prompts on the way in and tokens on the way out, without an engine: the tests say what the engine answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LoRARequest,
    MixPart,
    RequestOutput,
    SamplingParams,
    TokenOutput,
    mix_digest,
)
from loraplex.errors import AdapterUnavailableError, EngineError, InvalidRequestError, PromptTooLongError
from loraplex.frontend.messages import MAX_LOGPROBS_AT_ONCE, step_outputs
from loraplex.text import processor
from loraplex.text.output_collections import Prefix
from loraplex.text.processor import (
    NEVER_ACTIVE,
    AdapterRef,
    InputProcessor,
    ModelLimits,
    OutputProcessor,
    PreparedRequest,
    ProcessedOutput,
    last_occurrence,
)
from loraplex.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import write_directory

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(write_directory(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, ModelLimits(tokenizer.vocab_size, 32), (EOS,))


@pytest.fixture
def outputs(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def without_tokenizer(max_model_len: int = 32) -> InputProcessor:
    return InputProcessor(None, ModelLimits(300, max_model_len), (EOS,))


# ------------------------------------------------------------------------------------------------------------------- in


def test_a_text_becomes_a_request(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    adapter, lora_request = AdapterRef(7, "digest"), LoRARequest("sql", 1, "/sql")
    params = SamplingParams(max_tokens=5, seed=11)
    prepared = inputs.prepare("r", "hello", params, adapter=adapter, lora_request=lora_request, cache_salt="tenant")
    assert prepared.prompt == "hello"
    assert list(prepared.prompt_token_ids) == tokenizer.encode("hello")
    assert (prepared.sampling_params, prepared.lora_request) == (params, lora_request)
    (child,) = prepared.children
    assert child.prompt_token_ids == prepared.prompt_token_ids
    assert (child.max_tokens, child.seed, child.eos_token_ids) == (5, 11, (EOS,))
    assert (child.adapter_id, child.adapter_digest, child.cache_salt) == (7, "digest", "tenant")
    assert child.arrival_s == prepared.arrival_s


def test_the_base_model_has_no_adapter(inputs: InputProcessor) -> None:
    (child,) = inputs.prepare("r", [5], SamplingParams()).children
    assert (child.adapter_id, child.adapter_digest, child.cache_salt) == (None, "", "")


def test_special_tokens_are_added_once(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    """A chat template writes them itself."""
    with_bos = inputs.prepare("r", "hello", SamplingParams()).prompt_token_ids
    without = inputs.prepare("r", "hello", SamplingParams(), add_special_tokens=False).prompt_token_ids
    assert with_bos == (tokenizer.bos_token_id, *without)


def test_token_ids_are_taken_as_they_are(inputs: InputProcessor) -> None:
    prepared = inputs.prepare("r", [9, 8, 7], SamplingParams())
    assert (prepared.prompt, prepared.prompt_token_ids) == (None, (9, 8, 7))


@pytest.mark.parametrize(("asked", "given"), [(None, 12), (5, 5), (12, 12), (10**6, 12)])
def test_a_completion_ends_where_the_model_does(asked: int | None, given: int) -> None:
    (child,) = without_tokenizer().prepare("r", [5] * 20, SamplingParams(max_tokens=asked)).children
    assert child.max_tokens == given


@pytest.mark.parametrize(
    ("invocation", "prompt", "adapter_from"),
    [
        ((), [5, 6, 7], 0),
        ((6,), [5, 6, 7], 1),
        ((5, 6), [5, 6, 5, 6, 7], 2),
        ((5, 5), [5, 5, 5, 7], 1),
        ((5, 6), [5, 6], 0),
        ((5, 6), [5, 7, 6], NEVER_ACTIVE),
        ((5, 6, 7), [6, 7], NEVER_ACTIVE),
    ],
)
def test_an_alora_acts_from_its_last_invocation_on(
    inputs: InputProcessor, invocation: tuple[int, ...], prompt: list[int], adapter_from: int
) -> None:
    """Of each completion; a plain LoRA from the beginning."""
    adapter = AdapterRef(4, "d", invocation_tokens=invocation)
    children = inputs.prepare("r", prompt, SamplingParams(n=2), adapter=adapter).children
    assert [child.adapter_from for child in children] == [adapter_from] * 2
    for child in children:
        child.check(max_model_len=32)


@pytest.mark.parametrize(
    "odd",
    [
        {"adapter_from": -1},
        {"adapter_id": None, "adapter_digest": ""},
        {"mix": (MixPart(4, "d", 0.5),), "adapter_digest": mix_digest([MixPart(4, "d", 0.5)])},
    ],
    ids=str,
)
def test_an_invocation_that_no_front_finds_is_refused_by_the_engine(inputs: InputProcessor, odd: Any) -> None:
    adapter = AdapterRef(4, "d", invocation_tokens=(6,))
    (request,) = inputs.prepare("r", [5, 6], SamplingParams(), adapter=adapter).children
    request.check(max_model_len=32)
    with pytest.raises(InvalidRequestError, match="adapter_from is"):
        replace(request, **odd).check(max_model_len=32)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), max_size=40))
def test_the_last_occurrence_is_that_of_a_plain_search(sought: list[int], token_ids: list[int]) -> None:
    starts = [start for start in range(len(token_ids)) if token_ids[start : start + len(sought)] == sought]
    assert last_occurrence(sought, token_ids) == max(starts, default=None)


@pytest.mark.parametrize("sought", [[6, *[5] * 1023], [*[5] * 511, 6, *[5] * 512], [5, 5, 5, 6], [5, 7, 6]])
def test_the_search_is_quick_in_prompts_that_nearly_match_everywhere(sought: list[int]) -> None:
    """Token by token, a thousand times for each, it would take ten seconds and more."""
    began_s = time.process_time()
    assert last_occurrence(sought, [5] * 131_072) is None
    assert last_occurrence(sought, [*sought, *[5] * 131_072]) == 0
    assert time.process_time() - began_s < 1


def test_tokens_of_any_vocabulary_are_found() -> None:
    ids = [2**31 - 1, 0xD800, 0x110000, 0]
    assert last_occurrence(ids, [*ids, 0xFFFD, *ids[1:], *ids, 1]) == 8
    assert last_occurrence(list(range(1024)), [*range(1024), *range(1023)]) == 0


def test_each_completion_has_a_seed_of_its_own(inputs: InputProcessor) -> None:
    children = inputs.prepare("r", [5], SamplingParams(n=3, seed=40)).children
    assert [child.seed for child in children] == [40, 41, 42]
    assert [child.sampling_params.n for child in children] == [1, 1, 1]
    assert len({child.request_id for child in children}) == 3
    (alone,) = inputs.prepare("r", [5], SamplingParams(seed=41)).children
    assert alone.seed == 41  # the second of three draws as a single one with its seed


def test_without_a_seed_each_request_has_another_one(inputs: InputProcessor) -> None:
    seeds = {child.seed for _ in range(20) for child in inputs.prepare("r", [5], SamplingParams(n=2)).children}
    assert len(seeds) == 40
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_seed_wraps_in_64_bits(inputs: InputProcessor) -> None:
    children = inputs.prepare("r", [5], SamplingParams(n=2, seed=2**63 - 1)).children
    assert [child.seed for child in children] == [2**63 - 1, -(2**63)]


def test_ids_of_children_are_never_used_again(inputs: InputProcessor) -> None:
    """A late output of an aborted request "r" must not be taken for one of the next "r", nor "r#0" for a child of
    "r"."""
    ids = [
        child.request_id
        for name in ("r", "r", "r#0")
        for child in inputs.prepare(name, [5], SamplingParams(n=2)).children
    ]
    assert len(set(ids)) == 6


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ([], InvalidRequestError, "the prompt is empty"),
        ([5] * 32, PromptTooLongError, "the prompt has 32 tokens and the model's length is 32.*at most 31 tokens"),
        ([5, 300], InvalidRequestError, r"token id 300 is not in the vocabulary, 0\.\.299"),
        ([-1], InvalidRequestError, "token id -1 is not in the vocabulary"),
        ("text", InvalidRequestError, "has no tokenizer: give the prompt as token ids"),
    ],
)
def test_prompts_that_are_refused(prompt: str | list[int], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        without_tokenizer().prepare("r", prompt, SamplingParams())


def test_the_longest_prompt_leaves_one_token() -> None:
    (child,) = without_tokenizer().prepare("r", [5] * 31, SamplingParams()).children
    assert child.max_tokens == 1


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(inputs: InputProcessor) -> None:
    with pytest.raises(PromptTooLongError, match="8193 characters, more than 8192"):
        inputs.prepare("r", "x" * 8193, SamplingParams())
    with pytest.raises(PromptTooLongError, match="tokens and the model's length is 32"):
        inputs.prepare("r", "x " * 4096, SamplingParams())


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(stop_token_ids=[2, 300]), "stop_token_ids"),
        (SamplingParams(stop_token_ids=[-3]), "stop_token_ids"),
        (SamplingParams(logit_bias={300: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_token_ids_of_parameters_are_checked(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"in {field} is not in the vocabulary") as refused:
        without_tokenizer().prepare("r", [5], params)
    assert refused.value.param == field


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
        without_tokenizer().prepare("r", [5], SamplingParams(stop="x"))


# ------------------------------------------------------------------------------------------------------------------ out


class Engine:
    """Says what a test wants an engine to say, about one request at a time."""

    def __init__(self, inputs: InputProcessor, outputs: OutputProcessor, tokenizer: Tokenizer) -> None:
        self._inputs = inputs
        self.outputs = outputs
        self.tokenizer = tokenizer

    def ask(self, request_id: str = "r", **params: Any) -> PreparedRequest:
        prepared = self._inputs.prepare(request_id, "hello", SamplingParams(**{"max_tokens": None, **params}))
        self.outputs.add(prepared)
        return prepared

    def say(
        self, prepared: PreparedRequest, token_ids: Sequence[int], index: int = 0, **fields: Any
    ) -> ProcessedOutput | None:
        is_final_only = fields.pop("is_final_only", False)
        output = TokenOutput(prepared.children[index].request_id, tuple(token_ids), **fields)
        return self.outputs.process(output, is_final_only=is_final_only)

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def engine(inputs: InputProcessor, outputs: OutputProcessor, tokenizer: Tokenizer) -> Engine:
    return Engine(inputs, outputs, tokenizer)


def request_output(processed: ProcessedOutput | None) -> RequestOutput:
    assert processed is not None
    assert processed.error is None
    assert processed.output is not None
    return processed.output


def completion(processed: ProcessedOutput | None, index: int = 0) -> CompletionOutput:
    return request_output(processed).outputs[index]


def test_outputs_are_cumulative(engine: Engine) -> None:
    prepared = engine.ask()
    ids = engine.tokens(" world of text")
    assert len(ids) >= 3
    for end in range(1, len(ids) + 1):
        output = request_output(engine.say(prepared, ids[end - 1 : end]))
        assert list(output.outputs[0].token_ids) == ids[:end]
        assert " world of text".startswith(output.outputs[0].text)
        assert (output.request_id, output.prompt, output.finished) == ("r", "hello", False)
    last = engine.say(prepared, [EOS], finish_reason=FinishReason.STOP)
    assert last is not None
    assert last.is_last
    assert completion(last).text == " world of text"
    assert completion(last).token_ids == (*ids, EOS)  # the token that ended it is a token, but no text
    assert (completion(last).finish_reason, completion(last).stop_reason) == ("stop", None)
    assert len(engine.outputs) == 0


def test_times_and_cached_tokens_are_noted(engine: Engine) -> None:
    prepared = engine.ask()
    first = request_output(engine.say(prepared, [9], num_cached_tokens=3, scheduled_s=5.5))
    assert first.metrics is not None
    assert first.metrics.first_scheduled_time == 5.5
    assert first.metrics.first_token_time is not None
    assert first.metrics.finished_time is None
    assert first.num_cached_tokens == 3
    last = request_output(engine.say(prepared, [9], finish_reason=FinishReason.LENGTH))
    assert last.metrics is not None
    assert last.metrics.first_token_time == first.metrics.first_token_time
    assert last.metrics.first_scheduled_time == 5.5
    assert last.metrics.finished_time is not None
    assert last.num_cached_tokens == 3


def test_a_stop_token_is_named(engine: Engine) -> None:
    prepared = engine.ask(stop_token_ids=[9])
    processed = engine.say(prepared, [8, 9], finish_reason=FinishReason.STOP, stop_token_id=9)
    assert (completion(processed).finish_reason, completion(processed).stop_reason) == ("stop", 9)
    assert completion(processed).text == engine.tokenizer.decode([8])


def test_a_stop_string_ends_a_request_before_the_engine_does(engine: Engine) -> None:
    """It is found across tokens; the engine is told to end, and what it says meanwhile is passed over."""
    prepared = engine.ask(stop=["or"])
    ids = engine.tokens(" world")
    processed = [engine.say(prepared, [token]) for token in ids]
    last = next(each for each in processed if each is not None and each.is_last)
    assert last.abort_ids == (prepared.children[0].request_id,)
    assert completion(last).text == " w"
    assert (completion(last).finish_reason, completion(last).stop_reason) == ("stop", "or")
    assert processed[processed.index(last) + 1 :] == [None] * (len(processed) - processed.index(last) - 1)
    assert engine.say(prepared, [9], finish_reason=FinishReason.ABORT) is None
    assert len(engine.outputs) == 0


def test_a_stop_string_may_be_kept(engine: Engine) -> None:
    prepared = engine.ask(stop=["or"], include_stop_str_in_output=True)
    processed = [engine.say(prepared, [token]) for token in engine.tokens(" world")]
    last = next(each for each in processed if each is not None and each.is_last)
    assert completion(last).text == " wor"


def test_a_stop_string_with_the_engines_last_token_needs_no_abort(engine: Engine) -> None:
    prepared = engine.ask(stop=["world"])
    last = engine.say(prepared, engine.tokens(" world"), finish_reason=FinishReason.LENGTH)
    assert last is not None
    assert last.abort_ids == ()
    assert (completion(last).text, completion(last).finish_reason) == (" ", "stop")


def test_what_might_become_a_stop_string_is_held_back_until_the_end(engine: Engine) -> None:
    prepared = engine.ask(stop=["world!"])
    texts = [completion(engine.say(prepared, [token])).text for token in engine.tokens(" world")]
    assert set(texts) <= {"", " "}
    last = engine.say(prepared, [], finish_reason=FinishReason.LENGTH)
    assert (completion(last).text, completion(last).finish_reason) == (" world", "length")


def test_a_character_in_several_tokens_comes_when_it_is_whole(engine: Engine) -> None:
    ids = engine.tokens("\U0001f600")
    assert len(ids) > 1
    prepared = engine.ask()
    texts = [completion(engine.say(prepared, [token])).text for token in ids]
    assert texts == [""] * (len(ids) - 1) + ["\U0001f600"]


def test_without_detokenize_there_is_no_text(engine: Engine) -> None:
    prepared = engine.ask(detokenize=False)
    processed = engine.say(prepared, [9, 8], finish_reason=FinishReason.LENGTH)
    assert (completion(processed).text, completion(processed).token_ids) == ("", (9, 8))


def test_a_model_without_a_tokenizer_answers_with_token_ids() -> None:
    outputs = OutputProcessor(None)
    prepared = without_tokenizer().prepare("r", [5], SamplingParams(logprobs=0))
    outputs.add(prepared)
    chosen = ({9: Logprob(-0.5, 1)},)
    processed = outputs.process(
        TokenOutput(prepared.children[0].request_id, (9,), FinishReason.LENGTH, logprobs=chosen)
    )
    assert (completion(processed).text, completion(processed).token_ids) == ("", (9,))
    assert completion(processed).logprobs == chosen


def test_logprobs_get_their_texts_and_are_summed(engine: Engine) -> None:
    prepared = engine.ask(logprobs=1)
    for token, logprob in ((9, -0.5), (8, -0.25)):
        candidates = {token: Logprob(logprob, 1), 5: Logprob(-3.0, 2)}
        processed = engine.say(prepared, [token], logprobs=(candidates,))
    output = completion(processed)
    assert output.cumulative_logprob == -0.75
    assert output.logprobs is not None
    assert [list(candidates) for candidates in output.logprobs] == [[9, 5], [8, 5]]
    assert output.logprobs[1][8] == Logprob(-0.25, 1, engine.tokenizer.token_text(8))


def test_without_logprobs_there_is_no_sum(engine: Engine) -> None:
    output = completion(engine.say(engine.ask(), [9]))
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_logprobs_of_a_prompt_that_came_in_parts_are_whole_with_the_first_token(engine: Engine) -> None:
    prepared = engine.ask(prompt_logprobs=1, n=2)
    scored = tuple({5 + token % 200: Logprob(-1.0, 1)} for token in range(20_000))
    token = TokenOutput(prepared.children[0].request_id, (9,), prompt_logprobs=scored)
    messages = list(step_outputs([TokenOutput(prepared.children[1].request_id, (7,)), token]))
    assert (
        max(len(each.prompt_logprobs or ()) for message in messages for each in message.outputs) <= MAX_LOGPROBS_AT_ONCE
    )
    told = [engine.outputs.process_step(message.outputs) for message in messages]
    assert [len(each) for each in told] == [0] * (-(-20_000 // MAX_LOGPROBS_AT_ONCE) - 1) + [1], (
        "a part is no news, and both completions are one"
    )
    output = request_output(told[-1][0])
    assert [each.token_ids for each in output.outputs] == [(9,), (7,)]
    assert [None if each is None else list(each) for each in output.prompt_logprobs or ()] == [None, *map(list, scored)]


def test_logprobs_of_the_prompt_come_with_the_first_token_and_stay(engine: Engine) -> None:
    prepared = engine.ask(prompt_logprobs=0)
    given = ({9: Logprob(-1.0, 1)}, {8: Logprob(-2.0, 3)})
    engine.say(prepared, [5], prompt_logprobs=given)
    output = request_output(engine.say(prepared, [5]))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None  # nothing precedes the first token
    assert output.prompt_logprobs[2] == {8: Logprob(-2.0, 3, engine.tokenizer.token_text(8))}


# -------------------------------------------------------------------------------------------------- several completions


def test_completions_of_one_prompt_come_together(engine: Engine) -> None:
    prepared = engine.ask(n=3)
    engine.say(prepared, [9], index=2)
    output = request_output(engine.say(prepared, [8], index=0))
    assert [each.token_ids for each in output.outputs] == [(8,), (), (9,)]
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for index in (2, 0):
        processed = engine.say(prepared, [EOS], index=index, finish_reason=FinishReason.STOP)
        assert not request_output(processed).finished
    assert [each.finish_reason for each in request_output(processed).outputs] == ["stop", None, "stop"]
    last = engine.say(prepared, [7], index=1, finish_reason=FinishReason.LENGTH)
    assert request_output(last).finished
    assert last is not None
    assert last.is_last
    assert len(engine.outputs) == 0


def test_a_stop_string_ends_its_own_completion_only(engine: Engine) -> None:
    prepared = engine.ask(n=2, stop=["world"])
    processed = engine.say(prepared, engine.tokens(" world"), index=1)
    assert processed is not None
    assert processed.abort_ids == (prepared.children[1].request_id,)
    assert not request_output(processed).finished
    assert engine.say(prepared, [9], index=1) is None  # the engine had not heard of it yet
    assert completion(engine.say(prepared, [9], index=0), 1).text == " "


def test_removing_a_prompt_says_what_still_runs(engine: Engine) -> None:
    prepared = engine.ask(n=3)
    engine.say(prepared, [9], index=1, finish_reason=FinishReason.LENGTH)
    assert engine.outputs.remove("r") == (prepared.children[0].request_id, prepared.children[2].request_id)
    assert engine.outputs.remove("r") == ()
    assert engine.say(prepared, [9]) is None
    assert len(engine.outputs) == 0


def test_an_id_in_use_is_refused_and_free_again_afterwards(engine: Engine) -> None:
    prepared = engine.ask("r")
    with pytest.raises(InvalidRequestError, match="request id 'r' is in use"):
        engine.ask("r")
    engine.say(prepared, [9], finish_reason=FinishReason.LENGTH)
    engine.ask("r")


def test_late_outputs_of_an_aborted_request_are_not_its_successors(engine: Engine) -> None:
    aborted = engine.ask("r")
    engine.outputs.remove("r")
    engine.ask("r")
    assert engine.say(aborted, [9]) is None
    assert engine.say(aborted, [], finish_reason=FinishReason.ABORT) is None
    assert len(engine.outputs) == 1


def test_an_aborted_completion_says_so(engine: Engine) -> None:
    """When the engine ends it, as `unload(force=True)` does."""
    prepared = engine.ask()
    engine.say(prepared, engine.tokens(" wor"))
    last = engine.say(prepared, [], finish_reason=FinishReason.ABORT)
    assert (completion(last).text, completion(last).finish_reason) == (" wor", "abort")
    assert len(engine.outputs) == 0


# --------------------------------------------------------------------------------------------------------------- errors


def test_an_error_ends_the_prompt_and_its_other_completions(engine: Engine) -> None:
    prepared = engine.ask(n=3)
    engine.say(prepared, [9], index=0, finish_reason=FinishReason.LENGTH)
    error = AdapterUnavailableError("its source is gone")
    processed = engine.say(prepared, [], index=1, finish_reason=FinishReason.ERROR, error=error.to_payload())
    assert processed is not None
    assert processed.is_last
    assert processed.output is None
    assert isinstance(processed.error, AdapterUnavailableError)
    assert str(processed.error) == "its source is gone"
    assert prepared.children[2].request_id in processed.abort_ids
    assert prepared.children[0].request_id not in processed.abort_ids
    assert len(engine.outputs) == 0


def test_a_tokenizer_that_fails_ends_its_request_only(
    engine: Engine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, other = engine.ask("r", logprobs=0), engine.ask("other")

    def refuse(token_id: int) -> str:
        raise KeyError(token_id)

    monkeypatch.setattr(tokenizer, "token_text", refuse)
    processed = engine.say(prepared, [9], logprobs=({9: Logprob(-1.0, 1)},))
    assert processed is not None
    assert isinstance(processed.error, EngineError)
    assert "the output of this request cannot be read: KeyError: 9" in str(processed.error)
    assert processed.abort_ids == (prepared.children[0].request_id,)
    assert completion(engine.say(other, [9])).token_ids == (9,)
    assert len(engine.outputs) == 1


def test_an_answer_with_too_many_characters_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all completions of a prompt together; tokens of an adapter may be long."""
    monkeypatch.setattr(processor, "MAX_TEXT_CHARS", 12)
    prepared, other = engine.ask("r", n=2), engine.ask("other")
    word = engine.tokens(" world")
    assert completion(engine.say(prepared, word, index=0)).text == " world"
    assert completion(engine.say(prepared, word, index=1), index=1).text == " world"
    assert completion(engine.say(other, word)).text == " world"
    processed = engine.say(prepared, word, index=0)
    assert processed is not None
    assert isinstance(processed.error, InvalidRequestError)
    assert "more than 12 characters" in str(processed.error)
    assert processed.abort_ids == tuple(child.request_id for child in prepared.children)
    assert len(engine.outputs) == 1


def test_a_finished_completion_is_made_once(engine: Engine) -> None:
    prepared = engine.ask(n=2)
    first = completion(engine.say(prepared, engine.tokens(" world"), finish_reason=FinishReason.LENGTH))
    assert type(first) is CompletionOutput
    assert completion(engine.say(prepared, [9], index=1)) is first


def test_an_unknown_request_is_passed_over(engine: Engine) -> None:
    assert engine.outputs.process(TokenOutput("unknown", (9,))) is None


# ----------------------------------------------------------------------------------------------------------- final only


def test_final_only_makes_one_output(engine: Engine) -> None:
    """What the offline engine asks for: it reads nothing before the end."""
    prepared = engine.ask(n=2)
    assert engine.say(prepared, [9], is_final_only=True) is None
    assert engine.say(prepared, [9], is_final_only=True, finish_reason=FinishReason.LENGTH) is None
    last = engine.say(prepared, [8], index=1, is_final_only=True, finish_reason=FinishReason.LENGTH)
    assert [each.token_ids for each in request_output(last).outputs] == [(9, 9), (8,)]


def test_final_only_still_says_what_to_abort(engine: Engine) -> None:
    prepared = engine.ask(n=2, stop=["world"])
    processed = engine.say(prepared, engine.tokens(" world"), is_final_only=True)
    assert processed == ProcessedOutput("r", abort_ids=(prepared.children[0].request_id,))


def test_an_output_of_a_running_request_copies_nothing_and_does_not_grow() -> None:
    """A tuple for each step of 256 answers of 32,000 tokens took 150 ms, and an answer the square of its length."""
    outputs = OutputProcessor(None)
    prepared = InputProcessor(None, ModelLimits(1000, 64)).prepare("r", [5], SamplingParams(max_tokens=9, logprobs=0))
    outputs.add(prepared)
    (child,) = prepared.children

    def step(token_id: int, finish_reason: FinishReason | None = None) -> CompletionOutput:
        scored = ({token_id: Logprob(-1.0, 1)},)
        told = outputs.process(TokenOutput(child.request_id, (token_id,), finish_reason, logprobs=scored))
        assert told is not None
        assert told.output is not None
        return told.output.outputs[0]

    seen = [step(7), step(8), step(9, FinishReason.LENGTH)]
    assert [each.token_ids for each in seen] == [(7,), (7, 8), (7, 8, 9)]
    assert [[list(scored) for scored in each.logprobs or ()] for each in seen] == [[[7]], [[7], [8]], [[7], [8], [9]]]
    assert [type(each.token_ids) for each in seen] == [Prefix, Prefix, tuple]
    assert [type(each.logprobs) for each in seen] == [Prefix, Prefix, tuple]


@given(st.lists(st.integers(), max_size=9), st.integers(0, 9), st.slices(9))
def test_a_prefix_is_as_a_tuple_of_it(items: list[int], num_more: int, part: slice) -> None:
    expected, prefix = tuple(items), Prefix(items)
    items += range(num_more)
    assert prefix == expected
    assert expected == prefix
    assert (len(prefix), hash(prefix), repr(prefix)) == (len(expected), hash(expected), repr(expected))
    assert prefix[part] == expected[part]
    assert [prefix[index] for index in range(-len(expected), len(expected))] == [*expected, *expected]
    with pytest.raises(IndexError):
        prefix[len(expected)]


def test_a_prompt_without_text_is_walked_once_for_all_completions(
    tokenizer: Tokenizer, outputs: OutputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 completions of 131,072 such tokens would hold the event loop for half a second."""
    looked_up: list[int] = []
    has_token = Tokenizer.has_token

    def counted(self: Tokenizer, token_id: int) -> bool:
        looked_up.append(token_id)
        return has_token(self, token_id)

    monkeypatch.setattr(Tokenizer, "has_token", counted)
    without_text = tokenizer.vocab_size + 5
    limits = ModelLimits(tokenizer.vocab_size + 10, 1100)
    prepared = InputProcessor(tokenizer, limits).prepare("r", [without_text] * 1000, SamplingParams(n=16, max_tokens=1))
    outputs.add(prepared)
    assert 1000 <= len(looked_up) <= 1100
