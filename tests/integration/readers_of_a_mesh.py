"""Processes of a job with a real DeviceMesh, for test_data_parallel.py: each reads packs, one line a pack.

python readers_of_a_mesh.py STORE DIRECTORY FOLDER RANK...

Torch is imported once and the processes are forked from here (eight imports take minutes of two cores); they end with
this one. The store is a file, so that the others miss nothing of one that is killed. With STORE "alone" a process is
one that came back: it cannot join the others' group again, so it is told its place. FOLDER has, by rank, pid-N (written
here), record-N (step and digest of each pack) and allowed-N (packs that it may have taken by now; the test's).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bagelplane.client import NumpyReader, PackedLoader
from tests.integration.sidecar_harness import digest

TIMEOUT_SECONDS = 150.0
WORLD_SIZE, READERS = 8, 4
_PR_SET_PDEATHSIG = 1


def open_reader(store: str, directory: str, rank: int) -> NumpyReader:
    if store == "alone":
        return NumpyReader(
            directory, dp_rank=rank // READERS, dp_size=WORLD_SIZE // READERS, readers=READERS,
            timeout_seconds=TIMEOUT_SECONDS,
        )  # fmt: skip
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    mesh = init_device_mesh("cpu", (WORLD_SIZE // READERS, READERS), mesh_dim_names=("dp", "tp"))
    reader = NumpyReader(directory, mesh=mesh, timeout_seconds=TIMEOUT_SECONDS)
    assert PackedLoader(directory, mesh=mesh).place == reader.place
    # A sub-mesh alone says the rank; who else reads is learned from the others.
    alone = PackedLoader(directory, mesh=mesh["dp"], timeout_seconds=TIMEOUT_SECONDS)
    assert (alone.place.rank, alone.place.world_size, alone.place.readers) == (reader.place.rank, 2, None)
    alone._meet()
    assert alone.place == reader.place
    return reader


def read_packs(store: str, directory: str, folder: Path, rank: int) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in places.items()})
    reader = open_reader(store, directory, rank)
    record, allowed = folder / f"record-{rank}", folder / f"allowed-{rank}"
    taken = len(record.read_text().splitlines()) if record.exists() else 0
    with record.open("a") as file:
        while True:
            while taken >= int(allowed.read_text() or 0):
                time.sleep(0.02)
            pack, images = reader.next_pack()
            file.write(f"{pack.step} {digest(pack, images)}\n")
            file.flush()
            taken += 1


def main() -> None:
    store, directory, folder, *ranks = sys.argv[1:]
    parent = os.getpid()
    for rank in map(int, ranks):
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            try:
                if os.getppid() == parent:
                    read_packs(store, directory, Path(folder), rank)
            except BaseException as error:  # noqa: BLE001 - the test reads it
                print(f"process {rank}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        (Path(folder) / f"pid-{rank}").write_text(str(pid))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
