"""Whether outputs can have a form, found out in processes of its own: `FormJudge` here, `main` over there.

A grammar is a stranger's program, and the library that compiles it is not written for strangers: what recurses or
allocates without an end there ends a process that has nothing else to do. `processes.bounded` bounds what it costs.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from loraplex.errors import EngineOverloadedError, EngineTimeoutError, InvalidRequestError, LoraplexError
from loraplex.processes.bounded import BoundedProcesses, BoundedWork, answer_questions
from loraplex.structured.params import StructuredOutputsParams
from loraplex.structured.turns import forget_one

MAX_VERDICTS = 128
"""Kept, so that equal forms are judged once."""

MAX_GROWTH_BYTES = 2**25
"""Of a process that compiles a grammar: some of 18 KB take 500 MB, and no count of llguidance's is near to it."""

MAX_STACK_BYTES = 2**21
"""A quarter of what the engine's threads have, so what ends one of those ends a judge before."""

WORK = BoundedWork(
    name="forms of outputs",
    module="loraplex.structured.judge",
    cpu_s=4.0,
    answer_s=60.0,
    growth_bytes=2**29,
    kept_bytes=2**27,
    answer_bytes=2**12,
    busy=EngineOverloadedError,
    unavailable=EngineTimeoutError,
)


class FormJudge:
    """Any thread may call it, and waits. Verdicts are kept, for each client its own: how long one takes would say what
    others have asked for."""

    def __init__(self, work: BoundedWork = WORK) -> None:
        self._work = work
        self._processes = BoundedProcesses(work)
        self._verdicts: OrderedDict[tuple[Hashable, bytes], str | None] = OrderedDict()
        self._lock = threading.Lock()
        self.close = self._processes.close

    def prepare(self) -> None:
        """Start a process now: importing llguidance takes most of a second, which the first request would wait."""
        with suppress(LoraplexError):
            self.check(StructuredOutputsParams(json_object=True))

    def check_known(self, params: StructuredOutputsParams, client: str = "") -> bool:
        """At once. False: there is no verdict. Raises InvalidRequestError as `check`."""
        key = client, params.digest
        with self._lock:
            if key not in self._verdicts:
                return False
            self._verdicts.move_to_end(key)
            reason = self._verdicts[key]
        if reason is not None:
            raise InvalidRequestError(reason, param="structured_outputs")
        return True

    def check(self, params: StructuredOutputsParams, client: str = "") -> None:
        """Raises InvalidRequestError with the reason why outputs cannot have this form, and what is no verdict:
        EngineOverloadedError, EngineTimeoutError."""
        if self.check_known(params, client):
            return
        reason = self._verdict(params)
        with self._lock:
            self._verdicts[client, params.digest] = reason
            forget_one(self._verdicts, MAX_VERDICTS)
        if reason is not None:
            raise InvalidRequestError(reason, param="structured_outputs")

    def _verdict(self, params: StructuredOutputsParams) -> str | None:
        """None: they can. Else why not."""
        try:
            told = self._processes.ask(params.said)
        except InvalidRequestError as error:
            return error.message
        if told is None:
            text = f"takes more than {self._work.cpu_s:g} s or too much memory to compile, or ends the compiler"
            return f"structured_outputs: the grammar {text}: make it simpler"
        return None


# ------------------------------------------------------------------------------------------------- in the process


class ByteTokens:
    """A vocabulary of bytes: enough to say whether a grammar can be compiled. A real one takes up to a second."""

    special_ids: Collection[int] = ()
    vocab_size = 256

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def main() -> None:
    threading.stack_size(MAX_STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:  # its stack is the one that is bounded
        with suppress(InvalidRequestError):  # without llguidance
            thread.submit(judge, {"json_object": True}).result()  # what grows once is no grammar's
        answer_questions(WORK, lambda said: thread.submit(judge, said).result())


def judge(said: Mapping[str, Any]) -> str:
    """An empty text for `StructuredOutputsParams.said` that can be compiled. Raises InvalidRequestError for others."""
    from loraplex.structured.grammars import compile_grammar  # numpy and llguidance, in this process alone

    tokens, before = _tokens(), _resident_bytes()
    matcher = compile_grammar(StructuredOutputsParams(**said), tokens)
    grown = _resident_bytes() - before
    del matcher
    _give_back()
    if grown > MAX_GROWTH_BYTES:
        most = MAX_GROWTH_BYTES >> 20
        text = f"structured_outputs: it takes {grown >> 20} MiB of memory, and at most {most} are given"
        raise InvalidRequestError(f"{text}: make it simpler", param="structured_outputs")
    return ""


@cache
def _tokens() -> Any:
    from loraplex.structured.grammars import tokens_of

    return tokens_of(ByteTokens(), ByteTokens.vocab_size)


def _resident_bytes() -> int:
    """Of this process; 0 where the system has no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _give_back() -> None:
    """What the C library holds of freed memory, where it is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
