"""From a directory of safetensors to a `Decoder`: every weight is copied once from the memory map into its place.

A weight that the model needs and the checkpoint lacks, or the other way round, is a `ModelWeightError` that names it.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from loraplex.adapters.merging.base import MergedAdapter
from loraplex.config import EngineConfig
from loraplex.distributed import ONE_RANK, RankGroup
from loraplex.errors import ConfigError, ModelWeightError
from loraplex.kernels.protocols import KernelBackend
from loraplex.layers.common import WeightedLayer, WeightPart
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.packed_cache import PackedCache, checkpoint_name

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMED = 8
"""So many names of weights are in one error message."""

Progress = Callable[[int, int], None]
"""progress(bytes of weights done, bytes in all)"""


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a seed."""

    def load_into(self, layers: Sequence[WeightedLayer], progress: Progress) -> None:
        """Allocate, fill and prepare layer after layer: at most one is in memory twice, as read and as kept."""
        ...

    def whole(self, part: WeightPart, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' part, or these rows of it, in the dtype of its destination; in any thread."""
        ...


def read_merged(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, ops: KernelBackend
) -> MergedAdapter | None:
    """The adapter of `merge_adapter`, as `MergedAdapter.read`; None: there is none."""
    if config.merge_adapter is None:
        return None
    targets = Decoder(model_config, ops, dtype, torch.device("meta"), False).lora_targets()
    return MergedAdapter.read(config.merge_adapter, targets, config.merge_adapter_digest)


def load_model(
    path: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    seed: int,
    ops: KernelBackend,
    enable_lora: bool,
    progress: Progress | None = None,
    quantization: str | None = None,
    packed_cache: PackedCache | None = None,
    merged: MergedAdapter | None = None,
    ranks: RankGroup = ONE_RANK,
) -> Decoder:
    """Build the decoder and fill it. load_format: "auto" (safetensors in `path`) or "dummy" (random, from `seed`).

    With a cache, weights that an earlier start packed are mapped as they are, and others are kept for the next start;
    its name says which adapter is merged into them.
    Raises ModelWeightError for a missing, unused, misshapen or unreadable weight.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be auto or dummy, got {load_format!r}")
    model = Decoder(config, ops, dtype, device, enable_lora, quantization=quantization, shard=ranks.shard, ranks=ranks)
    name = checkpoint_name(Path(path)) if load_format == "auto" else f"random-{seed}"
    model.weights_name = f"{name} {dtype} {quantization}"
    layers = model.weighted_layers()
    if load_format == "auto" and packed_cache is not None and packed_cache.restore(layers):
        return model
    source: WeightSource = (
        DummyWeights(seed, device) if load_format == "dummy" else Checkpoint(Path(path), config, merged)
    )
    if ranks.shard.size > 1:
        model.whole_weights = WholeWeights(source, layers, ops)
    source.load_into(layers, progress or _no_progress)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of layers as they came; what is free is measured next
    if load_format == "auto" and packed_cache is not None:
        packed_cache.save_soon(layers)
    return model


def _no_progress(_done: int, _total: int) -> None:
    pass


class _Counted:
    """Progress in bytes of weights over all layers."""

    def __init__(self, layers: Sequence[WeightedLayer], progress: Progress) -> None:
        self._done, self._total = 0, sum(p.destination.nbytes for layer in layers for p in layer.weight_parts())
        self._progress = progress

    def add(self, part: WeightPart) -> None:
        self._done += part.destination.nbytes
        self._progress(self._done, self._total)


class WholeWeights:
    """What adapters ask of a base of several ranks: read again each time, so that no rank keeps more than its share."""

    def __init__(self, source: WeightSource, layers: Sequence[WeightedLayer], ops: KernelBackend) -> None:
        """The layers have no memory yet. ops: what each rank quantises its part with."""
        self._source = source
        self._ops = ops
        parts = [part for layer in layers for part in layer.weight_parts()]
        self._parts = {part.name: replace(part, destination=_shape(part)) for part in parts}
        self._own_widths = {part.name: part.destination.shape[-1] for part in parts}

    def bias(self, module_name: str) -> torch.Tensor | None:
        part = self._parts.get(f"{module_name}.bias")
        return None if part is None else self._source.whole(part)

    def rows(self, module_name: str, row_ids: torch.Tensor) -> torch.Tensor:
        return self._source.whole(self._parts[f"{module_name}.weight"], row_ids)

    def row_norms(
        self, module_name: str, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float, quantization: str | None
    ) -> torch.Tensor:
        """As `ParallelLinear.row_norms`, of whole rows; each rank has quantised its own part of them."""
        name = f"{module_name}.weight"
        weight = self._source.whole(self._parts[name])
        a, b = lora_a.float(), lora_b.float()
        if quantization is None:
            return self._ops.row_norms(weight, 0, len(weight), a, b, scaling)
        width, squares = self._own_widths[name], torch.zeros(len(weight))
        for own, own_a in zip(torch.split(weight, width, 1), torch.split(a, width, 1), strict=True):
            kept = self._ops.prepare_linear(own.contiguous(), quantization)
            squares += self._ops.row_norms(kept, 0, len(weight), own_a, b, scaling).square()
        return squares.sqrt()


def _shape(part: WeightPart) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.destination.dtype, device="meta")


# ----------------------------------------------------------------------------------------------------------- checkpoint


class Checkpoint:
    """The safetensors of a model directory: one file, or the files of an index."""

    def __init__(self, path: Path, config: ModelConfig, merged: MergedAdapter | None = None) -> None:
        self.path = path
        self.config = config
        self._merged = merged

    def load_into(self, layers: Sequence[WeightedLayer], progress: Progress) -> None:
        """As WeightSource; all names are checked before the first byte is copied."""
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(_open(self.path / name)) for name in self._file_names()}
            where = {key: file for file in files.values() for key in list(file.keys())}
            self._check_names([part.name for layer in layers for part in layer.weight_parts()], where)
            counted = _Counted(layers, progress)
            for layer in layers:
                layer.allocate()
                for part in layer.weight_parts():
                    tensor = where[part.name].get_tensor(part.name)
                    part.load(tensor if self._merged is None else self._merged.changed(part.name, tensor))
                    counted.add(part)
                layer.prepare()
            self._check_tied_head(where)

    def whole(self, part: WeightPart, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        index = self.path / INDEX_FILE
        name = _read_index(index)[part.name] if index.exists() else WEIGHTS_FILE
        with _open(self.path / name) as file:
            tensor: torch.Tensor = file.get_tensor(part.name)
            return (tensor if row_ids is None else tensor[row_ids]).to(part.destination.dtype)

    def _file_names(self) -> list[str]:
        index = self.path / INDEX_FILE
        if index.exists():
            return sorted(set(_read_index(index).values()))
        if (self.path / WEIGHTS_FILE).exists():
            return [WEIGHTS_FILE]
        pickles = sorted(file.name for file in self.path.glob("*.bin"))
        hint = f"; {pickles[0]} is not read, convert it to safetensors" if pickles else ""
        raise ModelWeightError(f"{self.path} has no {WEIGHTS_FILE} and no {INDEX_FILE}{hint}")

    def _check_names(self, parts: Sequence[str], found: Mapping[str, Any]) -> None:
        missing = [name for name in parts if name not in found]
        unused = [name for name in found if name not in parts and not self._is_ignored(name)]
        problems = [
            f"{len(names)} {what}: {_some(names)}"
            for names, what in ((missing, "missing"), (unused, "not used by the model"))
            if names
        ]
        if problems:
            raise ModelWeightError(
                f"the weights in {self.path} are not those of its config.json ({self.config.model_type}): "
                + "; ".join(problems)
            )

    def _is_ignored(self, name: str) -> bool:
        """Buffers that old checkpoints carry, and the copy of a tied head (compared below)."""
        return name.endswith("rotary_emb.inv_freq") or self._is_tied_head(name)

    def _is_tied_head(self, name: str) -> bool:
        return name == "lm_head.weight" and self.config.tie_word_embeddings

    def _check_tied_head(self, where: Mapping[str, Any]) -> None:
        """transformers unties a head that differs; here the config has to say so."""
        if "lm_head.weight" not in where or not self.config.tie_word_embeddings:
            return
        head, embedding = (where[k].get_tensor(k) for k in ("lm_head.weight", "model.embed_tokens.weight"))
        if not torch.equal(head, embedding):
            raise ModelWeightError(
                f"{self.path}: lm_head.weight differs from model.embed_tokens.weight but config.json has "
                "tie_word_embeddings=true; set it to false"
            )


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    """A safetensors file whose tensors are views of its memory map."""
    try:
        opened = safe_open(file, framework="pt")
    except FileNotFoundError as e:
        raise ModelWeightError(f"{file} is named by {INDEX_FILE} but is not there") from e
    except (SafetensorError, OSError) as e:
        raise ModelWeightError(f"{file} cannot be read as safetensors, it may be truncated: {e}") from e
    with opened as handle:
        yield handle


def _read_index(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ModelWeightError(f"{index} is not an index of safetensors ({type(e).__name__}: {e})") from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelWeightError(f"{index} has an empty weight_map")
    for key, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelWeightError(f"{index}: {key} is in {file!r}, which is not the name of a file beside it")
    return weight_map


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


# ---------------------------------------------------------------------------------------------------------------- dummy


class DummyWeights:
    """Random weights for benchmarks, at the speed of memory: finite logits, the same for the same seed.

    Matrices ~ N(0, 1 / in_features) (embedding and head a half of that deviation), norms 1, biases ~ N(0, 0.01). All
    are cut from one table of draws, each from its own start: the length of the table is prime, so no two rows of a
    matrix are equal.
    """

    TABLE_SIZE = 4_194_301

    def __init__(self, seed: int, device: torch.device) -> None:
        self._table = torch.randn(self.TABLE_SIZE, generator=torch.Generator().manual_seed(seed)).to(device)

    def load_into(self, layers: Sequence[WeightedLayer], progress: Progress) -> None:
        counted = _Counted(layers, progress)
        for layer in layers:
            layer.allocate()
            for part in layer.weight_parts():
                self._fill(part)
                counted.add(part)
            layer.prepare()

    def whole(self, part: WeightPart, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        tensor = torch.empty(part.shape, dtype=part.destination.dtype, device=self._table.device)
        self._fill(replace(part, destination=tensor))
        return tensor if row_ids is None else tensor[row_ids]

    def _fill(self, part: WeightPart) -> None:
        """full[i] = deviation * table[(start + i) mod TABLE_SIZE] in row-major order, of which a rank has its share."""
        if part.destination.shape != torch.Size(part.shape):
            part.destination.copy_(part.cut(self.whole(part)))
            return
        flat, filled = part.destination.view(-1), 0
        if len(part.shape) == 1 and "norm" in part.name:
            flat.fill_(1.0)
            return
        start, deviation = zlib.crc32(part.name.encode()) % self.TABLE_SIZE, self._deviation(part)
        while filled < len(flat):
            piece = self._table[start : start + len(flat) - filled]
            torch.mul(piece, deviation, out=flat[filled : filled + len(piece)])
            filled, start = filled + len(piece), 0

    @staticmethod
    def _deviation(part: WeightPart) -> float:
        if len(part.shape) == 1:
            return 0.1
        is_vocabulary = "embed_tokens" in part.name or "lm_head" in part.name
        return (0.5 if is_vocabulary else 1.0) / math.sqrt(part.shape[1])
