"""What the server process and an engine process say to each other: tagged msgspec types, one handler a type.

Every call carries a `call_id` that its `Reply` repeats. Requests have no reply: they are answered by `StepOutputs`. A
message without a handler is answered with an error, never dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

import msgspec

from loraplex.adapter_store import AdapterStore
from loraplex.config import EngineConfig
from loraplex.core import EngineInfo, Request, SamplingParams, TokenOutput
from loraplex.errors import LoraplexError, UnknownMessageError, error_from_payload
from loraplex.events import EngineEvent
from loraplex.frontend.store import STORE_METHODS
from loraplex.metrics import EngineStats
from loraplex.performance.steps import StepProfile

# ------------------------------------------------------------------------------------------------- server to engine


class StartEngine(msgspec.Struct, tag=True, frozen=True):
    config: EngineConfig


class AddRequests(msgspec.Struct, tag=True, frozen=True):
    """The completions of one prompt. Its ids come once (as 32-bit numbers) and not with each of `requests`; so do the
    collections of their parameters, where they share them."""

    prompt: bytes
    requests: tuple[Request, ...]
    collections: SamplingParams | None = None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> AddRequests:
        kinds = set(map(type, requests[0].prompt_token_ids)) - {int}
        if kinds:  # array would take a bool
            listed = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UnknownMessageError(f"a prompt cannot be sent: token ids are integers, and some are {listed}")
        try:
            prompt = array("i", requests[0].prompt_token_ids).tobytes()
        except OverflowError as error:
            raise UnknownMessageError(f"a prompt cannot be sent: {error}") from error
        params, collections = [each.sampling_params for each in requests], None
        if len(params) > 1 and all(each.shares_collections_with(params[0]) for each in params):
            none = SamplingParams()
            collections = none.with_collections_of(params[0])
            params = [each.with_collections_of(none) for each in params]
        stripped = (
            replace(each, prompt_token_ids=(), sampling_params=own) for each, own in zip(requests, params, strict=True)
        )
        return cls(prompt, tuple(stripped), collections)

    def with_prompt(self) -> Iterator[Request]:
        """They share its ids. Raises UnknownMessageError when these are none."""
        prompt = array("i")
        try:
            prompt.frombytes(self.prompt)
        except ValueError as error:
            raise UnknownMessageError(f"a prompt of {len(self.prompt)} bytes: {error}") from error
        token_ids = tuple(prompt)
        return (
            replace(each, prompt_token_ids=token_ids, sampling_params=self._with_collections(each.sampling_params))
            for each in self.requests
        )

    def _with_collections(self, params: SamplingParams) -> SamplingParams:
        return params if self.collections is None else params.with_collections_of(self.collections)


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    request_ids: tuple[str, ...]


def _types_of(method: str) -> tuple[Any, Any]:
    """(the arguments of a method of `AdapterStore` as a tuple, its result)."""
    types = get_type_hints(getattr(AdapterStore, method))
    result = types.pop("return")
    return tuple[tuple(types.values())], result  # type: ignore[misc]


_STORE_TYPES = {method: _types_of(method) for method in STORE_METHODS}


class CallStore(msgspec.Struct, tag=True, frozen=True):
    """A call of one of STORE_METHODS, with all of its arguments.

    ValueError for another method, or for arguments of other types: such a call is neither made nor understood.
    """

    call_id: int
    method: str
    arguments: tuple[Any, ...]

    def __post_init__(self) -> None:
        if self.method not in STORE_METHODS:
            raise ValueError(f"AdapterStore has no method {self.method!r:.80}")
        arguments = msgspec.convert(self.arguments, _STORE_TYPES[self.method][0])
        msgspec.structs.force_setattr(self, "arguments", arguments)


class GetStats(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class WithdrawRequests(msgspec.Struct, tag=True, frozen=True):
    """They go on in another engine. The reply has `Request.num_cached_tokens` of each; those that it lacks had ended.
    What was drawn of them, and how they ended, is sent before it."""

    call_id: int
    request_ids: tuple[str, ...]


class CheckIntegrity(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


ToEngine = (
    StartEngine
    | AddRequests
    | AbortRequests
    | CallStore
    | GetStats
    | StartProfile
    | StopProfile
    | WithdrawRequests
    | CheckIntegrity
    | Shutdown
)

# ------------------------------------------------------------------------------------------------- engine to server


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Progress(msgspec.Struct, tag=True, frozen=True):
    """A step of the start-up, for a progress bar: `done` of `total` (bytes of weights, graphs)."""

    what: str
    done: int
    total: int


class StepOutputs(msgspec.Struct, tag=True, frozen=True):
    outputs: tuple[TokenOutput, ...]


MAX_LOGPROBS_AT_ONCE = 2**11
"""In one message: to read it takes a few milliseconds, in which the server answers nothing else."""


def step_outputs(outputs: Sequence[TokenOutput]) -> Iterator[StepOutputs]:
    """What a step added, in messages with few log probabilities each.

    Those of a long prompt come in parts, the last one with the first token.
    """
    whole: list[TokenOutput] = []
    num_logprobs = 0
    for output in outputs:
        scored = output.prompt_logprobs or ()
        size = max(1, MAX_LOGPROBS_AT_ONCE // max(map(len, scored), default=1))
        if len(scored) > size:
            parts = [scored[start : start + size] for start in range(0, len(scored), size)]
            yield from (StepOutputs((TokenOutput(output.request_id, prompt_logprobs=part),)) for part in parts[:-1])
            output = replace(output, prompt_logprobs=parts[-1])
        num_own = sum(len(each or ()) for each in (*(output.prompt_logprobs or ()), *(output.logprobs or ())))
        if num_logprobs + num_own > MAX_LOGPROBS_AT_ONCE and whole:
            yield StepOutputs(tuple(whole))
            whole, num_logprobs = [], 0
        whole.append(output)
        num_logprobs += num_own
    yield StepOutputs(tuple(whole))


class Events(msgspec.Struct, tag=True, frozen=True):
    events: tuple[EngineEvent, ...]


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The step loop turns: sent when nothing else was for a while, since every message of the loop says as much, and
    when messages were read. num_read: of all that were sent to this process."""

    num_read: int


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The result of a call, as msgspec.Raw of the value, or an error's payload."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: dict[str, Any] | None = None


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start or go on; it ends after this message."""

    error: dict[str, Any]


FromEngine = Ready | Progress | StepOutputs | Events | Beat | Reply | Fatal

MAX_MESSAGE_BYTES = 2**28
"""Far more than any message takes. Both sides refuse a longer one, so that neither fills the other's memory."""

_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)
_NOT_UNDERSTOOD = (msgspec.MsgspecError, ValueError, RecursionError)  # ValueError: text that is not UTF-8

_RESULT_TYPES: Mapping[type, Any] = {
    GetStats: EngineStats,
    StartProfile: None,
    StopProfile: StepProfile,
    WithdrawRequests: dict[str, int | None],
    CheckIntegrity: None,
}


def result_type(call: Any) -> Any:
    """What the reply to a call carries."""
    return _STORE_TYPES[call.method][1] if isinstance(call, CallStore) else _RESULT_TYPES[type(call)]


def is_read(call: Any) -> bool:
    """Whether it changes nothing, so that its caller may stop waiting for the answer. Any other one ends with its reply
    or the engine.
    """
    return isinstance(call, GetStats) or (isinstance(call, CallStore) and call.method == "list_adapters")


def encode(message: Any) -> bytes:
    """Raises UnknownMessageError for what is too long or msgpack cannot carry, such as an integer beyond 64 bits."""
    try:
        data = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnknownMessageError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise UnknownMessageError(f"a {type(message).__name__} of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return data


def decode_to_engine(data: bytes) -> Any:
    """A message of `ToEngine`; raises UnknownMessageError for anything else."""
    return _decode(_TO_ENGINE, data)


def decode_from_engine(data: bytes) -> Any:
    return _decode(_FROM_ENGINE, data)


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise UnknownMessageError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}; it was not read")
    try:
        return decoder.decode(data)
    except _NOT_UNDERSTOOD as error:
        raise UnknownMessageError(f"a message of {len(data)} bytes is not understood: {error}") from error


def call_id_of(data: bytes) -> int | None:
    """The `call_id` of a message that could not be understood, so that its caller gets an error."""
    call_id = _fields_of(data).get("call_id")
    return call_id if isinstance(call_id, int) else None


def request_ids_of(data: bytes) -> list[str]:
    """Those of an AddRequests that could not be understood, so that its client gets an error."""
    requests = _fields_of(data).get("requests")
    ids = [each.get("request_id") for each in requests if isinstance(each, dict)] if isinstance(requests, list) else []
    return [each for each in ids if isinstance(each, str)]


def _fields_of(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.msgpack.decode(data) if len(data) <= MAX_MESSAGE_BYTES else None
    except _NOT_UNDERSTOOD:
        return {}
    return fields if isinstance(fields, dict) else {}


def reply_value(call_id: int, value: Any) -> Reply:
    return Reply(call_id, msgspec.Raw(encode(value)))


def reply_error(call_id: int, error: LoraplexError) -> Reply:
    return Reply(call_id, error=error.to_payload())


def read_reply(reply: Reply, result_type: Any) -> Any:
    """The value of a reply, checked against `result_type`; raises the error it carries."""
    if reply.error is not None:
        raise error_from_payload(reply.error)
    return msgspec.msgpack.decode(reply.value, type=result_type)


class TypeBasedDispatcher:
    """Calls the one handler of a message's type. A type without a handler raises UnknownMessageError."""

    def __init__(self, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        self._handlers = dict(handlers)

    def __call__(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise UnknownMessageError(f"no handler for a message of type {type(message).__name__}")
        handler(message)

    @property
    def types(self) -> Sequence[type]:
        return tuple(self._handlers)
