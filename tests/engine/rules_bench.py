"""A base model with adapters of one size, and what a driven engine's client asks and checks (fixtures: conftest.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.engine.driver import Driver
from tests.fixtures import GreedyCase

PROMPT_LENGTH = 20
NUM_TOKENS = 16
MAX_MODEL_LEN = 128
NAMES = ("one", "two", "three", "four")
OpenDriver = Callable[..., Driver]


@dataclass(frozen=True)
class Bench:
    """A base model, four adapters of one size and two versions of a fifth; `cases[path]` are two prompts and what it
    says to them.

    nbytes: what one of the adapters takes on the device.
    """

    base: Path
    adapters: Mapping[str, Path]
    versions: tuple[Path, Path]
    cases: Mapping[Path | None, list[GreedyCase]]
    nbytes: int


def loaded(driver: Driver, bench: Bench) -> Driver:
    for name, path in bench.adapters.items():
        driver.registry.load(name, str(path))
    return driver


class Asked:
    """One request for an adapter of the bench (None: the base), and whether it got the oracle's answer."""

    def __init__(
        self, driver: Driver, bench: Bench, name: str | None, which: int = 0, num_tokens: int = NUM_TOKENS
    ) -> None:
        self.case = bench.cases[None if name is None else bench.adapters[name]][which]
        self._driver = driver
        self._num_tokens = num_tokens
        self.request_id = driver.submit(self.case.prompt_token_ids, name, max_tokens=num_tokens)

    def check(self) -> None:
        assert self._driver.tokens(self.request_id) == self.case.output_token_ids[: self._num_tokens]


def content_of(driver: Driver, name: str) -> tuple[int | None, bytes]:
    """The adapter's lora_slot and its packed bytes, as kernels find them."""
    ref = driver.registry.resolve(name)
    store = driver.engine.adapters._residency
    host = store.weights[ref.adapter_digest].host
    assert host is not None
    packed = b"".join(store.tiers.host.pool.view(extent).numpy().tobytes() for extent in host.extents)
    return driver.registry.describe(name).lora_slot, packed
