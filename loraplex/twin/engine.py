"""The real engine over virtual steps, loads and memory: its scheduler, its KV blocks, the residency and eviction of its
adapters, its care. What runs is `EngineCore`; nothing of its rules is written here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.adapters.weights import LoRAModel
from loraplex.config import EngineConfig
from loraplex.core import AdapterSpec, EngineInfo, Request, SamplingParams, TokenOutput
from loraplex.engine.engine import EngineCore
from loraplex.engine.maintenance import make_caretaker
from loraplex.engine.memory_plan import chunk_size
from loraplex.engine.scheduler import Scheduler
from loraplex.errors import ConfigError, LoraplexError
from loraplex.events import EventLog
from loraplex.kernels.ops import get_backend
from loraplex.kvcache.allocator import KVBlockAllocator
from loraplex.memory.manager import LoRAModelManager
from loraplex.memory.space.arena import Arena
from loraplex.performance.profiler import Profiler
from loraplex.twin.calibration import Calibration
from loraplex.twin.settings import TwinSettings
from loraplex.twin.step_model import Disturbances
from loraplex.twin.virtual import TARGET, VirtualClock, VirtualCopies, VirtualLoader, VirtualReader, VirtualRunner

VOCAB_SIZE = 1 << 20


class NoWeights:
    """packing.BaseWeights of a model that is not there."""

    weights_name = "twin"

    def base_bias(self, module_name: str) -> torch.Tensor | None:
        return None

    def row_norms(self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
        raise LoraplexError("a twin has no weights")

    def base_rows(self, module_name: str, token_ids: torch.Tensor) -> torch.Tensor | None:
        return None


@dataclass(frozen=True, slots=True)
class TwinEngine:
    """An engine with the virtual parts that a simulation turns."""

    core: EngineCore
    clock: VirtualClock
    loader: VirtualLoader
    runner: VirtualRunner
    scheduler: Scheduler
    blocks: KVBlockAllocator

    @classmethod
    def build(
        cls, calibration: Calibration, settings: TwinSettings, rank_of: Mapping[int, int], seed: int
    ) -> TwinEngine:
        """rank_of: of each adapter id; they are unknown to the engine until `register`. seed: of disturbed steps."""
        config = settings.engine_config(calibration.model, calibration.block_size)
        assert config.lora is not None
        clock = VirtualClock()
        reader = VirtualReader(calibration, clock, config.lora.disk_memory_bytes)
        loader = reader.loader = VirtualLoader(clock, config.lora.num_loader_threads, reader.seconds_of)
        copies = None if calibration.has_one_memory else VirtualCopies(clock, calibration.copy)
        events = EventLog()
        manager = _manager(config, calibration, clock, loader, reader, copies, events)
        blocks = _blocks(config, calibration)
        scheduler = Scheduler(
            blocks,
            manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=calibration.max_model_len,
            aging_steps=config.lora.aging_steps,
            clock=clock,
        )
        manager.on_digest_dropped = scheduler.forget_kv
        model, block_bytes = calibration.step_model(), calibration.block_bytes
        disturbances = Disturbances(calibration.step_ratios, seed)
        runner = VirtualRunner(model, disturbances, clock, rank_of, manager.prepare_step, copies, block_bytes)
        caretaker = make_caretaker(
            config, manager, scheduler, blocks, runner, events, VOCAB_SIZE, clock=clock, pressure=lambda: None
        )
        core = EngineCore(
            _info(config, calibration, blocks),
            scheduler,
            runner,
            blocks,
            manager,
            config.max_waiting_requests,
            Profiler(),
            events,
            caretaker,
            look_ahead=calibration.look_ahead,
        )
        return cls(core, clock, loader, runner, scheduler, blocks)

    @property
    def num_kv_blocks(self) -> int:
        return self.blocks.num_blocks

    def register(self, spec: AdapterSpec, is_loaded: bool) -> None:
        """Make an adapter known, in host memory if `is_loaded`."""
        if is_loaded:
            self.core.adapters.add_adapter(spec)
        else:
            self.core.adapters.attach_adapters([spec])

    def step(self) -> list[TokenOutput]:
        """What is due now, then a step; the clock stands where its result is there."""
        self.loader.run_until(self.clock.now_s)
        return self.core.step()


def spec_of(adapter_id: int, rank: int, nbytes: int) -> AdapterSpec:
    return AdapterSpec(adapter_id, f"a{adapter_id}", 1, f"twin-{adapter_id}", "", nbytes, rank)


def request_of(
    request_id: str, prompt: tuple[int, ...], num_output_tokens: int, adapter_id: int | None, arrival_s: float
) -> Request:
    """Greedy, for so many tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    digest = "" if adapter_id is None else f"twin-{adapter_id}"
    return Request(
        request_id,
        prompt,
        params,
        num_output_tokens,
        0,
        adapter_id=adapter_id,
        adapter_digest=digest,
        arrival_s=arrival_s,
    )


def _manager(
    config: EngineConfig,
    calibration: Calibration,
    clock: VirtualClock,
    loader: VirtualLoader,
    reader: VirtualReader,
    copies: VirtualCopies | None,
    events: EventLog,
) -> LoRAModelManager:
    """Arenas are of torch's device `meta`: they have addresses and no memory."""
    lora = config.lora
    assert lora is not None
    has_one_memory = calibration.has_one_memory
    whole = max(lora.host_memory_bytes, lora.adapter_memory_bytes) if has_one_memory else lora.adapter_memory_bytes
    arena = Arena(whole, chunk_size(whole, not has_one_memory), "meta")
    host_arena = None if has_one_memory else Arena(lora.host_memory_bytes, arena.chunk_bytes, "meta")
    return LoRAModelManager(
        lora,
        [TARGET],
        get_backend("reference", torch.device("cpu")),
        torch.float32,
        arena,
        open_weights=_no_source,
        base=NoWeights(),
        clock=clock,
        host_arena=host_arena,
        copies=copies,
        loader=loader,
        events=events,
        make_reader=lambda *_: reader,
    )


def _no_source(spec: AdapterSpec) -> LoRAModel:
    raise LoraplexError(f"adapter {spec.adapter_name!r} of a twin has no file")


def _blocks(config: EngineConfig, calibration: Calibration) -> KVBlockAllocator:
    """As many as the KV cache's bytes hold, and no more than all requests of a batch can use."""
    most = config.max_num_seqs * -(-calibration.max_model_len // config.block_size)
    num_blocks = min(most, config.kv_cache_memory_bytes // calibration.block_bytes)
    if num_blocks * config.block_size < calibration.max_model_len:
        raise ConfigError(
            f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} hold {num_blocks * config.block_size} tokens, and a "
            f"request may have {calibration.max_model_len}; raise it, or calibrate with a lower --max-model-len"
        )
    return KVBlockAllocator(num_blocks, config.block_size, is_prefix_caching=config.enable_prefix_caching)


def _info(config: EngineConfig, calibration: Calibration, blocks: KVBlockAllocator) -> EngineInfo:
    assert config.lora is not None
    return EngineInfo(
        model_path=calibration.model,
        architecture="twin",
        dtype=calibration.dtype,
        backend=calibration.backend,
        vocab_size=VOCAB_SIZE,
        max_model_len=calibration.max_model_len,
        num_kv_blocks=blocks.num_blocks,
        block_size=config.block_size,
        adapter_memory_bytes=config.lora.adapter_memory_bytes,
        targets=(TARGET,),
        kv_cache_dtype=calibration.dtype,
    )
