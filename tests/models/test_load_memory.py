"""The most memory of a load, in a process of its own, against what the load keeps; and the order of layers."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loraplex.layers.common import WeightPart, whole
from loraplex.models.load_memory import LoadMemory, _maps_of, largest_first

HIDDEN, INNER, LAYERS, VOCAB = 640, 1728, 24, 8192
LINEARS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (HIDDEN, HIDDEN)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (128, HIDDEN)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, HIDDEN)),
    "mlp.down_proj": (HIDDEN, INNER),
}
LOAD = """
import sys, torch
from pathlib import Path
from loraplex.kernels.ops import get_backend
from loraplex.models.config import ModelConfig
from loraplex.models.loader import load_model

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":")) * 1024

path, backend, quantization = sys.argv[1:]
torch.set_num_threads(1)
ops, cpu, config = get_backend(backend, torch.device("cpu")), torch.device("cpu"), ModelConfig.from_dir(path)
load_model(path, config, torch.bfloat16, cpu, "dummy", 0, ops, False, quantization=quantization or None)
Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
before = status("VmRSS")
model = load_model(path, config, torch.bfloat16, cpu, "auto", 0, ops, False, quantization=quantization or None)
peak = status("VmHWM") - before
kept = sum(tensor.nbytes for layer in model.weighted_layers() for tensor in layer.prepared().values())
print(peak, kept)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 230 MB in shards of at most 50 MB."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LINEARS.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in shapes.items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 40e6:
            shards.append({})
        shards[-1][name] = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
    weight_map = {name: f"model-{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    for number, shard in enumerate(shards):
        save_file(shard, path / f"model-{number}.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's to say")
@pytest.mark.parametrize(("backend", "quantization"), [("auto", ""), ("auto", "int8"), ("torch", "")])
def test_a_load_takes_what_it_keeps_and_a_tenth(model: Path, backend: str, quantization: str) -> None:
    """All resident memory counts, pages of the files too. The same load of drawn weights went before, so that what the
    process has in any case is there."""
    command = [sys.executable, "-c", LOAD, str(model), backend, quantization]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if quantization and "have none" in child.stderr:
        pytest.skip("stock torch has no int8")
    assert child.returncode == 0, child.stderr
    peak, kept = map(int, child.stdout.split())
    assert kept > (100e6 if quantization else 200e6)
    assert peak < 1.1 * kept


@dataclass(frozen=True)
class _Layer:
    """As largest_first asks a layer."""

    name: str
    sizes: tuple[int, ...]
    order: int = field(default=0)

    def weight_parts(self):  # type: ignore[no-untyped-def]
        for size in self.sizes:
            yield WeightPart(self.name, (size,), torch.empty(size, dtype=torch.uint8, device="meta"), whole)


def test_large_layers_come_first_and_others_as_they_were() -> None:
    small = [_Layer(f"small {i}", (i % 3 + 1, 2)) for i in range(50)]
    layers = [_Layer("embedding", (40,)), *small, _Layer("head", (60,)), _Layer("tied head", ())]
    names = [layer.name for layer in largest_first(layers)]
    assert names == ["head", "embedding", *(layer.name for layer in small), "tied head"]
    assert largest_first([]) == []
    equal = [_Layer(str(i), (5,)) for i in range(3)]
    assert largest_first(equal) == equal


def test_pages_of_the_files_are_dropped_and_can_be_read_again(tmp_path: Path) -> None:
    import mmap

    file, other = tmp_path / "a b.safetensors", tmp_path / "other"
    for each in (file, other):
        each.write_bytes(b"x" * 2**20)
    with file.open("rb") as opened, other.open("rb") as unread:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        also = mmap.mmap(unread.fileno(), 0, access=mmap.ACCESS_READ)
        assert data[:] == also[:]
        if Path("/proc/self/maps").exists():
            assert [end - start for start, end in _maps_of(frozenset([str(file.resolve())]))] == [2**20]
        LoadMemory([file], 0).release()
        assert data[:] == b"x" * 2**20


def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    """A model of transformers with an adapter merged in place lost it when the same files were loaded beside it."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"a" * 2**16)
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        assert mapped[0] == ord("a")
        assert list(_maps_of(frozenset([str(file)])))
        mapped[0] = ord("b")
        LoadMemory([file], 1).release()
        assert mapped[0] == ord("b")
