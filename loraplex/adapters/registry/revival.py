"""A store that started empty learns what is registered: at once and without reading, then the pinned adapters are promoted."""

from __future__ import annotations

import logging
from collections.abc import Callable

from loraplex.adapters.registry.drain import Drain
from loraplex.adapters.registry.effects import Effects
from loraplex.adapters.registry.turns import Turns
from loraplex.core import AdapterStore
from loraplex.errors import AdapterNotFoundError, EngineError, LoraplexError

_log = logging.getLogger(__name__)


class Revival:
    """run_later: where the pinned adapters are loaded, one after the other, while requests are served already."""

    def __init__(
        self,
        store: AdapterStore,
        effects: Effects,
        turns: Turns,
        drain: Drain,
        run_later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._store = store
        self._effects = effects
        self._turns = turns
        self._drain = drain
        self._run_later = run_later

    def attach(self) -> None:
        """Versions that drain are left out: their requests ended with the engine that they ran in."""
        with self._effects.lock:
            table = self._effects.table
            current = list(table.current.values())
            kept = [version for versions in table.kept.values() for version in versions]
        self._store.attach_adapters([version.spec for version in (*current, *kept)])
        with self._effects.lock:
            gone = [version for version in (*current, *kept) if not table.has(version)]
        for (
            version
        ) in gone:  # a verb that began before the engine died has retired it, and may have found nothing to drop
            self._drain.try_quietly(self._store.drop_adapter, version.adapter_id)
        if any(version.is_pinned for version in current):
            self._run_later(lambda: self._pin([v.ref.adapter_name for v in current if v.is_pinned]))

    def _pin(self, names: list[str]) -> None:
        for name in names:
            try:
                self._pin_one(name)
            except (
                AdapterNotFoundError,
                EngineError,
            ) as error:  # unloaded meanwhile; or the engine ended, and starts again
                _log.info("adapter %r is not pinned now: %s", name, error)
            except LoraplexError as error:
                _log.error("adapter %r could not be pinned again: %s", name, error)

    def _pin_one(self, name: str) -> None:
        """The pin is lifted when the adapter cannot be pinned: the truth, rather than the wish."""
        with self._turns.verb_on(name) as version:
            if not version.is_pinned:
                return
            try:
                self._store.pin_adapter(version.adapter_id)
            except EngineError:
                raise
            except LoraplexError:
                self._drain.note_pin(version, False)
                raise
