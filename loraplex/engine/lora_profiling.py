"""What both fronts need to profile: names and places of adapters, and that only one profile runs at a time."""

from __future__ import annotations

from loraplex.adapters.registry import AdapterInfo, LoRARegistry
from loraplex.core import EngineInfo
from loraplex.errors import InvalidRequestError
from loraplex.performance.profile import AdapterFootprint, Kernels, LoraProfile


def names_of(registry: LoRARegistry | None) -> dict[int, str]:
    """The adapters' names by adapter_id."""
    return {} if registry is None else {ref.adapter_id: ref.adapter_name for ref in registry.refs().values()}


def footprint_of(info: AdapterInfo) -> AdapterFootprint:
    return AdapterFootprint(info.ref.adapter_name, info.tier.value, info.nbytes, info.ref.max_rank)


def kernels_of(info: EngineInfo) -> Kernels:
    return Kernels(info.backend, info.backend_description)


def check_not_profiling(profile: LoraProfile | None) -> None:
    if profile is not None:
        raise InvalidRequestError("a profile runs already; generate its report first")


def check_profiling(profile: LoraProfile | None) -> LoraProfile:
    if profile is None:
        raise InvalidRequestError("no profile runs; start one first")
    return profile
