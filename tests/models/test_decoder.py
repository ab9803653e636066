"""Each family against transformers: logits over the paged cache, in every way that a scheduler cuts the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.core import Shard, ShardKind
from loraplex.errors import ModelConfigError
from loraplex.kernels.ops import get_backend
from loraplex.kernels.plan import LoraPlan, LoraSegment, SlotTable
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from tests.fixtures import VOCAB_SIZE, ModelZoo
from tests.models.adapter_files import pack_adapter
from tests.models.paged_runner import CPU, PagedRunner, load_decoder

BACKENDS = ("torch", "reference", "native")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,  # so that all three bands exist in 16 dimensions
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
    },
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-one-layer": ("llama", {"num_hidden_layers": 1}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral-window": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen2-window": ("qwen2", QWEN_WINDOW),
    "qwen2-layer-types": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3-window": ("qwen3", QWEN_WINDOW),
    "cohere2": ("cohere2", {}),
    "cohere2-biases": ("cohere2", {"attention_bias": True, "logit_scale": 0.3}),
    "gemma2": ("gemma2", {}),
    "gemma2-low-caps": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True, "hidden_activation": "gelu"}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-linear-rope": ("gemma3_text", {"rope_parameters": GEMMA3_ROPE}),
    "glm4": ("glm4", {}),
    "glm4-no-bias": ("glm4", {"attention_bias": False}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", LONGROPE),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "smollm3": ("smollm3", {}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "no_rope_layers": [0, 1]}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, "sliding_window": 20, "hidden_act": "gelu"}),
}


def make_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= tolerance * want.abs().max()


def run_in_chunks(runner: PagedRunner, name: str, tokens: list[int], sizes: list[int]) -> Tensor:
    """Logits of the whole sequence, fed in chunks of the given sizes and then one by one."""
    sizes = [*sizes, *[1] * (len(tokens) - sum(sizes))]
    parts, start = [], 0
    for size in sizes:
        parts += runner.step([(name, tokens[start : start + size])])
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_transformers(zoo: ModelZoo, model: str, backend: str) -> None:
    """Full prefill, chunked prefill, decode, and all of them in one batch."""
    family, options = MODELS[model]
    base = zoo.base(family, options=options)
    decoder = load_decoder(base, backend=backend)
    tokens = {"a": make_tokens(45, 1), "b": make_tokens(37, 2), "c": make_tokens(30, 3)}
    want = {name: zoo.oracle(base).logits(t) for name, t in tokens.items()}

    def runner_of(decoder: Decoder) -> PagedRunner:
        return PagedRunner(decoder, block_size=16 if backend == "native" else 8)

    assert_close(runner_of(decoder).step([("a", tokens["a"])])[0], want["a"])
    assert_close(run_in_chunks(runner_of(decoder), "a", tokens["a"], [7, 16, 1, 9]), want["a"])
    assert_close(run_in_chunks(runner_of(decoder), "b", tokens["b"], [20]), want["b"])

    assert not decoder.kernel_fallbacks or decoder.config.head_dim % 16
    runner = PagedRunner(decoder, block_size=16)
    cuts = {"a": [0, 20, 21, 44, 45], "b": [0, 0, 30, 31, 37], "c": [0, 1, 2, 29, 30]}
    for i in range(4):
        parts = [(n, t[cuts[n][i] : cuts[n][i + 1]]) for n, t in tokens.items() if cuts[n][i] < cuts[n][i + 1]]
        for (name, _), got in zip(parts, runner.step(parts), strict=True):
            assert_close(got, want[name][cuts[name][i] : cuts[name][i + 1]])


def test_freed_blocks_leave_nothing_behind(zoo: ModelZoo) -> None:
    base = zoo.base("mistral")
    runner = PagedRunner(load_decoder(base), num_blocks=8)
    for seed in range(4):
        tokens = make_tokens(50, seed)
        assert_close(run_in_chunks(runner, "x", tokens, [30]), zoo.oracle(base).logits(tokens))
        runner.free("x")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("family", ["glm4", "granite", "llama", "qwen3"])
def test_half_precision(zoo: ModelZoo, family: str, dtype: torch.dtype, tolerance: float) -> None:
    """16-bit weights and arithmetic against float32 arithmetic on the same weights (as rounded in the checkpoint)."""
    base = zoo.base(family, dtype=str(dtype).removeprefix("torch."))
    decoder = load_decoder(base, dtype=dtype)
    tokens = make_tokens(40, 1)
    got = run_in_chunks(PagedRunner(decoder), "a", tokens, [33])
    assert got.dtype == torch.float32
    # relative to the largest logit; the tolerance of one kernel, times the rounding of 2 layers of them
    assert_close(got, zoo.oracle(base).logits(tokens), 2 * tolerance)


def test_greedy_tokens_equal_transformers(zoo: ModelZoo) -> None:
    base = zoo.base("qwen3")
    case = zoo.fit_case(base)
    runner, output = PagedRunner(load_decoder(base)), list[int]()
    step = list(case.prompt_token_ids)
    for _ in case.output_token_ids:
        output.append(int(runner.step([("a", step)])[0][-1].argmax()))
        step = output[-1:]
    assert tuple(output) == case.output_token_ids


# ------------------------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_adapters_in_one_batch_equal_merged_models(zoo: ModelZoo, family: str, backend: str) -> None:
    """Base rows and rows of two adapters (all linears; q and down only, rsLoRA) in one batch, prefill then decode."""
    from peft import LoraConfig

    base = zoo.base(family)
    configs = [
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        LoraConfig(r=5, lora_alpha=3, target_modules=["q_proj", "down_proj"], use_rslora=True, task_type="CAUSAL_LM"),
    ]
    adapters = [zoo.adapter(base, config, seed=i) for i, config in enumerate(configs)]
    decoder, kernels = load_decoder(base, backend=backend, enable_lora=True), get_backend(backend, CPU)
    table = SlotTable(decoder.lora_targets(), capacity=4, buffer=torch.full((1 << 20,), 255, dtype=torch.uint8))
    decoder.bind_lora(table, kernels)
    end = 0
    for adapter, lora_slot in zip(adapters, (2, 0), strict=True):
        end = pack_adapter(adapter, table, kernels, lora_slot, end)

    tokens = {"base": make_tokens(20, 1), "one": make_tokens(23, 2), "two": make_tokens(9, 3)}
    oracles = {"base": zoo.oracle(base), "one": zoo.oracle(base, adapters[0]), "two": zoo.oracle(base, adapters[1])}
    runner = PagedRunner(decoder)
    for start, stop in ((0, -1), (-1, None)):
        parts = [(name, t[start:stop]) for name, t in tokens.items()]
        sizes = [len(t) for _, t in parts]
        segments = [
            LoraSegment(sizes[0], sizes[0] + sizes[1], 2),
            LoraSegment(sizes[0] + sizes[1], sum(sizes), 0),
        ]
        results = runner.step(parts, LoraPlan.build(segments, sum(sizes), capacity=4))
        for (name, _), got in zip(parts, results, strict=True):
            assert_close(got, oracles[name].logits(tokens[name])[start:stop])


def test_without_adapters_lora_changes_no_bit(zoo: ModelZoo) -> None:
    base, tokens = zoo.base("qwen2"), make_tokens(20, 1)
    bare = PagedRunner(load_decoder(base)).step([("a", tokens)])[0]
    with_lora = PagedRunner(load_decoder(base, enable_lora=True))
    assert torch.equal(with_lora.step([("a", tokens)])[0], bare)
    with_lora.free("a")
    empty_plan = LoraPlan.build([], len(tokens), capacity=4)
    assert torch.equal(with_lora.step([("a", tokens)], empty_plan)[0], bare)


def test_a_bare_model_takes_no_adapters(zoo: ModelZoo) -> None:
    decoder = load_decoder(zoo.base("llama"))
    plan = LoraPlan.build([LoraSegment(0, 3, 0)], 3, capacity=1)
    with pytest.raises(AssertionError, match="has no LoRA"):
        PagedRunner(decoder).step([("a", [3, 4, 5])], plan)
    table = SlotTable(decoder.lora_targets(), capacity=1, buffer=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(ModelConfigError, match="without LoRA"):
        decoder.bind_lora(table, get_backend("torch", CPU))


# ------------------------------------------------------------------------------------------------------ what it offers


def make_decoder(family: str, **options: Any) -> Decoder:
    raw = {"model_type": family, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    sizes = {"intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 32}
    return Decoder(
        ModelConfig.from_dict({**raw, **sizes, **options}), get_backend("torch", CPU), torch.float32, CPU, True
    )


def test_lora_targets() -> None:
    targets = [t for t in make_decoder("qwen2").lora_targets() if t.is_linear]
    assert [t.name for t in targets[4:]] == [
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert [t.layer for t in targets] == [0] * 4 + [1] * 4
    assert [(t.full_in_features, t.kind) for t in targets[:4]] == [
        (16, ShardKind.QKV),
        (24, ShardKind.ROW),
        (16, ShardKind.COLUMN),
        (40, ShardKind.ROW),
    ]
    slices = {s.module_name: (s.out_offset, s.out_features, s.has_bias) for t in targets[:4] for s in t.slices}
    assert slices == {
        "model.layers.0.self_attn.q_proj": (0, 24, True),
        "model.layers.0.self_attn.k_proj": (24, 12, True),
        "model.layers.0.self_attn.v_proj": (36, 12, True),
        "model.layers.0.self_attn.o_proj": (0, 16, False),
        "model.layers.0.mlp.gate_proj": (0, 40, False),
        "model.layers.0.mlp.up_proj": (40, 40, False),
        "model.layers.0.mlp.down_proj": (0, 16, False),
    }


def test_lora_targets_beside_linears() -> None:
    targets = [t for t in make_decoder("qwen3", tie_word_embeddings=True).lora_targets() if not t.is_linear]
    assert [(t.name, t.layer) for t in targets if t.kind is ShardKind.NORM] == [
        *(
            (f"model.layers.{layer}.{name}", layer)
            for layer in range(2)
            for name in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
        ),
        ("model.norm", 2),
    ]
    embedding, head = targets[-2:]
    assert (embedding.name, embedding.layer, embedding.kind) == ("model.embed_tokens", -1, ShardKind.EMBEDDING)
    assert (embedding.full_in_features, embedding.slices[0].out_features) == (32, 16)
    assert (head.name, head.layer, head.kind, head.is_tied) == ("lm_head", 2, ShardKind.HEAD, True)
    assert (head.full_in_features, head.slices[0].out_features) == (16, 32)
    assert [t.slices[0].out_features for t in targets if "k_norm" in t.name] == [6, 6]


def test_kv_shape_is_block_major() -> None:
    assert make_decoder("llama").kv_shape(10, 16) == (10, 2, 2, 2, 16, 6)
    assert make_decoder("llama").kv_shape(10, 16, torch.int8) == (10, 2, 2, 2, 16, 10), "a scale for each token"


def test_base_bias(zoo: ModelZoo) -> None:
    base = zoo.base("qwen2")
    decoder, oracle = load_decoder(base), zoo.oracle(base)
    for module in ("q_proj", "k_proj", "v_proj"):
        want = oracle.model.get_parameter(f"model.layers.1.self_attn.{module}.bias")
        got = decoder.base_bias(f"model.layers.1.self_attn.{module}")
        assert got is not None
        assert torch.equal(got, want)
    assert decoder.base_bias("model.layers.1.self_attn.o_proj") is None
    with pytest.raises(KeyError, match="lm_head"):
        decoder.base_bias("lm_head")


def test_tensor_parallelism_is_refused() -> None:
    config = make_decoder("llama").config
    with pytest.raises(ModelConfigError, match="2 ranks"):
        Decoder(config, get_backend("torch", CPU), torch.float32, CPU, True, Shard(0, 2))


class Gate:
    """Writes down for which layers a step waits, among the LoRA deltas that it makes."""

    def __init__(self, seen: list[tuple[str, int]]) -> None:
        self._seen = seen

    def wait_for_layer(self, layer: int) -> None:
        self._seen.append(("wait", layer))

    def wait_for_all(self) -> None:
        raise AssertionError("a step that runs layer by layer waits for each")


def test_a_step_waits_for_each_layer_of_an_arriving_adapter_and_for_none_before_its_time(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(zoo.base("llama"), enable_lora=True)
    seen: list[tuple[str, int]] = []
    for layer in decoder._linears.wrapped:
        monkeypatch.setattr(
            layer, "apply_lora", lambda y, x, plan, layer=layer: (seen.append(("lora", layer.target.layer)), y)[1]
        )
    runner = PagedRunner(decoder)
    monkeypatch.setattr(decoder, "forward", with_gate(decoder.forward, Gate(seen)))
    runner.step([("a", [5, 6, 7])], LoraPlan.build([LoraSegment(0, 3, 0)], 3, 1))
    num_layers = len(decoder.layers)
    assert num_layers > 1
    assert [place for what, place in seen if what == "wait"] == list(range(-1, num_layers + 1))  # the ends, too
    for place in range(num_layers):
        first, last = seen.index(("lora", place)), len(seen) - 1 - seen[::-1].index(("lora", place))
        assert seen.index(("wait", place)) < first
        assert place + 1 == num_layers or last < seen.index(("wait", place + 1))


def with_gate(forward: Any, gate: Gate) -> Any:
    return lambda batch, kv: forward(replace(batch, gate=gate), kv)
