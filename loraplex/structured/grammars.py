"""From what a request asks to the tokens that may come next, with llguidance.

    params --compile, once for equal ones--> matcher --a copy for each request--> token masks

Every grammar becomes one in Lark's notation with `no_forcing`: a mask has every token that the grammar allows, also
where only one text can follow. Forced texts would be cut by a tokenizer each time, which costs as much as they are
long. Compiling takes up to seconds: nothing here waits for it but `compile` and `check`.

What a grammar may cost is counted, not timed, by llguidance itself: every machine gives the same verdict.
One whose masks take too long all the same ends its request alone.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt

from loraplex.errors import InvalidRequestError, shortened
from loraplex.structured.params import StructuredOutputsParams
from loraplex.structured.turns import Ahead, CompileTurns, forget_one

MAX_COMPILED = 16
"""Kept, so that equal ones are compiled once. With the states that masks add, one may take 60 MB."""
MAX_MASK_CPU_S = 0.25
"""A mask that took longer ends its request: the next one may take as long, and others wait for it."""

MIN_WAIT_S, MAX_WAIT_S = 0.002, 0.01
"""Of a step for masks when its forward pass is launched, or has ended on a CPU: as long again as that took. Rows whose
mask is late sit the step out."""

QUICK_MASK_CPU_S = 0.001
"""A request whose masks have all taken less, as nearly all do, may have the next one made before the forward pass."""

TOKENS_AT_ONCE = 8
"""Of an output that a request brings, between two chances for other threads."""

MAX_GBNF_RULES = 256
"""The translation is Python's, and takes quadratic time in them: 50 ms for so many."""

LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 2000,
    "max_lexer_states": 16_384,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""Of llguidance's ParserLimits: a tenth to a quarter of its own. A lexer state takes up to 2 KiB.

Items are what ambiguous grammars are made of, and time is quadratic in those of one step: 5,000 take 10 ms, 2,000
take 3 ms. Unions of 100 objects, and 48 functions, take fewer than 2,000, ordinary schemas fewer than 50.
"""

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


class GrammarState:
    """The grammar of one request, as far as its output has come. `is_ready` and `commit` belong to the thread that
    steps, `fill` to the one that makes masks, never at the same time.

    client: whose request it is; masks are made of one client's and another's in turn. is_complete: nothing can follow
    any more. error: why no mask can be made. num_waits: how many steps went on without its mask.
    """

    def __init__(
        self,
        matcher: Future[Any],
        eos_token_ids: Sequence[int],
        client: Hashable = None,
        clock: Callable[[], float] = time.thread_time,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        """clock: processor seconds of the thread that asks. on_error: called when no mask can be made any more."""
        self.client = client
        self._on_error = on_error
        self._future = matcher
        self._clock = clock
        self._eos_token_ids = tuple(eos_token_ids)
        self._least_words = 1 + max(eos_token_ids, default=0) // _WORD_BITS
        self._words: Words | None = None
        self._slowest_s = 0.0
        self.num_waits = 0
        self.is_complete = False
        self.error: InvalidRequestError | None = None

    @property
    def is_quick(self) -> bool:
        """Whether it had masks, which took less than QUICK_MASK_CPU_S each, and none is late: the thread of the masks
        may still be making that one."""
        return 0.0 < self._slowest_s < QUICK_MASK_CPU_S and not self.num_waits

    def is_ready(self) -> bool:
        """Whether it is compiled. Raises InvalidRequestError for what cannot be."""
        return self._future.done() and self._future.result() is not None

    def cancel(self) -> None:
        """Nothing waits for it: it is not compiled, unless that has begun."""
        self._future.cancel()

    def commit(self, token_id: int) -> None:
        """The token is part of the output."""
        matcher = self._future.result().matcher
        self._words, self.num_waits = None, 0
        with self._guarded():
            if token_id in self._eos_token_ids and matcher.is_accepting():
                self.is_complete = True
            elif not matcher.consume_token(token_id):
                self.error = _wrong(f"a token did not fit: {matcher.get_error()}")
            else:
                self.is_complete = matcher.is_stopped()
        if self.error is not None:
            self._on_error()

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
        where the output may end: the request's own, also those that an adapter added. It is kept until `commit`."""
        if self._words is None:
            self._words = self._filled(vocab_size)
        return self._words

    def _filled(self, vocab_size: int) -> Words:
        num_words = vocab_size // _WORD_BITS + 1  # with the token that stands for the end
        words = np.zeros(max(num_words, self._least_words), np.int32)
        copy = self._future.result()
        matcher, copy.ahead = copy.matcher, None
        began_s = self._clock()
        can_end = False
        if self.error is None:
            with self._guarded():
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * num_words)
                can_end = matcher.is_accepting()
                took_s = self._clock() - began_s
                self._slowest_s = max(self._slowest_s, took_s)
                if matcher.is_error():
                    self.error = _wrong(matcher.get_error())
                elif took_s > MAX_MASK_CPU_S:
                    text = "it takes too long to find the tokens that may follow: make it simpler"
                    self.error = _wrong(text)
        if self.error is not None:
            self._on_error()
            words[:] = 0
            return words
        bits = words.view(np.uint32)
        bits[vocab_size // _WORD_BITS] &= np.uint32(~(1 << vocab_size % _WORD_BITS) & 0xFFFFFFFF)
        for token_id in self._eos_token_ids if can_end else ():
            bits[token_id // _WORD_BITS] |= np.uint32(1 << token_id % _WORD_BITS)
        return words


class StepMasks:
    """The masks of one step, which `make` fills in one thread while another runs the model and then takes those that
    are there. A row whose mask is late sits the step out, so no grammar holds up other rows for longer than is said.

    Where the forward pass takes all cores, a thread beside it costs more than its own time: masks that have always been
    quick are made before it (`make_quick`). It waits as long for masks as it took since they were begun, within
    MIN_WAIT_S and MAX_WAIT_S.
    One mask of each client comes before the second of any; of one client's, those that waited longest.
    """

    def __init__(self, states: Sequence[GrammarState | None], vocab_size: int) -> None:
        self._states = states
        self._vocab_size = vocab_size
        self._masks: list[Words | None] = [None] * len(states)
        self._num_rows = self._num_left = sum(state is not None for state in states)
        self._is_over = False
        self._made = threading.Condition()
        self._began_s = time.monotonic()

    def make_quick(self) -> None:
        """Those of quick requests, in this thread, until MIN_WAIT_S has passed: `make` is for what is left. One that
        takes longer than it ever did holds the step up once: its request is not quick any more."""
        ends_s = self._began_s + MIN_WAIT_S
        for row, state in self._turns():
            if state.is_quick and time.monotonic() < ends_s:
                self._make(row, state)

    @property
    def are_made(self) -> bool:
        return not self._num_left

    def make(self) -> None:
        for row, state in self._turns():
            if self._is_over:
                return
            if self._masks[row] is None:
                self._make(row, state)

    def _make(self, row: int, state: GrammarState) -> None:
        try:
            words = state.fill(self._vocab_size)
        except Exception as error:  # no memory, say
            state.error, words = _wrong(f"its mask cannot be made: {type(error).__name__}"), np.zeros(0, np.int32)
        with self._made:
            self._masks[row] = words
            self._num_left -= 1
            self._made.notify()

    def _turns(self) -> list[tuple[int, GrammarState]]:
        rows = [(state, row) for row, state in enumerate(self._states) if state is not None]
        turn_of: dict[tuple[int, GrammarState], int] = {}
        num_of: Counter[Hashable] = Counter()
        for state, row in sorted(rows, key=lambda each: -each[0].num_waits):
            turn_of[row, state] = num_of[state.client]
            num_of[state.client] += 1
        return sorted(turn_of, key=turn_of.__getitem__)

    def take(self, is_alone: bool) -> list[Words | None]:
        """Of each row that has a grammar and whose mask is there; the others' state counts the step.

        is_alone: the step has no other rows, so it waits for one mask at least.
        """
        with self._made:
            wait_s = min(max(MIN_WAIT_S, time.monotonic() - self._began_s), MAX_WAIT_S)
            self._made.wait_for(lambda: not self._num_left, wait_s)
            if is_alone:
                self._made.wait_for(lambda: self._num_left < self._num_rows)
            self._is_over = True
            masks = list(self._masks)
        for state, mask in zip(self._states, masks, strict=True):
            if state is not None and mask is None:
                state.num_waits += 1
        return masks


@dataclass(slots=True)
class _Compiled:
    """A matcher at its beginning, and what the requests hold that wait with a copy of it."""

    matcher: Any
    ahead: Callable[[], Ahead | None] = lambda: None


@dataclass(slots=True)
class OwnMatcher:
    """A request's own. ahead: until its first mask."""

    matcher: Any
    ahead: Ahead | None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a grammar cannot be compiled. An exception that is kept would keep the frames of all that raise it."""

    message: str


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and makes masks, in threads of its own. Any thread may call it.

    open_tokenizer: the base's; called at the first use. vocab_size: the base model's: tokens behind it are in no mask,
    so what an adapter adds cannot break one.
    """

    def __init__(self, open_tokenizer: Callable[[], GrammarTokenizer | None], vocab_size: int) -> None:
        self._open_tokenizer = open_tokenizer
        self.vocab_size = vocab_size
        self.turns = CompileTurns()
        self._compiled: OrderedDict[tuple[Hashable, bytes], Future[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Any = None
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="token-mask")

    def close(self) -> None:
        self.turns.close()
        self._mask_thread.shutdown(wait=False, cancel_futures=True)

    # ---------------------------------------------------------------------------------------------------------- compile

    def prepare(self) -> None:
        """Read the vocabulary now, where it would stop others later; what is missing is said to the first request."""
        with suppress(InvalidRequestError):
            self._tokens()

    def check_known(self, params: StructuredOutputsParams, client: str = "") -> bool:
        """`check` at once; False where it is not compiled."""
        known = self._compiled.get((client, params.digest))
        if known is None or not known.done():
            return False
        self.check(params, client)
        return True

    def check(self, params: StructuredOutputsParams, client: str = "") -> None:
        """Raises InvalidRequestError with the reason why outputs cannot have this form."""
        self.compile(params, client)

    def compile(self, params: StructuredOutputsParams, client: Hashable = "") -> Any:
        """The matcher at its beginning; not to be changed. Equal ones of a client are compiled once, by the first that
        asks. Copies share an automaton that grows with what they match, up to a limit, so two clients share none."""
        return self._compile(params, client).matcher

    def _compile(self, params: StructuredOutputsParams, client: Hashable) -> _Compiled:
        key = client, params.digest
        with self._lock:
            known, mine = self._compiled.get(key), Future[Any]()
            if known is None:
                self._compiled[key] = mine
                forget_one(self._compiled, MAX_COMPILED)
            else:
                self._compiled.move_to_end(key)
        if known is None:
            mine.set_result(self._outcome(params, key))
        outcome = (known or mine).result()
        if isinstance(outcome, _Refusal):
            raise InvalidRequestError(outcome.message, param="structured_outputs")
        compiled: _Compiled = outcome
        return compiled

    def _is_ahead(self, key: tuple[Hashable, bytes]) -> bool:
        """Whether a request that waits holds it already."""
        known = self._compiled.get(key)
        outcome = known.result() if known is not None and known.done() else None
        return isinstance(outcome, _Refusal) or (isinstance(outcome, _Compiled) and outcome.ahead() is not None)

    def _forget(self, key: tuple[Hashable, bytes]) -> None:
        """What could not go on may be full: the next request has it compiled once more."""
        with self._lock:
            self._compiled.pop(key, None)

    def _outcome(self, params: StructuredOutputsParams, key: tuple[Hashable, bytes]) -> Any:
        """`_Compiled` or a `_Refusal`."""
        try:
            return _Compiled(compile_grammar(params, self._tokens()))
        except InvalidRequestError as error:
            return _Refusal(error.message)
        except BaseException as error:  # a panic of the library's is no Exception; those of the process are no verdict
            self._forget(key)
            return _Refusal(_wrong(f"the grammar cannot be compiled: {type(error).__name__}").message)

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
                self._vocabulary = tokens_of(tokenizer, self.vocab_size)
            return self._vocabulary

    def start(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        client: Hashable = None,
    ) -> GrammarState:
        """Of a client's request, which may have some output already. It is ready when a thread has compiled it."""
        key = client, params.digest
        work = partial(self._advanced, params, tuple(output_token_ids), client)
        future = self.turns.add(client, partial(self._is_ahead, key), work)
        return GrammarState(future, eos_token_ids, client, on_error=partial(self._forget, key))

    def _advanced(self, params: StructuredOutputsParams, output_token_ids: tuple[int, ...], client: Hashable) -> Any:
        try:
            compiled = self._compile(params, client)
            ahead = self._noted(compiled, client)
            matcher = compiled.matcher.deep_copy()
            for begin in range(0, len(output_token_ids), TOKENS_AT_ONCE):
                if not matcher.consume_tokens(list(output_token_ids[begin : begin + TOKENS_AT_ONCE])):
                    raise _wrong(f"the output so far did not fit: {matcher.get_error()}")
                time.sleep(0)  # the library keeps the interpreter's lock
        except InvalidRequestError:
            raise
        except BaseException as error:  # a panic of the library's is no Exception
            raise _wrong(f"the grammar cannot be followed: {type(error).__name__}") from None
        return OwnMatcher(matcher, ahead)

    def _noted(self, compiled: _Compiled, client: Hashable) -> Ahead:
        """One for all requests of a grammar that wait at a time."""
        with self._lock:
            ahead = compiled.ahead() or Ahead()
            compiled.ahead = ref(ahead)
        self.turns.note(client, ahead)
        return ahead

    # ------------------------------------------------------------------------------------------------------------ masks

    def begin_masks(self, states: Sequence[GrammarState | None], *, is_core_free: bool = True) -> StepMasks:
        """Of each request of a step that has a grammar. is_core_free: the forward pass leaves one to the threads."""
        masks = StepMasks(states, self.vocab_size)
        if not is_core_free:
            masks.make_quick()
        if not masks.are_made:
            self._mask_thread.submit(masks.make)
        return masks


def compile_grammar(params: StructuredOutputsParams, tokens: Any) -> Any:
    """A matcher at its beginning. Raises InvalidRequestError; a panic of the library's is no Exception."""
    llguidance = _llguidance()
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(tokens, _lark(params, llguidance), log_level=0, limits=limits)
    if matcher.is_error():
        raise _wrong(matcher.get_error())
    matcher.compute_bitmask()  # the first one builds most of the lexer: one that cannot be is refused in time
    if matcher.is_error():
        raise _wrong(matcher.get_error())
    return matcher


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


def tokens_of(tokenizer: GrammarTokenizer, vocab_size: int) -> Any:
    """llguidance's view of a vocabulary: of every token its bytes as the detokenizer writes them; special tokens and
    those without text are in no mask.

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
