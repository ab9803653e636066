"""A made adapter as a PEFT directory: adapter_config.json and adapter_model.safetensors, there whole or not at all.

temporary folder beside it -> both files, fsync -> rename -> fsync of the folder above
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loraplex.adapters.files import CONFIG_NAME, SAFETENSORS_NAME
from loraplex.adapters.kinds import BASE_WEIGHT, PARTS, PREFIX, WEIGHT, Kind
from loraplex.adapters.merging.part_folder import held, part_prefix, release, remove_abandoned
from loraplex.adapters.regular_file import sync_path, unwritable
from loraplex.errors import AdapterConflictError, AdapterDiskFullError, AdapterPathNotFoundError

SPARE_DISK_BYTES = 64 * 2**20
"""Stay free: others write to the same disk."""

LINEAR_PARTS, EMBEDDING_PARTS = (
    tuple(PARTS[Kind.LORA][f"{form}_{side}"] for side in "ab") for form in ("lora", "embedding")
)


@dataclass(frozen=True)
class MadeAdapter:
    """What is written. origin: what it was made of, for the header of the file."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    origin: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of_lora(
        cls,
        factors: Mapping[str, tuple[torch.Tensor, torch.Tensor, float]],
        base: str | None,
        origin: str,
        saved: Mapping[str, torch.Tensor] | None = None,
    ) -> MadeAdapter:
        """A plain LoRA: module -> A, B, scaling. Ranks and alphas that are not the most frequent are in patterns.
        saved: the weights of embeddings and heads that peft puts into the base model."""
        ranks = {module: len(lora_a) for module, (lora_a, _, _) in factors.items()}
        alphas = {module: _whole(scaling * ranks[module]) for module, (_, _, scaling) in factors.items()}
        rank, alpha = _most_frequent(ranks), _most_frequent(alphas)
        tensors: dict[str, torch.Tensor] = {}
        for module, (lora_a, lora_b, _) in factors.items():
            parts = EMBEDDING_PARTS if module.endswith("embed_tokens") else LINEAR_PARTS
            tensors |= {
                f"{PREFIX}{module}.{part}": each.contiguous()
                for part, each in zip(parts, (lora_a, lora_b), strict=True)
            }
        for module, weight in (saved or {}).items():
            tensors[f"{PREFIX}{module}.{BASE_WEIGHT if module in factors else WEIGHT}"] = weight.contiguous()
        config = {
            **_fields("LORA", base, factors),
            "r": rank,
            "lora_alpha": alpha,
            "rank_pattern": {module: each for module, each in ranks.items() if each != rank},
            "alpha_pattern": {module: each for module, each in alphas.items() if each != alpha},
            "bias": "none",
            "use_rslora": False,
            "lora_dropout": 0.0,
        }
        return cls(config, tensors, origin)

    @classmethod
    def of_ia3(cls, gains: Mapping[str, torch.Tensor], base: str | None, origin: str) -> MadeAdapter:
        """module -> gains of its inputs [1, in], or of its outputs [out, 1]."""
        of_inputs = [module for module, gain in gains.items() if len(gain) == 1]
        tensors = {f"{PREFIX}{module}.ia3_l": gain for module, gain in gains.items()}
        return cls({**_fields("IA3", base, gains), "feedforward_modules": of_inputs}, tensors, origin)


def _fields(peft_type: str, base: str | None, modules: Iterable[str]) -> dict[str, Any]:
    return {
        "peft_type": peft_type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "target_modules": list(modules),
        "inference_mode": True,
    }


def _most_frequent(values: Mapping[str, Any]) -> Any:
    found = list(values.values())
    return max(set(found), key=lambda value: (found.count(value), value))


def _whole(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def check_disk(folder: Path, nbytes: int) -> None:
    """Raise AdapterDiskFullError when so much would not leave SPARE_DISK_BYTES free."""
    free = shutil.disk_usage(folder).free
    if nbytes + SPARE_DISK_BYTES > free:
        text = f"{nbytes} bytes are to be written and {free} are free, of which {SPARE_DISK_BYTES} stay free"
        raise AdapterDiskFullError(f"the disk of the output folder is too full: {text}; make room on it")


def check_output(folder: Path) -> None:
    """Raise AdapterConflictError for one that is there, AdapterPathNotFoundError for one that cannot be made."""
    if os.path.lexists(folder):
        raise AdapterConflictError(f"{folder} is there already; give a folder that is not")
    if not os.access(folder.absolute().parent, os.W_OK | os.X_OK):
        raise AdapterPathNotFoundError(f"{folder.absolute().parent} is no directory that can be written to")


def write_directory(made: MadeAdapter, folder: Path) -> None:
    """Make `folder`, which must not be there. Raises what the checks raise, and LoraplexError for a disk that fails."""
    folder = folder.absolute()
    check_output(folder)
    remove_abandoned(folder.parent, unlocked_s=math.inf)  # it may be any folder of a user's
    check_disk(folder.parent, made.nbytes)
    try:
        _write(made, folder)
    except OSError as error:
        raise unwritable(str(folder), error) from error


def _write(made: MadeAdapter, folder: Path) -> None:
    part = Path(tempfile.mkdtemp(prefix=part_prefix(folder), dir=folder.parent))
    try:
        with held(part):
            (part / CONFIG_NAME).write_text(json.dumps(made.config, indent=2) + "\n")
            save_file(dict(made.tensors), part / SAFETENSORS_NAME, {"format": "pt", "made_of": made.origin})
            for path in (part / CONFIG_NAME, part / SAFETENSORS_NAME):
                sync_path(path)
            release(part)
            sync_path(part)
            part.rename(folder)
        sync_path(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
