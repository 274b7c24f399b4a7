"""Prometheus endpoint over the catalogue, for the coordinator and every agent.

Nothing is recorded anywhere: at each scrape, on the endpoint's own thread, ``read`` measures what there is
and the samples are checked against the catalogue. A process that nobody scrapes pays nothing, and a scrape
never waits for, or holds up, the loop of the process that it asks. The registry is our own: Prometheus'
default figures of processes and of Python would be those of the coordinator and agents, which tell nothing
of the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from picotron_ray.errors import PicotronError
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.observability.metric import SERVER_LABELS, Metric, Server, bucket_of

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class PortTakenError(PicotronError):
    """The address that the config asks for is taken."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of a histogram: counts per bucket (the last one: above all bounds), and the sum."""

    counts: tuple[int, ...]
    sum: float

    @classmethod
    def of(cls, values: Iterable[float], buckets: tuple[float, ...]) -> Distribution:
        """Sort values into the buckets with these upper bounds; the sum is exact."""
        counts, total = [0] * (len(buckets) + 1), 0.0
        for value in values:
            counts[bucket_of(value, buckets)] += 1
            total += value
        return cls(tuple(counts), total)


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of a metric; ``labels`` are those beyond what the process adds to everything."""

    name: str
    value: float | Distribution
    labels: Mapping[str, str] = field(default_factory=dict)


Read = Callable[[], Iterable[Sample]]


class SampleCollector(Collector):
    """Prometheus collector of what ``read`` measures."""

    def __init__(self, server: Server, labels: Mapping[str, str], read: Read) -> None:
        """Make a collector; ``labels`` are the values of ``SERVER_LABELS[server]``."""
        self._server = server
        self._constant = [labels[name] for name in SERVER_LABELS[server]]
        self._read = read

    def describe(self) -> list[Family]:
        """Name nothing: a registry that is given no names does not measure at registration."""
        return []

    def collect(self) -> Iterator[Family]:
        """Measure families, in the catalogue's order. Raises ValueError for a name that it lacks."""
        families: dict[str, Family] = {}
        for sample in self._read():
            metric = CATALOGUE.get(sample.name)
            if metric is None or metric.server != self._server or set(sample.labels) != set(metric.labels):
                raise ValueError(f"{sample.name} with labels {sorted(sample.labels)} is not in the catalogue")
            values = [*self._constant, *(sample.labels[name] for name in metric.labels)]
            _add(families.setdefault(metric.name, _family(metric)), metric, values, sample.value)
        yield from (families[name] for name in CATALOGUE if name in families)


def _family(metric: Metric) -> Family:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.help, labels=metric.all_labels)
    if metric.kind == "gauge":
        return GaugeMetricFamily(metric.name, metric.help, labels=metric.all_labels)
    return HistogramMetricFamily(metric.name, metric.help, labels=metric.all_labels)


def _add(family: Family, metric: Metric, labels: list[str], value: float | Distribution) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Distribution)
        bounds = [*map(str, metric.buckets), "+Inf"]
        counts = accumulate(value.counts)
        family.add_metric(labels, list(zip(bounds, counts, strict=True)), value.sum)
    else:
        assert not isinstance(value, Distribution)
        family.add_metric(labels, value)


class Exporter:
    """Endpoint that listens until ``close``."""

    def __init__(self, server: Server, labels: Mapping[str, str], read: Read, host: str, port: int) -> None:
        """Listen at ``port`` (0: one that is free). Raises PortTakenError where that cannot be had."""
        registry = CollectorRegistry()
        registry.register(SampleCollector(server, labels, read))
        try:
            self._httpd, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise PortTakenError(
                f"metrics: the {server} cannot listen at {host}:{port} ({error.strerror or error});"
                " nothing of it is served"
            ) from error
        self.port = int(self._httpd.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


def address(host: str, node_host: str, port: int) -> str:
    """Make the ``host:port`` at which others reach an endpoint that listens at ``host`` of a node."""
    reached = node_host if host in ("0.0.0.0", "::") else host
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"
