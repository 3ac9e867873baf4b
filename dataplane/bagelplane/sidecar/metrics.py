"""The sidecar's metrics in Prometheus' form: what each is, and how it comes out of a status.

METRICS is the one list of them: docs/reference/metrics.md is written from it, and the tests hold the dashboard's
queries to it. Values come from the status at the moment that they are asked for: one bookkeeping, not two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Status = Mapping[str, Any]
Sample = tuple[list[str], Any]
"""Label values, and the number or histogram that belongs to them."""

PREFIX = "bagelplane_"


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One metric. Counters end in `_total` for Prometheus; a histogram has `_bucket`, `_sum` and `_count`."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    samples: Callable[[Status], Iterable[Sample]]


def _of_ranks(*path: str) -> Callable[[Status], Iterator[Sample]]:
    """One sample a rank: what stands in its status at that path, 0 for null."""

    def samples(status: Status) -> Iterator[Sample]:
        for rank in status["ranks"]:
            yield [str(rank["rank"])], _at(rank, path) or 0

    return samples


def _of_tables(*path: str) -> Callable[[Status], Iterator[Sample]]:
    """One sample for each entry of a table in a rank's status; its keys are further labels."""

    def samples(status: Status) -> Iterator[Sample]:
        for rank in status["ranks"]:
            for keys, value in _flatten(_at(rank, path)):
                yield [str(rank["rank"]), *keys], value

    return samples


def _of_histogram(name: str, total: str) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        for rank in status["ranks"]:
            found = rank[name]
            bounds = [*map(str, found["upper_bounds"]), "+Inf"]
            cumulative = itertools.accumulate(found["counts"])
            yield [str(rank["rank"])], (list(zip(bounds, cumulative, strict=True)), rank[total])

    return samples


def _of_sidecar(*path: str) -> Callable[[Status], Iterator[Sample]]:
    """One sample; none for null."""

    def samples(status: Status) -> Iterator[Sample]:
        value = _at(status, path)
        if value is not None:
            yield [], value

    return samples


def _at(status: Status, path: Iterable[str]) -> Any:
    """What stands there; None where a part on the way is null."""
    value: Any = status
    for name in path:
        value = value[name] if value is not None else None
    return value


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[list[str], float]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from (([key, *keys], inner) for keys, inner in _flatten(value))
        else:
            yield [key], value


_RANK = ("rank",)


def _counter(text: str, *path: str) -> MetricDoc:
    return MetricDoc("counter", _RANK, text, _of_ranks(*path))


def _gauge(text: str, *path: str) -> MetricDoc:
    return MetricDoc("gauge", _RANK, text, _of_ranks(*path))


def _info(kind: Literal["counter", "gauge"], text: str, *path: str) -> MetricDoc:
    return MetricDoc(kind, (), text, _of_sidecar(*path))


_NAMED = {
    "packs_published": _counter("Packs that were finished.", "packs_published"),
    "packs_acknowledged": _counter("Packs that the trainer took.", "packs_acknowledged"),
    "tokens": _counter("Tokens in finished packs.", "tokens"),
    "images": _counter("Images in finished packs.", "images"),
    "pixel_bytes": _counter("Bytes of pixels in finished packs, as uint8.", "pixel_bytes"),
    "pack_seconds": MetricDoc(
        "histogram", _RANK, "Work of the producer for a pack: planning, reading, decoding.",
        _of_histogram("pack_seconds", "work_seconds"),
    ),
    "trainer_stall_seconds": MetricDoc(
        "histogram", _RANK,
        "Stall of the trainer for a pack, as it measures itself: waiting, reading, converting.",
        _of_histogram("stall_seconds", "trainer_stall_seconds"),
    ),
    "trainer_wait_seconds": _counter(
        "Time that a trainer was connected and the ring was empty.", "trainer_wait_seconds"
    ),
    "trainer_awaited_seconds": _gauge(
        "How long the ring has been empty for a connected trainer; 0 while a pack is ready.", "awaited_seconds"
    ),
    "ring_wait_seconds": _counter("Time that the producer waited for room in the ring.", "ring_wait_seconds"),
    "decode_seconds": _counter("Decoding and resizing, summed over threads.", "decode_seconds"),
    "storage_seconds": _counter("Time that requests and reads of the data took.", "storage", "seconds"),
    "read_bytes": _counter("Bytes read of the data.", "storage", "read_bytes"),
    "storage_requests": MetricDoc(
        "counter", ("rank", "operation"), "Requests to the storage of the data.",
        _of_tables("storage", "requests"),
    ),
    "storage_retries": MetricDoc(
        "counter", ("rank", "cause"),
        "Requests made again: store, connection, unreachable, credentials, file_system.",
        _of_tables("storage", "retries"),
    ),
    "drops": MetricDoc(
        "counter", ("rank", "group", "reason"), "Rows not trained on; the reasons are those of `bagelplane plan`.",
        _of_tables("drops_here"),
    ),
    "restarts": _counter("Restarts of the producer.", "restarts"),
    "attached": _gauge("1 while a trainer is connected.", "attached"),
    "next_step": _gauge("First pack that the trainer has not taken.", "next_step"),
    "fill_ratio": _gauge("Tokens of a finished pack against maxTokens, mean.", "fill"),
    "ring_used_bytes": _gauge("Bytes of packs in the ring that the trainer has not taken.", "ring", "used_bytes"),
    "ring_capacity_bytes": _gauge("Size of the ring.", "ring", "capacity_bytes"),
    "ring_packs": _gauge("Packs in the ring that the trainer has not taken.", "ring", "ready_packs"),
    "snapshots_completed": _info("counter", "Snapshots completed.", "snapshots", "completed"),
    "snapshots_failed": _info("counter", "States that could not be written.", "snapshots", "failed"),
    "snapshots_given_up": _info(
        "counter", "Snapshots given up because the store was behind.", "snapshots", "given_up"
    ),
    "snapshot_written_bytes": _info(
        "counter", "Bytes written to the snapshots' store.", "snapshots", "written_bytes"
    ),
    "snapshot_retries": MetricDoc(
        "counter", ("cause",), "Requests to the snapshots' store made again.",
        lambda status: _flatten(status["snapshots"]["retries"]),
    ),
    "snapshot_timestamp_seconds": _info(
        "gauge", "When the newest snapshot was complete, since the epoch; absent before.",
        "snapshots", "last_unix_seconds",
    ),
    "snapshot_write_seconds": _info(
        "gauge", "How long its last state took to write; absent before.", "snapshots", "last_write_seconds"
    ),
    "snapshots_waiting": _info("gauge", "States that are not written yet.", "snapshots", "waiting"),
    "lineage_packs": _info(
        "counter", "Packs whose rows are in the log of rows.", "snapshots", "lineage", "written_packs"
    ),
    "lineage_waiting_packs": _info(
        "gauge", "Packs whose rows are not in the log yet.", "snapshots", "lineage", "waiting_packs"
    ),
    "lineage_lost_packs": _info(
        "counter", "Packs that the log lacks, because the store was behind.", "snapshots", "lineage", "lost_packs"
    ),
    "lineage_failed": _info(
        "counter", "Attempts to write the log that failed.", "snapshots", "lineage", "failed"
    ),
    "known_bad_images": _info(
        "gauge", "Images known to open and not to decode (profile Automodel).", "known_bad_images"
    ),
    "ready": _info("gauge", "1 when packs can be taken.", "ready"),
    "start_timestamp_seconds": _info(
        "gauge", "When the sidecar started, since the epoch.", "started_unix_seconds"
    ),
}  # fmt: skip

METRICS: Mapping[str, MetricDoc] = {PREFIX + name: doc for name, doc in _NAMED.items()}


class StatusCollector(Collector):
    """Prometheus' side: asks for a status each time that it is scraped."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, doc in METRICS.items():
            yield _family(name, doc, doc.samples(status))


def _family(name: str, doc: MetricDoc, samples: Iterable[Sample]) -> Metric:
    if doc.kind == "histogram":
        histogram = HistogramMetricFamily(name, doc.text, labels=doc.labels)
        for labels, (buckets, total) in samples:
            histogram.add_metric(labels, buckets, total)
        return histogram
    family = (CounterMetricFamily if doc.kind == "counter" else GaugeMetricFamily)(
        name, doc.text, labels=doc.labels
    )
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


def exposed_names(name: str, doc: MetricDoc) -> tuple[str, ...]:
    """As Prometheus stores it."""
    if doc.kind == "histogram":
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count")
    return (f"{name}_total",) if doc.kind == "counter" else (name,)
