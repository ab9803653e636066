"""The engine as the server sees it: `engine.AsyncEngine` and `testing.FakeAsyncEngine` both have this surface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from loraplex.adapter_store import MemoryQuota
from loraplex.adapters.registry import DatabaseHealth, HeldAdapters, LoRARef, LoRARegistry
from loraplex.adapters.sources.by_need import LoadsByNeed
from loraplex.core import AdapterChoice, RequestOutput, SamplingParams
from loraplex.errors import InvalidRequestError
from loraplex.frontend.adapter_updates import AdapterUpdates
from loraplex.frontend.event_hub import EventHub
from loraplex.metrics import EngineStats, RunnerReport
from loraplex.performance.report import LoraPerformanceReport
from loraplex.performance.requests import ServiceTargets
from loraplex.sampling_params import NO_CLAIM, Claim
from loraplex.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    import sqlalchemy as sa

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerSurface(Protocol):
    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def longest_added_token(self) -> int:
        """Its characters: an adapter may add tokens of hundreds."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def template_for_tools(self) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str: ...


class TextSurface(Protocol):
    """What reads and writes the requests of the base model, or of a version of an adapter: `text.RequestText`."""

    @property
    def tokenizer(self) -> TokenizerSurface | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters of a request that does not say them."""
        ...

    @property
    def digest(self) -> str:
        """Empty unless an adapter brings something of its own."""
        ...

    @property
    def max_model_len(self) -> int | None:
        """Of an adapter with a longer context; None: `ModelInfoSurface.max_model_len`."""
        ...

    @property
    def renders_apart(self) -> bool:
        """Whether a chat is rendered in another process, for which the event loop must not wait."""
        ...


class ModelInfoSurface(Protocol):
    @property
    def served_model_name(self) -> str: ...

    @property
    def root(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def longest_len(self) -> int:
        """The longest sequence, of the base or of an adapter with a longer context."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def backend(self) -> str: ...

    @property
    def form(self) -> str:
        """The family, and how weights and KV cache are kept, in words."""
        ...


class HealthSurface(Protocol):
    @property
    def is_alive(self) -> bool: ...

    @property
    def message(self) -> str: ...

    @property
    def num_serving(self) -> int:
        """Of the runners."""
        ...

    @property
    def num_released(self) -> int:
        """Of the runners: those that the load does not need."""
        ...

    @property
    def starting(self) -> Sequence[str]:
        """Names of the runners that take no requests and are wanted."""
        ...

    @property
    def database(self) -> DatabaseHealth | None:
        """Of the names that several servers share; None: this one has names of its own."""
        ...


class EngineSurface(Protocol):
    """`registry` is None when LoRA is off. Verbs raise errors of errors.py."""

    def text_of(self, ref: LoRARef | None) -> TextSurface:
        """Of a version of an adapter; None: of the base model."""
        ...

    def known_text(self, ref: LoRARef | None) -> TextSurface | None:
        """`text_of` at once; None for what has to be made first."""
        ...

    def hold_adapters(self, choice: AdapterChoice, num_prompts: int = 1) -> HeldAdapters:
        """The adapters of a request whose prompts are yet to be encoded. Raises AdapterNotFoundError."""
        ...

    def check_known_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> bool:
        """`check_grammar` at once; False where it would take time: no client learns what others have asked for."""
        ...

    def check_grammar(self, wanted: StructuredOutputsParams, client: str = "") -> None:
        """Raises InvalidRequestError for a form that outputs cannot have. In a thread: it takes up to seconds."""
        ...

    @property
    def model_info(self) -> ModelInfoSurface: ...

    @property
    def events(self) -> EventHub: ...

    @property
    def registry(self) -> LoRARegistry | None: ...

    @property
    def updates(self) -> AdapterUpdates:
        """What makes new versions of tensors that clients send. Raises LoraDisabledError."""
        ...

    @property
    def by_need(self) -> LoadsByNeed:
        """What loads adapters that requests name. Raises LoraDisabledError."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether its processes have much to read before what is sent now."""
        ...

    @property
    def max_waiting_requests(self) -> int:
        """How many completions may wait at a time; one request's all wait before the first of them runs."""
        ...

    def health(self) -> HealthSurface: ...

    def check_can_serve(self) -> None:
        """Raises EngineDeadError or EngineShutdownError when nothing can be served now."""
        ...

    async def wait_until_given_up(self) -> None:
        """Return when the engine is gone and will not come back; the server then ends."""
        ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        model: AdapterChoice = None,
        cache_salt: str = "",
        claim: Claim = NO_CLAIM,
        held: HeldAdapters | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs. held: what `hold_adapters(model)` gave; the first look at an output takes it.

        on_output: is given each output when it comes, also those that a slow reader never sees.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request; unknown and finished ones are passed over. Its iterator ends (or RequestAbortedError)."""
        ...

    async def on_registry(
        self, verb: Callable[Concatenate[LoRARegistry, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a registry's verb in a thread: `await engine.on_registry(LoRARegistry.pin, "sql")`. Raises its errors."""
        ...

    async def stats(self) -> EngineStats:
        """Of all runners together."""
        ...

    @property
    def num_runners(self) -> int: ...

    @property
    def devices(self) -> Sequence[str]:
        """Of each runner, as torch names it."""
        ...

    async def runner_reports(self) -> Sequence[RunnerReport]:
        """Each runner: one that does not answer has no figures."""
        ...

    @property
    def is_profiling(self) -> bool: ...

    async def start_lora_profiling(self, targets: ServiceTargets | None = None) -> None: ...

    async def generate_lora_performance_report(self) -> LoraPerformanceReport: ...

    def limit_tenants(self, quotas: Mapping[str, MemoryQuota]) -> None:
        """From now on tenants have these limits in the memory of each engine process, and no others; also in processes
        that start later. Any thread may; it waits for nothing. RuntimeError after the end of the event loop."""
        ...

    def open_state(self) -> sa.Engine | None:
        """A further way into the database of the journal, for what is kept beside names; None: there is no journal."""
        ...

    async def shutdown(self) -> None: ...


class _NoTokenizer:
    """Stands in for a model that has none: prompts as token ids work, texts are refused."""

    special_ids: Collection[int] = ()
    longest_added_token = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise InvalidRequestError("this model has no tokenizer: send the prompt as token ids", param="prompt")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise InvalidRequestError("this model has no tokenizer: token ids cannot become text", param="tokens")

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def template_for_tools(self) -> str:
        return ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        raise InvalidRequestError(
            "this model has no tokenizer: chat is not possible, send token ids to /v1/completions",
            param="messages",
        )


def tokenizer_of(text: TextSurface) -> TokenizerSurface:
    return _NoTokenizer() if text.tokenizer is None else text.tokenizer
