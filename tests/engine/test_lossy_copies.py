"""Adapters whose compressed copies are lossy: what is known of their bytes is of those that are in memory."""

from __future__ import annotations

from pathlib import Path

from tests.engine.driver import Driver
from tests.engine.rules_bench import Bench, OpenDriver


def weights_of(driver: Driver) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Checksums of what is in host memory: as found, and as known."""
    store = driver.engine.adapters._residency
    weights = next(each for each in store.weights.values() if each.host is not None)
    assert weights.host is not None
    return store.tiers.host_checksums(
        [store.tiers.host.pool.view(extent) for extent in weights.host.extents]
    ), weights.checksums


def ask(driver: Driver) -> None:
    driver.submit(range(5, 25), "one", max_tokens=2)
    driver.finish()


def test_after_a_lossy_copy_the_disk_tier_brings_the_exact_bytes_and_their_checksums(
    open_driver: OpenDriver, bench: Bench, tmp_path: Path
) -> None:
    lora = {"host_compression": "int8", "disk_cache_dir": str(tmp_path), "host_memory_bytes": 16 * bench.nbytes}
    driver = open_driver(lora=lora)
    driver.registry.load("one", str(bench.adapters["one"]))
    store, housekeeping = driver.engine.adapters._residency, driver.engine.adapters.housekeeping
    exact, known = weights_of(driver)
    assert exact == known
    store.room.pass_id += 5  # no request asked lately
    assert housekeeping.reclaim_idle("host", -1e9, 1) == 1
    assert store.tiers.compressed is not None
    for _ in range(200):  # a loader's thread makes the copy
        if len(store.tiers.compressed) and next(iter(store.weights.values())).host is None:
            break
        driver.engine.adapters.wait_for_change(0.05)
    ask(driver)
    lossy, known = weights_of(driver)
    assert exact != lossy == known
    store.room.pass_id += 5
    assert housekeeping.release_idle() > 0
    ask(driver)
    assert weights_of(driver) == (exact, exact)
    driver.check_integrity()
