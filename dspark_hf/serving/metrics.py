"""The engine's counters for Prometheus. Owns: names and help texts. Does not own: counting (`engine.stats`)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .worker import EngineWorker


class EngineCollector:
    """Reads the engine's statistics when it is asked."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker = worker

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        engine, stats = self.worker.engine, self.worker.engine.stats
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens read", stats.prompt_tokens),
            ("new_tokens", "Tokens committed", stats.new_tokens),
            ("drafted_tokens", "Tokens drafted", stats.drafted),
            ("verified_tokens", "Drafted tokens verified", stats.verified),
            ("accepted_tokens", "Drafted tokens accepted", stats.accepted),
            ("steps", "Forwards of the target", stats.steps),
            ("step_seconds", "Seconds of all steps", stats.seconds),
        ):
            yield CounterMetricFamily(f"dspark_{name}", text, value=value)
        finished = CounterMetricFamily("dspark_requests", "Requests that are over", labels=["reason"])
        for reason, count in list(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield GaugeMetricFamily("dspark_requests_in_flight", "Requests not over yet", value=self.worker.num_requests)
        last = stats.history[-1] if stats.history else None
        yield GaugeMetricFamily("dspark_cache_tokens", "Tokens in the cache", value=last.cache_tokens if last else 0)
        yield GaugeMetricFamily("dspark_cache_bytes", "Memory of the cache", value=engine.cache_bytes if last else 0)


def metrics_text(worker: EngineWorker) -> bytes:
    """The page of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(worker))
    return generate_latest(registry)
