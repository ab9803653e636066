"""Every error that Loraplex raises, in one tree.

    LoraplexError                        500
    |-- ConfigError                      400  a setting that cannot be, with its value (also a ValueError)
    |-- InvalidRequestError              400  a request that cannot be served (also a ValueError)
    |   |-- PromptTooLongError           400
    |   |-- LoraDisabledError            400  an adapter was asked of a server without LoRA
    |   `-- UnknownMessageError          400  a message between processes without a handler
    |-- ModelError                       500  the base model cannot be loaded
    |   |-- ModelNotFoundError           404
    |   |-- ModelConfigError             400
    |   `-- ModelWeightError             400
    |-- AdapterError                     400
    |   |-- AdapterNotFoundError         404  the name resolves to nothing
    |   |-- AdapterConflictError         400  the name or number belongs to another adapter
    |   |   `-- AdapterUnloadedError     409  it was unloaded while it was being loaded
    |   |-- AdapterMixError              400  these adapters, or these weights, are no mix
    |   |-- AdapterLoadError             400  the source cannot be turned into an adapter
    |   |   |-- AdapterPathNotFoundError     404
    |   |   |-- AdapterConfigMissingError    400
    |   |   |-- AdapterWeightsMissingError   400
    |   |   |-- AdapterPermissionError       403
    |   |   |-- AdapterPathForbiddenError    400  outside the allowed roots
    |   |   |-- AdapterFetchError            502  the hub or store answered with an error
    |   |   |-- AdapterFetchTimeoutError     504
    |   |   |-- AdapterTruncatedError        400
    |   |   |-- AdapterFileFormatError       400  not safetensors, or a pickle that weights-only loading refuses
    |   |   |-- AdapterBaseMismatchError     400  made for another base model
    |   |   `-- AdapterValidationError       400  all reasons at once, in `reasons`
    |   |-- AdapterMemoryError           400  a byte budget refuses it, with the numbers
    |   |   |-- AdapterTooLargeError     400
    |   |   |   `-- AdapterBeyondQuotaError  400  by a tenant's `host_bytes` or `device_bytes`; has `tenant`
    |   |   |-- AdapterNoRoomError       503  everything on the device is pinned or in use
    |   |   |   `-- AdapterQuotaError        503  so is all that the same limits leave to a tenant; has `tenant`
    |   |   `-- AdapterDiskFullError     507  the server's disk, or its folder of uploads, has no room for the files
    |   |-- AdapterContentChangedError   409  the source no longer has the content that was loaded
    |   |-- AdapterBusyError             429  checking it takes much work, and others are being checked: come again
    |   |-- AdapterUnavailableError      503  its files are gone, on their way or out of date, or no template runs now
    |   `-- AdapterFaultError            503  its weights or results were damaged, being restored; has `retry_after_s`
    |-- TenantError                      400
    |   |-- TenantNotFoundError          404  no such tenant
    |   |-- KeyNotFoundError             404  no key of that id
    |   |-- TenantConflictError          409  the name was given already, or there is no room for more
    |   |-- TenantForbiddenError         403  a key may not do this, or not to this adapter
    |   `-- TenantLimitError             429  a limit of the tenant is reached; has `retry_after_s` and `limit`
    |-- JournalError                     500  done, but not written to the state directory
    |   `-- DatabaseUnavailableError     503  the database of --database-url does not answer: the verb is refused
    |-- EngineError                      500
    |   |-- EngineDeadError              503  the engine process is being restarted; has `retry_after_s`
    |   |-- EngineTimeoutError           504  the engine is busy or hangs: a question about it had no answer in time
    |   |-- EngineOverloadedError        429
    |   |-- BaseModelFaultError          503  the base model itself gives wrong results: the engine starts again
    |   |-- DeviceLostError              503  the device does not answer any more: the engine starts again
    |   `-- EngineShutdownError          503
    |-- RequestAbortedError              499
    `-- RequestTimeoutError              504  the request's `timeout`, or the server's limit, has passed

A message says what, which value, which adapter, and what to do. Errors cross processes as `to_payload()`. What a file
or a client chose is shown by `shown`, at most MAX_SHOWN_CHARS of it; an error has at most MAX_REASONS reasons and
MAX_TEXT_BYTES of text.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

MAX_SHOWN_CHARS = 40
MAX_REASONS = 64
MAX_REASON_BYTES = 800
MAX_TEXT_BYTES = 64 * 2**10

KEY = re.compile(r"lp-[\w-]{43}", re.ASCII)
"""Of a tenant, as `tenants.records.new_secret` makes them."""

_MAX_NAME_CHARS = 4096
"""In a longer text no key is looked for."""


def without_keys(text: str) -> str:
    """A client may write a key where its id or another name belongs."""
    return KEY.sub("lp-...", text)


def shown(value: object, limit: int = MAX_SHOWN_CHARS) -> str:
    """A value for a message, in at most `limit` characters and little work; of a long text both ends, of a key none."""
    if isinstance(value, str):
        known = without_keys(value) if len(value) <= _MAX_NAME_CHARS else value
        text = repr(shortened(known, limit - 2))
    else:
        short = reprlib.Repr()
        short.maxlevel, short.maxstring, short.maxother, short.maxlong = 3, limit, limit, limit
        text = short.repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shortened(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Both ends of a text with `...` between, `limit` characters in all; a text that is no longer as it is."""
    if len(text) <= limit:
        return text
    kept = limit - 3
    return f"{text[: kept // 3]}...{text[kept // 3 - kept :]}"


def clipped(text: str, max_bytes: int) -> str:
    """A text of at most `max_bytes` in UTF-8; what is longer ends in `...`."""
    if len(text) * 4 <= max_bytes:
        return text
    data = text.encode(errors="replace")
    return text if len(data) <= max_bytes else data[: max_bytes - 3].decode(errors="ignore") + "..."


class LoraplexError(Exception):
    """Base class. `http_status` is what a server answers; `kind` is the OpenAI error type; `param` names the argument
    that is wrong."""

    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(clipped(message, MAX_TEXT_BYTES))
        self.param = param

    @property
    def message(self) -> str:
        return str(self)

    def to_payload(self) -> dict[str, Any]:
        """A plain dict that `error_from_payload` turns into an equal error in another process."""
        payload = {"error": type(self).__name__, "message": sendable(self.message)}
        return payload if self.param is None else {**payload, "param": self.param}


class ConfigError(LoraplexError, ValueError):
    http_status = 400
    kind = "invalid_request_error"


class InvalidRequestError(LoraplexError, ValueError):
    http_status = 400
    kind = "invalid_request_error"


class PromptTooLongError(InvalidRequestError):
    pass


class LoraDisabledError(InvalidRequestError):
    pass


class UnknownMessageError(InvalidRequestError):
    pass


class ModelError(LoraplexError):
    kind = "model_error"


class ModelNotFoundError(ModelError):
    http_status = 404


class ModelConfigError(ModelError):
    http_status = 400


class ModelWeightError(ModelError):
    http_status = 400


class AdapterError(LoraplexError):
    http_status = 400
    kind = "invalid_request_error"


class AdapterNotFoundError(AdapterError):
    http_status = 404
    kind = "not_found_error"


class AdapterConflictError(AdapterError):
    pass


class AdapterUnloadedError(AdapterConflictError):
    http_status = 409
    kind = "conflict_error"


class AdapterMixError(AdapterError):
    pass


class AdapterLoadError(AdapterError):
    pass


class AdapterPathNotFoundError(AdapterLoadError):
    http_status = 404
    kind = "not_found_error"


class AdapterConfigMissingError(AdapterLoadError):
    pass


class AdapterWeightsMissingError(AdapterLoadError):
    pass


class AdapterPermissionError(AdapterLoadError):
    http_status = 403
    kind = "permission_error"


class AdapterPathForbiddenError(AdapterLoadError):
    pass


class AdapterFetchError(AdapterLoadError):
    http_status = 502
    kind = "fetch_error"


class AdapterFetchTimeoutError(AdapterLoadError):
    http_status = 504
    kind = "fetch_error"


class AdapterTruncatedError(AdapterLoadError):
    pass


class AdapterFileFormatError(AdapterLoadError):
    pass


class AdapterBaseMismatchError(AdapterLoadError):
    pass


class AdapterValidationError(AdapterLoadError):
    """`reasons` has every reason found, so that one round trip is enough to mend an adapter; of very many the first,
    and a count."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)

    @classmethod
    def from_reasons(cls, adapter: str, reasons: Sequence[str], num_more: int = 0) -> AdapterValidationError:
        """num_more: reasons that were left out already."""
        kept = [clipped(reason, MAX_REASON_BYTES) for reason in reasons[:MAX_REASONS]]
        if num_more or len(reasons) > MAX_REASONS:
            del kept[MAX_REASONS - 1 :]
            kept.append(f"... and {len(reasons) - len(kept) + num_more} more")
        lines = "".join(f"\n  - {reason}" for reason in kept)
        return cls(f"adapter {adapter!r} is refused:{lines}", tuple(kept))

    def to_payload(self) -> dict[str, Any]:
        return {**super().to_payload(), "reasons": list(map(sendable, self.reasons))}


class AdapterMemoryError(AdapterError):
    pass


class AdapterTooLargeError(AdapterMemoryError):
    pass


class AdapterNoRoomError(AdapterMemoryError):
    http_status = 503
    kind = "overloaded_error"


class AdapterBeyondQuotaError(AdapterTooLargeError):
    """`tenant`: whose limit it is, for its own keys alone to read."""

    def __init__(self, message: str, tenant: str = "") -> None:
        super().__init__(message)
        self.tenant = tenant

    def to_payload(self) -> dict[str, Any]:
        return {**super().to_payload(), "tenant": self.tenant}


class AdapterQuotaError(AdapterNoRoomError):
    """`tenant`: whose limit it is, for its own keys alone to read."""

    def __init__(self, message: str, tenant: str = "") -> None:
        super().__init__(message)
        self.tenant = tenant

    def to_payload(self) -> dict[str, Any]:
        return {**super().to_payload(), "tenant": self.tenant}


class AdapterDiskFullError(AdapterMemoryError):
    http_status = 507
    kind = "overloaded_error"


class AdapterContentChangedError(AdapterError):
    http_status = 409
    kind = "conflict_error"


class AdapterBusyError(AdapterError):
    http_status = 429
    kind = "overloaded_error"


class AdapterUnavailableError(AdapterError):
    http_status = 503
    kind = "unavailable_error"


class AdapterFaultError(AdapterError):
    """`retry_after_s`: when to try again."""

    http_status = 503
    kind = "unavailable_error"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def to_payload(self) -> dict[str, Any]:
        return {**super().to_payload(), "retry_after_s": self.retry_after_s}


class TenantError(LoraplexError):
    http_status = 400
    kind = "invalid_request_error"


class TenantNotFoundError(TenantError):
    http_status = 404
    kind = "not_found_error"


class KeyNotFoundError(TenantError):
    http_status = 404
    kind = "not_found_error"


class TenantConflictError(TenantError):
    http_status = 409
    kind = "conflict_error"


class TenantForbiddenError(TenantError):
    http_status = 403
    kind = "permission_error"


class TenantLimitError(TenantError):
    """`limit`: the name of the limit; `retry_after_s`: when to try again; `headers` of the answer, set by the server.
    Raised in the server's process alone."""

    http_status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: float = 1.0, limit: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit
        self.headers: dict[str, str] = {}


class JournalError(LoraplexError):
    kind = "journal_error"


class DatabaseUnavailableError(JournalError):
    http_status = 503
    kind = "unavailable_error"


class EngineError(LoraplexError):
    """`was_killed`: a signal from outside ended a process of the engine: no failure of its own. It stays in the process
    that raises."""

    kind = "engine_error"
    was_killed = False


class EngineDeadError(EngineError):
    """`retry_after_s`: when a new process may serve."""

    http_status = 503

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineTimeoutError(EngineError):
    http_status = 504
    kind = "timeout_error"


class EngineOverloadedError(EngineError):
    http_status = 429
    kind = "overloaded_error"


class EngineShutdownError(EngineError):
    http_status = 503


class BaseModelFaultError(EngineError):
    http_status = 503


class DeviceLostError(EngineError):
    http_status = 503


class RequestAbortedError(LoraplexError):
    http_status = 499
    kind = "aborted"


class RequestTimeoutError(LoraplexError):
    http_status = 504
    kind = "timeout_error"


def sendable(text: str) -> str:
    """Half a character, of a file's name say, cannot be sent: it is escaped."""
    return text.encode(errors="backslashreplace").decode()


def _all_subclasses(cls: type[LoraplexError]) -> Iterator[type[LoraplexError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _all_subclasses(sub)


def error_from_payload(payload: Mapping[str, Any]) -> LoraplexError:
    """The inverse of `to_payload`; a name that is not in the tree becomes an `EngineError`."""
    error = _bare_error(payload)
    error.param = payload.get("param")
    return error


def _bare_error(payload: Mapping[str, Any]) -> LoraplexError:
    by_name = {cls.__name__: cls for cls in _all_subclasses(LoraplexError)}
    cls = by_name.get(payload["error"], EngineError)
    if issubclass(cls, AdapterValidationError):
        return cls(payload["message"], tuple(payload.get("reasons", ())))
    if issubclass(cls, AdapterFaultError):
        return cls(payload["message"], float(payload.get("retry_after_s", 1.0)))
    if issubclass(cls, AdapterBeyondQuotaError | AdapterQuotaError):
        return cls(payload["message"], str(payload.get("tenant", "")))
    return cls(payload["message"])
