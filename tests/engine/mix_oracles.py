"""What peft makes of several adapters at a time."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fixtures import ModelZoo, Oracle


def cat_oracle(zoo: ModelZoo, base: Path, parts: Sequence[tuple[Path, float]]) -> Oracle:
    model = several(zoo, base, [path for path, _ in parts])
    names = [f"part-{index}" for index in range(len(parts))]
    model.add_weighted_adapter(names, [weight for _, weight in parts], "mix", combination_type="cat")
    model.set_adapter("mix")
    return Oracle(model)


def active_oracle(zoo: ModelZoo, base: Path, parts: Sequence[tuple[Path, float]]) -> Oracle:
    model = several(zoo, base, [path for path, _ in parts])
    names = [f"part-{index}" for index in range(len(parts))]
    model.base_model.set_adapter(names)
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "scaling", None), dict)]
    for (name, (_, weight)), layer in itertools.product(zip(names, parts, strict=True), layers):
        if weight != 1 and name in layer.scaling:
            layer.scaling[name] *= weight
    return Oracle(model)


def several(zoo: ModelZoo, base: Path, paths: Sequence[Path]) -> Any:
    """PEFT's model with all of them loaded, as part-0, part-1 ..."""
    import peft

    types = {peft.PeftConfig.from_pretrained(path).peft_type for path in paths}
    kind = peft.PeftModel if len(types) == 1 else peft.PeftMixedModel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = kind.from_pretrained(copy.deepcopy(zoo.oracle(base).model), paths[0], adapter_name="part-0")
        for index, path in enumerate(paths[1:], 1):
            model.load_adapter(path, f"part-{index}")
    return model
