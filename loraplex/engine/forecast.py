"""Which adapters the arrivals so far say will be asked for soon (memory/care/prediction.py), by adapter id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from loraplex.core import Request
from loraplex.memory.care.prediction import MAX_KEYS, ArrivalPredictor

HORIZON_S = 5.0
"""A load from disk takes milliseconds and one from a slow source seconds: earlier is only longer in memory."""

MAX_PREDICTIONS = 4
"""At once; the next look brings more."""


class Forecast:
    """Told of every request for an adapter; contents are what is predicted, so a reload under the same name is another one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._predictor = ArrivalPredictor()
        self._adapter_of: OrderedDict[str, int] = OrderedDict()  # of the contents that the predictor may know

    def arrived(self, request: Request) -> None:
        if request.adapter_id is not None:
            self._adapter_of[request.adapter_digest] = request.adapter_id
            self._adapter_of.move_to_end(request.adapter_digest)
            if len(self._adapter_of) > MAX_KEYS:
                self._adapter_of.popitem(last=False)
            self._predictor.observe(request.adapter_digest, self._clock())

    def due(self) -> list[int]:
        """Adapters that will probably be asked for within the horizon, the likeliest first."""
        predictions = self._predictor.predict(self._clock(), HORIZON_S, MAX_PREDICTIONS)
        return [self._adapter_of[each.key] for each in predictions if each.key in self._adapter_of]
