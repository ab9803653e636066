"""GGUF files: the model of their metadata and names, the numbers of their blocks, q and k in their order; what is no
GGUF, or says what it does not have, is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.errors import ModelConfigError, ModelNotFoundError, ModelWeightError
from loraplex.layers.common import ROPE_RULES, RopeParameters
from loraplex.models.checkpoints.files import open_files
from loraplex.models.checkpoints.gguf_file import GgufHeader
from loraplex.models.config import ModelConfig
from loraplex.models.source import resolve_model
from tests.fixtures import ModelZoo
from tests.models.checkpoints.forms import Made, write_gguf
from tests.models.checkpoints.gguf_models import make_gguf, metadata_of
from tests.models.checkpoints.test_forms import KEEPING, TOKENS, decoder_of, logits_of
from tests.ranks.engines import LORA, adapter_of, check, driver_of, load

SMALL = ("Q4_0", "Q8_0", "Q5_0", "F16")
LARGE = ("Q4_K", "Q6_K", "BF16", "Q8_0")
FILES = {"llama": SMALL, "qwen2": SMALL, "qwen3": SMALL, "large": LARGE, "plain": ("F32",)}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 1}


class _Files(dict[str, Made]):
    def __init__(self, zoo: ModelZoo, root: Path) -> None:
        super().__init__()
        self._zoo, self._root = zoo, root

    def __missing__(self, name: str) -> Made:
        family = name if name in ("qwen2", "qwen3") else "llama"
        base = self._zoo.base(family, options=WIDE if name == "large" else None)
        self[name] = made = make_gguf(base, self._root / name, family, FILES[name])
        return made


@pytest.fixture(scope="module")
def files(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return _Files(zoo, tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_the_model_that_it_was_made_of(files: dict[str, Made], name: str) -> None:
    made = files[name]
    got, want = ModelConfig.from_dir(made.quantized), ModelConfig.from_dir(made.plain)
    assert dataclasses.replace(got, dtype=want.dtype) == want
    assert got.dtype == ("float32" if name == "plain" else "bfloat16")
    with open_files(made.quantized, None) as stored, open_files(made.plain, None) as plain:
        assert sorted(stored.names) == sorted(plain.names)
        for each in plain.names:
            exact = plain.tensor(each)
            weight = stored.stored(each, tuple(exact.shape))
            got_numbers = stored.tensor(each).float() if weight is None else weight.rows(0, len(exact))
            torch.testing.assert_close(got_numbers, exact, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_numbers(zoo: ModelZoo, files: dict[str, Made], name: str) -> None:
    want = zoo.oracle(files[name].plain).logits(TOKENS)
    got = logits_of(decoder_of(files[name].quantized, "torch"))
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("backend", KEEPING)
def test_blocks_of_integers_are_kept(files: dict[str, Made], tmp_path: Path, zoo: ModelZoo, backend: str) -> None:
    for kind, words in (("Q8_0", "int8 in groups of 32"), ("Q4_0", "int4 in groups of 32"), ("Q5_0", "int8 in gr")):
        made = make_gguf(zoo.base("llama"), tmp_path / kind, "llama", (kind,))
        decoder, plain = decoder_of(made.quantized, backend, dtype=torch.bfloat16), decoder_of(made.plain, "reference")
        assert decoder.weights_form.startswith(f"GGUF ({kind}) checkpoint, kept as 8 linears in its own {words}")
        for linear, exact in zip(decoder.linears, plain.linears, strict=True):
            got = linear.ops.linear(torch.eye(linear.target.in_features), linear.weight)
            torch.testing.assert_close(got, exact.weight.t(), rtol=1e-6, atol=1e-9)


def test_greedy_tokens_with_an_adapter(zoo: ModelZoo, files: dict[str, Made]) -> None:
    """Loaded beside the file of the model, whose tokenizer is elsewhere."""
    made = files["llama"]
    adapter = adapter_of(zoo, made.plain, "all linears")
    driver = driver_of(made.quantized, 1, LORA, dtype="float32")
    try:
        load(driver, {"LoRA": adapter})
        check(driver, [(None, zoo.fit_case(made.plain)), ("LoRA", zoo.fit_case(made.plain, adapter))])
    finally:
        driver.close()


def test_the_factors_of_llama_3_are_its_rope(zoo: ModelZoo, tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    plain = ROPE_RULES["default"](16, RopeParameters(rope_theta=500000.0))
    factors = plain / ROPE_RULES["llama3"](16, RopeParameters("llama3", rope_theta=500000.0, **rope))
    tensors = {
        "token_embd.weight": (0, (8, 64), bytes(8 * 64 * 4)),
        "rope_freqs.weight": (0, (8,), factors.numpy().tobytes()),
    }
    config = dict(CONFIG, rope_parameters={"rope_theta": 500000.0})
    got = ModelConfig.from_dir(write_gguf(tmp_path / "a.gguf", metadata_of(config, "llama"), tensors))
    assert got.rope == RopeParameters("llama3", rope_theta=500000.0, **rope)
    tensors["rope_freqs.weight"] = (0, (8,), (factors * 1.1).numpy().tobytes())
    with pytest.raises(ModelConfigError, match=r"rope_freqs\.weight are not those of Llama 3"):
        ModelConfig.from_dir(write_gguf(tmp_path / "b.gguf", metadata_of(config, "llama"), tensors))


def test_where_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == resolve_model(str(tmp_path)) == file
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files; give one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


# -------------------------------------------------------------------------------------------------------- what is wrong

CONFIG = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
}
EMBEDDING = {"token_embd.weight": (0, (8, 64), bytes(8 * 64 * 4))}


def written(tmp_path: Path, tensors: Any = EMBEDDING, arch: str = "llama", **more: Any) -> Path:
    metadata = metadata_of(CONFIG, arch) | {key.replace("__", "."): value for key, value in more.items()}
    return write_gguf(tmp_path / "m.gguf", metadata, tensors)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__architecture": "mamba"}, "general.architecture 'mamba' is not supported; supported are llama, "),
        ({"general__architecture": 7}, "general.architecture 7 is not supported"),
        ({"llama__block_count": "two"}, "llama.block_count='two' is not supported; it has to be a whole number >= 1"),
        ({"llama__block_count": 1 << 31}, "llama.block_count=2147483648 is not supported; it has to be at most 1, the"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count=8 is not supported; it has to be only 16"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "only none, linear and yarn"),
        ({"llama__expert_count": 8}, "only models without experts"),
        ({"general__alignment": 3}, "general.alignment must be a power of two from 8 on, got 3"),
        ({"general__alignment": 1}, "general.alignment must be a power of two from 8 on, got 1"),
        ({"llama__rope__freq_base": "x"}, "llama.rope.freq_base='x' is not supported; it has to be a number > 0"),
        ({"llama__rope__scale_linear": 4.0}, "llama.rope.scale_linear=4.0 is not supported; it has to be only 0 or 1"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale=0.5 is not supported; it has to be only 0"),
        ({"llama__attention__sliding_window": 4}, "attention.sliding_window=4 is not supported; it has to be only 0"),
    ],
)
def test_metadata_that_is_not_honoured_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(message)):
        ModelConfig.from_dir(written(tmp_path, **metadata))


def test_tensors_that_cannot_be_are_refused(tmp_path: Path) -> None:
    cases = {
        "has ggml type 10, which is not supported; supported are F32, F16, BF16, Q4_0,": (10, (8, 64), bytes(999)),
        "has rows of 48, Q4_0 has blocks of 32": (2, (8, 48), bytes(999)),
        "has dimensions [0, 8]": (0, (8, 0), b""),
    }
    for message, tensor in cases.items():
        with pytest.raises(ModelConfigError, match=re.escape(message)):
            ModelConfig.from_dir(written(tmp_path, {"token_embd.weight": tensor}))
    norms = dict.fromkeys(("output_norm.weight", "model.norm.weight"), (0, (64,), bytes(256)))
    with pytest.raises(ModelConfigError, match=r"'model\.norm\.weight' and another tensor are both"):
        ModelConfig.from_dir(written(tmp_path, EMBEDDING | norms))
    file = written(tmp_path)
    content, name = file.read_bytes(), b"token_embd.weight"
    at = content.index(name) + len(name) + 4 + 16 + 4
    file.write_bytes(content[:at] + struct.pack("<Q", 1) + content[at + 8 :] + bytes(32))
    with pytest.raises(ModelConfigError, match=r"'token_embd\.weight' begins at byte 1, which is no multiple of 32"):
        ModelConfig.from_dir(file)
    file.write_bytes(content[:-64])
    with pytest.raises(ModelConfigError, match="the file is truncated"):
        ModelConfig.from_dir(file)


def test_tensors_that_are_not_the_models_are_named(tmp_path: Path) -> None:
    file = written(tmp_path, EMBEDDING | {"blk.0.ssm.weight": (0, (4,), bytes(16))})
    with pytest.raises(ModelWeightError, match=r"missing: model\..*1 not used by the model: blk\.0\.ssm\.weight"):
        decoder_of(file, "torch")


def test_counts_of_a_header_are_checked_before_anything_is_made(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<I", 3)
    entry = struct.pack("<Q", 1) + b"k"
    cases = {
        "it does not begin with GGUF": b"GGML" + bytes(40),
        "version 1 is not supported": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        "tensors; at most 65536 are read": head + struct.pack("<QQ", 1 << 62, 0),
        "metadata entries; at most 65536 are read": head + struct.pack("<QQ", 0, 1 << 62),
        "a text has 4611686018427387904 bytes": head + struct.pack("<QQQ", 0, 1, 1 << 62),
        "in the middle of its header": head + struct.pack("<QQ", 0, 1) + entry + struct.pack("<IIQ", 9, 4, 1 << 62),
        "a metadata array has 4611686018427387904 entries": head
        + struct.pack("<QQ", 0, 1)
        + entry
        + struct.pack("<IIQ", 9, 8, 1 << 62),
        "of type 9": head + struct.pack("<QQ", 0, 1) + entry + struct.pack("<IIQ", 9, 9, 1),
    }
    for message, data in cases.items():
        (tmp_path / "m.gguf").write_bytes(data)
        with pytest.raises(ModelConfigError, match=re.escape(message)):
            GgufHeader.read(tmp_path / "m.gguf")


@given(st.data())
def test_a_damaged_header_is_an_error_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = written(tmp_path_factory.mktemp("damaged"))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 800))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    with contextlib.suppress(ModelConfigError):
        ModelConfig.from_dir(file)
