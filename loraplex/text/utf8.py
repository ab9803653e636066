"""Long texts from strangers, decoded piece by piece: one call would keep the interpreter from other threads."""

from __future__ import annotations

import codecs

_PIECE_BYTES = 2**20


def decode_in_pieces(data: bytes, start: int = 0, errors: str = "strict") -> str:
    """`data[start:].decode("utf-8", errors)`. Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    view = memoryview(data)
    pieces = [decoder.decode(view[at : at + _PIECE_BYTES]) for at in range(start, len(data), _PIECE_BYTES)]
    return "".join(pieces) + decoder.decode(b"", final=True)
