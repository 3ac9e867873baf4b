"""`bagelplane run` and `PackedLoader`: every recorded stream comes out of the ring to the bit, from disk and S3."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bagelplane.client import PackedLoader
from bagelplane.storage import join_uri, open_storage
from tests.golden.recordings import DECLARABLE, Recording, load_recording, resource_of
from tests.integration.sidecar_harness import DEADLINE_SECONDS, Process, wait_for
from tests.services.s3 import S3Server, serve_versitygw

pytestmark = pytest.mark.slow


@contextmanager
def running_sidecar(folder: Path, dataset: Any, ranks: int) -> Iterator[Path]:
    """The command as a user starts it; its run directory. It has to end with 0 when told to."""
    (folder / "dataset.yaml").write_text(json.dumps(dataset.to_mapping()))
    directory = folder / "run"
    arguments = ["run", str(folder / "dataset.yaml"), "--dir", str(directory), "--ranks", str(ranks)]
    sidecar = Process(folder / "sidecar.log", "bagelplane.cli.app", *arguments)

    def serving() -> bool:
        assert sidecar.popen.poll() is None, sidecar.tail()
        return "serving" in sidecar.log.read_text()

    try:
        wait_for(serving, f"the sidecar to serve; its log is {sidecar.log}")
        yield directory
        sidecar.popen.send_signal(signal.SIGTERM)
        assert sidecar.wait() == 0, sidecar.tail()
    finally:
        sidecar.kill()


def check_all_packs(recording: Recording, directory: Path) -> None:
    """The ranks in turn, as one trainer a rank would take them."""
    world_size = len(recording.ranks)
    with ExitStack() as loaders_life:
        loaders = [
            loaders_life.enter_context(
                PackedLoader(
                    directory,
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    timeout_seconds=DEADLINE_SECONDS,
                )
            )
            for rank in range(world_size)
        ]
        for step in range(len(recording.ranks[0])):
            for rank, loader in enumerate(loaders):
                recording.check(rank, step, next(loader))


@pytest.mark.parametrize("name", DECLARABLE)
def test_every_recorded_pack_comes_through_the_ring(name: str, tmp_path: Path) -> None:
    recording = load_recording(name)
    # A ring of two packs, so that slots are used again and again.
    dataset = resource_of(recording, dataplane={"ring": {"packs": 2}, "decodeThreads": 2})
    with running_sidecar(tmp_path, dataset, len(recording.ranks)) as directory:
        check_all_packs(recording, directory)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with serve_versitygw(tmp_path_factory.mktemp("s3")) as running:
        storage = open_storage(running.settings)
        for name in ("a_default", "odd_default"):
            data = load_recording(name).data
            for file in sorted(path for path in data.rglob("*") if path.is_file()):
                uri = join_uri(f"s3://{running.bucket}/{data.name}", str(file.relative_to(data)))
                storage.write_bytes(uri, file.read_bytes())
        yield running


@pytest.mark.timeout(600)  # the first use may build versitygw
@pytest.mark.parametrize("name", ["a_default", "odd_default"])
def test_every_recorded_pack_comes_from_s3(name: str, server: S3Server, tmp_path: Path) -> None:
    recording = load_recording(name)
    dataset = resource_of(
        recording,
        f"s3://{server.bucket}/{recording.data.name}",
        storage={"endpointURL": server.url, "credentialsDir": str(server.credentials_dir)},
    )
    with running_sidecar(tmp_path, dataset, len(recording.ranks)) as directory:
        check_all_packs(recording, directory)
