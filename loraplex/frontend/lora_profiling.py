"""What both fronts need to profile: names and places of adapters, and that only one profile runs at a time."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.adapters.registry import AdapterInfo, LoRARegistry
from loraplex.adapters.registry.adapter_name import address_text
from loraplex.core import EngineInfo
from loraplex.errors import InvalidRequestError
from loraplex.performance.profile import AdapterFootprint, Kernels, LoraProfile


def address_of(registry: LoRARegistry | None, adapter_id: int) -> str | None:
    """What a client writes for an adapter: `sql`, or `sql@2` for a version that the bare name does not mean."""
    return None if registry is None else registry.address_of(adapter_id)


def footprints_of(infos: Iterable[AdapterInfo]) -> list[AdapterFootprint]:
    """Of every name, and of its other versions as `name@N`."""
    footprints = []
    for info in infos:
        name = info.ref.adapter_name
        footprints.append(AdapterFootprint(name, info.tier.value, info.nbytes, info.ref.max_rank))
        for each in info.versions:
            address = address_text(name, each.ref.adapter_version)
            footprints.append(AdapterFootprint(address, each.tier.value, each.nbytes, each.ref.max_rank, is_kept=True))
    return footprints


def kernels_of(info: EngineInfo) -> Kernels:
    return Kernels(info.backend, info.backend_description, info.device)


def check_not_profiling(profile: LoraProfile | None) -> None:
    if profile is not None:
        raise InvalidRequestError("a profile runs already; generate its report first")


def check_profiling(profile: LoraProfile | None) -> LoraProfile:
    if profile is None:
        raise InvalidRequestError("no profile runs; start one first")
    return profile
