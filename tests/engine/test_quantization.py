"""--quantization and 16-bit weights: the demo's answers stay, a random model's logits move little, what a backend has
not is refused."""

from __future__ import annotations

import pytest
import torch

from loraplex.demo.run import ask, base_path, questions
from loraplex.errors import ConfigError
from loraplex.frontend.llm import LLM
from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.kernels.quantized_weights import Int8Weight
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.loader import load_model
from tests.fixtures import ModelZoo
from tests.models.paged_runner import PagedRunner

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(not isinstance(open_library(), NativeLibrary), reason="no native kernels are built")
TOKENS = list(range(3, 43))


def load(zoo: ModelZoo, backend: str, dtype: torch.dtype, quantization: str | None) -> Decoder:
    base = zoo.base("qwen2")
    config = ModelConfig.from_dir(base)
    ops = get_backend(backend, CPU)
    return load_model(base, config, dtype, CPU, "auto", 0, ops, False, quantization=quantization)


def logits_of(model: Decoder) -> torch.Tensor:
    return PagedRunner(model, block_size=16).step([("a", TOKENS)])[0].float()


def perplexity(logits: torch.Tensor) -> float:
    """Of the model's own input, in which every next token is as good as any: what matters is that it does not move."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(TOKENS[1:])).exp().item()


@needs_native
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        *(("auto", "int8"), ("bfloat16", None), ("float16", None), ("bfloat16", "int8")),
        *(("auto", "int4"), ("bfloat16", "int4"), ("auto", "int4-a16")),
    ],
)
def test_the_demo_answers_as_before(dtype: str, quantization: str | None) -> None:
    with LLM(base_path(), dtype=dtype, quantization=quantization) as llm:
        answers = ask(llm, questions(each=2, seed=0))
    wrong = [a.text for a in answers if not a.is_right]
    assert len(wrong) <= (1 if quantization == "int4" else 0), wrong  # one of 24 is nearly another one


@needs_native
@pytest.mark.parametrize(
    ("dtype", "quantization", "allowed"),
    [
        *((torch.float32, "int8", 0.05), (torch.bfloat16, None, 0.02), (torch.float16, None, 0.003)),
        *((torch.float32, "int4", 0.6), (torch.bfloat16, "int4", 0.6)),
    ],
)
def test_a_random_models_logits_move_little(
    zoo: ModelZoo, dtype: torch.dtype, quantization: str | None, allowed: float
) -> None:
    exact = logits_of(load(zoo, "reference", torch.float32, None))
    got = logits_of(load(zoo, "native", dtype, quantization))
    assert (got - exact).square().mean().sqrt() <= allowed * exact.std()
    assert perplexity(got) == pytest.approx(perplexity(exact), rel=allowed)


@needs_native
def test_native_int8_is_the_references(zoo: ModelZoo) -> None:
    """Integers are summed exactly by both; a rounding of an activation to its int16 may fall to the other side."""
    native, reference = (logits_of(load(zoo, backend, torch.float32, "int8")) for backend in ("native", "reference"))
    assert (native - reference).abs().max() <= 2e-3 * reference.abs().max()
    assert not torch.equal(reference, logits_of(load(zoo, "reference", torch.float32, None)))


@needs_native
def test_activations_in_8_bits_err_little_beside_weights_in_4() -> None:
    """Of the demo's model: the same weights with activations in 16 bits, and those as they were."""
    config, ops = ModelConfig.from_dir(base_path()), get_backend("native", CPU)

    def run(kept: str | None) -> torch.Tensor:
        model = load_model(base_path(), config, torch.float32, CPU, "auto", 0, ops, False, quantization=kept)
        return PagedRunner(model, block_size=16).step([("a", TOKENS)])[0]

    exact, coarse, fine = run(None), run("int4"), run("int4-a16")
    assert 0 < (coarse - fine).norm() <= 0.25 * (fine - exact).norm()
    assert (coarse - exact).norm() <= 1.1 * (fine - exact).norm()


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_the_demo_answers_as_before_by_the_specification(quantization: str) -> None:
    """Adapters are not quantised, the base model under them is."""
    with LLM(base_path(), quantization=quantization, lora_backend="reference") as llm:
        answers = ask(llm, questions(each=2, seed=0))
    assert [a.text for a in answers if not a.is_right] == []


@pytest.mark.parametrize(("quantization", "allowed"), [("fp8", 0.25), ("int8", 0.06), ("int4", 0.7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_models_logits_move_by_what_the_bits_allow(
    zoo: ModelZoo, dtype: torch.dtype, quantization: str, allowed: float
) -> None:
    """Random weights magnify an error of each linear about sevenfold: that of bfloat16, 0.2 %, and those of fp8 and
    int4, 2.5 and 7 %."""
    exact = logits_of(load(zoo, "reference", torch.float32, None))
    got = logits_of(load(zoo, "reference", dtype, quantization))
    assert 0 < (got - exact).square().mean().sqrt() <= allowed * exact.std()
    assert perplexity(got) == pytest.approx(perplexity(exact), rel=allowed / 5)


@pytest.mark.parametrize(
    ("quantization", "allowed", "agreeing"), [("fp8", 0.08, 0.95), ("int8", 0.02, 0.98), ("int4", 0.2, 0.88)]
)
def test_a_trained_models_logits_move_less(quantization: str, allowed: float, agreeing: float) -> None:
    """Of the demo's model, for any tokens; `agreeing` is the share of positions with the same most likely token."""
    config, ops = ModelConfig.from_dir(base_path()), get_backend("reference", CPU)
    tokens = torch.randint(config.vocab_size, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    def run(kept: str | None) -> torch.Tensor:
        model = load_model(base_path(), config, torch.float32, CPU, "auto", 0, ops, False, quantization=kept)
        return PagedRunner(model, block_size=16).step([("a", tokens)])[0]

    exact, got = run(None), run(quantization)
    assert 0 < (got - exact).square().mean().sqrt() <= allowed * exact.std()
    assert (got.argmax(-1) == exact.argmax(-1)).float().mean() >= agreeing


@pytest.mark.interpreter
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_tritons_logits_are_the_references(zoo: ModelZoo, quantization: str) -> None:
    pytest.importorskip("triton")
    got, want = (logits_of(load(zoo, backend, torch.float32, quantization)) for backend in ("triton", "reference"))
    assert (
        got - want
    ).square().mean().sqrt() <= 5e-3 * want.std()  # fp8: a quotient in the middle may fall to either side


@pytest.mark.parametrize(("quantization", "kind"), [("fp8", torch.Tensor), ("int8", Int8Weight), ("int4", Int8Weight)])
def test_the_head_is_not_quantised_to_less_than_int8(zoo: ModelZoo, quantization: str, kind: type) -> None:
    assert isinstance(load(zoo, "reference", torch.float32, quantization).lm_head.weight, kind)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_activations_in_16_bits_are_named_on_a_cpu_alone(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization int4-a16 is not in the {backend} kernels"):
        LLM(base_path(), quantization="int4-a16", lora_backend=backend)


def test_stock_torch_refuses_int8() -> None:
    with pytest.raises(ConfigError, match="quantization int8 is not in the torch kernels"):
        LLM(base_path(), quantization="int8", lora_backend="torch")


def test_fp8_is_refused_on_a_gpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("loraplex.kernels.triton.launch")
    monkeypatch.setattr(launch, "H100", launch.A100)
    with pytest.raises(ConfigError, match=r"fp8 is not in the triton kernels.* sm_80.* they have int8, int4 .*8\.9"):
        LLM(base_path(), quantization="fp8", lora_backend="triton")


def test_another_quantization_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantization must be one of .* or unset, got 'awq'"):
        LLM(base_path(), quantization="awq")
