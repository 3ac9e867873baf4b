"""Snapshots on real S3 servers: one with conditional writes and one without; and what happens when it goes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from bagelplane.sidecar.store import open_snapshot_store
from bagelplane.spec import BagelDataset
from tests.integration.sidecar_harness import Sidecar, digest, make_dataset, undisturbed, wait_for
from tests.services.s3 import S3Server, serve_rclone, serve_versitygw

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first use may build versitygw


@pytest.fixture(params=[serve_versitygw, serve_rclone])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Server]:
    serve: Callable[[Path], AbstractContextManager[S3Server]] = request.param
    with serve(tmp_path / "s3") as running:
        yield running


def dataset_on(server: S3Server, every: int) -> BagelDataset:
    data = make_dataset(snapshots=Path("unused"), every=every, keep=2).to_mapping()
    data["spec"]["snapshots"]["uri"] = f"s3://{server.bucket}/snapshots/"
    data["spec"]["storage"] = {"endpointURL": server.url, "credentialsDir": str(server.credentials_dir)}
    return BagelDataset.from_mapping(data)


def test_a_run_goes_on_from_its_snapshot_on_s3(server: S3Server, tmp_path: Path) -> None:
    dataset = dataset_on(server, every=5)
    store = open_snapshot_store(dataset)
    assert store is not None
    for begin, end in ((0, 13), (13, 26)):
        sidecar = Sidecar(tmp_path, dataset)
        try:
            sidecar.wait_serving()
            with sidecar.reader(0, 2) as first, sidecar.reader(1, 2) as second:
                seen: list[list[str]] = [[], []]
                for _ in range(end - begin):
                    seen[0].append(digest(*first.next_pack()))
                    seen[1].append(digest(*second.next_pack()))
            assert seen == [undisturbed(dataset, rank, 2, end)[begin:] for rank in (0, 1)]
            assert sidecar.terminate() == 0, sidecar.tail()
        finally:
            sidecar.kill()
        entries = wait_for(store.entries, "snapshots")
        assert entries[-1].step == end
        assert len(entries) == 2, "keepLast"
        assert all(entry.condition == "complete" for entry in entries)


def test_a_store_that_is_gone_stops_neither_training_nor_the_end(tmp_path: Path) -> None:
    with ExitStack() as server_life, ExitStack() as sidecar_life:
        dataset = dataset_on(server_life.enter_context(serve_rclone(tmp_path / "s3")), every=3)
        sidecar = Sidecar(tmp_path, dataset, grace_seconds=6.0)
        sidecar_life.callback(sidecar.kill)
        sidecar.wait_serving()
        with sidecar.reader() as reader:
            digests = [digest(*reader.next_pack()) for _ in range(4)]
            wait_for(lambda: reader.status()["snapshots"]["last_step"] == 3, "the first snapshot")
            server_life.close()
            digests += [digest(*reader.next_pack()) for _ in range(46)]
            assert digests == undisturbed(dataset, 0, 1, 50)
            assert reader.status()["snapshots"]["last_step"] == 3
            begun = time.monotonic()
            assert sidecar.terminate() == 0, sidecar.tail()
        assert time.monotonic() - begun < 6.0
        assert "snapshot of step 50, rank 0: " in sidecar.log.read_text(), "the loss is said"
        assert not sidecar.directory.exists()
