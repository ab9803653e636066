"""A version of the table as its record, and back."""

from __future__ import annotations

from loraplex.adapters.registry.records import NameRecord, VersionRecord
from loraplex.adapters.registry.version import AdapterVersion, LoRARef
from loraplex.core import AdapterId, AdapterSpec


def record_version(version: AdapterVersion) -> VersionRecord:
    ref, spec = version.ref, version.spec
    return VersionRecord(
        adapter_id=ref.adapter_id,
        number=ref.adapter_version,
        digest=ref.adapter_digest,
        path=spec.path,
        lora_path=ref.lora_path,
        origin=version.origin,
        nbytes=spec.nbytes,
        max_rank=ref.max_rank,
        is_pinned=version.is_pinned,
        loaded_time=version.loaded_time,
    )


def restore_version(name: str, record: VersionRecord, owner: NameRecord) -> AdapterVersion:
    adapter_id = AdapterId(record.adapter_id)
    number, digest, max_rank = record.number, record.digest, record.max_rank
    return AdapterVersion(
        ref=LoRARef(adapter_id, name, number, digest, owner.lora_int_id, max_rank, record.lora_path),
        spec=AdapterSpec(adapter_id, name, number, digest, record.path, record.nbytes, max_rank),
        origin=record.origin,
        is_pinned=record.is_pinned,
        loaded_time=record.loaded_time,
        last_used_time=owner.usage.last_used_time,
    )
