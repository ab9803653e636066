"""Rows of the journal as records, when they can be: types, ranges, and what belongs together.

SQLite keeps any value in any column, and a file may have been edited, or restored in part. What is not as the registry
would have written it is damage, said in words, of one name or of the whole file; nothing of it reaches the registry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loraplex.adapters.fields import MAX_RANK
from loraplex.adapters.registry.adapter_name import check_adapter_name
from loraplex.adapters.registry.records import NameRecord, NameUsage, VersionRecord
from loraplex.errors import LoraplexError

MAX_SHOWN = 8
"""Damages that one message lists; the rest is a count."""

MAX_NUMBER = 10**18
"""Below SQLite's largest, so that there is a next one."""

Text = Annotated[str, Meta(min_length=1, max_length=8192)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
LocalPath = Annotated[str, Meta(pattern=r"\A/", max_length=8192)]
LoraIntId = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Time = Annotated[float, Meta(ge=0, le=1e11)]

Row = Mapping[str, Any]


class DamagedRecordError(ValueError):
    """One name's rows are not what the registry writes."""


@dataclass(frozen=True, slots=True)
class Damage:
    """name: whose record it is; None when it is of the whole file."""

    name: str | None
    what: str

    def __str__(self) -> str:
        return self.what if self.name is None else f"adapter {self.name[:80]!r}: {self.what}"


class _NameRow(msgspec.Struct, forbid_unknown_fields=True):
    name: Text
    lora_int_id: LoraIntId | None
    alias_of: Text | None
    last_number: Number
    history: str
    num_loads: Number
    num_requests: Count
    last_used_time: Time


class _VersionRow(msgspec.Struct, forbid_unknown_fields=True):
    adapter_id: Number
    name: Text
    place: Count
    number: Number
    digest: Digest
    path: LocalPath
    lora_path: Text
    origin: Annotated[str, Meta(max_length=8192)]
    nbytes: Number
    max_rank: Rank
    is_pinned: Annotated[int, Meta(ge=0, le=1)]
    loaded_time: Time


def summary(damages: Sequence[Damage]) -> str:
    text = "; ".join(map(str, damages[:MAX_SHOWN]))
    return text if len(damages) <= MAX_SHOWN else f"{text}; and {len(damages) - MAX_SHOWN} more"


def name_record(row: Row, version_rows: Sequence[Row]) -> NameRecord:
    """The record of one name. Raises DamagedRecordError, which says what is wrong with it."""
    for column, value in (item for each in (row, *version_rows) for item in each.items()):
        if isinstance(value, str) and not is_plain_text(value):
            raise DamagedRecordError(f"its {column} is not text: it has a NUL character or is not UTF-8")
    try:
        name = msgspec.convert(dict(row), _NameRow)
        versions = [msgspec.convert(dict(each), _VersionRow) for each in version_rows]
        history = msgspec.json.decode(name.history, type=list[Number | Text])
    except msgspec.ValidationError as error:
        raise DamagedRecordError(str(error)) from None
    except msgspec.DecodeError as error:
        raise DamagedRecordError(f"its history is not JSON: {error}") from None
    try:
        check_adapter_name(name.name, ())
    except LoraplexError as error:
        raise DamagedRecordError(str(error)) from None
    _check_versions(name, versions)
    usage = NameUsage(name.name, name.num_loads, name.num_requests, name.last_used_time)
    records = tuple(map(_version_record, versions))
    return NameRecord(name.lora_int_id, name.alias_of, name.last_number, records, usage, tuple(history))


def check_together(names: Mapping[str, NameRecord], last_adapter_id: int) -> list[Damage]:
    """What no name shows alone: an id of two versions, a number of two names, an id that was never given.

    Also an alias of an alias: a switch follows what it finds.
    """
    ids = Counter(version.adapter_id for record in names.values() for version in record.versions)
    numbers = Counter(record.lora_int_id for record in names.values() if record.lora_int_id is not None)
    damages = []
    if ids and max(ids) > last_adapter_id:
        owner = next(
            name for name, record in names.items() if any(each.adapter_id == max(ids) for each in record.versions)
        )
        text = f"the last adapter_id is {last_adapter_id}, but {max(ids)} was given (adapter {owner[:80]!r})"
        damages.append(Damage(None, text))
    for name, record in names.items():
        if any(ids[version.adapter_id] > 1 for version in record.versions):
            damages.append(Damage(name, "an adapter_id of it belongs to several versions"))
        if record.lora_int_id is not None and numbers[record.lora_int_id] > 1:
            damages.append(Damage(name, f"lora_int_id {record.lora_int_id} belongs to several names"))
        target = record.alias_of
        if target is not None and target in names and names[target].alias_of is not None:
            damages.append(Damage(name, f"it was switched to {target[:80]!r}, which does not answer for itself"))
    return damages


def _check_versions(name: _NameRow, versions: Sequence[_VersionRow]) -> None:
    numbers = [each.number for each in versions]
    if not versions:
        raise DamagedRecordError("it has no version")
    if [each.place for each in versions] != list(range(len(versions))):
        raise DamagedRecordError(f"places of its versions are {[each.place for each in versions[:MAX_SHOWN]]}")
    if len(set(numbers)) < len(numbers) or max(numbers) > name.last_number:
        raise DamagedRecordError(f"versions {numbers[:MAX_SHOWN]} do not fit the last number {name.last_number}")


def is_plain_text(text: str) -> bool:
    """Text that is not UTF-8 has half characters (tables.py reads it so), which no path and no name can have."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _version_record(row: _VersionRow) -> VersionRecord:
    fields = {name: getattr(row, name) for name in row.__struct_fields__ if name not in ("name", "place", "is_pinned")}
    return VersionRecord(**fields, is_pinned=bool(row.is_pinned))
