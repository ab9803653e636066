"""Tiny models, PEFT adapters and their oracles, for every test that needs real files.

    base = zoo.base("qwen3")                   a directory in Hugging Face's format, with a tokenizer
    adapter = zoo.adapter(base, LoraConfig(r=8, target_modules=["q_proj"]))
                                               a directory as PEFT saves it, B not zero
    adapter = zoo.own_adapter(base, "saved head")
                                               one of OWN_OPTIONS: what is more than LoRA on linears
    oracle = zoo.oracle(base, adapter)         transformers + peft, merged where that is possible
    case = zoo.fit_case(base, adapter)         a prompt and the oracle's 64 greedy tokens

`zoo` is a session fixture; the same arguments give the same directory, so never write into one. A parity test proves
something only if the oracle does not repeat itself and is fair only if no two logits are near a tie: `fit_case`
searches prompts until both hold, asserts it, and fails when none is found. transformers and peft are imported on first
use.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftConfig

VOCAB_SIZE = 8192
HIDDEN_SIZE = 64
NUM_LAYERS = 2
FAMILIES = ("mistral", "qwen2", "llama", "qwen3")
MORE_FAMILIES = (*("cohere2", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi3", "smollm3", "starcoder2"),)
"""Those that tests/engine/test_family_parity.py has, and the grids of kinds and fields do not."""
REFERENCE_FAMILIES = FAMILIES[:2]
"""The reference is slow: a family with a window and one with biases show its branches. They are the first: pytest then
makes a module's fixture of FAMILIES once for all of its tests."""
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text")
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

NUM_TOKENS = 64
MIN_DISTINCT = 57
MIN_GAP = 1e-3

ADAPTER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "all linears": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "q and v": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "rank 64": {"r": 64, "lora_alpha": 32, "target_modules": list(TARGET_MODULES)},
    "rsLoRA": {"r": 5, "lora_alpha": 7, "use_rslora": True, "target_modules": list(TARGET_MODULES)},
    "patterns": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": list(TARGET_MODULES),
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.up_proj": 12},
        "alpha_pattern": {"v_proj": 20, r"^model\.layers\.0\.mlp\.down_proj": 2},
    },
    "regex": {"r": 8, "lora_alpha": 16, "target_modules": r".*\.(0\.self_attn|1\.mlp)\.(k|o|gate)_proj"},
    "one layer": {"r": 8, "lora_alpha": 16, "target_modules": list(TARGET_MODULES), "layers_to_transform": [1]},
    "layers pattern": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["gate_proj", "o_proj"],
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "excluded": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "exclude_modules": ["down_proj", "k_proj"]},
    "bias all": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "all"},
    "bias lora_only": {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj"], "bias": "lora_only"},
    "lora_bias": {"r": 8, "lora_alpha": 16, "target_modules": list(TARGET_MODULES), "lora_bias": True},
}
"""Arguments of LoraConfig, one entry for each field of PEFT that changes the mathematics and is honoured."""

KIND_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DoRA": ("LoraConfig", {"r": 8, "lora_alpha": 16, "target_modules": list(TARGET_MODULES), "use_dora": True}),
    "DoRA of q, k, v": (
        "LoraConfig",
        {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "use_dora": True, "bias": "all"},
    ),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "IA3 of o": ("IA3Config", {"target_modules": ["q_proj", "o_proj", "gate_proj"], "feedforward_modules": ["o_proj"]}),
    "IA3 of shared inputs": (
        "IA3Config",
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
            "feedforward_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 6, "lora_alpha": 12, "target_modules": list(TARGET_MODULES), "total_step": 10},
    ),
    "LoHa": ("LoHaConfig", {"r": 2, "alpha": 4, "target_modules": list(TARGET_MODULES)}),
    "LoKr": ("LoKrConfig", {"r": 2, "alpha": 4, "target_modules": list(TARGET_MODULES), "decompose_both": True}),
    "VeRA": ("VeraConfig", {"r": 8, "target_modules": list(TARGET_MODULES)}),
    "LoKr of a full factor": ("LoKrConfig", {"r": 64, "alpha": 16, "target_modules": ["q_proj"]}),
}
"""Class of the configuration and its arguments, for each kind of adapter beside plain LoRA."""

_ON_Q = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
_SOME_TOKENS = list(range(8000, 3, -5))
_SAVED = ["embed_tokens", "lm_head"]
OWN_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any], int | None]] = {
    "LoRA of the embedding": ("LoraConfig", {**_ON_Q, "target_modules": ["embed_tokens", "q_proj"]}, None),
    "LoRA of the head": ("LoraConfig", {**_ON_Q, "target_modules": ["lm_head", "v_proj"]}, None),
    "LoRA of both": ("LoraConfig", {**_ON_Q, "use_rslora": True, "target_modules": ["embed_tokens", "lm_head"]}, None),
    "LoRA of both, tied": ("LoraConfig", {**_ON_Q, "target_modules": _SAVED, "ensure_weight_tying": True}, None),
    "AdaLoRA of the head": ("AdaLoraConfig", {"init_r": 16, "target_modules": ["lm_head"], "total_step": 9}, None),
    "LoHa of the head": ("LoHaConfig", {"r": 8, "alpha": 4, "target_modules": ["lm_head", "k_proj"]}, None),
    "saved embedding": ("LoraConfig", {**_ON_Q, "modules_to_save": ["embed_tokens"]}, None),
    "saved head": ("LoraConfig", {**_ON_Q, "modules_to_save": ["lm_head"]}, None),
    "saved embedding and head": ("LoraConfig", {**_ON_Q, "modules_to_save": _SAVED}, None),
    "saved, tied": ("LoraConfig", {**_ON_Q, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, None),
    "saved norms": ("LoraConfig", {**_ON_Q, "modules_to_save": ["norm"]}, None),
    "saved linears": (
        "LoraConfig",
        {**_ON_Q, "target_modules": "all-linear", "modules_to_save": ["0.self_attn.q_proj", "k_proj", "down_proj"]},
        None,
    ),
    "a saved linear, all biases": ("LoraConfig", {**_ON_Q, "modules_to_save": ["v_proj"], "bias": "all"}, None),
    "a saved MLP": ("LoraConfig", {**_ON_Q, "modules_to_save": ["layers.0.mlp"]}, None),
    "IA3 with a saved head": (
        "IA3Config",
        {"target_modules": ["k_proj"], "feedforward_modules": [], "modules_to_save": ["lm_head"]},
        None,
    ),
    "trained tokens": ("LoraConfig", {**_ON_Q, "trainable_token_indices": _SOME_TOKENS}, None),
    "trained tokens apart": (
        "LoraConfig",
        {**_ON_Q, "trainable_token_indices": {"embed_tokens": _SOME_TOKENS, "lm_head": [6, *_SOME_TOKENS]}},
        None,
    ),
    "trained tokens of the head": ("LoraConfig", {**_ON_Q, "trainable_token_indices": {"lm_head": _SOME_TOKENS}}, None),
    "TrainableTokens": ("TrainableTokensConfig", {"token_indices": _SOME_TOKENS}, None),
    "added tokens, saved, tied": (
        "LoraConfig",
        {**_ON_Q, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        VOCAB_SIZE + 200,
    ),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]}, None),
    "added tokens": ("LoraConfig", _ON_Q, VOCAB_SIZE + 200),
    "added tokens, LoRA of both": ("LoraConfig", {**_ON_Q, "target_modules": _SAVED}, VOCAB_SIZE + 200),
    "added tokens, saved": ("LoraConfig", {**_ON_Q, "modules_to_save": _SAVED}, VOCAB_SIZE + 200),
    "added tokens, trained": (
        "LoraConfig",
        {**_ON_Q, "trainable_token_indices": [VOCAB_SIZE + 199, VOCAB_SIZE + 1, *_SOME_TOKENS]},
        VOCAB_SIZE + 200,
    ),
    "fewer tokens": ("LoraConfig", {**_ON_Q, "modules_to_save": _SAVED}, VOCAB_SIZE - 100),
    "trained tokens, LoRA of the head": (
        "LoraConfig",
        {**_ON_Q, "target_modules": ["lm_head", "q_proj"], "trainable_token_indices": _SOME_TOKENS},
        None,
    ),
}
"""Class of the configuration, its arguments, and the vocabulary that the model is resized to before (None: is not), for
what an adapter has beyond linears: LoRA of the embedding and the head, weights and rows of its own, added tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_CONFIG_CLASSES = {
    **{"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"},
    **{"cohere2": "Cohere2Config", "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "glm4": "Glm4Config"},
    **{"granite": "GraniteConfig", "olmo2": "Olmo2Config", "phi3": "Phi3Config", "smollm3": "SmolLM3Config"},
    "starcoder2": "Starcoder2Config",
    **{"mixtral": "MixtralConfig", "qwen2_moe": "Qwen2MoeConfig", "qwen3_moe": "Qwen3MoeConfig"},
    **{"olmoe": "OlmoeConfig", "gpt_oss": "GptOssConfig", "llama4_text": "Llama4TextConfig"},
}
_BASE_OPTIONS: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_FAMILY_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 32},  # not hidden_size / heads
    "cohere2": {"num_hidden_layers": 3, "sliding_window": 24, "sliding_window_pattern": 3, "logit_scale": 0.7},
    "gemma2": {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 20.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
    "glm4": {"head_dim": 32, "attention_bias": True},
    "granite": {"attention_multiplier": 0.2, "embedding_multiplier": 1.5, "residual_multiplier": 0.7}
    | {"logits_scaling": 1.3},
    "olmo2": {},
    "phi3": {"sliding_window": 24},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"norm_epsilon": 1e-5, "num_hidden_layers": 3},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    | {"shared_expert_intermediate_size": 80, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "norm_topk_prob": True}
    | {"head_dim": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 24}
    | {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
        | {"original_max_position_embeddings": 512}
    }
    | {"num_hidden_layers": 3, "swiglu_limit": 0.9},
    "llama4_text": {"head_dim": 32, "num_hidden_layers": 3, "moe_layers": [0, 2], "no_rope_layer_interval": 3}
    | {"intermediate_size": 80, "intermediate_size_mlp": 160, "num_local_experts": 5, "attention_chunk_size": 256},
}
_FAMILY_GAINS: Mapping[str, Mapping[str, float]] = {
    "starcoder2": {"q_proj": 3.0, "k_proj": 3.0, "o_proj": 1.2, "c_proj": 0.4},  # its MLP without a gate says one thing
    "gpt_oss": {"proj_bias": 5.0, "gate_up_proj": 2.2},  # of weights [experts, in, out]
    # likewise; and what its norms of q and k take from attention, the rest gives
    "llama4_text": {"o_proj": 2.5, "gate_up_proj": 4.0, "router": 2.0, "gate_proj": 1.5},
}


def some_of(names: Sequence[str], number: int) -> list[ParameterSet]:
    """Parameters: the first `number` of them always, the others with the marker `slow`."""
    return [pytest.param(name, marks=pytest.mark.slow if place >= number else ()) for place, name in enumerate(names)]


@dataclass(frozen=True, slots=True)
class GreedyCase:
    """A prompt and what the oracle says to it. `min_gap`: the least distance of the two best logits in all steps."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    min_gap: float

    @property
    def num_distinct(self) -> int:
        return len(set(self.output_token_ids))

    @property
    def is_fit(self) -> bool:
        num_repeats = len(self.output_token_ids) - self.num_distinct
        return num_repeats <= NUM_TOKENS - MIN_DISTINCT and self.min_gap >= MIN_GAP


class Oracle:
    """transformers (+ peft) in float32 on the CPU: what the answers have to be."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [len(token_ids), vocab] of one full forward pass."""
        logits: Tensor = self.model(torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    def greedy(self, prompt_token_ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> GreedyCase:
        return self.greedy_batch([prompt_token_ids], num_tokens)[0]

    @torch.inference_mode()
    def greedy_batch(self, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[GreedyCase]:
        """Greedy outputs of prompts of one length; eos does not stop them."""
        cache, step = None, torch.tensor([list(p) for p in prompts])
        tokens, gaps = [], []
        for _ in range(num_tokens):
            out = self.model(step, past_key_values=cache, use_cache=True)
            best = out.logits[:, -1].float().topk(2)
            cache, step = out.past_key_values, best.indices[:, :1]
            tokens.append(step[:, 0])
            gaps.append(best.values[:, 0] - best.values[:, 1])
        outputs, min_gaps = torch.stack(tokens, 1).tolist(), torch.stack(gaps, 1).amin(1).tolist()
        return [GreedyCase(tuple(p), tuple(o), g) for p, o, g in zip(prompts, outputs, min_gaps, strict=True)]


class ModelZoo:
    """Makes models, adapters and oracles under `root`, each once; the arguments are the key."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bases: dict[str, Path] = {}
        self._adapters: dict[str, Path] = {}
        self._vocab_sizes: dict[Path, int] = {}
        self._oracles: dict[tuple[Path, Path | None], Oracle] = {}
        self._fit_prompts: dict[tuple[Path, Path | None, int, int, int], list[GreedyCase]] = {}

    @functools.cached_property
    def tokenizer_dir(self) -> Path:
        """A byte-level BPE tokenizer of VOCAB_SIZE tokens with a chat template; <s> 0, </s> 1, <unk> 2."""
        return write_tokenizer(self._root / "tokenizer")

    def base(
        self, family: str = "llama", *, seed: int = 7, dtype: str = "float32", options: Mapping[str, Any] | None = None
    ) -> Path:
        """A random model of `family`; `options` replace or add arguments of its transformers config class."""
        key = json.dumps([family, seed, dtype, dict(options or {})], sort_keys=True)
        if key not in self._bases:
            path = self._root / f"base-{len(self._bases)}-{family}"
            write_base(path, family, seed=seed, dtype=dtype, options=options or {})
            for file in self.tokenizer_dir.iterdir():
                (path / file.name).write_bytes(file.read_bytes())
            self._bases[key] = path
        return self._bases[key]

    def adapter(
        self,
        base: Path,
        config: PeftConfig,
        *,
        seed: int = 1,
        strength: float = 0.5,
        dtype: str = "float32",
        vocab_size: int | None = None,
    ) -> Path:
        """A random PEFT adapter for `base`; `strength` is the size of its update against the base's output.

        vocab_size: what the model is resized to before.
        """
        key = json.dumps([str(base), _plain(config.to_dict()), seed, strength, dtype, vocab_size], sort_keys=True)
        if key not in self._adapters:
            path = self._root / f"adapter-{len(self._adapters)}"
            model = copy.deepcopy(self.oracle(base).model)
            if vocab_size is not None:
                resize(model, vocab_size, seed=seed)
                self._vocab_sizes[path] = vocab_size
            write_adapter(path, model, copy.deepcopy(config), seed=seed, strength=strength, dtype=dtype)
            self._adapters[key] = path
        return self._adapters[key]

    def own_adapter(self, base: Path, name: str, **options: Any) -> Path:
        """The adapter of OWN_OPTIONS; options: those of `adapter`."""
        import peft

        config_class, arguments, vocab_size = OWN_OPTIONS[name]
        config: PeftConfig = getattr(peft, config_class)(**copy.deepcopy(dict(arguments)))
        return self.adapter(base, config, vocab_size=vocab_size, **options)

    def oracle(self, base: Path, adapter: Path | None = None) -> Oracle:
        """The base, or the base with the adapter merged into it (left unmerged where PEFT cannot merge it)."""
        key = (base, adapter)
        if key not in self._oracles:
            vocab_size = None if adapter is None else self._vocab_sizes.get(adapter)
            self._oracles[key] = Oracle(
                _load_base(base) if adapter is None else _load_merged(base, adapter, vocab_size)
            )
        return self._oracles[key]

    def fit_case(
        self, base: Path, adapter: Path | None = None, *, length: int = 12, num_tokens: int = NUM_TOKENS
    ) -> GreedyCase:
        return self.fit_cases(base, adapter, count=1, length=length, num_tokens=num_tokens)[0]

    def fit_cases(
        self,
        base: Path,
        adapter: Path | None = None,
        *,
        count: int,
        length: int = 12,
        num_tokens: int = NUM_TOKENS,
        seed: int = 0,
    ) -> list[GreedyCase]:
        """`count` different prompts of `length` tokens on which the oracle is fit; the search is seeded by `seed`."""
        cases = self._fit_prompts.setdefault((base, adapter, length, num_tokens, seed), [])
        vocab_size = VOCAB_SIZE if adapter is None else self._vocab_sizes.get(adapter, VOCAB_SIZE)
        batches = _prompt_batches(length, seed, vocab_size)
        while len(cases) < count:
            prompts = next(batches, None)
            assert prompts is not None, f"no fit prompts for {base.name} with {adapter}: found {len(cases)} of {count}"
            known = {case.prompt_token_ids for case in cases}
            found = self.oracle(base, adapter).greedy_batch(prompts, num_tokens)
            cases += [case for case in found if case.is_fit and case.prompt_token_ids not in known]
        assert all(case.is_fit for case in cases)
        return cases[:count]


def _prompt_batches(
    length: int, seed: int, vocab_size: int, batch_size: int = 16, num_batches: int = 20
) -> Iterator[list[list[int]]]:
    """Random prompts, never a special token, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        yield torch.randint(3, vocab_size, (batch_size, length), generator=generator).tolist()


# -------------------------------------------------------------------------------------------------------- writing files


def write_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """Train a byte-level BPE on Python's own library; tokens that it could not learn are named <extra_i>."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    special = ["<s>", "</s>", "<unk>"]
    bpe = ByteLevelBPETokenizer()
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    bpe.train_from_iterator(texts, vocab_size=vocab_size, min_frequency=1, show_progress=False, special_tokens=special)
    missing = vocab_size - bpe.get_vocab_size()
    bpe.add_tokens([AddedToken(f"<extra_{i}>", normalized=False) for i in range(missing)])
    path.mkdir(parents=True)
    bpe.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return path


def _transformers() -> Any:
    """transformers without its progress bars."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def write_base(path: Path, family: str, *, seed: int, dtype: str, options: Mapping[str, Any]) -> None:
    """Save a random model as transformers saves it; `max_shard_size` in options makes several files."""
    transformers, options = _transformers(), dict(options)
    max_shard_size = options.pop("max_shard_size", "5GB")
    config = getattr(transformers, _CONFIG_CLASSES[family])(**{**_BASE_OPTIONS, **_FAMILY_OPTIONS[family], **options})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.generation_config.do_sample = False
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights under which greedy output does not repeat itself: sharp attention, a small embedding, a residual stream
    of order 1."""
    config: Any = model.config
    depth = 1 / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            is_norm_bias = "norm" in name and name.endswith("bias")
            centre = 1.0 if "norm" in name and not is_norm_bias else 0.0
            gain = 2.0 if "q_norm" in name or "k_norm" in name else 1.0  # these undo the gain of q and k: give it back
            gain = 0.2 if is_norm_bias else gain  # a bias of the last norm is one of the logits
            gain = 10.0 if name.endswith("sinks") else gain
            parameter.copy_(gain * (centre + 0.1 * torch.randn(parameter.shape)))
        else:
            own = (gain for part, gain in _FAMILY_GAINS.get(config.model_type, {}).items() if part in name)
            parameter.normal_(0, next(own, _gain(name, depth)) / math.sqrt(parameter.shape[-1]))


def _gain(name: str, depth: float) -> float:
    gains = {
        "embed_tokens": 0.5,
        "lm_head": 0.5,
        "q_proj": 2.0,
        "k_proj": 2.0,
        "qkv_proj": 2.0,
        "o_proj": 2 * depth,
        "down_proj": 2 * depth,
    }
    return next((gain for part, gain in gains.items() if part in name), 1.0)


def write_adapter(
    path: Path, model: torch.nn.Module, config: PeftConfig, *, seed: int, strength: float, dtype: str
) -> None:
    """Wrap `model` (which is changed), draw every tensor that the adapter has, and save it as PEFT does."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config)
        torch.manual_seed(seed)
        _draw_adapter(wrapped, strength)
        wrapped.to(getattr(torch, dtype)).save_pretrained(path)


@torch.no_grad()
def resize(model: Any, vocab_size: int, *, seed: int) -> None:
    """Rows of new tokens are drawn as the base's are, so that they are said."""
    old_size = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    torch.manual_seed(seed)
    for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        weight[old_size:].normal_(0, _gain("embed_tokens", 1) / math.sqrt(weight.shape[1]))


_ADAPTER_PART = re.compile(r"\.(?:lora_|hada_|lokr_|ia3_)")
_OWN_PART = re.compile(r"\.(?:modules_to_save|trainable_tokens_delta|ln_tuning_layers)\.")


@torch.no_grad()
def _draw_adapter(model: torch.nn.Module, strength: float) -> None:
    """A ~ N(0, 1/in); B so that the update is `strength` of the base's output; biases (LoRA's or not) ~ N(0, 0.1^2).

    Gains, magnitudes and norms are within a third of what they begin with; factors of LoHa and LoKr as small as B is.
    Other weights of its own differ from the base's by `strength`.
    """
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        layer: Any = modules.get(_ADAPTER_PART.split(name)[0])
        if _OWN_PART.search(name) and not name.endswith("bias"):
            if parameter.dim() == 1:
                parameter *= torch.empty_like(parameter).uniform_(1 - strength / 1.5, 1 + strength / 1.5)
            else:
                parameter += strength * parameter.std() * torch.randn_like(parameter)
        elif "vera_lambda" in name:
            parameter.normal_(0, 1 if "vera_lambda_d" in name else strength / 2)
        elif "lora_embedding_A" in name:
            parameter.normal_(0, 1)
        elif "lora_embedding_B" in name:
            spread = strength * layer.weight.std().item() / layer.scaling["default"]
            parameter.normal_(0, spread / math.sqrt(parameter.shape[1]))
        elif "lora_A" in name:
            parameter.normal_(0, 1 / math.sqrt(parameter.shape[1]))
        elif "lora_B" in name and not name.endswith("bias"):
            scaling = layer.scaling["default"] / float(getattr(layer, "ranknum", {}).get("default", 1))
            rank = parameter.shape[1] / getattr(layer, "num_experts", 1)
            parameter.normal_(0, strength / (scaling * math.sqrt(rank)))
        elif "lora_E" in name:
            parameter.normal_(0, 1)
        elif "ia3_l" in name or "magnitude" in name:
            parameter *= torch.empty_like(parameter).uniform_(1 - strength / 1.5, 1 + strength / 1.5)
        elif "hada_" in name or "lokr_" in name:
            parameter.normal_(0, _factor_std(layer, strength))
        elif name.endswith("bias") and parameter.requires_grad:
            parameter.normal_(0, 0.1)
    _tie_adapters(model)


def _tie_adapters(model: Any) -> None:
    """With ensure_weight_tying, the head's A and B are the embedding's, transposed."""
    config = model.peft_config["default"]
    if not getattr(config, "target_modules_to_tie", None):
        return
    base = model.get_base_model()
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    head.lora_A["default"].weight.copy_(embedding.lora_embedding_B["default"].T)
    head.lora_B["default"].weight.copy_(embedding.lora_embedding_A["default"].T)


def _factor_std(layer: Any, strength: float) -> float:
    """Of each number in the factors of a LoHa or a LoKr, so that a number of the update has strength / sqrt(in)."""
    rank = layer.r["default"]
    wanted = strength / math.sqrt(layer.get_base_layer().in_features) / layer.scaling["default"]
    if hasattr(layer, "hada_w1_a"):
        return float((wanted / rank) ** 0.25)
    num_factors = sum(len(getattr(layer, f"lokr_w{i}{part}")) for i in (1, 2) for part in ("", "_a", "_b"))
    num_low_rank = num_factors - 2
    return float((wanted / rank ** (num_low_rank / 2)) ** (1 / num_factors))


def _plain(value: Any) -> Any:
    """A LoraConfig's dict as JSON: sets sorted, anything else as its text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | bool | list | None) else str(value)


# ------------------------------------------------------------------------------------------------------------- oracles


def _load_base(path: Path) -> torch.nn.Module:
    """Attention is eager where scores have a soft cap, which scaled_dot_product_attention leaves out."""
    transformers = _transformers()
    is_capped = getattr(transformers.AutoConfig.from_pretrained(path), "attn_logit_softcapping", None) is not None
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if is_capped else None
    )
    return model


def _load_merged(base: Path, adapter: Path, vocab_size: int | None) -> torch.nn.Module:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = _load_base(base)
        if vocab_size is not None:
            loaded.resize_token_embeddings(vocab_size, mean_resizing=False)
        model: Any = peft.PeftModel.from_pretrained(loaded, adapter)
        merged: torch.nn.Module = model.merge_and_unload() if _can_merge(model) else model
    return merged


def _can_merge(model: torch.nn.Module) -> bool:
    """`lora_bias` on a layer without a bias has nowhere to be merged into; a merge into tied weights changes both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    ends = (model.get_base_model().get_input_embeddings(), model.get_base_model().get_output_embeddings())
    if any(isinstance(end, BaseTunerLayer | AuxiliaryTrainingWrapper) for end in ends):
        return False
    layers = [m for m in model.modules() if getattr(m, "lora_bias", None)]
    return not any(any(m.lora_bias.values()) and m.get_base_layer().bias is None for m in layers)
