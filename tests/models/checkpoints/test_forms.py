"""Every quantised form: the numbers of its specification, logits and greedy tokens of the model that has them in
floats, with and without adapters, on kernels that read the checkpoint's integers and on those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from loraplex.kernels.native.choice import open_library
from loraplex.kernels.native.library import NativeLibrary
from loraplex.kernels.ops import get_backend
from loraplex.models.checkpoints.files import open_files
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.inspect import inspect_model
from loraplex.models.loader import load_model
from tests.fixtures import ModelZoo
from tests.models.checkpoints.forms import CASES, Made, change_config, is_linear, make
from tests.models.paged_runner import CPU, PagedRunner
from tests.ranks.engines import LORA, check, driver_of, kind_of, load

HAS_NATIVE = isinstance(open_library(), NativeLibrary)
BACKENDS = ("torch", "reference", *(["native"] if HAS_NATIVE else []))
TOKENS = list(range(3, 60))
each_form = pytest.mark.parametrize("form", CASES, ids=str)
ADAPTER = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def made(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """Of qwen2, whose q, k and v have biases, each form when it is asked for."""
    return _Made(zoo.base("qwen2"), tmp_path_factory.mktemp("forms"))


class _Made(dict[str, Made]):
    def __init__(self, base: Path, root: Path) -> None:
        super().__init__()
        self._base, self._root = base, root

    def __missing__(self, name: str) -> Made:
        self[name] = made = make(self._base, self._root / str(len(self)), CASES[name])
        return made


def decoder_of(
    path: Path, backend: str, *, quantization: str | None = None, dtype: torch.dtype = torch.float32
) -> Decoder:
    config, ops = ModelConfig.from_dir(path), get_backend(backend, CPU)
    return load_model(path, config, dtype, CPU, "auto", 0, ops, False, quantization=quantization)


def logits_of(model: Decoder) -> torch.Tensor:
    return PagedRunner(model, block_size=16).step([("a", TOKENS)])[0]


@each_form
def test_rows_are_those_of_the_specification(made: dict[str, Made], form: str) -> None:
    """Bit for bit but for the rounding of the last product; in pieces that begin anywhere."""
    case, config = made[form], ModelConfig.from_dir(made[form].quantized)
    with open_files(case.quantized, config.form) as stored, open_files(case.plain, None) as plain:
        assert stored.title
        for name in filter(is_linear, plain.names):
            want = plain.tensor(name)
            weight = stored.stored(name, tuple(want.shape))
            if "o_proj" in name:
                assert weight is None
                continue
            assert weight is not None
            assert (None if weight.kept is None else str(weight.kept)) == CASES[form].kept
            pieces = [weight.rows(first, min(first + 13, len(want))) for first in range(0, len(want), 13)]
            torch.testing.assert_close(torch.cat(pieces), want, rtol=3e-7, atol=1e-9)


@each_form
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_those_of_the_numbers(zoo: ModelZoo, made: dict[str, Made], form: str, backend: str) -> None:
    """In float32, in which nothing is rounded."""
    decoder = decoder_of(made[form].quantized, backend)
    want = zoo.oracle(made[form].plain).logits(TOKENS)
    assert (logits_of(decoder) - want).abs().max() <= 1e-4 * want.abs().max()
    assert not any(linear.is_kept for linear in decoder.linears)
    assert decoder.weights_form.endswith(" checkpoint, kept as 8 linears in float32")


@pytest.mark.slow
@each_form
def test_greedy_tokens_with_and_without_adapters(zoo: ModelZoo, made: dict[str, Made], form: str) -> None:
    """In one batch: the base, LoRA, DoRA, which divides by the norms of the numbers."""
    quantized, plain = made[form].quantized, made[form].plain
    adapters = {"LoRA": zoo.adapter(plain, ADAPTER), "DoRA": kind_of(zoo, plain, "DoRA")}
    cases = [(name, zoo.fit_case(plain, adapters.get(name or ""))) for name in (None, *adapters)]
    driver = driver_of(quantized, 1, LORA, dtype="float32")
    try:
        load(driver, adapters)
        check(driver, cases)
        assert " checkpoint, kept as " in driver.engine.info.form
    finally:
        driver.close()


# ------------------------------------------------------------------------------------------------------- kept integers

KEPT = [name for name, case in CASES.items() if case.kept not in (None, "fp8")]
KEPT_FP8 = [name for name, case in CASES.items() if case.kept == "fp8"]
KEEPING = [name for name in BACKENDS if name != "torch"]


@pytest.mark.parametrize("form", KEPT, ids=str)
@pytest.mark.parametrize("backend", KEEPING)
def test_integers_that_kernels_read_are_kept(made: dict[str, Made], form: str, backend: str) -> None:
    """In a model of 16 bits, and where they are asked for. Their products with rows of the identity are the numbers;
    o_proj, which is plain, is of the model's dtype, or quantised."""
    kind = str(CASES[form].kept)
    asked = "int4-a16" if kind.startswith("int4") else "int8"
    for quantization, dtype in ((None, torch.bfloat16), (asked, torch.float32)):
        if quantization not in (None, *get_backend(backend, CPU).quantizations):
            continue
        decoder = decoder_of(made[form].quantized, backend, quantization=quantization, dtype=dtype)
        plain = decoder_of(made[form].plain, "reference")
        assert [linear.is_kept for linear in decoder.linears] == [True, False, True, True] * 2
        for linear, exact in zip(decoder.linears, plain.linears, strict=True):
            if linear.is_kept:
                got = linear.ops.linear(torch.eye(linear.target.in_features), linear.weight)
                torch.testing.assert_close(got, exact.weight.t(), rtol=1e-6, atol=1e-9)
        rest = "bfloat16" if quantization is None else quantization
        kept = f"{kind} (the same numbers)" if form == "MXFP4" else f"its own {kind}"
        assert decoder.weights_form.endswith(f"kept as 6 linears in {kept}, 2 linears in {rest}")


@pytest.mark.slow
@pytest.mark.parametrize("form", KEPT, ids=str)
@pytest.mark.parametrize("backend", KEEPING)
def test_kept_integers_are_nearer_than_rounding_again(
    zoo: ModelZoo, made: dict[str, Made], form: str, backend: str
) -> None:
    """Beside them only o_proj and the head are rounded."""
    want, quantization = zoo.oracle(made[form].plain).logits(TOKENS), str(CASES[form].kept)[:4]
    kept, again = (
        (logits_of(decoder_of(path, backend, quantization=quantization)) - want).square().mean().sqrt()
        for path in (made[form].quantized, made[form].plain)
    )
    assert kept <= again


@pytest.mark.parametrize("form", KEPT_FP8, ids=str)
def test_float8_is_kept_where_it_is_asked_for(made: dict[str, Made], form: str) -> None:
    """With it comes that activations are rounded to 8 bits, so it is never the default."""
    decoder = decoder_of(made[form].quantized, "reference", quantization="fp8", dtype=torch.bfloat16)
    assert decoder.weights_form.endswith("kept as 6 linears in its own fp8, 2 linears in fp8")
    plain = decoder_of(made[form].plain, "reference")
    for linear, exact in zip(decoder.linears, plain.linears, strict=True):
        if linear.is_kept:
            assert torch.equal(linear.weight.rows(0, len(exact.weight)), exact.weight)
    assert not any(
        linear.is_kept for linear in decoder_of(made[form].quantized, "reference", dtype=torch.bfloat16).linears
    )


def test_what_is_asked_for_is_made_of_the_numbers(made: dict[str, Made]) -> None:
    """--quantization of another kind than the checkpoint's: as of the plain checkpoint."""
    for form, quantization in (("W8A8", "int4"), ("GPTQ", "int8"), ("FP8 block", "fp8")):
        got, want = (
            logits_of(decoder_of(path, "reference", quantization=quantization))
            for path in (made[form].quantized, made[form].plain)
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- model inspect


@each_form
def test_inspect_says_how_it_would_be_kept(made: dict[str, Made], form: str) -> None:
    """As the load says it, and about the bytes that the load keeps: of what is kept as it is, those of the file."""
    change_config(made[form].quantized, dtype="bfloat16")
    report = inspect_model(str(made[form].quantized))
    assert report.is_served, report.reasons
    model = decoder_of(made[form].quantized, "auto", dtype=torch.bfloat16)
    first = report.forms[0]
    assert model.weights_form == f"{report.checkpoint_form} checkpoint, kept as {first.kept}"
    kept = sum(tensor.nbytes for layer in model.weighted_layers() for tensor in layer.prepared().values())
    assert first.weight_bytes == pytest.approx(kept, rel=0.1)
