"""Serves the run's metrics to Prometheus (`extractor run --metrics-port`), from its `Counters`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from extractor.core.address import url_host
from extractor.core.counters import Counters
from extractor.core.errors import MissingExtra, UsageError
from manifest.states import Reason

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

DEFAULT_HOST = "127.0.0.1"


class Metrics:
    """A reporter that exports the last counters it received."""

    def __init__(self) -> None:
        self._counters: Counters | None = None

    def update(self, counters: Counters) -> None:
        self._counters = counters

    def report(self, message: str, **_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape, for `prometheus_client`; none before the first prompt."""
        if self._counters is not None:
            yield from _families(self._counters)


@contextmanager
def served_metrics(metrics: Metrics, *, port: int, host: str = DEFAULT_HOST) -> Iterator[str]:
    """Serve metrics over HTTP within the block; yields their URL.

    Raises MissingExtra without prometheus-client, UsageError where it cannot listen there.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError:
        raise MissingExtra(
            command="extractor run --metrics-port", extra="metrics", package="prometheus-client"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port}: cannot listen on {host} ({error.strerror}). Nothing was "
            "started: name another port (0 takes a free one) or --metrics-host."
        ) from error
    try:
        yield f"http://{url_host(host)}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _families(counters: Counters) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    rows, now = counters.rows, counters.now
    for name, what, value in (
        ("tokens", "Tokens of stored samples, this session.", counters.tokens),
        ("stored_bytes", "Bytes of stored samples, this session.", counters.stored_bytes),
        ("rows_stored", "Rows stored, this session.", rows.stored),
        ("requests_sent", "Requests sent, this session.", counters.sent),
        ("requests_retried", "Requests that are made again, this session.", counters.retried),
    ):
        yield CounterMetricFamily(f"extractor_{name}", what, value=value)
    failed = CounterMetricFamily(
        "extractor_rows_failed", "Rows given up, this session, by reason.", labels=["reason"]
    )
    for reason in Reason:  # those without a row too: a series that begins at 1 shows no increase
        failed.add_metric([reason.value], rows.failed_by_reason[reason])
    yield failed
    for name, what, value in (
        ("rows", "Rows of the input.", rows.total),
        ("rows_settled", "Rows stored or given up, over all sessions.", rows.settled),
        ("requests_in_flight", "Requests with the servers, all together.", now.in_flight),
        (
            "requests_limit",
            "Requests that may be with the servers, all together.",
            now.request_limit,
        ),
        ("budget_bytes", "Bytes of dumps that are allowed at a time.", now.budget_bytes),
        ("budget_used_bytes", "Of these, what is taken or promised.", now.shm_bytes),
    ):
        yield GaugeMetricFamily(f"extractor_{name}", what, value=value)
    for kind, name, attribute, what in (
        (GaugeMetricFamily, "up", "is_up", "1: prompts are sent to it; 0: it is away."),
        (GaugeMetricFamily, "requests_in_flight", "in_flight", "Requests with this server."),
        (
            GaugeMetricFamily,
            "requests_limit",
            "request_limit",
            "Requests that may be with this server; 0 while it is away.",
        ),
        (CounterMetricFamily, "prompts", "num_prompts", "Prompts it answered, this session."),
    ):
        family = kind(f"extractor_server_{name}", what, labels=["server"])
        for server in now.servers:
            family.add_metric([server.url], getattr(server, attribute))
        yield family
    queue = GaugeMetricFamily(
        "extractor_queue_length",
        "Prompts that wait for room in the budget; samples that wait for a mover.",
        labels=["queue"],
    )
    queue.add_metric(["budget"], now.budget_queue)
    queue.add_metric(["mover"], now.mover_queue)
    yield queue
    stages = HistogramMetricFamily(
        "extractor_stage_duration_seconds", "How long each stage takes.", labels=["stage"]
    )
    for stage, durations in counters.stages.items():
        buckets = [
            ("+Inf" if bound == float("inf") else repr(bound), count)
            for bound, count in durations.buckets()
        ]
        stages.add_metric([stage.value], buckets, sum_value=durations.total_s)
    yield stages
