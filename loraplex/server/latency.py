"""How long clients waited: four histograms under vLLM's names, of all requests together.

None of them is per adapter: 5,000 adapters would make 7.5 MB a scrape. `GET /v1/adapters` has what is known of each.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram

from loraplex.core import RequestOutput

LABELS = ("model_name", "engine")
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class LatencyHistograms:
    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str = "0") -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=registry).labels(model_name, engine)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Seconds from the request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a completion.", INTER_TOKEN_BUCKETS
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "Seconds until a request began to run.", REQUEST_BUCKETS
        )
        self.request = histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from the request to its last token.", REQUEST_BUCKETS
        )

    def clock(self) -> LatencyClock:
        return LatencyClock(self)


class LatencyClock:
    """Follows one prompt's outputs. Tokens that arrive together share the time since the ones before."""

    def __init__(self, histograms: LatencyHistograms) -> None:
        self._histograms = histograms
        self._begun_s = self._last_s = time.monotonic()
        self._num_tokens = 0

    def see(self, output: RequestOutput) -> None:
        num_tokens = max((len(each.token_ids) for each in output.outputs), default=0)
        now_s = time.monotonic()
        if self._num_tokens == 0 and num_tokens:
            self._histograms.first_token.observe(now_s - self._begun_s)
            times = output.metrics
            if times is not None and times.first_scheduled_time is not None:
                self._histograms.queue.observe(max(0.0, times.first_scheduled_time - times.arrival_time))
        elif num_tokens > self._num_tokens:
            num_new = num_tokens - self._num_tokens
            for _ in range(num_new):
                self._histograms.inter_token.observe((now_s - self._last_s) / num_new)
        if num_tokens > self._num_tokens:
            self._num_tokens, self._last_s = num_tokens, now_s
        if output.finished:
            self._histograms.request.observe(now_s - self._begun_s)
