"""Which of the files that the hub or a store lists a load reads, and how many bytes they may have. No network."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from loraplex.adapters.files import (
    BIN_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    MAX_CONFIG_BYTES,
    NEW_EMBEDDINGS,
    SHARD_NAME,
    TEXT_NAMES,
    WEIGHT_NAMES,
)
from loraplex.errors import AdapterFileFormatError, AdapterTooLargeError

MAX_FILES = 1000
"""That are listed beside an adapter's."""

MAX_TEXT_BYTES = 2**26
MAX_NOT_WEIGHTS_BYTES = MAX_CONFIG_BYTES + (len(TEXT_NAMES) + 2) * MAX_TEXT_BYTES
"""Of all files of an adapter, the headers of its weights included: what is beyond it are tensors."""


def wanted_names(listed: Collection[str], shard: re.Pattern[str] = SHARD_NAME) -> list[str]:
    """What a load reads of a directory, and nothing else: `.bin` only where there are no other weights, and with an
    index what `shard` matches."""
    weights = next((name for name in WEIGHT_NAMES if name in listed), BIN_NAME)
    names = {CONFIG_NAME, *NEW_EMBEDDINGS, *TEXT_NAMES, weights}
    if weights == INDEX_NAME:
        names.update(name for name in listed if shard.fullmatch(name))
    return sorted(name for name in names if name in listed)


def check_sizes(adapter: object, sizes: Mapping[str, int], max_bytes: int) -> None:
    """sizes: by the names of files. Raises AdapterFileFormatError for one file that is too long, AdapterTooLargeError
    for all together."""
    for name, size in sizes.items():
        limit = MAX_CONFIG_BYTES if name == CONFIG_NAME else MAX_TEXT_BYTES if name in TEXT_NAMES else None
        if limit is not None and size > limit:
            raise AdapterFileFormatError(f"{adapter}: {name} has {size} bytes, at most {limit} are read")
    num_bytes = sum(sizes.values())
    if num_bytes > max_bytes:
        raise AdapterTooLargeError(
            f"{adapter} has {num_bytes} bytes, and at most {max_bytes} are fetched: four times what the memory for "
            "adapters holds"
        )
