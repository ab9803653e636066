"""Messages between the processes: what is sent is what arrives, and what is not understood is answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex import errors
from loraplex.adapter_store import AdapterContent, AddOutcome, LongContext, MemoryQuota
from loraplex.config import EngineConfig, LoRAConfig
from loraplex.core import (
    AdapterResidency,
    AdapterSpec,
    EngineInfo,
    FinishReason,
    Logprob,
    LoraSlice,
    LoraTarget,
    MixPart,
    Request,
    SamplingParams,
    Shard,
    ShardKind,
    Tier,
    TokenOutput,
)
from loraplex.errors import EngineOverloadedError, UnknownMessageError
from loraplex.events import EngineEvent, EventKind
from loraplex.frontend import messages as msg
from loraplex.frontend.store import STORE_METHODS
from loraplex.metrics import ChunkRun, EngineStats, MemoryMode, MemoryReport, MemorySample, StepTimes, TierReport
from loraplex.performance.histogram import Histogram
from loraplex.performance.steps import StepKind, StepProfile, StepSums, Timeline
from loraplex.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, Claim
from loraplex.structured.params import StructuredOutputsParams
from loraplex.text.processor import NEVER_ACTIVE

SPEC = AdapterSpec(7, "sql", 2, "digest", "/adapters/sql", 4096, 16)
PARAMS = SamplingParams(n=2, stop=("\n", "é"), logit_bias={5: -1.5}, logprobs=3, seed=-(2**63), max_tokens=None)
REQUEST = Request("r-1", (1, 2, 3), PARAMS, 8, -5, (0, 1), 7, "digest", "tenant", 1.5, adapter_from=NEVER_ACTIVE)
LOGPROBS = {5: Logprob(-0.5, 1, "a"), 6: Logprob(-math.inf, None, None)}
TOKENS = TokenOutput("r-1", (5, 6), FinishReason.STOP, 6, (LOGPROBS, LOGPROBS), (LOGPROBS,), 16)
SLICE = LoraSlice("model.layers.0.self_attn.q_proj", 0, 64, 128, has_bias=True)
TARGET = LoraTarget("model.layers.0.self_attn.qkv_proj", 0, 64, 128, (SLICE,), ShardKind.QKV, Shard(1, 2))
INFO = EngineInfo("/model", "llama", "float32", "torch", 8192, 2048, 100, 16, 1 << 30, (TARGET,), "bfloat16")
RESIDENCY = AdapterResidency(7, Tier.HOST, None, 4096, 1, True, False, 2.5, "vanished")
EVENT = EngineEvent(
    EventKind.EVICT, 2.5, "adapter 'a' left", 7, "a", {"tier": "host", "nbytes": 4, "is_pinned": False, "s": 0.5}
)
MEMORY = MemoryReport(
    MemoryMode.LOW_MEMORY,
    (TierReport("host", 5, 10, 2, 0.5),),
    chunks=(ChunkRun("kv", 3), ChunkRun("free", 4)),
    quarantined={7: "NaN"},
    counters={"hits": 3},
    history=(MemorySample(1.5, MemoryMode.NORMAL, {"host": 0.5}, {"host": 5}, 0.0),),
)
STATS = EngineStats(
    3,
    1,
    {"room": 1},
    running_adapter_ids=(7,),
    step_times=StepTimes(9, {"schedule": 0.1, "forward": 0.3}),
    memory=MEMORY,
)
SUMS = StepSums(StepKind(2, 4, True), 3, 9, 1, 9, 5, {"forward": 0.5}, Histogram({7: 2, 300: 1}, 3, 0.5, 0.1, 0.3))
STEPS = StepProfile(2.5, (SUMS, StepSums(StepKind(0, 1, False))), Timeline(0.5, [1, 2]))
CONFIG = EngineConfig(model="/model", dtype="float16", lora=LoRAConfig(max_loras=3))

TO_ENGINE: tuple[Any, ...] = (
    msg.StartEngine(CONFIG),
    msg.AddRequests.of((REQUEST, replace(REQUEST, request_id="r-2"))),
    msg.AbortRequests(("r-1", "r-2")),
    msg.CallStore(1, "open_adapter", ("/adapters/sql", "sql", "acme", ("/adapters",))),
    msg.CallStore(1, "add_adapter", (SPEC,)),
    msg.CallStore(1, "attach_adapters", ([SPEC, replace(SPEC, adapter_id=8)],)),
    msg.CallStore(2, "drop_adapter", (7,)),
    msg.CallStore(3, "promote_adapter", (7,)),
    msg.CallStore(4, "evict_adapter", (7,)),
    msg.CallStore(5, "pin_adapter", (7,)),
    msg.CallStore(6, "unpin_adapter", (7,)),
    msg.CallStore(6, "check_pins", ("acme", 7)),
    msg.CallStore(6, "check_pins", ("acme", None)),
    msg.CallStore(6, "set_quotas", ({"acme": MemoryQuota(2**40, 9), "beta": MemoryQuota(device_bytes=0)},)),
    msg.CallStore(7, "abort_adapter", (7,)),
    msg.CallStore(8, "list_adapters", ([1, 2],)),
    msg.CallStore(8, "list_adapters", (None,)),
    msg.GetStats(9),
    msg.StartProfile(11),
    msg.StopProfile(12),
    msg.WithdrawRequests(14, ("r-1", "r-2")),
    msg.CheckIntegrity(13),
    msg.Shutdown(),
)
CALLS = [message for message in TO_ENGINE if "call_id" in type(message).__struct_fields__]
FROM_ENGINE: tuple[Any, ...] = (
    msg.Ready(INFO),
    msg.Progress("weights", 3, 10),
    msg.StepOutputs((TOKENS, TokenOutput("r-2"))),
    msg.Events((EVENT, replace(EVENT, adapter_id=None, adapter_name=None, details={}))),
    msg.Beat(7),
    msg.reply_value(1, AddOutcome(True, ("chat",))),
    msg.Fatal({"error": "ModelError", "message": "no"}),
)
RESULTS: Mapping[type | str, Any] = {
    "open_adapter": AdapterContent("0" * 64, 9, 8, 110, (5, 6), LongContext(2.0, 4096)),
    "add_adapter": AddOutcome(True, ("chat",)),
    "attach_adapters": None,
    "drop_adapter": None,
    "promote_adapter": AddOutcome(False),
    "evict_adapter": True,
    "check_pins": None,
    "set_quotas": None,
    "pin_adapter": False,
    "unpin_adapter": True,
    "abort_adapter": 3,
    "list_adapters": [RESIDENCY, replace(RESIDENCY, tier=Tier.DEVICE, lora_slot=2, error=None)],
    msg.GetStats: STATS,
    msg.StartProfile: None,
    msg.StopProfile: STEPS,
    msg.WithdrawRequests: {"r-1": None, "r-2": 16},
    msg.CheckIntegrity: None,
}


def name_of(message: Any) -> str:
    return getattr(message, "method", type(message).__name__)


@pytest.mark.parametrize("message", TO_ENGINE, ids=name_of)
def test_every_message_to_an_engine_arrives_as_it_was(message: Any) -> None:
    assert msg.decode_to_engine(msg.encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_every_message_of_an_engine_arrives_as_it_was(message: Any) -> None:
    assert msg.decode_from_engine(msg.encode(message)) == message


def test_every_type_is_tried_above() -> None:
    assert {type(message) for message in TO_ENGINE} == set(get_args(msg.ToEngine))
    assert {type(message) for message in FROM_ENGINE} == set(get_args(msg.FromEngine))
    calls = {type(message) for message in CALLS} - {msg.CallStore}
    methods = {message.method for message in CALLS if isinstance(message, msg.CallStore)}
    assert calls == set(msg._RESULT_TYPES)
    assert methods == set(STORE_METHODS)
    assert calls | methods == set(RESULTS)


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_every_result_arrives_as_it_was(call: Any) -> None:
    result = RESULTS[getattr(call, "method", type(call))]
    reply = msg.decode_from_engine(msg.encode(msg.reply_value(4, result)))
    assert reply.call_id == 4
    assert msg.read_reply(reply, msg.result_type(call)) == result


def test_calls_that_only_read_are_known() -> None:
    """Their callers stop waiting for an engine that hangs."""
    assert [name_of(call) for call in CALLS if msg.is_read(call)] == ["list_adapters", "list_adapters", "GetStats"]


def test_an_engine_is_asked_for_methods_of_its_store_alone() -> None:
    for method in ("close", "check_integrity", "__init__", "_store", "report", "add_adapter.__globals__", ""):
        with pytest.raises(ValueError, match=f"AdapterStore has no method {method!r}"):
            msg.CallStore(5, method, ())
        data = msgspec.msgpack.encode({"type": "CallStore", "call_id": 5, "method": method, "arguments": []})
        with pytest.raises(UnknownMessageError, match="is not understood: AdapterStore has no"):
            msg.decode_to_engine(data)
    for arguments in ((), ("seven",), (7, 8), (None,), (7.5,), (SPEC,)):
        with pytest.raises(ValueError, match="Expected"):
            msg.CallStore(5, "pin_adapter", arguments)


def test_a_config_with_lora_off_stays_off() -> None:
    config = EngineConfig(model="/model", lora=None)
    assert msg.decode_to_engine(msg.encode(msg.StartEngine(config))).config == config


def _all_errors() -> list[type[errors.LoraplexError]]:
    return list(errors._all_subclasses(errors.LoraplexError))


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_crosses_with_its_type_and_reasons(kind: type[errors.LoraplexError]) -> None:
    error = kind("it is é")
    if isinstance(error, errors.AdapterValidationError):
        error = errors.AdapterValidationError.from_reasons("sql", ["r is 0", "alpha is 0"])
    reply = msg.decode_from_engine(msg.encode(msg.reply_error(3, error)))
    with pytest.raises(kind) as raised:
        msg.read_reply(reply, bool)
    assert type(raised.value) is kind
    assert raised.value.to_payload() == error.to_payload()
    assert raised.value.http_status == error.http_status


def test_an_error_that_the_other_side_does_not_know_is_an_engine_error() -> None:
    with pytest.raises(errors.EngineError, match="of the future"):
        msg.read_reply(msg.Reply(1, error={"error": "FutureError", "message": "of the future"}), bool)


# ----------------------------------------------------------------------------------------------- what is not understood

NOT_UNDERSTOOD = {
    "nothing": b"",
    "no msgpack": b"\xc1\xc1",
    "text": msgspec.msgpack.encode("hello"),
    "cut off": msg.encode(msg.AddRequests.of([REQUEST]))[:-3],
    "bytes too many": msg.encode(msg.GetStats(1)) + b"\x01",
    "an unknown type": msgspec.msgpack.encode({"type": "Reboot", "call_id": 5}),
    "no type": msgspec.msgpack.encode({"call_id": 5}),
    "a field of another type": msgspec.msgpack.encode(
        {"type": "CallStore", "call_id": 5, "method": "drop_adapter", "arguments": ["seven"]}
    ),
    "a missing field": msgspec.msgpack.encode({"type": "CallStore", "call_id": 5}),
    "a value that its class refuses": msg.encode(msg.AddRequests.of([REQUEST])).replace(
        b"\xa5min_p\xcb" + bytes(8), b"\xa5min_p\xcb\xc0" + bytes(7)
    ),
}


@pytest.mark.parametrize("data", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(UnknownMessageError, match=f"a message of {len(data)} bytes is not understood"):
        msg.decode_to_engine(data)
    with pytest.raises(UnknownMessageError):
        msg.decode_from_engine(data)


def test_a_direction_does_not_take_the_other_ones_messages() -> None:
    with pytest.raises(UnknownMessageError):
        msg.decode_to_engine(msg.encode(FROM_ENGINE[0]))
    with pytest.raises(UnknownMessageError):
        msg.decode_from_engine(msg.encode(TO_ENGINE[0]))


def test_what_cannot_be_encoded_is_refused() -> None:
    """An integer beyond 64 bits reaches no process; its sender is told."""
    with pytest.raises(UnknownMessageError, match="cannot be sent"):
        msg.encode(msg.AddRequests.of([replace(REQUEST, max_tokens=10**30)]))
    with pytest.raises(UnknownMessageError, match="a prompt cannot be sent"):
        msg.AddRequests.of([replace(REQUEST, prompt_token_ids=(2**31,))])


def test_the_call_of_a_message_that_is_not_understood_is_known() -> None:
    assert msg.call_id_of(NOT_UNDERSTOOD["a field of another type"]) == 5
    assert msg.call_id_of(NOT_UNDERSTOOD["an unknown type"]) == 5
    for name in ("nothing", "no msgpack", "text", "cut off"):
        assert msg.call_id_of(NOT_UNDERSTOOD[name]) is None
    assert msg.call_id_of(msgspec.msgpack.encode({"call_id": "five"})) is None


def test_the_request_of_a_message_that_is_not_understood_is_known() -> None:
    assert msg.request_ids_of(NOT_UNDERSTOOD["a value that its class refuses"]) == ["r-1"]
    for name in ("nothing", "no msgpack", "text", "cut off", "an unknown type"):
        assert msg.request_ids_of(NOT_UNDERSTOOD[name]) == []
    for odd in ({"requests": 3}, {"requests": [3, {"request_id": 3}, {}]}):
        assert msg.request_ids_of(msgspec.msgpack.encode(odd)) == []


# ----------------------------------------------------------------------------------------------------------- dispatcher


def test_each_type_has_one_handler() -> None:
    taken: list[tuple[str, Any]] = []
    dispatch = msg.TypeBasedDispatcher(
        {msg.GetStats: lambda m: taken.append(("stats", m)), msg.Shutdown: lambda m: taken.append(("shutdown", m))}
    )
    dispatch(msg.Shutdown())
    dispatch(msg.GetStats(3))
    assert taken == [("shutdown", msg.Shutdown()), ("stats", msg.GetStats(3))]
    assert dispatch.types == (msg.GetStats, msg.Shutdown)


def test_a_type_without_a_handler_is_an_error() -> None:
    dispatch = msg.TypeBasedDispatcher({})
    with pytest.raises(UnknownMessageError, match="no handler for a message of type Shutdown"):
        dispatch(msg.Shutdown())


def test_an_error_of_a_handler_is_the_callers() -> None:
    def refuse(message: msg.Shutdown) -> None:
        raise EngineOverloadedError("busy")

    with pytest.raises(EngineOverloadedError):
        msg.TypeBasedDispatcher({msg.Shutdown: refuse})(msg.Shutdown())


# ---------------------------------------------------------------------------------------------------------- any content

int64 = st.integers(-(2**63), 2**63 - 1)
token_ids = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=12)
bounded = {"allow_nan": False, "allow_infinity": False}


def up_to(most: float, least: float = 0.0) -> st.SearchStrategy[float]:
    return st.floats(least, most, **bounded)


SAMPLING_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, MAX_COMPLETIONS),
    "temperature": up_to(100.0),
    "top_p": up_to(1.0, 1e-9),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": up_to(1.0),
    "seed": st.none() | int64,
    "stop": st.lists(texts.filter(bool), max_size=4),
    "stop_token_ids": st.lists(token_ids, max_size=4),
    "max_tokens": st.none() | st.integers(10, 2**31 - 1),
    "min_tokens": st.integers(0, 10),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
    "prompt_logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
    "presence_penalty": up_to(2.0, -2.0),
    "frequency_penalty": up_to(2.0, -2.0),
    "repetition_penalty": up_to(10.0, 1e-3),
    "logit_bias": st.dictionaries(token_ids, up_to(100.0, -100.0), max_size=4),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "detokenize": st.just(True),  # False excludes stop strings
    "structured_outputs": st.none()
    | st.builds(StructuredOutputsParams, regex=st.text(min_size=1, max_size=9), disable_any_whitespace=st.booleans())
    | st.builds(StructuredOutputsParams, choice=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4)),
}
REQUEST_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": texts,
    "prompt_token_ids": st.lists(token_ids, max_size=20).map(tuple),
    "sampling_params": st.builds(SamplingParams, **SAMPLING_PARAMS),
    "max_tokens": st.integers(1, 2**31 - 1),
    "seed": int64,
    "eos_token_ids": st.lists(token_ids, max_size=3).map(tuple),
    "adapter_id": st.none() | st.integers(1, 2**53),
    "adapter_digest": texts,
    "cache_salt": texts,
    "arrival_s": st.floats(0, **bounded),
    "mix": st.lists(st.builds(MixPart, st.integers(1, 2**53), texts, st.floats(**bounded)), max_size=3).map(tuple),
    "adapter_from": st.integers(0, NEVER_ACTIVE),
    "max_model_len": st.integers(0, 2**31 - 1),
    "output_token_ids": st.lists(token_ids, max_size=20).map(tuple),
    "num_cached_tokens": st.none() | st.integers(0, 2**31 - 1),
    "claim": st.builds(Claim, texts, st.floats(0.01, 100.0), st.integers(-100, 100)),
}
LOGPROBS_OF_TOKENS = st.lists(
    st.dictionaries(
        token_ids, st.builds(Logprob, st.floats(max_value=0, allow_nan=False), st.none() | token_ids, st.none() | texts)
    ),
    max_size=3,
).map(tuple)
TOKEN_OUTPUT: dict[str, st.SearchStrategy[Any]] = {
    "request_id": texts,
    "token_ids": st.lists(token_ids, max_size=5).map(tuple),
    "finish_reason": st.none() | st.sampled_from(FinishReason),
    "stop_token_id": st.none() | token_ids,
    "logprobs": st.none() | LOGPROBS_OF_TOKENS,
    "prompt_logprobs": st.none() | LOGPROBS_OF_TOKENS,
    "num_cached_tokens": st.integers(0, 2**31 - 1),
    "error": st.none() | texts.map(lambda text: EngineOverloadedError(text).to_payload()),
    "scheduled_s": st.floats(0, allow_nan=False, allow_infinity=False),
}


@pytest.mark.parametrize(
    ("kind", "drawn"), [(SamplingParams, SAMPLING_PARAMS), (Request, REQUEST_FIELDS), (TokenOutput, TOKEN_OUTPUT)]
)
def test_every_field_is_drawn(kind: type, drawn: dict[str, Any]) -> None:
    assert [field.name for field in fields(kind)] == list(drawn)


def sent_over(requests: Sequence[Request]) -> list[Request]:
    return list(msg.decode_to_engine(msg.encode(msg.AddRequests.of(requests))).with_prompt())


@given(REQUEST_FIELDS["sampling_params"])
def test_sampling_params_survive(params: SamplingParams) -> None:
    received = sent_over([replace(REQUEST, sampling_params=params)])[0].sampling_params
    assert received == params
    assert [type(getattr(received, field.name)) for field in fields(params)] == [
        type(getattr(params, field.name)) for field in fields(params)
    ]


@given(st.builds(Request, **REQUEST_FIELDS))
def test_requests_survive(request: Request) -> None:
    requests = [request, replace(request, request_id="another")]
    received = sent_over(requests)
    assert received == requests
    assert received[0].prompt_token_ids is received[1].prompt_token_ids, (
        "a tuple of each would take 5 MB of 131,000 ids"
    )


def test_the_completions_of_a_prompt_bring_it_once() -> None:
    """128 times, the server took 60 ms to write 131,000 ids, and the engine a second to read them."""
    long = replace(REQUEST, prompt_token_ids=(7,) * 10_000)
    (one, many) = (len(msg.encode(msg.AddRequests.of([long] * count))) for count in (1, 128))
    assert 40_000 < one < 41_000
    assert many < 40_000 + 128 * (one - 40_000)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=128, logit_bias=dict.fromkeys(range(1024), 1.5)),
        SamplingParams(n=128, stop_token_ids=range(1024)),
        SamplingParams(n=128, stop=["x" * 4096]),
        SamplingParams(n=128, structured_outputs=StructuredOutputsParams(regex="x" * 2000)),
    ],
    ids=["logit_bias", "stop_token_ids", "stop", "structured_outputs"],
)
def test_the_completions_of_a_prompt_bring_their_collections_once(params: SamplingParams) -> None:
    """1,024 biases 128 times were 30 ms of the server's loop, 37 ms of the engine's, and 100 MB there."""
    children = [replace(REQUEST, sampling_params=params.child(index)) for index in range(128)]
    assert all(child.sampling_params.shares_collections_with(params) for child in children)
    collections = len(msg.encode(msg.AddRequests.of(children[:1])))
    assert len(msg.encode(msg.AddRequests.of(children))) < collections + 128 * 640
    received = sent_over(children)
    assert received == children
    first, *others = (each.sampling_params for each in received)
    assert all(each.shares_collections_with(first) for each in others)


def test_a_prompt_of_half_a_number_is_refused() -> None:
    with pytest.raises(UnknownMessageError, match="a prompt of 3 bytes"):
        msg.AddRequests(b"123", (REQUEST,)).with_prompt()


@given(st.lists(st.builds(TokenOutput, **TOKEN_OUTPUT), max_size=4).map(tuple))
def test_token_outputs_survive(outputs: tuple[TokenOutput, ...]) -> None:
    assert msg.decode_from_engine(msg.encode(msg.StepOutputs(outputs))).outputs == outputs


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for decode in (msg.decode_to_engine, msg.decode_from_engine):
        try:
            message = decode(data)
        except UnknownMessageError:
            continue
        assert decode(msg.encode(message)) == message
    assert msg.call_id_of(data) is None or isinstance(msg.call_id_of(data), int)


@given(
    st.recursive(
        st.none() | st.booleans() | int64 | st.text(max_size=5),
        lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x),
    )
)
def test_any_values_are_a_message_or_an_error(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    with pytest.raises(UnknownMessageError):
        msg.decode_to_engine(data)
    msg.call_id_of(data)
    msg.request_ids_of(data)


@pytest.mark.parametrize("is_prompt", [False, True])
def test_a_message_has_few_log_probabilities(is_prompt: bool) -> None:
    """All of a step's in one message held the server up for 100 ms when it was read."""
    position = {token_id: Logprob(-1.0, token_id) for token_id in range(20)}
    scored = (position,) * 50  # 1,000 of each request
    kind = "prompt_logprobs" if is_prompt else "logprobs"
    given = [TokenOutput(str(index), (1,) * 50, **{kind: scored}) for index in range(30)]
    messages = list(msg.step_outputs([*given, TokenOutput("plain", (1,))]))
    assert [output.request_id for message in messages for output in message.outputs] == [*map(str, range(30)), "plain"]
    assert [len(message.outputs) for message in messages] == [2] * 14 + [3]
    whole = list(msg.step_outputs([TokenOutput(str(index), (1,)) for index in range(1000)]))
    assert [len(message.outputs) for message in whole] == [1000]
    assert [message.outputs for message in msg.step_outputs([])] == [()]
