"""From a directory of safetensors to a `Decoder`: every weight is copied once from the memory map into its place.

A weight that the model needs and the checkpoint lacks, or the other way round, is a `ModelWeightError` that names it.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from loraplex.adapters.merging.base import MergedAdapter
from loraplex.config import EngineConfig
from loraplex.distributed import ONE_RANK, RankGroup
from loraplex.errors import ConfigError, ModelWeightError
from loraplex.kernels.protocols import KernelBackend, LayerOps
from loraplex.kernels.quantized_weights import QuantizedSpecification
from loraplex.layers.common import WeightedLayer, WeightPart
from loraplex.layers.linear import ParallelLinear
from loraplex.models.checkpoints.files import CheckpointFiles, open_files
from loraplex.models.checkpoints.stored import (
    KeptForm,
    Share,
    StoredWeight,
    activation_bits_of,
    stacked,
    with_activations,
)
from loraplex.models.config import ModelConfig
from loraplex.models.decoder import Decoder
from loraplex.models.load_memory import LoadMemory, largest_first, nbytes_of
from loraplex.models.packed_cache import PackedCache, checkpoint_name

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""So many names of weights are in one error message."""

WIDENED_AT_ONCE = 1 << 22
"""Numbers of a quantised weight that are float32 at one moment."""

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
    checkpoint = Checkpoint(Path(path), config, merged)
    if load_format == "auto":
        model.weights_form = checkpoint.keep_integers(layers, ops, quantization, dtype)
    if load_format == "auto" and packed_cache is not None and packed_cache.restore(layers):
        return model
    source: WeightSource = DummyWeights(seed, device) if load_format == "dummy" else checkpoint
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
    """Progress in bytes of weights over all layers; files: those that they are read from."""

    def __init__(self, layers: Sequence[WeightedLayer], progress: Progress, files: Sequence[Path] = ()) -> None:
        self._done, self._total = 0, sum(map(nbytes_of, layers))
        self._progress = progress
        self.memory = LoadMemory(files, self._total)

    def add(self, part: WeightPart) -> None:
        """It was copied to its place."""
        self._done += part.destination.nbytes
        self._progress(self._done, self._total)
        self.memory.note(part.destination.nbytes)


class WholeWeights:
    """What adapters ask of a base of several ranks: read again each time, so that no rank keeps more than its share."""

    def __init__(self, source: WeightSource, layers: Sequence[WeightedLayer], ops: KernelBackend) -> None:
        """The layers have no memory yet. ops: what each rank quantises its part with."""
        self._source = source
        self._ops = ops
        parts = [part for layer in layers for part in layer.weight_parts()]
        kept = [layer for layer in layers if isinstance(layer, ParallelLinear) and layer.is_kept]
        self._kept = {part.name for layer in kept for part in layer.weight_parts()}
        self._parts = {part.name: replace(part, destination=self._shape(part)) for part in parts}
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
        if quantization is None or name in self._kept:
            return self._ops.row_norms(weight, 0, len(weight), a, b, scaling)
        width, squares = self._own_widths[name], torch.zeros(len(weight))
        for own, own_a in zip(torch.split(weight, width, 1), torch.split(a, width, 1), strict=True):
            kept = self._ops.prepare_linear(own.contiguous(), quantization)
            squares += self._ops.row_norms(kept, 0, len(weight), own_a, b, scaling).square()
        return squares.sqrt()

    def _shape(self, part: WeightPart) -> torch.Tensor:
        """In float32 where the checkpoint's own numbers are kept."""
        dtype = torch.float32 if part.name in self._kept else part.destination.dtype
        return torch.empty(part.shape, dtype=dtype, device="meta")


# ----------------------------------------------------------------------------------------------------------- checkpoint


class Checkpoint:
    """A directory of safetensors, one file or the files of an index, or a GGUF file."""

    def __init__(self, path: Path, config: ModelConfig, merged: MergedAdapter | None = None) -> None:
        self.path = path
        self.config = config
        self._merged = merged
        self._activation_bits = 16
        self.widened_nbytes: dict[str, int] = {}
        """Of linears that `keep_integers` keeps in wider integers than the file has, by their names."""

    def keep_integers(
        self, layers: Sequence[WeightedLayer], ops: LayerOps, asked: str | None, dtype: torch.dtype
    ) -> str:
        """Linears whose weights the kernels read in the checkpoint's own integers will have these. Says what is kept
        how; "" for a checkpoint of plain floats.

        asked: the quantization of other linears; None: they are of `dtype`.
        """
        with open_files(self.path, self.config.form, self.config.family) as files:
            if not files.title:
                return ""
            linears = [layer for layer in layers if isinstance(layer, ParallelLinear)]
            self.check_names(layers, files)
            kept = Counter[str]()
            self._activation_bits = activation_bits_of(asked, ops)
            for linear in linears:
                form = self._kept(linear, files)
                is_wanted = form is not None and form.is_wanted(asked, dtype)
                if form is not None and is_wanted and form.is_read_by(ops, self._activation_bits):
                    linear.keep_integers(form.quantization)
                    if nbytes := form.widened_nbytes(len(linear.weight), linear.target.in_features):
                        self.widened_nbytes[linear.name] = nbytes
                    kept[form.as_kept] += 1
            title = files.title
        parts = [f"{count} linears in {form}" for form, count in kept.items()]
        if rest := len(linears) - kept.total():
            parts.append(f"{rest} linears in {asked or str(dtype).removeprefix('torch.')}")
        return f"{title} checkpoint, kept as {', '.join(parts)}"

    def _kept(self, linear: ParallelLinear, files: CheckpointFiles) -> KeptForm | None:
        """The one form of all weights of a linear; None: there is none, or several, or a rank's share cuts a group."""
        forms: set[KeptForm | None] = set()
        for part in linear.weight_parts():
            if part.name.endswith(".weight"):
                stored = None if self._is_changed(part) else files.stored(part.name, part.shape)
                form = None if stored is None else stored.kept
                forms.add(form if form is not None and form.has_share(Share.of(part)) else None)
        return forms.pop() if len(forms) == 1 else None

    def check(self, layers: Sequence[WeightedLayer]) -> None:
        """Raises ModelWeightError for weights that are missing or not used; no tensor is read."""
        with open_files(self.path, self.config.form, self.config.family) as files:
            self.check_names(layers, files)

    def _is_changed(self, part: WeightPart) -> bool:
        return self._merged is not None and part.name.rpartition(".")[0] in self._merged.layers

    def load_into(self, layers: Sequence[WeightedLayer], progress: Progress) -> None:
        """As WeightSource; all names are checked before the first byte is copied."""
        with open_files(self.path, self.config.form, self.config.family) as files:
            self.check_names(layers, files)
            counted = _Counted(layers, progress, self._files())
            for layer in largest_first(layers):
                self._load_layer(layer, files, counted)
            self._check_tied_head(files)
            counted.memory.release()

    def _files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))

    def _load_layer(self, layer: WeightedLayer, files: CheckpointFiles, counted: _Counted) -> None:
        if isinstance(layer, ParallelLinear) and layer.is_kept:
            self._load_integers(layer, files, counted)
            return
        layer.allocate()
        for part in layer.weight_parts():
            self._load(part, files)
            counted.add(part)
        layer.prepare()

    def _load(self, part: WeightPart, files: CheckpointFiles) -> None:
        stored = files.stored(part.name, part.shape)
        if stored is not None and not self._is_changed(part) and part.destination.shape == torch.Size(part.shape):
            _widen(stored, part.destination)
            return
        tensor = files.tensor(part.name) if stored is None else stored.rows(0, part.shape[0])
        part.load(tensor if self._merged is None else self._merged.changed(part.name, tensor))

    def _load_integers(self, linear: ParallelLinear, files: CheckpointFiles, counted: _Counted) -> None:
        kept: list[QuantizedSpecification] = []
        for part in linear.weight_parts():
            stored = files.stored(part.name, part.shape)
            if stored is None:
                self._load(part, files)
            else:
                kept.extend(Share.of(part).cut(stored.integers()))
            counted.add(part)
        linear.load_integers(with_activations(stacked(kept, linear.device), self._activation_bits))

    def whole(self, part: WeightPart, row_ids: torch.Tensor | None = None) -> torch.Tensor:
        with open_files(self.path, self.config.form, self.config.family) as files:
            stored = files.stored(part.name, part.shape)
            if stored is None:
                tensor = files.tensor(part.name)
                return (tensor if row_ids is None else tensor[row_ids]).to(part.destination.dtype)
            if row_ids is None:
                rows = torch.empty(part.shape, dtype=part.destination.dtype)
                _widen(stored, rows)
                return rows
            each = [stored.rows(row, row + 1) for row in row_ids.tolist()]
            return torch.cat(each).to(part.destination.dtype) if each else torch.empty(0, part.shape[1])

    def check_names(self, layers: Sequence[WeightedLayer], files: CheckpointFiles) -> None:
        """As `check`, of files that are open."""
        used, missing = files.used([part.name for layer in layers for part in layer.weight_parts()])
        unused = [name for name in files.names if name not in used and not self._is_ignored(name)]
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

    def _check_tied_head(self, files: CheckpointFiles) -> None:
        """transformers unties a head that differs; here the config has to say so."""
        if "lm_head.weight" not in files.names or not self.config.tie_word_embeddings:
            return
        head, embedding = (files.tensor(k) for k in ("lm_head.weight", "model.embed_tokens.weight"))
        if not torch.equal(head, embedding):
            raise ModelWeightError(
                f"{self.path}: lm_head.weight differs from model.embed_tokens.weight but config.json has "
                "tie_word_embeddings=true; set it to false"
            )


def _widen(stored: StoredWeight, out: torch.Tensor) -> None:
    """out [n, in] := the numbers of a quantised weight, rounded once to the dtype of `out`."""
    step = max(1, WIDENED_AT_ONCE // out.shape[1])
    for first in range(0, len(out), step):
        rows = out[first : first + step]
        rows.copy_(stored.rows(first, first + len(rows)))


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
