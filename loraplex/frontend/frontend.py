"""What stands in front of an engine, in the offline `LLM` and the server alike: tokenizer, checks, adapter names."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from loraplex.adapter_store import AdapterStore
from loraplex.adapters.files import AdapterFolder
from loraplex.adapters.registry import HeldAdapters, Journal, LoRARef, LoRARegistry, OnChange, SharedJournal
from loraplex.adapters.registry.drain import ABORT_GRACE_S
from loraplex.adapters.remote.fetched import FOLDER_NAME as FETCHED
from loraplex.adapters.remote.fetched import MAX_FETCHED_BYTES, FetchedFiles
from loraplex.adapters.remote.wanted import MAX_TEXT_BYTES
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.sources.by_need import LoadsByNeed
from loraplex.adapters.sources.opener import AdapterOpener, no_text
from loraplex.adapters.sources.uploads import DEFAULT_LIMITS, UPLOAD_PREFIX, UploadLimits, UploadStore
from loraplex.adapters.sources.uploads import FOLDER_NAME as UPLOADS
from loraplex.config import MAX_LORA_RANK, EngineConfig, LoRAConfig, RegistryDatabase
from loraplex.core import AdapterChoice, AdapterMix, EngineInfo, LoRAMix, LoRARequest, MixPart, mix_digest
from loraplex.errors import ConfigError, InvalidRequestError, LoraDisabledError, shortened
from loraplex.frontend.adapter_updates import AdapterUpdates
from loraplex.models.source import read_tokenizer
from loraplex.structured.judge import FormJudge
from loraplex.structured.params import StructuredOutputsParams
from loraplex.text.adapter_text import AdapterTexts
from loraplex.text.processor import AdapterRef, InputProcessor, ModelLimits, OutputProcessor
from loraplex.text.request_text import RequestText, read_generation_defaults
from loraplex.text.tokenizer import Tokenizer, read_eos_token_ids

if TYPE_CHECKING:
    from loraplex.adapters.journal import SqliteJournal
    from loraplex.adapters.journal.postgres_journal import PostgresJournal

logger = logging.getLogger(__name__)

T = TypeVar("T")
RunLater = Callable[[Callable[[], None]], object]


class FormChecker(Protocol):
    """`FormJudge`, or the engine's `GrammarCompiler` where it is in this process."""

    def prepare(self) -> None: ...

    def check_known(self, params: StructuredOutputsParams, client: str = "") -> bool: ...

    def check(self, params: StructuredOutputsParams, client: str = "") -> None: ...

    def close(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Files of adapters that this process writes: what clients send, and what requests had fetched."""

    uploads: UploadStore
    fetched: FetchedFiles

    @classmethod
    def of(
        cls,
        state_dir: str | Path | None,
        upload_limits: UploadLimits = DEFAULT_LIMITS,
        max_fetched_bytes: int = MAX_FETCHED_BYTES,
    ) -> KeptFiles:
        """In a state directory, or (None) in temporary folders."""
        state = None if state_dir is None else Path(state_dir).resolve()
        uploads = UploadStore(None if state is None else state / UPLOADS, upload_limits)
        return cls(uploads, FetchedFiles(None if state is None else state / FETCHED, max_fetched_bytes))


@dataclass(frozen=True)
class Front:
    """`tokenizer` is None for a model without tokenizer.json; `registry`, `updates` and `by_need` when LoRA is off.

    forms: checks those of outputs. merged: what is merged into the base weights. scaling_factors: by which
    adapters may stretch the base's context."""

    served_model_name: str
    inputs: InputProcessor
    outputs: OutputProcessor
    registry: LoRARegistry | None
    updates: AdapterUpdates | None
    by_need: LoadsByNeed | None
    texts: AdapterTexts
    forms: FormChecker
    merged: str | None = None
    scaling_factors: tuple[float, ...] = ()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.text_of(None).tokenizer

    def text_of(self, ref: LoRARef | None) -> RequestText:
        """What reads and writes the requests of a version; None: of the base model."""
        return self.texts.of(None if ref is None else ref.text)

    def text_for(self, refs: Sequence[LoRARef]) -> RequestText:
        """Of a request's adapters: a mix is read and written as the base is."""
        return self.text_of(refs[0] if len(refs) == 1 else None)

    def registry_or_refuse(self) -> LoRARegistry:
        if self.merged is not None:
            text = f"merge_adapter {self.merged!r} is merged into the base weights, and no other adapter is served"
            raise LoraDisabledError(f"{text}: send requests without an adapter, or start without merge_adapter")
        if self.registry is None:
            raise LoraDisabledError("LoRA is off here: start with enable_lora (the default) to use adapters")
        return self.registry

    def updates_or_refuse(self) -> AdapterUpdates:
        self.registry_or_refuse()
        assert self.updates is not None
        return self.updates

    def by_need_or_refuse(self) -> LoadsByNeed:
        self.registry_or_refuse()
        assert self.by_need is not None
        return self.by_need

    def resume(self, journal: SqliteJournal | PostgresJournal) -> None:
        """Take over what a journal has; uploads that it does not name are removed."""
        if self.registry is not None and self.updates is not None:
            self.registry.resume(journal.names, journal.last_adapter_id)
            self.updates.uploads.sweep({spec.path: spec.tenant for spec in self.registry.specs()})

    def close(self) -> None:
        self.texts.close()
        self.forms.close()
        for each in (self.updates, self.by_need):
            if each is not None:
                each.close()

    def acquire(self, choice: AdapterChoice) -> tuple[LoRARef, ...]:
        """A reference to each adapter of a request, in its order, or to none; () for the base model.

        Raises InvalidRequestError for a mix in which two names mean one adapter, and for an adapter whose context was
        allowed when it was loaded, before a restart, and is not now.
        """
        return self._refs(choice, lambda registry, name: registry.acquire(name))

    def _refs(self, choice: AdapterChoice, refer: Callable[[LoRARegistry, str], LoRARef]) -> tuple[LoRARef, ...]:
        if choice is None:
            return ()
        registry, refs = self.registry_or_refuse(), list[LoRARef]()
        try:
            for name in [name for name, _ in choice.parts] if isinstance(choice, AdapterMix) else [choice]:
                refs.append(refer(registry, name))
            if len({ref.adapter_id for ref in refs}) < len(refs):
                raise InvalidRequestError(f"the mix {choice} has one adapter twice; add its weights up", param="model")
            for ref in refs:
                self._check_context(ref)
        except BaseException:
            self.release(refs)
            raise
        return tuple(refs)

    def _check_context(self, ref: LoRARef) -> None:
        factor = None if ref.text is None else ref.text.rope_factor
        if factor is not None and factor not in self.scaling_factors:
            raise InvalidRequestError(
                f"adapter {ref.adapter_name!r} stretches the base's positions by {factor:g}, which "
                "long_lora_scaling_factors does not allow any more: start the server with it",
                param="model",
            )

    def hold_adapters(self, choice: AdapterChoice, num_prompts: int) -> HeldAdapters:
        """The adapters of a request whose prompts are yet to be encoded; refused as by `acquire`."""
        return HeldAdapters(self.registry, self._refs(choice, lambda registry, name: registry.hold(name)), num_prompts)

    def release(self, refs: Iterable[LoRARef]) -> None:
        for ref in refs:
            self.registry_or_refuse().release(ref)

    def is_forced_out(self, adapter_ids: Iterable[int]) -> bool:
        """Whether one of the adapters of a request was unloaded by force since they were acquired."""
        return any(self.registry_or_refuse().is_forced_out(each) for each in adapter_ids)

    def source_of(self, request: LoRARequest) -> str:
        """The path of a request's adapter; what stands for it where the adapter was updated by tensors since, which a
        request does not undo unless it says `load_inplace`."""
        if self.registry is None or request.load_inplace or not self.registry.is_registered(request.lora_name):
            return request.lora_path
        loaded = self.registry.source_of(request.lora_name)
        return loaded if loaded.startswith(UPLOAD_PREFIX) else request.lora_path

    def check_lora_request(self, request: LoRARequest) -> None:
        """Raises LoraDisabledError without LoRA, InvalidRequestError when the adapter was made for another base."""
        self.registry_or_refuse()
        name = request.base_model_name
        if name is not None and name != self.served_model_name:
            raise InvalidRequestError(
                f"LoRARequest {request.lora_name!r}: base_model_name is {name!r}, this engine serves "
                f"{self.served_model_name!r}"
            )


def adapter_ref(refs: Sequence[LoRARef], choice: AdapterChoice) -> AdapterRef | None:
    """One adapter with a weight of 1 is no mix: it shares all with requests for the adapter.

    Raises InvalidRequestError for an aLoRA in a mix.
    """
    if not refs:
        return None
    first = refs[0]
    if not isinstance(choice, AdapterMix) or choice.weights == (1.0,):
        return AdapterRef(first.adapter_id, first.adapter_digest, invocation_tokens=first.invocation_tokens)
    activated = next((ref.adapter_name for ref in refs if ref.invocation_tokens), None)
    if activated is not None:
        text = "begins at its invocation (alora_invocation_tokens) and is in no mix; name it alone, with a weight of 1"
        raise InvalidRequestError(f"adapter {activated!r} {text}", param="model")
    parts = zip(refs, choice.weights, strict=True)
    mix = tuple(MixPart(ref.adapter_id, ref.adapter_digest, weight) for ref, weight in parts)
    return AdapterRef(first.adapter_id, mix_digest(mix), mix)


def lora_requests_of(lora_request: LoRARequest | LoRAMix | None) -> tuple[LoRARequest, ...]:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return () if lora_request is None else (lora_request,)
    return tuple(request for request, _ in lora_request)


def choice_of(lora_request: LoRARequest | LoRAMix | None) -> AdapterChoice:
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return None if lora_request is None else lora_request.lora_name
    return AdapterMix(tuple((request.lora_name, weight) for request, weight in lora_request))


def make_front(
    config: EngineConfig,
    info: EngineInfo,
    store: AdapterStore | None,
    run_later: RunLater,
    *,
    served_model_name: str,
    base_names: Iterable[str] = (),
    journal: Journal | SharedJournal | None = None,
    on_change: OnChange = lambda kind, name, text, details: None,
    abort_grace_s: float = ABORT_GRACE_S,
    forms: FormChecker | None = None,
    files: KeptFiles | None = None,
) -> Front:
    """Put a front before a started engine; `store` is None when LoRA is off. Roots in the config have no links.

    journal, on_change, abort_grace_s: as in `LoRARegistry`. forms: the engine's compiler, where it is in this process.
    files: where what clients send and what requests have fetched is kept (None: in temporary folders).
    """
    texts = _texts(config, info)
    base, registry, updates, by_need = texts.of(None), None, None, None
    if config.lora is not None and store is not None:
        opener, names = _opener(config, config.lora, store, texts), {served_model_name, *base_names}
        files = files or KeptFiles.of(None)
        updates = AdapterUpdates(files.uploads, opener)
        by_need = loads = LoadsByNeed(files.fetched, opener)
        registry = LoRARegistry(
            store,
            opener.open,
            config.lora.max_loaded_loras,
            names,
            run_later=run_later,
            max_versions_kept=config.lora.max_versions_kept,
            max_lora_rank=config.lora.max_lora_rank or MAX_LORA_RANK,
            journal=journal,
            on_change=on_change,
            abort_grace_s=abort_grace_s,
            on_unused=updates.uploads.remove,
            locate=lambda record, may_fetch: loads.locate(registry, record, may_fetch),
        )
    return Front(
        served_model_name,
        InputProcessor(base.tokenizer, ModelLimits(info.vocab_size, info.max_model_len), base.eos_token_ids),
        OutputProcessor(base.tokenizer),
        registry,
        updates,
        by_need,
        texts,
        forms or FormJudge(),
        config.merge_adapter,
        () if config.lora is None else config.lora.long_lora_scaling_factors,
    )


def open_journal(
    config: EngineConfig, state_dir: str | Path | None, database: RegistryDatabase | None
) -> SqliteJournal | PostgresJournal | None:
    """Where names outlive the process; None: nowhere. Raises ConfigError."""
    if state_dir is None and database is None:
        return None
    what = "a state directory" if database is None else "a database"
    if config.lora is None:
        raise ConfigError(f"{what} is given, but LoRA is off: leave it out, or leave out --no-enable-lora")
    if database is not None:  # both bring in sqlalchemy: a third of a second
        from loraplex.adapters.journal.postgres_journal import PostgresJournal

        return PostgresJournal(database.url, config.model, database.patience_s)
    from loraplex.adapters.journal import SqliteJournal

    return SqliteJournal(str(state_dir), config.model)


def _opener(config: EngineConfig, lora: LoRAConfig, store: AdapterStore, texts: AdapterTexts) -> AdapterOpener:
    source = AdapterSource(config.root_paths, max_object_bytes=_max_object_bytes(lora))
    return AdapterOpener(source, store.open_adapter, texts.read if lora.adapter_text else no_text)


def _texts(config: EngineConfig, info: EngineInfo) -> AdapterTexts:
    directory, has_defaults = config.tokenizer or info.model_path, config.generation_config == "auto"
    texts = texts_beside(info.model_path, info.vocab_size, directory, has_defaults)
    if config.merge_adapter is not None:
        folder = AdapterSource().fetch(config.merge_adapter)
        texts.take_for_base(AdapterFolder(folder, shortened(config.merge_adapter)))
    return texts


def _max_object_bytes(lora: LoRAConfig) -> int:
    """A file of float64 is four times as long as what bfloat16 of it takes in memory; texts have room beside it."""
    return 4 * max(lora.adapter_memory_bytes, lora.host_memory_bytes) + MAX_TEXT_BYTES


def texts_beside(model: str | Path, vocab_size: int, tokenizer: str | Path, has_defaults: bool = True) -> AdapterTexts:
    """What reads the text of adapters beside a base model's; the directories of both."""
    defaults = read_generation_defaults(model) if has_defaults else {}
    opened, eos_token_ids = open_tokenizer(tokenizer)
    return AdapterTexts(RequestText(opened, vocab_size, eos_token_ids, defaults), tokenizer, has_defaults)


def open_tokenizer(path: str | Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of a model directory or GGUF file and its end tokens. Without any, prompts must be token ids."""
    tokenizer = read_tokenizer(Path(path))
    if tokenizer is None:
        logger.warning("%s has no tokenizer.json: prompts must be token ids and outputs are token ids", path)
        return None, read_eos_token_ids(path)
    return tokenizer, tuple(tokenizer.eos_token_ids)


async def in_daemon_thread(name: str, fetch: Callable[[], T]) -> T:
    """No executor's thread: the hub's library cannot be cancelled, and a signal must not wait for it."""
    fetched: Future[T] = Future()

    def run() -> None:
        try:
            fetched.set_result(fetch())
        except Exception as error:
            fetched.set_exception(error)

    fetched.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(fetched)
