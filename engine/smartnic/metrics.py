"""Prometheus metrics: names that inference dashboards know, with the prefix ``blinkbed_``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "blinkbed_"
TIME_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0),
)
TOKEN_BUCKETS_S = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value that is read when somebody scrapes."""

    kind: str  # "gauge" or "counter"
    name: str
    help: str
    value: float


class _Reader(Collector):
    """Values that live elsewhere (in the window, in the request table)."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for sample in self._read():
            family = GaugeMetricFamily if sample.kind == "gauge" else CounterMetricFamily
            yield family(PREFIX + sample.name, sample.help, value=sample.value)


class Metrics:
    """All metrics of one SmartNIC process, in a registry of their own.

    read: called at each scrape for what is not counted here.
    """

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.success = self._counter(
            "request_success", "Requests that ended, by reason.", ("finished_reason",)
        )
        self.rejected = self._counter(
            "request_rejected", "Requests that were refused, by reason.", ("reason",)
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Submission to first token.", TIME_BUCKETS_S
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean over a request.", TOKEN_BUCKETS_S
        )
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Submission to end.", TIME_BUCKETS_S
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Pickup by the device to admission.", TIME_BUCKETS_S
        )
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(reason)
        self._registry.register(_Reader(read))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self._registry)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)
