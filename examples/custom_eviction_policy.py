"""An eviction policy of one's own, beside one of Loraplex's: `python examples/custom_eviction_policy.py`.

The device has room for three adapters, and six are asked for in turn, again and again. The least recently used one is
always the next that will be asked for, so `lru` brings every adapter back for every request. Keeping some of them for
good is better: of what is on the device, the one that was used last goes first.

A server takes the same class by its place: `PYTHONPATH=examples loraplex serve MODEL --eviction-policy
custom_eviction_policy:MostRecentFirst`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loraplex import LLM, LoRARequest, SamplingParams
from loraplex.demo.tasks import TASKS, adapter_path, assets_path

NUM_ON_DEVICE, NUM_ADAPTERS, NUM_ROUNDS = 3, 6, 4


class MostRecentFirst:
    """For requests that go round. The engine makes one for each tier, and calls it under its lock."""

    name = "most_recent_first"
    evicts = True

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}  # the most recent one is the last

    def enter(self, key: str, nbytes: int, reload_s: float | None = None) -> None:
        """It is in the tier from now on. Its bytes, and the seconds of its last load, are what a policy may weigh."""
        self._keys.setdefault(key)

    def use(self, key: str) -> None:
        """One request got it."""
        if key in self._keys:
            self._keys[key] = self._keys.pop(key)

    def touch(self, key: str) -> None:
        """A request waits for it, or gives it back."""

    def evict(self, key: str) -> None:
        """It leaves to make room."""
        self.forget(key)

    def forget(self, key: str) -> None:
        """It is no longer in the tier, for whatever reason."""
        self._keys.pop(key, None)

    def order(self, is_queued: Callable[[str], bool] | None = None) -> Iterator[str]:
        """Every key of the tier, the first to go in front. The engine skips those that run or are pinned."""
        return reversed(self._keys)


def promotions(eviction_policy: str | type) -> int:
    """How often an adapter was brought to the device, one request after the other."""
    requests = [
        LoRARequest(task.name, number, str(adapter_path(task.name)))
        for number, task in enumerate(TASKS[:NUM_ADAPTERS], start=1)
    ]
    with LLM(
        str(assets_path() / "base"), max_loras=NUM_ON_DEVICE, eviction_policy=eviction_policy, enable_prediction=False
    ) as llm:
        for request in requests * NUM_ROUNDS:
            llm.generate("good morning=", SamplingParams(temperature=0, max_tokens=4), lora_request=request)
        return llm.memory_report().count("promotions")


def main() -> None:
    print(f"{NUM_ADAPTERS} adapters in turn, {NUM_ROUNDS} times, {NUM_ON_DEVICE} on the device:")
    print(f"lru                {promotions('lru'):2} promotions")
    print(f"most_recent_first  {promotions(MostRecentFirst):2} promotions")


if __name__ == "__main__":
    main()
