"""Identity of an adapter: what it computes, whatever it is called and however it is filed.

    adapter_digest = blake2b-256( "loraplex-adapter-1" | len(canonical) | canonical | for each tensor, sorted by canonical name:
                                  len(line) | line = JSON [canonical name, dtype, shape] | bytes, row-major, little-endian )

Lengths are 8 bytes, little-endian. `canonical` is PEFTHelper.canonical(): rank, alpha, rsLoRA, patterns, biases. Not in it: file names,
shards, prefixes of tensor names, peft_version, the base's path, target_modules (the tensors say it).
"""

from __future__ import annotations

import hashlib
import json

TAG = b"loraplex-adapter-1"
_LINE = json.JSONEncoder(separators=(",", ":"))


class AdapterHasher:
    """Feed the tensors in the order of their canonical names."""

    def __init__(self, canonical: bytes) -> None:
        self._hash = hashlib.blake2b(TAG, digest_size=32)
        self._add_sized(canonical)
        self._last = ""

    def add(self, canonical_name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        assert canonical_name > self._last, f"{canonical_name} after {self._last}"
        self._last = canonical_name
        self._add_sized(_LINE.encode([canonical_name, dtype, shape]).encode())
        self._hash.update(data)  # releases the interpreter lock

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _add_sized(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)
