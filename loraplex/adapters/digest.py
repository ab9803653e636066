"""Identity of an adapter: what it computes, whatever it is called and however it is filed.

    adapter_digest = blake2b-256( "loraplex-adapter-1" | len(canonical) | canonical
                                  | for each tensor, sorted by canonical name: len(line) | line | bytes )
    line           = JSON [canonical name, dtype, shape]
    bytes          = the tensor's elements, row-major, little-endian

Lengths are 8 bytes, little-endian. `canonical` is PEFTHelper.canonical(): rank, alpha, rsLoRA, patterns, biases. Not in
it: file names, shards, prefixes of tensor names, peft_version, the base's path, target_modules (the tensors say it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

TAG = b"loraplex-adapter-1"


def digest_line(canonical_name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before a tensor's bytes."""
    return _sized(json.dumps([canonical_name, dtype, shape], separators=(",", ":")).encode())


def adapter_digest(canonical: bytes, tensors: Iterable[tuple[bytes, memoryview]]) -> str:
    """(line, bytes) of each tensor, in the order of their canonical names."""
    content = hashlib.blake2b(TAG + _sized(canonical), digest_size=32)
    for line, data in tensors:
        content.update(line)
        content.update(data)  # releases the interpreter lock
    return content.hexdigest()


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
