"""The form of an upload, multipart/form-data, read piece by piece: fields and named files, all bounded, nothing nested.

Parts, their headers and fields are counted while they come; a file goes to `write` as it comes. python-multipart finds
the boundaries: 1 MiB takes it a tenth of a millisecond, and half a second where the boundary is in it again and again
(measured), so these are counted first: clients choose one that their files do not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.adapters.files import CONFIG_NAME, MAX_CONFIG_BYTES, SAFETENSORS_NAME, TEXT_NAMES
from loraplex.adapters.remote.wanted import MAX_TEXT_BYTES
from loraplex.server.api_error import ApiError, clipped

MAX_PARTS, MAX_HEADERS, MAX_HEADER_BYTES, MAX_FIELD_BYTES = 24, 8, 1024, 4096
MAX_BYTES: Mapping[str, int | None] = {
    CONFIG_NAME: MAX_CONFIG_BYTES,
    SAFETENSORS_NAME: None,
    **dict.fromkeys(TEXT_NAMES, MAX_TEXT_BYTES),
}
"""Files that an upload may have, and the most bytes of each; None: those of an upload."""

MAX_CONTENT_TYPE_CHARS = 256
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=?-]{16,70}")
_PLAIN = (b"", b"7bit", b"8bit", b"binary")


class UploadForm:
    """`fields` and `files` (bytes by name) so far; `is_whole` when the last boundary was there. `write` takes more of a
    file. Raises ApiError 400, and what `write` raises. Used by one thread at a time."""

    def __init__(self, content_type: str, write: Callable[[str, bytes], None]) -> None:
        if len(content_type) > MAX_CONTENT_TYPE_CHARS:  # before it is parsed, which takes quadratic time
            raise _wrong(f"Content-Type has more than {MAX_CONTENT_TYPE_CHARS} characters")
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not _BOUNDARY.fullmatch(boundary):
            raise _wrong("Content-Type has no boundary of 16 to 70 characters")
        self.fields: dict[str, str] = {}
        self.files: dict[str, int] = {}
        self.is_whole = False
        self._write = write
        self._num_parts = self._num_boundaries = 0
        self._boundary = b"--" + boundary
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        self._field: str | None = None
        self._file: str | None = None
        self._data = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._add,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> None:
        self._num_boundaries += data.count(self._boundary)
        if self._num_boundaries > MAX_PARTS + 1:
            raise _wrong(f"the form has more than {MAX_PARTS} parts, or its boundary is in the files")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _wrong(f"the form is not valid: {error}") from None
        self._flush()

    def check_whole(self) -> None:
        if not self.is_whole:
            raise _wrong("the form ends before its last boundary")

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _wrong(f"a form has at most {MAX_PARTS} parts")
        self._headers.clear()

    def _end_header(self) -> None:
        name = bytes(self._header).lower()
        if name in self._headers:
            raise _wrong("a part has a header twice")
        self._headers[name] = bytes(self._value).strip()
        self._header.clear()
        self._value.clear()

    def _end_head(self) -> None:
        if self._headers.get(b"content-transfer-encoding", b"").lower() not in _PLAIN:
            raise _wrong("a part is encoded: send its bytes as they are")
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _wrong("a part has no Content-Disposition: form-data with a name")
        name = _text(options.get(b"filename", options[b"name"]))
        if b"filename" not in options:
            if name in self.fields or self.files:
                raise _wrong(f"the field {clipped(name)!r} is there twice, or after a file: fields come first")
            self._field = name
            return
        if name not in MAX_BYTES:
            why = " is pickle, which may run code when it is read, and" if name.endswith((".bin", ".pt")) else ""
            raise _wrong(f"the file {clipped(name)!r}{why} is not taken; send {', '.join(MAX_BYTES)}")
        if name in self.files:
            raise _wrong(f"the file {clipped(name)!r} is there twice")
        if "name" not in self.fields:
            raise _wrong("the field 'name' is missing: it comes before the files")
        self.files[name], self._file = 0, name

    def _add(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if self._field is not None and len(self._data) > MAX_FIELD_BYTES:
            raise _wrong(f"the field {clipped(self._field)!r} is longer than {MAX_FIELD_BYTES} bytes")

    def _flush(self) -> None:
        """Write what has come of a file."""
        if self._file is None or not self._data:
            return
        self.files[self._file] += len(self._data)
        limit = MAX_BYTES[self._file]
        if limit is not None and self.files[self._file] > limit:
            raise _wrong(f"the file {self._file!r} is longer than {limit} bytes")
        self._write(self._file, bytes(self._data))
        self._data.clear()

    def _end(self) -> None:
        self._flush()
        if self._file is not None and not self.files[self._file]:
            raise _wrong(f"the file {self._file!r} is empty")
        if self._field is not None:
            self.fields[self._field] = _text(bytes(self._data))
        self._field = self._file = None
        self._data.clear()

    def _finish(self) -> None:
        self.is_whole = True


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _wrong("a field or a name is not UTF-8") from None


def _wrong(text: str) -> ApiError:
    return ApiError(f"the upload is not usable: {text}", code="invalid_upload")
