"""From what a request asks to the tokens that may come next, with llguidance.

    params --compile, once for equal ones--> matcher --a copy for each request--> token masks

Every grammar becomes one in Lark's notation with `no_forcing`: a mask has every token that the grammar allows, also
where only one text can follow. Forced texts would be cut by a tokenizer each time, which costs as much as they are
long. Compiling takes up to seconds: nothing here waits for it but `compile` and `check`.

What a grammar may cost is counted, not timed, by llguidance itself: every machine gives the same verdict.
One whose masks take too long all the same ends its request alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loraplex.errors import InvalidRequestError, shortened
from loraplex.structured.params import StructuredOutputsParams

MAX_COMPILED = 32
MAX_VERDICTS = 128
"""Kept, so that equal ones are compiled, or judged, once."""

MAX_GROWTH_BYTES = 2**25
"""Of a process that compiles a grammar: some of 18 KB take 500 MB, and no count of llguidance's is near to it."""
NUM_COMPILE_THREADS = 2
MAX_MASK_CPU_S = 0.25
"""A mask that took longer ends its request: the next one may take as long, and others wait for it."""

TOKENS_AT_ONCE = 8
"""Of an output that a request brings, between two chances for other threads."""

MAX_GBNF_RULES = 256
"""The translation is Python's, and takes quadratic time in them: 50 ms for so many."""

MAX_STEP_CPU_S = 0.03
"""What the grammars of a step may take together, by their means: above it the costliest ends, and the next."""
MIN_TOKENS_JUDGED = 16
"""The first masks of a grammar take longer than all others."""

LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 8192,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""Of llguidance's ParserLimits: a tenth to a quarter of its own. A lexer state takes up to 2 KiB."""

MAX_REASON_CHARS = 300
_WORD_BITS = 32
_HEAD = '%llguidance {"no_forcing": true}\n'
_WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between two parts of JSON: enough to indent, and no model writes blanks without an end."""

_JSON_OPTIONS = {"lenient": False, "coerce_one_of": False}
"""A keyword that is not implemented is refused, never passed over."""

_CALL, _CLOSE = '{"name": %s, "parameters": ', '"}"'

Words = npt.NDArray[np.int32]
"""A mask: bit i of word w is token 32 w + i."""


class GrammarTokenizer(Protocol):
    """What a mask is made for: `text.Tokenizer`."""

    @property
    def special_ids(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class ByteTokens:
    """A vocabulary of bytes: enough to say whether a grammar can be compiled. A real one takes up to a second, in which
    no other thread of its process runs."""

    special_ids: Collection[int] = ()
    vocab_size = 256

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class GrammarState:
    """The grammar of one request, as far as its output has come. `is_ready` and `commit` belong to the thread that
    steps, `fill` to the one that makes masks, never at the same time.

    is_complete: nothing can follow any more. error: why no mask can be made.
    """

    def __init__(
        self, matcher: Future[Any], eos_token_ids: Sequence[int], clock: Callable[[], float] = time.thread_time
    ) -> None:
        """clock: processor seconds of the thread that asks."""
        self._future = matcher
        self._clock = clock
        self._cpu_s = 0.0
        self._num_tokens = 0
        self._eos_token_ids = tuple(eos_token_ids)
        self.is_complete = False
        self.error: InvalidRequestError | None = None

    def is_ready(self) -> bool:
        """Whether it is compiled. Raises InvalidRequestError for what cannot be."""
        return self._future.done() and self._future.result() is not None

    @property
    def cost_s(self) -> float:
        """Processor seconds of a token, in the mean: its mask and its commit. 0 until there are enough to judge by."""
        return self._cpu_s / self._num_tokens if self._num_tokens >= MIN_TOKENS_JUDGED else 0.0

    def refuse(self) -> None:
        """It ends for what it costs."""
        self.error = _wrong("it takes too long to find the tokens that may follow: make it simpler")

    def commit(self, token_id: int) -> None:
        """The token is part of the output."""
        matcher, began_s = self._future.result(), self._clock()
        with self._guarded():
            if token_id in self._eos_token_ids and matcher.is_accepting():
                self.is_complete = True
            elif not matcher.consume_token(token_id):
                self.error = _wrong(f"a token did not fit: {matcher.get_error()}")
            else:
                self.is_complete = matcher.is_stopped()
        self._cpu_s += self._clock() - began_s
        self._num_tokens += 1

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails in the library is an error of this request: the step goes on."""
        try:
            yield
        except BaseException as error:  # a panic of its is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self.error = _wrong(f"the grammar cannot be followed: {type(error).__name__}")

    def fill(self, vocab_size: int) -> Words:
        """The mask of the next token over the base's vocabulary; all zero when there is an error. End tokens are in it
        where the output may end: the request's own, also those that an adapter added."""
        num_words = vocab_size // _WORD_BITS + 1  # with the token that stands for the end
        words = np.zeros(max(num_words, 1 + max(self._eos_token_ids, default=0) // _WORD_BITS), np.int32)
        matcher = self._future.result()
        began_s = self._clock()
        can_end = False
        if self.error is None:
            with self._guarded():
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * num_words)
                can_end = matcher.is_accepting()
                if matcher.is_error():
                    self.error = _wrong(matcher.get_error())
                elif self._clock() - began_s > MAX_MASK_CPU_S:
                    self.refuse()
        self._cpu_s += self._clock() - began_s
        if self.error is not None:
            words[:] = 0
            return words
        bits = words.view(np.uint32)
        bits[vocab_size // _WORD_BITS] &= np.uint32(~(1 << vocab_size % _WORD_BITS) & 0xFFFFFFFF)
        for token_id in self._eos_token_ids if can_end else ():
            bits[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)
        return words


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a grammar cannot be compiled. An exception that is kept would keep the frames of all that raise it."""

    message: str


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and makes masks, in threads of its own. Any thread may call it.

    open_tokenizer: the base's; called at the first use. vocab_size: the base model's: tokens behind it are in no mask,
    so what an adapter adds cannot break one.
    """

    def __init__(
        self, open_tokenizer: Callable[[], GrammarTokenizer | None], vocab_size: int, *, is_judge: bool = False
    ) -> None:
        """is_judge: it keeps verdicts and no grammars, and refuses those that take much memory."""
        self._open_tokenizer = open_tokenizer
        self._is_judge = is_judge
        self._judging = threading.Lock()  # one at a time: what the process grows by is the grammar's
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[bytes, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Any = None
        self._threads = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="grammar")
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="token-mask")
        self._pending: set[Future[Any]] = set()

    def close(self) -> None:
        for threads in (self._threads, self._mask_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------------------------------------------------- compile

    def prepare(self) -> None:
        """Read the vocabulary now, where it would stop others later; what is missing is said to the first request."""
        with suppress(InvalidRequestError):
            self._tokens()

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises InvalidRequestError with the reason why outputs cannot have this form."""
        self.compile(params)

    def compile(self, params: StructuredOutputsParams) -> Any:
        """The matcher at its beginning; not to be changed. Equal ones are compiled once, by the first that asks."""
        with self._lock:
            known, mine = self._compiled.get(params.digest), Future[Any]()
            if known is None:
                self._compiled[params.digest] = mine
                if len(self._compiled) > (MAX_VERDICTS if self._is_judge else MAX_COMPILED):
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(params.digest)
        if known is None:
            mine.set_result(self._outcome(params))
        outcome = (known or mine).result()
        if isinstance(outcome, _Refusal):
            raise InvalidRequestError(outcome.message, param="structured_outputs")
        return outcome

    def _outcome(self, params: StructuredOutputsParams) -> Any:
        """A matcher or a `_Refusal`; of a judge, None or a `_Refusal`."""
        try:
            return self._judge(params) if self._is_judge else self._compile(params)
        except InvalidRequestError as error:
            return _Refusal(error.message)
        except BaseException as error:  # a panic of the library's is no Exception; those of the process are no verdict
            with self._lock:
                self._compiled.pop(params.digest, None)
            return _Refusal(_wrong(f"the grammar cannot be compiled: {type(error).__name__}").message)

    def _judge(self, params: StructuredOutputsParams) -> None:
        """What the process does beside it may take memory, too: what seems too large is looked at twice."""
        with self._judging:
            for _ in range(2):
                before = _resident_bytes()
                matcher = self._compile(params)
                grown = _resident_bytes() - before
                del matcher
                if grown <= MAX_GROWTH_BYTES:
                    return
                _give_back()
                if grown > 4 * MAX_GROWTH_BYTES:
                    break
            most = MAX_GROWTH_BYTES >> 20
            raise _wrong(f"it takes {grown >> 20} MiB of memory, and at most {most} are given: make it simpler")

    def _compile(self, params: StructuredOutputsParams) -> Any:
        llguidance = _llguidance()
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._tokens(), _lark(params, llguidance), log_level=0, limits=limits)
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        matcher.compute_bitmask()  # the first one builds most of the lexer: one that cannot be is refused in time
        if matcher.is_error():
            raise _wrong(matcher.get_error())
        return matcher

    def _tokens(self) -> Any:
        """llguidance's view of the vocabulary."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                tokenizer = self._open_tokenizer()
                if tokenizer is None:
                    raise InvalidRequestError(
                        "structured_outputs: this model has no tokenizer, so no form of a text can be asked",
                        param="structured_outputs",
                    )
                self._vocabulary = _tokens_of(tokenizer, self.vocab_size)
            return self._vocabulary

    def start(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()
    ) -> GrammarState:
        """Of a request, which may have some output already. It is ready when a thread has compiled it."""
        future = self._threads.submit(self._advanced, params, tuple(output_token_ids))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return GrammarState(future, eos_token_ids)

    def _advanced(self, params: StructuredOutputsParams, output_token_ids: tuple[int, ...]) -> Any:
        try:
            matcher = self.compile(params).deep_copy()
            for begin in range(0, len(output_token_ids), TOKENS_AT_ONCE):
                if not matcher.consume_tokens(list(output_token_ids[begin : begin + TOKENS_AT_ONCE])):
                    raise _wrong(f"the output so far did not fit: {matcher.get_error()}")
                time.sleep(0)  # the library keeps the interpreter's lock
        except InvalidRequestError:
            raise
        except BaseException as error:  # a panic of the library's is no Exception
            raise _wrong(f"the grammar cannot be followed: {type(error).__name__}") from None
        return matcher

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._pending)

    def wait(self, timeout_s: float) -> None:
        """Until one more is compiled, at most so long."""
        wait(set(self._pending), timeout_s, FIRST_COMPLETED)

    # ------------------------------------------------------------------------------------------------------------ masks

    def begin_masks(self, states: Sequence[GrammarState | None]) -> Future[list[Words | None]]:
        """A mask for each request that has a grammar."""
        return self._mask_thread.submit(self._masks, states)

    def _masks(self, states: Sequence[GrammarState | None]) -> list[Words | None]:
        masks = [None if each is None else each.fill(self.vocab_size) for each in states]
        costly = sorted((each for each in states if each is not None), key=lambda each: each.cost_s, reverse=True)
        step_s = sum(each.cost_s for each in costly)
        for state in costly:
            if step_s <= MAX_STEP_CPU_S:
                break
            state.refuse()
            step_s -= state.cost_s
        return masks


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


def _llguidance() -> Any:
    """It takes long to import: not before a request needs it."""
    try:
        return import_module("llguidance")
    except ImportError as error:
        text = f"structured_outputs needs llguidance, which cannot be imported ({error}): pip install llguidance"
        raise InvalidRequestError(text, param="structured_outputs") from error


def _lark(params: StructuredOutputsParams, llguidance: Any) -> str:
    match params.kind:
        case "json" | "json_object":
            schema = json.loads(str(params.json)) if params.kind == "json" else {"type": "object"}
            return f"{_HEAD}start: {_json_of(schema, params.disable_any_whitespace)}"
        case "calls":
            schemas = json.loads(str(params.calls))
            calls = [
                f"{json.dumps(_CALL % json.dumps(name))} {_json_of(schema, params.disable_any_whitespace)} {_CLOSE}"
                for name, schema in schemas.items()
            ]
            rules = [f"call_{number}: {call}" for number, call in enumerate(calls)]
            any_call = " | ".join(f"call_{number}" for number in range(len(calls)))
            more = "" if params.is_one_call else '(", " call)*'
            return "\n".join((f'{_HEAD}start: "[" call {more} "]"', f"call: {any_call}", *rules))
        case "regex":
            return f"{_HEAD}start: /{llguidance.regex_to_lark(params.regex, '')}/"
        case "choice":
            return f"{_HEAD}start: {' | '.join(map(json.dumps, params.choice or ()))}"
        case _:
            return _HEAD + _own_grammar(str(params.grammar))


def _json_of(schema: dict[str, Any], is_compact: bool) -> str:
    if "x-guidance" in schema:
        raise _wrong("x-guidance is no keyword of JSON Schema: remove it")
    spaces = {"whitespace_flexible": False} if is_compact else {"whitespace_pattern": _WHITESPACE}
    return f"%json {json.dumps({**schema, 'x-guidance': {**_JSON_OPTIONS, **spaces}})}"


def _own_grammar(text: str) -> str:
    """Lark's notation as it is, GBNF translated. What would undo a bound here is refused."""
    for word in ("%llguidance", "%json", "%regex", "<["):
        if word in text:
            raise _wrong(f"{word} cannot be in a grammar of a request: leave it out")
    num_rules = text.count("::=")
    if not num_rules or any(line.replace(" ", "").startswith("start:") for line in text.split("\n")):
        return text
    if num_rules > MAX_GBNF_RULES:
        raise _wrong(
            f"a GBNF grammar has at most {MAX_GBNF_RULES} rules, this has {num_rules}; write it in Lark's form"
        )
    try:
        translated: str = import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text)
    except RecursionError:
        raise _wrong("the grammar is nested too deeply") from None
    except Exception as error:  # it raises plain Exception, too
        raise _wrong(str(error)) from error
    return translated.removeprefix("%llguidance {}")


def _tokens_of(tokenizer: GrammarTokenizer, vocab_size: int) -> Any:
    """Of every token its bytes as the detokenizer writes them; special tokens and those without text are in no mask.

    One more than the model has stands for the end of a text: which tokens end a request is the request's own.
    """
    llguidance = _llguidance()
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = {token_id for token_id, data in enumerate(tokens) if not data}
    special |= {token_id for token_id in tokenizer.special_ids if token_id < vocab_size}
    for token_id in special:
        tokens[token_id] = b"<|%d|>" % token_id

    class View:
        eos_token_id = vocab_size
        bos_token_id = None
        special_token_ids = (*sorted(special), vocab_size)

        def __init__(self) -> None:
            self.tokens = [*tokens, b"<|end of text|>"]

        def __call__(self, text: bytes) -> list[int]:
            return []  # for forced texts, of which there are none

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(View()))


def _wrong(reason: str) -> InvalidRequestError:
    """The first line says what, the last may say why; between them are lines of the grammar."""
    lines = reason.replace("<non-verbose/>", "").strip().splitlines() or [""]
    if lines[0].startswith("NoExtension"):
        lines = ["no text of this vocabulary fits the grammar"]
    why = next((line for line in lines[1:] if line.startswith("error: ")), "")
    reason = " ".join((re.sub(r"^at \d+\(\d+\): ", "", lines[0]), why)).strip()
    reason = re.sub(r"[^\s\"]{41,}", lambda found: shortened(found[0]), reason)  # words of the request
    reason = shortened(reason, MAX_REASON_CHARS)
    return InvalidRequestError(f"structured_outputs: {reason}", param="structured_outputs")
