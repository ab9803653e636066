"""What the offline LLM does with adapters beside load, pin and switch: the server's other verbs, by number."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex import LLM, LoRARequest, RequestOutput, SamplingParams
from loraplex.adapters.registry import LoadStatus
from loraplex.adapters.registry.registry import ABORT_GRACE_S
from loraplex.errors import AdapterContentChangedError, AdapterNotFoundError, InvalidRequestError, LoraDisabledError
from loraplex.events import EventKind

TEXT = "def step(self, plan):"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
def llm(base: Path) -> Iterator[LLM]:
    """No request and no reference is left behind."""
    with LLM(str(base), max_model_len=160, enable_prediction=False) as llm:
        yield llm
        assert not llm.has_unfinished
        assert not llm.engine.has_unfinished
        assert llm._front.registry_or_refuse().num_references == 0
        llm.check_integrity()


def tier_of(llm: LLM, number: int) -> str | None:
    return next((str(each.tier) for each in llm.adapters() if each.ref.lora_int_id == number), None)


def ended(llm: LLM) -> dict[str, RequestOutput]:
    """The last output of each request, after all have ended."""
    last: dict[str, RequestOutput] = {}
    while llm.has_unfinished:
        last |= {output.request_id: output for output in llm.step()}
    return last


# ------------------------------------------------------------------------------------------------ where an adapter is


def test_preload_and_evict_move_an_adapter_up_and_down(llm: LLM, one: LoRARequest) -> None:
    llm.add_lora(one)
    assert tier_of(llm, 1) == "host"
    assert llm.preload_lora(1)
    assert tier_of(llm, 1) == "device"
    assert not llm.preload_lora(1)
    assert llm.evict_lora(1)
    assert tier_of(llm, 1) == "host"
    assert llm.list_loras() == {1}, "the name still resolves"


def test_preload_says_what_it_evicted(base: Path, one: LoRARequest, two: LoRARequest) -> None:
    with LLM(str(base), max_model_len=64, max_loras=1) as llm:
        llm.add_lora(one)
        llm.add_lora(two)
        llm.preload_lora(1)
        assert llm.preload_lora(2).evicted == (one.lora_name,)


def test_unpin_lifts_a_pin_once(llm: LLM, one: LoRARequest) -> None:
    llm.add_lora(one)
    assert llm.unpin_lora(1) is False
    llm.pin_lora(1)
    assert llm.unpin_lora(1) is True
    assert not llm.adapters()[0].is_pinned
    assert tier_of(llm, 1) == "device"


def test_rollback_goes_back_and_forth(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    first, second = (llm.generate(TEXT, GREEDY, lora_request=each)[0].outputs[0].token_ids for each in (one, two))
    llm.remove_lora(2)
    reload = LoRARequest(one.lora_name, 1, two.lora_path, load_inplace=True)
    llm.add_lora(reload)
    result = llm.rollback_lora(1)
    assert (result.status, result.ref.adapter_version, result.previous_version) == (LoadStatus.MOVED, 1, 2)
    assert llm.rollback_lora(1).ref.adapter_version == 2
    assert llm.rollback_lora(1, version=1).ref.adapter_version == 1
    assert llm.generate(TEXT, GREEDY, lora_request=one)[0].outputs[0].token_ids == first != second
    with pytest.raises(AdapterNotFoundError, match="has not kept version 7; it has 1, 2"):
        llm.rollback_lora(1, version=7)


def test_each_verb_refuses_a_number_that_no_adapter_has(llm: LLM) -> None:
    for verb in (llm.preload_lora, llm.evict_lora, llm.unpin_lora, llm.rollback_lora):
        with pytest.raises(AdapterNotFoundError, match="no adapter has lora_int_id 9; load one with that number first"):
            verb(9)


def test_without_lora_the_verbs_are_refused_and_the_reports_are_there(base: Path) -> None:
    with LLM(str(base), enable_lora=False, max_model_len=64) as llm:
        for verb in (llm.preload_lora, llm.evict_lora, llm.unpin_lora, llm.rollback_lora):
            with pytest.raises(LoraDisabledError, match="LoRA is off"):
                verb(1)
        assert llm.memory_report().num_kv_blocks > 0
        assert llm.events().events == ()


# --------------------------------------------------------------------------------- unload, with a deadline and by force


def test_unloading_lets_submitted_requests_finish_in_later_steps(llm: LLM, one: LoRARequest) -> None:
    request = llm.submit(TEXT, GREEDY, lora_request=one)
    assert llm.remove_lora(1) is True
    assert llm.list_loras() == set()
    assert ended(llm)[request].outputs[0].finish_reason == "length"


def test_a_deadline_finishes_submitted_requests_and_step_has_their_outputs(
    llm: LLM, one: LoRARequest, two: LoRARequest
) -> None:
    expected = [llm.generate(TEXT, LONG, lora_request=each)[0].outputs for each in (one, two)]
    short = llm.submit(TEXT, GREEDY, lora_request=one)
    other = llm.submit(TEXT, LONG, lora_request=two)
    assert llm.remove_lora(1, deadline_s=60) is True
    assert [each.ref.adapter_name for each in llm.adapters()] == [two.lora_name]
    assert llm.engine.has_unfinished, "the other request is not waited for"
    outputs = {output.request_id: output for output in llm.step()}
    assert outputs[short].finished
    assert outputs[short].outputs[0].token_ids == expected[0][0].token_ids[:8]
    assert ended(llm)[other].outputs[0].token_ids == expected[1][0].token_ids


def test_an_output_that_no_step_has_given_yet_is_unfinished_work(llm: LLM, one: LoRARequest) -> None:
    first = llm.submit(TEXT, GREEDY, lora_request=one)
    llm.remove_lora(1, deadline_s=60)
    assert llm.has_unfinished
    assert set(ended(llm)) == {first}
    second = llm.submit(TEXT, GREEDY, lora_request=one)
    llm.remove_lora(1, deadline_s=60)
    assert llm.abort(second) is False, "it has ended"
    assert not llm.has_unfinished, "and no output of it comes any more"


def test_force_aborts_what_the_deadline_leaves(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    forced, other = llm.submit(TEXT, LONG, lora_request=one), llm.submit(TEXT, GREEDY, lora_request=two)
    llm.step()
    began_s = time.monotonic()
    assert llm.remove_lora(1, deadline_s=0, force=True) is True
    assert time.monotonic() - began_s < ABORT_GRACE_S, "only a step lets go, so there is nothing to wait for"
    outputs = ended(llm)
    assert [outputs[each].outputs[0].finish_reason for each in (forced, other)] == ["abort", "length"]
    assert 1 <= len(outputs[forced].outputs[0].token_ids) < 100


def test_a_switch_takes_a_deadline_and_force(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(two)
    short = llm.submit(TEXT, GREEDY, lora_request=one)
    result = llm.switch_lora(1, 2, deadline_s=60)
    assert (result.num_references, result.num_aborted) == (0, 0)
    assert result.evict_s is not None
    assert ended(llm)[short].outputs[0].finish_reason == "length"
    long = llm.submit(TEXT, LONG, lora_request=two)
    result = llm.switch_lora(2, 1, force=True)
    assert (result.num_references, result.num_aborted) == (1, 1)
    assert ended(llm)[long].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("deadline_s", [-1.0, math.inf, math.nan])
def test_deadlines_that_cannot_be(llm: LLM, one: LoRARequest, two: LoRARequest, deadline_s: float) -> None:
    llm.add_lora(two)
    request = llm.submit(TEXT, GREEDY, lora_request=one)
    for verb in (
        lambda: llm.remove_lora(1, deadline_s=deadline_s),
        lambda: llm.switch_lora(1, 2, deadline_s=deadline_s),
    ):
        with pytest.raises(InvalidRequestError, match="deadline_s must be a number of seconds >= 0"):
            verb()
    assert llm.list_loras() == {1, 2}
    assert llm.stats().step_times.num_steps == 0
    assert ended(llm)[request].finished


# -------------------------------------------------------------------------------------------------------------- reports


def test_the_memory_report_is_of_now(llm: LLM, one: LoRARequest) -> None:
    assert llm.memory_report().num_adapters == 0
    llm.add_lora(one)
    report = llm.memory_report()
    assert (report.num_adapters, report.count("loads_add")) == (1, 1)
    assert (report.tier("device").num_adapters, report.tier("host").num_adapters) == (0, 1)
    llm.pin_lora(1)
    assert llm.memory_report().pinned_bytes == llm.memory_report().tier("device").used_bytes > 0


def test_events_are_numbered_and_in_order(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(one)
    llm.add_lora(two)
    llm.preload_lora(1)
    seen = llm.events()
    assert [(each.event_id, each.event.kind) for each in seen.events] == [(1, EventKind.LOAD), (2, EventKind.LOAD)]
    llm.switch_lora(1, 2)
    llm.remove_lora(1)
    later = llm.events(last_id=seen.last_id)
    kinds = [each.event.kind for each in later.events if each.event.kind is not EventKind.EVICT]
    assert kinds == [EventKind.SWITCH, EventKind.DROP, EventKind.UNLOAD]
    assert [each.event_id for each in later.events] == list(range(3, later.last_id + 1))
    switch = next(each.event for each in later.events if each.event.kind is EventKind.SWITCH)
    assert (switch.adapter_name, switch.details["new"]) == (one.lora_name, two.lora_name)
    assert llm.events(last_id=later.last_id).events == ()


def test_a_switch_of_an_adapter_that_is_not_loaded_is_no_event(llm: LLM, one: LoRARequest, two: LoRARequest) -> None:
    llm.add_lora(two)
    llm.start_lora_profiling()
    llm.switch_lora(one, 2)
    assert llm.generate_lora_performance_report().switch_cost.switch.count == 0
    assert EventKind.SWITCH not in {each.event.kind for each in llm.events().events}


# --------------------------------------------------------------------------------------------------------------- clone


def used_bytes(llm: LLM) -> int:
    return sum(tier.used_bytes for tier in llm.memory_report().tiers if tier.tier in ("device", "host"))


def test_a_clone_shares_weights_and_kv_until_each_goes_its_own_way(llm: LLM, one: LoRARequest) -> None:
    prompt = {"prompt_token_ids": [token % 250 + 3 for token in range(64)]}
    (wanted,) = llm.generate(prompt, GREEDY, lora_request=one)
    before = used_bytes(llm)
    result = llm.clone_lora(1, "copy", 5)
    assert (result.status, result.ref.lora_int_id) == (LoadStatus.LOADED, 5)
    copy = LoRARequest("copy", 5, one.lora_path)
    (found,) = llm.generate(prompt, GREEDY, lora_request=copy)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert found.num_cached_tokens > 0, "the prefix of the original"
    assert used_bytes(llm) == before
    assert llm.remove_lora(1)
    assert llm.generate(prompt, GREEDY, lora_request=copy)[0].outputs[0].token_ids == wanted.outputs[0].token_ids
    assert llm.remove_lora(5)
    assert used_bytes(llm) < before
    with pytest.raises(AdapterNotFoundError):
        llm.clone_lora(1, "copy", 5)


def test_a_clone_of_evicted_weights_reads_their_source_and_notices_that_it_changed(
    llm: LLM, one: LoRARequest, tmp_path: Path
) -> None:
    shutil.copytree(one.lora_path, tmp_path / "one")
    llm.add_lora(LoRARequest("moving", 1, str(tmp_path / "one")))
    while llm.evict_lora(1):
        pass
    config = tmp_path / "one" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    with pytest.raises(AdapterContentChangedError):
        llm.clone_lora(1, "copy", 5)
    assert llm.list_loras() == {1}
