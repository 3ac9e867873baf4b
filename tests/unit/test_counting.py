"""Counts of packs, costs and drops: nothing is lost, nothing goes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bagelplane.costs import Costs
from bagelplane.errors import ProtocolError
from bagelplane.shm.protocol import CLIENT_MESSAGES, Ack, decode, encode
from bagelplane.sidecar.tally import PACK_SECONDS, Histogram, Tally
from bagelplane.storage import open_storage


def published(
    costs: Mapping[str, Any], drops: Mapping[str, Mapping[str, int]], **changes: Any
) -> dict[str, Any]:
    """A producer's frame, as far as it is counted."""
    return {
        "tokens": 100, "images": 2, "pixel_bytes": 300, "ring_wait_seconds": 0.5, "work_seconds": 0.2,
        "costs": costs, "drops": drops, **changes,
    }  # fmt: skip


def costs_after(packs: int) -> dict[str, Any]:
    costs = Costs()
    for _ in range(packs):
        costs.decoded(0.25)
        costs.requested("read", 0.125)
        costs.read(1000)
        costs.retried("store")
    return costs.as_json()


def test_a_producer_that_begins_anew_adds_to_the_counts_of_the_one_before() -> None:
    tally = Tally()
    for _ in range(2):  # two producers, three packs each
        tally.begin({})
        for packs in (1, 2, 3):
            tally.publish(published(costs_after(packs), {}))
    assert (tally.published, tally.tokens, tally.images, tally.pixel_bytes) == (6, 600, 12, 1800)
    assert (tally.decode_seconds, tally.storage_seconds, tally.read_bytes) == (1.5, 0.75, 6000)
    assert (tally.requests, tally.retries) == ({"read": 6}, {"store": 6})


def test_drops_are_counted_here_though_the_runs_figure_goes_back() -> None:
    tally = Tally()
    tally.begin({"t2i": {"broken": 40}})  # resumed: 40 rows were dropped by somebody else
    for total in (40, 42, 45):
        tally.publish(published(costs_after(1), {"t2i": {"broken": total}}))
    assert tally.drops == {("t2i", "broken"): 5}
    tally.begin({"t2i": {"broken": 42}})  # its producer died, the next one makes a pack again
    tally.publish(published(costs_after(1), {"t2i": {"broken": 45}, "edit": {"late": 1}}))
    assert tally.drops == {("t2i", "broken"): 8, ("edit", "late"): 1}
    assert tally.run_drops == {"t2i": {"broken": 45}, "edit": {"late": 1}}


def test_a_histogram_puts_a_value_into_the_first_bucket_whose_bound_it_does_not_pass() -> None:
    histogram = Histogram(PACK_SECONDS)
    for value in (0.0, 0.05, 0.06, 60.0, 61.0):
        histogram.add(value)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert sum(histogram.counts) == 5
    assert histogram.sum == pytest.approx(121.11)


def test_counts_of_many_threads_are_all_there() -> None:
    costs = Costs()

    def count() -> None:
        for _ in range(2000):
            costs.decoded(0.5)
            costs.requested("read", 0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = costs.as_json()
    assert (counted["decode_seconds"], counted["storage_seconds"]) == (4000.0, 4000.0)
    assert counted["requests"] == {"read": 8000}


def test_storage_counts_the_bytes_that_it_reads_and_writes_however_they_are_read(tmp_path: Path) -> None:
    storage, uri = open_storage(), str(tmp_path / "file")
    storage.write_bytes(uri, b"x" * 300_000)
    assert len(storage.read_bytes(uri)) == 300_000
    with storage.open_binary(uri) as file:
        assert len(file.read(250_000)) == 250_000
        file.seek(0)
        assert len(file.read()) == 300_000
    counted = storage.costs.as_json()
    assert counted["written_bytes"] == 300_000
    assert 850_000 <= counted["read_bytes"] < 900_000, "what buffering reads beyond is bytes too"
    assert counted["requests"] == {"write": 1, "read": 2, "look_up": 1}
    assert counted["storage_seconds"] > 0
    assert json.loads(json.dumps(counted)) == counted


def test_an_acknowledgement_may_tell_of_the_stall_and_never_of_less_than_none() -> None:
    assert decode(encode(Ack(3, 0.25))[4:], CLIENT_MESSAGES) == Ack(3, 0.25)
    old = encode(Ack(3)).replace(b"stalled_seconds", b"stalled_decades")
    with pytest.raises(ProtocolError, match="unknown field"):
        decode(old[4:], CLIENT_MESSAGES)
    with pytest.raises(ProtocolError, match="negative time"):
        decode(encode(Ack(3)).replace(b"\xcb" + bytes(8), b"\xcb\xbf\xf0" + bytes(6))[4:], CLIENT_MESSAGES)
